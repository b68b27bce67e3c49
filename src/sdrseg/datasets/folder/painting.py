"""COCO segmentations, polygons and run lengths: checks, areas, painting."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from sdrseg.datasets.source import Array
from sdrseg.errors import quantity

MAX_SIDE = 65535
"""Longer sides, and coordinates beyond ten times that, are errors in the file."""

FINER = 5
"""Polygons are drawn on a grid finer by this factor and read at the pixel centres (odd: there is a middle cell)."""

FINE_PIXELS = 1_000_000
"""Polygons with a larger bounding box are drawn at pixel accuracy, to save memory."""


class BrokenError(Exception):
    """An entry of a file cannot be used; the message says why."""


def drawing(segmentation: Any, size: tuple[int, int]) -> tuple[float, Any]:
    """The area of a segmentation, and the part of it that is needed for painting."""
    height, width = size
    if isinstance(segmentation, dict):
        if segmentation.get("size") != [height, width]:
            raise BrokenError(f"run lengths of size {segmentation.get('size')!r} in an image of size {[height, width]}")
        counts = segmentation.get("counts")
        runs = run_lengths(counts)
        if sum(runs) != height * width:
            raise BrokenError(f"run lengths of {sum(runs)} pixels in an image of {width}×{height} = {height * width}")
        return sum(runs[1::2]), {"counts": counts}
    if not isinstance(segmentation, list) or not segmentation:
        raise BrokenError("no segmentation (polygons or run lengths)")
    polygons = [_corners(polygon) for polygon in segmentation]
    if all(any(map(np.all, (x <= 0, y <= 0, x >= width, y >= height))) for x, y in polygons):
        raise BrokenError(f"all polygons are outside the image of {width}×{height}")
    return sum(abs(float(x @ np.roll(y, 1) - y @ np.roll(x, 1))) / 2 for x, y in polygons), segmentation


def _corners(polygon: Any) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The coordinates x and y of a polygon."""
    if not isinstance(polygon, list):
        raise BrokenError(f"{polygon!r} instead of a polygon [x, y, x, y, …]")
    if len(polygon) % 2 or len(polygon) < 6:
        raise BrokenError(f"a polygon of {quantity(len(polygon), 'number')}; it needs pairs x, y for at least 3 points")
    try:
        numbers = np.array(polygon, np.float64)
    except (TypeError, ValueError, OverflowError):
        numbers = np.array([np.nan])
    if numbers.ndim != 1 or not (abs(numbers) <= 10 * MAX_SIDE).all():
        raise BrokenError("a polygon with values that cannot be pixel coordinates")
    return numbers[0::2], numbers[1::2]


def run_lengths(counts: Any) -> list[int]:
    """The lengths of alternating runs of 0 and 1, from either of COCO's encodings."""
    if isinstance(counts, list):
        if not all(isinstance(run, int) and run >= 0 for run in counts):
            raise BrokenError("run lengths that are not whole numbers of 0 or more")
        return counts
    if isinstance(counts, str):
        counts = counts.encode("utf-8", "surrogatepass")
    if not isinstance(counts, bytes):
        raise BrokenError(f"counts is {type(counts).__name__}, not a list or a string")
    # Each character minus 48 ("0") has 6 bits: 5 bits of the number, lowest first, and one that is set if more follow.
    # From the fourth run on, the number is the difference to the run two before; the highest of the 5 bits is its sign.
    runs: list[int] = []
    value = shift = 0
    for character in counts:
        bits = character - 48
        if not 0 <= bits < 64:
            raise BrokenError(f"run lengths with the invalid byte {character}")
        value |= (bits & 31) << shift
        shift += 5
        if bits & 32:
            continue
        if bits & 16:
            value -= 1 << shift
        runs.append(value + (runs[-2] if len(runs) > 2 else 0))
        value = shift = 0
    if shift or min(runs, default=0) < 0:
        raise BrokenError("run lengths that are cut off or negative")
    return runs


def paint(content: bytes) -> Array:
    """The label map of a `mask_content`."""
    parts = json.loads(content)
    labels = np.full(parts["size"], parts.get("ground", 0), np.uint8)
    for class_id, drawing in parts["annotations"]:
        if isinstance(drawing, dict):
            labels[_inside_runs(run_lengths(drawing["counts"]), labels.shape)] = class_id
        else:
            for polygon in drawing:
                _fill(labels, np.array(polygon, np.float64).reshape(-1, 2), class_id)
    return labels


def _inside_runs(runs: list[int], shape: tuple[int, ...]) -> NDArray[np.bool_]:
    """Runs are column by column."""
    height, width = shape
    return np.repeat(np.arange(len(runs)) % 2 == 1, runs).reshape(width, height).T


def _fill(labels: Array, points: NDArray[np.float64], class_id: int) -> None:
    """Paint the pixels whose centre is inside the polygon; pixel 0 covers coordinates 0 to 1."""
    picture = labels.shape[::-1]
    left, top = np.clip(np.floor(points.min(axis=0)), 0, picture).astype(int).tolist()
    right, bottom = np.clip(np.ceil(points.max(axis=0)), 0, picture).astype(int).tolist()
    if left >= right or top >= bottom:
        return
    # Pillow truncates coordinates and also paints the outline: on the pixel grid itself, every object would be about a
    # pixel too wide.
    finer = FINER if (right - left) * (bottom - top) <= FINE_PIXELS else 1
    canvas = Image.new("L", ((right - left) * finer, (bottom - top) * finer))
    cells = np.rint((points - (left, top)) * finer - 0.5).astype(int)
    ImageDraw.Draw(canvas).polygon(cells.ravel().tolist(), fill=1)
    inside = np.asarray(canvas)[finer // 2 :: finer, finer // 2 :: finer] == 1
    labels[top:bottom, left:right][inside] = class_id
