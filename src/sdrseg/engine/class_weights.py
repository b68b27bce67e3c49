"""Weights of classes in the cross-entropy: set by name, or by how rare they are in the images of a step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from sdrseg.config import Config
from sdrseg.datasets.index import ClassIndex
from sdrseg.errors import UsageError, nearest
from sdrseg.labels import VOID
from sdrseg.scenario import Step

LEAST, MOST = 0.1, 10.0


def require_class_weights(config: Config, classes: Sequence[str]) -> None:
    """Raise an error for invalid weights."""
    if config.ce.class_weights != "none" and config.ce.kind in ("binary", "one_vs_rest"):
        raise UsageError(f"ce.class_weights cannot be used with ce.kind={config.ce.kind}, which has no softmax.")
    weights_by_name(config.ce.class_weights, classes)


def class_weights(config: Config, step: Step, index: ClassIndex, classes: Sequence[str]) -> tuple[float, ...] | None:
    """The weight of each channel of a step; None if all are equal."""
    text = config.ce.class_weights
    if text == "none":
        return None
    if text != "frequency":
        named = weights_by_name(text, classes)
        return tuple(named.get(classes[id], 1.0) for id in step.channels)
    row_of = {id: row for row, id in enumerate(index.ids)}
    pixels = index.pixels[[row_of[id] for id in step.train_ids]]
    return frequency_weights(pixels, step.train_table, len(step.channels))


def weights_by_name(text: str, classes: Sequence[str]) -> dict[str, float]:
    """Weights by name, from "cat=2, dog=0.5"."""
    if text in ("none", "frequency"):
        return {}
    weights = {}
    for part in text.split(","):
        name, equals, number = (side.strip() for side in part.rpartition("="))
        try:
            value = float(number)
        except ValueError:
            value = -1.0
        if not equals or not 0 <= value < float("inf"):
            raise UsageError(
                f"ce.class_weights: {part.strip()!r} is not valid. Write none, frequency or NAME=WEIGHT, …"
            )
        if name not in classes:
            raise UsageError(f"ce.class_weights: {name!r} is not a class{nearest(name, list(classes))}")
        weights[name] = value
    return weights


def frequency_weights(pixels: NDArray[np.int64], table: NDArray[np.uint8], channels: int) -> tuple[float, ...]:
    """Median frequency balancing (Eigen and Fergus 2015): the median class frequency divided by the class's own,
    which is its share of the pixels of the images that show it. A class that no image shows gets weight 1.

    `pixels` (images, 256): the number of pixels with each label value; `table`: the channel of each value.
    """
    counts = np.stack([pixels[:, table == channel].sum(1) for channel in range(channels)], axis=1)
    counts = counts.astype(np.float64)
    labelled = pixels[:, table != VOID].sum(1).astype(np.float64)
    present = counts > 0
    frequency = counts.sum(0) / np.maximum((present * labelled[:, None]).sum(0), 1)
    seen = frequency > 0
    if not seen.any():
        return (1.0,) * channels
    weights = np.where(seen, np.median(frequency[seen]) / np.where(seen, frequency, 1), 1.0)
    return tuple(float(w) for w in np.where(seen, weights.clip(LEAST, MOST), 1.0))
