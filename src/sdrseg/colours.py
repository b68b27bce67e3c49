"""Colours that people with any colour vision can tell apart, and text that can be read on them. NumPy only."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
from numpy.typing import NDArray

Colour = tuple[int, int, int]
Floats = NDArray[np.float64]

LINES = ("#0072b2", "#d55e00", "#009e73", "#a0569b", "#56b4e9", "#e69f00")
"""Colours of runs in charts, after Okabe and Ito; beyond six runs, dashes and markers distinguish them."""
DASHES = ("", "7 3", "2 3", "9 3 2 3", "12 4", "4 2 1 2 1 2")
MARKERS = ("circle", "square", "triangle", "diamond", "cross", "ring")

BACKGROUND: Colour = (0, 0, 0)
NOT_SCORED: Colour = (255, 255, 255)
_FIRST: tuple[Colour, ...] = (
    (230, 159, 0), (86, 180, 233), (0, 158, 115), (240, 228, 66), (0, 114, 178), (213, 94, 0), (204, 121, 167),
)  # fmt: skip
_PROTAN = ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998))
_DEUTAN = ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881))
"""How colours look without red or green cones, in linear RGB (Machado, Oliveira and Fernandes 2009)."""


@cache
def colour_table() -> NDArray[np.uint8]:
    """(256, 3) by class id: background black, then Okabe and Ito's, then always the one farthest from the others; 255,
    not scored, is white.

    The distance is the smallest over normal vision and vision without red or green cones; the latter two count double,
    because colours differ less there. A class has the same colour at every step and everywhere.
    """
    levels = np.linspace(0, 255, 11).round()
    grid = np.stack(np.meshgrid(levels, levels, levels, indexing="ij"), -1).reshape(-1, 3)
    appearance = _appearance(grid)
    usable = (appearance[0, :, 0] > 0.45) & (appearance[0, :, 0] < 0.93)
    grid, appearance = grid[usable], appearance[:, usable]
    chosen = [BACKGROUND, *_FIRST]
    distance = _distances(appearance, _appearance(np.array([*chosen, NOT_SCORED], np.float64))).min(axis=1)
    while len(chosen) < 255:
        best = int(np.argmax(distance))
        chosen.append((int(grid[best, 0]), int(grid[best, 1]), int(grid[best, 2])))
        distance = np.minimum(distance, _distances(appearance, appearance[:, best : best + 1])[:, 0])
    table = np.array([*chosen, NOT_SCORED], np.uint8)
    table.flags.writeable = False
    return table


def class_colours(ids: Sequence[int]) -> tuple[Colour, ...]:
    """The colours of some classes, by their ids in the data set."""
    rows = colour_table()[list(ids)].tolist()
    return tuple((red, green, blue) for red, green, blue in rows)


def _appearance(rgb: Floats) -> Floats:
    """(3, N, 3): the colours in OKLab with normal vision, and without red or green cones."""
    linear = _linear(rgb)
    return np.stack([_oklab(linear), *(_oklab((linear @ np.array(m).T).clip(0, 1)) for m in (_PROTAN, _DEUTAN))])


def _distances(a: Floats, b: Floats) -> Floats:
    """(N, M): the smallest distance over the three kinds of vision."""
    weight = np.array([1.0, 2.0, 2.0])[:, None, None]
    distances: Floats = (weight * np.linalg.norm(a[:, :, None] - b[:, None], axis=-1)).min(axis=0)
    return distances


def _linear(rgb: Floats) -> Floats:
    value = np.asarray(rgb, np.float64) / 255
    return np.where(value <= 0.04045, value / 12.92, ((value + 0.055) / 1.055) ** 2.4)


def _oklab(linear: Floats) -> Floats:
    """Björn Ottosson's OKLab, in which distances match perceived differences."""
    to_cones = np.array(
        [[0.4122215, 0.5363325, 0.0514460], [0.2119035, 0.6806995, 0.1073970], [0.0883025, 0.2817188, 0.6299787]]
    )
    to_lab = np.array(
        [[0.2104543, 0.7936178, -0.0040720], [1.9779985, -2.4285922, 0.4505937], [0.0259040, 0.7827718, -0.8086758]]
    )
    lab: Floats = np.cbrt(linear @ to_cones.T) @ to_lab.T
    return lab


def hex_of(colour: Colour) -> str:
    return "#{:02x}{:02x}{:02x}".format(*colour)


def luminance(colour: Colour) -> float:
    """Relative luminance as WCAG 2 defines it."""
    return float(_linear(np.array(colour, np.float64)) @ (0.2126, 0.7152, 0.0722))


def contrast(a: Colour, b: Colour) -> float:
    """The contrast ratio of WCAG 2, 1 to 21."""
    light, dark = sorted((luminance(a), luminance(b)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def text_on(background: Colour) -> str:
    """Black or white, whichever has more contrast."""
    return "#000" if contrast((0, 0, 0), background) >= contrast((255, 255, 255), background) else "#fff"


_SHADES = np.array(
    [(247, 251, 255), (219, 233, 246), (186, 214, 235), (137, 190, 220), (83, 157, 204), (42, 122, 185), (8, 69, 148)]
)
_WARM = np.array([(255, 248, 240), (254, 222, 184), (253, 184, 124), (247, 139, 66), (224, 96, 24), (160, 58, 6)])


def shade(share: float, warm: bool = False) -> Colour:
    """From white (0) to dark blue (1), or to dark orange."""
    scale = _WARM if warm else _SHADES
    position = min(1.0, max(0.0, share)) * (len(scale) - 1)
    low = min(int(position), len(scale) - 2)
    mixed = scale[low] + (position - low) * (scale[low + 1] - scale[low])
    return (round(mixed[0]), round(mixed[1]), round(mixed[2]))
