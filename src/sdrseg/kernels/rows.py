"""Sums over the channels of each position of the features, and over the positions of each class.

The plain versions make dozens of passes over the features, forward and backward, most of them in float32. The kernels
read the features in their own precision, once for each kind of sum, and write each gradient once.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from sdrseg.kernels import on_gpu, runs
from sdrseg.kernels.plain import at_least_float32, rows_of


def reused(features: Tensor) -> Tensor:
    """Features (B, C, h, w) for several of these functions: what each would convert is converted once, and gradients
    are added before they are rounded."""
    return features if _fits(features) else at_least_float32(features)


def squared_norms(features: Tensor) -> Tensor:
    """Σ f² of each position, (B, h·w)."""
    if _fits(features):
        return _row_sums(features).square
    norms: Tensor = torch.linalg.vector_norm(at_least_float32(features), dim=1)
    return norms.square().flatten(1)


def largest(features: Tensor) -> tuple[Tensor, Tensor]:
    """The largest channel of each position and the number of channels with this value, both (B, h·w)."""
    if _fits(features):
        return _row_sums(features)[:2]
    x = rows_of(at_least_float32(features))
    top = x.amax(2)
    return top, (x.detach() == top.detach()[:, :, None]).sum(2).to(x.dtype)


def exponential_ratios(features: Tensor, scale: Tensor, floor: float) -> tuple[Tensor, Tensor]:
    """Σ exp(f/s) / max(Σ f/s, floor) and Σ f of each position with its own scale s; all (B, h·w)."""
    if _fits(features):
        factor = 1 / scale
        total = _row_sums(features).total
        return _exponential_sums(features, factor) / (total * factor).clamp_min(floor), total
    x = rows_of(at_least_float32(features))
    bar = x / scale[:, :, None]
    return bar.exp().sum(2) / bar.sum(2).clamp_min(floor), x.sum(2)


def class_sums(features: Tensor, labels: Tensor, classes: int) -> tuple[Tensor, Tensor, Tensor]:
    """For each image and class: positions (B, K), Σ f (B, K, C) and Σ f² (B, K). Labels (B, h, w)."""
    features = reused(features)
    squares = squared_norms(features)
    sums = _sums_by_index_add if features.device.type == "cpu" else _sums_by_matmul
    return sums(features, squares, labels.flatten(1), classes)


def _sums_by_matmul(features: Tensor, squares: Tensor, labels: Tensor, classes: int) -> tuple[Tensor, Tensor, Tensor]:
    """One matrix product per image, membership (K, h·w) times features (h·w, C): the same in every run on a GPU."""
    member = labels[:, None, :] == torch.arange(classes, device=labels.device)[:, None]
    ones = member.to(squares.dtype)
    with torch.autocast(features.device.type, enabled=False):  # it would round to half precision
        return ones.sum(2), _class_totals(features, member), (ones @ squares[:, :, None])[:, :, 0]


def _sums_by_index_add(
    features: Tensor, squares: Tensor, labels: Tensor, classes: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Add each position to its class: faster on a CPU for any number of classes."""
    x = rows_of(features)
    images, _, channels = x.shape
    slots = classes + 1  # the last is for void
    image = torch.arange(images, device=x.device)[:, None]
    index = (image * slots + labels.long().clamp_max(classes)).flatten()
    empty = x.new_zeros(images * slots)
    total = x.new_zeros(images * slots, channels).index_add(0, index, x.flatten(0, 1))
    counts = empty.index_add(0, index, torch.ones_like(index, dtype=x.dtype))
    square = empty.index_add(0, index, squares.flatten())
    counts, total, square = (t.view(images, slots, *t.shape[1:])[:, :classes] for t in (counts, total, square))
    return counts, total, square


def _class_totals(features: Tensor, member: Tensor) -> Tensor:
    """Σ f of the positions of each class, (B, K, C) in at least float32. `member` (B, K, h·w) bool: each position is of
    one class at most."""
    if _fits(features):
        apply: Any = _Totals.apply
        return cast(Tensor, apply(features, member))
    x = rows_of(at_least_float32(features))
    with torch.autocast(features.device.type, enabled=False):  # it would round to half precision
        return member.to(x.dtype) @ x


