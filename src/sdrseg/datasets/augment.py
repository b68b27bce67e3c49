"""Views: which pixels of an image an output shows. Augmentation and evaluation transforms are all views.

Along each axis the source pixels [low, high) are resized to `size` pixels, and output pixel i shows resized pixel
i + offset, or padding where there is none. Choosing a view (`scale_crop`, `rrc`, `crop512`, `full_image`) is separate
from applying it: to one image with torchvision (`show`), or to a batch on a device (`cache.py`). Both give the same
pixels. Masks are resampled to the nearest pixel as in Pillow, images bilinearly with antialiasing.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad
from torchvision.transforms.v2 import functional as F

from sdrseg.labels import VOID

MEAN = (0.485, 0.456, 0.406)  # ImageNet's, of values in 0..1
STD = (0.229, 0.224, 0.225)
FILL = tuple(round(255 * m) for m in MEAN)
"""The colour of padding: the mean, so that it is close to 0 after normalisation."""

ATTEMPTS = 10  # of rrc, as in torchvision
ASPECTS = (3 / 4, 4 / 3)


@dataclass(frozen=True)
class Axis:
    """Rows or columns of a view: source [low, high) resized to `size`; `out` pixels from `offset` on are shown."""

    low: int
    high: int
    size: int
    offset: int
    out: int

    @property
    def shown(self) -> tuple[int, int]:
        """The part [first, last) of the output that shows the image; the rest is padding."""
        return max(0, -self.offset), min(self.out, self.size - self.offset)

    @property
    def nearest(self) -> NDArray[np.int32]:
        """The source pixel for the label of each pixel of that part, as in Pillow's NEAREST: its centres are running
        sums in float64, which decides ties."""
        step = (self.high - self.low) / self.size
        centres = np.full(self.size, step)
        centres[0] = step / 2
        first, last = self.shown
        return self.low + np.add.accumulate(centres)[first + self.offset : last + self.offset].astype(np.int32)


@dataclass(frozen=True)
class View:
    """Rows, columns, and whether the result is flipped horizontally."""

    rows: Axis
    columns: Axis
    flip: bool = False


def scale_crop(size: tuple[int, int], crop: int, scale: tuple[float, float], draw: random.Random) -> View:
    """The paper's augmentation: a random scale, padding up to the crop, a random crop, a random flip."""
    factor = _uniform(draw, *scale)

    def axis(length: int) -> Axis:
        scaled = max(1, round(length * factor))
        margin = scaled - crop
        offset = _integer(draw, min(0, margin), max(0, margin))
        return Axis(0, length, scaled, offset, crop)

    return View(axis(size[0]), axis(size[1]), draw.random() < 0.5)


def rrc(size: tuple[int, int], crop: int, scale: tuple[float, float], draw: random.Random) -> View:
    """As in the code of MiB, SDR and PLOP: torchvision's RandomResizedCrop with areas of 0.5 to 2 times the image.

    An area above 1 never fits, so the crop covers 50 to 100 % of the image; after ten attempts the whole image is
    used, cropped to an aspect ratio between 3:4 and 4:3. The crop is resized to a square.
    """
    height, width = size
    for _ in range(ATTEMPTS):
        area = height * width * _uniform(draw, *scale)
        aspect = math.exp(_uniform(draw, math.log(ASPECTS[0]), math.log(ASPECTS[1])))
        w, h = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < w <= width and 0 < h <= height:
            top, left = _integer(draw, 0, height - h), _integer(draw, 0, width - w)
            break
    else:
        w = min(width, round(height * ASPECTS[1]))
        h = min(height, round(width / ASPECTS[0]))
        top, left = (height - h) // 2, (width - w) // 2
    return View(Axis(top, top + h, crop, 0, crop), Axis(left, left + w, crop, 0, crop), draw.random() < 0.5)


AUGMENTATIONS = {"scale_crop": scale_crop, "rrc": rrc}


def crop512(size: tuple[int, int], crop: int = 512) -> View:
    """The paper's evaluation: resize the shorter side to 512, then take the centre 512×512."""
    short = min(size)

    def axis(length: int) -> Axis:
        scaled = crop if length == short else int(crop * length / short)
        return Axis(0, length, scaled, round((scaled - crop) / 2), crop)

    return View(axis(size[0]), axis(size[1]))


