"""The order in which images are used, and how processes share them. No torch.

A key (epoch, row) is one use of one image. With N processes, each takes its part of every global training batch, so the
batches are the same for any N; in evaluation each image is used exactly once over all processes.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from sdrseg.errors import SdrsegError, quantity

Key = tuple[int, int]


@dataclass(frozen=True)
class Share:
    """The rank of this process and the number of processes."""

    rank: int = 0
    world: int = 1


class TrainOrder:
    """Every epoch a new permutation, cut into batches of equal size; an incomplete last batch is dropped.

    `epoch` and `batch` are the position: the next batch. The permutation of an epoch depends only on the seed and the
    epoch, so saving these two numbers is enough.
    """

    def __init__(self, ids: Sequence[str], batch_size: int, epochs: int, seed: int, share: Share | None = None):
        share = share or Share()
        if batch_size % share.world:
            raise SdrsegError(
                f"train.batch_size = {batch_size} cannot be divided among {share.world} processes. Use a multiple of "
                f"{share.world}."
            )
        if len(ids) < batch_size:
            few = quantity(len(ids), "image")
            raise SdrsegError(f"train.batch_size = {batch_size} is too large for {few}. Use a smaller one.")
        self.images, self.batch_size, self.epochs, self.seed, self.share = len(ids), batch_size, epochs, seed, share
        self.batches_per_epoch = len(ids) // batch_size
        self.epoch = 0
        self.batch = 0
        self._digest = hashlib.blake2b(
            "\0".join([str(batch_size), str(seed), *ids]).encode(), digest_size=16
        ).hexdigest()

    def __len__(self) -> int:
        """The number of remaining batches."""
        return max(0, (self.epochs - self.epoch) * self.batches_per_epoch - self.batch)

    def __iter__(self) -> Iterator[list[Key]]:
        """This process's keys of each batch, starting at the position, which does not change."""
        own_size = self.batch_size // self.share.world
        first = self.batch
        for epoch in range(self.epoch, self.epochs):
            rows = self._permutation(epoch)
            for batch in range(first, self.batches_per_epoch):
                start = batch * self.batch_size + self.share.rank * own_size
                yield [(epoch, row) for row in rows[start : start + own_size]]
            first = 0

    def advance(self) -> None:
        """Move the position to the next batch."""
        self.batch += 1
        if self.batch == self.batches_per_epoch:
            self.epoch, self.batch = self.epoch + 1, 0

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "batch": self.batch, "of": self._digest}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a saved position; an error if it belongs to other images, another batch size or another seed."""
        if state["of"] != self._digest:
            raise SdrsegError("The saved position belongs to other training images, another batch size or seed.")
        self.epoch, self.batch = state["epoch"], state["batch"]

    def _permutation(self, epoch: int) -> list[int]:
        draw = random.Random(f"order {self.seed} {epoch}")
        keys = [draw.random() for _ in range(self.images)]
        return sorted(range(self.images), key=keys.__getitem__)


class EvalOrder:
    """Every image once per epoch over all processes; all images of a batch have the same output shape."""

    def __init__(self, shapes: Sequence[Hashable], batch_size: int, share: Share | None = None, epochs: int = 1):
        share = share or Share()
        groups: dict[Hashable, list[int]] = {}
        for row in range(share.rank, len(shapes), share.world):
            groups.setdefault(shapes[row], []).append(row)
        self._batches = [
            [(epoch, row) for row in rows[start : start + batch_size]]
            for epoch in range(epochs)
            for rows in groups.values()
            for start in range(0, len(rows), batch_size)
        ]

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[list[Key]]:
        return iter(self._batches)

    def advance(self) -> None:
        """Does nothing: an evaluation is never resumed in the middle."""
