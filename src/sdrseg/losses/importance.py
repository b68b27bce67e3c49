"""Parameter importances (EWC, PI, RW) and the penalty on changing important parameters.

Everything is a dictionary of tensors by parameter name; the penalty is Σ_θ Ĩ_θ (θ − θ_old)² over the parameters of the
old model, with each tensor of importances normalised to 0..1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

Named = dict[str, Tensor]

FISHER_DECAY = 0.9  # of the newest squared gradient
TINY = 1e-8
DISTANCE_GUARD = 1e-20


def fisher_update(fisher: Tensor, gradient: Tensor) -> Tensor:
    """EWC and RW: F ← 0.9 g² + 0.1 F, an exponential mean over the training gradients."""
    return FISHER_DECAY * gradient.square() + (1 - FISHER_DECAY) * fisher


def path_update(path: Tensor, gradient: Tensor, before: Tensor, now: Tensor) -> Tensor:
    """PI: δ ← δ + g (θ_before − θ_now), the loss reduction along a parameter's path."""
    return path + gradient * (before - now)


def path_importance(path: Tensor, start: Tensor, end: Tensor, previous: Tensor) -> Tensor:
    """PI after a step: Ω = max(0, δ / (θ_end − θ_start)²) + Ω_previous."""
    return (path / ((end - start).square() + DISTANCE_GUARD)).clamp_min(0) + previous


def score_update(score: Tensor, gradient: Tensor, fisher: Tensor, before: Tensor, now: Tensor) -> Tensor:
    """RW: s ← s + g (θ_before − θ_now) / (½ F (θ_now − θ_before)²)."""
    return score + gradient * (before - now) / (0.5 * fisher * (now - before).square() + TINY)


def score_importance(score: Tensor, previous: Tensor | None) -> Tensor:
    """RW after a step: max(0, s), averaged with that of the step before in the rows that existed then."""
    result = score.clamp_min(0)
    if previous is not None:
        result[: len(previous)] = (result[: len(previous)] + previous) / 2
    return result


def normalised(importance: Tensor, rows: Sequence[int] = ()) -> Tensor:
    """A tensor of importances normalised to 0..1; for the classifier, the `rows` of each step separately."""
    if rows:
        return torch.cat([normalised(part) for part in torch.split(importance, list(rows))])
    low, high = importance.aminmax()
    return (importance - low) / (high - low + TINY)


def penalty(
    parameters: Mapping[str, Tensor], anchors: Mapping[str, Tensor], importances: Mapping[str, Tensor]
) -> Tensor:
    """Σ Ĩ (θ − θ_old)²; a parameter that has grown (the classifier) counts with its old rows."""
    parts = [(importances[n] * (parameters[n][: len(old)] - old).square()).sum() for n, old in anchors.items()]
    return torch.stack(parts).sum()


def penalty_gradient(now: Tensor, anchor: Tensor, importance: Tensor) -> Tensor:
    """2 Ĩ (θ − θ_old), zero for rows that are new."""
    gradient = torch.zeros_like(now)
    gradient[: len(anchor)] = 2 * importance * (now[: len(anchor)] - anchor)
    return gradient
