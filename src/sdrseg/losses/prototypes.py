"""Prototypes: the mean feature of each class, in the batch (with gradient) and over all of training (without).

Features (B, C, h, w), labels on their grid (B, h, w) with channels 0..K-1 and 255 for positions that do not count.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from sdrseg.kernels import rows
from sdrseg.labels import VOID
from sdrseg.losses.pixels import to_grid

EPS = 1e-12
"""Inside square roots: the derivative of √ at 0 is infinite."""

Average = Literal["image", "pixel"]


class ClassSums(NamedTuple):
    """Statistics of each class in some images, as sums, so that those of several processes can be added."""

    pixels: Tensor  # (K,) positions of the class
    pixel_total: Tensor  # (K, C) Σ of their features
    square: Tensor  # (K,) Σ of their squared norms
    images: Tensor  # (K,) images that contain the class
    image_total: Tensor  # (K, C) Σ over images of the class's mean feature in the image

    def counted(self, average: Average) -> tuple[Tensor, Tensor]:
        """(totals, counts) of the chosen average."""
        return (self.image_total, self.images) if average == "image" else (self.pixel_total, self.pixels)


class Prototypes(NamedTuple):
    """Running prototypes p_c: mean (K, C) and the number of images or pixels in it, (K,) int64."""

    mean: Tensor
    seen: Tensor

    @property
    def known(self) -> Tensor:
        return self.seen > 0


def class_sums(features: Tensor, labels: Tensor, classes: int) -> ClassSums:
    """The sums of each class over the images of a batch."""
    pixels, total, square = rows.class_sums(features, labels, classes)
    images = (pixels > 0).to(total.dtype)
    means = total / pixels.clamp_min(1)[:, :, None]
    return ClassSums(pixels.sum(0), total.sum(0), square.sum(0), images.sum(0), means.sum(0))


def in_batch(sums: ClassSums, average: Average) -> tuple[Tensor, Tensor]:
    """In-batch prototypes p̂ (K, C), with gradient (Eq. 5), and which classes have one (K,)."""
    total, count = sums.counted(average)
    return total / count.clamp_min(1)[:, None], count > 0


@torch.no_grad()
def update(
    prototypes: Prototypes, sums: ClassSums, average: Average, included: Tensor, decay: float | None = None
) -> Prototypes:
    """Running prototypes after a batch (Eq. 4), for the classes in `included` (K,); new tensors, no gradient.

    The cumulative mean over all images (or pixels) with the class; with `decay` β an exponential mean,
    p ← (1 − β) p + β p̂, instead.
    """
    total, count = sums.counted(average)
    mean = total.detach() / count.detach().clamp_min(1)[:, None]
    added = torch.where(included, count.detach(), 0)
    seen = prototypes.seen + added.round().long()
    share = added / seen.clamp_min(1) if decay is None else torch.where(prototypes.known, decay, torch.ones_like(added))
    moved = prototypes.mean + share[:, None].to(mean.dtype) * (mean - prototypes.mean)
    return Prototypes(torch.where((added > 0)[:, None], moved, prototypes.mean), seen)


def pseudo_labels(labels: Tensor, teacher_logits: Tensor, stride: int) -> Tensor:
    """ẑ: labels on the grid (B, h, w) with background replaced by the teacher's prediction.

    `teacher_logits` (B, n_old, H, W) are upsampled; taking them at the grid's points before the argmax equals the
    argmax at full resolution followed by floor-nearest. Cells outside the image are void, and stay so.
    """
    predicted = to_grid(teacher_logits, (labels.shape[-2], labels.shape[-1]), stride, 0).argmax(1)
    return torch.where(labels == 0, predicted, labels.long())


def matching(
    prototypes: Prototypes,
    current: Tensor,
    present: Tensor,
    *,
    n_old: int,
    distance: Literal["mse", "frobenius", "cosine"] = "mse",
    normaliser: Literal["present", "n_old"] = "present",
    background: bool = False,
) -> Tensor:
    """L_pm (Eq. 3): keeps old classes in the batch at their running prototypes.

    `current` (K, C) and `present` (K,) are p̂ by pseudo-labels. Only old classes with a prototype count, background
    only if `background` is set.
    """
    channel = torch.arange(len(current), device=current.device)
    included = present & prototypes.known & (channel < n_old) & ((channel > 0) | background)
    target = prototypes.mean.to(current.dtype)
    if distance == "mse":
        each = (target - current).square().mean(1)
    elif distance == "frobenius":
        each = (target - current).square().sum(1).clamp_min(EPS).sqrt()
    else:
        each = 1 - F.cosine_similarity(target, current, dim=1, eps=1e-6)
    total = torch.where(included, each, 0).sum()
    return total / (included.sum().clamp_min(1) if normaliser == "present" else n_old)


def labels_on_grid(labels: Tensor, padding: Tensor, size: tuple[int, int], stride: int) -> Tensor:
    """y*: labels (B, H, W) on the feature grid; void where an augmentation or the network padded the image."""
    return torch.where(to_grid(padding, size, stride, True), VOID, to_grid(labels, size, stride, VOID))
