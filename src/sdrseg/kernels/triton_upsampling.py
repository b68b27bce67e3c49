"""Bilinear upsampling of maps that are channels last, and its gradient.

A program computes part of one row, channels and cells in memory order. Row y of the large map is at (y + centre) ·
scale − centre of the small one, clamped to its borders; columns likewise. In the backward pass every element of the
small map sums the gradients of the elements computed from it in a fixed order, without atomic additions.

Imported only where Triton is there.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor


def _lies_at(place, scale, centre, length):  # type: ignore[no-untyped-def]
    """The position of a row or column of the large map on the small one, which has `length` of them."""
    there = (place.to(tl.float32) + centre) * scale - centre
    return tl.minimum(tl.maximum(there, 0.0), (length - 1).to(tl.float32))


def _part(width, channels, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """The numbers of a program in its row, which of them there are, and their columns and channels."""
    number = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    column = number // channels
    return number, number < width * channels, column, number - column * channels


def _upsample(  # type: ignore[no-untyped-def]
    maps,
    result,
    height,
    width,
    tall,
    wide,
    channels,
    down,
    right,
    centre,
    BLOCK: tl.constexpr,
):
    image_row = tl.program_id(0)
    number, known, column, channel = part(wide, channels, BLOCK)
    at_y = lies_at(image_row % tall, down, centre, height)
    at_x = lies_at(column, right, centre, width)
    row, left = at_y.to(tl.int32), at_x.to(tl.int32)
    lower, rightmore = at_y - row.to(tl.float32), at_x - left.to(tl.float32)
    beside = (tl.minimum(left + 1, width - 1) - left) * channels
    line = ((image_row // tall).to(tl.int64) * height + row) * width * channels
    below = (tl.minimum(row + 1, height - 1) - row) * width * channels
    first = maps + line + left * channels + channel
    a = tl.load(first, mask=known, other=0.0).to(tl.float32)
    b = tl.load(first + beside, mask=known, other=0.0).to(tl.float32)
    c = tl.load(first + below, mask=known, other=0.0).to(tl.float32)
    d = tl.load(first + below + beside, mask=known, other=0.0).to(tl.float32)
    value = (1 - lower) * ((1 - rightmore) * a + rightmore * b) + lower * ((1 - rightmore) * c + rightmore * d)
    place = image_row.to(tl.int64) * wide * channels + number
    tl.store(result + place, value.to(result.dtype.element_ty), mask=known)


def _upsample_backward(  # type: ignore[no-untyped-def]
    gradient,
    result,
    height,
    width,
    tall,
    wide,
    channels,
    down,
    right,
    centre,
    times_y,
    times_x,
    SPAN_Y: tl.constexpr,
    SPAN_X: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """`times`: 1 / scale. SPAN: how many rows and columns of the large map can lie less than one from a cell."""
    image_row = tl.program_id(0)
    number, known, column, channel = part(width, channels, BLOCK)
    row = (image_row % height).to(tl.float32)
    first_y = tl.floor((row - 1 + centre) * times_y - centre).to(tl.int32)
    first_x = tl.floor((column.to(tl.float32) - 1 + centre) * times_x - centre).to(tl.int32)
    total = tl.zeros((BLOCK,), tl.float32)
    for down_by in range(SPAN_Y):
        y = first_y + down_by
        share_y = 1 - tl.abs(lies_at(y, down, centre, height) - row)
        if (y >= 0) & (y < tall) & (share_y > 0):
            line = gradient + ((image_row // height).to(tl.int64) * tall + y) * wide * channels
            of_line = tl.zeros((BLOCK,), tl.float32)
            for right_by in tl.static_range(SPAN_X):
                x = first_x + right_by
                share_x = 1 - tl.abs(lies_at(x, right, centre, width) - column.to(tl.float32))
                taken = known & (x >= 0) & (x < wide) & (share_x > 0)
                up = tl.load(line + x * channels + channel, mask=taken, other=0.0).to(tl.float32)
                of_line += share_x * up
            total += share_y * of_line
    place = image_row.to(tl.int64) * width * channels + number
    tl.store(result + place, total.to(result.dtype.element_ty), mask=known)


SIZES = ["height", "width", "tall", "wide"]  # not a kernel for every size
lies_at: Any = triton.jit(_lies_at)
part: Any = triton.jit(_part)
kernel: Any = triton.jit(_upsample, do_not_specialize=SIZES)
kernel_backward: Any = triton.jit(_upsample_backward, do_not_specialize=SIZES)

BLOCK, WARPS = 1024, 2
BLOCK_BACK, WARPS_BACK = 128, 1
"""The fastest of some on an H200."""


class Scale(NamedTuple):
    """From places of the large map to those of the small one, along one side."""

    scale: float
    times: float
    span: int


def scale_of(small: int, large: int, align_corners: bool) -> Scale:
    scale = (small - 1) / (large - 1) if align_corners else small / large
    return Scale(scale, 1 / scale, math.ceil(2 / scale) + 1)


def launch(
    given: Tensor, size: tuple[int, int], align_corners: bool, kind: torch.dtype, backward: bool = False
) -> Tensor:
    """Upsample maps to this size and dtype or, in the backward pass, compute the gradient of the smaller maps from that
    of the larger. Input and result are channels-last."""
    images, channels = given.shape[:2]
    like: Any = {"dtype": kind, "device": given.device, "memory_format": torch.channels_last}
    result = torch.empty((images, channels, *size), **like)
    other = (given.shape[-2], given.shape[-1])
    small, large = (size, other) if backward else (other, size)
    down, right = (scale_of(a, b, align_corners) for a, b in zip(small, large, strict=True))
    places = (*small, *large, channels, down.scale, right.scale, 0.0 if align_corners else 0.5)
    programs = (images * size[0], triton.cdiv(size[1] * channels, BLOCK_BACK if backward else BLOCK))
    with torch.cuda.device(given.get_device()):  # not always the current one
        if backward:
            spans: Any = {"SPAN_Y": down.span, "SPAN_X": right.span, "BLOCK": BLOCK_BACK, "num_warps": WARPS_BACK}
            kernel_backward[programs](given, result, *places, down.times, right.times, **spans, enable_fp_fusion=True)
        else:
            kernel[programs](given, result, *places, BLOCK=BLOCK, num_warps=WARPS, enable_fp_fusion=True)
    return result
