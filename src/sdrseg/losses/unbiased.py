"""Unbiased cross-entropy and unbiased distillation of the same logits."""

from __future__ import annotations

import torch
from torch import Tensor

from sdrseg.kernels import pixels
from sdrseg.kernels.plain import at_least_float32
from sdrseg.losses.cross_entropy import counted, unbiased_cross_entropy_sums
from sdrseg.losses.distillation import unbiased_distillation_sums


def unbiased_sums(
    z: Tensor, labels: Tensor, n_old: int, t: Tensor, keep: Tensor, *, count_void: bool = False
) -> tuple[Tensor, Tensor]:
    """The sums of UNCE (of CE, with n_old = 1), and of UNKD with the teacher's logits t."""
    z, t = at_least_float32(z), at_least_float32(t)

    def plain() -> Tensor:
        cross_entropy = unbiased_cross_entropy_sums(z, labels, n_old)[0]
        return torch.stack([cross_entropy, unbiased_distillation_sums(z, t, keep)[0]])

    ce, kd = pixels.loss_sums(z, labels, n_old, t, keep, plain=plain).unbind()
    return torch.stack([ce, counted(labels, count_void).to(ce.dtype)]), torch.stack([kd, keep.sum().to(kd.dtype)])
