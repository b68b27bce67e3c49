"""Adjusts the memory of earlier steps to a later one: shifted features, and background that contained a new class."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from sdrseg.distributed import Processes
from sdrseg.losses.pixels import widest
from sdrseg.methods.memory import Memory
from sdrseg.methods.sample import Sample

TEMPERATURE = 0.1  # temperature of the similarity between classes
ROWS = 1024  # vectors whose distances are computed at once
EQUAL = 1e-5  # relative difference of squared distances that may be rounding


class Drift:
    """The shift of the features of each old class in a step."""

    def __init__(self, classes: int, channels: int, device: torch.device):
        self.sums = widest(torch.zeros(classes, channels + 1, device=device))  # of shifts, and of cells

    def add(self, now: Tensor, before: Tensor, old: Tensor) -> None:
        """Embeddings (B, D, h, w) of student and teacher; old (B, h, w): the class of a cell, 0 for none."""
        moved = torch.cat([now - before, torch.ones_like(now[:, :1])], 1).movedim(1, -1)[old > 0]
        self.sums.index_add_(0, old[old > 0], moved.to(self.sums))

    def shift(self, remembered: Memory | None, processes: Processes) -> Tensor:
        """(K, D): the mean shift of each class; a class that was not seen gets the shift of similar classes."""
        sums = processes.sum(self.sums)
        count = sums[:, -1:]
        shift = (sums[:, :-1] / count.clamp_min(1)).float()
        if remembered is None or not (count > 0).any():
            return shift
        weight = torch.zeros_like(shift[:, 0]).index_add_(0, remembered.owner, remembered.points)
        centre = torch.zeros_like(shift).index_add_(0, remembered.owner, remembered.mean * remembered.points[:, None])
        centre = F.normalize(centre / weight[:, None].clamp_min(1), dim=1)
        similarity = (centre @ centre.T / TEMPERATURE).masked_fill(count[:, 0] == 0, -torch.inf).softmax(1)
        return torch.where(count > 0, shift, similarity @ shift)


def share_of_new(background: Memory, sample: Sample, new: range) -> Tensor:
    """(M,): for each part of the background, the share of its nearest points in this step that is labelled new.

    A part that is nearest to no point has share 0. Parts at the same distance are all nearest: an image that comes back
    in several steps leaves the same vector several times.
    """
    parts = widest(background.mean)
    total = torch.zeros(2, len(parts), dtype=parts.dtype, device=parts.device)
    for channel in range(len(sample.counts)):
        x = sample.of(channel)
        for rows in torch.split(widest(x), ROWS) if len(x) > 0 else ():
            size = rows.square().sum(1, keepdim=True)
            distance = size + parts.square().sum(1) - 2 * rows @ parts.T  # squared
            nearest = distance <= distance.amin(1, keepdim=True) + EQUAL * size
            total[int(channel in new)] += int(sample.counts[channel]) / len(x) * nearest.sum(0)
    return (total[1] / total.sum(0).clamp_min(1)).float()