class _RowSums(NamedTuple):
    """For each position, (B, h·w) in float32: the largest channel, how many channels equal it, Σ f and Σ f²."""

    top: Tensor
    ties: Tensor
    total: Tensor
    square: Tensor


def _fits(features: Tensor) -> bool:
    """Whether the kernels support these features: on a GPU, channels last; compilers fuse the plain versions."""
    if not on_gpu(features) or torch.compiler.is_compiling():
        return False
    supported = features.is_contiguous(memory_format=torch.channels_last) and features.dtype != torch.float64
    return supported and features.numel() > 0 and runs("rows", features.device, _attempt)


def _attempt(device: torch.device) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        features = torch.ones(1, 3, 2, 1, device=device, dtype=dtype).contiguous(memory_format=torch.channels_last)
        features.requires_grad_()
        rows = _row_sums(features)
        total = rows.square + rows.top + _exponential_sums(features, torch.ones_like(rows.top))
        member = torch.ones(1, 1, 2, device=device, dtype=torch.bool)
        apply: Any = _Totals.apply
        torch.autograd.grad(total.sum() + apply(features, member).sum(), features)


def _row_sums(features: Tensor) -> _RowSums:
    apply: Any = _Rows.apply
    return _RowSums(*apply(features))


def _exponential_sums(features: Tensor, factor: Tensor) -> Tensor:
    """Σ exp(r f) of each position with its own factor r, (B, h·w)."""
    apply: Any = _Exponentials.apply
    return cast(Tensor, apply(features, factor.contiguous()))


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, features: Tensor) -> tuple[Tensor, ...]:
        from sdrseg.kernels.triton_rows import launch, rows

        sums = [_per_position(features) for _ in _RowSums._fields]
        launch(rows, features, *sums)
        ctx.save_for_backward(features, *sums[:2])
        ctx.mark_non_differentiable(sums[1])
        return tuple(sums)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_top: Tensor, _: Tensor, grad_total: Tensor, grad_square: Tensor) -> Tensor:
        from sdrseg.kernels.triton_rows import launch, rows_backward

        features, top, ties = ctx.saved_tensors
        result = torch.empty_like(features)
        launch(rows_backward, features, top, grad_top / ties, grad_total.contiguous(), grad_square.contiguous(), result)
        return result


class _Exponentials(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, features: Tensor, factor: Tensor) -> Tensor:
        from sdrseg.kernels.triton_rows import exponentials, launch

        total, weighted = _per_position(features), _per_position(features)
        launch(exponentials, features, factor, total, weighted)
        ctx.save_for_backward(features, factor, weighted)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_total: Tensor) -> tuple[Tensor, Tensor]:
        from sdrseg.kernels.triton_rows import exponentials_backward, launch

        features, factor, weighted = ctx.saved_tensors
        result = torch.empty_like(features)
        launch(exponentials_backward, features, factor, grad_total.contiguous(), result)
        return result, grad_total * weighted


class _Totals(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, features: Tensor, member: Tensor) -> Tensor:
        ctx.save_for_backward(member)
        ctx.like = features.dtype, features.shape
        rows = features.flatten(2).transpose(1, 2)
        with torch.autocast(features.device.type, enabled=False):
            if features.is_cuda and features.dtype != torch.float32:  # products with 0 or 1 are exact
                return torch.bmm(member.to(features.dtype), rows, out_dtype=torch.float32)
            return member.float() @ rows.float()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """Each position has the gradient of its class."""
        (member,) = ctx.saved_tensors
        dtype, shape = ctx.like
        with torch.autocast(gradient.device.type, enabled=False):
            result = member.to(dtype).transpose(1, 2) @ gradient.to(dtype)
        return result.transpose(1, 2).unflatten(2, shape[2:]), None


def _per_position(features: Tensor) -> Tensor:
    return features.new_empty(len(features), features.shape[2] * features.shape[3], dtype=torch.float32)
