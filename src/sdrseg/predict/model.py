"""A trained model that segments images, from a run, one of its steps, or an exported ONNX file."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sdrseg.datasets.cache import free_memory
from sdrseg.datasets.source import Array, Progress
from sdrseg.decision import Decision, decide
from sdrseg.decision import probabilities as probabilities_of
from sdrseg.errors import SdrsegError, quantity
from sdrseg.network import Network
from sdrseg.predict.images import pixels_of, several
from sdrseg.predict.prediction import ClassInfo, Prediction
from sdrseg.tiles import (
    Forward,
    check_tiles,
    fitting_tiles,
    framed,
    logit_strips,
    tile_count,
    whole_canvas,
)

if TYPE_CHECKING:
    from sdrseg.extend.newdata import Protocol, Unlabelled
    from sdrseg.extend.run import Extension

CPU = torch.device("cpu")
Tick = Callable[[int], None]
AHEAD = 2**26
"""How many bytes of images `predict_each` reads ahead, unless a single image is larger."""


class Model:
    """Classes, and a network that segments images of any size. Use `load` to create one."""

    def __init__(
        self,
        classes: tuple[ClassInfo, ...],
        forward: Forward,
        *,
        multiple: int,
        crop: int,
        batch_size: int,
        facts: dict[str, Any],
        device: torch.device = CPU,
        decision: Decision = "softmax",
        network: Network | None = None,
    ):
        self.classes = classes
        self.crop = crop
        """The side of the crops it was trained on."""
        self.tile, fitting = fitting_tiles(free_memory(device), len(classes), crop)
        """The default side of a tile, chosen by the free memory."""
        self.batch_size = min(batch_size, fitting)
        self.facts = facts
        """Where the model comes from: specification, step, SHA-256 of its weights and so on. `note` is None, or says
        that a later step of the run is not finished."""
        self.decision: Decision = decision
        """How logits become a class and probabilities (sdrseg.decision)."""
        self.network = network
        """The PyTorch network; None for an ONNX file."""
        self.multiple = multiple
        self._forward = forward
        self._ids = torch.tensor([c.id for c in classes], dtype=torch.uint8)

    def __repr__(self) -> str:
        classes = quantity(len(self.classes), "class")
        return f"<Model of {self.facts.get('spec')}, step {self.facts.get('step')}: {classes}>"

    @torch.inference_mode()
    def predict(
        self,
        image: object,
        *,
        tile: int | None = None,
        overlap: int | None = None,
        batch_size: int | None = None,
        probabilities: bool = False,
        report: Progress = lambda done, total: None,
    ) -> Prediction:
        """Segment an image: a path, a PIL image, a NumPy array (H, W, 3) or (H, W), a torch tensor (3, H, W), of uint8.

        An image larger than `tile` pixels is split into overlapping tiles, which are processed in batches of
        `batch_size`. `overlap` is a quarter of a tile by default. `report` is called with the numbers of finished tiles
        and of all tiles.
        """
        options, pixels = self._options(tile, overlap, batch_size), pixels_of(image)
        total = self.tiles(pixels.shape[0], pixels.shape[1], tile=tile, overlap=overlap)
        return self._predict(pixels, options, self._forward, probabilities, _count(report, total))

    def predict_each(
        self,
        images: Iterable[object],
        *,
        tile: int | None = None,
        overlap: int | None = None,
        batch_size: int | None = None,
        probabilities: bool = False,
        tick: Tick = lambda tiles: None,
    ) -> Iterator[Prediction]:
        """Segment any number of images and yield their predictions: a list, a generator that reads them, or a batch
        as an array (B, H, W, 3) or a tensor (B, 3, H, W). `tick` is called with the number of finished tiles.

        A few images are read ahead, so that they form batches.
        """
        options: dict[str, Any] = {"tile": tile, "overlap": overlap, "batch_size": batch_size, "tick": tick}
        most, buffered = self._options(tile, overlap, batch_size)["batch_size"], 0
        waiting: list[Array] = []
        for image in several(images):
            pixels = pixels_of(image)
            if waiting and (len(waiting) == most or buffered + pixels.size > AHEAD):
                yield from self.predict_many(waiting, **options, probabilities=probabilities)
                waiting, buffered = [], 0
            waiting.append(pixels)
            buffered += pixels.size
        yield from self.predict_many(waiting, **options, probabilities=probabilities)

    def extend(
        self,
        data: str | Path,
        out: str | Path,
        *,
        classes: str | Sequence[str] | None = None,
        method: str | None = None,
        unlabelled: Unlabelled = "background",
        negatives: bool = False,
        replay: str | Path | None = None,
        protocol: Protocol | None = None,
        images: str | Path | None = None,
        old_data: str | Path | None = None,
        max_forgetting: float | None = None,
        min_new_iou: float | None = None,
        config_file: str | Path | None = None,
        settings: Mapping[str, Any] | None = None,
        display: Any = None,
    ) -> Extension:
        """Add classes from a folder of images in which they are labelled, and write a new run to `out`.

        The keywords are the options of `sdrseg extend` (docs/extend.md): `classes` is one name or several; `settings`
        are values such as {"train.epochs": 20}. The result has the notes, the forecast, what was kept and lost
        (`result`), and `met`: whether max_forgetting and min_new_iou are met. `sdrseg.load(out)` is the new model.
        """
        from sdrseg.extend.run import extend

        if self.network is None:
            raise SdrsegError("An ONNX file cannot be extended. Load the run that it was exported from.")
        return extend(
            self.facts["path"],
            data,
            out,
            classes=classes,
            method=method,
            unlabelled=unlabelled,
            negatives=negatives,
            replay=replay,
            protocol=protocol,
            images=images,
            old_data=old_data,
            max_forgetting=max_forgetting,
            min_new_iou=min_new_iou,
            config_file=config_file,
            settings=settings,
            display=display,
        )

    def tiles(self, height: int, width: int, *, tile: int | None = None, overlap: int | None = None) -> int:
        """The number of tiles of an image of this size."""
        options = self._options(tile, overlap, None)
        return tile_count(height, width, options["tile"], options["overlap"], self.multiple)

    @torch.inference_mode()
    def predict_many(
        self,
        images: Iterable[object],
        *,
        tile: int | None = None,
        overlap: int | None = None,
        batch_size: int | None = None,
        probabilities: bool = False,
        tick: Tick = lambda tiles: None,
    ) -> list[Prediction]:
        """Like `predict_each`, but returns a list: images of the same size that fit into one tile form batches."""
        options = self._options(tile, overlap, batch_size)
        pixels = [pixels_of(image) for image in several(images)]
        canvases = [whole_canvas(p.shape[0], p.shape[1], options["tile"], self.multiple) for p in pixels]
        logits_by_row: dict[int, Tensor] = {}
        for canvas in dict.fromkeys(c for c in canvases if c is not None):
            rows = [row for row, own in enumerate(canvases) if own == canvas]
            for first in range(0, len(rows), options["batch_size"]):
                batch = rows[first : first + options["batch_size"]]
                tiles = torch.stack([framed(_tensor(pixels[row]), *canvas) for row in batch])
                logits_by_row |= dict(zip(batch, self._checked(tiles, options), strict=True))
        results = []
        for row, own in enumerate(pixels):
            logits = logits_by_row.pop(row, None)
            forward = self._forward if logits is None else partial(_known_logits, logits)
            results.append(self._predict(own, options, forward, probabilities, tick))
        return results

    def _options(self, tile: int | None, overlap: int | None, batch_size: int | None) -> dict[str, int]:
        tile = self.tile if tile is None else tile
        overlap = tile // 4 if overlap is None else overlap
        check_tiles(tile, overlap)
        return {"tile": tile, "overlap": overlap, "batch_size": max(1, batch_size or self.batch_size)}

    def _predict(
        self, pixels: Array, options: dict[str, int], forward: Forward, probabilities: bool, tick: Tick
    ) -> Prediction:
        tensor = _tensor(pixels)
        mask = np.empty(pixels.shape[:2], np.uint8)
        kept = []
        for top, logits in self._strips(tensor, options, forward, tick):
            bottom = top + logits.shape[1]
            mask[top:bottom] = self._ids.to(logits.device)[decide(logits, self.decision, 0)].cpu().numpy()
            if probabilities:
                kept.append(probabilities_of(logits, self.decision, 0).cpu().numpy())
        if not probabilities:
            return Prediction(mask, self.classes, pixels, partial(self._probabilities, tensor, options))
        whole = np.concatenate(kept, axis=1)
        return Prediction(mask, self.classes, pixels, lambda: whole)

    @torch.inference_mode()
    def _probabilities(self, tensor: Tensor, options: dict[str, int]) -> NDArray[np.float32]:
        strips = self._strips(tensor, options, self._forward)
        each = [probabilities_of(logits, self.decision, 0).cpu().numpy() for _, logits in strips]
        return np.concatenate(each, axis=1)

    def _strips(
        self, tensor: Tensor, options: dict[str, int], forward: Forward, tick: Tick = lambda tiles: None
    ) -> Iterator[tuple[int, Tensor]]:
        try:
            yield from logit_strips(tensor, forward, multiple=self.multiple, **options, tick=tick)
        except torch.OutOfMemoryError as error:
            raise _too_large(options) from error

    def _checked(self, tiles: Tensor, options: dict[str, int]) -> Tensor:
        try:
            return self._forward(tiles)
        except torch.OutOfMemoryError as error:
            raise _too_large(options) from error


def _tensor(pixels: Array) -> Tensor:
    return torch.from_numpy(np.moveaxis(pixels, -1, 0).copy())


def _count(report: Progress, total: int) -> Tick:
    """A `tick` that reports the progress over all tiles."""
    done = itertools.count()

    def tick(tiles: int) -> None:
        for _ in range(tiles):
            report(next(done) + 1, total)

    return tick


def _known_logits(logits: Tensor, tiles: Tensor) -> Tensor:
    """The logits of a tile that were computed before."""
    return logits[None]


def _too_large(options: dict[str, int]) -> SdrsegError:
    current = f"now {options['tile']} and {options['batch_size']}"
    return SdrsegError(f"out of memory. Use smaller tiles or a smaller batch size ({current}).")
