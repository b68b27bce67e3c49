"""Settings of an extension by the number of its training images: declared here once, explained in docs/extend.md."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from sdrseg.methods import find_method
from sdrseg.methods.laps import LAPS


@dataclass(frozen=True)
class Regime:
    """Settings for up to `images` training images (None: any number). The first entry that fits is used."""

    images: int | None
    batch: int
    iterations: int  # the minimum; at least EPOCHS epochs
    slower: int  # the learning rate of step 0 is divided by this
    views: int  # of each image, on which LAPS fits rows


REGIMES = (
    Regime(63, batch=4, iterations=400, slower=25, views=16),
    Regime(None, batch=8, iterations=400, slower=10, views=1),
)
OF_LAPS = {"prior": "average", "positive": 1.0}
"""Settings of LAPS for any number of images. They and the views were chosen on held-out training images
(docs/extend.md)."""
EPOCHS = 8
SCORES = 10
"""How often the held-out images are scored."""
PATIENCE = 4
"""Training ends after this number of scores without improvement."""


def regime_of(images: int) -> Regime:
    return next(one for one in REGIMES if one.images is None or images <= one.images)


def settings_by_size(
    images: int, held_out: bool, method: str, rate: float, most: float | None = None
) -> dict[str, dict[str, Any]]:
    """Settings for a number of training images. With held-out images, the model with their best score is kept.

    `rate`: the learning rate of step 0. `most`: the largest learning rate, if the user set one.
    """
    regime = regime_of(images)
    batch = min(regime.batch, images)
    epochs = max(EPOCHS, math.ceil(regime.iterations / (images // batch)))
    watched = {"best_every": max(1, epochs // SCORES), "patience": PATIENCE} if held_out else {}
    slower = rate / regime.slower
    settings: dict[str, dict[str, Any]] = {
        "train": {"batch_size": batch, "epochs": epochs, **watched},
        "optim": {"lr_later": slower if most is None else min(slower, most)},
    }
    laps = {LAPS.section: {**OF_LAPS, "views": regime.views}}
    return settings | (laps if issubclass(find_method(method), LAPS) else {})
