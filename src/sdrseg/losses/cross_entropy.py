"""Cross-entropy terms. Logits (B, K, H, W), labels (B, H, W) with channels 0..K-1 and 255 for void."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from sdrseg.kernels.pixels import cross_entropy_sum
from sdrseg.kernels.plain import at_least_float32, cross_entropy, logit_of
from sdrseg.labels import VOID


def cross_entropy_sums(logits: Tensor, labels: Tensor, *, count_void: bool = False) -> Tensor:
    """CE: −log softmax(z)_y. `count_void`: void adds nothing but counts in the mean, as in the official code."""
    return unbiased_cross_entropy_sums(logits, labels, 1, count_void=count_void)


def unbiased_cross_entropy_sums(logits: Tensor, labels: Tensor, n_old: int, *, count_void: bool = False) -> Tensor:
    """UNCE (MiB): a pixel labelled background may be any old class, so its probability is that of all of them.

    log q_0 := logsumexp_{c<n_old} z_c − logsumexp z. Labels below n_old count as background. With n_old = 1 it is CE.
    """
    loss = cross_entropy_sum(logits, labels, n_old)
    return torch.stack([loss, counted(labels, count_void).to(loss.dtype)])


def weighted_cross_entropy_sums(
    logits: Tensor, labels: Tensor, n_old: int, weights: Tensor, *, count_void: bool = False
) -> Tensor:
    """UNCE with a weight for each class (K); the mean is weighted."""
    weight = pixel_weights(labels, n_old, weights)
    count = torch.ones_like(weight).sum() if count_void else weight.sum()
    return torch.stack([(weight * cross_entropy(at_least_float32(logits), labels, n_old)).sum(), count])


def pixel_weights(labels: Tensor, n_old: int, weights: Tensor) -> Tensor:
    """The weight of each pixel by its label: void has none, and labels below n_old count as background."""
    label = torch.where((labels == VOID) | (labels < n_old), 0, labels).long()
    return torch.where(labels != VOID, weights[label], 0)


def counted(labels: Tensor, count_void: bool) -> Tensor:
    """The number of pixels in the mean."""
    return (torch.ones_like(labels) if count_void else labels != VOID).sum()


def binary_cross_entropy_sums(logits: Tensor, labels: Tensor) -> Tensor:
    """LwF-MC: Σ_c of the sigmoid cross-entropy against the one-hot label; void adds nothing but counts."""
    z = at_least_float32(logits)
    valid = labels != VOID
    label = torch.where(valid, labels, 0).long()
    loss = F.softplus(z).sum(1) - logit_of(z, label)
    return torch.stack([torch.where(valid, loss, 0).sum(), torch.ones_like(loss).sum()])
