"""The official code's latent terms, bugs included, for comparisons with its published behaviour.

Features (B, C, h, w), labels on the grid (B, h, w). These loop over classes and gather, as that code does; nothing
here is meant to be fast. docs/methods.md describes each error and names a test that computes both.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from sdrseg.kernels.plain import at_least_float32
from sdrseg.labels import VOID
from sdrseg.variants import SparsityVariant

TINY = 1e-15
LOG_GUARD = 1e-10


def scrambled(features: Tensor, labels: Tensor, class_id: int) -> Tensor:
    """The features of a class as (C, n). Bug A: values come out ordered by (image, channel, pixel) and are reshaped to
    (C, n) as if there were one image, so channels are mixed whenever the class is in two images of the batch."""
    mask = (labels == class_id)[:, None].expand_as(features)
    return features[mask].view(features.shape[1], -1)


def classes_in(labels: Tensor) -> list[int]:
    return [int(c) for c in torch.unique(labels) if c != VOID]


@torch.no_grad()
def update_prototypes(mean: Tensor, count: Tensor, features: Tensor, labels: Tensor, drop_smallest: bool) -> None:
    """The cumulative pixel mean, in place, with bug A. Bug B (`drop_smallest`): background is left out as "the smallest
    id present", so a real class is lost when no background is on the grid."""
    present = classes_in(labels)
    for c in present[1:] if drop_smallest else present:
        own = scrambled(at_least_float32(features), labels, c)
        n = own.shape[1]
        mean[c] = (own.sum(1) + count[c] * mean[c]) / (count[c] + n)
        count[c] += n


def matching(features: Tensor, pseudo: Tensor, prototypes: Tensor) -> Tensor:
    """L_pm. Bug C: values in channel-major order are reshaped to (pixels, C), so that every entry of the "prototype"
    becomes about the mean activation of all channels."""
    features = at_least_float32(features)
    total = features.sum() * 0
    present = [c for c in classes_in(pseudo) if c != 0]
    for c in present:
        mask = (pseudo == c)[:, None].expand_as(features)
        own = features[mask].view(-1, features.shape[1]).mean(0)
        total = total + F.mse_loss(own, prototypes[c].to(own.dtype))
    return total / max(1, len(present))


def attraction(features: Tensor, labels: Tensor, prototypes: Tensor) -> Tensor:
    """L_cl^a. Bug D: the division by the number of classes K sits inside the loop over classes, so the j-th class
    has the weight K^-(K-j+1) instead of 1/K. Bug A as well."""
    features = at_least_float32(features)
    present = classes_in(labels)
    total = features.sum() * 0
    for c in present:
        own = scrambled(features, labels, c)
        total = (total + F.mse_loss(own, prototypes[c].to(own.dtype)[:, None].expand_as(own))) / len(present)
    return total


def repulsion(features: Tensor, labels: Tensor) -> Tensor:
    """L_cl^r: the mean over ordered pairs of 1/‖p̂_j − p̂_l‖, with bug A. Bug E: above 25 classes the distance routine
    turns to a matrix product whose diagonal is not exactly 0, and its inverse enters the mean."""
    features = at_least_float32(features)
    present = classes_in(labels)
    if not present:
        return features.sum() * 0
    means = torch.stack([scrambled(features, labels, c).mean(1) for c in present])
    inverse = 1 / torch.cdist(means, means)
    inverse = inverse[~torch.isinf(inverse)]
    return torch.nan_to_num(inverse.mean()) if inverse.numel() else features.sum() * 0


def sparsity(features: Tensor, labels: Tensor, variant: SparsityVariant) -> Tensor:
    """L_sp and the measures it was compared with, except l0, which that code lacks: the mean over all positions,
    including void and vectors without activation; 0 where nothing is left after the normalisation."""
    if variant == "l1":
        return lasso(features)
    features = at_least_float32(features)
    bar = _normalised(features, labels, variant)
    if not bar.sum() > 0:
        return features.sum() * 0
    if variant in ("entropy_l1", "entropy_softmax"):
        return -(bar * (bar + LOG_GUARD).log()).sum(1).mean()
    shrunk = bar.square() if variant == "power2" else bar.pow(3) if variant == "power3" else bar.exp()
    return (shrunk.sum(1) / (bar.sum(1) + TINY)).mean()


def _normalised(features: Tensor, labels: Tensor, variant: SparsityVariant) -> Tensor:
    """The features as the measure reads them. By the maximum of the class: over the batch, with void a class like any
    other; where background is the only class it is left out (void was meant), and zeros remain."""
    if variant in ("norm_l2", "entropy_l1"):
        return F.normalize(features, p=2 if variant == "norm_l2" else 1, dim=1)
    if variant == "entropy_softmax":
        return features.softmax(1)
    if variant == "norm_max":
        return features / (features.max(1, keepdim=True).values + TINY)
    if variant == "norm_max_overall":
        return features / (features.max() + TINY)
    present = torch.unique(labels)
    scaled = torch.zeros_like(features)
    for c in present if present.tolist() != [0] else ():
        mask = (labels == c)[:, None].expand_as(features)
        scaled = scaled + features * mask / (features[mask].max() + TINY)
    return scaled


def lasso(features: Tensor) -> Tensor:
    """ "L1": half the sum over the whole tensor, not a mean."""
    return at_least_float32(features).abs().sum() / 2


def cil(logits: Tensor, teacher_logits: Tensor, labels: Tensor) -> Tensor:
    """CIL: the student's softmax in place of its logarithm and no minus sign, so that minimising it pushes
    the student away from the teacher; the teacher's logits are padded with zeros for the new classes."""
    z, t = at_least_float32(logits), at_least_float32(teacher_logits)
    t = torch.cat([t, t.new_zeros(len(t), z.shape[1] - t.shape[1], *t.shape[2:])], 1)
    p = t.softmax(1)
    weight = 1 - (p * (p + 1e-8).log2()).sum(1)
    each = weight * (p * z.softmax(1)).sum(1)
    chosen = (labels == 0) | (labels == VOID)
    return torch.where(chosen, each, 0).sum() / chosen.sum().clamp_min(1)
