"""A depthwise 3×3 convolution on maps that are channels last. Imported only where Triton is there."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

CELLS, CHANNELS = 16, 128
"""What a program computes: cells of a row, and channels."""


def _depthwise(  # type: ignore[no-untyped-def]  # Triton looks at annotations, and wants none but these
    maps, weight, result, height, width, channels, dilation, CELLS: tl.constexpr, CHANNELS: tl.constexpr
):
    image_row = tl.program_id(0)
    first = (image_row // height).to(tl.int64) * height
    row = tl.full((CELLS,), 0, tl.int32) + image_row % height
    columns = tl.program_id(1) * CELLS + tl.arange(0, CELLS)
    channel = tl.program_id(2) * CHANNELS + tl.arange(0, CHANNELS)
    known = channel < channels
    total = tl.zeros((CELLS, CHANNELS), tl.float32)
    for tap in tl.static_range(9):
        there = row + (tap // 3 - 1) * dilation
        beside = columns + (tap % 3 - 1) * dilation
        inside = (there >= 0) & (there < height) & (beside >= 0) & (beside < width)
        cell = (first + there) * width + beside
        seen = tl.load(maps + cell[:, None] * channels + channel, mask=inside[:, None] & known, other=0.0)
        factor = tl.load(weight + tap * channels + channel, mask=known, other=0.0)
        total += seen.to(tl.float32) * factor.to(tl.float32)
    cell = (first + row) * width + columns
    kept = (columns < width)[:, None] & known
    tl.store(result + cell[:, None] * channels + channel, total.to(result.dtype.element_ty), mask=kept)


kernel: Any = triton.jit(_depthwise, do_not_specialize=["height", "width", "dilation"])  # not one for every size


def launch(maps: Tensor, weight: Tensor, dilation: int) -> Tensor:
    """Maps (B, C, h, w), channels last, by weights (C, 1, 3, 3)."""
    images, channels, height, width = maps.shape
    result = torch.empty_like(maps, memory_format=torch.channels_last)
    taps = weight.reshape(channels, 9).t().contiguous()
    programs = (images * height, triton.cdiv(width, CELLS), triton.cdiv(channels, CHANNELS))
    with torch.cuda.device(maps.get_device()):  # not always the current one
        kernel[programs](maps, taps, result, height, width, channels, dilation, CELLS, CHANNELS, enable_fp_fusion=True)
    return result
