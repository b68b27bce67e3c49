"""The best model of a step so far, by its score on held-out images, and early stopping.

In an extension, the score is the mean IoU times the share of other pixels that are predicted as before (kept.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from sdrseg.config import Config
from sdrseg.engine.checkpoint import under_prefix, with_prefix
from sdrseg.errors import UsageError
from sdrseg.methods import Method
from sdrseg.network import Network


def require_held_out_scores(config: Config) -> None:
    """Raise an error if settings require scores during training but there are no held-out images."""
    train = config.train
    wanting = "eval.every" if config.eval.every else "train.best_every" if train.best_every else ""
    if wanting and train.holdout == 0:
        raise UsageError(f"{wanting} scores during training, which needs held-out images: also set train.holdout=0.2.")
    if train.patience and not train.best_every:
        raise UsageError("train.patience counts scores of held-out images: set train.best_every=1 too.")


class Best:
    """The model and the method's memory at the best score; part of the saved state, so that a resumed run has them."""

    def __init__(self, config: Config):
        self.every, self.patience = config.train.best_every, config.train.patience
        self.epoch, self.score, self.last = 0, -1.0, 0  # the best epoch, its score, the last epoch that was scored
        self.scores_since = 0
        self.tensors: dict[str, Tensor] = {}

    def see(self, epoch: int, score: float | None, student: Network, method: Method) -> bool:
        """Record a score; return whether to stop. While it is 0, nothing has been learned: the last model is kept."""
        self.last, score = epoch, score or 0.0
        self.scores_since += 1
        if score > self.score or score == self.score == 0:
            self.epoch, self.score, self.scores_since = epoch, score, 0
            parts = {"model": student.state_dict(), "method": method.state_dict()}
            named = {name: t for part, values in parts.items() for name, t in with_prefix(part, values).items()}
            self.tensors = {name: tensor.detach().cpu().clone() for name, tensor in named.items()}
        return 0 < self.patience <= self.scores_since

    def restore(self, student: Network, method: Method, device: torch.device) -> None:
        """Replace the last model by the best one."""
        student.load_state_dict(under_prefix("model", self.tensors))
        method.load_state_dict({name: t.to(device) for name, t in under_prefix("method", self.tensors).items()})

    def facts(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "score": self.score, "last": self.last, "scores_since": self.scores_since}

    def load(self, facts: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Restore from a saved state."""
        self.epoch, self.score, self.last = facts["epoch"], facts["score"], facts["last"]
        self.scores_since = facts["scores_since"]
        self.tensors = under_prefix("best", tensors)