def full_image(size: tuple[int, int], stride: int = 16) -> View:
    """Every pixel as it is, padded at the bottom and right to a multiple of `stride`."""

    def axis(length: int) -> Axis:
        return Axis(0, length, length, 0, math.ceil(length / stride) * stride)

    return View(axis(size[0]), axis(size[1]))


def evaluation_view(transform: str, size: tuple[int, int], multiple: int = 16) -> View:
    """The view on which an image is scored. `multiple`: that of the network, so that full images are padded as in
    prediction; those of networks with more than 16 are padded further by the network."""
    return full_image(size, min(16, multiple)) if transform == "full_image" else crop512(size)


def show(view: View, image: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Apply a view to one image (3, H, W) uint8 and its mask (H, W) uint8. Padding is FILL and void."""
    picture: Tensor = image.permute(1, 2, 0).contiguous().permute(2, 0, 1)  # channels-last, the fastest to resize
    rows, columns = view.rows, view.columns
    if (rows.low, rows.high, columns.low, columns.high) != (0, image.shape[-2], 0, image.shape[-1]):
        picture = F.crop(picture, rows.low, columns.low, rows.high - rows.low, columns.high - columns.low)
    if (rows.size, columns.size) != tuple(picture.shape[-2:]):
        picture = F.resize(picture, [rows.size, columns.size], antialias=True)
    (top, bottom), (left, right) = rows.shown, columns.shown
    picture = F.crop(picture, top + rows.offset, left + columns.offset, bottom - top, right - left)
    row, column = (torch.from_numpy(axis.nearest) for axis in (rows, columns))
    label = mask.index_select(0, row).index_select(1, column)
    border = (left, columns.out - right, top, rows.out - bottom)
    if any(border):
        picture, label = _framed(picture, rows, columns), pad(label, border, value=VOID)
    if view.flip:
        picture, label = picture.flip(-1), label.flip(-1)
    return picture, label


def _framed(picture: Tensor, rows: Axis, columns: Axis) -> Tensor:
    """The shown part of a picture with FILL around it. Unlike F.pad, this keeps the channels-last format of batches."""
    (top, bottom), (left, right) = rows.shown, columns.shown
    row = torch.tensor(FILL, dtype=torch.uint8).repeat(columns.out, 1)
    canvas = row.repeat(rows.out, 1, 1)  # copying whole rows is much faster than single colours
    canvas[top:bottom, left:right] = picture.permute(1, 2, 0)
    return canvas.permute(2, 0, 1)


def padding(view: View) -> Tensor:
    """(out, out) bool: the pixels that show no part of the image."""
    outside = torch.ones(view.rows.out, view.columns.out, dtype=torch.bool)
    (top, bottom), (left, right) = view.rows.shown, view.columns.shown
    if view.flip:
        left, right = view.columns.out - right, view.columns.out - left
    outside[top:bottom, left:right] = False
    return outside


def normalise(images: Tensor) -> Tensor:
    """uint8 images to float32 with ImageNet's mean and standard deviation, keeping their memory format."""
    mean, std = _constants(images.device, images.shape[-1])
    scaled: Tensor = F.to_dtype(images, torch.float32, scale=True)
    return scaled.sub_(mean).div_(std)


@lru_cache(maxsize=64)
def _constants(device: torch.device, width: int) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation (3, 1, width), made once: copying them to a GPU each time would block the host.

    As wide as the images, so that channels-last memory is processed by rows and not by single pixels.
    """
    mean, std = (torch.tensor(v).repeat(width, 1).T[:, None].to(device) for v in (MEAN, STD))
    return mean, std


def _uniform(draw: random.Random, low: float, high: float) -> float:
    return low + (high - low) * draw.random()


def _integer(draw: random.Random, low: int, high: int) -> int:
    """Uniform in low..high. Uses only random(), the one method with the same stream in all Python versions."""
    return low + int(draw.random() * (high - low + 1))
