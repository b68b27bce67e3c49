"""The switches of the losses. A method is a set of values for these; a weight of 0 disables a term."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Literal

from sdrseg.config.setting import setting
from sdrseg.variants import SparsityVariant

switch = partial(setting, affects="losses")
"""A setting that does not affect a base of plain training."""
later = partial(setting, affects="teacher")
"""A setting that affects no base."""


@dataclass(frozen=True)
class Ce:
    """Cross-entropy."""

    kind: Literal["standard", "unbiased", "unbiased_if_masked", "binary", "one_vs_rest"] = switch(
        "standard",
        "standard; unbiased (UNCE); unbiased_if_masked: UNCE where old classes are masked (disjoint, overlapped), "
        "otherwise standard; binary (sigmoids); one_vs_rest (sigmoids of the step's classes, none for background)",
    )
    reduction: Literal["valid", "all"] = setting("valid", "mean over the labelled pixels, or over all (official code)")
    class_weights: str = setting(
        "none",
        "weights of the classes in CE and UNCE: none; frequency, by how rare a class is in the step's training images "
        "(median frequency balancing, 0.1 to 10); or NAME=WEIGHT, such as 'cat=2, dog=0.5', and 1 for all others",
    )
    init: Literal["default", "mib"] = switch(
        "default", "new rows of the classifier: PyTorch's default, or from the old background's row (MiB)"
    )


@dataclass(frozen=True)
class Kd:
    """Distillation of the teacher's output."""

    weight: float = later(0.0, "λ_kd", 0)
    kind: Literal["standard", "unbiased", "binary", "cil", "cil_official"] = later("unbiased", "which distillation")
    normaliser: Literal["n_old", "at_least_16", "none"] = later(
        "n_old",
        "divide KD and UNKD by the number of old classes; by that, but at least by the 16 of VOC 15-1, for which the "
        "published weights were chosen (the default for own data); or not at all",
    )
    padding: Literal["skip", "include"] = later(
        "skip", "pixels padded by augmentation, in every distillation; prototypes and sparsity never include them"
    )
    on_new: Literal["distil", "skip"] = later(
        "distil",
        "pixels labelled with a new class, in every distillation: distilled like all others (the paper), or skipped, "
        "because the teacher takes them for background or a similar old class",
    )
    entropy_weight: float = later(1.0, "λ_GS of CIL", 0)


@dataclass(frozen=True)
class Pseudo:
    """Pseudo-labels from the teacher."""

    threshold: float = later(
        0.0, "relabel background with the teacher's old class where its probability is at least this; 0: never", 0, 1
    )


@dataclass(frozen=True)
class Enc:
    """Distillation of the encoder's features (ILT)."""

    weight: float = later(0.0, "λ_enc", 0)


@dataclass(frozen=True)
class Proto:
    """Prototypes."""

    average: Literal["image", "pixel"] = setting("image", "average the class's mean of each image, or all its pixels")
    decay: float = setting(0.0, "β of the running prototypes' exponential moving average; 0: cumulative mean", 0, 1)
    background: Literal["by_protocol", "always", "never"] = setting(
        "by_protocol",
        "when to update the background's prototype; by_protocol: sequential in all steps, disjoint in step 0, "
        "overlapped never",
    )


@dataclass(frozen=True)
class Pm:
    """Prototype matching (Eq. 3)."""

    weight: float = later(0.0, "λ_pm", 0)
    distance: Literal["mse", "frobenius", "cosine"] = later("mse", "distance between running and in-batch prototypes")
    normaliser: Literal["present", "n_old"] = later(
        "present", "divide by the old classes present in the batch, or by all"
    )
    background: bool = later(False, "include the background if it has a prototype")


@dataclass(frozen=True)
class Cl:
    """The contrastive terms (Eq. 6 and 7)."""

    attract: float = switch(0.0, "λ of the attraction", 0)
    repel: float = switch(0.0, "λ of the repulsion", 0)
    form: Literal["mse", "norm_sum", "norm_mean"] = switch(
        "mse", "attraction: mean squares, or norms, summed (as printed in the paper) or averaged over a class's pixels"
    )
    scope: Literal["batch", "image"] = switch("batch", "attraction over the batch, or in each image")
    against: Literal["batch", "nearest"] = switch(
        "batch", "repulsion between the classes of the batch, or of each from the nearest running prototype"
    )
    normaliser: Literal["classes", "pairs"] = switch(
        "classes", "divide the repulsion in the batch by classes or by pairs of classes"
    )
    labels: Literal["truth", "pseudo"] = switch("truth", "the labels, or with background relabelled by the teacher")
    background: Literal["include_if_known", "include", "exclude"] = switch(
        "include_if_known",
        "include the background if it has a prototype; always (attracted to 0 without one); or never",
    )


@dataclass(frozen=True)
class Sp:
    """Sparsity of the features (Eq. 8 and 9)."""

    weight: float = switch(0.0, "λ_sp", 0)
    variant: SparsityVariant = switch("class_max", "sparsity measure")
    scope: Literal["image", "batch"] = switch(
        "image", "take the largest activation of a class in each image, or in the batch"
    )
    detach_max: bool = switch(False, "detach the largest activation from the gradient")


@dataclass(frozen=True)
class Latent:
    """All terms on the features (matching, attraction, repulsion, sparsity)."""

    step0: bool = setting(False, "enable attraction, repulsion and sparsity in step 0 too (standard segmentation)")
    official: bool = setting(False, "compute them as in the official code, bugs included")


@dataclass(frozen=True)
class Importance:
    """Penalties on the change of important parameters (EWC, PI, RW)."""

    weight: float = later(0.0, "λ", 0)
