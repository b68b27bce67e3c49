"""From confusion matrices to reported scores. NumPy only.

A confusion matrix (K, K) counts pixels: row = truth, column = prediction, by channel. A class without ground truth has
no IoU (NaN) and is left out of every mean.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Matrix = NDArray[np.int64]
Values = NDArray[np.float64]


def iou(confusion: Matrix) -> Values:
    """Intersection over union of each class, TP / (TP + FP + FN); NaN without ground truth."""
    hit, truth, predicted = np.diag(confusion), confusion.sum(1), confusion.sum(0)
    union = truth + predicted - hit
    return np.where(truth > 0, hit / np.maximum(union, 1), np.nan)


def iou_of_all(confusion: Matrix, complete: Matrix) -> Values:
    """IoU of each class, with that of background from `complete`, the matrix of the images that label all classes: in
    others, its errors are known and its hits are not."""
    return np.concatenate([iou(complete)[:1], iou(confusion)[1:]])


def pixel_accuracy(confusion: Matrix) -> Values:
    """The share of each class's pixels that are found; NaN without ground truth."""
    truth = confusion.sum(1)
    return np.where(truth > 0, np.diag(confusion) / np.maximum(truth, 1), np.nan)


def as_background(confusion: Matrix, channels: Sequence[int], scored: bool = True) -> Matrix:
    """The matrix with some channels, those of removed classes, counted as background: as truth and as prediction.
    `scored`: whether background is; otherwise their pixels are not counted."""
    to = np.arange(len(confusion))
    to[list(channels)] = 0
    merged = np.zeros_like(confusion)
    np.add.at(merged, (to[:, None], to), confusion)
    if not scored:
        merged[0] = 0
    return merged


def with_known_background(confusion: Matrix, labelled: Collection[int] | None) -> Matrix:
    """The matrix of images that label only these channels (None: all), with unlabelled pixels counted only where one of
    them is predicted, as false alarms: elsewhere it is unknown whether the prediction is correct.

    Such images say nothing about background, because its hits are not known: `iou_of_all`.
    """
    if labelled is None:
        return confusion
    known = confusion.copy()
    known[0, [channel not in labelled for channel in range(len(known))]] = 0
    return known


def mean_of(values: Values, channels: Sequence[int]) -> float | None:
    """The mean over some channels, those without a value left out; None if none has one."""
    chosen = values[list(channels)]
    chosen = chosen[~np.isnan(chosen)]
    return float(chosen.mean()) if chosen.size else None


@dataclass(frozen=True)
class StepScore:
    """The scores after a step. `base`: how many channels are old, background included: those of step 0. `unknown`:
    channels that no scored image labels; pixels in their rows are only counted against other classes. `removed`:
    channels of removed classes, which the matrix counts as background. `complete`: the matrix of the images that label
    all classes, if some do not (None: all do)."""

    step: int
    names: tuple[str, ...]
    base: int
    confusion: Matrix
    unknown: tuple[int, ...] = ()
    removed: tuple[int, ...] = ()
    complete: Matrix | None = None

    @property
    def iou(self) -> Values:
        return self.iou_over(range(len(self.names)))

    def iou_over(self, channels: Collection[int]) -> Values:
        """IoU of each class over the pixels of some classes."""
        rows = np.isin(np.arange(len(self.names)), list(channels))[:, None]
        values = iou_of_all(np.where(rows, self.confusion, 0), np.where(rows, self._complete, 0))
        values[list(self.unknown)] = np.nan
        return values

    @property
    def accuracy(self) -> Values:
        return pixel_accuracy(self.by_truth)

    @property
    def by_truth(self) -> Matrix:
        """The predictions for the pixels of each class, by row: those of background in images that label all classes,
        none of classes that no image labels."""
        matrix = np.concatenate([self._complete[:1], self.confusion[1:]])
        matrix[list(self.unknown)] = 0
        return matrix

    @property
    def _complete(self) -> Matrix:
        return self.confusion if self.complete is None else self.complete

    def groups(self) -> dict[str, range]:
        """Channels of the reported means, with and without background."""
        k = len(self.names)
        return {
            "old": range(self.base),
            "new": range(self.base, k),
            "all": range(k),
            "old_without_background": range(1, self.base),
            "all_without_background": range(1, k),
        }

    def miou(self) -> dict[str, float | None]:
        """Mean IoU by group, and the harmonic mean of old and new."""
        means = {name: mean_of(self.iou, channels) for name, channels in self.groups().items()}
        return means | {"harmonic": harmonic(means["old"], means["new"])}

    def measured(self) -> dict[str, tuple[int, int]]:
        """By group: over how many classes its mean is, and how many classes it has. Removed classes do not count, nor
        does a background without pixels: some data have none."""
        known = ~np.isnan(self.iou)
        counted = [c for c in range(len(self.names)) if c not in self.removed and (c > 0 or known[0])]
        found = {name: [bool(known[c]) for c in channels if c in counted] for name, channels in self.groups().items()}
        return {name: (sum(flags), len(flags)) for name, flags in found.items()}

    def to_dict(self) -> dict[str, Any]:
        accuracy, pixels = self.accuracy, self.by_truth.sum(1)
        return {
            "step": self.step,
            "base": self.base,
            "miou": self.miou(),
            "accuracy": {name: mean_of(accuracy, channels) for name, channels in self.groups().items()},
            "classes": [
                {"channel": c, "name": name, "iou": without_nan(self.iou[c]), "accuracy": without_nan(accuracy[c])}
                | {"pixels": int(pixels[c])}
                for c, name in enumerate(self.names)
            ],
            "left_out": [name for c, name in enumerate(self.names) if np.isnan(self.iou[c]) and c not in self.removed],
            "confusion": self.confusion.tolist(),
            **{key: list(v) for key in ("unknown", "removed") if (v := getattr(self, key))},
            **({} if self.complete is None else {"complete": self.complete.tolist()}),
        }

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> StepScore:
        names = tuple(c["name"] for c in saved["classes"])
        matrix = np.array(saved["confusion"], np.int64)
        unknown, removed = (tuple(saved.get(key, ())) for key in ("unknown", "removed"))
        complete = np.array(saved["complete"], np.int64) if "complete" in saved else None
        return cls(saved["step"], names, saved["base"], matrix, unknown, removed, complete)


