"""Appearance of the generated data set: random numbers, outlines, textures, backgrounds and classes.

The side of an image is SIDE units long at any resolution, so a scene looks the same at any size. Each shape has
coordinates (u, v) of its own, rotated and scaled so that its radius is ONE.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

SIDE = 1 << 14
ONE = 1 << 10
FULL = 256  # the whole of a weight: 0 is all of the first colour, FULL all of the second

Ints = NDArray[np.int64]
Colour = tuple[int, int, int]
Field = Callable[[Ints, Ints], Ints]  # of (H, W) coordinates u and v
T = TypeVar("T")

WORD = (1 << 64) - 1
STRIDE = 0x9E3779B97F4A7C15  # 2⁶⁴ over the golden ratio: how far splitmix64 steps
TRIPLES = ((1, 0, 1), (4, 3, 5), (3, 4, 5), (12, 5, 13), (5, 12, 13), (15, 8, 17), (8, 15, 17), (21, 20, 29))


def _scramble(x: Any) -> Any:
    """The output function of splitmix64, for one Python int or for a uint64 array (whose products wrap around)."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & WORD
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & WORD
    return x ^ (x >> 31)


class SplitMix:
    """Random numbers (splitmix64) that depend only on the key and on how many were drawn before."""

    def __init__(self, *key: int) -> None:
        self._state = 0
        for word in key:
            self._state = _scramble((self._state + (word + 1) * STRIDE) & WORD)

    def between(self, low: int, high: int) -> int:
        """One of low, …, high."""
        self._state = (self._state + STRIDE) & WORD
        word: int = _scramble(self._state)
        return low + word % (high - low + 1)

    def chance(self, percent: int) -> bool:
        return self.between(1, 100) <= percent

    def pick(self, items: Sequence[T]) -> T:
        return items[self.between(0, len(items) - 1)]

    def shuffled(self, items: Sequence[T]) -> list[T]:
        left = list(items)
        return [left.pop(self.between(0, len(left) - 1)) for _ in items]

    def near(self, colour: Colour, spread: int) -> Ints:
        """A similar colour, shape (3,)."""
        return np.array([channel + self.between(-spread, spread) for channel in colour], np.int64)

    def rotation(self) -> tuple[int, int, int]:
        """(a, b, c) with a² + b² = c²: a/c and b/c are the exact cosine and sine of an angle."""
        a, b, c = self.pick(TRIPLES)
        return self.pick(((a, b, c), (-b, a, c), (-a, -b, c), (b, -a, c)))

    def noise(self, rows: int, columns: int) -> Ints:
        """Uniform integers 0..255, shape (rows, columns)."""
        words = np.arange(1, rows * columns + 1, dtype=np.uint64) * STRIDE + self._state
        self._state = (self._state + rows * columns * STRIDE) & WORD
        noise: Ints = (_scramble(words) >> 56).astype(np.int64)
        return noise.reshape(rows, columns)


def _disc(u: Ints, v: Ints, radius: int = ONE) -> Ints:
    return (radius * radius - u * u - v * v) // (2 * radius)


def _box(u: Ints, v: Ints, width: int, height: int) -> Ints:
    depth: Ints = np.minimum(width - abs(u), height - abs(v))
    return depth


def _star(u: Ints, v: Ints) -> Ints:
    """A pentagram: the points inside at least four of its five lines, so the second smallest depth decides."""
    normals = ((0, 1024), (974, 316), (602, -828), (-602, -828), (-974, 316))
    depth: Ints = np.sort([390 - ((a * u + b * v) >> 10) for a, b in normals], axis=0)[1]
    return depth


SILHOUETTES: dict[str, Field] = {
    "disc": _disc,
    "square": lambda u, v: _box(u, v, 830, 830),
    "triangle": lambda u, v: 580 - np.maximum(v, (887 * abs(u) - 512 * v) >> 10),
    "ring": lambda u, v: np.minimum(_disc(u, v), -_disc(u, v, 470)),
    "cross": lambda u, v: np.maximum(_box(u, v, 1000, 360), _box(u, v, 360, 1000)),
    "star": _star,
    "hexagon": lambda u, v: 887 - np.maximum(abs(v), (887 * abs(u) + 512 * abs(v)) >> 10),
    "crescent": lambda u, v: np.minimum(_disc(u, v), -_disc(u - 560, v, 740)),
    "arrow": lambda u, v: np.maximum(np.minimum(u + 60, 724 * (1040 - u - abs(v)) >> 10), _box(u + 450, v, 550, 400)),
    "heart": lambda u, v: np.maximum(724 * (800 - abs(u) - abs(v - 80)) >> 10, _disc(abs(u) - 400, v + 320, 566)),
}
"""How far inside the shape (u, v) lies: negative outside, and close to the true distance near the edge."""


