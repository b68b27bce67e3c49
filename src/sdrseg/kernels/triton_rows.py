"""Sums over the channels of each position of a feature map, and their gradients.

Imported only where Triton is installed. A program computes ROWS positions and reads their channels LANES at a time.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sdrseg.kernels.triton_blocks import block, offsets

ROWS, LANES, WARPS = 4, 256, 4
"""Each warp computes one position, each thread eight of its channels at a time."""


def _rows(  # type: ignore[no-untyped-def]
    features, top, ties, total, square, positions, channels, ROWS: tl.constexpr, LANES: tl.constexpr
):
    """For each position: the largest channel, how many channels equal it, Σ f and Σ f²."""
    position, exists = block(positions, ROWS)
    start = position * channels
    highest = tl.full((ROWS, LANES), float("-inf"), tl.float32)
    equal = tl.zeros((ROWS, LANES), tl.float32)
    sums, squares = tl.zeros((ROWS, LANES), tl.float32), tl.zeros((ROWS, LANES), tl.float32)
    for begin in range(0, channels, LANES):
        offset, valid = offsets(start, exists, begin + tl.arange(0, LANES), channels)
        f = tl.load(features + offset, mask=valid, other=0.0).to(tl.float32)
        sums += f
        squares += f * f
        higher = tl.maximum(highest, tl.where(valid, f, float("-inf")))
        equal = tl.where(highest == higher, equal, 0.0) + tl.where(valid & (f == higher), 1.0, 0.0)
        highest = higher
    largest = tl.max(highest, 1)
    tl.store(top + position, largest, mask=exists)
    tl.store(ties + position, tl.sum(tl.where(highest == largest[:, None], equal, 0.0), 1), mask=exists)
    tl.store(total + position, tl.sum(sums, 1), mask=exists)
    tl.store(square + position, tl.sum(squares, 1), mask=exists)


def _rows_backward(  # type: ignore[no-untyped-def]
    features,
    top,
    grad_top,
    grad_total,
    grad_square,
    result,
    positions,
    channels,
    ROWS: tl.constexpr,
    LANES: tl.constexpr,
):
    """The gradient from that of each largest channel, of Σ f and of Σ f²."""
    position, exists = block(positions, ROWS)
    start = position * channels
    largest = tl.load(top + position, mask=exists, other=0.0)
    at_largest = tl.load(grad_top + position, mask=exists, other=0.0)
    everywhere = tl.load(grad_total + position, mask=exists, other=0.0)
    twice = 2 * tl.load(grad_square + position, mask=exists, other=0.0)
    for begin in range(0, channels, LANES):
        offset, valid = offsets(start, exists, begin + tl.arange(0, LANES), channels)
        f = tl.load(features + offset, mask=valid, other=0.0).to(tl.float32)
        gradient = twice[:, None] * f + everywhere[:, None] + tl.where(f == largest[:, None], at_largest[:, None], 0.0)
        tl.store(result + offset, gradient.to(result.dtype.element_ty), mask=valid)


def _exponentials(  # type: ignore[no-untyped-def]
    features, factor, total, weighted, positions, channels, ROWS: tl.constexpr, LANES: tl.constexpr
):
    """For each position: Σ exp(r f) with its factor r, and Σ f exp(r f)."""
    position, exists = block(positions, ROWS)
    start = position * channels
    r = tl.load(factor + position, mask=exists, other=0.0)
    sums, products = tl.zeros((ROWS, LANES), tl.float32), tl.zeros((ROWS, LANES), tl.float32)
    for begin in range(0, channels, LANES):
        offset, valid = offsets(start, exists, begin + tl.arange(0, LANES), channels)
        f = tl.load(features + offset, mask=valid, other=0.0).to(tl.float32)
        e = tl.where(valid, tl.exp(r[:, None] * f), 0.0)
        sums += e
        products += f * e
    tl.store(total + position, tl.sum(sums, 1), mask=exists)
    tl.store(weighted + position, tl.sum(products, 1), mask=exists)


def _exponentials_backward(  # type: ignore[no-untyped-def]
    features, factor, grad_total, result, positions, channels, ROWS: tl.constexpr, LANES: tl.constexpr
):
    """The gradient of the features from that of Σ exp(r f)."""
    position, exists = block(positions, ROWS)
    start = position * channels
    r = tl.load(factor + position, mask=exists, other=0.0)
    scale = r * tl.load(grad_total + position, mask=exists, other=0.0)
    for begin in range(0, channels, LANES):
        offset, valid = offsets(start, exists, begin + tl.arange(0, LANES), channels)
        f = tl.load(features + offset, mask=valid, other=0.0).to(tl.float32)
        gradient = scale[:, None] * tl.exp(r[:, None] * f)
        tl.store(result + offset, gradient.to(result.dtype.element_ty), mask=valid)


rows: Any = triton.jit(_rows)
rows_backward: Any = triton.jit(_rows_backward)
exponentials: Any = triton.jit(_exponentials)
exponentials_backward: Any = triton.jit(_exponentials_backward)


def launch(kernel: Any, features: Tensor, *others: Tensor) -> None:
    """Features (B, C, h, w), channels last; others: one value per position (B, h·w), or shaped like the features."""
    images, channels, height, width = features.shape
    positions = images * height * width
    with torch.cuda.device(features.get_device()):  # not always the current one
        kernel[(triton.cdiv(positions, ROWS),)](
            features, *others, positions, channels, ROWS=ROWS, LANES=LANES, num_warps=WARPS, enable_fp_fusion=True
        )
