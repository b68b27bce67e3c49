"""LAPS by gradient descent: the terms of new rows where the whole network is trained (`laps.fit_only` = false)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sdrseg.config import Config
from sdrseg.decision import decide, scores
from sdrseg.distributed import Processes
from sdrseg.kernels.plain import at_least_float32
from sdrseg.labels import VOID
from sdrseg.losses.one_vs_rest import against_old_rows, one_vs_rest_sums, rejection
from sdrseg.losses.pixels import masked_sums, to_grid
from sdrseg.methods.base import Method
from sdrseg.methods.memory import Replay
from sdrseg.methods.sigmoid_rows import SigmoidRows
from sdrseg.methods.terms import Term
from sdrseg.network import next_multiple

if TYPE_CHECKING:
    from sdrseg.datasets.batches import Batch
    from sdrseg.network import Output

CERTAIN_NO = -30.0  # a logit whose sigmoid is practically 0 in float32


def anchor(method: Method, batch: Batch, student: Output, teacher: Output | None) -> Tensor:
    """Keep the classifier's input unchanged where the teacher predicts an old class in the background."""
    assert isinstance(method, TrainedRows) and teacher is not None
    x, before = at_least_float32(student.embedding), at_least_float32(teacher.embedding)
    keep = method.old_class(batch.labels, teacher, x) > 0
    return method.mean_of("anchor", masked_sums((x - before).square().mean(1), keep))


class TrainedRows(SigmoidRows):
    """New rows learn from labels and remembered features, old rows stay as they are."""

    replayable = Method.replayable
    own_terms = (
        Term("replay", "remembered features", "L_replay", "laps.replay", True),
        Term("versus", "old rows against new ones", "L_versus", "laps.versus", True),
        Term("anchor", "change of the embedding", "L_anchor", "laps.anchor", True, anchor),
    )

    def __init__(self, config: Config, processes: Processes | None = None):
        super().__init__(config, processes)
        self.replays: list[Replay] = []
        self.scale = torch.ones(())  # all data so far, in units of this step's

    @property
    def row_rates(self) -> tuple[float, float]:
        return 0.0, self.own.row_rate

    def _over_pixels(self, batch: Batch, z: Tensor, t: Tensor | None) -> dict[str, Tensor]:
        if self.step.number == 0:
            return super()._over_pixels(batch, z, t)
        n_old = self.step.n_old
        sums = one_vs_rest_sums(self._against_rest(z)[:, n_old:], batch.labels, n_old, self.own.positive)
        t = self._corrected(batch, t) if self.config.kd.weight > 0 else None
        return {"ce": self.mean_of("ce", sums) / self.scale} | self._distillation(batch, z, t)

    def more_terms(self, batch: Batch, student: Output, teacher: Output | None) -> dict[str, Tensor]:
        """Terms of new rows on remembered features: negatives (replay), and a softmax with the old rows (versus)."""
        if teacher is None:
            return {}
        n_old = self.step.n_old
        sums: dict[str, list[Tensor]] = {"replay": [], "versus": []}
        for r in self.replays:
            s = self.scores_of(r.points)
            sums["replay"].append(rejection(s[:, n_old:], r.represents))
            sums["versus"].append(against_old_rows(s[:, n_old:], s[:, :n_old], r.owner, r.represents))
        zero, weights = torch.zeros_like(self.scale), self.weights()
        return {n: torch.stack([zero, *parts]).sum() / self.scale for n, parts in sums.items() if weights[n] > 0}

    def _distillation(self, batch: Batch, z: Tensor, t: Tensor | None) -> dict[str, Tensor]:
        """Sigmoids without the row of background: it is always 0, a constant in the loss."""
        first = 1 if (self.decision, self.config.kd.kind) == ("sigmoid", "binary") else 0
        return super()._distillation(batch, z[:, first:], None if t is None else t[:, first:])

    def _corrected(self, batch: Batch, t: Tensor | None) -> Tensor | None:
        """The teacher's logits; where the label is a new class, the target of old rows is 0 if `laps.on_new` is no."""
        if t is None or self.own.on_new != "no":
            return t
        return at_least_float32(t).masked_fill(self.labelled_new(batch)[:, None], CERTAIN_NO)

    def scores_of(self, points: Tensor) -> Tensor:
        """Scores (N, K) of features (N, D), as if their neighbourhood had the same features; the largest decides."""
        rows = self.student.classifier
        assert rows.bias is not None
        weight = at_least_float32(rows.weight).sum((2, 3))
        z = points.to(weight) @ weight.T + at_least_float32(rows.bias)
        return scores(self._against_rest(z), self.decision)

    def _against_rest(self, z: Tensor) -> Tensor:
        """Scores from logits, whose sign is the binary decision."""
        return z

    def _on_grid(self, labels: Tensor, embedding: Tensor) -> Tensor:
        size = (embedding.shape[-2], embedding.shape[-1])
        stride = next_multiple(labels.shape[-1], self.student.multiple) // size[1]
        return to_grid(labels, size, stride, VOID)

    def old_class(self, labels: Tensor, teacher: Output, embedding: Tensor) -> Tensor:
        """(B, h, w): the old class that the teacher's rows predict where the label is background, else 0."""
        predicted = decide(at_least_float32(teacher.coarse[:, : self.step.n_old]), self.step.teacher_decision)
        return torch.where(self._on_grid(labels, embedding) == 0, predicted, 0)
