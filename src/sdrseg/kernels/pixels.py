"""Cross-entropy and unbiased distillation, summed over all pixels: one kernel forward and one backward for both.

The plain formulas read the logits of all pixels about twenty times, store several intermediate results for the backward
pass, and allocate one gradient each, as large as the logits. The kernels store only the logits and write one gradient.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from sdrseg.kernels import on_gpu, runs
from sdrseg.kernels.plain import at_least_float32, cross_entropy, unbiased_distillation


def cross_entropy_sum(logits: Tensor, labels: Tensor, hidden: int) -> Tensor:
    """Σ over labelled pixels of the cross-entropy, where background stands for `hidden` channels."""
    z = at_least_float32(logits)
    if _fits(z, hidden, None):
        labels = labels.contiguous()
        return cast(Tensor, pixel_losses(z, labels, hidden, None, labels))[0]
    return cross_entropy(z, labels, hidden).sum()


def loss_sums(logits: Tensor, labels: Tensor, hidden: int, teacher: Tensor, keep: Tensor) -> tuple[Tensor, Tensor]:
    """The same, and Σ over the pixels in `keep` of the unbiased distillation of a teacher's logits."""
    z, t = at_least_float32(logits), at_least_float32(teacher)
    if _fits(z, hidden, t):
        ce, kd = cast(Tensor, pixel_losses(z, labels.contiguous(), hidden, t, keep.contiguous())).unbind()
        return ce, kd
    return cross_entropy_sum(z, labels, hidden), torch.where(keep, unbiased_distillation(z, t), 0).sum()


def _fits(logits: Tensor, hidden: int, teacher: Tensor | None) -> bool:
    """Whether the kernels support these logits: float32 on a GPU and channels last."""
    if not on_gpu(logits) or logits.numel() == 0:
        return False
    both = [logits] if teacher is None else [logits, teacher]
    supported = all(z.dtype == torch.float32 and z.is_contiguous(memory_format=torch.channels_last) for z in both)
    if teacher is not None:
        supported = supported and not teacher.requires_grad and teacher.device == logits.device
        supported = supported and hidden in (1, teacher.shape[1])
    return supported and runs_on(logits.device)


def runs_on(device: torch.device) -> bool:
    return runs("pixels", device, _attempt)


def _attempt(device: torch.device) -> None:
    logits = torch.zeros(1, 3, 1, 1, device=device, requires_grad=True)
    labels = torch.zeros(1, 1, 1, dtype=torch.uint8, device=device)
    for teacher in (None, logits.detach()[:, :2]):
        torch.autograd.grad(pixel_losses(logits, labels, 2, teacher, labels).sum(), logits)


@torch.library.custom_op("sdrseg::pixel_losses", mutates_args=())
def pixel_losses(logits: Tensor, labels: Tensor, hidden: int, teacher: Tensor | None, keep: Tensor) -> Tensor:
    """Both sums, from logits (B, K, H, W), labels, the teacher's logits (B, n_old, H, W) and its pixels (B, H, W)."""
    from sdrseg.kernels.triton_pixels import launch

    return launch(logits, labels, hidden, teacher, keep)


@pixel_losses.register_fake
def _(logits: Tensor, labels: Tensor, hidden: int, teacher: Tensor | None, keep: Tensor) -> Tensor:
    return logits.new_empty(2)


@torch.library.custom_op("sdrseg::pixel_losses_backward", mutates_args=())
def pixel_losses_backward(
    logits: Tensor, labels: Tensor, hidden: int, teacher: Tensor | None, keep: Tensor, upstream: Tensor
) -> Tensor:
    """The gradient of the logits, from that of the two sums."""
    from sdrseg.kernels.triton_pixels import launch

    return launch(logits, labels, hidden, teacher, keep, upstream.contiguous())


@pixel_losses_backward.register_fake
def _(logits: Tensor, labels: Tensor, hidden: int, teacher: Tensor | None, keep: Tensor, upstream: Tensor) -> Tensor:
    return torch.empty_like(logits)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    logits, labels, ctx.hidden, teacher, keep = inputs
    ctx.save_for_backward(logits, labels, teacher, keep)


def _backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
    logits, labels, teacher, keep = ctx.saved_tensors
    gradient = pixel_losses_backward(logits, labels, ctx.hidden, teacher, keep, upstream)
    return cast(Tensor, gradient), None, None, None, None


pixel_losses.register_autograd(_backward, setup_context=_setup_context)
