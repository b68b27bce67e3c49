"""The latent space of a run: prototypes, features before and after a step, their distribution and sparsity.

The features are those of the test images in the report, on the grid of the encoder's last feature map, with the true
class of each cell. Classes are channels of the last step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sdrseg.kernels.plain import rows_of
from sdrseg.labels import VOID
from sdrseg.losses.sparsity import SMALL, active_sums, class_maxima, hoyer_sums
from sdrseg.methods.memory import nbytes_of, parts_of
from sdrseg.reporting.collect import RunRecord
from sdrseg.reporting.pictures import ModelOutput

BINS = 25
UNCERTAIN = (0.3, 0.85)
"""Activations, relative to the largest of their class, that the sparsity term removes according to the paper."""
POINTS = 60  # per class in a projection

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Projection:
    """Two principal components of the features of the same cells before and after a step, in one basis: (N, 2) each."""

    before: int
    after: int
    points: tuple[Floats, Floats]
    channels: NDArray[np.int64]
    explained: float  # the share of the variance that the two axes explain


@dataclass(eq=False)
class Latent:
    """Measurements of the features of a run, by step."""

    hoyer: list[float] = field(default_factory=list)
    active: list[float] = field(default_factory=list)
    channels: int = 0
    histogram: Floats | None = None  # shares of activations in BINS bins of 0..1, after the last step
    negative: bool = False  # whether there were features below 0 (they count as 0)
    projection: Projection | None = None


@dataclass(eq=False)
class _Step:
    """Sums over the images of one step."""

    hoyer: Tensor = field(default_factory=lambda: torch.zeros(2, dtype=torch.float64))
    active: Tensor = field(default_factory=lambda: torch.zeros(2, dtype=torch.float64))
    counts: Floats = field(default_factory=lambda: np.zeros(BINS))
    vectors: list[Tensor] = field(default_factory=list)
    labels: list[Tensor] = field(default_factory=list)
    negative: bool = False


def measure(outputs: Iterable[ModelOutput], run: RunRecord, classes: int) -> Latent:
    """Measure the features of all models of a run; only those of the last two steps are kept."""
    steps: dict[int, _Step] = {}
    width = 0
    for one in outputs:
        step = steps.setdefault(one.step, _Step())
        step.hoyer += hoyer_sums(one.features, one.labels)
        step.active += active_sums(one.features, one.labels)
        width = one.features.shape[1]
        if one.step == run.last:
            step.counts += normalised_counts(one.features.clamp_min(0), one.labels, classes)
            step.negative |= bool((one.features < 0).any())
        if one.step >= run.last - 1:
            label = one.labels.flatten()
            step.vectors.append(rows_of(one.features)[0][label != VOID])
            step.labels.append(label[label != VOID].long())
    result = Latent([_mean(steps[k].hoyer) for k in sorted(steps)], [_mean(steps[k].active) for k in sorted(steps)])
    result.channels = width
    if run.last in steps:
        total = steps[run.last].counts.sum()
        result.histogram = steps[run.last].counts / total if total > 0 else None
        result.negative = steps[run.last].negative
        if run.last > 0:
            pair = [(torch.cat(steps[k].vectors), torch.cat(steps[k].labels)) for k in (run.last - 1, run.last)]
            if len(pair[0][1]) > 0:  # in small images, every cell of the grid may be unlabelled
                result.projection = project(run.last - 1, run.last, pair[0], pair[1])
    return result


def normalised_counts(features: Tensor, labels: Tensor, classes: int) -> Floats:
    """The number of activations in each bin of 0..1, after dividing by the largest of their class in the image (Eq. 9).

    Void and classes whose features are all zero are left out.
    """
    maxima = class_maxima(features, labels, classes)
    label = labels.flatten(1).long()
    scale = maxima.gather(1, torch.where(label == VOID, 0, label))
    keep = (label != VOID) & (scale > SMALL)
    values = (rows_of(features) / scale.clamp_min(SMALL)[:, :, None])[keep]
    counts: Floats = torch.histc(values.float(), BINS, 0, 1).double().numpy()
    return counts


def share_uncertain(histogram: Floats) -> float:
    """The share of a histogram of BINS bins over 0..1 that lies in UNCERTAIN; bins at its ends count in part."""
    edges = np.linspace(0, 1, BINS + 1)
    low, high = UNCERTAIN
    inside = np.clip(np.minimum(edges[1:], high) - np.maximum(edges[:-1], low), 0, None) * BINS
    return float((histogram * inside).sum())


def project(before: int, after: int, first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor]) -> Projection:
    """Principal components of both together, with the same cells of both: up to POINTS per class, evenly spaced."""
    chosen = torch.cat([_spread(first[1] == c) for c in sorted(set(first[1].tolist()))])
    vectors = [first[0][chosen].double(), second[0][chosen].double()]
    both = torch.cat(vectors)
    centre = both.mean(0)
    _, sizes, axes = torch.linalg.svd(both - centre, full_matrices=False)
    axes = axes[:2]
    axes = axes * torch.where(axes.gather(1, axes.abs().argmax(1, keepdim=True)) < 0, -1, 1)  # a fixed sign
    points = [((v - centre) @ axes.T).numpy() for v in vectors]
    explained = float(sizes[:2].square().sum() / sizes.square().sum().clamp_min(1e-30))
    return Projection(before, after, (points[0], points[1]), first[1][chosen].numpy(), explained)


def _spread(member: Tensor) -> Tensor:
    """Up to POINTS of the selected positions, evenly spaced."""
    positions = member.nonzero()[:, 0]
    if len(positions) <= POINTS:
        return positions
    return positions[torch.linspace(0, len(positions) - 1, POINTS).long()]


@dataclass(frozen=True)
class Remembered:
    """The remembered features of a run: the numbers of classes and of parts of background, and their bytes."""

    classes: int
    background: int
    nbytes: int


def remembered(memory: Mapping[str, Tensor]) -> Remembered | None:
    """The remembered features in the state of a method; None if there are none."""
    parts = parts_of(memory)
    if not parts:
        return None
    classes, background = ([] if n not in parts else parts[n].owner.tolist() for n in ("classes", "background"))
    return Remembered(len(set(classes)), len(background), nbytes_of(parts))


def prototype_distances(memory: Mapping[str, Tensor], average: str) -> Floats | None:
    """Euclidean distances between running prototypes; NaN if a class has none."""
    if f"prototypes.{average}.mean" not in memory:
        return None
    mean, counts = memory[f"prototypes.{average}.mean"].double(), memory[f"prototypes.{average}.seen"]
    distances: Floats = torch.cdist(mean, mean, compute_mode="donot_use_mm_for_euclid_dist").numpy()
    unknown = (counts == 0).numpy()
    distances[unknown, :] = distances[:, unknown] = np.nan
    return distances


def logged(run: RunRecord, metric: str) -> list[float | None]:
    """A metric of the features from the log, at the end of each step (None if the step was not trained in this run)."""
    last: dict[int, float] = {e["step"]: e["metrics"][metric] for e in run.log if metric in e.get("metrics", {})}
    return [last.get(k) for k in range(len(run.scores))]


def box_of(projection: Projection) -> tuple[float, float, float, float]:
    """The ranges of both panels: (left, right, low, high) of all points."""
    points = np.concatenate(projection.points)
    (left, low), (right, high) = points.min(0), points.max(0)
    return float(left), float(right), float(low), float(high)


def _mean(sums: Tensor) -> float:
    return float(sums[0] / sums[1].clamp_min(1))
