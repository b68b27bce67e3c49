"""YOLO's polygons: data.yaml, and per image a text file with lines CLASS X Y X Y …, as fractions of its sides."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from sdrseg.datasets.folder.classes import arrange_named
from sdrseg.datasets.folder.drawn import Drawing, Drawn
from sdrseg.datasets.folder.painting import BrokenError, drawing
from sdrseg.datasets.folder.settings import read_settings, read_text
from sdrseg.datasets.folder.splits import LAYOUTS, NAMES, choose_parts
from sdrseg.datasets.pictures import PICTURE_SUFFIXES, picture_size
from sdrseg.datasets.source import Problem, Split, find_by_id
from sdrseg.errors import DataError

FILES = ("data.yaml", "data.yml", "dataset.yaml", "dataset.yml")


class Yolo(Drawn):
    """Images and text files of polygons below one folder."""

    def __init__(self, root: Path) -> None:
        self.root = root = Path(root)
        path = yaml_file(root)
        if path is None:
            raise DataError(f"{root}: no data.yaml found.\n{LAYOUTS}")
        settings = read_settings(root, named=path.name)
        content = _load(path)
        names = _names(path, content.get("names"))
        classes, labels = arrange_named(settings, list(names.values()), path)
        label_of = {number: labels[name] for number, name in names.items()}
        found = {part: files for part, keys in NAMES.items() if (files := _images(root, content, keys))}
        chosen: dict[Split | None, tuple[str, dict[str, Path]]] = {}
        note, problems = "", list[Problem]()
        if found:
            named = {part: (f"{part}/", files) for part, files in found.items()}
            by_split, note = choose_parts(settings, root, named, f"{{}} of {path.name}")
            chosen = dict(by_split.items())
        elif (root / "images").is_dir() and not any(content.get(key) for keys in NAMES.values() for key in keys):
            whole, problems = find_by_id(root / "images", PICTURE_SUFFIXES)
            chosen = {None: ("", whole)}
        if not any(files for _, files in chosen.values()):
            raise DataError(f"{path}: no images found in the folders of train, val and test.\n{LAYOUTS}")
        parts: dict[Split | None, dict[str, Drawing]] = {}
        for split, (prefix, files) in chosen.items():
            parts[split] = {}
            for id, file in files.items():
                label = label_file(file)
                try:
                    drawn = Drawing(file, str(label), picture_size(file))
                except DataError as error:
                    problems.append(Problem(str(file), "unreadable", str(error).removeprefix(f"{file}: ")))
                    continue
                problems += _draw(drawn, label, label_of)
                parts[split][f"{prefix}{id}"] = drawn
        if not any(drawn.shapes for drawings in parts.values() for drawn in drawings.values()):
            first = f" First problem: {problems[0]}." if problems else ""
            raise DataError(f"{path}: no polygon found in labels/*.txt next to the images.{first}")
        self._store(settings, classes, parts, path.name, problems, note)
        self.format = f"YOLO polygons ({path.name})"


def yaml_file(root: Path) -> Path | None:
    return next((root / name for name in FILES if (root / name).is_file()), None)


def label_file(image: Path) -> Path:
    """The file with the polygons of an image: labels/ instead of images/, and .txt."""
    folders = list(image.parts)
    for index in range(len(folders) - 2, -1, -1):
        if folders[index].lower() == "images":
            folders[index] = "labels"
            break
    return Path(*folders).with_suffix(".txt")


def _load(path: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load(read_text(path))
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise DataError(f"{path}: not valid YAML: {error}. Correct it.") from error
    if not isinstance(content, dict):
        raise DataError(f"{path}: no keys such as names and train. Export it again.")
    return content


def _names(path: Path, names: Any) -> dict[int, str]:
    """The classes by number, from a list or from numbered names."""
    numbered = dict(enumerate(names)) if isinstance(names, list) else names
    if not isinstance(numbered, dict) or not numbered or not all(isinstance(number, int) for number in numbered):
        raise DataError(f"{path}: names = {names!r} is neither a list of class names nor a table of numbers and names.")
    return {number: str(name).strip() for number, name in sorted(numbered.items())}


def _images(root: Path, content: dict[str, Any], keys: Iterable[str]) -> dict[str, Path]:
    """The images of one split by id: from the folders in data.yaml or the usual ones, never outside the root."""
    entries: list[Any] = []
    for key in keys:
        entry = content.get(key)
        entries += entry if isinstance(entry, list) else [entry]
    usual = [folder for key in keys for folder in (f"images/{key}", f"{key}/images")]
    base = str(content.get("path") or "")
    for entry in [entry for entry in entries if isinstance(entry, str)] + usual:
        inner = [part for part in Path(entry).parts if part not in ("..", ".", "/")]
        for folder in (root.joinpath(*inner), root / Path(base).name / Path(*inner)):
            if folder.is_dir():
                found, _ = find_by_id(folder, PICTURE_SUFFIXES)
                return found
            if folder.suffix == ".txt" and folder.is_file():
                return _listed(root, folder)
    return {}


def _listed(root: Path, file: Path) -> dict[str, Path]:
    """The images of a list that exist."""
    found: dict[str, Path] = {}
    for line in read_text(file).splitlines():
        inner = [part for part in Path(line.strip()).parts if part not in ("..", ".", "/")]
        path = root.joinpath(*inner)
        if inner and path.is_file():
            found[Path(*inner).with_suffix("").as_posix()] = path
    return found


def _draw(drawn: Drawing, file: Path, label_of: dict[int, int]) -> list[Problem]:
    """Add the polygons of a text file; if it does not exist, the image contains no object."""
    problems: list[Problem] = []
    if not file.is_file():
        return problems
    height, width = drawn.size
    for number, line in enumerate(read_text(file).splitlines(), 1):
        fields = line.split()
        if not fields:
            continue
        try:
            if not fields[0].isdigit() or int(fields[0]) not in label_of:
                raise BrokenError(f"{fields[0]!r} is not a class of data.yaml")
            if len(fields) == 5:
                raise BrokenError("a box, CLASS X Y WIDTH HEIGHT; segmentation needs polygons")
            try:
                shares = [float(field) for field in fields[1:]]
            except ValueError:
                raise BrokenError("values that are not numbers") from None
            points = [share * (height if index % 2 else width) for index, share in enumerate(shares)]
            area, shape = drawing([points], drawn.size)
        except BrokenError as error:
            problems.append(Problem(str(file), "broken annotation", f"line {number}: {error}"))
        else:
            drawn.shapes.append(((True, -area), label_of[int(fields[0])], shape))
    return problems
