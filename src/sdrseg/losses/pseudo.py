"""Pseudo-labels: background where the teacher is confident of an old class."""

from __future__ import annotations

import torch
from torch import Tensor

from sdrseg.labels import VOID


@torch.no_grad()
def confident_labels(labels: Tensor, probabilities: Tensor, threshold: float) -> Tensor:
    """Labels (B, H, W) with background replaced by the likeliest channel of (B, n_old, H, W) probabilities, where that
    is an old class and at least `threshold`."""
    confidence, predicted = probabilities.max(1)
    return torch.where((labels == 0) & (predicted > 0) & (confidence >= threshold), predicted.to(labels.dtype), labels)


def split_labels(labels: Tensor, n_old: int) -> tuple[Tensor, Tensor]:
    """Labels without those of old classes, and only those of old classes; the rest is void."""
    old = (labels > 0) & (labels < n_old)
    return torch.where(old, VOID, labels), torch.where(old, labels, VOID)
