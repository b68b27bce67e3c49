"""Bilinear upsampling, in one kernel forward and one backward.

torch's takes ten times as long as writing its result does, wants float32 to keep its precision, so that what is bf16 is
copied before and after, and its backward adds in an order that changes from run to run. Ours reads and writes what is
wanted, computes in float32, and adds in a fixed order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from sdrseg.kernels import enabled, on_gpu, runs
from sdrseg.kernels.plain import at_least_float32

KINDS = (torch.float32, torch.bfloat16, torch.float16)
FARTHEST = 32
"""The largest scale factor. (The kernel's code grows with it.)"""


def upsample(
    maps: Tensor, size: tuple[int, int], *, align_corners: bool = False, kind: torch.dtype = torch.float32
) -> Tensor:
    """Bilinear upsampling, computed in float32 and given in this precision. What is float64 stays so.

    A compiler would take it apart into gathers, and its gradient into single additions; so there it is one operation
    that is not looked into.
    """
    kind = torch.float64 if maps.dtype == torch.float64 else kind
    if (enabled("upsampling") and torch.compiler.is_dynamo_compiling()) or _fits(maps, maps.shape[-2:], size):
        return cast(Tensor, upsampled(maps, *size, align_corners, kind))
    return _plain(maps, *size, align_corners).to(kind)


def _plain(maps: Tensor, height: int, width: int, align_corners: bool) -> Tensor:
    return F.interpolate(at_least_float32(maps), size=(height, width), mode="bilinear", align_corners=align_corners)


def _fits(given: Tensor, small: Sequence[int], large: Sequence[int]) -> bool:
    """Whether the kernels are for maps of these sizes, and run where `given` is: the maps, or the gradient."""
    if not on_gpu(given) or given.dtype not in KINDS or given.numel() == 0:
        return False
    larger = all(1 < a <= b <= FARTHEST * a for a, b in zip(small, large, strict=True))
    return larger and runs("upsampling", given.device, _attempt)


def _attempt(device: torch.device) -> None:
    from sdrseg.kernels.triton_upsampling import launch

    for kind in KINDS:
        maps = torch.zeros(1, 3, 2, 2, device=device, dtype=kind)
        for to, align_corners in ((torch.float32, False), (kind, True)):
            launch(launch(maps, (8, 8), align_corners, to), (2, 2), align_corners, kind, backward=True)


@torch.library.custom_op("sdrseg::upsample", mutates_args=())
def upsampled(maps: Tensor, height: int, width: int, align_corners: bool, kind: torch.dtype) -> Tensor:
    """Maps (B, C, h, w) to (B, C, height, width), channels last."""
    if _fits(maps, maps.shape[-2:], (height, width)):
        from sdrseg.kernels.triton_upsampling import launch

        return launch(maps.contiguous(memory_format=torch.channels_last), (height, width), align_corners, kind)
    return _plain(maps, height, width, align_corners).to(kind).contiguous(memory_format=torch.channels_last)


@torch.library.custom_op("sdrseg::upsample_backward", mutates_args=())
def upsampled_backward(gradient: Tensor, height: int, width: int, align_corners: bool, kind: torch.dtype) -> Tensor:
    """The gradient of maps (B, C, height, width) of this kind, from that of the result."""
    gradient = gradient.contiguous(memory_format=torch.channels_last)
    if _fits(gradient, (height, width), gradient.shape[-2:]):
        from sdrseg.kernels.triton_upsampling import launch

        return launch(gradient, (height, width), align_corners, kind, backward=True)
    back = torch.ops.aten.upsample_bilinear2d_backward(
        at_least_float32(gradient), list(gradient.shape[-2:]), [*gradient.shape[:2], height, width], align_corners
    )
    return cast(Tensor, back).to(kind).contiguous(memory_format=torch.channels_last)


@upsampled.register_fake
@upsampled_backward.register_fake
def _(given: Tensor, height: int, width: int, align_corners: bool, kind: torch.dtype) -> Tensor:
    like = given.new_empty(*given.shape[:2], height, width, dtype=kind)
    return like.contiguous(memory_format=torch.channels_last)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    given, _, _, ctx.align_corners, _ = inputs
    ctx.size, ctx.kind = given.shape[-2:], given.dtype


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    made = upsampled_backward(gradient, *ctx.size, ctx.align_corners, ctx.kind)
    return cast(Tensor, made), None, None, None, None


def _double_backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    """The gradient of a gradient is an upsampling again."""
    made = upsampled(gradient, *ctx.size, ctx.align_corners, ctx.kind)
    return cast(Tensor, made), None, None, None, None


upsampled.register_autograd(_backward, setup_context=_remember)
upsampled_backward.register_autograd(_double_backward, setup_context=_remember)
