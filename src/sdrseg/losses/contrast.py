"""The contrastive terms: attraction of features to their class's prototype, and repulsion between classes.

Both are functions of class sums alone (losses/prototypes.py), so their cost does not depend on the number of classes.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from sdrseg.kernels import rows
from sdrseg.kernels.plain import at_least_float32, rows_of
from sdrseg.labels import VOID
from sdrseg.losses.pixels import widest
from sdrseg.losses.prototypes import EPS, ClassSums, Prototypes


def attraction(sums: ClassSums, prototypes: Prototypes, included: Tensor) -> Tensor:
    """L_cl^a (Eq. 6, as mean squares): the mean over classes of the mean squared distance of their features to p_c.

    `included` (K,): classes to include, if they have positions in the batch and a prototype.
    """
    each = _mean_squares(sums.pixels, sums.pixel_total, sums.square, prototypes)
    included = included & (sums.pixels > 0) & prototypes.known
    return torch.where(included, each, 0).sum() / included.sum().clamp_min(1)


def attraction_image_sums(features: Tensor, labels: Tensor, prototypes: Prototypes, included: Tensor) -> Tensor:
    """The same image by image: (2,) [Σ over images of the mean over the image's classes, number of images with any]."""
    pixels, total, square = rows.class_sums(features, labels, len(included))
    each = _mean_squares(pixels, total, square, prototypes)
    included = included & (pixels > 0) & prototypes.known
    per_image = torch.where(included, each, 0).sum(1) / included.sum(1).clamp_min(1)
    return torch.stack([per_image.sum(), included.any(1).sum().to(per_image.dtype)])


def _mean_squares(pixels: Tensor, total: Tensor, square: Tensor, prototypes: Prototypes) -> Tensor:
    """The mean over positions and channels of (f_i − p_c)², from sums: Σ‖f‖² − 2 p·Σf + n‖p‖²."""
    p = prototypes.mean.to(total.dtype)
    squared = square - 2 * (total * p).sum(-1) + pixels * p.square().sum(-1)
    return squared / (pixels.clamp_min(1) * p.shape[-1])


def attraction_norm_sums(features: Tensor, labels: Tensor, prototypes: Prototypes, included: Tensor) -> Tensor:
    """L_cl^a as Eq. 6 prints it, over the batch: (K, 2) [Σ_i ‖f_i − p_c‖, positions] of each class."""
    return _norms_by_image(features, labels, prototypes, included).sum(0)


def attraction_norm(sums: Tensor, reduction: Literal["sum", "mean"] = "sum") -> Tensor:
    """From (…, K, 2) sums: the mean over present classes of the sum (the paper) or mean over positions of the norms."""
    total, count = sums.unbind(-1)
    each = total if reduction == "sum" else total / count.clamp_min(1)
    return each.sum(-1) / (count > 0).sum(-1).clamp_min(1)


def attraction_norm_image_sums(
    features: Tensor,
    labels: Tensor,
    prototypes: Prototypes,
    included: Tensor,
    reduction: Literal["sum", "mean"] = "sum",
) -> Tensor:
    """The same image by image, as Eq. 6 has it: (2,) [Σ over images, images with any class]."""
    sums = _norms_by_image(features, labels, prototypes, included)
    per_image = attraction_norm(sums, reduction)
    return torch.stack([per_image.sum(), sums[..., 1].any(1).sum().to(per_image.dtype)])


def _norms_by_image(features: Tensor, labels: Tensor, prototypes: Prototypes, included: Tensor) -> Tensor:
    """(B, K, 2) [Σ_i ‖f_i − p_c‖, positions] of each class in each image."""
    x = rows_of(at_least_float32(features))
    label = labels.flatten(1).long()
    known = (included & prototypes.known)[label.clamp_max(len(included) - 1)] & (label != VOID)
    label = torch.where(known, label, 0)
    distance = (x - prototypes.mean.to(x.dtype)[label]).square().sum(2).clamp_min(EPS).sqrt()
    values = torch.stack([torch.where(known, distance, 0), known.to(x.dtype)], dim=2)
    index = label + len(included) * torch.arange(len(label), device=label.device)[:, None]
    sums = torch.zeros(len(label) * len(included), 2, dtype=x.dtype, device=x.device)
    return sums.index_add(0, index.flatten(), values.flatten(0, 1)).view(len(label), len(included), 2)


def repulsion(
    current: Tensor, present: Tensor, included: Tensor, normaliser: Literal["classes", "pairs"] = "classes"
) -> Tensor:
    """L_cl^r (Eq. 7): Σ over ordered pairs of 1/‖p̂_j − p̂_l‖, divided by the number of classes (or of pairs).

    Distances come from the Gram matrix, in float64 where the device has it; pairs are masked by identity, not by value.
    """
    included = included & present
    wide = widest(current)
    wide = wide - wide.detach().mean(0)  # the same distances with less cancellation
    norms = wide.square().sum(1)
    squared = norms[:, None] + norms[None, :] - 2 * (wide @ wide.T)
    pair = included[:, None] & included[None, :] & ~torch.eye(len(included), dtype=torch.bool, device=included.device)
    closeness = torch.where(pair, squared, 1).clamp_min(EPS).rsqrt()
    number = included.sum() if normaliser == "classes" else pair.sum()
    return (torch.where(pair, closeness, 0).sum() / number.clamp_min(1)).to(current.dtype)


def repulsion_from_nearest(current: Tensor, present: Tensor, prototypes: Prototypes, included: Tensor) -> Tensor:
    """The mean over the classes of the batch of 1/‖p̂_j − p_l‖, p_l the nearest running prototype of another class.

    Running prototypes are constants. A class is left out where no other one has a prototype.
    """
    wide, fixed = widest(current), widest(prototypes.mean)
    centre = fixed.mean(0)  # the same distances with less cancellation
    wide, fixed = wide - centre, fixed - centre
    squared = wide.square().sum(1)[:, None] + fixed.square().sum(1)[None, :] - 2 * (wide @ fixed.T)
    other = (included & prototypes.known)[None, :] & ~torch.eye(len(included), dtype=torch.bool, device=included.device)
    included = included & present & other.any(1)
    nearest = torch.where(other, squared, torch.inf).amin(1)
    closeness = torch.where(included, nearest, 1).clamp_min(EPS).rsqrt()
    return (torch.where(included, closeness, 0).sum() / included.sum().clamp_min(1)).to(current.dtype)


@torch.no_grad()
def smallest_gap(prototypes: Prototypes) -> Tensor:
    """The smallest distance between two known prototypes (infinite where there are fewer than two)."""
    p = at_least_float32(prototypes.mean)
    distances = torch.cdist(p, p, compute_mode="donot_use_mm_for_euclid_dist")
    pair = prototypes.known[:, None] & prototypes.known[None, :]
    pair = pair & ~torch.eye(len(p), dtype=torch.bool, device=p.device)
    return torch.where(pair, distances, torch.inf).amin()
