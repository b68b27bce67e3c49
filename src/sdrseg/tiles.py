"""Splits images of any size into tiles for a network, and merges its outputs.

Tiles lie on a grid, so each axis is handled separately. Their starts are multiples of the network's stride, so that
each tile's cells are cells of the whole image too. Where two tiles overlap, each has weight 0 in the outer quarter of
the overlap on its side, where it has the least context, and between the quarters one fades smoothly into the other. So
a network whose receptive field reaches no further than a quarter of the overlap gives the same logits as for the whole
image.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from sdrseg.datasets.augment import FILL
from sdrseg.errors import UsageError
from sdrseg.network import next_multiple

SMALLEST = 32
"""Images are padded at least to this side."""
SIDES = (1024, 768, 512)
"""Default sides of tiles: the largest that fits into memory, at least the last."""

Forward = Callable[[Tensor], Tensor]
"""(B, 3, h, w) uint8 to logits (B, K, h, w)."""


@dataclass(frozen=True)
class TileAxis:
    """Rows or columns: `length` pixels padded to `canvas`, in tiles of `tile` pixels that begin at `starts`."""

    length: int
    canvas: int
    tile: int
    starts: tuple[int, ...]

    def weights(self) -> Tensor:
        """(tiles, tile): the weight of each pixel of each tile; the weights of all tiles sum to 1 at every pixel."""
        weight = torch.ones(len(self.starts), self.tile, dtype=torch.float64)
        for number in range(len(self.starts) - 1):
            shared = self.starts[number] + self.tile - self.starts[number + 1]
            fade = _fade(shared)
            weight[number, self.tile - shared :] *= fade.flip(0)
            weight[number + 1, :shared] *= fade
        total = torch.zeros(self.canvas, dtype=torch.float64)
        for start, row in zip(self.starts, weight, strict=True):
            total[start : start + self.tile] += row
        shares = [row / total[s : s + self.tile] for s, row in zip(self.starts, weight, strict=True)]
        return torch.stack(shares).float()


def _fade(shared: int) -> Tensor:
    """Weights from 0 to 1 over an overlap: 0 in the first quarter, 1 in the last, smooth between. Weight plus mirrored
    weight is 1."""
    position = (torch.arange(shared, dtype=torch.float64) + 0.5) / max(1, shared)
    t = (2 * position - 0.5).clamp(0, 1)
    return t * t * (3 - 2 * t)


def tile_axis(length: int, tile: int, overlap: int, multiple: int) -> TileAxis:
    """The fewest tiles that cover `length` with at least `overlap` between neighbours, evenly spaced."""
    canvas = next_multiple(max(length, SMALLEST), multiple)
    tile = min(next_multiple(max(tile, SMALLEST), multiple), canvas)
    step = max(multiple, (tile - overlap) // multiple * multiple)
    gaps = math.ceil((canvas - tile) / step)
    cells = (canvas - tile) // multiple
    starts = tuple(cells * n // gaps * multiple for n in range(gaps)) + (canvas - tile,)
    return TileAxis(length, canvas, tile, starts)


def fitting_tiles(free: int, classes: int, crop: int) -> tuple[int, int]:
    """(side of a tile, batch size) for `free` bytes of free memory, of which one half is used.

    A network that was trained on larger crops gets tiles of that size.
    """
    pixels = free // 2 // (800 + 16 * classes)  # an upper bound for known encoders and decoders, in float32
    side = max(crop, next((side for side in SIDES if side**2 <= pixels), SIDES[-1]))
    return side, max(1, pixels // side**2)


def tile_count(height: int, width: int, tile: int, overlap: int, multiple: int) -> int:
    """The number of tiles of an image."""
    return math.prod(len(tile_axis(length, tile, overlap, multiple).starts) for length in (height, width))


def whole_canvas(height: int, width: int, tile: int, multiple: int) -> tuple[int, int] | None:
    """The padded size of an image that fits into one tile, or None."""
    axes = [tile_axis(length, tile, 0, multiple) for length in (height, width)]
    return (axes[0].canvas, axes[1].canvas) if all(len(axis.starts) == 1 for axis in axes) else None


def check_tiles(tile: int, overlap: int) -> None:
    """Raise an error if the values do not give a grid."""
    if tile < SMALLEST:
        raise UsageError(f"a tile of {tile} pixels is too small. Use at least {SMALLEST}.")
    if not 0 <= overlap <= tile // 2:
        raise UsageError(f"an overlap of {overlap} pixels: use 0 to {tile // 2}, half the tile of {tile} pixels.")


def logit_strips(
    image: Tensor,
    forward: Forward,
    *,
    tile: int,
    overlap: int,
    multiple: int,
    batch_size: int,
    tick: Callable[[int], None] = lambda tiles: None,
) -> Iterator[tuple[int, Tensor]]:
    """The logits of an image (3, H, W) uint8 from top to bottom: (first row, (K, rows, W)), rows complete.

    Only one row of tiles is in memory at a time. `tick` is called with the number of finished tiles.
    """
    check_tiles(tile, overlap)
    rows = tile_axis(image.shape[-2], tile, overlap, multiple)
    columns = tile_axis(image.shape[-1], tile, overlap, multiple)
    down, across = rows.weights(), columns.weights()
    carried: Tensor | None = None
    for number, top in enumerate(rows.starts):
        band = framed(image[:, top : top + rows.tile], rows.tile, columns.canvas)
        if len(columns.starts) == 1 and len(rows.starts) == 1:
            total = forward(band[None])[0]
            tick(1)
        else:
            total = _row_of_tiles(band, forward, columns, across, batch_size, tick)
            total *= down[number][:, None].to(total.device)
            if carried is not None:
                total[:, : carried.shape[1]] += carried
        last = number + 1 == len(rows.starts)
        complete = rows.tile if last else rows.starts[number + 1] - top
        yield top, total[:, : min(complete, rows.length - top), : columns.length]
        carried = None if last else total[:, complete:]


def _row_of_tiles(
    band: Tensor, forward: Forward, columns: TileAxis, across: Tensor, batch_size: int, tick: Callable[[int], None]
) -> Tensor:
    """The logits of a band (3, tile, canvas) of the image, merged from left to right."""
    total: Tensor | None = None
    for first in range(0, len(columns.starts), batch_size):
        starts = columns.starts[first : first + batch_size]
        logits = forward(torch.stack([band[:, :, s : s + columns.tile] for s in starts]))
        tick(len(starts))
        if total is None:
            total = logits.new_zeros(logits.shape[1], logits.shape[2], columns.canvas)
        for number, start in enumerate(starts):
            total[:, :, start : start + columns.tile] += logits[number] * across[first + number].to(logits.device)
    assert total is not None
    return total


def framed(image: Tensor, height: int, width: int) -> Tensor:
    """An image with the colour of padding added at the bottom and on the right."""
    if tuple(image.shape[-2:]) == (height, width):
        return image
    fill = torch.tensor(FILL, dtype=torch.uint8, device=image.device)[:, None, None]
    canvas = fill.repeat(1, height, width)
    canvas[:, : image.shape[-2], : image.shape[-1]] = image
    return canvas
