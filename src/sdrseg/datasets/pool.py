"""Decoded images that a run keeps between steps and that several runs of one process share."""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Sequence
from contextlib import nullcontext
from typing import Any, Literal

import torch

from sdrseg.config import Config
from sdrseg.datasets.batches import trained_on, workers
from sdrseg.datasets.cache import PixelCache, build_cache, cache_device
from sdrseg.datasets.index import ClassIndex
from sdrseg.datasets.source import Source
from sdrseg.errors import DataError

Purpose = Literal["train", "score"]


class ImagePool:
    """Caches by purpose and content. `whole`: decode all images of a split at once if they fit, so that later steps and
    other runs can use them."""

    def __init__(self, whole: bool = False) -> None:
        self.whole = whole
        self._caches: dict[tuple[Purpose, Hashable], PixelCache | None] = {}

    def cache(
        self, purpose: Purpose, source: Source, index: ClassIndex, ids: Sequence[str], config: Config, device: Any
    ) -> PixelCache | None:
        """A cache with at least these images of a split; None if they do not fit in memory."""
        same = _content(source, index, config, device)
        for (_, content), kept in self._caches.items():
            if content == same and kept is not None and kept.sizes.keys() >= set(ids):
                return kept
        for key in [key for key in self._caches if key[0] == purpose]:
            del self._caches[key]  # its memory is needed now
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
        built = self._build(purpose, source, index, ids, config, device)
        self._caches[purpose, same] = built
        return built

    def _build(
        self, purpose: Purpose, source: Source, index: ClassIndex, ids: Sequence[str], config: Config, device: Any
    ) -> PixelCache | None:
        known = index.size_by_id
        sizes, all_sizes = {id: known[id] for id in ids}, {id: known[id] for id in index.ids}
        target = cache_device(config.data.cache, sizes.values(), device)
        if target is None:
            return None
        threads = workers(config)
        if self.whole and config.data.cache == "auto" and cache_device("auto", all_sizes.values(), device) == target:
            try:
                return build_cache(source, all_sizes, target, threads)
            except DataError:
                pass  # an image that this run does not need may be unreadable
        with trained_on() if purpose == "train" else nullcontext():
            return build_cache(source, sizes, target, threads)


def _content(source: Source, index: ClassIndex, config: Config, device: Any) -> Hashable:
    """A key for the pixels of a cache and its device."""
    masks = hashlib.sha256(index.digests.tobytes()).digest()
    target = source.file(index.ids[0], "image") if index.ids else ""
    return source.name, target, config.shapes, config.data.cache, str(device), masks
