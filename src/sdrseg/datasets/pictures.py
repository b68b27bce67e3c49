"""Reads picture files: images as RGB pixels, masks as stored. Errors name the file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import AvifImagePlugin, Image, ImageOps

from sdrseg.colours import colour_table
from sdrseg.datasets.heif import allow_heif
from sdrseg.errors import DataError, first_line
from sdrseg.labels import VOID

AvifImagePlugin.DEFAULT_MAX_THREADS = 1
"""Faster for pictures of this size, because other threads decode other pictures."""

ORIENTATION = 0x0112
"""The EXIF tag for the rotation of a picture; for values from 5, width and height are swapped."""

PICTURE_SUFFIXES = frozenset(
    ".avif .bmp .gif .heic .heif .jpeg .jpg .jp2 .pgm .png .ppm .tif .tiff .webp".split()  # common formats
)


def read_image(path: Path) -> NDArray[np.uint8]:
    """Read any picture as (H, W, 3) uint8 RGB, rotated by its EXIF orientation; errors name the file."""
    with open_picture(path) as picture:
        ImageOps.exif_transpose(picture, in_place=True)
        return rgb(picture)


def rgb(picture: Image.Image) -> NDArray[np.uint8]:
    """The pixels of a picture of any mode as (H, W, 3) uint8.

    16-bit grey becomes 8-bit; alpha is ignored.
    """
    if picture.mode == "F" and 0 < np.asarray(picture).max(initial=0) <= 1:  # would all be black
        raise ValueError("floating-point pixels from 0 to 1, expected 0 to 255; save it with 8 or 16 bits")
    grey = np.asarray(picture) if picture.mode.startswith("I") else None
    if grey is not None and (picture.mode.startswith("I;16") or grey.max(initial=0) > 255):
        grey = (grey.clip(0, 65535).astype(np.uint16) >> 8).astype(np.uint8)
        return np.repeat(grey[:, :, None], 3, axis=2)
    return np.asarray(picture if picture.mode == "RGB" else picture.convert("RGB"))


def picture_size(path: Path) -> tuple[int, int]:
    """(height, width) of a picture as `read_image` returns it; reads only the header."""
    with open_picture(path, decode=False) as picture:
        width, height = picture.size
        return (width, height) if picture.getexif().get(ORIENTATION, 1) in (5, 6, 7, 8) else (height, width)


def read_label(path: Path) -> NDArray[np.uint8 | np.uint16 | np.int32]:
    """Read a mask file as stored: (H, W) values for grey, palette and 16-bit files, (H, W, 3) for colour files."""
    with open_picture(path) as picture:
        if picture.mode in ("L", "P") or picture.mode.startswith("I"):
            return np.asarray(picture)
        if picture.mode == "1":
            return np.asarray(picture.convert("L")) // VOID
        if picture.mode in ("RGB", "RGBA"):
            return np.asarray(picture.convert("RGB"))
        raise DataError(f"{path}: a mask with colour mode {picture.mode}; save it as an 8-bit PNG of class ids.")


@contextmanager
def open_picture(path: Path, decode: bool = True) -> Iterator[Image.Image]:
    """Open and decode a picture; any error of Pillow, also inside the block, becomes an error that names the file."""
    try:
        allow_heif(path)
        with Image.open(path) as picture:
            if decode:
                picture.load()
            yield picture
    except DataError:
        raise
    except FileNotFoundError as error:
        raise DataError(f"{path}: no such file.") from error
    except PermissionError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}). Change its permissions.") from error
    except IsADirectoryError as error:
        raise DataError(f"{path}: a folder, not a picture.") from error
    except Exception as error:  # Pillow raises many kinds of errors on damaged files, also for EXIF data
        why = first_line(error).removesuffix(f" {str(path)!r}")  # "cannot identify image file 'x.png'"
        raise DataError(f"{path}: cannot be read as a picture ({why}). Replace or remove it.") from error


def mask_picture(mask: NDArray[np.uint8]) -> Image.Image:
    """A mask of class ids as a picture with a palette, which makes the classes visible."""
    picture = Image.fromarray(mask)
    picture.putpalette(colour_table().tobytes())
    return picture
