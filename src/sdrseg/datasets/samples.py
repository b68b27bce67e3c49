"""A batch of images and labels, and the samples it is made of: views of images that are decoded or cached.

Everything random about a training image depends on (seed, epoch, id) only.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from sdrseg.config import Config
from sdrseg.datasets.augment import AUGMENTATIONS, View, evaluation_view, padding, show
from sdrseg.datasets.cache import PixelCache
from sdrseg.datasets.colour import colour_factors, recolour
from sdrseg.datasets.order import Key
from sdrseg.datasets.source import Source
from sdrseg.errors import DataError
from sdrseg.labels import VOID

Size = tuple[int, int]  # height, width


@dataclass(frozen=True)
class Batch:
    """images (B, 3, H, W) uint8 channels-last, labels (B, H, W) uint8 (channel or 255), padding (B, H, W) bool.

    Padding is the area that a view adds around an image. Its label is 255 too, but it is not void in the data set.
    """

    images: Tensor
    labels: Tensor
    padding: Tensor
    ids: tuple[str, ...]
    epoch: int = 0
    bad: tuple[str, ...] = ()
    """Images that could not be read. They are all padding, so they add nothing to any loss."""

    def map(self, function: Callable[[Tensor], Tensor]) -> Batch:
        tensors = {name: function(getattr(self, name)) for name in ("images", "labels", "padding")}
        return replace(self, **tensors)  # type: ignore[arg-type]

    def split(self, parts: int) -> list[Batch]:
        """The batch in `parts` parts of (nearly) equal size."""
        if parts == 1:
            return [self]
        cuts = [len(self.ids) * part // parts for part in range(parts + 1)]
        return [
            replace(self.map(lambda tensor, a=a, b=b: tensor[a:b]), ids=self.ids[a:b])  # type: ignore[misc]
            for a, b in pairwise(cuts)
            if b > a
        ]

    def to(self, device: Any) -> Batch:
        return self.map(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> Batch:
        return self.map(Tensor.pin_memory)


@dataclass(frozen=True)
class Augmented:
    """A random view for each (epoch, id), the same for the same seed."""

    config: Config

    def __call__(self, size: Size, epoch: int, id: str) -> View:
        data = self.config.data
        draw = random.Random(f"view {self.config.train.seed} {epoch} {id}")
        return AUGMENTATIONS[data.augment](size, data.crop, data.scale, draw)

    def recoloured(self, images: Tensor, outside: Tensor, keys: Sequence[Key], ids: Sequence[str]) -> Tensor:
        """A batch of views after colour augmentation."""
        strength, seed = self.config.data.colour, self.config.train.seed
        if strength == 0:
            return images
        factors = [colour_factors(seed, epoch, id, strength) for (epoch, _), id in zip(keys, ids, strict=True)]
        return recolour(images, outside, torch.tensor(factors))


@dataclass(frozen=True)
class Evaluated:
    """The view on which an image is scored. `multiple`: that of the network."""

    config: Config
    multiple: int = 16

    def __call__(self, size: Size, epoch: int, id: str) -> View:
        return evaluation_view(self.config.eval.transform, size, self.multiple)

    def recoloured(self, images: Tensor, outside: Tensor, keys: Sequence[Key], ids: Sequence[str]) -> Tensor:
        """Evaluation does not change colours."""
        return images


Chooser = Augmented | Evaluated


class Decoded(Dataset[Any]):
    """Views of images that are decoded from the source each time.

    An image that cannot be read is an error or, with `skip_bad`, all padding.
    """

    def __init__(
        self, source: Source, ids: Sequence[str], table: NDArray[np.uint8], choose: Chooser, skip_bad: bool = False
    ):
        self.source, self.ids, self.choose, self.skip_bad = source, ids, choose, skip_bad
        self.table = torch.tensor(table)

    def __getitems__(self, keys: Sequence[Key]) -> Batch | DataError:
        """A whole batch. The error of an unreadable picture is returned, to be raised in the main process."""
        try:
            return self.batch(keys)
        except DataError as error:
            return error

    def batch(self, keys: Sequence[Key]) -> Batch:
        ids = tuple(self.ids[row] for _, row in keys)
        bad: list[str] = []
        samples = [self._sample(epoch, id, bad) for (epoch, _), id in zip(keys, ids, strict=True)]
        images, masks, outside = (torch.stack(parts) for parts in zip(*samples, strict=True))
        labels = relabel(masks, outside, self.table)
        images = self.choose.recoloured(images.permute(0, 3, 1, 2), outside, keys, ids)
        return Batch(images, labels, outside, ids, keys[0][0], tuple(bad))

    def _sample(self, epoch: int, id: str, bad: list[str]) -> tuple[Tensor, Tensor, Tensor]:
        try:
            image, mask = (torch.from_numpy(np.array(array)) for array in self.source.pair(id))
        except DataError:
            if not self.skip_bad:
                raise
            bad.append(id)
            blank = self.choose((1, 1), epoch, id)
            size = (blank.rows.out, blank.columns.out)
            black = torch.zeros(*size, 3, dtype=torch.uint8)
            return black, torch.full(size, VOID, dtype=torch.uint8), torch.ones(size, dtype=torch.bool)
        view = self.choose((mask.shape[0], mask.shape[1]), epoch, id)
        picture, label = show(view, image.permute(2, 0, 1), mask)
        return picture.permute(1, 2, 0), label, padding(view)


class Cached:
    """Views of cached images."""

    def __init__(self, cache: PixelCache, ids: Sequence[str], table: NDArray[np.uint8], choose: Chooser):
        self.cache, self.ids, self.choose = cache, ids, choose
        self.table = torch.tensor(table, device=cache.device)

    def batch(self, keys: Sequence[Key]) -> Batch:
        ids = tuple(self.ids[row] for _, row in keys)
        views = [self.choose(self.cache.sizes[id], epoch, id) for (epoch, _), id in zip(keys, ids, strict=True)]
        images, masks, outside = self.cache.show(ids, views)
        images = self.choose.recoloured(images, outside, keys, ids)
        return Batch(images, relabel(masks, outside, self.table), outside, ids, keys[0][0])


def relabel(masks: Tensor, outside: Tensor, table: Tensor) -> Tensor:
    """Map raw labels to channels with a 256-entry table; padding stays 255 even if the table maps void to a channel."""
    labels = table.index_select(0, masks.flatten().int()).view_as(masks)
    return torch.maximum(labels, outside.to(torch.uint8) * VOID)
