"""Test images with ground truth and predictions: which are shown, and how they are embedded in the page.

Images are chosen by their labels only, before any prediction, so the choice favours no method.
"""

from __future__ import annotations

import io
from base64 import b64encode
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from sdrseg.colours import NOT_SCORED, Colour
from sdrseg.datasets import open_source
from sdrseg.datasets.augment import evaluation_view, normalise, padding, show
from sdrseg.datasets.extended import Extended, require_own_data
from sdrseg.datasets.index import ClassIndex, class_index
from sdrseg.datasets.source import Source
from sdrseg.decision import decide
from sdrseg.engine.launch import best_device
from sdrseg.engine.saved import open_step
from sdrseg.errors import DataError, quantity
from sdrseg.labels import VOID
from sdrseg.losses.pixels import to_grid
from sdrseg.reporting.collect import RunRecord
from sdrseg.scenario import SOURCES, parse_spec
from sdrseg.terminal import progress

VISIBLE = 0.01  # share of an image's pixels: a smaller class is hardly visible
RARER = 0.01  # weight factor of a class each time it is shown, so that new ones come first
LARGEST = 512  # pixels of the longer side in the page
SMALL = 160  # pictures up to this size are compressed without loss


@dataclass(frozen=True, eq=False)
class TestImage:
    """An image as it is scored: pixels (3, H, W), channels by the last step's table (H, W), and where it is padded."""

    id: str
    pixels: Tensor
    labels: Tensor
    padding: Tensor


@dataclass(frozen=True, eq=False)
class ModelOutput:
    """The output of a model for one image: predicted channels (H, W), and features with their labels on the grid."""

    step: int
    image: TestImage
    predicted: NDArray[np.uint8]
    features: Tensor  # (1, C, h, w)
    labels: Tensor  # (1, h, w)


@dataclass(frozen=True)
class Tile:
    """A picture in the page: a data URI and a text alternative."""

    uri: str
    alt: str


@dataclass
class Row:
    """One test image: the photo, its ground truth, and the predictions of each run by step."""

    id: str
    photo: Tile
    truth: Tile
    width: int
    height: int
    predictions: list[list[Tile]] = field(default_factory=list)


@dataclass(frozen=True)
class Choice:
    """The ids that are shown, and the classes (channels) that none of them shows."""

    ids: tuple[str, ...]
    missing: tuple[int, ...]


def takes_folder(run: RunRecord) -> bool:
    """Whether --data can name the data of a run: they are not generated, and the run folder does not list them."""
    name = parse_spec(run.identity["spec"]).source
    return name != Extended.name and name in SOURCES and SOURCES[name].needs_folder


@dataclass(frozen=True, eq=False)
class TestData:
    """The data set of some runs, and those of its test images that exist: all, except in extended runs."""

    source: Source
    index: ClassIndex
    ids: tuple[str, ...]
    notes: tuple[str, ...] = ()


def open_data(runs: Sequence[RunRecord], data: Path | None) -> TestData:
    """The data set of the runs; it must be the one that was scored. Data sets of an extended run may be gone."""
    spec, last = parse_spec(runs[0].identity["spec"]), runs[0].scenario["steps"][-1]
    source: Source
    if spec.source == Extended.name:  # its folder lists its data sets
        require_own_data(runs[0].path, data)
        source = Extended.open_available(runs[0].path)
    else:
        source = open_source(spec.source, data, runs[0].config)
    with progress(f"reading {spec.source}") as report:
        index = class_index(source, last.get("test_split", "val"), report)
    digests, found, ids = runs[0].scenario["mask_digests"], index.digest_by_id, last["test_ids"]
    left = tuple(id for id in ids if found.get(id) == digests[id])
    if len(left) == len(ids):
        return TestData(source, index, left)
    if left and isinstance(source, Extended):
        lost = f"{len(ids) - len(left):,} of {quantity(len(ids), 'test image')} cannot be shown: gone or changed."
        return TestData(source, index, left, (lost, *source.notes))
    wrong = next(id for id in ids if found.get(id) != digests[id])
    what = "is missing" if wrong not in found else "has changed since the runs were scored"
    where = data if data is not None else spec.source
    hint = " Name the data set of these runs with --data." if takes_folder(runs[0]) else ""
    raise DataError(f"{where}: the mask of {wrong} {what}.{hint}")


def choose(run: RunRecord, data: TestData, count: int) -> Choice:
    """Choose images greedily so that every class is shown once, then every class again, and so on; ties: first id.

    An image shows a class that covers at least 1 % of its scored pixels (less for a class that is always smaller). The
    counts of the whole mask are an upper bound of those in its view, so only promising masks are opened.
    """
    ids, channels = data.ids, np.array(run.scenario["steps"][-1]["channels"])[1:]
    row = {id: number for number, id in enumerate(data.index.ids)}
    pixels = data.index.pixels[[row[id] for id in ids]]
    share = pixels[:, channels] / np.maximum(pixels.sum(1, keepdims=True), 1)
    removed = run.scores[-1].removed
    share[:, [c - 1 for c in removed]] = 0
    enough = np.minimum(VISIBLE, share.max(axis=0) / 2)
    shows, exact = share > 0, np.zeros(len(ids), dtype=bool)
    shown_count, chosen = np.zeros(len(channels)), dict[str, None]()
    while len(chosen) < min(count, len(ids)):
        gain = np.array(
            [-1 if id in chosen else shown @ RARER**shown_count for id, shown in zip(ids, shows, strict=True)]
        )
        best = int(np.argmax(gain))
        if exact[best]:
            chosen[ids[best]] = None
            shown_count += shows[best]
            continue
        mask = _view(run, data.source.mask(ids[best]))
        counts = np.bincount(mask.ravel(), minlength=256)[channels]
        shows[best] &= counts >= np.maximum(enough * mask.size, 1)
        exact[best] = True
    missing = tuple(int(c) + 1 for c in np.flatnonzero(shown_count == 0) if int(c) + 1 not in removed)
    return Choice(tuple(chosen), missing)


