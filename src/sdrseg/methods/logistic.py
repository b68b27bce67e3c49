"""A row of the classifier by logistic regression: the row with the smallest sigmoid cross-entropy on given features."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from sdrseg.methods.discriminant import Rest

ITERATIONS = 50
PRECISION = 1e-10  # of the loss, in which training ends; about ten iterations reach it
SMALLEST_SPREAD = 1e-3  # of a feature that never varies


def logistic(own: Tensor, points: float, rest: Rest, ridge: float) -> tuple[Tensor, float]:
    """Weight and bias of the row whose logits exceed the level of `rest` where its class is.

    They minimise the mean sigmoid cross-entropy over the class, whose vectors `own` (N, D) represent `points` points,
    and the rest, plus ridge/2 · ‖weight · spread‖², where spread is the standard deviation of each feature over both.
    Newton's method with step halving, in float64 on the CPU, so that every machine gives the same.
    """
    yes = own.cpu().double()
    x = torch.cat([yes, rest.vectors])
    share = torch.cat([torch.full((len(yes),), points / len(yes)).double(), rest.weights])
    share = share / share.sum()
    target = torch.cat([torch.ones(len(yes)), torch.zeros(len(rest.vectors))]).double()
    level = rest.level(x)
    mean = share @ x
    spread = (share @ (x - mean).square()).sqrt().clamp_min(SMALLEST_SPREAD)
    inputs = torch.cat([(x - mean) / spread, torch.ones(len(x), 1).double()], 1)
    penalty = torch.cat([torch.full((x.shape[1],), ridge), torch.zeros(1)]).double()

    def loss(row: Tensor) -> Tensor:
        s = inputs @ row - level
        return share @ (F.softplus(s) - target * s) + (penalty * row.square()).sum() / 2

    row = torch.zeros(inputs.shape[1]).double()
    for _ in range(ITERATIONS):
        p = (inputs @ row - level).sigmoid()
        gradient = inputs.T @ (share * (p - target)) + penalty * row
        hessian = (inputs.T * (share * p * (1 - p))) @ inputs + torch.diag(penalty + 1e-12)
        direction = torch.linalg.solve(hessian, gradient)
        decrease = gradient @ direction
        if decrease < PRECISION:
            break
        size, before = 1.0, loss(row)
        while loss(row - size * direction) > before - 1e-4 * size * decrease and size > 1e-6:
            size /= 2
        row = row - size * direction
    weight = row[:-1] / spread
    return weight, float(row[-1] - weight @ mean)
