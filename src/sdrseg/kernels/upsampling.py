"""Bilinear upsampling, in one kernel forward and one backward.

torch's kernel takes ten times as long as writing its result, needs copies in float32 to keep its precision in bf16, and
sums in its backward in an order that changes from run to run. Ours reads and writes any of these types, computes in
float32 and sums in a fixed order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from sdrseg.compat import upsampling_gradient
from sdrseg.kernels import enabled, on_gpu, runs
from sdrseg.kernels.plain import at_least_float32

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LARGEST_SCALE = 32
"""The largest scale factor of the kernel, whose code grows with it."""


def upsample(
    maps: Tensor, size: tuple[int, int], *, align_corners: bool = False, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Bilinear upsampling, computed in float32 and returned as `dtype`; float64 stays float64.

    A compiler would turn it into gathers and its gradient into atomic additions, so compiled code calls it as one
    opaque operation.
    """
    dtype = torch.float64 if maps.dtype == torch.float64 else dtype
    if (enabled("upsampling") and torch.compiler.is_dynamo_compiling()) or _fits(maps, maps.shape[-2:], size):
        return cast(Tensor, upsampled(maps, *size, align_corners, dtype))
    return _plain(maps, *size, align_corners).to(dtype)


def _plain(maps: Tensor, height: int, width: int, align_corners: bool) -> Tensor:
    return F.interpolate(at_least_float32(maps), size=(height, width), mode="bilinear", align_corners=align_corners)


def _fits(tensor: Tensor, small: Sequence[int], large: Sequence[int]) -> bool:
    """Whether the kernels support these sizes, and the type and device of `tensor`: the maps, or the gradient."""
    if not on_gpu(tensor) or tensor.dtype not in DTYPES or tensor.numel() == 0:
        return False
    larger = all(1 < a <= b <= LARGEST_SCALE * a for a, b in zip(small, large, strict=True))
    return larger and runs("upsampling", tensor.device, _attempt)


def _attempt(device: torch.device) -> None:
    from sdrseg.kernels.triton_upsampling import launch

    for dtype in DTYPES:
        maps = torch.zeros(1, 3, 2, 2, device=device, dtype=dtype)
        for output, align_corners in ((torch.float32, False), (dtype, True)):
            launch(launch(maps, (8, 8), align_corners, output), (2, 2), align_corners, dtype, backward=True)


@torch.library.custom_op("sdrseg::upsample", mutates_args=())
def upsampled(maps: Tensor, height: int, width: int, align_corners: bool, dtype: torch.dtype) -> Tensor:
    """Maps (B, C, h, w) to (B, C, height, width), channels last."""
    if _fits(maps, maps.shape[-2:], (height, width)):
        from sdrseg.kernels.triton_upsampling import launch

        return launch(maps.contiguous(memory_format=torch.channels_last), (height, width), align_corners, dtype)
    return _plain(maps, height, width, align_corners).to(dtype).contiguous(memory_format=torch.channels_last)


@torch.library.custom_op("sdrseg::upsample_backward", mutates_args=())
def upsampled_backward(gradient: Tensor, height: int, width: int, align_corners: bool, dtype: torch.dtype) -> Tensor:
    """The gradient of maps (B, C, height, width), as `dtype`, from that of the result."""
    gradient = gradient.contiguous(memory_format=torch.channels_last)
    if _fits(gradient, (height, width), gradient.shape[-2:]):
        from sdrseg.kernels.triton_upsampling import launch

        return launch(gradient, (height, width), align_corners, dtype, backward=True)
    result = upsampling_gradient(at_least_float32(gradient), height, width, align_corners)
    return result.to(dtype).contiguous(memory_format=torch.channels_last)


@upsampled.register_fake
@upsampled_backward.register_fake
def _(tensor: Tensor, height: int, width: int, align_corners: bool, dtype: torch.dtype) -> Tensor:
    like = tensor.new_empty(*tensor.shape[:2], height, width, dtype=dtype)
    return like.contiguous(memory_format=torch.channels_last)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    tensor, _, _, ctx.align_corners, _ = inputs
    ctx.size, ctx.dtype = tensor.shape[-2:], tensor.dtype


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    result = upsampled_backward(gradient, *ctx.size, ctx.align_corners, ctx.dtype)
    return cast(Tensor, result), None, None, None, None


def _double_backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    """The gradient of a gradient is an upsampling again."""
    result = upsampled(gradient, *ctx.size, ctx.align_corners, ctx.dtype)
    return cast(Tensor, result), None, None, None, None


upsampled.register_autograd(_backward, setup_context=_setup_context)
upsampled_backward.register_autograd(_double_backward, setup_context=_setup_context)
