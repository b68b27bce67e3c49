"""A uniform sample of the feature vectors of each class, drawn in a pass over the data."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

from sdrseg.distributed import Processes

BACKGROUND, CLASS = 8192, 2048  # feature vectors sampled from background, and from any other class
POINTS = 1024  # cells sampled from an image
EMPTY = torch.iinfo(torch.int64).max  # the key of an empty slot


class Sample:
    """Feature vectors of each class, sampled uniformly: each slot keeps the vector with the smallest key. Keys depend
    on images and positions only, so the sample does not depend on batches or processes."""

    def __init__(self, classes: int, channels: int, device: torch.device, per_class: int | None = None):
        self.slots = torch.tensor([BACKGROUND] + [per_class or CLASS] * (classes - 1), device=device)
        self.first = self.slots.cumsum(0) - self.slots
        self.keys = torch.full((int(self.slots.sum()),), EMPTY, device=device)
        self.vectors = torch.zeros(len(self.keys), channels, device=device)
        self.counts = torch.zeros(classes, dtype=torch.long, device=device)

    def add(
        self, embedding: Tensor, labels: Tensor, ids: Sequence[str], encoder: Tensor | None = None, view: int = 0
    ) -> None:
        """Embedding (B, D, h, w) and labels (B, h, w) on its grid; labels that are not a class are skipped.

        `view`: the number of this view of the images, if there are several.
        `encoder` (B, C, h', w'): a coarser map whose values, upsampled, are further channels of the vectors.
        """
        step = max(1, round((labels[0].numel() / POINTS) ** 0.5))
        grid = (..., slice(step // 2, None, step), slice(step // 2, None, step))
        vectors = [embedding[grid].float()]
        if encoder is not None:
            chosen = (torch.arange(length, device=labels.device)[step // 2 :: step] for length in labels.shape[1:])
            vectors.append(upsampled_at(encoder.float(), (labels.shape[1], labels.shape[2]), *chosen))
        x = torch.cat([part.flatten(2).transpose(1, 2).flatten(0, 1) for part in vectors], 1)
        y = labels[grid].flatten().long()
        key = _keys([f"{id} {view}" for id in ids] if view else ids, len(y) // len(ids), y.device)
        known = y < len(self.counts)
        x, y, key = x[known], y[known], key[known]
        slot = self.first[y] + (key >> 24) % self.slots[y]
        self.keys.scatter_reduce_(0, slot, key, "amin")
        won = self.keys[slot] == key
        self.vectors[slot[won]] = x[won]
        self.counts += torch.bincount(y, minlength=len(self.counts))

    def gather(self, processes: Processes) -> None:
        """Merge the samples of all processes."""
        if processes.world > 1:
            smallest = -processes.max(-self.keys)
            mine = (self.keys == smallest) & (smallest < EMPTY)
            self.vectors = processes.sum(torch.where(mine[:, None], self.vectors, 0))
            self.keys, self.counts = smallest, processes.sum(self.counts)

    def average(self, views: int) -> None:
        """Count the cells of several views of each image as those of one, rounded up."""
        self.counts = -(-self.counts // views)

    def of(self, channel: int) -> Tensor:
        """The vectors of a class, (M, D)."""
        rows = slice(int(self.first[channel]), int(self.first[channel] + self.slots[channel]))
        return self.vectors[rows][self.keys[rows] < EMPTY]

    def project(self, first: int, directions: Tensor) -> None:
        """Replace the channels of the vectors from `first` on by their products with `directions` (k, C)."""
        self.vectors = torch.cat([self.vectors[:, :first], self.vectors[:, first:] @ directions.T], 1)

    def weighted(self) -> tuple[Tensor, Tensor]:
        """The vectors of all classes, (M, D), and the number of points that each represents, (M,)."""
        vectors, points = zip(*map(self.weighted_of, range(len(self.counts))), strict=True)
        return torch.cat(vectors), torch.cat(points)

    def weighted_of(self, channel: int) -> tuple[Tensor, Tensor]:
        """The same for one class."""
        x = self.of(channel)
        return x, x.new_full((len(x),), int(self.counts[channel]) / max(1, len(x)))


def upsampled_at(maps: Tensor, size: tuple[int, int], rows: Tensor, columns: Tensor) -> Tensor:
    """Maps (B, C, h, w) upsampled bilinearly to `size`, at some rows and columns of the result only."""
    for dim, length, at in ((-2, size[0], rows), (-1, size[1], columns)):
        last = maps.shape[dim] - 1
        place = ((at + 0.5) * (last + 1) / length - 0.5).clamp(0, last)
        low = place.floor().long()
        share = (place - low).to(maps)
        share = share[:, None] if dim == -2 else share
        maps = torch.lerp(maps.index_select(dim, low), maps.index_select(dim, (low + 1).clamp_max(last)), share)
    return maps


def _keys(ids: Sequence[str], positions: int, device: torch.device) -> Tensor:
    """A 62-bit number for each position of each image, (B · positions,)."""
    images = [int.from_bytes(hashlib.blake2b(id.encode(), digest_size=7).digest()) for id in ids]
    mixed = (
        torch.tensor(images, device=device)[:, None] + torch.arange(1, positions + 1, device=device) * 0x9E3779B97F4A7C1
    )
    for shift, factor in ((30, 0x3F58476D1CE4E5B9), (27, 0x14D049BB133111EB)):  # SplitMix64
        mixed = (mixed ^ (mixed >> shift)) * factor
    return ((mixed ^ (mixed >> 31)) & (2**62 - 1)).flatten()
