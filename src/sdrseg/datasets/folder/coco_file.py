"""One COCO JSON file. Broken entries become problems and are skipped."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sdrseg.datasets.folder.drawn import Drawing
from sdrseg.datasets.folder.painting import MAX_SIDE, BrokenError, drawing
from sdrseg.datasets.folder.settings import read_text
from sdrseg.datasets.folder.splits import LAYOUTS
from sdrseg.datasets.source import Problem
from sdrseg.errors import DataError


@dataclass
class _Listed:
    """One image of the file."""

    id: str
    number: int | str
    file_name: str
    size: tuple[int, int]  # height, width
    shapes: list[tuple[tuple[bool, float], int, Any]] = field(default_factory=list)  # order, class id, shape


class AnnotationFile:
    """A JSON file and its problems."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.problems: list[Problem] = []
        self._data = load_json(path)
        self.categories, self._above = read_categories(path, self._data["categories"])

    @property
    def dummies(self) -> set[int]:
        """Categories without annotations that are only parents of others, such as Roboflow's first one."""
        entries = [entry for entry in self._data["annotations"] if isinstance(entry, dict)]
        used = {number for entry in entries if isinstance(number := entry.get("category_id"), int)}
        parents = set(self._above.values())
        return {
            number
            for number, name in self.categories.items()
            if number not in used and self._above[number] == "none" and name in parents
        }

    def drawings(self, folders: list[Path], prefix: str, class_of: Mapping[int, int]) -> dict[str, Drawing]:
        """The images by id with their shapes; `folders`: where to look for them."""
        listed = self._list_images(self._data["images"], prefix)
        self._add_drawings(self._data["annotations"], listed, class_of)
        usable = [image for image in listed.values() if image is not None]
        if self._data["annotations"] and not any(image.shapes for image in usable):
            raise DataError(
                f"{self.path}: none of its annotations can be used. First problem: {self.problems[0].detail}"
            )
        found = self._find_images(usable, folders)
        return {
            image.id: Drawing(found[image.id], f"{self.path}, image id {image.number}", image.size, image.shapes)
            for image in usable
            if image.id in found
        }

    def _problem(self, kind: str, detail: str) -> None:
        self.problems.append(Problem(str(self.path), kind, detail))

    def _list_images(self, entries: list[Any], prefix: str) -> dict[int | str, _Listed | None]:
        """The images by their id in the file; None if the entry is broken."""
        listed: dict[int | str, _Listed | None] = {}
        file_names: dict[str, str] = {}
        for position, entry in enumerate(entries):
            number = entry.get("id") if isinstance(entry, dict) else None
            if not isinstance(number, int | str):
                self._problem("broken image entry", f"images[{position}] has no id")
            elif number in listed:
                self._problem(
                    "duplicate id", f"image id {number!r} occurs again (images[{position}]); the first is used"
                )
            else:
                listed[number] = None
                try:
                    image = _image(entry, prefix)
                except BrokenError as error:
                    self._problem("broken image entry", f"image id {number!r}: {error}")
                    continue
                if image.id in file_names:
                    other = file_names[image.id]
                    self._problem(
                        "duplicate id",
                        f"image id {number!r}: {image.file_name} differs from {other} only in its suffix",
                    )
                    continue
                file_names[image.id] = image.file_name
                listed[number] = image
        return listed

    def _add_drawings(
        self, entries: list[Any], listed: Mapping[int | str, _Listed | None], class_of: Mapping[int, int]
    ) -> None:
        for position, entry in enumerate(entries):
            annotation = entry if isinstance(entry, dict) else {}
            name = (
                f"annotation id {annotation['id']!r}" if "id" in annotation else f"annotations[{position}] (without id)"
            )
            number, category = annotation.get("image_id"), annotation.get("category_id")
            if not isinstance(number, int | str) or number not in listed:
                self._problem("unknown image", f"{name}: image_id {number!r} is not in images")
                continue
            image = listed[number]
            if image is None:
                continue  # already reported
            if not isinstance(category, int) or category not in class_of:
                self._problem("unknown category", f"{name}: category_id {category!r} is not in categories")
            elif annotation.get("ignore"):
                self._problem("ignored annotation", f"{name}: ignore is set; it is not used")
            else:
                try:
                    area, shape = drawing(annotation.get("segmentation"), image.size)
                except BrokenError as error:
                    self._problem("broken annotation", f"{name}: {error}")
                    continue
                # Crowds first, then from large to small, so that small objects stay visible.
                order = (not annotation.get("iscrowd"), -area)
                image.shapes.append((order, class_of[category], shape))

    def _find_images(self, listed: Iterable[_Listed], folders: list[Path]) -> dict[str, Path]:
        folders = [folder for folder in folders if folder.is_dir()]
        searched = ", ".join(map(str, folders))
        found: dict[str, Path] = {}
        for image in listed:
            paths = (folder / image.file_name for folder in folders)
            path = next((path for path in paths if _is_file(path)), None)
            if path is None:
                self._problem("no image", f"image id {image.number!r}: {image.file_name} not found in: {searched}")
            else:
                found[image.id] = path
        if not found:
            raise DataError(f"{self.path}: none of its images was found in: {searched}.\n{LAYOUTS}")
        return found


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # for example, a name that is too long
        return False


def load_json(path: Path) -> dict[str, list[Any]]:
    try:
        data = json.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: not valid JSON: {error}. Export it again.") from error
    for key in ("images", "annotations", "categories"):
        if not isinstance(data, dict) or not isinstance(data.get(key), list):
            raise DataError(
                f"{path}: no list {key!r}, so it is not a COCO file of instances. Export it again in this format."
            )
    lists: dict[str, list[Any]] = data
    return lists


def read_categories(path: Path, entries: list[Any]) -> tuple[dict[int, str], dict[int, str]]:
    """The names of categories and of their parents, by category id, in order of id."""
    names: dict[int, str] = {}
    above: dict[int, str] = {}
    for position, entry in enumerate(entries):
        number, name = (entry.get("id"), entry.get("name")) if isinstance(entry, dict) else (None, None)
        if not isinstance(number, int) or not isinstance(name, str):
            raise DataError(f"{path}: categories[{position}] needs a whole number as id and a name; it is {entry!r}.")
        if number in names:
            raise DataError(f"{path}: category id {number} occurs twice ({names[number]!r}, {name!r}). Correct one.")
        names[number] = name.strip()
        above[number] = str(entry.get("supercategory", ""))
    return dict(sorted(names.items())), above


def _image(entry: dict[str, Any], prefix: str) -> _Listed:
    file_name = entry.get("file_name")
    if not isinstance(file_name, str) or not Path(file_name).name:
        raise BrokenError(f"file_name is {file_name!r}")
    if Path(file_name).is_absolute() or ".." in Path(file_name).parts:
        raise BrokenError(f"file_name {file_name!r} points outside the folder of the data set")
    height, width = entry.get("height"), entry.get("width")
    if not (isinstance(height, int) and isinstance(width, int) and 0 < height <= MAX_SIDE and 0 < width <= MAX_SIDE):
        raise BrokenError(f"height {height!r} and width {width!r} must be whole numbers from 1 to {MAX_SIDE}")
    return _Listed(prefix + Path(file_name).with_suffix("").as_posix(), entry["id"], file_name, (height, width))
