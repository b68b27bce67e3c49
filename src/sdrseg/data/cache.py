"""Decoded images and masks kept in RAM or on the GPU, and views carried out there for a whole batch at once.

Images differ in size, so all pixels lie in one long row of 4-byte words: red, green, blue, label. On a GPU
kernels/views.py makes a batch of them, on a CPU torchvision one image after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sdrseg.data.augment import FILL, Axis, View, padding, show
from sdrseg.data.source import Progress, Source
from sdrseg.errors import DataError, SdrsegError
from sdrseg.kernels.views import show as show_views
from sdrseg.labels import VOID

Size = tuple[int, int]  # height, width
WORD = 4  # bytes a pixel
STAGE = 2**28
"""Bytes that are collected in RAM before they are kept: few large copies to a GPU, whatever one costs there."""
HEADROOM = 0.5
"""The share of free memory a cache may take: training needs the rest."""


class PixelCache:
    """Images and masks, decoded, on one device. `sizes`: (height, width) by id; `store` fills it."""

    def __init__(self, sizes: Mapping[str, Size], device: Any = "cpu"):
        self.device = torch.device(device)
        self.sizes = dict(sizes)
        self._row = {id: row for row, id in enumerate(sizes)}
        self._first = list(accumulate((height * width for height, width in sizes.values()), initial=0))
        self._pixels = torch.empty(self._first[-1], WORD, dtype=torch.uint8, device=self.device)

    def store(self, id: str, image: NDArray[np.uint8], mask: NDArray[np.uint8]) -> None:
        """Keep an image (H, W, 3) and its mask (H, W). Several threads may do so at a time."""
        if image.shape[:2] != self.sizes[id] or mask.shape != self.sizes[id]:
            found = f"{image.shape[:2]} with a mask of {mask.shape}"
            raise DataError(
                f"{id}: {found}, not {self.sizes[id]} as indexed. The files changed meanwhile; run it again."
            )
        words = np.dstack([image, mask]).reshape(-1, WORD)
        place = self._of(id)
        if place.is_cpu:  # not by torch, which would start threads of its own in each of our threads
            np.copyto(place.numpy(), words)
        else:
            place.copy_(torch.from_numpy(words))

    def take(self, part: PixelCache) -> None:
        """Keep all that another cache holds, whose images follow each other here too."""
        first = self._first[self._row[next(iter(part.sizes))]]
        self._pixels[first : first + len(part._pixels)].copy_(part._pixels)

    def _of(self, id: str) -> Tensor:
        """The words of an image, (H·W, 4)."""
        row = self._row[id]
        return self._pixels[self._first[row] : self._first[row + 1]]

    @property
    def nbytes(self) -> int:
        return self._pixels.numel()

    def show(self, ids: Sequence[str], views: Sequence[View]) -> tuple[Tensor, Tensor, Tensor]:
        """Images (B, 3, out, out) uint8 channels-last, masks (B, out, out) uint8 and padding (B, out, out) bool."""
        if self.device.type == "cpu":
            return self.show_each(ids, views)
        return self.show_together(ids, views)

    def show_each(self, ids: Sequence[str], views: Sequence[View]) -> tuple[Tensor, Tensor, Tensor]:
        """One image after the other with torchvision: the faster way on a CPU."""
        shown = [show(view, *self._picture(id)) for id, view in zip(ids, views, strict=True)]
        images = torch.stack([image.permute(1, 2, 0) for image, _ in shown]).permute(0, 3, 1, 2)
        return images, torch.stack([mask for _, mask in shown]), torch.stack([padding(view) for view in views])

    def show_together(self, ids: Sequence[str], views: Sequence[View]) -> tuple[Tensor, Tensor, Tensor]:
        """The whole batch at once: the faster way on a GPU."""
        numbers = []
        for id, view in zip(ids, views, strict=True):
            rows, columns = ((a.low, a.high, a.size, a.offset) for a in (view.rows, view.columns))
            numbers.append((self._first[self._row[id]], self.sizes[id][1], *rows, *columns, int(view.flip)))
        sources = (_label_sources([view.rows for view in views]), _label_sources([view.columns for view in views]))
        return show_views(self._words, numbers, *sources, FILL, VOID)

    @property
    def _words(self) -> Tensor:
        return self._pixels.view(torch.int32).squeeze(1)

    def _picture(self, id: str) -> tuple[Tensor, Tensor]:
        words = self._of(id).view(*self.sizes[id], WORD)
        return words[:, :, :3].permute(2, 0, 1), words[:, :, 3]


def _label_sources(axes: Sequence[Axis]) -> Tensor:
    """(B, out) int32: the source pixel of the labels of each view, before flipping; 0 for padding."""
    table = np.zeros((len(axes), axes[0].out), np.int32)
    for row, axis in zip(table, axes, strict=True):
        row[slice(*axis.shown)] = axis.nearest
    return torch.from_numpy(table)


def build_cache(
    source: Source, sizes: Mapping[str, Size], device: Any, threads: int, progress: Progress | None = None
) -> PixelCache:
    """Decode the images of `sizes` (by id) in several threads and keep them on `device`."""
    cache = PixelCache(sizes, device)
    done = 0
    with ThreadPoolExecutor(max(1, threads)) as pool:
        try:
            for some in _stages(sizes):
                part = PixelCache(some)
                for _ in pool.map(lambda id, part=part: part.store(id, *source.pair(id)), some):
                    done += 1
                    if progress is not None:
                        progress(done, len(sizes))
                cache.take(part)
        finally:
            pool.shutdown(cancel_futures=True)
    return cache


def _stages(sizes: Mapping[str, Size]) -> Iterator[dict[str, Size]]:
    """Images one after the other, in groups of about STAGE bytes."""
    some: dict[str, Size] = {}
    held = 0
    for id, (height, width) in sizes.items():
        some[id] = (height, width)
        held += height * width * WORD
        if held >= STAGE:
            yield some
            some, held = {}, 0
    if some:
        yield some


def free_memory(device: torch.device) -> int:
    """Bytes that are free on a device; 0 where this is unknown (images are then decoded each time)."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return 0
    free = next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable")), 0)
    try:  # a container may have less than the machine
        limit, used = (Path(f"/sys/fs/cgroup/memory.{name}").read_text().strip() for name in ("max", "current"))
        return min(free, int(limit) - int(used)) if limit != "max" else free
    except (OSError, ValueError):
        return free


def cache_device(
    wish: str, sizes: Iterable[Size], device: Any, free: Callable[[torch.device], int] = free_memory
) -> torch.device | None:
    """Where to keep the decoded images for training on `device`: that GPU, the CPU, or None (not at all).

    `wish` is data.cache: "auto" takes the nearest place where they fit; "gpu" and "ram" are refused where they do not.
    """
    needed = sum(height * width for height, width in sizes) * WORD
    device = torch.device(device)
    places: dict[str, torch.device] = {"gpu": device, "ram": torch.device("cpu")}
    if wish == "off":
        return None
    if wish == "gpu" and device.type == "cpu":
        raise SdrsegError("data.cache = 'gpu', but there is no GPU to train on. Use 'ram' or 'auto'.")
    tried: list[torch.device] = list(places.values()) if wish == "auto" else [places[wish]]
    for place in tried:
        if needed <= HEADROOM * free(place):
            return place
    if wish == "auto":
        return None
    raise SdrsegError(
        f"data.cache = {wish!r} needs {needed / 2**30:.1f} GiB on {places[wish]}, which has "
        f"{free(places[wish]) / 2**30:.1f} GiB free (half of it may be used). Use data.cache=auto or off."
    )
