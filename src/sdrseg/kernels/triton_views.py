"""Views of images in a row of words, for a whole batch at once. Imported only where Triton is installed."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 128
"""Pixels of a row that a program computes."""
ROUNDING: tl.constexpr = tl.constexpr(12582912.0)
"""1.5 · 2^23: adding it leaves no bits for fractions, which are rounded to the nearest, ties to even."""


def _axis(position, low, high, size):  # type: ignore[no-untyped-def]
    """For pixels of an axis resized to `size`: the centre of the filter among the source's [low, high), its radius, and
    its first pixel."""
    ratio = (high - low).to(tl.float32) / size.to(tl.float32)
    centre = low + (position + 0.5) * ratio
    reach = tl.maximum(ratio, 1.0)
    first = tl.floor(centre - reach - 0.5).to(tl.int32)
    return centre, reach, first


def _weight(source, centre, reach, low, high):  # type: ignore[no-untyped-def]
    """The weight of a source pixel in the antialiased bilinear filter, before the weights are normalised."""
    weight = tl.maximum(1 - tl.abs(source + 0.5 - centre) / reach, 0.0)
    return tl.where((source >= low) & (source < high), weight, 0.0)


def _byte(value):  # type: ignore[no-untyped-def]
    """The nearest integer from 0 to 255."""
    return tl.minimum(tl.maximum((value + ROUNDING) - ROUNDING, 0.0), 255.0).to(tl.int32).to(tl.uint8)


def _views(  # type: ignore[no-untyped-def]
    words,
    numbers,
    label_rows,
    label_columns,
    images,
    masks,
    outside,
    height,
    width,
    red,
    green,
    blue,
    VOID: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A part of a row of a view. `numbers`: views.Numbers of each image; `label_rows` and `label_columns`: the
    source pixel of each label before flipping."""
    image, y = tl.program_id(0) // height, tl.program_id(0) % height
    x = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    view = numbers + image * 11
    start, stride = tl.load(view), tl.load(view + 1)
    top, bottom = tl.load(view + 2).to(tl.int32), tl.load(view + 3).to(tl.int32)
    rows, offset_y = tl.load(view + 4).to(tl.int32), tl.load(view + 5).to(tl.int32)
    left, right = tl.load(view + 6).to(tl.int32), tl.load(view + 7).to(tl.int32)
    columns, offset_x = tl.load(view + 8).to(tl.int32), tl.load(view + 9).to(tl.int32)
    position_y = y + offset_y
    unflipped = tl.where(tl.load(view + 10) != 0, width - 1 - x, x)
    position_x = unflipped + offset_x
    row_index = tl.zeros((BLOCK,), tl.int32) + position_y
    inside = (row_index >= 0) & (row_index < rows) & (position_x >= 0) & (position_x < columns)
    centre_y, reach_y, first_y = axis(position_y, top, bottom, rows)
    centre_x, reach_x, first_x = axis(position_x, left, right, columns)

    taps_y, taps_x = tl.ceil(2 * reach_y).to(tl.int32) + 2, tl.ceil(2 * reach_x).to(tl.int32) + 2
    total_y, total_x = 0.0, tl.zeros((BLOCK,), tl.float32)
    for n in range(taps_y):
        total_y += weight(first_y + n, centre_y, reach_y, top, bottom)
    for n in range(taps_x):
        total_x += weight(first_x + n, centre_x, reach_x, left, right)
    r, g, b = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    for m in range(taps_y):
        source_y = first_y + m
        weight_y = weight(source_y, centre_y, reach_y, top, bottom) / total_y
        row = words + start + source_y * stride
        for n in range(taps_x):
            source_x = first_x + n
            share = weight_y * (weight(source_x, centre_x, reach_x, left, right) / total_x)
            word = tl.load(row + source_x, mask=inside & (share > 0), other=0)
            r += share * (word & 255).to(tl.float32)
            g += share * ((word >> 8) & 255).to(tl.float32)
            b += share * ((word >> 16) & 255).to(tl.float32)

    exists = x < width
    offset = tl.program_id(0).to(tl.int64) * width + x
    shown = exists & inside
    label_y = tl.load(label_rows + image * height + y)
    label_x = tl.load(label_columns + image * width + unflipped, mask=shown, other=0)
    label = (tl.load(words + start + label_y * stride + label_x, mask=shown, other=0) >> 24) & 255
    tl.store(masks + offset, tl.where(inside, label, VOID).to(tl.uint8), mask=exists)
    tl.store(outside + offset, tl.where(inside, 0, 1).to(tl.uint8), mask=exists)
    tl.store(images + 3 * offset, tl.where(inside, byte(r), red.to(tl.uint8)), mask=exists)
    tl.store(images + 3 * offset + 1, tl.where(inside, byte(g), green.to(tl.uint8)), mask=exists)
    tl.store(images + 3 * offset + 2, tl.where(inside, byte(b), blue.to(tl.uint8)), mask=exists)


axis: Any = triton.jit(_axis)
weight: Any = triton.jit(_weight)
byte: Any = triton.jit(_byte)
views: Any = triton.jit(_views, do_not_specialize=["height", "width", "red", "green", "blue"])


def launch(
    words: Tensor, numbers: Tensor, rows: Tensor, columns: Tensor, fill: tuple[int, ...], void: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Images (B, 3, height, width) channels last, masks and padding (B, height, width). `rows` and `columns`: int32."""
    height, width = rows.shape[1], columns.shape[1]
    like: Any = {"dtype": torch.uint8, "device": words.device}
    images = torch.empty(len(numbers), height, width, 3, **like)
    masks, outside = (torch.empty(len(numbers), height, width, **like) for _ in range(2))
    programs = (len(numbers) * height, triton.cdiv(width, BLOCK))
    with torch.cuda.device(words.get_device()):  # not always the current one
        views[programs](
            words, numbers, rows, columns, images, masks, outside, height, width, *fill, VOID=void, BLOCK=BLOCK
        )
    return images.permute(0, 3, 1, 2), masks, outside.view(torch.bool)
