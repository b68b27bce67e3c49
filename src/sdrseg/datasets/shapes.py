"""The generated data set: textured shapes on varied backgrounds, the same bytes on every machine.

All arithmetic is on 64-bit integers, and the random numbers are a hash of (seed, split, image number, counter).
Floating point and the random numbers of libraries could differ between machines or versions.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import ClassVar

import numpy as np

from sdrseg.config import Config
from sdrseg.datasets.shapes_appearance import (
    BACKGROUNDS,
    FULL,
    KINDS,
    ONE,
    SIDE,
    SILHOUETTES,
    TEXTURES,
    WORD,
    Ints,
    SplitMix,
)
from sdrseg.datasets.source import Array, Source, Split
from sdrseg.errors import DataError, UsageError
from sdrseg.labels import VOID

VERSION = "shapes-1"
"""Part of `coding`; increment it whenever any byte of the data changes."""

EDGE = FULL * 9 // 16  # half the width of the void border: slightly over half a pixel, so that it has no gaps
LABELS = tuple(range(1, len(KINDS) + 1))
CENTRES = tuple((x * SIDE // 32, y * SIDE // 32) for x in (9, 23) for y in (9, 23))
JITTER = SIDE * 9 // 64
"""The largest distance of an object from its centre: objects often overlap, but none is hidden completely."""


def _choose_labels(rng: SplitMix) -> list[int]:
    """The labels of one to four objects: a main one, and with it mostly its partners."""
    main = rng.pick(LABELS)
    partners = KINDS[main - 1].partners
    others = [rng.pick(partners if rng.chance(65) else LABELS) for _ in range(rng.pick((0, 1, 1, 2, 2, 3, 3)))]
    return [main, *others]


def _blend(first: Ints, second: Ints, weight: Ints) -> Ints:
    """(H, W, 3) from colours of broadcastable shape and (H, W) weights of the second colour, 0..FULL."""
    return first + (((second - first) * weight[:, :, None]) >> 8)


@lru_cache(maxsize=16)  # image and mask of one id are requested one after the other
def _draw(size: int, seed: int, split: int, number: int) -> tuple[Array, Array]:
    """One scene: image (size, size, 3) and mask (size, size)."""
    rng = SplitMix(seed, split, number)
    centres = (2 * np.arange(size, dtype=np.int64) + 1) * SIDE // (2 * size)
    labels = _choose_labels(rng)
    background = KINDS[labels[0] - 1].background if rng.chance(70) else rng.pick(BACKGROUNDS)
    first, second = (rng.near(colour, 24) for colour in background.colours)
    image = _blend(first, second, background.pattern(rng, centres[None], centres[:, None]))
    mask = np.zeros((size, size), np.uint8)

    for label, centre in zip(rng.shuffled(labels), rng.shuffled(CENTRES), strict=False):
        kind = KINDS[label - 1]
        radius = rng.between(SIDE * 15 // 100, SIDE * 26 // 100)
        x, y = (middle + rng.between(-JITTER, JITTER) for middle in centre)
        a, b, c = rng.rotation()
        appearance = rng.pick(KINDS) if rng.chance(25) else kind  # so that colour alone does not reveal the class
        first, second = (rng.near(colour, 30) for colour in appearance.colours)

        reach = radius * 4 // 3  # no silhouette is larger
        columns, rows = (slice(*np.searchsorted(centres, (p - reach, p + reach))) for p in (x, y))
        dx, dy = centres[None, columns] - x, centres[rows, None] - y
        u, v = (a * dx + b * dy) * ONE // (c * radius), (a * dy - b * dx) * ONE // (c * radius)
        depth = SILHOUETTES[kind.name](u, v) * radius * size * FULL // (ONE * SIDE)  # in pixels / FULL
        light = (dx + dy) * 36 // radius  # from the upper left
        surface = _blend(first, second, TEXTURES[kind.texture](u, v)) - light[:, :, None]
        image[rows, columns] = _blend(image[rows, columns], surface, np.clip(depth + FULL // 2, 0, FULL))
        mask[rows, columns][depth > -EDGE] = VOID
        mask[rows, columns][depth > EDGE] = label

    image += rng.noise(size, size)[:, :, None] // 11 - 12
    return image.clip(0, 255).astype(np.uint8), mask


class Shapes(Source):
    """Scenes with one to four objects of ten classes, drawn on demand."""

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
    # Learning rates are far above those for VOC, and rate times weight must stay small. Distillation: measured with
    # scripts/tune_shapes.py (ILT and LwF-MC diverge at 5). Importance: 2·λ·I·lr < 1.36, and I may reach 2 (RW).
    limits: ClassVar = {
        "*": {"kd.weight": 5.0, "enc.weight": 1.0, "importance.weight": 15.0},
        "lwf-mc": {"kd.weight": 1.0},  # a sum over classes
        "laps": {"kd.weight": 0.5},  # a sum over classes as well; diverges at 5
    }

    @classmethod
    def open(cls, path: Path | None, config: Config) -> Source:
        return cls(config.shapes.size, config.shapes.train, config.shapes.val, config.shapes.seed)

    def __init__(self, size: int = 64, train: int = 1200, val: int = 200, seed: int = 0) -> None:
        limits = {"size": (size, 32, 1024), "train": (train, 1, 10**5), "val": (val, 1, 10**5), "seed": (seed, 0, WORD)}
        for setting, (value, low, high) in limits.items():
            if not isinstance(value, int) or not low <= value <= high:
                raise UsageError(f"shapes.{setting} = {value!r}: use a whole number from {low} to {high}.")
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

    def image_content(self, id: str) -> bytes:
        return f"{self.coding} {id}".encode()

    def mask_content(self, id: str) -> bytes:
        return self._scene(id)[1].tobytes()

    def _scene(self, id: str) -> tuple[Array, Array]:
        if id not in self._keys:
            ranges = " and ".join(f"{ids[0]} to {ids[-1]}" for ids in self._ids.values())
            raise DataError(f"{self.file(id, 'image')}: no such image; the ids are {ranges}.")
        return _draw(self.size, self.seed, *self._keys[id])