def _view(run: RunRecord, mask: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """The part of a mask that is scored."""
    view = evaluation_view(run.config.eval.transform, (mask.shape[0], mask.shape[1]))
    blank = torch.zeros(3, *mask.shape, dtype=torch.uint8)
    shown: NDArray[np.uint8] = show(view, blank, torch.from_numpy(np.array(mask)))[1].numpy()
    return shown


def _merged(run: RunRecord) -> list[int]:
    """Every channel, those of removed classes replaced by background."""
    return [0 if c in run.scores[-1].removed else c for c in range(256)]


def load_images(run: RunRecord, source: Source, ids: Sequence[str]) -> list[TestImage]:
    """The images as in the evaluation of the run."""
    table = torch.tensor(_merged(run), dtype=torch.uint8)[torch.tensor(run.scenario["steps"][-1]["test_table"])]
    images = []
    for id in ids:
        image, mask = (torch.from_numpy(np.array(array)) for array in source.pair(id))
        size = (mask.shape[0], mask.shape[1])
        view = evaluation_view(run.config.eval.transform, size, run.config.net.output_stride)
        pixels, labels = show(view, image.permute(2, 0, 1), mask)
        outside = padding(view)
        labels = torch.where(outside, VOID, table[labels.long()])
        images.append(TestImage(id, pixels, labels, outside))
    return images


@torch.inference_mode()
def apply_models(
    run: RunRecord, images: Sequence[TestImage], steps: Sequence[int] | None = None
) -> Iterator[ModelOutput]:
    """Apply the saved models of these steps, or of every finished one, to the images."""
    device = best_device()
    merged = torch.tensor(_merged(run), dtype=torch.uint8)
    for number in range(len(run.scores)) if steps is None else steps:
        network, decision = open_step(run.folder.step(number), run.config.net)
        network.place_on(device).eval()
        for image in images:
            out = network(normalise(image.pixels[None].to(device)))
            grid = (out.features.shape[-2], out.features.shape[-1])
            labels = to_grid(image.labels[None], grid, network.stride, VOID)
            predicted = merged[decide(out.logits, decision)[0].cpu()].numpy()
            yield ModelOutput(number, image, predicted, out.features.float().cpu(), labels)


def start_row(image: TestImage, names: Sequence[str], colours: Sequence[Colour]) -> Row:
    """The photo and the ground truth of an image, without padding."""
    shown = inside(image)
    pixels = np.ascontiguousarray(image.pixels.permute(1, 2, 0).numpy()[shown])
    photo = Image.fromarray(pixels)
    photo.thumbnail((LARGEST, LARGEST))
    truth = image.labels.numpy()[shown]
    alt = f"Truth for {image.id}: {_shares(truth, names)}"
    return Row(
        image.id,
        Tile(_photo_uri(photo), f"Test image {image.id}"),
        Tile(mask_uri(truth, colours), alt),
        photo.width,
        photo.height,
    )


def prediction_tile(output: ModelOutput, label: str, names: Sequence[str], colours: Sequence[Colour]) -> Tile:
    predicted = output.predicted[inside(output.image)]
    alt = f"Prediction of {label} after step {output.step} for {output.image.id}: {_shares(predicted, names)}"
    return Tile(mask_uri(predicted, colours), alt)


def mask_uri(channels: NDArray[np.uint8], colours: Sequence[Colour]) -> str:
    """A palette PNG: value = channel, and one more for unscored pixels. The page rewrites the palette."""
    classes = len(colours)
    values = np.where(channels == VOID, classes, channels).astype(np.uint8)
    picture = Image.fromarray(values)
    if max(picture.size) > LARGEST:
        ratio = LARGEST / max(picture.size)
        size = (max(1, round(picture.width * ratio)), max(1, round(picture.height * ratio)))
        picture = picture.resize(size, Image.Resampling.NEAREST)
    picture.putpalette([part for colour in (*colours, NOT_SCORED) for part in colour])
    return _uri(picture, "png", optimize=True, transparency=bytes([255] * (classes + 1)))


def _photo_uri(photo: Image.Image) -> str:
    if max(photo.size) <= SMALL:
        return _uri(photo, "png", optimize=True)
    return _uri(photo, "jpeg", quality=82, optimize=True)


def _uri(picture: Image.Image, kind: str, **options: Any) -> str:
    out = io.BytesIO()
    picture.save(out, kind, **options)
    return f"data:image/{kind};base64,{b64encode(out.getvalue()).decode()}"


def inside(image: TestImage) -> tuple[slice, slice]:
    """Rows and columns of the image inside the padding."""
    shown = ~image.padding.numpy()
    rows, columns = np.flatnonzero(shown.any(axis=1)), np.flatnonzero(shown.any(axis=0))
    return slice(int(rows[0]), int(rows[-1]) + 1), slice(int(columns[0]), int(columns[-1]) + 1)


def _shares(channels: NDArray[np.uint8], names: Sequence[str]) -> str:
    """The classes of a label map in words, largest first."""
    counts = np.bincount(channels.ravel(), minlength=256)[: len(names)]
    order = [int(c) for c in np.argsort(-counts, kind="stable") if counts[c] > 0]
    scored = max(1, int(counts.sum()))
    return ", ".join(f"{names[c]} {100 * counts[c] / scored:.0f} %" for c in order) or "no scored pixels"
