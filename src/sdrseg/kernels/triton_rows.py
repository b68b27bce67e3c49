"""Sums over the channels of each position of a feature map, and their gradients. Imported only where Triton is there.

A program takes ROWS positions, and goes over their channels in steps of LANES.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sdrseg.kernels.triton_blocks import block, places

ROWS, LANES, WARPS = 4, 256, 4
"""Every warp has a position of its own, every thread eight channels of it at a time."""


def _rows(  # type: ignore[no-untyped-def]
    features, top, ties, total, square, positions, channels, ROWS: tl.constexpr, LANES: tl.constexpr
):
    """Of each position: the largest channel, how many are as large, Σ f and Σ f²."""
    position, known = block(positions, ROWS)
    start = position * channels
    highest = tl.full((ROWS, LANES), float("-inf"), tl.float32)
    equal = tl.zeros((ROWS, LANES), tl.float32)
    sums, squares = tl.zeros((ROWS, LANES), tl.float32), tl.zeros((ROWS, LANES), tl.float32)
    for begin in range(0, channels, LANES):
        place, there = places(start, known, begin + tl.arange(0, LANES), channels)
        f = tl.load(features + place, mask=there, other=0.0).to(tl.float32)
        sums += f
        squares += f * f
        higher = tl.maximum(highest, tl.where(there, f, float("-inf")))
        equal = tl.where(highest == higher, equal, 0.0) + tl.where(there & (f == higher), 1.0, 0.0)
        highest = higher
    largest = tl.max(highest, 1)
    tl.store(top + position, largest, mask=known)
    tl.store(ties + position, tl.sum(tl.where(highest == largest[:, None], equal, 0.0), 1), mask=known)
    tl.store(total + position, tl.sum(sums, 1), mask=known)
    tl.store(square + position, tl.sum(squares, 1), mask=known)


def _rows_backward(  # type: ignore[no-untyped-def]
    features, top, of_top, of_total, of_square, result, positions, channels, ROWS: tl.constexpr, LANES: tl.constexpr
):
    """The gradient from that of each largest channel, of Σ f and of Σ f²."""
    position, known = block(positions, ROWS)
    start = position * channels
    largest = tl.load(top + position, mask=known, other=0.0)
    at_top = tl.load(of_top + position, mask=known, other=0.0)
    everywhere = tl.load(of_total + position, mask=known, other=0.0)
    twice = 2 * tl.load(of_square + position, mask=known, other=0.0)
    for begin in range(0, channels, LANES):
        place, there = places(start, known, begin + tl.arange(0, LANES), channels)
        f = tl.load(features + place, mask=there, other=0.0).to(tl.float32)
        gradient = twice[:, None] * f + everywhere[:, None] + tl.where(f == largest[:, None], at_top[:, None], 0.0)
        tl.store(result + place, gradient.to(result.dtype.element_ty), mask=there)


def _exponentials(  # type: ignore[no-untyped-def]
    features, factor, total, weighted, positions, channels, ROWS: tl.constexpr, LANES: tl.constexpr
):
    """Of each position: Σ exp(r f) with its factor r, and Σ f exp(r f)."""
    position, known = block(positions, ROWS)
    start = position * channels
    r = tl.load(factor + position, mask=known, other=0.0)
    sums, products = tl.zeros((ROWS, LANES), tl.float32), tl.zeros((ROWS, LANES), tl.float32)
    for begin in range(0, channels, LANES):
        place, there = places(start, known, begin + tl.arange(0, LANES), channels)
        f = tl.load(features + place, mask=there, other=0.0).to(tl.float32)
        e = tl.where(there, tl.exp(r[:, None] * f), 0.0)
        sums += e
        products += f * e
    tl.store(total + position, tl.sum(sums, 1), mask=known)
    tl.store(weighted + position, tl.sum(products, 1), mask=known)


def _exponentials_backward(  # type: ignore[no-untyped-def]
    features, factor, of_total, result, positions, channels, ROWS: tl.constexpr, LANES: tl.constexpr
):
    """The gradient of the features from that of Σ exp(r f)."""
    position, known = block(positions, ROWS)
    start = position * channels
    r = tl.load(factor + position, mask=known, other=0.0)
    scale = r * tl.load(of_total + position, mask=known, other=0.0)
    for begin in range(0, channels, LANES):
        place, there = places(start, known, begin + tl.arange(0, LANES), channels)
        f = tl.load(features + place, mask=there, other=0.0).to(tl.float32)
        gradient = scale[:, None] * tl.exp(r[:, None] * f)
        tl.store(result + place, gradient.to(result.dtype.element_ty), mask=there)


rows: Any = triton.jit(_rows)
rows_backward: Any = triton.jit(_rows_backward)
exponentials: Any = triton.jit(_exponentials)
exponentials_backward: Any = triton.jit(_exponentials_backward)


def launch(kernel: Any, features: Tensor, *others: Tensor) -> None:
    """Features (B, C, h, w), channels last, then what belongs to each position (B, h·w), and what is like features."""
    images, channels, height, width = features.shape
    positions = images * height * width
    with torch.cuda.device(features.get_device()):  # not always the current one
        kernel[(triton.cdiv(positions, ROWS),)](
            features, *others, positions, channels, ROWS=ROWS, LANES=LANES, num_warps=WARPS, enable_fp_fusion=True
        )
