"""Labelled old images that an extension trains on together with the new ones."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from sdrseg.config import Config
from sdrseg.datasets import open_source
from sdrseg.datasets.extended import Part
from sdrseg.errors import DataError
from sdrseg.extend.newdata import ALL_SPLITS, read_index
from sdrseg.extend.parent import Parent


def read_replay(parent: Parent, folder: Path, whole: Sequence[str]) -> tuple[Part, tuple[str, ...]]:
    """Labelled old images to train on together with the new ones: all of them, from every split."""
    source = open_source("folder", folder, Config())
    known = [name for name in source.classes[1:] if name in parent.classes]
    if not known:
        raise DataError(
            f"--replay {folder}: none of its classes ({', '.join(source.classes[1:])}) is a class of the model "
            f"({', '.join(parent.classes[1:])}). Name a folder with labelled images of old classes."
        )
    indexes = {split: read_index(source, split) for split in ALL_SPLITS}
    part = Part(
        step=parent.step + 1,
        source="folder",
        data=str(folder.resolve()),
        shapes={},
        prefix=f"replay{parent.step + 1}/",
        names=source.classes,
        classes=tuple(whole.index(name) if name in whole and n > 0 else 0 for n, name in enumerate(source.classes)),
        train=ALL_SPLITS,
    )
    ids = tuple(sorted(part.prefix + id for index in indexes.values() for id in index.ids))
    return part, ids
