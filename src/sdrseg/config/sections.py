"""Sections of the configuration: data, evaluation, training, generated data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from sdrseg.config.setting import setting

AUTO = 0
"""train.batch_size = auto, until the run has chosen a number."""


@dataclass(frozen=True)
class Data:
    """How images become batches."""

    augment: Literal["scale_crop", "rrc"] = setting(
        "scale_crop",
        "scale_crop: random scale, padding, random crop (the paper); rrc: random resized crop (the official code)",
    )
    crop: int = setting(512, "side of the square training crop", 32)
    scale: tuple[float, float] = setting(
        (0.5, 2.0), "range of scale_crop's scale, and of rrc's area", 0.01, 100, increasing=True
    )
    colour: float = setting(
        0.0,
        "strength of colour augmentation: brightness, contrast and saturation of each image are multiplied by factors "
        "between 1 − colour and 1 + colour; 0: none, as in the paper; 0.3 is usual",
        0,
        0.9,
    )
    void_train: Literal["ignore", "background"] = setting(
        "ignore",
        "void pixels in disjoint and overlapped training: ignored, or background as in the official code",
        affects="data",
    )
    left_out: Literal["refuse", "background", "ignore"] = setting(
        "refuse",
        "classes that the task does not name: an error, background, or neither learned nor scored",
        affects="data",
    )
    cache: Literal["auto", "off", "ram", "gpu"] = setting(
        "auto", "keep decoded images in memory; auto: on the GPU or in RAM if they fit", affects="nothing"
    )
    workers: int = setting(
        -1,
        "processes that decode images, or threads that fill the cache; -1: the number of cores, at most 16",
        -1,
        256,
        affects="nothing",
    )


@dataclass(frozen=True)
class Eval:
    """How a model is scored."""

    transform: Literal["crop512", "full_image"] = setting(
        "crop512",
        "crop512: shorter side to 512, centre crop (the paper); full_image: every pixel at native size",
        affects="score",
    )
    also: Literal["none", "crop512", "full_image"] = setting(
        "none",
        "score the last step a second time, with this transform: steps/N/metrics-TRANSFORM.json",
        affects="nothing",
    )
    future: Literal["ignore", "background"] = setting(
        "ignore", "classes of later steps at test time: ignored, or scored as background", affects="score"
    )
    batch_size: int = setting(8, "batch size of scoring", 1, affects="nothing")
    every: int = setting(0, "epochs between scores during a step (needs train.holdout); 0: none", 0, affects="nothing")


@dataclass(frozen=True)
class Train:
    """How a step is trained."""

    batch_size: int = setting(
        8,
        "images per iteration, summed over all processes; auto: by the number of images, and by the memory of a GPU or "
        "the crop on a CPU (docs/own-data.md); config.json has the number that was chosen",
        1,
        keywords={"auto": AUTO},
    )
    epochs: int = setting(30, "passes over the images of each step", 1)
    batch_size_later: int = setting(0, "batch_size of the later steps; 0: the same", 0, affects="later", same=0)
    epochs_later: int = setting(0, "epochs of the later steps; 0: the same", 0, affects="later", same=0)
    holdout: float = setting(
        0.0,
        "share of the training images to hold out and score instead of the test images; for tuning, such as 0.2; "
        "0: none",
        0,
        0.9,
        affects="data",
    )
    holdout_scope: Literal["all", "step"] = setting(
        "all",
        "which held-out images are scored; all: those of all steps so far with all labels, which are not available to "
        "a method without old images (an oracle); step: those of the step itself with the labels of that step",
        affects="score",
    )
    best_every: int = setting(
        0,
        "epochs between scores of the held-out images (train.holdout); the best model of a step is kept; 0: keep the "
        "last model",
        0,
    )
    patience: int = setting(
        0, "early stopping: end a step after this number of scores without improvement; 0: never", 0
    )
    seed: int = setting(0, "seed of all random numbers", 0)


@dataclass(frozen=True)
class Shapes:
    """The generated data set."""

    size: int = setting(64, "side of the images", 32, 1024, affects="data")
    train: int = setting(1200, "training images", 1, affects="data")
    val: int = setting(200, "validation images", 1, affects="data")
    seed: int = setting(0, "seed of the generator", 0, affects="data")
