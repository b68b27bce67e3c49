"""Anyone's own data: a folder with images and masks, or with COCO JSON. docs/own-data.md says how to lay it out."""

from __future__ import annotations

from pathlib import Path

from sdrseg.config import Config
from sdrseg.data.folder.coco import Coco, annotation_files
from sdrseg.data.folder.masks import Folder
from sdrseg.data.folder.splits import LAYOUTS
from sdrseg.data.source import Source
from sdrseg.errors import DataError


class AnyFolder(Folder):
    """The data set `folder`: opened as what is found in it."""

    @classmethod
    def open(cls, path: Path | None, config: Config) -> Source:
        assert path is not None
        return open_folder(path)


def open_folder(root: Path) -> Source:
    """The data set in `root`: COCO where there is COCO JSON, otherwise images and masks."""
    root = Path(root)
    if not root.is_dir():
        raise DataError(f"{root}: no such folder. Give the folder that holds your data.\n{LAYOUTS}")
    json_files = annotation_files(root)
    masks = [name for name in ("masks", "train/masks", "val/masks") if (root / name).is_dir()]
    if json_files and masks:
        names = " and ".join(path.relative_to(root).as_posix() for path in json_files.values())
        raise DataError(f"{root}: both {names} and {masks[0]}/ are there. Rename or move away the one not to be used.")
    return Coco(root) if json_files else Folder(root)
