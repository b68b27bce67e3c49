"""LAPS for models that were trained with a softmax."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sdrseg.config import Config
from sdrseg.decision import Decision
from sdrseg.distributed import Processes
from sdrseg.errors import UsageError
from sdrseg.methods.base import From, Method, StepInfo
from sdrseg.methods.laps import LAPS

if TYPE_CHECKING:
    from sdrseg.datasets.batches import Batch
    from sdrseg.network import Network


class LAPSSoftmax(LAPS):
    """A new row is a binary decision against all old rows together, which stay unchanged."""

    name = "laps-softmax"
    summary = "LAPS on a softmax model: new rows against the log-sum-exp of the old ones"
    own_step0, trains_step0_like = False, None  # plain training
    decision: Decision = "softmax"
    switches = {
        "kd.kind": From("standard", "the old rows among themselves"),
        "kd.normaliser": From("none", "a sum over classes, as in laps"),
        "kd.weight": From(5.0, "as in laps"),
    }

    def __init__(self, config: Config, processes: Processes | None = None):
        super().__init__(config, processes)
        if self.own.level != "old":
            raise UsageError(
                f"laps.level={self.own.level} needs scores with a zero, which a softmax does not have. Use old."
            )

    def objective(self) -> str:
        return super().objective().replace("CE", "Σ_new BCE(σ(z_c − LSE(z_old)))", 1)

    @torch.no_grad()
    def begin_step(self, step: StepInfo, student: Network, teacher: Network | None) -> None:
        kept = None if step.number > 0 else {n: p.clone() for n, p in student.classifier.named_parameters()}
        super().begin_step(step, student, teacher)
        rows = student.classifier
        assert rows.bias is not None
        if kept is None:
            rows.weight[step.n_old :], rows.bias[step.n_old :] = rows.weight[0], rows.bias[0] - 3.0
        else:
            rows.load_state_dict(kept)

    def _weights_in_ce(self, batch: Batch) -> Tensor:
        return Method._weights_in_ce(self, batch) if self.step.number == 0 else super()._weights_in_ce(batch)

    def _over_pixels(self, batch: Batch, z: Tensor, t: Tensor | None) -> dict[str, Tensor]:
        return Method._over_pixels(self, batch, z, t) if self.step.number == 0 else super()._over_pixels(batch, z, t)

    def _against_rest(self, z: Tensor) -> Tensor:
        return z - z[:, : self.step.n_old].logsumexp(1, keepdim=True).detach()

    def _old_rows(self) -> Tensor:
        return super()._old_rows() - self.student.classifier.weight[:1].sum((2, 3))  # against background

    def _level(self) -> Callable[[Tensor], Tensor]:
        return self._old_together()

    def distilled(self, batch: Batch) -> Tensor:
        # a softmax cannot be negative for all old rows together: where that is wanted, they learn nothing
        keep = super().distilled(batch)
        return keep & ~self.labelled_new(batch) if self.own.on_new == "no" else keep

    def _corrected(self, batch: Batch, t: Tensor | None) -> Tensor | None:
        return t
