"""A data set without access to its test images, for runs that hold out training images."""

from __future__ import annotations

from typing import Literal

from sdrseg.datasets.source import Array, Problem, Source, Split
from sdrseg.errors import SdrsegError


class Sealed(Source):
    """The training images of another source. The validation split, which holds the test images, is empty, and its
    images and masks cannot be read."""

    def __init__(self, inner: Source) -> None:
        self.inner = inner
        self.name, self.classes, self.notes = inner.name, inner.classes, inner.notes
        self.score_background, self.partition = inner.score_background, inner.partition
        self._sealed = frozenset(inner.ids("val"))

    def ids(self, split: Split) -> tuple[str, ...]:
        return () if split == "val" else self.inner.ids(split)

    def image(self, id: str) -> Array:
        return self.inner.image(self._open(id))

    def mask(self, id: str) -> Array:
        return self.inner.mask(self._open(id))

    def image_content(self, id: str) -> bytes:
        return self.inner.image_content(self._open(id))

    def mask_content(self, id: str) -> bytes:
        return self.inner.mask_content(self._open(id))

    def pair(self, id: str) -> tuple[Array, Array]:
        return self.inner.pair(self._open(id))

    def labelled(self, id: str) -> frozenset[int] | None:
        return self.inner.labelled(id)

    @property
    def coding(self) -> str:
        return self.inner.coding

    def file(self, id: str, kind: Literal["image", "mask"]) -> str:
        return self.inner.file(id, kind)

    def problems(self) -> list[Problem]:
        return self.inner.problems()

    def _open(self, id: str) -> str:
        if id in self._sealed:
            raise SdrsegError(f"{self.inner.file(id, 'image')} is a test image; this run holds out training images.")
        return id
