"""Terms of independent binary classifiers, one per class (LAPS). Scores s, one channel per class."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from sdrseg.kernels.plain import at_least_float32
from sdrseg.labels import VOID
from sdrseg.losses.pixels import masked_sums


def one_vs_rest_sums(scores: Tensor, labels: Tensor, first: int, positive_weight: float = 1.0) -> Tensor:
    """Σ_c of the sigmoid cross-entropy, over the labelled pixels; a class's own pixels have weight `positive_weight`.

    Scores (B, R, H, W) of the channels first, …, first + R − 1; labels (B, H, W). Every other label is a negative.
    """
    s = at_least_float32(scores)
    channel = torch.arange(first, first + s.shape[1], device=s.device)[:, None, None]
    loss = torch.where(labels[:, None] == channel, positive_weight * F.softplus(-s), F.softplus(s))
    return masked_sums(loss.sum(1), labels != VOID)


def rejection(scores: Tensor, weights: Tensor) -> Tensor:
    """Σ_i w_i Σ_c softplus(s_ic): remembered features are negatives of every class. Scores (N, R), weights (N,)."""
    return (F.softplus(at_least_float32(scores)).sum(1) * weights).sum()


def against_old_rows(new: Tensor, old: Tensor, owner: Tensor, weights: Tensor) -> Tensor:
    """Σ_i w_i of the cross-entropy of (old scores, new scores) against the class that a feature belongs to.

    New (N, R), old (N, n_old) with background, owner (N,) in 0..n_old−1: only the new scores get a gradient.
    """
    fixed = at_least_float32(old).detach()
    own = fixed.gather(1, owner[:, None])[:, 0]
    return ((torch.cat([fixed, at_least_float32(new)], 1).logsumexp(1) - own) * weights).sum()
