"""A row of the classifier that separates a class from everything else, from samples of features (Fisher)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

SHRINK = 0.1  # share of the mean variance that is added to a covariance before it is inverted
RIDGE = 1e-3  # the same, for the slope of the level


class Rest:
    """Negatives of a class: samples of vectors (N, D), with the number of points each vector represents (N,). In
    float64 on the CPU.

    `level`: what a logit is compared with, at features (N, D); its excess is the score.
    """

    def __init__(self, samples: Sequence[tuple[Tensor, Tensor]], level: Callable[[Tensor], Tensor]):
        self.level = level
        self.vectors = torch.cat([vectors for vectors, _ in samples]).cpu().double()
        self.weights = torch.cat([points for _, points in samples]).cpu().double()


def log_sum_exp(weight: Tensor, bias: Tensor) -> Callable[[Tensor], Tensor]:
    """The level of rows (K, D) with biases (K,): the log-sum-exp of their logits."""
    weight, bias = weight.detach().cpu().double(), bias.detach().cpu().double()
    return lambda x: (x @ weight.T + bias).logsumexp(1)


def discriminant(own: Tensor, points: float, rest: Rest, length: float) -> tuple[Tensor, float]:
    """A row whose logits exceed the level where its class is: weight and bias.

    The weight is Σ⁻¹(μ_own − μ_rest), scaled to `length`, plus the slope of the level (by least squares, the class and
    the rest counting the same); the bias has the smallest sigmoid cross-entropy. `own` (N, D) represents `points`
    points.
    """
    x = own.cpu().double()
    share = rest.weights / rest.weights.sum()
    mean = share @ rest.vectors
    centred = rest.vectors - mean
    covariance = (centred.T * share) @ centred
    covariance += SHRINK * covariance.diagonal().mean() * torch.eye(len(mean)).double()
    weight = F.normalize(torch.linalg.solve(covariance, x.mean(0) - mean), dim=0) * length
    levels = rest.level(x), rest.level(rest.vectors)
    each = torch.cat([torch.full((len(x),), 1 / len(x)).double(), share])
    weight = weight + slope(torch.cat([x, rest.vectors]), torch.cat(levels), each)
    yes, no = x @ weight - levels[0], rest.vectors @ weight - levels[1]
    return weight, best_bias(yes, no, points / len(x), rest.weights)


def slope(x: Tensor, y: Tensor, weights: Tensor) -> Tensor:
    """The w (D,) of the linear function w·x + b nearest to y (N,) at x (N, D): weighted least squares with a ridge."""
    share = weights / weights.sum()
    x, y = x - share @ x, y - share @ y
    spread = (x.T * share) @ x
    ridge = RIDGE * spread.diagonal().mean() * torch.eye(len(spread)).double()
    found: Tensor = torch.linalg.solve(spread + ridge, x.T @ (share * y))
    return found


def best_bias(yes: Tensor, no: Tensor, each: float, weights: Tensor) -> float:
    """The bias b that minimises Σ each·softplus(−(yes + b)) + Σ weights·softplus(no + b), by bisection."""
    low, high = -100.0, 100.0
    for _ in range(60):
        bias = (low + high) / 2
        slope = (weights * (no + bias).sigmoid()).sum() - each * (-(yes + bias)).sigmoid().sum()
        low, high = (bias, high) if slope < 0 else (low, bias)
    return bias
