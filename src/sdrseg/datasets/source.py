"""The interface of a data set: ids, class names, and for each id an image and a label map.

Every source returns label maps in the same form: (H, W) uint8, the position of the class in `classes`, 0 for background
and 255 for void. A value that is not a class is returned unchanged: the class index finds it, and `sdrseg data` names
the file.
"""

from __future__ import annotations

import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from sdrseg.config import Config
from sdrseg.datasets.pictures import read_image, read_label
from sdrseg.errors import DataError, quantity
from sdrseg.own_files import OWN, run_file
from sdrseg.scenario import SOURCES

MAX_CLASSES = 254
"""Background included; ids 0..253. 255 is void, and 254 stays free."""

ROTATED = "Images are turned as their EXIF data say, masks are not: turn the mask like the image."
"""Advice where height and width of image and mask are swapped."""

Split = Literal["train", "val"]
Array = NDArray[np.uint8]


@dataclass(frozen=True, order=True)
class Problem:
    """One problem of one file (or id) of a data set."""

    file: str
    kind: str  # a few fixed words: "unreadable", "size mismatch", "value out of range", …
    detail: str

    def __str__(self) -> str:
        return f"{self.file}: {self.kind}: {self.detail}"


class Source(ABC):
    """A data set. Subclasses: voc, ade20k, folder, shapes, and custom ones (`register_source`)."""

    name: str
    classes: tuple[str, ...]
    format: str = ""
    """The recognised format."""
    split_by: str = ""
    """How images are split into train and val."""
    notes: tuple[str, ...] = ()
    """Assumptions that were made, as sentences."""
    has_background: bool = True
    """False if class 0 is not a class of the data set but added by us, for pixels that are not labelled yet."""
    score_background: bool = True
    """False if 0 means "unlabelled" (ADE20K): it is trained as a channel and never scored."""
    partition: Literal["latest", "balanced"] = "latest"
    """How images are divided among disjoint steps: each to the step of its latest class, or balanced greedily."""
    needs_folder: ClassVar[bool] = True
    """Whether it needs a folder (--data)."""
    own_data: ClassVar[bool] = True
    """Whether weights and learning rates are not tuned for it: the preset `default` is then cautious
    (methods/presets.py)."""
    defaults: ClassVar[Mapping[str, Mapping[str, Any]]] = {"eval": {"transform": "full_image"}}
    """Settings that differ from those of VOC, such as {"train": {"epochs": 10}}."""
    internal: ClassVar[bool] = False
    """Whether only sdrseg itself opens it, so that messages do not propose it."""
    limits: ClassVar[Mapping[str, Mapping[str, float]]] = {}
    """The largest weights of a method in the default preset, by its name or "*": {"*": {"kd.weight": 5.0}}."""

    @classmethod
    def open(cls, path: Path | None, config: Config) -> Source:
        """Open the data set; `path` is the folder (--data), or None if it needs none."""
        return cls() if path is None else cls(path)  # type: ignore[call-arg]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Spawned worker processes have not run the file of a custom data set, so unpickling runs it there."""
        kind = type(self)
        if not kind.__module__.startswith(OWN):
            return super().__reduce_ex__(protocol)
        return (
            _from_file,
            (str(sys.modules[kind.__module__].__file__), kind.__module__, kind.__qualname__),
            self.__dict__,
        )

    @abstractmethod
    def ids(self, split: Split) -> tuple[str, ...]:
        """The ids of a split, in the order that index lists refer to (sorted)."""

    @abstractmethod
    def image(self, id: str) -> Array:
        """The image as (H, W, 3) uint8 RGB."""

    @abstractmethod
    def mask(self, id: str) -> Array:
        """The label map as (H, W) uint8: class ids, 0 background, 255 void."""

    def mask_content(self, id: str) -> bytes:
        """The bytes that determine the label map of `id`, the key of the class index.

        By default, the label map itself. The bytes of a file work as well and need no decoding, if `coding` covers
        everything else that determines how they are read.
        """
        mask = self.mask(id)
        return f"{mask.shape} ".encode() + mask.tobytes()

    def image_content(self, id: str) -> bytes:
        """The bytes that determine the image of `id`, the key of shared scores: its pixels or, to decode nothing, the
        bytes of a file with this image only."""
        image = self.image(id)
        return f"{image.shape} ".encode() + image.tobytes()

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        first = next(kind for kind in cls.__mro__ if {"image", "image_content"} & vars(kind).keys())
        if "image_content" not in vars(first):  # that of a later class belongs to other images
            cls.image_content = Source.image_content  # type: ignore[method-assign]

    def pair(self, id: str) -> tuple[Array, Array]:
        """Image and mask of one id, which must have the same size."""
        image, mask = self.image(id), self.mask(id)
        if problem := self.size_problem(id, image.shape[:2], mask.shape):
            raise DataError(f"{problem.file}: {problem.detail}")
        return image, mask

    def size_problem(self, id: str, image: Sequence[int], mask: Sequence[int]) -> Problem | None:
        """The problem of an image whose mask has another size; both are (height, width)."""
        if (image[0], image[1]) == (mask[0], mask[1]):
            return None
        advice = ROTATED if (image[1], image[0]) == (mask[0], mask[1]) else "Make them the same size."
        detail = f"image {image[1]}×{image[0]}, mask {mask[1]}×{mask[0]} ({self.file(id, 'mask')}). {advice}"
        return Problem(self.file(id, "image"), "size mismatch", detail)

    def labelled(self, id: str) -> frozenset[int] | None:
        """The classes that the mask of `id` labels: an unlabelled pixel may be any other class. None: all classes."""
        return None

    @property
    def coding(self) -> str:
        """Everything else that determines the label maps, the same for all ids (a colour table, an ignore value)."""
        return ""

    def file(self, id: str, kind: Literal["image", "mask"]) -> str:
        """How messages name the image or the mask of `id`: its path if it has one."""
        return f"{self.name}:{id}"

    def problems(self) -> list[Problem]:
        """Problems that were found while listing the files, before any was opened."""
        return []


