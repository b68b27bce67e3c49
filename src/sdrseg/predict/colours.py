"""The colours of classes: by id alone, so that a class keeps its colour at every step and in every picture."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from sdrseg.data.source import VOID, Array, palette

OKABE_ITO = ((230, 159, 0), (86, 180, 233), (0, 158, 115), (240, 228, 66), (0, 114, 178), (213, 94, 0), (204, 121, 167))
TOL_MUTED = (
    *((51, 34, 136), (17, 119, 51), (136, 34, 85), (221, 204, 119), (68, 170, 153)),
    *((153, 153, 51), (204, 102, 119), (170, 68, 153)),
)
APART = 32  # colours closer than this (largest difference of a channel) are not told apart


@lru_cache(maxsize=1)
def class_colours() -> Array:
    """(256, 3) by class id: black for 0; for 1 to 15 colours that the colour-blind tell apart too; then the VOC colours
    in their order, less those too close to one before. 255, void, is white."""
    chosen: list[tuple[int, ...]] = [(0, 0, 0), *OKABE_ITO, *TOL_MUTED]
    for colour in palette()[1:]:
        if np.abs(np.array([*chosen, (255, 255, 255)]) - colour).max(axis=1).min() >= APART:
            chosen.append(tuple(int(v) for v in colour))
    chosen += [tuple(int(v) for v in c) for c in palette()[1:] if tuple(c) not in set(chosen)]  # the close ones last
    table = np.array(chosen[:256], np.uint8)
    table[VOID] = 255
    table.flags.writeable = False
    return table
