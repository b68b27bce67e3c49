"""Unbiased cross-entropy and unbiased distillation of the same logits."""

from __future__ import annotations

import torch
from torch import Tensor

from sdrseg.kernels.pixels import loss_sums
from sdrseg.losses.cross_entropy import counted


def unbiased_sums(
    z: Tensor, labels: Tensor, n_old: int, t: Tensor, keep: Tensor, *, count_void: bool = False
) -> tuple[Tensor, Tensor]:
    """The sums of UNCE (of CE, with n_old = 1), and of UNKD with the teacher's logits t."""
    ce, kd = loss_sums(z, labels, n_old, t, keep)
    return torch.stack([ce, counted(labels, count_void).to(ce.dtype)]), torch.stack([kd, keep.sum().to(kd.dtype)])
