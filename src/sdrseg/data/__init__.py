"""Data sets: what they hold, and how batches are made of them."""

from __future__ import annotations

from pathlib import Path

from sdrseg.config import Config
from sdrseg.data.source import Source
from sdrseg.errors import DataError, UsageError


def open_source(name: str, path: Path | None, config: Config) -> Source:
    """Open a data set by name; `path` is the folder that holds it (the generated one needs none)."""
    if name == "shapes":
        from sdrseg.data.shapes import Shapes

        if path is not None:
            raise UsageError(f"shapes is generated and takes no --data {path}. Its settings are shapes.size and so on.")
        return Shapes(config.shapes.size, config.shapes.train, config.shapes.val, config.shapes.seed)
    if path is None:
        raise UsageError(f"{name} needs --data PATH, the folder that holds it.")
    if not path.is_dir():
        raise DataError(f"{path}: no such folder.")
    if name == "voc":
        from sdrseg.data.voc import Voc

        return Voc(path)
    if name == "ade20k":
        from sdrseg.data.ade20k import Ade20k

        return Ade20k(path)
    from sdrseg.data.folder import open_folder

    return open_folder(path)
