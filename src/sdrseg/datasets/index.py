"""The class index: the number of pixels of each label value in each mask. Counted once, in parallel, and cached.

The key of the cache is the content of the masks (and how they are decoded), not their path or time: an edited mask is
counted again, a copied or moved data set is not.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from sdrseg.datasets.source import Problem, Progress, Source, Split
from sdrseg.errors import DataError, SdrsegError, some
from sdrseg.files import atomic_writer, cache_folder
from sdrseg.labels import VOID
from sdrseg.threads import cores

FORMAT = "class-index-1"
DIGEST_BYTES = 16
Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True, eq=False)
class ClassIndex:
    """What the masks of some images contain. Rows follow `ids`; an unreadable mask has an empty row and a problem."""

    ids: tuple[str, ...]
    pixels: NDArray[np.int64]  # (images, 256): pixels of each label value
    sizes: NDArray[np.int32]  # (images, 2): height, width
    digests: NDArray[np.uint8]  # (images, 16): of the mask's content and coding
    problems: tuple[Problem, ...]

    @property
    def size_by_id(self) -> dict[str, tuple[int, int]]:
        """(height, width) of each image."""
        return {id: (height, width) for id, (height, width) in zip(self.ids, self.sizes.tolist(), strict=True)}

    @property
    def digest_by_id(self) -> dict[str, str]:
        """The digest of each mask, in hexadecimal."""
        return {id: digest.tobytes().hex() for id, digest in zip(self.ids, self.digests, strict=True)}

    @property
    def present(self) -> NDArray[np.bool_]:
        """(images, 256): which label values occur."""
        return self.pixels > 0

    def out_of_range(self, classes: int) -> list[tuple[str, dict[int, int]]]:
        """Ids whose masks contain values that are not a class, with these values and their pixel counts."""
        stray = self.pixels[:, classes:VOID]
        return [
            (self.ids[row], {int(v) + classes: int(stray[row, v]) for v in np.flatnonzero(stray[row])})
            for row in np.flatnonzero(stray.any(axis=1))
        ]

    def require_sound(self, source: Source) -> None:
        """Raise an error if a mask cannot be read or contains values that are not a class."""
        wrong = [str(problem) for problem in self.problems]
        last = len(source.classes) - 1
        wrong += [
            f"{source.file(id, 'mask')}: value {some([*values])} is neither a class (0..{last}) nor void (255)"
            for id, values in self.out_of_range(len(source.classes))
        ]
        if wrong:
            more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
            first = wrong[0].rstrip(".")
            raise DataError(f"{first}{more}. `sdrseg data` lists every problem. Repair or remove these files.")


def class_index(source: Source, split: Split, progress: Progress | None = None) -> ClassIndex:
    """The class index of a split, from the cache if these masks were counted before."""
    ids = source.ids(split)
    digests, unreadable = _digests(source, ids)
    key = hashlib.blake2b(f"{FORMAT} {source.name} {source.coding}".encode(), digest_size=DIGEST_BYTES)
    key.update("\0".join(ids).encode())
    key.update(digests.tobytes())
    file = cache_folder() / "index" / f"{source.name}-{key.hexdigest()}.npz"
    counted = _load(file, len(ids))
    if counted is None:
        pixels, sizes, failures = _count(source, ids, progress)
        _save(file, pixels, sizes)
    else:
        pixels, sizes = counted
        failures = _count(source, [ids[row] for row in np.flatnonzero(~sizes.any(axis=1))], None)[2]
    named = [(source.file(id, "mask"), why) for id, why in (unreadable | failures).items()]
    problems = [Problem(file, "unreadable", why.removeprefix(f"{file}: ")) for file, why in named]
    return ClassIndex(ids, pixels, sizes, digests, tuple(sorted(problems)))


def map_with_threads(
    function: Callable[[Item], Result], items: Sequence[Item], progress: Progress | None = None
) -> Iterator[Result]:
    """`map` with threads (decoding releases Python's lock), in order, with progress."""
    with ThreadPoolExecutor(max(1, round(cores()))) as pool:
        for done, result in enumerate(pool.map(function, items), 1):
            if progress is not None:
                progress(done, len(items))
            yield result


def _digests(source: Source, ids: Sequence[str]) -> tuple[NDArray[np.uint8], dict[str, str]]:
    digests = np.zeros((len(ids), DIGEST_BYTES), np.uint8)
    coding = source.coding.encode()  # with another coding, the same bytes are a different label map
    unreadable = {}
    for row, id in enumerate(ids):
        try:
            content = source.mask_content(id)
        except (OSError, DataError) as error:
            unreadable[id] = str(error)
        else:
            digests[row] = np.frombuffer(hashlib.blake2b(content + coding, digest_size=DIGEST_BYTES).digest(), np.uint8)
    return digests, unreadable


Counts = tuple[NDArray[np.int64], NDArray[np.int32]]  # pixels, sizes


def _count(source: Source, ids: Sequence[str], progress: Progress | None) -> tuple[*Counts, dict[str, str]]:
    """Pixel counts, sizes, and reasons for unreadable masks by id; an unreadable mask has size 0×0."""

    def count(id: str) -> tuple[NDArray[np.int64], tuple[int, int]] | str:
        try:
            mask = source.mask(id)
        except (OSError, DataError) as error:
            return str(error)
        return np.bincount(mask.ravel(), minlength=256), (mask.shape[0], mask.shape[1])

    pixels = np.zeros((len(ids), 256), np.int64)
    sizes = np.zeros((len(ids), 2), np.int32)
    failures = {}
    for row, result in enumerate(map_with_threads(count, ids, progress)):
        if isinstance(result, str):
            failures[ids[row]] = result
        else:
            pixels[row], sizes[row] = result
    return pixels, sizes, failures


def _load(file: Path, images: int) -> Counts | None:
    """The contents of a cache file; None if it does not exist or is damaged (masks are then counted again)."""
    try:
        with np.load(file, allow_pickle=False) as saved:
            values, counts, sizes = saved["values"], saved["pixels"], saved["sizes"]
        if counts.shape != (images, len(values)) or sizes.shape != (images, 2):
            return None
        pixels = np.zeros((images, 256), np.int64)
        pixels[:, values] = counts
        return pixels, sizes
    except Exception:  # NumPy and zipfile raise many kinds of errors on damaged files
        return None


def _save(file: Path, pixels: NDArray[np.int64], sizes: NDArray[np.int32]) -> None:
    values = np.flatnonzero(pixels.any(axis=0))
    try:
        with atomic_writer(file) as out:
            np.savez_compressed(out, values=values, pixels=pixels[:, values], sizes=sizes)
    except SdrsegError as error:
        advice = "Set SDRSEG_CACHE to a writable folder; otherwise masks are counted again each time."
        warnings.warn(f"{error} {advice}", stacklevel=3)
