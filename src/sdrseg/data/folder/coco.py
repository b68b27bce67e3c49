"""Label maps from COCO JSON: polygons and run lengths, painted over each other.

What decides a label map is kept as one short JSON text per image, in painting order: it is drawn anew on each read,
and it is what the class index is keyed by.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from sdrseg.data.folder.painting import FINE_PIXELS, FINER, MAX_SIDE, BrokenError, drawing, paint
from sdrseg.data.folder.settings import check_classes, read_settings, read_text
from sdrseg.data.folder.splits import LAYOUTS, SPLITS, Splits, check_splits, lists_or_share, present_splits
from sdrseg.data.source import Array, Problem, Source, Split, read_image
from sdrseg.errors import DataError


class Coco(Source):
    """Images and COCO JSON below one folder."""

    name = "folder"

    def __init__(self, root: Path) -> None:
        self.root = root = Path(root)
        settings = read_settings(root, coco=True)
        self.score_background = settings.score_background
        paths = annotation_files(root)
        if not paths:
            raise DataError(f"{root}: neither annotations.json nor annotations/*train*.json is there.\n{LAYOUTS}")
        if "all" not in paths:
            names = {split: f"annotations/*{split}*.json" for split in SPLITS}
            present_splits(settings, root, {split: split in paths for split in SPLITS}, names)
        parts = {part: _AnnotationFile(path, _image_folders(root, path, part), part) for part, path in paths.items()}
        first = next(iter(parts.values()))
        for other in parts.values():
            _same_categories(first, other)
        self.classes = first.classes
        self.class_of = first.class_of
        self._files = {id: part for part in parts.values() for id in part.images}
        problems = [problem for part in parts.values() for problem in part.problems]
        if "all" in parts:
            splits = lists_or_share(settings, root, first.images, first.images)
        else:
            train, val = (tuple(sorted(parts[split].images)) if split in parts else () for split in SPLITS)
            by = "files " + " and ".join(path.relative_to(root).as_posix() for path in paths.values())
            splits = check_splits(root, Splits(train, val, by, problems), need_val=settings.val > 0)
        self._ids: dict[Split, tuple[str, ...]] = {"train": splits.train, "val": splits.val}
        self.split_by = splits.by
        self._problems = sorted({*problems, *splits.problems})

    def ids(self, split: Split) -> tuple[str, ...]:
        return self._ids[split]

    def image(self, id: str) -> Array:
        return read_image(self._files[id].images[id])

    def mask(self, id: str) -> Array:
        return paint(self.mask_content(id))

    def mask_content(self, id: str) -> bytes:
        return self._files[id].contents[id]

    @property
    def coding(self) -> str:
        return f"coco: {len(self.classes)} classes, polygons {FINER} times finer up to {FINE_PIXELS} pixels"

    def file(self, id: str, kind: Literal["image", "mask"]) -> str:
        part = self._files[id]
        return str(part.images[id]) if kind == "image" else f"{part.path}, image id {part.numbers[id]}"

    def problems(self) -> list[Problem]:
        return self._problems


def annotation_files(root: Path) -> dict[str, Path]:
    """The COCO files of a folder: {"all": …}, or {"train": …, "val": …}, or nothing."""
    found: dict[str, Path] = {}
    for split in SPLITS:
        other = "val" if split == "train" else "train"
        paths = sorted(p for p in (root / "annotations").glob(f"*{split}*.json") if other not in p.name)
        # The COCO download has captions and key points beside the instances.
        instances = [p for p in paths if p.name.startswith("instances")]
        if len(instances or paths) > 1:
            names = ", ".join(p.name for p in instances or paths)
            raise DataError(f"{root / 'annotations'}: several files for {split}: {names}. Keep one of them there.")
        if paths:
            found[split] = (instances or paths)[0]
    if (root / "annotations.json").is_file():
        if found:
            raise DataError(f"{root}: both annotations.json and {next(iter(found.values()))} are there. Keep one.")
        found["all"] = root / "annotations.json"
    return found


def _image_folders(root: Path, path: Path, part: str) -> list[Path]:
    """Where the images of an annotation file may lie, the likeliest first."""
    if part == "all":
        return [root / "images", root]
    match = re.search(rf"{part}\d*", path.stem)
    named = match.group() if match else part  # "train2017"
    folders = [root / named, root / "images" / named, root / part, root / "images" / part, root / "images", root]
    return list(dict.fromkeys(folders))


def _same_categories(first: _AnnotationFile, other: _AnnotationFile) -> None:
    if first.categories != other.categories:
        differing = sorted(first.categories.items() ^ other.categories.items())
        there = [
            f"{id} {name!r} is only in {f.path}"
            for id, name in differing
            for f in (first, other)
            if f.categories.get(id) == name
        ]
        raise DataError(f"{other.path}: other categories than {first.path}: {'; '.join(there)}. Make them the same.")


@dataclass
class _Listed:
    """One image of an annotation file."""

    id: str
    number: int | str
    file_name: str
    size: tuple[int, int]  # height, width
    drawings: list[tuple[tuple[bool, float], int, Any]] = field(default_factory=list)  # order, class id, drawing

    def content(self) -> bytes:
        in_order = sorted(self.drawings, key=lambda drawing: drawing[0])
        parts = {"annotations": [[class_id, drawing] for _, class_id, drawing in in_order], "size": self.size}
        return json.dumps(parts, sort_keys=True, separators=(",", ":")).encode()


class _AnnotationFile:
    """One JSON file, checked: what is broken becomes a problem and is passed over."""

    def __init__(self, path: Path, folders: list[Path], part: str) -> None:
        self.path = path
        self.problems: list[Problem] = []
        data = _load(path)
        self.categories = _categories(path, data["categories"])
        self.classes = check_classes(path, ["background", *(n for n in self.categories.values() if n != "background")])
        self.class_of = {number: self.classes.index(name) for number, name in self.categories.items()}
        listed = self._list_images(data["images"], "" if part == "all" else f"{part}/")
        self._add_drawings(data["annotations"], listed)
        usable = [image for image in listed.values() if image is not None]
        if data["annotations"] and not any(image.drawings for image in usable):
            raise DataError(
                f"{path}: none of its annotations can be used. The first problem: {self.problems[0].detail}"
            )
        self.images = self._find_images(usable, folders)
        self.numbers = {image.id: image.number for image in usable}
        self.contents = {image.id: image.content() for image in usable if image.id in self.images}

    def _problem(self, kind: str, detail: str) -> None:
        self.problems.append(Problem(str(self.path), kind, detail))

    def _list_images(self, entries: list[Any], prefix: str) -> dict[int | str, _Listed | None]:
        """The images by their number in the file; None where the entry is broken."""
        listed: dict[int | str, _Listed | None] = {}
        file_names: dict[str, str] = {}
        for position, entry in enumerate(entries):
            number = entry.get("id") if isinstance(entry, dict) else None
            if not isinstance(number, int | str):
                self._problem("broken image entry", f"images[{position}] has no id")
            elif number in listed:
                self._problem(
                    "duplicate id", f"image id {number!r} is there again (images[{position}]); the first counts"
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
                        "duplicate id", f"image id {number!r}: {image.file_name} is like {other} but for its suffix"
                    )
                    continue
                file_names[image.id] = image.file_name
                listed[number] = image
        return listed

    def _add_drawings(self, entries: list[Any], listed: Mapping[int | str, _Listed | None]) -> None:
        for position, entry in enumerate(entries):
            given = entry if isinstance(entry, dict) else {}
            name = f"annotation id {given['id']!r}" if "id" in given else f"annotations[{position}] (without id)"
            number, category = given.get("image_id"), given.get("category_id")
            if not isinstance(number, int | str) or number not in listed:
                self._problem("unknown image", f"{name}: image_id {number!r} is not in images")
                continue
            image = listed[number]
            if image is None:
                continue  # the image entry itself is a problem already
            if not isinstance(category, int) or category not in self.class_of:
                self._problem("unknown category", f"{name}: category_id {category!r} is not in categories")
            elif given.get("ignore"):
                self._problem("ignored annotation", f"{name}: ignore is set; it is not painted")
            else:
                try:
                    area, shape = drawing(given.get("segmentation"), image.size)
                except BrokenError as error:
                    self._problem("broken annotation", f"{name}: {error}")
                    continue
                # Crowds first, then from large to small, so that small objects stay visible.
                order = (not given.get("iscrowd"), -area)
                image.drawings.append((order, self.class_of[category], shape))

    def _find_images(self, listed: Iterable[_Listed], folders: list[Path]) -> dict[str, Path]:
        folders = [folder for folder in folders if folder.is_dir()]
        where = ", ".join(map(str, folders))
        found: dict[str, Path] = {}
        for image in listed:
            paths = (folder / image.file_name for folder in folders)
            path = next((path for path in paths if _is_file(path)), None)
            if path is None:
                self._problem("no image", f"image id {image.number!r}: {image.file_name} is in none of: {where}")
            else:
                found[image.id] = path
        if not found:
            raise DataError(
                f"{self.path}: none of its images was found; file names are looked for in: {where}.\n{LAYOUTS}"
            )
        return found


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # a name that is too long for the file system, for one
        return False


def _load(path: Path) -> dict[str, list[Any]]:
    try:
        data = json.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: not valid JSON: {error}. Export it again.") from error
    for key in ("images", "annotations", "categories"):
        if not isinstance(data, dict) or not isinstance(data.get(key), list):
            raise DataError(f"{path}: has no list {key!r}, so it is not a COCO file of instances. Export it as such.")
    lists: dict[str, list[Any]] = data
    return lists


def _categories(path: Path, entries: list[Any]) -> dict[int, str]:
    """Category names by category id, in order of id."""
    names: dict[int, str] = {}
    for position, entry in enumerate(entries):
        number, name = (entry.get("id"), entry.get("name")) if isinstance(entry, dict) else (None, None)
        if not isinstance(number, int) or not isinstance(name, str):
            raise DataError(f"{path}: categories[{position}] needs a whole number as id and a name; it is {entry!r}.")
        if number in names:
            raise DataError(f"{path}: category id {number} is there twice ({names[number]!r}, {name!r}). Correct one.")
        names[number] = name.strip()
    return dict(sorted(names.items()))


def _image(entry: dict[str, Any], prefix: str) -> _Listed:
    file_name = entry.get("file_name")
    if not isinstance(file_name, str) or not Path(file_name).name:
        raise BrokenError(f"file_name is {file_name!r}")
    height, width = entry.get("height"), entry.get("width")
    if not (isinstance(height, int) and isinstance(width, int) and 0 < height <= MAX_SIDE and 0 < width <= MAX_SIDE):
        raise BrokenError(f"height {height!r} and width {width!r} must be whole numbers from 1 to {MAX_SIDE}")
    return _Listed(prefix + Path(file_name).with_suffix("").as_posix(), entry["id"], file_name, (height, width))