def _bands(t: Ints, period: int) -> Ints:
    """Bands perpendicular to t, with soft edges."""
    return np.clip(FULL // 2 + (abs(t % period - period // 2) - period // 4) * 3, 0, FULL)


def _dots(u: Ints, v: Ints) -> Ints:
    """Seven dots in a hexagonal pattern: every second row is shifted by half a period."""
    row = (v + 260) // 520
    return np.clip(_disc((u + 300 * (row + 1)) % 600 - 300, v - 520 * row, 180) * 4, 0, FULL)


TEXTURES: dict[str, Field] = {
    "plain": lambda u, v: np.zeros_like(u),
    "core": lambda u, v: np.clip(_disc(u, v, 420) * 3, 0, FULL),
    "chequers": lambda u, v: abs(_bands(u + 207, 830) - _bands(v + 207, 830)),
    "stripes": lambda u, v: _bands(v, 580),
    "segments": lambda u, v: ((u < 0) ^ (v < 0)) * np.int64(FULL),
    "fade": lambda u, v: np.clip((v + 600) // 4, 0, FULL),
    "dots": _dots,
    "hoops": lambda u, v: _bands((u * u + v * v) >> 10, 520),
    "chevrons": lambda u, v: _bands(u + abs(v), 640),
}
"""The share of the second colour at (u, v), 0..FULL."""


def _slope(rng: SplitMix, x: Ints, y: Ints) -> Ints:
    slope: Ints = (8 * y + rng.between(-8, 8) * (x - SIDE // 2)) * FULL // (8 * SIDE)
    return np.clip(slope, 0, FULL)


def _clouds(rng: SplitMix, x: Ints, y: Ints) -> Ints:
    """Noise on a coarse grid, interpolated linearly."""
    cells = rng.between(4, 8)
    values = rng.noise(cells + 1, cells + 1)
    step = SIDE // cells + 1
    (row, down), (column, right) = np.divmod(y, step), np.divmod(x, step)
    upper = values[row, column] * (step - right) + values[row, column + 1] * right
    lower = values[row + 1, column] * (step - right) + values[row + 1, column + 1] * right
    clouds: Ints = (upper * (step - down) + lower * down) // (step * step)
    return clouds


def _boards(rng: SplitMix, x: Ints, y: Ints) -> Ints:
    a, b, c = rng.rotation()
    return _bands((a * x + b * y) // (8 * c), rng.between(300, 700))


def _tiles(rng: SplitMix, x: Ints, y: Ints) -> Ints:
    cells = rng.between(4, 8)
    return rng.noise(cells, cells)[y * cells // SIDE, x * cells // SIDE]


class Background(NamedTuple):
    """A pattern in two colours."""

    pattern: Callable[[SplitMix, Ints, Ints], Ints]  # of x (1, size) and y (size, 1): (size, size) of 0..FULL
    colours: tuple[Colour, Colour]


SKY = Background(_slope, ((96, 142, 190), (204, 214, 222)))
MEADOW = Background(_clouds, ((70, 104, 62), (148, 166, 96)))
DECK = Background(_boards, ((142, 108, 78), (176, 142, 108)))
STREET = Background(_tiles, ((110, 108, 118), (186, 184, 190)))
BACKGROUNDS = (SKY, MEADOW, DECK, STREET)


class Kind(NamedTuple):
    """A foreground class: its appearance, its most frequent background and the classes that mostly occur with it."""

    name: str
    texture: str
    colours: tuple[Colour, Colour]
    background: Background
    partners: tuple[int, int]


KINDS = (
    Kind("disc", "core", ((214, 62, 52), (250, 196, 180)), MEADOW, (3, 4)),
    Kind("square", "chequers", ((236, 142, 40), (250, 226, 170)), STREET, (5, 1)),
    Kind("triangle", "stripes", ((40, 150, 84), (206, 236, 160)), SKY, (1, 6)),
    Kind("ring", "segments", ((214, 62, 52), (246, 242, 236)), DECK, (5, 2)),
    Kind("cross", "plain", ((52, 92, 196), (160, 190, 246)), STREET, (2, 4)),
    Kind("star", "fade", ((248, 208, 48), (236, 142, 40)), SKY, (3, 5)),
    Kind("hexagon", "dots", ((240, 186, 40), (116, 70, 26)), STREET, (1, 2)),
    Kind("crescent", "hoops", ((124, 70, 176), (186, 142, 222)), SKY, (6, 3)),
    Kind("arrow", "chevrons", ((20, 126, 140), (104, 200, 200)), DECK, (4, 5)),
    Kind("heart", "plain", ((232, 84, 140), (255, 190, 214)), MEADOW, (1, 6)),
)
