"""Bilinear upsampling of maps that are channels last, and its gradient.

A program computes part of one row, channels and cells in memory order. Row y of the large map is at (y + centre) ·
scale − centre of the small one, clamped to its borders; columns likewise. In the backward pass every element of the
small map sums the gradients of the elements computed from it in a fixed order, without atomic additions.

Imported only where Triton is installed.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor


def _position(index, scale, centre, length):  # type: ignore[no-untyped-def]
    """The position of a row or column of the large map on the small one, which has `length` of them."""
    at = (index.to(tl.float32) + centre) * scale - centre
    return tl.minimum(tl.maximum(at, 0.0), (length - 1).to(tl.float32))


def _part(width, channels, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """The elements of a program in its row, a mask of those that exist, and their columns and channels."""
    number = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    column = number // channels
    return number, number < width * channels, column, number - column * channels


def _upsample(  # type: ignore[no-untyped-def]
    maps,
    result,
    height,
    width,
    large_height,
    large_width,
    channels,
    scale_y,
    scale_x,
    centre,
    BLOCK: tl.constexpr,
):
    image_row = tl.program_id(0)
    number, exists, column, channel = part(large_width, channels, BLOCK)
    y = position(image_row % large_height, scale_y, centre, height)
    x = position(column, scale_x, centre, width)
    row, left = y.to(tl.int32), x.to(tl.int32)
    weight_y, weight_x = y - row.to(tl.float32), x - left.to(tl.float32)
    next_column = (tl.minimum(left + 1, width - 1) - left) * channels
    line = ((image_row // large_height).to(tl.int64) * height + row) * width * channels
    next_row = (tl.minimum(row + 1, height - 1) - row) * width * channels
    first = maps + line + left * channels + channel
    a = tl.load(first, mask=exists, other=0.0).to(tl.float32)
    b = tl.load(first + next_column, mask=exists, other=0.0).to(tl.float32)
    c = tl.load(first + next_row, mask=exists, other=0.0).to(tl.float32)
    d = tl.load(first + next_row + next_column, mask=exists, other=0.0).to(tl.float32)
    value = (1 - weight_y) * ((1 - weight_x) * a + weight_x * b) + weight_y * ((1 - weight_x) * c + weight_x * d)
    offset = image_row.to(tl.int64) * large_width * channels + number
    tl.store(result + offset, value.to(result.dtype.element_ty), mask=exists)


def _upsample_backward(  # type: ignore[no-untyped-def]
    gradient,
    result,
    height,
    width,
    large_height,
    large_width,
    channels,
    scale_y,
    scale_x,
    centre,
    inverse_y,
    inverse_x,
    SPAN_Y: tl.constexpr,
    SPAN_X: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """`inverse`: 1 / scale. SPAN: how many rows and columns of the large map can be less than 1 from a cell."""
    image_row = tl.program_id(0)
    number, exists, column, channel = part(width, channels, BLOCK)
    row = (image_row % height).to(tl.float32)
    first_y = tl.floor((row - 1 + centre) * inverse_y - centre).to(tl.int32)
    first_x = tl.floor((column.to(tl.float32) - 1 + centre) * inverse_x - centre).to(tl.int32)
    total = tl.zeros((BLOCK,), tl.float32)
    for dy in range(SPAN_Y):
        y = first_y + dy
        weight_y = 1 - tl.abs(position(y, scale_y, centre, height) - row)
        if (y >= 0) & (y < large_height) & (weight_y > 0):
            line = gradient + ((image_row // height).to(tl.int64) * large_height + y) * large_width * channels
            row_total = tl.zeros((BLOCK,), tl.float32)
            for dx in tl.static_range(SPAN_X):
                x = first_x + dx
                weight_x = 1 - tl.abs(position(x, scale_x, centre, width) - column.to(tl.float32))
                valid = exists & (x >= 0) & (x < large_width) & (weight_x > 0)
                up = tl.load(line + x * channels + channel, mask=valid, other=0.0).to(tl.float32)
                row_total += weight_x * up
            total += weight_y * row_total
    offset = image_row.to(tl.int64) * width * channels + number
    tl.store(result + offset, total.to(result.dtype.element_ty), mask=exists)


SIZES = ["height", "width", "large_height", "large_width"]  # one kernel for all sizes
position: Any = triton.jit(_position)
part: Any = triton.jit(_part)
kernel: Any = triton.jit(_upsample, do_not_specialize=SIZES)
kernel_backward: Any = triton.jit(_upsample_backward, do_not_specialize=SIZES)

BLOCK, WARPS = 1024, 2
BLOCK_BACK, WARPS_BACK = 128, 1
"""The fastest of those measured on an H200."""


class Scale(NamedTuple):
    """From indices of the large map to those of the small one, along one side."""

    scale: float
    inverse: float
    span: int


def scale_of(small: int, large: int, align_corners: bool) -> Scale:
    scale = (small - 1) / (large - 1) if align_corners else small / large
    return Scale(scale, 1 / scale, math.ceil(2 / scale) + 1)


def launch(
    tensor: Tensor, size: tuple[int, int], align_corners: bool, dtype: torch.dtype, backward: bool = False
) -> Tensor:
    """Upsample maps to this size and dtype or, in the backward pass, compute the gradient of the smaller maps from that
    of the larger. Input and result are channels-last."""
    images, channels = tensor.shape[:2]
    like: Any = {"dtype": dtype, "device": tensor.device, "memory_format": torch.channels_last}
    result = torch.empty((images, channels, *size), **like)
    other = (tensor.shape[-2], tensor.shape[-1])
    small, large = (size, other) if backward else (other, size)
    scale_y, scale_x = (scale_of(a, b, align_corners) for a, b in zip(small, large, strict=True))
    sizes = (*small, *large, channels, scale_y.scale, scale_x.scale, 0.0 if align_corners else 0.5)
    programs = (images * size[0], triton.cdiv(size[1] * channels, BLOCK_BACK if backward else BLOCK))
    with torch.cuda.device(tensor.get_device()):  # not always the current one
        if backward:
            spans: Any = {"SPAN_Y": scale_y.span, "SPAN_X": scale_x.span, "BLOCK": BLOCK_BACK, "num_warps": WARPS_BACK}
            kernel_backward[programs](
                tensor, result, *sizes, scale_y.inverse, scale_x.inverse, **spans, enable_fp_fusion=True
            )
        else:
            kernel[programs](tensor, result, *sizes, BLOCK=BLOCK, num_warps=WARPS, enable_fp_fusion=True)
    return result
