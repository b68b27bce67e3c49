"""COCO JSON, in the layouts of the COCO download, CVAT, Label Studio and Roboflow."""

from __future__ import annotations

import re
from pathlib import Path

from sdrseg.datasets.folder.classes import arrange_named
from sdrseg.datasets.folder.coco_file import AnnotationFile
from sdrseg.datasets.folder.drawn import Drawing, Drawn
from sdrseg.datasets.folder.settings import read_settings
from sdrseg.datasets.folder.splits import LAYOUTS, choose_parts, part_of, split_folders
from sdrseg.datasets.source import Split
from sdrseg.errors import DataError

ROBOFLOW = "_annotations.coco.json"
SINGLE_FILES = ("annotations.json", ROBOFLOW, "result.json")  # the last is Label Studio's


class Coco(Drawn):
    """Images and COCO JSON below one folder."""

    def __init__(self, root: Path) -> None:
        self.root = root = Path(root)
        settings = read_settings(root, named="COCO JSON")
        found = annotation_files(root)
        if not found:
            raise DataError(f"{root}: neither annotations.json nor annotations/*train*.json found.\n{LAYOUTS}")
        paths: dict[Split | None, Path] = {None: found[""]} if "" in found else {}
        note = ""
        if not paths:
            chosen, note = choose_parts(settings, root, found, _name_of_part(found))
            paths = dict(chosen.items())
        files = {split: AnnotationFile(path) for split, path in paths.items()}
        first = next(iter(files.values()))
        for other in files.values():
            _same_categories(first, other)
        dummies = set.intersection(*(file.dummies for file in files.values()))
        names = [name for number, name in first.categories.items() if number not in dummies]
        classes, label_of = arrange_named(settings, names, first.path)
        self.class_of = {n: label_of[name] for n, name in first.categories.items() if n not in dummies}
        part_names = {path: part for part, path in found.items()}
        parts: dict[Split | None, dict[str, Drawing]] = {}
        for split, file in files.items():
            part = part_names[file.path]
            prefix = f"{part}/" if part else ""
            parts[split] = file.drawings(image_folders(root, file.path, part), prefix, self.class_of)
        problems = [problem for file in files.values() for problem in file.problems]
        by = "files " + " and ".join(path.relative_to(root).as_posix() for path in paths.values())
        self._store(settings, classes, parts, by, problems, note)
        self.format = f"COCO JSON ({by.removeprefix('files ')})"
        if dummies:
            left = ", ".join(repr(first.categories[number]) for number in sorted(dummies))
            self.notes += (f"Category {left} is only a parent of others and has no annotations; it is left out.",)


def annotation_files(root: Path) -> dict[str, Path]:
    """The COCO files of a folder by split: {"": …} for a single file, {"train": …, "val": …}, or none."""
    listed = sorted(path for path in (root / "annotations").glob("*.json") if not path.name.startswith("panoptic"))
    # The COCO download also has files of captions, key points and stuff.
    instances = [path for path in listed if path.name.startswith("instances")]
    by_part: dict[str, list[Path]] = {}
    for path in instances or listed:
        by_part.setdefault(part_of(path.stem) or "", []).append(path)
    if "" in by_part and len(by_part) > 1:
        del by_part[""]
    for part, paths in by_part.items():
        if len(paths) > 1:
            names = ", ".join(path.name for path in paths)
            raise DataError(f"{root / 'annotations'}: several files for {part or 'all'}: {names}. Keep one of them.")
    found = {part: paths[0] for part, paths in by_part.items()}
    for part, folder in split_folders(root).items():
        if (folder / ROBOFLOW).is_file():
            found.setdefault(part, folder / ROBOFLOW)
    single_file = next((root / name for name in SINGLE_FILES if (root / name).is_file()), None)
    if single_file is not None and found:
        raise DataError(f"{root}: found both {single_file.name} and {next(iter(found.values()))}. Keep one.")
    return {"": single_file} if single_file is not None else found


def _name_of_part(found: dict[str, Path]) -> str:
    """How messages name the file of a part."""
    roboflow = any(path.name == ROBOFLOW for path in found.values())
    return f"{{}}/{ROBOFLOW}" if roboflow else "annotations/*{}*.json"


def image_folders(root: Path, path: Path, part: str) -> list[Path]:
    """Folders that may contain the images of an annotation file, most likely first."""
    if path.name == ROBOFLOW:
        return [path.parent, path.parent / "images"]
    if not part:
        return [root / "images", root, root / "images/default", root / "default"]
    match = re.search(rf"{part}\w*", path.stem, re.IGNORECASE)
    name = match.group() if match else part  # "train2017"
    folders = [
        root / name,
        root / "images" / name,
        root / part,
        root / "images" / part,
        root / "images",
        root,
    ]
    return list(dict.fromkeys(folders))


def _same_categories(first: AnnotationFile, other: AnnotationFile) -> None:
    if first.categories != other.categories:
        differing = sorted(first.categories.items() ^ other.categories.items())
        differences = [
            f"{id} {name!r} is only in {f.path}"
            for id, name in differing
            for f in (first, other)
            if f.categories.get(id) == name
        ]
        raise DataError(
            f"{other.path}: categories differ from {first.path}: {'; '.join(differences)}. Make them the same."
        )