def harmonic(old: float | None, new: float | None) -> float | None:
    if old is None or new is None:
        return None
    return 2 * old * new / (old + new) if old + new > 0 else 0.0


def class_by_step(scores: Sequence[StepScore]) -> Values:
    """IoU of every class (rows, channels of the last step) after every step (columns); NaN before it was learned."""
    table = np.full((len(scores[-1].names), len(scores)), np.nan)
    for column, score in enumerate(scores):
        table[: len(score.names), column] = score.iou
    return table


def forgetting(table: Values) -> Values:
    """For each class and step: its best IoU after an earlier step minus its IoU now; NaN where there is none."""
    result = np.full_like(table, np.nan)
    for k in range(1, table.shape[1]):
        earlier = table[:, :k]
        seen = ~np.isnan(earlier).all(axis=1)
        result[seen, k] = np.nanmax(earlier[seen], axis=1) - table[seen, k]
    return result


def intransigence(table: Values, offline: Mapping[str, float | None], names: Sequence[str]) -> Values:
    """For each class: its IoU when all classes are learned at once minus its IoU after the step that introduced it."""
    result = np.full(len(names), np.nan)
    for channel, name in enumerate(names):
        values = table[channel][~np.isnan(table[channel])]
        bound = offline.get(name)
        if values.size and bound is not None:
            result[channel] = bound - values[0]
    return result


def partly_measured(scores: Sequence[StepScore]) -> list[int]:
    """Steps without an IoU for a class that has one after another step: their means are over fewer classes."""
    known = ~np.isnan(class_by_step(scores))
    wanted = known.any(axis=1)
    return [k for k, score in enumerate(scores) if (wanted & ~known[:, k])[: len(score.names)].any()]


def step_averaged(scores: Sequence[StepScore]) -> float | None:
    """The mean over the steps of "all"; None if some steps measure fewer classes or none."""
    means = [score.miou()["all"] for score in scores]
    known = [value for value in means if value is not None]
    return float(np.mean(known)) if len(known) == len(means) and not partly_measured(scores) else None


def summary(scores: Sequence[StepScore], offline: Mapping[str, float | None] | None = None) -> dict[str, Any]:
    """The summary of a chain of steps: means of the last and of each step, forgetting and intransigence."""
    table = class_by_step(scores)
    lost = forgetting(table)
    foreground = range(1, len(table))
    means = [score.miou() for score in scores]
    result: dict[str, Any] = {
        "steps": len(scores),
        "miou": means[-1],
        "miou_by_step": means,
        "step_averaged_miou": step_averaged(scores),
        "classes": list(scores[-1].names),
        "class_by_step": [[without_nan(v) for v in row] for row in table],
        "forgetting": {
            "by_class": [[without_nan(v) for v in row] for row in lost],
            "by_step": [mean_of(lost[:, k], foreground) for k in range(table.shape[1])],
            "final": mean_of(lost[:, -1], foreground),
        },
    }
    if offline is not None:
        values = intransigence(table, offline, scores[-1].names)
        by_class = [without_nan(v) for v in values]
        result["intransigence"] = {"by_class": by_class, "mean": mean_of(values, foreground)}
    return result


def without_nan(value: float) -> float | None:
    """A value for JSON: None in place of NaN."""
    return None if np.isnan(value) else float(value)
