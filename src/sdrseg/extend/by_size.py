"""Settings of an extension by the number of its training images: declared here once, explained in docs/extend.md."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from sdrseg.config import Config
from sdrseg.config.engine import Optim
from sdrseg.methods import find_method
from sdrseg.methods.laps import LAPS


@dataclass(frozen=True)
class Regime:
    """Settings for up to `images` training images (None: any number). The first entry that fits is used."""

    images: int | None
    batch: int
    iterations: int  # the minimum; at least EPOCHS epochs
    slower: int  # the learning rate of step 0 is divided by this; for LAPS by `SLOWER_LAPS`
    laps: dict[str, Any] = field(default_factory=dict)
    """Other settings for LAPS, by "section.key"."""


SLOWER_LAPS = 10
FITTED = {
    "laps.init": "logistic",
    "laps.fit_only": True,
    "laps.memory": "features",
    "laps.prior": "average",
    "laps.positive": 1.0,
}
"""LAPS with few images: gradient descent would destroy the features of old classes. See benchmarks/frozen_rows.py."""
REGIMES = (
    Regime(63, batch=4, iterations=400, slower=25, laps=FITTED),
    Regime(None, batch=8, iterations=400, slower=10),
)
EPOCHS = 8
SCORES = 10
"""How often the held-out images are scored."""
PATIENCE = 4
"""Training ends after this number of scores without improvement."""


def regime_of(images: int) -> Regime:
    return next(one for one in REGIMES if one.images is None or images <= one.images)


def settings_by_size(images: int, held_out: bool, parent: Config, method: str) -> dict[str, dict[str, Any]]:
    """Settings for a number of training images. With held-out images, the model with their best score is kept."""
    regime, laps = regime_of(images), issubclass(find_method(method), LAPS)
    batch = min(regime.batch, images)
    epochs = max(EPOCHS, math.ceil(regime.iterations / (images // batch)))
    watched = {"best_every": max(1, epochs // SCORES), "patience": PATIENCE} if held_out else {}
    rate = parent.optim.lr / (SLOWER_LAPS if laps else regime.slower)
    if parent.optim.lr_later != Optim().lr_later:  # chosen for this model
        rate = min(rate, parent.optim.lr_later)
    settings: dict[str, dict[str, Any]] = {
        "train": {"batch_size": batch, "epochs": epochs, **watched},
        "optim": {"lr_later": rate},
    }
    for key, value in regime.laps.items() if laps else ():
        section, _, name = key.partition(".")
        settings.setdefault(section, {})[name] = value
    return settings
