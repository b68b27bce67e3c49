"""The prediction of a model for one image."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from sdrseg.colours import class_colours, colour_table
from sdrseg.datasets.pictures import mask_picture
from sdrseg.datasets.source import Array
from sdrseg.errors import SdrsegError
from sdrseg.files import atomic_writer
from sdrseg.predict.legend import with_legend


class ClassInfo(NamedTuple):
    """A class that a model knows."""

    id: int  # in the data set, and in masks
    name: str
    colour: tuple[int, int, int]
    step: int  # the step that introduced it
    removed: bool = False  # its pixels are background


def class_infos(classes: list[dict[str, Any]]) -> tuple[ClassInfo, ...]:
    """The classes in meta.json or in the metadata of an ONNX file, in the order of the network's channels."""
    colours = class_colours([c["id"] for c in classes])
    return tuple(
        ClassInfo(c["id"], c["name"], colour, c["step"], bool(c.get("removed")))
        for c, colour in zip(classes, colours, strict=True)
    )


def in_masks(classes: Sequence[ClassInfo]) -> list[ClassInfo]:
    """The classes that masks can contain: a removed class has the id of the background."""
    return [c for number, c in enumerate(classes) if c.id > 0 or number == 0]


class Area(NamedTuple):
    """The area of a class in an image."""

    id: int
    pixels: int
    share: float


@dataclass(frozen=True)
class Prediction:
    """The mask of one image, with areas, probabilities and overlays."""

    mask: Array = field(repr=False)  # (H, W) uint8: class ids of the data set
    classes: tuple[ClassInfo, ...]
    pixels: Array = field(repr=False)  # (H, W, 3) uint8: the image
    compute_probabilities: Callable[[], NDArray[np.float32]] = field(repr=False)

    @cached_property
    def probabilities(self) -> NDArray[np.float32]:
        """(C, H, W) float32, in the order of `classes`. Computed on first use, or by `predict(probabilities=True)`."""
        return self.compute_probabilities()

    @property
    def areas(self) -> dict[str, Area]:
        """Pixels and share of each class by name, including classes that are not in the image."""
        counts = np.bincount(self.mask.ravel(), minlength=256)
        size = self.mask.size
        return {c.name: Area(c.id, int(counts[c.id]), float(counts[c.id] / size)) for c in in_masks(self.classes)}

    def overlay(self, strength: float = 0.5, legend: bool = False) -> Image.Image:
        """The image blended with the colours of the classes; background (id 0) stays unchanged.

        `legend`: add the name and colour of each class below the image.
        """
        if not 0 <= strength <= 1:
            raise SdrsegError(f"strength {strength}: must be from 0 (only the image) to 1 (only the colours).")
        weight = np.where(self.mask == 0, 0, round(256 * strength)).astype(np.uint16)[:, :, None]
        mixed = (self.pixels * (256 - weight) + colour_table()[self.mask] * weight) >> 8
        picture = Image.fromarray(mixed.astype(np.uint8))
        if not legend:
            return picture
        present = np.bincount(self.mask.ravel(), minlength=256)[1:].nonzero()[0] + 1
        return with_legend(picture, [(c.name, c.colour) for c in self.classes if c.id in present])

    def save(self, path: str | Path, overwrite: bool = False) -> None:
        """Write the mask as a palette PNG: pixel values are class ids, and colours make them visible."""
        write_picture(Path(path), mask_picture(self.mask), overwrite)


def write_picture(path: Path, picture: Image.Image, overwrite: bool = False) -> None:
    """Write a PNG file atomically."""
    if path.suffix.lower() != ".png":
        raise SdrsegError(
            f"{path}: masks and overlays are PNG files, which are lossless. Use a name that ends in .png."
        )
    refuse_existing(path, overwrite)
    content = io.BytesIO()
    picture.save(content, format="PNG")
    with atomic_writer(path) as out:
        out.write(content.getvalue())


def refuse_existing(path: Path, overwrite: bool) -> None:
    if path.exists() and not overwrite:
        raise SdrsegError(f"{path} exists. Choose another name, or replace it with overwrite=True.")
