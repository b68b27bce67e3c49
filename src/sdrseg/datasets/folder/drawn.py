"""Label maps from polygons and run lengths, which are painted over each other when a mask is read.

The shapes of an image are kept as one short JSON text in painting order. It is painted on each read and is the key of
the class index.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from sdrseg.datasets.folder.classes import Classes
from sdrseg.datasets.folder.painting import FINE_PIXELS, FINER, paint
from sdrseg.datasets.folder.settings import Settings
from sdrseg.datasets.folder.splits import SPLITS, Splits, check_splits, lists_or_share
from sdrseg.datasets.pictures import read_image
from sdrseg.datasets.source import Array, Problem, Source, Split
from sdrseg.labels import VOID


@dataclass
class Drawing:
    """One image and its shapes."""

    file: Path
    where: str  # the name of its annotations in messages
    size: tuple[int, int]  # height, width
    shapes: list[tuple[tuple[bool, float], int, Any]] = field(default_factory=list)  # order, class id, shape

    def content(self, unlabelled: int) -> bytes:
        in_order = sorted(self.shapes, key=lambda shape: shape[0])
        parts = {"annotations": [[class_id, shape] for _, class_id, shape in in_order], "size": self.size}
        return json.dumps(
            parts | ({"ground": unlabelled} if unlabelled else {}), sort_keys=True, separators=(",", ":")
        ).encode()


class Drawn(Source):
    """A data set of images with shapes."""

    name = "folder"
    root: Path

    def _store(
        self,
        settings: Settings,
        classes: Classes,
        parts: Mapping[Split | None, Mapping[str, Drawing]],
        by: str,
        problems: Iterable[Problem],
        note: str = "",
    ) -> None:
        """Store the drawings of each split; those of None are split here. `by`: a description of the split."""
        self.classes = classes.names
        self.has_background = classes.has_background
        self.score_background = classes.has_background and settings.score_background
        problems = list(problems)
        if (unsplit := parts.get(None)) is not None:
            images = {id: drawing.file for id, drawing in unsplit.items()}
            splits, note = lists_or_share(settings, self.root, images, images)
        else:
            train, val = (tuple(sorted(parts.get(split, ()))) for split in SPLITS)
            files = {id: drawing.file for part in parts.values() for id, drawing in part.items()}
            splits = check_splits(settings, self.root, Splits(train, val, by, problems), parts, files)
        unlabelled = 0 if classes.has_background else VOID
        drawings = {id: drawing for part in parts.values() for id, drawing in part.items()}
        self._files = {id: drawing.file for id, drawing in drawings.items()}
        self._where = {id: drawing.where for id, drawing in drawings.items()}
        self._contents = {id: drawing.content(unlabelled) for id, drawing in drawings.items()}
        self._ids: dict[Split, tuple[str, ...]] = {"train": splits.train, "val": splits.val}
        self.split_by = splits.by
        self._problems = sorted({*problems, *splits.problems})
        self.notes = tuple(text for text in (note, classes.note) if text)

    def ids(self, split: Split) -> tuple[str, ...]:
        return self._ids[split]

    def image(self, id: str) -> Array:
        return read_image(self._files[id])

    def mask(self, id: str) -> Array:
        return paint(self._contents[id])

    def image_content(self, id: str) -> bytes:
        return self._files[id].read_bytes()

    def mask_content(self, id: str) -> bytes:
        return self._contents[id]

    @property
    def coding(self) -> str:
        return f"drawn: {len(self.classes)} classes, polygons {FINER} times finer up to {FINE_PIXELS} pixels"

    def file(self, id: str, kind: Literal["image", "mask"]) -> str:
        return str(self._files[id]) if kind == "image" else self._where[id]

    def problems(self) -> list[Problem]:
        return self._problems
