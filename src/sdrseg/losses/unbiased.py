"""Unbiased cross-entropy and unbiased distillation of the same logits: together where one kernel does both."""

from __future__ import annotations

import torch
from torch import Tensor

from sdrseg.kernels import pixels
from sdrseg.losses.cross_entropy import counted, unbiased_cross_entropy_sums
from sdrseg.losses.distillation import unbiased_distillation_sums
from sdrseg.losses.pixels import at_least_float32


def unbiased_sums(
    z: Tensor, labels: Tensor, n_old: int, t: Tensor, keep: Tensor, *, count_void: bool = False
) -> tuple[Tensor, Tensor]:
    """The sums of UNCE (of CE, with n_old = 1), and of UNKD with the teacher's logits t."""
    z, t = at_least_float32(z), at_least_float32(t)
    if not pixels.fits(z, n_old, t):
        cross_entropy = unbiased_cross_entropy_sums(z, labels, n_old, count_void=count_void)
        return cross_entropy, unbiased_distillation_sums(z, t, keep)
    ce, kd = pixels.loss_sums(z, labels, n_old, t, keep).unbind()
    return torch.stack([ce, counted(labels, count_void).to(ce.dtype)]), torch.stack([kd, keep.sum().to(kd.dtype)])
