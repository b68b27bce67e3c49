"""The contrastive terms: features come close to their class's prototype, and classes keep apart.

Both are functions of class sums alone (losses/prototypes.py), so their cost does not depend on the number of classes.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from sdrseg.kernels.plain import at_least_float32, rows_of
from sdrseg.labels import VOID
from sdrseg.losses.pixels import widest
from sdrseg.losses.prototypes import EPS, ClassSums, Prototypes, sums_by_image


def attraction(sums: ClassSums, prototypes: Prototypes, take: Tensor) -> Tensor:
    """L_cl^a (Eq. 6, as mean squares): the mean over classes of the mean squared distance of their features to p_c.

    `take` (K,): classes that may take part; those without positions in the batch or without a prototype do not.
    """
    each = _mean_squares(sums.pixels, sums.pixel_total, sums.square, prototypes)
    take = take & (sums.pixels > 0) & prototypes.known
    return torch.where(take, each, 0).sum() / take.sum().clamp_min(1)


def attraction_image_sums(features: Tensor, labels: Tensor, prototypes: Prototypes, take: Tensor) -> Tensor:
    """The same image by image: (2,) [Σ over images of the mean over the image's classes, images with any]."""
    pixels, total, square = sums_by_image(features, labels, len(take))
    each = _mean_squares(pixels, total, square, prototypes)
    take = take & (pixels > 0) & prototypes.known
    of_image = torch.where(take, each, 0).sum(1) / take.sum(1).clamp_min(1)
    return torch.stack([of_image.sum(), take.any(1).sum().to(of_image.dtype)])


def _mean_squares(pixels: Tensor, total: Tensor, square: Tensor, prototypes: Prototypes) -> Tensor:
    """The mean over positions and channels of (f_i − p_c)², from sums: Σ‖f‖² − 2 p·Σf + n‖p‖²."""
    p = prototypes.mean.to(total.dtype)
    apart = square - 2 * (total * p).sum(-1) + pixels * p.square().sum(-1)
    return apart / (pixels.clamp_min(1) * p.shape[-1])


def attraction_norm_sums(features: Tensor, labels: Tensor, prototypes: Prototypes, take: Tensor) -> Tensor:
    """L_cl^a as Eq. 6 prints it, over the batch: (K, 2) [Σ_i ‖f_i − p_c‖, positions] of each class; see below."""
    return _norms_by_image(features, labels, prototypes, take).sum(0)


def attraction_norm(sums: Tensor, reduction: Literal["sum", "mean"] = "sum") -> Tensor:
    """From (…, K, 2) sums: the mean over present classes of the sum (the paper) or mean over positions of the norms."""
    total, count = sums.unbind(-1)
    each = total if reduction == "sum" else total / count.clamp_min(1)
    return each.sum(-1) / (count > 0).sum(-1).clamp_min(1)


def attraction_norm_image_sums(
    features: Tensor, labels: Tensor, prototypes: Prototypes, take: Tensor, reduction: Literal["sum", "mean"] = "sum"
) -> Tensor:
    """The same image by image, as Eq. 6 has it: (2,) [Σ over images, images with any class]."""
    sums = _norms_by_image(features, labels, prototypes, take)
    of_image = attraction_norm(sums, reduction)
    return torch.stack([of_image.sum(), sums[..., 1].any(1).sum().to(of_image.dtype)])


def _norms_by_image(features: Tensor, labels: Tensor, prototypes: Prototypes, take: Tensor) -> Tensor:
    """(B, K, 2) [Σ_i ‖f_i − p_c‖, positions] of each class in each image."""
    x = rows_of(at_least_float32(features))
    label = labels.flatten(1).long()
    known = (take & prototypes.known)[label.clamp_max(len(take) - 1)] & (label != VOID)
    label = torch.where(known, label, 0)
    apart = (x - prototypes.mean.to(x.dtype)[label]).square().sum(2).clamp_min(EPS).sqrt()
    values = torch.stack([torch.where(known, apart, 0), known.to(x.dtype)], dim=2)
    place = label + len(take) * torch.arange(len(label), device=label.device)[:, None]
    sums = torch.zeros(len(label) * len(take), 2, dtype=x.dtype, device=x.device)
    return sums.index_add(0, place.flatten(), values.flatten(0, 1)).view(len(label), len(take), 2)


def repulsion(
    current: Tensor, present: Tensor, take: Tensor, normaliser: Literal["classes", "pairs"] = "classes"
) -> Tensor:
    """L_cl^r (Eq. 7): Σ over ordered pairs of 1/‖p̂_j − p̂_l‖, divided by the number of classes (or of pairs).

    Distances come from the Gram matrix, in float64 where the device has it; pairs are masked by identity, not by value.
    """
    take = take & present
    wide = widest(current)
    wide = wide - wide.detach().mean(0)  # distances do not change, cancellation is less
    norms = wide.square().sum(1)
    squared = norms[:, None] + norms[None, :] - 2 * (wide @ wide.T)
    pair = take[:, None] & take[None, :] & ~torch.eye(len(take), dtype=torch.bool, device=take.device)
    closeness = torch.where(pair, squared, 1).clamp_min(EPS).rsqrt()
    number = take.sum() if normaliser == "classes" else pair.sum()
    return (torch.where(pair, closeness, 0).sum() / number.clamp_min(1)).to(current.dtype)


def repulsion_from_nearest(current: Tensor, present: Tensor, prototypes: Prototypes, take: Tensor) -> Tensor:
    """The mean over the classes of the batch of 1/‖p̂_j − p_l‖, p_l the nearest running prototype of another class.

    Running prototypes are constants. A class is left out where no other one has a prototype.
    """
    wide, fixed = widest(current), widest(prototypes.mean)
    centre = fixed.mean(0)  # distances do not change, cancellation is less
    wide, fixed = wide - centre, fixed - centre
    squared = wide.square().sum(1)[:, None] + fixed.square().sum(1)[None, :] - 2 * (wide @ fixed.T)
    other = (take & prototypes.known)[None, :] & ~torch.eye(len(take), dtype=torch.bool, device=take.device)
    take = take & present & other.any(1)
    nearest = torch.where(other, squared, torch.inf).amin(1)
    closeness = torch.where(take, nearest, 1).clamp_min(EPS).rsqrt()
    return (torch.where(take, closeness, 0).sum() / take.sum().clamp_min(1)).to(current.dtype)


@torch.no_grad()
def smallest_gap(prototypes: Prototypes) -> Tensor:
    """The smallest distance between two known prototypes (infinite where there are fewer than two)."""
    p = at_least_float32(prototypes.mean)
    apart = torch.cdist(p, p, compute_mode="donot_use_mm_for_euclid_dist")
    pair = prototypes.known[:, None] & prototypes.known[None, :]
    pair = pair & ~torch.eye(len(p), dtype=torch.bool, device=p.device)
    return torch.where(pair, apart, torch.inf).amin()
