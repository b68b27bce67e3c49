"""Decoded images and masks in RAM or on the GPU, and views applied there.

Images differ in size, so all pixels are stored in one flat array of 4-byte words: red, green, blue, label. On a GPU
kernels/views.py applies the views of a whole batch, on a CPU torchvision those of one image after the other.
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

from sdrseg.datasets.augment import FILL, Axis, View, padding, show
from sdrseg.datasets.source import Progress, Source
from sdrseg.errors import DataError, SdrsegError
from sdrseg.kernels.views import show as show_views
from sdrseg.labels import VOID

Size = tuple[int, int]  # height, width
WORD = 4  # bytes per pixel
STAGE = 2**28
"""Bytes that are collected in RAM before they are copied: a few large copies to a GPU instead of many small ones."""
HEADROOM = 0.5
"""The share of free memory that a cache may use; training needs the rest."""


class PixelCache:
    """Decoded images and masks on one device. `sizes`: (height, width) by id; `store` fills the cache."""

    def __init__(self, sizes: Mapping[str, Size], device: Any = "cpu"):
        self.device = torch.device(device)
        self.sizes = dict(sizes)
        self._row = {id: row for row, id in enumerate(sizes)}
        self._first = list(accumulate((height * width for height, width in sizes.values()), initial=0))
        self._pixels = torch.empty(self._first[-1], WORD, dtype=torch.uint8, device=self.device)

    def store(self, id: str, image: NDArray[np.uint8], mask: NDArray[np.uint8]) -> None:
        """Store an image (H, W, 3) and its mask (H, W). Several threads may call this at the same time."""
        if image.shape[:2] != self.sizes[id] or mask.shape != self.sizes[id]:
            found = f"{image.shape[:2]} with a mask of {mask.shape}"
            raise DataError(
                f"{id}: {found}, not {self.sizes[id]} as indexed. The files have changed since; run the command again."
            )
        words = np.dstack([image, mask]).reshape(-1, WORD)
        target = self._of(id)
        if target.is_cpu:  # not torch, which would start more threads in each of our threads
            np.copyto(target.numpy(), words)
        else:
            target.copy_(torch.from_numpy(words))

    def take(self, part: PixelCache) -> None:
        """Copy all pixels of another cache, whose images are consecutive in this one."""
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
        """One image after the other with torchvision, which is faster on a CPU."""
        shown = [show(view, *self._picture(id)) for id, view in zip(ids, views, strict=True)]
        images = torch.stack([image.permute(1, 2, 0) for image, _ in shown]).permute(0, 3, 1, 2)
        return images, torch.stack([mask for _, mask in shown]), torch.stack([padding(view) for view in views])

    def show_together(self, ids: Sequence[str], views: Sequence[View]) -> tuple[Tensor, Tensor, Tensor]:
        """The whole batch at once, which is faster on a GPU."""
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
    """(B, out) int32: the source pixels of the labels of each view, before flipping; 0 for padding."""
    table = np.zeros((len(axes), axes[0].out), np.int32)
    for row, axis in zip(table, axes, strict=True):
        row[slice(*axis.shown)] = axis.nearest
    return torch.from_numpy(table)


def build_cache(
    source: Source, sizes: Mapping[str, Size], device: Any, threads: int, progress: Progress | None = None
) -> PixelCache:
    """Decode the images in `sizes` with several threads and store them on `device`."""
    cache = PixelCache(sizes, device)
    done = 0
    with ThreadPoolExecutor(max(1, threads)) as pool:
        try:
            for group in _stages(sizes):
                part = PixelCache(group)
                for _ in pool.map(lambda id, part=part: part.store(id, *source.pair(id)), group):
                    done += 1
                    if progress is not None:
                        progress(done, len(sizes))
                cache.take(part)
        finally:
            pool.shutdown(cancel_futures=True)
    return cache


def _stages(sizes: Mapping[str, Size]) -> Iterator[dict[str, Size]]:
    """The images in order, in groups of about STAGE bytes."""
    group: dict[str, Size] = {}
    collected = 0
    for id, (height, width) in sizes.items():
        group[id] = (height, width)
        collected += height * width * WORD
        if collected >= STAGE:
            yield group
            group, collected = {}, 0
    if group:
        yield group


def free_memory(device: torch.device) -> int:
    """Free bytes on a device; 0 if unknown (images are then decoded each time)."""
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
    setting: str, sizes: Iterable[Size], device: Any, free: Callable[[torch.device], int] = free_memory
) -> torch.device | None:
    """Where to keep decoded images for training on `device`: on that GPU, in RAM, or None (nowhere).

    `setting` is data.cache: "auto" takes the GPU if they fit, else RAM if they fit; "gpu" and "ram" raise an error if
    they do not.
    """
    needed = sum(height * width for height, width in sizes) * WORD
    device = torch.device(device)
    devices: dict[str, torch.device] = {"gpu": device, "ram": torch.device("cpu")}
    if setting == "off":
        return None
    if setting == "gpu" and device.type == "cpu":
        raise SdrsegError("data.cache = 'gpu', but there is no GPU to train on. Use 'ram' or 'auto'.")
    candidates: list[torch.device] = list(devices.values()) if setting == "auto" else [devices[setting]]
    for target in candidates:
        if needed <= HEADROOM * free(target):
            return target
    if setting == "auto":
        return None
    raise SdrsegError(
        f"data.cache = {setting!r} needs {needed / 2**30:.1f} GiB on {devices[setting]}, which has "
        f"{free(devices[setting]) / 2**30:.1f} GiB free (the cache may use half). Use data.cache=auto or off."
    )
