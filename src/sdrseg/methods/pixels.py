"""The terms of a method over the pixels: cross-entropy and distillation, as means over a whole batch."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sdrseg.config import Config
from sdrseg.decision import probabilities
from sdrseg.distributed import Processes
from sdrseg.errors import UsageError
from sdrseg.labels import VOID
from sdrseg.losses import official
from sdrseg.losses.cross_entropy import (
    binary_cross_entropy_sums,
    cross_entropy_sums,
    pixel_weights,
    unbiased_cross_entropy_sums,
    weighted_cross_entropy_sums,
)
from sdrseg.losses.distillation import (
    binary_distillation_sums,
    cil_sums,
    distillation_sums,
    unbiased_distillation_sums,
)
from sdrseg.losses.one_vs_rest import one_vs_rest_sums
from sdrseg.losses.pixels import mean
from sdrseg.losses.pseudo import confident_labels, split_labels
from sdrseg.losses.unbiased import unbiased_sums

if TYPE_CHECKING:
    from sdrseg.datasets.batches import Batch
    from sdrseg.methods.base import StepInfo
    from sdrseg.network import Output


class PixelTerms:
    """The part of a method that uses logits and labels."""

    step: StepInfo

    def __init__(self, config: Config, processes: Processes):
        self.config, self.processes = config, processes
        self._class_weights: Tensor | None = None
        self.expect(None, 1)

    def weigh_classes(self, weights: tuple[float, ...] | None, device: torch.device) -> None:
        """Set the weight of each channel in the cross-entropy; None: equal weights."""
        self._class_weights = None if weights is None else torch.tensor(weights, device=device)

    @property
    def relabels(self) -> bool:
        """Whether labels may name old classes: `relabel` put them there, or images are replayed."""
        relabelled = self.config.pseudo.threshold > 0 or type(self).relabel is not PixelTerms.relabel
        return relabelled or self.step.old_labels

    def relabel(self, batch: Batch, teacher: Output | None) -> Batch:
        """The batch with the labels for the terms: background becomes an old class where the teacher is confident."""
        threshold = self.config.pseudo.threshold
        if teacher is None or threshold == 0:
            return batch
        likely = probabilities(teacher.logits.float(), self.step.teacher_decision)
        return replace(batch, labels=confident_labels(batch.labels, likely, threshold))

    def expect(self, whole: Batch | None, parts: int) -> None:
        """With gradient accumulation: the batch that comes in parts, relabelled. CE and KD are means over its pixels;
        the terms on the features are computed on each part and averaged: not the same as on one large batch."""
        self._parts = parts
        self._counts = {} if whole is None else self.counts(whole)

    def counts(self, batch: Batch) -> dict[str, Tensor]:
        """The number of pixels in the means of CE and KD."""
        kept = self.distilled(batch)
        if self.config.kd.kind == "cil":
            kept = kept & ((batch.labels == 0) | (batch.labels == VOID))
        chosen = {"ce": self._weights_in_ce(batch), "kd": kept}
        if self.config.kd.kind == "cil_official":  # a mean over its own pixels
            del chosen["kd"]
        return {name: self.processes.sum(pixels.sum().float()) for name, pixels in chosen.items()}

    def _weights_in_ce(self, batch: Batch) -> Tensor:
        """(B, H, W): the weight of each pixel in the mean of the cross-entropy."""
        if self.config.ce.reduction == "all" or self.config.ce.kind == "binary":
            return torch.ones_like(batch.padding)
        if self._class_weights is None:
            return batch.labels != VOID
        labels, certain = self._split(batch.labels)
        weights = pixel_weights(labels, self._hidden(), self._class_weights)
        return weights if certain is None else weights + pixel_weights(certain, 1, self._class_weights)

    def _over_pixels(self, batch: Batch, z: Tensor, t: Tensor | None) -> dict[str, Tensor]:
        """Cross-entropy and, with a teacher and a weight above 0, distillation."""
        if not hasattr(batch, "labels"):
            advice = "Return the batch with other labels: dataclasses.replace(batch, labels=labels)."
            raise UsageError(f"relabel() returns {type(batch).__name__}. {advice}")
        ce, kd, labels, hidden = self.config.ce, self.config.kd, batch.labels, self._hidden()
        t = t if kd.weight > 0 else None
        count_void = ce.reduction == "all"
        if ce.kind == "binary":
            return {"ce": self.mean_of("ce", binary_cross_entropy_sums(z, labels))} | self._distillation(batch, z, t)
        if ce.kind == "one_vs_rest":
            first = max(1, self.step.n_old)
            sums = one_vs_rest_sums(z[:, first:], labels, first)
            return {"ce": self.mean_of("ce", sums)} | self._distillation(batch, z, t)
        labels, certain = self._split(labels)
        if self._class_weights is not None:
            weighted = partial(weighted_cross_entropy_sums, z, weights=self._class_weights, count_void=count_void)
            sums = weighted(labels, hidden)
            if certain is not None:
                loss, count = weighted(certain, 1)
                sums = torch.stack([sums[0] + loss, sums[1] if count_void else sums[1] + count])
            return {"ce": self.mean_of("ce", sums)} | self._distillation(batch, z, t)
        if t is not None and kd.kind == "unbiased":
            sums, distilled = unbiased_sums(z, labels, hidden, t, self.distilled(batch), count_void=count_void)
            kept = {"kd": self._distillation_mean(distilled, t)}
        else:
            sums = unbiased_cross_entropy_sums(z, labels, hidden, count_void=count_void)
            kept = self._distillation(batch, z, t)
        if certain is not None:
            loss, count = cross_entropy_sums(z, certain)
            sums = torch.stack([sums[0] + loss, sums[1] if count_void else sums[1] + count])
        return {"ce": self.mean_of("ce", sums)} | kept

    def _split(self, labels: Tensor) -> tuple[Tensor, Tensor | None]:
        """Labels for the unbiased CE, and those for the plain one: a pixel relabelled as old is not background."""
        hidden = self._hidden()
        return split_labels(labels, hidden) if self.relabels and hidden > 1 else (labels, None)

    def _hidden(self) -> int:
        """The number of channels that a pixel labelled background may belong to."""
        kind, step = self.config.ce.kind, self.step
        unbiased = kind == "unbiased" or (kind == "unbiased_if_masked" and step.protocol != "sequential")
        return max(1, step.n_old) if unbiased and step.n_new > 0 else 1

    def _distillation(self, batch: Batch, z: Tensor, t: Tensor | None) -> dict[str, Tensor]:
        kd = self.config.kd
        if t is None:
            return {}
        if kd.kind == "cil_official":
            return {"kd": official.cil(z, t, batch.labels)}
        keep = self.distilled(batch)
        if kd.kind == "cil":
            return {"kd": self.mean_of("kd", cil_sums(z, t, batch.labels, keep, entropy_weight=kd.entropy_weight))}
        if kd.kind == "binary":
            return {"kd": self.mean_of("kd", binary_distillation_sums(z, t, keep))}
        sums = distillation_sums if kd.kind == "standard" else unbiased_distillation_sums  # with a binary CE
        return {"kd": self._distillation_mean(sums(z, t, keep), t)}

    def _distillation_mean(self, sums: Tensor, t: Tensor) -> Tensor:
        value, n_old = self.mean_of("kd", sums), t.shape[1]
        return value / {"n_old": n_old, "at_least_16": max(16, n_old), "none": 1}[self.config.kd.normaliser]

    def distilled(self, batch: Batch) -> Tensor:
        """(B, H, W) bool: the pixels that are distilled."""
        kd = self.config.kd
        keep = torch.ones_like(batch.padding) if kd.padding == "include" else ~batch.padding
        return keep & ~self.labelled_new(batch) if kd.on_new == "skip" else keep

    def labelled_new(self, batch: Batch) -> Tensor:
        """(B, H, W) bool: the pixels that are labelled with a class of this step."""
        return (batch.labels >= max(1, self.step.n_old)) & (batch.labels != VOID)

    def mean_of(self, name: str, sums: Tensor) -> Tensor:
        """The mean over all processes and, where the batch comes in parts, this part's share of the whole mean."""
        sums = self.processes.sum(sums)
        return sums[0] / self._counts[name].clamp_min(1) if name in self._counts else mean(sums)
