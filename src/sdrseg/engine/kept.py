"""Whether a model that is being extended still predicts what the model before it predicts, outside the new classes."""

from __future__ import annotations

import torch
from torch import Tensor

from sdrseg.datasets.batches import eval_batches
from sdrseg.datasets.extended import Extended
from sdrseg.decision import Decision, decide
from sdrseg.engine.evaluate import labels_and_logits
from sdrseg.engine.job import Job
from sdrseg.engine.saved import open_step
from sdrseg.labels import VOID
from sdrseg.network import Network
from sdrseg.scenario import Step


def merged_channels(job: Job, step: Step) -> Tensor:
    """(K,): the channel that each channel of a step counts as; removed classes count as background."""
    merged = torch.arange(len(step.channels), device=job.fabric.device)
    merged[list(job.removed_channels(step))] = 0
    return merged


def agreement(labels: Tensor, padding: Tensor, before: Tensor, after: Tensor, n_old: int, merged: Tensor) -> Tensor:
    """(2,): of the pixels outside the new classes (background, old classes, and whatever is not labelled), how many
    have the same prediction before and after, and how many there are. `padding`: pixels that show no image."""
    outside = ((labels < n_old) | (labels == VOID)) & ~padding
    return torch.stack([(outside & (merged[before] == merged[after])).sum(), outside.sum()])


class Kept:
    """Compares a network with the model before an extension on held-out images, where these label new classes only.

    Old classes have no labels there, so that a score alone does not show what happens to them.
    """

    def __init__(self, job: Job, step: Step):
        self._job, self._step = job, step
        self._before: tuple[Network, Decision] | None = None
        extended = isinstance(job.source, Extended) and step.number > 0
        self._ids = [id for id in job.watched(step) if job.source.labelled(id) is not None] if extended else []

    @torch.inference_mode()
    def share(self, network: Network, decision: Decision) -> float | None:
        """The share of the pixels outside the new classes that are predicted as before; None without such images."""
        if not self._ids:
            return None
        job, step = self._job, self._step
        if self._before is None:
            self._before = open_step(job.folder.step(step.number - 1), job.config.net)
            self._before[0].place_on(job.fabric.device).eval()
        merged = merged_channels(job, step)
        was_training, (old, old_decision) = network.training, self._before
        network.eval()
        total = torch.zeros(2, dtype=torch.int64, device=job.fabric.device)
        sizes = job.indexes[step.test_split].size_by_id
        multiple = network.multiple
        for batch in eval_batches(
            job.source, self._ids, sizes, step.test_table, job.config, share=job.share, multiple=multiple
        ):
            batch = batch.to(job.fabric.device)
            both = zip(*(labels_and_logits(job.fabric, one, batch) for one in (old, network)), strict=True)
            for before, after in both:
                predictions = decide(before.logits, old_decision), decide(after.logits, decision)
                total += agreement(before.labels, before.padding, *predictions, len(step.old), merged)
        network.train(was_training)
        equal, pixels = job.processes.sum(total).tolist()
        return equal / pixels if pixels else None
