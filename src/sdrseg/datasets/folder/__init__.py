"""Own data in common formats; docs/own-data.md lists them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from sdrseg.config import Config
from sdrseg.datasets.folder.coco import Coco, annotation_files
from sdrseg.datasets.folder.labelme import LabelMe, is_labelme
from sdrseg.datasets.folder.masks import Folder
from sdrseg.datasets.folder.pairing import MASKS, named
from sdrseg.datasets.folder.panoptic import Panoptic, panoptic_files
from sdrseg.datasets.folder.settings import read_format
from sdrseg.datasets.folder.splits import LAYOUTS, split_folders
from sdrseg.datasets.folder.yolo import Yolo, yaml_file
from sdrseg.datasets.pictures import PICTURE_SUFFIXES
from sdrseg.datasets.source import Problem, Source
from sdrseg.errors import DataError, quantity


class AnyFolder(Folder):
    """The data set `folder`, in any format that is recognised."""

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
    """The data set in `root`, in the format that `format` in dataset.toml names or that its files show."""
    root = Path(root)
    if not root.is_dir():
        raise DataError(f"{root}: no such folder. Name the folder that contains your data.\n{LAYOUTS}")
    if chosen := read_format(root):
        return _open(chosen, root)
    found = _recognise(root)
    if len(found) > 1:
        names = " and ".join(f'{what} (format = "{name}")' for name, what in found.items())
        raise DataError(f"{root}: found both {names}. Choose one in dataset.toml, or move the other to another folder.")
    return _open(next(iter(found), "masks"), root)


def _open(format: str, root: Path) -> Source:
    source = READERS[format](root)  # type: ignore[call-arg]
    source.notes += (*_without_mask(source.problems()), *_unusable(source.problems()))
    return source


def _without_mask(problems: Iterable[Problem]) -> tuple[str, ...]:
    """A note on images that are left out because they have no mask."""
    found = [problem for problem in problems if problem.kind == "no mask"]
    if not found:
        return ()
    first = found[0]
    is_image = Path(first.file).suffix.lower() in PICTURE_SUFFIXES
    place = first.file if is_image else f"{first.file}, {first.detail}"  # the line of a list
    if len(found) == 1:
        return (f"1 image has no mask and is left out: {place}",)
    return (f"{quantity(len(found), 'image')} have no mask and are left out, such as {place}",)


def _unusable(problems: Iterable[Problem]) -> tuple[str, ...]:
    """Notes on annotations that cannot be used, and on files that cannot be read."""
    problems, notes = list(problems), []
    for kinds, one, several in (
        (("unreadable",), "file cannot be read and is left out", "files cannot be read and are left out"),
        (
            ("broken annotation", "unknown category"),
            "annotation cannot be used, so its pixels may count as background",
            "annotations cannot be used, so their pixels may count as background",
        ),
    ):
        found = [problem for problem in problems if problem.kind in kinds]
        if len(found) == 1:
            notes.append(f"1 {one}: {found[0].file}, {found[0].detail}")
        elif found:
            first = f"{found[0].file}, {found[0].detail}"
            notes.append(f"{len(found)} {several} (`sdrseg data` lists them), such as {first}")
    return tuple(notes)


def _recognise(root: Path) -> dict[str, str]:
    """The formats that were found, each with the name of its files."""
    found: dict[str, str] = {}
    if coco := annotation_files(root):
        found["coco"] = " and ".join(path.relative_to(root).as_posix() for path in coco.values())
    elif panoptic := panoptic_files(root):  # the COCO download has both; instances are the default
        found["panoptic"] = " and ".join(path.relative_to(root).as_posix() for path in panoptic.values())
    if (yaml_path := yaml_file(root)) is not None:
        found["yolo"] = yaml_path.name
    folders = [root, *split_folders(root).values()]
    masks = [path for folder in folders if (path := named(folder, MASKS, pictures=True)) and path.name != "annotations"]
    if masks and found:
        found["masks"] = f"{masks[0].relative_to(root).as_posix()}/"
    if not found and not masks and is_labelme(root):
        found["labelme"] = "LabelMe's .json files"
    return found
