"""A row of the classifier that separates a class from everything else, from samples of features (Fisher)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

SHRINK = 0.1  # share of the mean variance that is added to a covariance before it is inverted


class Rest:
    """Negatives of a class: samples (N, D), and the number of points each represents. In float64 on the CPU."""

    def __init__(self, samples: Sequence[Tensor], points: Sequence[float]):
        self.vectors = torch.cat([*samples]).cpu().double()
        each = [torch.full((len(x),), n / max(1, len(x))) for x, n in zip(samples, points, strict=True)]
        self.weights = torch.cat(each).double()
        self.mean = (self.weights @ self.vectors) / self.weights.sum()
        centred = self.vectors - self.mean
        covariance = (centred.T * self.weights) @ centred / self.weights.sum()
        self.covariance = covariance + SHRINK * covariance.diagonal().mean() * torch.eye(len(self.mean)).double()


def discriminant(own: Tensor, points: float, rest: Rest, length: float) -> tuple[Tensor, float]:
    """Weight Σ⁻¹(μ_own − μ_rest), scaled to `length`, and the bias with the smallest sigmoid cross-entropy.

    `own` (N, D) represents `points` points.
    """
    x = own.cpu().double()
    weight = F.normalize(torch.linalg.solve(rest.covariance, x.mean(0) - rest.mean), dim=0) * length
    return weight, best_bias(x @ weight, rest.vectors @ weight, points / len(x), rest.weights)


def best_bias(yes: Tensor, no: Tensor, each: float, weights: Tensor) -> float:
    """The bias b that minimises Σ each·softplus(−(yes + b)) + Σ weights·softplus(no + b), by bisection."""
    low, high = -100.0, 100.0
    for _ in range(60):
        bias = (low + high) / 2
        slope = (weights * (no + bias).sigmoid()).sum() - each * (-(yes + bias)).sigmoid().sum()
        low, high = (bias, high) if slope < 0 else (low, bias)
    return bias
