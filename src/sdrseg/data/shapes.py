"""The generated data set: textured shapes on varied grounds, the same bytes on every machine.

Everything is integer arithmetic on 64-bit types, and the random numbers are a hash of (seed, split, image number,
counter): no floating point and no library's random stream, which could differ between machines or versions.

The side of an image is SIDE long, however many pixels it has, so one scene looks the same at any size. A shape has
coordinates (u, v) of its own, turned and scaled so that ONE is its radius.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from sdrseg.config import Config
from sdrseg.data.source import Array, Source, Split
from sdrseg.errors import DataError, UsageError
from sdrseg.labels import VOID

VERSION = "shapes-1"
"""Part of `coding`; changes with any change that moves a single byte."""

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
    """The output function of splitmix64, of one Python int or of a uint64 array (whose products wrap by themselves)."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & WORD
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & WORD
    return x ^ (x >> 31)


class Dice:
    """Random numbers that depend on the key and on how many were drawn before, and on nothing else."""

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

    def near(self, colour: Colour, reach: int) -> Ints:
        """A colour like this one, (3,)."""
        return np.array([channel + self.between(-reach, reach) for channel in colour], np.int64)

    def turn(self) -> tuple[int, int, int]:
        """(a, b, c) with a² + b² = c²: a/c and b/c are the cosine and the sine of an angle, without rounding."""
        a, b, c = self.pick(TRIPLES)
        return self.pick(((a, b, c), (-b, a, c), (-a, -b, c), (b, -a, c)))

    def noise(self, rows: int, columns: int) -> Ints:
        """(rows, columns) of 0..255."""
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
    """A pentagram is all that lies inside at least four of its five lines: the second least depth decides."""
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
"""How deep (u, v) lies inside the shape: negative outside, and close to a true distance near the edge."""


