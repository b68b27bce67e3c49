"""The settings of LAPS."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Literal

from sdrseg.config.switches import later, switch

training = partial(later, iterating=True)
"""A setting of later steps that are trained, not only fitted."""


@dataclass(frozen=True)
class Laps:
    """Sigmoid rows and a memory of old classes (LAPS)."""

    memory: Literal["gaussian", "prototype", "features"] = later(
        "features",
        "what is kept of each class: mean with low-rank and diagonal covariance, and clusters of background; mean and "
        "variance; or feature vectors (512 per class, 8,192 of background)",
    )
    encoder: int = later(
        256,
        "number of principal components of the encoder's features that new rows see, besides the decoder's output",
        0,
        4096,
    )
    rank: int = later(16, "rank of a class's covariance, in addition to the diagonal, for memory = gaussian", 0, 256)
    clusters: int = later(64, "number of clusters of background, for memory = gaussian", 1, 1024)
    positive_base: float = switch(2.0, "weight of a class's own pixels in step 0", 0)
    positive: float = later(2.0, "weight of a class's own pixels in later steps", 0)
    replay: float = training(
        1.0, "weight of remembered points; 1: in proportion to all data seen so far; 0: no replay (training)", 0
    )
    versus: float = training(
        1.0, "weight of the softmax of old rows against new ones on remembered features (training)", 0
    )
    anchor: float = training(
        0.0, "weight of the change of the decoder's output where the teacher predicts an old class (training)", 0
    )
    row_rate: float = training(10.0, "learning-rate multiplier of new rows, on top of the decoder's (training)", 0)
    init: Literal["small", "closed_form", "logistic"] = later(
        "logistic",
        "new rows start near zero with bias −3, as linear discriminants of the step's features and the memory, or by "
        "logistic regression on them",
    )
    level: Literal["zero", "old"] = later(
        "old",
        "decision threshold of the logistic regression: score 0, or the log-sum-exp of background (0) and the old rows",
    )
    ridge: float = later(1e-2, "penalty of the logistic regression on rows, for standardised features", 1e-8, 1.0)
    fit_only: bool = later(
        True,
        "later steps only fit new rows by logistic regression; false: then all of the network is trained by gradient "
        "descent",
    )
    on_new: Literal["teacher", "no"] = training(
        "teacher",
        "target of old rows where the label is a new class: the teacher's probability, or 0 (training)",
    )
    views: int = later(1, "number of augmented views of each image that new rows are fitted on", 1, 64)
    prior: Literal["seen", "average"] = later(
        "seen",
        "assumed frequency of a new class: as in all data seen so far, or at least that of an average old class (for "
        "few images, whose frequencies are not representative)",
    )
    drift: bool = training(False, "shift the memory with the features of old classes, where the teacher predicts them")
