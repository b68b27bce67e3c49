"""Step 0 of LAPS: a sigmoid for each class, background where none is positive."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sdrseg.decision import Decision
from sdrseg.labels import VOID
from sdrseg.losses.one_vs_rest import one_vs_rest_sums
from sdrseg.methods.base import Method, StepInfo
from sdrseg.methods.laps_settings import Laps

if TYPE_CHECKING:
    from sdrseg.datasets.batches import Batch
    from sdrseg.network import Network


class SigmoidRows(Method):
    """It remembers nothing, so that its model is shared by all forms of memory, each of which surveys it."""

    name = section = "laps"
    settings = Laps
    summary = "one sigmoid per class"
    own_step0 = True  # a softmax model gives meaningless sigmoids
    replayable = Method.replayable
    decision: Decision = "sigmoid"

    @torch.no_grad()
    def begin_step(self, step: StepInfo, student: Network, teacher: Network | None) -> None:
        super().begin_step(step, student, teacher)
        if step.number == 0:
            rows = student.classifier
            assert rows.bias is not None
            rows.weight[0], rows.bias[0], rows.bias[1:] = 0, 0, -2.0

    def _weights_in_ce(self, batch: Batch) -> Tensor:
        return batch.labels != VOID

    def _over_pixels(self, batch: Batch, z: Tensor, t: Tensor | None) -> dict[str, Tensor]:
        sums = one_vs_rest_sums(z[:, 1:], batch.labels, 1, self.own.positive_base)
        return {"ce": self.mean_of("ce", sums)}
