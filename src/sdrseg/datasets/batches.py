"""Batches of images and labels for training and evaluation, decoded by worker processes or taken from a cache.

The same seed gives the same pixels for any number of workers or processes, and a restored position continues exactly.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader

from sdrseg.config import Config
from sdrseg.datasets.cache import PixelCache
from sdrseg.datasets.order import EvalOrder, Share, TrainOrder
from sdrseg.datasets.samples import Augmented, Batch, Cached, Chooser, Decoded, Evaluated, Size, relabel
from sdrseg.datasets.source import Source
from sdrseg.datasets.workers import end_with_parent
from sdrseg.errors import DataError
from sdrseg.threads import cores

__all__ = [
    "Augmented",
    "Batch",
    "Batches",
    "Cached",
    "Decoded",
    "eval_batches",
    "relabel",
    "survey_batches",
    "train_batches",
    "train_order",
    "trained_on",
    "workers",
]


class Batches:
    """Iterate over the batches of an order from its position, which advances with each batch."""

    def __init__(self, samples: Decoded | Cached, order: TrainOrder | EvalOrder, workers: int = 0, pin: bool = False):
        self.samples, self.order, self.workers, self.pin = samples, order, workers, pin

    def __len__(self) -> int:
        return len(self.order)

    def __iter__(self) -> Iterator[Batch]:
        with trained_on() if isinstance(self.order, TrainOrder) else nullcontext():
            for batch in self._make():
                if isinstance(batch, DataError):
                    raise batch
                self.order.advance()
                yield batch

    def _make(self) -> Iterator[Batch | DataError]:
        if isinstance(self.samples, Cached) or self.workers == 0:
            return (self.samples.batch(keys) for keys in self.order)
        return iter(
            DataLoader(
                self.samples,
                batch_sampler=self.order,
                collate_fn=_identity,
                num_workers=min(self.workers, len(self.order)),
                generator=torch.Generator(),  # leaves the random numbers of training untouched
                pin_memory=self.pin,
                worker_init_fn=end_with_parent(),
            )
        )


@contextmanager
def trained_on() -> Iterator[None]:
    """If a training image cannot be read, add to the error how to resume the run."""
    try:
        yield
    except DataError as error:
        raise DataError(f"{error} To resume this run, repair the file or add --on-bad-image skip.") from error


def train_batches(
    source: Source,
    ids: Sequence[str],
    table: NDArray[np.uint8],
    config: Config,
    *,
    share: Share | None = None,
    cache: PixelCache | None = None,
) -> Batches:
    """Shuffled, augmented batches of `config.train.epochs` epochs."""
    return _batches(source, ids, table, Augmented(config), train_order(ids, config, share), config, cache)


def survey_batches(
    source: Source,
    ids: Sequence[str],
    table: NDArray[np.uint8],
    config: Config,
    *,
    share: Share,
    cache: PixelCache | None = None,
    views: int = 1,
) -> Batches:
    """Every training image with its views of the first epochs."""
    order = EvalOrder([None] * len(ids), max(1, config.train.batch_size // share.world), share, views)
    return _batches(source, ids, table, Augmented(config), order, config, cache)


def train_order(ids: Sequence[str], config: Config, share: Share | None = None) -> TrainOrder:
    """The order of `config.train.epochs` epochs; its length is the number of iterations."""
    train = config.train
    return TrainOrder(ids, train.batch_size, train.epochs, train.seed, share)


def eval_batches(
    source: Source,
    ids: Sequence[str],
    sizes: Mapping[str, Size],
    table: NDArray[np.uint8],
    config: Config,
    *,
    share: Share | None = None,
    cache: PixelCache | None = None,
    multiple: int = 16,
) -> Batches:
    """Every image once; `sizes` are the images' sizes by id, from the class index. `multiple`: that of the network."""
    choose = Evaluated(config, multiple)
    views = [choose(sizes[id], 0, id) for id in ids]
    order = EvalOrder([(view.rows.out, view.columns.out) for view in views], config.eval.batch_size, share)
    return _batches(source, ids, table, choose, order, config, cache)


def _batches(
    source: Source,
    ids: Sequence[str],
    table: NDArray[np.uint8],
    choose: Chooser,
    order: TrainOrder | EvalOrder,
    config: Config,
    cache: PixelCache | None,
) -> Batches:
    if cache is not None:
        return Batches(Cached(cache, ids, table, choose), order)
    skip = config.run.on_bad_image == "skip" and isinstance(choose, Augmented)  # test images are never skipped
    return Batches(Decoded(source, ids, table, choose, skip), order, workers(config), torch.cuda.is_available())


def workers(config: Config) -> int:
    """The number of processes that decode images: one per core that this process may use, at most 16."""
    return min(16, max(1, round(cores()))) if config.data.workers < 0 else config.data.workers


def _identity(batch: Any) -> Any:
    return batch
