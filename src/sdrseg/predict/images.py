"""Finds input images, names their outputs, and reads any image as RGB pixels."""

from __future__ import annotations

import glob
import hashlib
import os
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps

from sdrseg.datasets.pictures import PICTURE_SUFFIXES, open_picture, picture_size, rgb
from sdrseg.datasets.source import Array, find_files
from sdrseg.errors import DataError, SdrsegError, UsageError, quantity

LONGEST = 200  # bytes of a name; longer names are shortened


@dataclass(frozen=True)
class Input:
    """An image file and the name of its outputs: a path without suffix below the output folder."""

    path: Path
    name: str

    def __str__(self) -> str:
        return printable(str(self.path))


def printable(text: str) -> str:
    """A name that may not be UTF-8, with escapes so that it can be printed anywhere."""
    return text.encode("utf-8", "backslashreplace").decode()


def find_inputs(patterns: Sequence[str], leave_out: Path | None = None) -> list[Input]:
    """The images that files, folders and glob patterns name, each once and in this order.

    A folder means all pictures in it and in its subfolders, by suffix, except hidden files and those in `leave_out`
    (the output folder). A link to a file that is gone is one of them, so that it is reported as unreadable. A file that
    is named or matched by a pattern is used with any suffix.
    """
    found: dict[Path, Path] = {}  # absolute path -> path relative to the named folder
    excluded = None if leave_out is None else _absolute(leave_out)
    for pattern in patterns:
        path = Path(pattern)
        if path.is_dir():
            below = [name for name in _list(path) if Path(name).suffix.lower() in PICTURE_SUFFIXES]
            files = {_absolute(path / name): Path(name) for name in sorted(below)}
            files = {file: name for file, name in files.items() if excluded is None or excluded not in file.parents}
            if not files:
                if excluded is not None and below and excluded in (_absolute(path), *_absolute(path).parents):
                    raise UsageError(f"--out {leave_out}: the folder of the images. Choose another one.")
                raise SdrsegError(
                    f"{path}: no image in this folder or its subfolders ({' '.join(sorted(PICTURE_SUFFIXES))})."
                )
        elif os.path.lexists(path):
            files = {_absolute(path): Path(path.name)}
        elif glob.has_magic(pattern):
            matches = sorted(m for m in glob.glob(pattern, recursive=True) if not Path(m).is_dir())  # noqa: PTH207
            files = {_absolute(Path(m)): Path(Path(m).name) for m in matches}
            if not files:
                raise SdrsegError(f"{pattern}: no file matches this pattern. Check its folder.")
        else:
            raise SdrsegError(f"{pattern}: no such file or folder.")
        found |= {file: name for file, name in files.items() if file not in found}
    names = _names(found)
    return [Input(_short(file), names[file]) for file in found]


def _absolute(path: Path) -> Path:
    """An absolute path without "..". Links are not resolved, because their names may be more meaningful."""
    return Path(os.path.abspath(path))  # noqa: PTH100


def _list(folder: Path) -> list[str]:
    try:
        return list(find_files(folder, broken_links=True))
    except OSError as error:
        raise SdrsegError(f"{error.filename or folder}: cannot be listed ({error.strerror}).") from error


def _names(found: dict[Path, Path]) -> dict[Path, str]:
    """A unique name for each image: without suffix; if two are the same, with suffix; then with more and more of its
    parent folders. Upper and lower case count as the same, as on some file systems."""
    detail = dict.fromkeys(found, 0)
    while True:
        names = {file: _name(file, below, detail[file]) for file, below in found.items()}
        owners: dict[str, list[Path]] = {}
        for file, name in names.items():
            owners.setdefault(name.casefold(), []).append(file)
        ambiguous = [file for files in owners.values() if len(files) > 1 for file in files]
        ambiguous = [file for file in ambiguous if detail[file] <= len(file.parts)]  # more: the name has the whole path
        if not ambiguous:
            return names
        for file in ambiguous:
            detail[file] += 1


def _name(file: Path, below: Path, detail: int) -> str:
    parts = below.with_suffix("").parts if detail == 0 else file.parts[1:][-max(len(below.parts), detail) :]
    last = parts[-1]
    if len(os.fsencode(last)) > LONGEST:  # leaves room for a suffix and a temporary name
        last = f"{last[:40]}~{hashlib.sha256(os.fsencode(file)).hexdigest()[:12]}"
    return "/".join([*parts[:-1], last])


def _short(file: Path) -> Path:
    """Relative to the current folder, if the file is below it."""
    current = Path.cwd()
    return file.relative_to(current) if current in file.parents else file


def read_pixels(path: Path) -> tuple[Array, str]:
    """(H, W, 3) uint8 of a picture file, and a note for the user."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow warns about files that it can read; others raise errors
        try:
            with open_picture(path) as picture:
                frames = getattr(picture, "n_frames", 1)
                ImageOps.exif_transpose(picture, in_place=True)
                pixels = rgb(picture)
        except DataError as error:
            if isinstance(error.__cause__, Image.DecompressionBombError):
                raise DataError(
                    f"{path}: {error.__cause__.args[0].split(',')[0].removeprefix('Image ')}. If you trust it, allow "
                    f"more with --max-pixels (in Python: PIL.Image.MAX_IMAGE_PIXELS)."
                ) from error
            raise
    if pixels.size == 0:
        raise DataError(f"{path}: an image without pixels.")
    return pixels, f"{frames} frames; the first is used" if frames > 1 else ""


def size_of(path: Path) -> tuple[int, int]:
    """(height, width) from the header of the file; (1, 1) for an unreadable file, which is reported later."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return picture_size(path)
        except DataError:
            return 1, 1


def several(images: Iterable[object]) -> Iterable[object]:
    """The images, if they are not one path: its letters would be taken for paths."""
    if isinstance(images, str | Path):
        raise UsageError(f"{images}: one path. `predict` takes one image; predict_each takes a list of them.")
    return images


def pixels_of(image: object) -> Array:
    """(H, W, 3) uint8 of an image given as a path, a PIL image, a NumPy array or a torch tensor."""
    if isinstance(image, str | Path):
        return read_pixels(Path(image))[0]
    if isinstance(image, list | tuple):
        raise DataError(f"{quantity(len(image), 'image')} at once: predict_each predicts several.")
    if isinstance(image, Image.Image):
        try:
            return rgb(ImageOps.exif_transpose(image))
        except Exception as error:  # a PIL image is decoded when it is first used
            raise DataError(f"the image cannot be read ({error}).") from error
    if type(image).__module__.startswith("torch") and hasattr(image, "numpy"):
        array = image.detach().cpu().numpy()  # type: ignore[attr-defined]
        array = np.moveaxis(array, 0, -1) if array.ndim == 3 else array
        wanted = "a torch tensor (3, H, W) or (H, W)"
    else:
        array = np.asarray(image)
        wanted = "an array (H, W, 3) or (H, W)"
    if array.ndim == 3 and array.shape[2] == 1:
        array = array[:, :, 0]
    if array.dtype != np.uint8 or not (array.ndim == 2 or array.shape[2:] == (3,)) or array.size == 0:
        kind = f"an image of type {array.dtype} and shape {tuple(array.shape)}"
        raise DataError(f"{kind}: use a path, a PIL image, or {wanted} of uint8 values.")
    return np.repeat(array[:, :, None], 3, axis=2) if array.ndim == 2 else array
