"""`sdrseg predict`: segment many images, skip those that cannot be read, and list them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from PIL import Image

from sdrseg import __version__
from sdrseg.datasets.source import Array, Progress
from sdrseg.errors import DataError, UsageError, quantity
from sdrseg.predict.images import Input, find_inputs, printable, read_pixels, size_of
from sdrseg.predict.loading import load
from sdrseg.predict.model import Model
from sdrseg.predict.prediction import Prediction, in_masks
from sdrseg.predict.write import Outputs
from sdrseg.terminal import console, print_json, print_table, progress
from sdrseg.tiles import check_tiles


def predict_images(
    path: Path,
    patterns: Sequence[str],
    out: Path,
    *,
    step: int | None = None,
    tile: int | None = None,
    overlap: int | None = None,
    batch_size: int | None = None,
    overlays: bool = False,
    probabilities: bool = False,
    device: str | None = None,
    max_pixels: int | None = None,
    overwrite: bool = False,
    json: bool = False,
) -> bool:
    """Segment all images, write the results to `out` and print a summary; returns whether every image could be read."""
    for option, value in (("--batch-size", batch_size), ("--max-pixels", max_pixels)):
        if value is not None and value < 1:
            raise UsageError(f"{option} {value}: must be at least 1.")
    if max_pixels is not None:
        Image.MAX_IMAGE_PIXELS = -(-max_pixels // 2)  # Pillow warns from here on and refuses twice as many
    inputs = find_inputs(patterns, leave_out=out)
    model = load(path, step, device)
    if note := model.facts.get("note"):
        console(stderr=True).print(f"note: {note}", soft_wrap=True)
    tile = model.tile if tile is None else tile
    check_tiles(tile, tile // 4 if overlap is None else overlap)
    outputs = Outputs(out, overlays, probabilities)
    outputs.check(inputs, overwrite)
    options: dict[str, Any] = {
        "tile": tile,
        "overlap": overlap,
        "batch_size": batch_size,
        "probabilities": probabilities,
    }
    done: list[dict[str, Any]] = []
    failed: list[dict[str, str]] = []
    with progress("predicting") as report:
        count = _Tiles(model, inputs, tile, overlap, report)
        read: deque[Picture] = deque()
        pixels = _read(inputs, read, failed, count)
        predictions = model.predict_each(pixels, **options, tick=count.add)
        done.extend(_write(read.popleft(), prediction, outputs) for prediction in predictions)
    summary = _summary(model, path, out, done, failed)
    if done:
        outputs.write_areas(summary)
    if json:
        print_json(summary)
    elif done:
        _print(model, out, done)
    _print_problems(done, failed)
    return not failed


class Picture(NamedTuple):
    """An image that was read."""

    image: Input
    pixels: Array
    note: str


class _Tiles:
    """Counts tiles for the progress bar. The total is known from the headers of the files."""

    def __init__(self, model: Model, inputs: Sequence[Input], tile: int, overlap: int | None, report: Progress):
        self.of = {image.path: model.tiles(*size_of(image.path), tile=tile, overlap=overlap) for image in inputs}
        self._total, self._done, self._report = sum(self.of.values()), 0, report

    def add(self, tiles: int) -> None:
        self._done += tiles
        self._report(self._done, self._total)


def _read(
    inputs: Sequence[Input], read: deque[Picture], failed: list[dict[str, str]], count: _Tiles
) -> Iterator[Array]:
    """The pixels of the readable images, which are added to `read`; the others are added to `failed`."""
    for image in inputs:
        try:
            read.append(Picture(image, *read_pixels(image.path)))
        except DataError as error:
            failed.append({"image": str(image), "error": printable(str(error))})
            count.add(count.of[image.path])
            continue
        yield read[-1].pixels


def _write(picture: Picture, prediction: Prediction, outputs: Outputs) -> dict[str, Any]:
    """Write the prediction of an image; returns its entry in the summary."""
    image, pixels, note = picture
    outputs.write(image, prediction)
    files = {kind: printable(str(file)) for kind, file in outputs.files(image).items()}
    facts = {"image": str(image), "height": pixels.shape[0], "width": pixels.shape[1], "files": files}
    facts |= {"note": note} if note else {}
    return facts | {"areas": {name: area._asdict() for name, area in prediction.areas.items()}}


def _summary(
    model: Model, path: Path, out: Path, done: list[dict[str, Any]], failed: list[dict[str, str]]
) -> dict[str, Any]:
    origin = {key: model.facts.get(key) for key in ("spec", "step", "method", "model_sha256")}
    return {
        "sdrseg": __version__,
        "model": {"path": printable(str(path)), **origin},
        "out": printable(str(out)),
        "classes": [c._asdict() for c in in_masks(model.classes)],
        "images": done,
        "failed": failed,
    }


def _print(model: Model, out: Path, done: list[dict[str, Any]]) -> None:
    """Print the area of each class over all images, and the output folder."""
    all_pixels = sum(entry["height"] * entry["width"] for entry in done)
    rows = []
    for c in in_masks(model.classes):
        pixels = [entry["areas"][c.name]["pixels"] for entry in done]
        share = 100 * sum(pixels) / max(1, all_pixels)
        rows.append([c.id, c.name, sum(n > 0 for n in pixels), sum(pixels), f"{share:.2f} %"])
    step = f"step {model.facts.get('step')} of {model.facts.get('spec')}"
    print_table(f"{quantity(len(done), 'image')}, {step}", ["id", "class", "images", "pixels", "share"], rows)
    console().print(f"output folder: {printable(str(out))}")


def _print_problems(done: list[dict[str, Any]], failed: list[dict[str, str]]) -> None:
    """Print notes and failures to standard error."""
    stderr = console(stderr=True)
    for entry in done:
        if "note" in entry:
            stderr.print(f"{entry['image']}: {entry['note']}", soft_wrap=True)
    if failed:
        images = quantity(len(done) + len(failed), "image")
        stderr.print(f"{len(failed)} of {images} could not be read:", soft_wrap=True)
        for entry in failed:
            stderr.print(f"  {entry['error']}", soft_wrap=True)
