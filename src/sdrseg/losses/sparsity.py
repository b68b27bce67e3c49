"""Sparsity of the features, L_sp (Eq. 8 and 9), and the nine variants it was compared with.

The published term is the exponential ratio Σ_j exp(f̄_j) / Σ_j f̄_j of features divided by the largest activation of
their class. It is smallest for the all-ones vector, so minimising it makes features denser; this is the published term,
and the log also shows the true sparsity (`hoyer`). Features must not be negative.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sdrseg.kernels.plain import at_least_float32, rows_of
from sdrseg.kernels.rows import exponential_ratios, largest
from sdrseg.labels import VOID
from sdrseg.losses.pixels import masked_sums
from sdrseg.variants import SparsityVariant

BY_CLASS = ("class_max", "power2", "power3", "l0")
"""The variants that need the largest activation of each class."""
COUNT_ZEROS = ("l0", "l1", "entropy_softmax")
"""The variants in which an all-zero vector counts; in the others it is undefined."""

EXPONENTIAL = ("class_max", "norm_max_overall")
"""The exponential ratios of features divided by a given maximum."""

SMALL = 1e-6
LOG_GUARD = 1e-10
L0_WIDTH = 0.1  # of the surrogate, in class maxima


def class_maxima(features: Tensor, labels: Tensor, classes: int) -> Tensor:
    """The largest activation of each class in each image, (B, K); 0 for a class that is absent.

    The gradient is shared evenly by all entries that equal the maximum, like that of `Tensor.max`.
    """
    bucket = _bucket(labels, classes)
    row_max, ties = largest(features)
    with torch.no_grad():
        empty = torch.zeros(len(ties), classes + 1, dtype=ties.dtype, device=ties.device)
        of_class = empty.scatter_reduce(1, bucket, row_max, "amax")
        share = ties * (row_max == of_class.gather(1, bucket))
        share = share / empty.scatter_add(1, bucket, share).gather(1, bucket).clamp_min(1)
    return empty.scatter_add(1, bucket, share * row_max)[:, :classes]


def sparsity_sums(features: Tensor, labels: Tensor, variant: SparsityVariant, maxima: Tensor | None = None) -> Tensor:
    """(2,) [Σ over positions of the per-vector loss, positions]; void does not count.

    `maxima` (B or 1, K) divides the features in the variants of BY_CLASS: `class_maxima`, or their maximum over the
    batch. In norm_max_overall it is the (1, 1) maximum of everything.
    """
    label = labels.flatten(1)
    keep = label != VOID
    known = torch.where(keep, label, 0).long()
    if variant in EXPONENTIAL:
        scale = _scale(rows_of(features), known, variant, maxima)[:, :, 0]
        alive = keep & (scale > SMALL)
        each, total = exponential_ratios(features, torch.where(alive, scale, torch.inf), SMALL)
        return masked_sums(each, alive & (total > SMALL))
    x = rows_of(at_least_float32(features))
    scale = _scale(x, known, variant, maxima)
    alive = keep & (scale[:, :, 0] > SMALL)
    if variant not in COUNT_ZEROS:
        keep = alive = alive & (x.sum(2) > SMALL)
    # Infinity for the others: their own scale may be 0, and where() does not stop 0 · inf = NaN in the backward pass.
    each = _per_vector(x / torch.where(alive[:, :, None], scale, torch.inf), variant)
    return masked_sums(each, keep)


def _scale(x: Tensor, label: Tensor, variant: SparsityVariant, maxima: Tensor | None) -> Tensor:
    """The divisor of each vector, (B, h·w, 1)."""
    if variant == "norm_max":
        return x.amax(2, keepdim=True)
    if variant == "norm_l2":
        return x.square().sum(2, keepdim=True).clamp_min(SMALL**2).sqrt()
    if variant == "entropy_l1":
        return x.sum(2, keepdim=True)
    if variant in ("l1", "entropy_softmax"):
        return torch.ones_like(x[:, :, :1])
    assert maxima is not None, f"{variant} needs maxima"
    if variant == "norm_max_overall":
        return maxima.expand(len(x), x.shape[1])[:, :, None]
    return maxima.expand(len(x), -1).gather(1, label)[:, :, None]


def _per_vector(bar: Tensor, variant: SparsityVariant) -> Tensor:
    """The loss of each scaled vector, (B, h·w)."""
    if variant == "l1":
        return bar.abs().sum(2)
    if variant == "l0":
        return (1 - torch.exp(-bar / L0_WIDTH)).sum(2)  # a surrogate: the true count has no gradient
    if variant == "entropy_softmax":
        bar = bar.softmax(2)
    if variant in ("entropy_l1", "entropy_softmax"):
        return -(bar * (bar + LOG_GUARD).log()).sum(2)
    top = bar.square() if variant == "power2" else bar.pow(3) if variant == "power3" else bar.exp()
    return top.sum(2) / bar.sum(2).clamp_min(SMALL)


@torch.no_grad()
def hoyer_sums(features: Tensor, labels: Tensor) -> Tensor:
    """(2,) sums of Hoyer's sparsity (√C − ‖f‖₁/‖f‖₂)/(√C − 1): 0 for a constant vector, 1 for a single spike."""
    x = rows_of(at_least_float32(features))
    root = x.shape[2] ** 0.5
    norm = x.square().sum(2).sqrt()
    each = (root - x.abs().sum(2) / norm.clamp_min(SMALL)) / (root - 1)
    keep = (labels.flatten(1) != VOID) & (norm > SMALL)
    return masked_sums(each, keep)


@torch.no_grad()
def active_sums(features: Tensor, labels: Tensor) -> Tensor:
    """(2,) sums of the number of channels above 0: the true L0."""
    keep = labels.flatten(1) != VOID
    active = (rows_of(features) > 0).sum(2)
    return torch.stack([torch.where(keep, active, 0).sum(), keep.sum()]).to(at_least_float32(features).dtype)


def _bucket(labels: Tensor, classes: int) -> Tensor:
    """Labels (B, h·w) with void in a bucket of its own, number `classes`."""
    label = labels.flatten(1).long()
    return torch.where(label == VOID, classes, label)
