"""LabelMe: next to each image, a JSON file of the same name with labelled shapes."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from sdrseg.datasets.folder.classes import arrange_named
from sdrseg.datasets.folder.drawn import Drawing, Drawn
from sdrseg.datasets.folder.painting import BrokenError, drawing
from sdrseg.datasets.folder.settings import read_settings, read_text
from sdrseg.datasets.folder.splits import LAYOUTS, choose_parts, part_of
from sdrseg.datasets.pictures import PICTURE_SUFFIXES, picture_size
from sdrseg.datasets.source import Problem, Split, find_by_id, find_files
from sdrseg.errors import DataError, quantity
from sdrseg.labels import VOID

IGNORE = "__ignore__"
CORNERS = 64
"""The number of corners of the polygon that approximates a circle."""


class LabelMe(Drawn):
    """Images and JSON files of shapes below one folder."""

    def __init__(self, root: Path) -> None:
        self.root = root = Path(root)
        settings = read_settings(root, named="LabelMe files", also=("classes",))
        problems: list[Problem] = []
        files: dict[str, tuple[Path, dict[str, Any]]] = {}
        unreadable: set[str] = set()
        for name in sorted(find_files(root)):
            if name.endswith(".json"):
                try:
                    files[name.removesuffix(".json")] = root / name, _load(root / name)
                except DataError as error:
                    unreadable.add(name.removesuffix(".json"))
                    problems.append(
                        Problem(str(root / name), "unreadable", str(error).removeprefix(f"{root / name}: "))
                    )
        pictures, more = find_by_id(root, PICTURE_SUFFIXES)
        problems += [
            *more,
            *(
                Problem(str(file), "no mask", "no .json next to it")
                for i, file in pictures.items()
                if i not in files and i not in unreadable
            ),
        ]
        names = list(settings.classes) or sorted({name for _, content in files.values() for name in _labels(content)})
        if not names:
            raise DataError(f"{root}: no .json next to an image contains a labelled shape.\n{LAYOUTS}")
        classes, label_of = arrange_named(settings, names, settings.file)
        label_of[IGNORE] = VOID
        drawings: dict[str, Drawing] = {}
        for id, (file, content) in files.items():
            try:
                drawings[id] = drawn = _drawing(file, content, pictures.get(id))
            except (BrokenError, DataError) as error:
                problems.append(Problem(str(file), "no image", str(error)))
                continue
            for number, shape in enumerate(content["shapes"]):
                try:
                    name, points = _outline(shape)
                    if name not in label_of:
                        raise BrokenError(f"{name!r} is not a class")
                    drawn.shapes.append(((True, float(number)), label_of[name], drawing([points], drawn.size)[1]))
                except BrokenError as error:
                    problems.append(Problem(str(file), "broken annotation", f"shapes[{number}]: {error}"))
        by_part: dict[str, dict[str, Drawing]] = {}
        for id, drawn in drawings.items():
            part = part_of(id.partition("/")[0]) if "/" in id else None
            by_part.setdefault(part or "", {})[id] = drawn
        parts: dict[Split | None, dict[str, Drawing]] = {None: drawings}
        note = ""
        if set(by_part) <= {"train", "val", "test"}:
            chosen, note = choose_parts(settings, root, by_part, "{}/")
            parts = dict(chosen.items())
        self._store(settings, classes, parts, "folders " + " and ".join(by_part), problems, note)
        self.format = "LabelMe JSON"


def is_labelme(root: Path) -> bool:
    """Whether the first JSON file below the root is in LabelMe's format."""
    name = next((name for name in find_files(root) if name.endswith(".json")), None)
    try:
        return name is not None and bool(_load(root / name))
    except DataError:
        return False


def _load(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(read_text(file))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{file}: not valid JSON: {error}.") from error
    if not isinstance(content, dict) or not isinstance(content.get("shapes"), list):
        raise DataError(f"{file}: no list 'shapes', so it is not a LabelMe file.")
    return content


def _labels(content: dict[str, Any]) -> set[str]:
    """The labels of all shapes that have an area: a label that is only used for points or lines is not a class."""
    found = set()
    for shape in content["shapes"]:
        try:
            found.add(_outline(shape)[0])
        except BrokenError:
            continue
    return found - {IGNORE}


def _drawing(file: Path, content: dict[str, Any], picture: Path | None) -> Drawing:
    """The image of a JSON file: the one with the same name, or the one next to it that imagePath names."""
    named = content.get("imagePath")
    if picture is None and isinstance(named, str):
        neighbour = file.parent / Path(named.replace("\\", "/")).name
        picture = neighbour if neighbour.is_file() else None
    if picture is None:
        raise BrokenError(f"neither a picture of the same name nor {named!r} next to it")
    return Drawing(picture, str(file), picture_size(picture))


def _outline(shape: Any) -> tuple[str, list[float]]:
    """The label of a shape, and its polygon."""
    name = shape.get("label") if isinstance(shape, dict) else shape
    if not isinstance(shape, dict) or not isinstance(name, str) or not name.strip():
        raise BrokenError(f"{name!r} is not a class")
    kind, points = shape.get("shape_type") or "polygon", shape.get("points")
    try:
        corners = [(float(x), float(y)) for x, y in points]  # type: ignore[union-attr]
    except (TypeError, ValueError):
        raise BrokenError("points are not pairs of numbers") from None
    if kind in ("rectangle", "circle") and len(corners) != 2:
        raise BrokenError(f"a {kind} with {quantity(len(corners), 'point')}; it needs 2")
    if kind == "polygon" and len(corners) < 3:
        raise BrokenError(f"a polygon with {quantity(len(corners), 'point')}; it needs at least 3")
    if kind == "rectangle":
        (left, top), (right, bottom) = corners
        corners = [(left, top), (right, top), (right, bottom), (left, bottom)]
    elif kind == "circle":
        (x, y), radius = corners[0], math.dist(*corners)
        turns = [2 * math.pi * n / CORNERS for n in range(CORNERS)]
        corners = [(x + radius * math.cos(turn), y + radius * math.sin(turn)) for turn in turns]
    elif kind != "polygon":
        raise BrokenError(f"a {kind}; only polygons, rectangles and circles are supported")
    return name.strip(), [number for corner in corners for number in corner]