def _from_file(file: str, module: str, name: str) -> Source:
    """A data set from a custom file, without its attributes."""
    run_file(Path(file), SOURCES)
    kind: type[Source] = getattr(sys.modules[module], name)
    return kind.__new__(kind)


class PictureFiles(Source):
    """A data set of picture files: one image and one 8-bit mask file per id."""

    def __init__(self) -> None:
        self._images: dict[str, Path] = {}
        self._masks: dict[str, Path] = {}
        self._ids: dict[Split, tuple[str, ...]] = {}
        self._problems: list[Problem] = []

    def ids(self, split: Split) -> tuple[str, ...]:
        return self._ids[split]

    def image(self, id: str) -> Array:
        return read_image(self._images[id])

    def mask(self, id: str) -> Array:
        label = read_label(self._masks[id])
        if label.ndim != 2 or label.dtype != np.uint8:
            raise DataError(f"{self._masks[id]}: not an 8-bit mask of class ids (grey or palette PNG).")
        return label.astype(np.uint8, copy=False)

    def image_content(self, id: str) -> bytes:
        return self._images[id].read_bytes()

    def mask_content(self, id: str) -> bytes:
        return self._masks[id].read_bytes()

    def file(self, id: str, kind: Literal["image", "mask"]) -> str:
        return str((self._images if kind == "image" else self._masks).get(id, f"{self.name}:{id}"))

    def problems(self) -> list[Problem]:
        return list(self._problems)

    def note_size(self, path: Path, split: Split, published: int) -> None:
        """Add a problem if the size of a split is not that of the published data set."""
        if (found := len(self._ids[split])) != published:
            detail = f"{quantity(found, f'{split} image')}; the published tasks are defined on {published}"
            self._problems.append(Problem(str(path), "not the published set", detail))


def _entries(folder: Path) -> AbstractContextManager[Iterator[os.DirEntry[str]]]:
    try:
        return os.scandir(folder)
    except OSError as error:
        raise DataError(f"{folder}: cannot be read ({error.strerror}). Check its permissions.") from error


def find_files(folder: Path, below: str = "", *, broken_links: bool = False) -> Iterator[str]:
    """All files below a folder as "a/b.png", except hidden ones (os.scandir: pathlib takes seconds on large sets).

    `broken_links`: also links to files that are gone.
    """
    with _entries(folder) as entries:
        for entry in entries:
            if entry.name.startswith("."):
                continue
            if entry.is_dir():
                yield from find_files(Path(entry.path), f"{below}{entry.name}/", broken_links=broken_links)
            elif entry.is_file() or (broken_links and not Path(entry).exists()):
                yield below + entry.name


def subfolders(folder: Path) -> list[Path]:
    """The folders in a folder, sorted."""
    with _entries(folder) as entries:
        return sorted(folder / entry.name for entry in entries if entry.is_dir() and not entry.name.startswith("."))


def find_by_id(folder: Path, suffixes: Iterable[str] | None = None) -> tuple[dict[str, Path], list[Problem]]:
    """All files below `folder` by id (the relative path without suffix), in any format.

    Two files with one id are a problem; the first in name order is kept. A name that is not UTF-8 is a problem, because
    its id could not be written to lists and results. Hidden files are skipped.
    """
    found: dict[str, Path] = {}
    problems = []
    wanted = None if suffixes is None else {s.lower() for s in suffixes}
    for name in sorted(find_files(folder)):
        stem, dot, suffix = name.rpartition(".")
        id, suffix = (stem, dot + suffix) if dot and "/" not in suffix else (name, "")
        if wanted is not None and suffix.lower() not in wanted:
            continue
        path = folder / name
        if (readable := name.encode("utf-8", "backslashreplace").decode()) != name:
            problems.append(Problem(str(folder / readable), "name is not UTF-8", "left out; rename it"))
        elif id in found:
            problems.append(Problem(str(path), "duplicate id", f"{found[id].name} has the same id {id!r} and is used"))
        else:
            found[id] = path
    return found, problems


Progress = Callable[[int, int], None]
"""Called with (done, total) during a long pass over the data."""
