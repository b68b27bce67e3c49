"""A depthwise 3×3 convolution on maps that are channels last, and the gradient of its weights.

Imported only where Triton is installed.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

CELLS, CHANNELS = 32, 64
"""The part of a map that one program computes: cells of a row, and channels."""


def _depthwise(  # type: ignore[no-untyped-def]  # Triton allows only constexpr annotations
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
        y = row + (tap // 3 - 1) * dilation
        x = columns + (tap % 3 - 1) * dilation
        inside = (y >= 0) & (y < height) & (x >= 0) & (x < width)
        cell = (first + y) * width + x
        value = tl.load(maps + cell[:, None] * channels + channel, mask=inside[:, None] & known, other=0.0)
        factor = tl.load(weight + tap * channels + channel, mask=known, other=0.0)
        total += value.to(tl.float32) * factor.to(tl.float32)
    cell = (first + row) * width + columns
    valid = (columns < width)[:, None] & known
    tl.store(result + cell[:, None] * channels + channel, total.to(result.dtype.element_ty), mask=valid)


def _weights(  # type: ignore[no-untyped-def]
    maps,
    gradient,
    result,
    rows,
    height,
    width,
    channels,
    dilation,
    ROWS: tl.constexpr,
    CELLS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """For one tap and some rows: the sum of the gradient times the cells that the tap reads."""
    tap = tl.program_id(2)
    down, right = (tap // 3 - 1) * dilation, (tap % 3 - 1) * dilation
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    known = channel < channels
    total = tl.zeros((CELLS, CHANNELS), tl.float32)
    for number in range(ROWS):
        image_row = tl.zeros((CELLS,), tl.int32) + tl.program_id(0) * ROWS + number
        y = image_row % height + down
        inside = (image_row < rows) & (y >= 0) & (y < height)
        for begin in range(0, width, CELLS):
            column = begin + tl.arange(0, CELLS)
            x = column + right
            valid = (inside & (column < width) & (x >= 0) & (x < width))[:, None] & known
            cell = image_row.to(tl.int64) * width + column
            grad = tl.load(gradient + cell[:, None] * channels + channel, mask=valid, other=0.0)
            value = tl.load(maps + (cell + down * width + right)[:, None] * channels + channel, mask=valid, other=0.0)
            total += grad.to(tl.float32) * value.to(tl.float32)
    tl.store(result + (tl.program_id(0) * 9 + tap) * channels + channel, tl.sum(total, 0), mask=known)


kernel: Any = triton.jit(_depthwise, do_not_specialize=["height", "width", "dilation"])  # one kernel for all sizes
weights: Any = triton.jit(_weights, do_not_specialize=["rows", "height", "width", "dilation"])


def launch(maps: Tensor, weight: Tensor, dilation: int) -> Tensor:
    """Maps (B, C, h, w), channels last, convolved with weights (C, 1, 3, 3)."""
    images, channels, height, width = maps.shape
    result = torch.empty_like(maps, memory_format=torch.channels_last)
    taps = weight.reshape(channels, 9).t().contiguous()
    programs = (images * height, triton.cdiv(width, CELLS), triton.cdiv(channels, CHANNELS))
    with torch.cuda.device(maps.get_device()):  # not always the current one
        kernel[programs](maps, taps, result, height, width, channels, dilation, CELLS, CHANNELS, enable_fp_fusion=True)
    return result


GROUP = {"ROWS": 8, "CELLS": 8, "CHANNELS": 128}
"""The part that one program sums for the weights: rows, and the cells and channels it reads at a time."""


def launch_weights(maps: Tensor, gradient: Tensor, dilation: int) -> Tensor:
    """The gradient of the weights (C, 1, 3, 3), from maps and the gradient of the result, both channels last."""
    images, channels, height, width = maps.shape
    rows = images * height
    groups = triton.cdiv(rows, GROUP["ROWS"])
    sums = maps.new_empty(groups, 9, channels, dtype=torch.float32)
    programs = (groups, triton.cdiv(channels, GROUP["CHANNELS"]), 9)
    with torch.cuda.device(maps.get_device()):
        weights[programs](maps, gradient, sums, rows, height, width, channels, dilation, **GROUP, enable_fp_fusion=True)
    return sums.sum(0).t().contiguous().view(channels, 1, 3, 3)
