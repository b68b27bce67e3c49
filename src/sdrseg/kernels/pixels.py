"""Cross-entropy and unbiased distillation, summed over all pixels: one kernel forward, one back.

The formulas of losses/cross_entropy.py and losses/distillation.py make some twenty passes over the logits of all pixels
and keep several of their results for the way back. Here nothing is kept but the logits.
"""

from __future__ import annotations

from functools import cache
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from sdrseg.kernels import runs


def fits(logits: Tensor, teacher: Tensor | None = None) -> bool:
    """Whether the kernels are for these logits: float32 on a GPU and channels last, computed kernel by kernel."""
    if not logits.is_cuda or torch.compiler.is_compiling():
        return False
    both = [logits] if teacher is None else [logits, teacher]
    laid = all(z.dtype == torch.float32 and z.is_contiguous(memory_format=torch.channels_last) for z in both)
    free = teacher is None or (not teacher.requires_grad and teacher.device == logits.device)
    return laid and free and logits.numel() > 0 and _run(logits.device)


@cache
def _run(device: torch.device) -> bool:
    def attempt() -> None:
        logits = torch.zeros(1, 3, 1, 1, device=device, requires_grad=True)
        somewhere = torch.zeros(1, 1, 1, dtype=torch.uint8, device=device)
        with torch.enable_grad():
            loss = cross_entropy_sum(logits, somewhere, 2)
            loss = loss + distillation_sum(logits, logits.detach()[:, :2], somewhere == 0, 1.0)
            torch.autograd.grad(loss, logits)

    return runs("Losses over pixels", attempt)


def cross_entropy_sum(logits: Tensor, labels: Tensor, n_old: int) -> Tensor:
    """Σ of losses.cross_entropy.unbiased_cross_entropy_sums."""
    apply: Any = CrossEntropy.apply
    return cast(Tensor, apply(logits, labels.contiguous(), n_old))


def distillation_sum(logits: Tensor, teacher: Tensor, keep: Tensor, alpha: float) -> Tensor:
    """Σ of losses.distillation.unbiased_distillation_sums."""
    apply: Any = Distillation.apply
    return cast(Tensor, apply(logits, teacher, keep.contiguous().view(torch.uint8), alpha))


class CrossEntropy(torch.autograd.Function):
    """Of logits (B, K, H, W) and labels (B, H, W)."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, n_old: int) -> Tensor:
        from sdrseg.kernels.triton_pixels import cross_entropy, launch

        ctx.save_for_backward(logits, labels)
        ctx.n_old = n_old
        return launch(cross_entropy, logits, (labels,), None, n_old)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        from sdrseg.kernels.triton_pixels import cross_entropy, launch

        logits, labels = ctx.saved_tensors
        return launch(cross_entropy, logits, (labels,), gradient, ctx.n_old), None, None


class Distillation(torch.autograd.Function):
    """Of the student's logits (B, K, H, W), the teacher's (B, n_old, H, W) and the pixels (B, H, W) that take part."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, teacher: Tensor, keep: Tensor, alpha: float) -> Tensor:
        from sdrseg.kernels.triton_pixels import distillation, launch

        ctx.save_for_backward(logits, teacher, keep)
        ctx.alpha = alpha
        return launch(distillation, logits, (teacher, keep), None, teacher.shape[1], alpha)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        from sdrseg.kernels.triton_pixels import distillation, launch

        logits, teacher, keep = ctx.saved_tensors
        made = launch(distillation, logits, (teacher, keep), gradient, teacher.shape[1], ctx.alpha)
        return made, None, None, None
