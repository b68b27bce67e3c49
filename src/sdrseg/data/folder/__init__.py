"""Anyone's own data, in the formats that people have. docs/own-data.md shows them."""

from __future__ import annotations

from pathlib import Path

from sdrseg.config import Config
from sdrseg.data.folder.coco import Coco, annotation_files
from sdrseg.data.folder.labelme import LabelMe, is_labelme
from sdrseg.data.folder.masks import Folder
from sdrseg.data.folder.pairing import MASKS, named
from sdrseg.data.folder.panoptic import Panoptic, panoptic_files
from sdrseg.data.folder.settings import read_format
from sdrseg.data.folder.splits import LAYOUTS, split_folders
from sdrseg.data.folder.yolo import Yolo, yaml_file
from sdrseg.data.source import Source
from sdrseg.errors import DataError


class AnyFolder(Folder):
    """The data set `folder`: opened as what is found in it."""

    @classmethod
    def open(cls, path: Path | None, config: Config) -> Source:
        assert path is not None
        return open_folder(path)


READERS: dict[str, type[Source]] = {
    "coco": Coco,
    "panoptic": Panoptic,
    "yolo": Yolo,
    "labelme": LabelMe,
    "masks": Folder,
}


def open_folder(root: Path) -> Source:
    """The data set in `root`, read as what is found there, or as `format` in dataset.toml says."""
    root = Path(root)
    if not root.is_dir():
        raise DataError(f"{root}: no such folder. Give the folder that holds your data.\n{LAYOUTS}")
    if said := read_format(root):
        return _open(said, root)
    found = _recognise(root)
    if len(found) > 1:
        names = " and ".join(f'{what} (format = "{name}")' for name, what in found.items())
        raise DataError(f"{root}: both {names} are there. Say in dataset.toml which to use, or move the other away.")
    return _open(next(iter(found), "masks"), root)


def _open(format: str, root: Path) -> Source:
    return READERS[format](root)  # type: ignore[call-arg]


def _recognise(root: Path) -> dict[str, str]:
    """The formats whose files are there, and a name of those."""
    found: dict[str, str] = {}
    if coco := annotation_files(root):
        found["coco"] = " and ".join(path.relative_to(root).as_posix() for path in coco.values())
    elif panoptic := panoptic_files(root):  # the COCO download has both; it is read as instances unless format says so
        found["panoptic"] = " and ".join(path.relative_to(root).as_posix() for path in panoptic.values())
    if (told := yaml_file(root)) is not None:
        found["yolo"] = told.name
    folders = [root, *split_folders(root).values()]
    masks = [path for folder in folders if (path := named(folder, MASKS, pictures=True)) and path.name != "annotations"]
    if masks and found:
        found["masks"] = f"{masks[0].relative_to(root).as_posix()}/"
    if not found and not masks and is_labelme(root):
        found["labelme"] = "LabelMe's .json files"
    return found