def _bands(t: Ints, period: int) -> Ints:
    """Bands across t, with soft edges."""
    return np.clip(FULL // 2 + (abs(t % period - period // 2) - period // 4) * 3, 0, FULL)


def _dots(u: Ints, v: Ints) -> Ints:
    """Seven dots like the cells of a honeycomb: every second row is shifted by half a step."""
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
"""How much of the second colour (u, v) has, 0..FULL."""


def _slope(dice: Dice, x: Ints, y: Ints) -> Ints:
    slope: Ints = (8 * y + dice.between(-8, 8) * (x - SIDE // 2)) * FULL // (8 * SIDE)
    return np.clip(slope, 0, FULL)


def _clouds(dice: Dice, x: Ints, y: Ints) -> Ints:
    """Noise at the knots of a coarse grid, linear between them."""
    cells = dice.between(4, 8)
    knots = dice.noise(cells + 1, cells + 1)
    step = SIDE // cells + 1
    (row, down), (column, right) = np.divmod(y, step), np.divmod(x, step)
    upper = knots[row, column] * (step - right) + knots[row, column + 1] * right
    lower = knots[row + 1, column] * (step - right) + knots[row + 1, column + 1] * right
    clouds: Ints = (upper * (step - down) + lower * down) // (step * step)
    return clouds


def _boards(dice: Dice, x: Ints, y: Ints) -> Ints:
    a, b, c = dice.turn()
    return _bands((a * x + b * y) // (8 * c), dice.between(300, 700))


def _tiles(dice: Dice, x: Ints, y: Ints) -> Ints:
    cells = dice.between(4, 8)
    return dice.noise(cells, cells)[y * cells // SIDE, x * cells // SIDE]


class Ground(NamedTuple):
    """A kind of background."""

    pattern: Callable[[Dice, Ints, Ints], Ints]  # of x (1, size) and y (size, 1): (size, size) of 0..FULL
    colours: tuple[Colour, Colour]


SKY = Ground(_slope, ((96, 142, 190), (204, 214, 222)))
MEADOW = Ground(_clouds, ((70, 104, 62), (148, 166, 96)))
DECK = Ground(_boards, ((142, 108, 78), (176, 142, 108)))
STREET = Ground(_tiles, ((110, 108, 118), (186, 184, 190)))
GROUNDS = (SKY, MEADOW, DECK, STREET)


class Kind(NamedTuple):
    """A foreground class: how it looks, the ground it is mostly seen on and the classes it is mostly seen with."""

    name: str
    texture: str
    colours: tuple[Colour, Colour]
    ground: Ground
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
EDGE = FULL * 9 // 16  # half the width of the void line, a little over half a pixel so that it has no gaps
LABELS = tuple(range(1, len(KINDS) + 1))
PLACES = tuple((x * SIDE // 32, y * SIDE // 32) for x in (9, 23) for y in (9, 23))
STRAY = SIDE * 9 // 64
"""Each object strays from a place of its own: objects often overlap, but none is hidden altogether."""


def _cast(dice: Dice) -> list[int]:
    """The labels of one to four objects: a leading one, and with it mostly its partners."""
    leader = dice.pick(LABELS)
    partners = KINDS[leader - 1].partners
    company = [dice.pick(partners if dice.chance(65) else LABELS) for _ in range(dice.pick((0, 1, 1, 2, 2, 3, 3)))]
    return [leader, *company]


def _blend(first: Ints, second: Ints, weight: Ints) -> Ints:
    """(H, W, 3) from colours that broadcast to it and (H, W) weights of the second, 0..FULL."""
    return first + (((second - first) * weight[:, :, None]) >> 8)


@lru_cache(maxsize=16)  # the image and the mask of one id are asked for one after the other
def _draw(size: int, seed: int, split: int, number: int) -> tuple[Array, Array]:
    """One scene: image (size, size, 3) and mask (size, size)."""
    dice = Dice(seed, split, number)
    centres = (2 * np.arange(size, dtype=np.int64) + 1) * SIDE // (2 * size)
    cast = _cast(dice)
    ground = KINDS[cast[0] - 1].ground if dice.chance(70) else dice.pick(GROUNDS)
    first, second = (dice.near(colour, 24) for colour in ground.colours)
    image = _blend(first, second, ground.pattern(dice, centres[None], centres[:, None]))
    mask = np.zeros((size, size), np.uint8)

    for label, place in zip(dice.shuffled(cast), dice.shuffled(PLACES), strict=False):
        kind = KINDS[label - 1]
        radius = dice.between(SIDE * 15 // 100, SIDE * 26 // 100)
        x, y = (middle + dice.between(-STRAY, STRAY) for middle in place)
        a, b, c = dice.turn()
        dress = dice.pick(KINDS) if dice.chance(25) else kind  # colour alone does not tell the class
        first, second = (dice.near(colour, 30) for colour in dress.colours)

        reach = radius * 4 // 3  # no silhouette goes further
        columns, rows = (slice(*np.searchsorted(centres, (p - reach, p + reach))) for p in (x, y))
        dx, dy = centres[None, columns] - x, centres[rows, None] - y
        u, v = (a * dx + b * dy) * ONE // (c * radius), (a * dy - b * dx) * ONE // (c * radius)
        depth = SILHOUETTES[kind.name](u, v) * radius * size * FULL // (ONE * SIDE)  # in pixels / FULL
        light = (dx + dy) * 36 // radius  # from the upper left
        surface = _blend(first, second, TEXTURES[kind.texture](u, v)) - light[:, :, None]
        image[rows, columns] = _blend(image[rows, columns], surface, np.clip(depth + FULL // 2, 0, FULL))
        mask[rows, columns][depth > -EDGE] = VOID
        mask[rows, columns][depth > EDGE] = label

    image += dice.noise(size, size)[:, :, None] // 11 - 12
    return image.clip(0, 255).astype(np.uint8), mask


class Shapes(Source):
    """Scenes with up to four objects of ten classes, drawn when they are asked for."""

    name = "shapes"
    own_data = False
    classes = ("background", *(kind.name for kind in KINDS))
    needs_folder = False
    defaults: ClassVar = {
        "data": {"crop": 64},
        "eval": {"transform": "full_image", "batch_size": 50},
        "train": {"batch_size": 16, "epochs": 10},
        "net": {"encoder": "toy16", "output_stride": 8, "weights": "none", "bn_momentum_encoder": 0.1},
        "optim": {"lr": 0.05, "lr_later": 0.02, "decoder_lr_factor": 1.0, "decoder_lr_factor_later": 1.0},
    }
    # It is learned at rates far above those of VOC, and what has to stay small is the product: distillation by
    # scripts/tune_shapes.py (ILT and LwF-MC diverge at 5), importance because 2·λ·I·lr < 1.36 and I may be 2 (RW).
    limits: ClassVar = {
        "*": {"kd.weight": 5.0, "enc.weight": 1.0, "importance.weight": 15.0},
        "lwf-mc": {"kd.weight": 1.0},  # it adds up over classes
        "laps": {"kd.weight": 0.5},  # it does so too; 5 diverges
    }

    @classmethod
    def open(cls, path: Path | None, config: Config) -> Source:
        return cls(config.shapes.size, config.shapes.train, config.shapes.val, config.shapes.seed)

    def __init__(self, size: int = 64, train: int = 1200, val: int = 200, seed: int = 0) -> None:
        limits = {"size": (size, 32, 1024), "train": (train, 1, 10**5), "val": (val, 1, 10**5), "seed": (seed, 0, WORD)}
        for setting, (value, low, high) in limits.items():
            if not isinstance(value, int) or not low <= value <= high:
                raise UsageError(f"shapes.{setting} = {value!r}: give a whole number from {low} to {high}.")
        self.size, self.seed = size, seed
        counts: dict[Split, int] = {"train": train, "val": val}
        self._ids = {split: tuple(f"{split}-{n:05}" for n in range(count)) for split, count in counts.items()}
        self._keys = {id: (split, n) for split, ids in enumerate(self._ids.values()) for n, id in enumerate(ids)}

    @property
    def coding(self) -> str:
        return f"{VERSION} size={self.size} seed={self.seed}"

    def ids(self, split: Split) -> tuple[str, ...]:
        return self._ids[split]

    def image(self, id: str) -> Array:
        return self._scene(id)[0].copy()

    def mask(self, id: str) -> Array:
        return self._scene(id)[1].copy()

    def mask_content(self, id: str) -> bytes:
        return self._scene(id)[1].tobytes()

    def _scene(self, id: str) -> tuple[Array, Array]:
        if id not in self._keys:
            ranges = " and ".join(f"{ids[0]} to {ids[-1]}" for ids in self._ids.values())
            raise DataError(f"{self.file(id, 'image')}: no such image; there are {ranges}.")
        return _draw(self.size, self.seed, *self._keys[id])
