"""COCO panoptic: a PNG per image whose colours are segment ids, and a JSON file with the classes of the segments."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from sdrseg.datasets.folder.classes import arrange_named
from sdrseg.datasets.folder.coco import image_folders
from sdrseg.datasets.folder.coco_file import load_json, read_categories
from sdrseg.datasets.folder.coding import pack
from sdrseg.datasets.folder.settings import read_settings
from sdrseg.datasets.folder.splits import LAYOUTS, SPLITS, Splits, check_splits, choose_parts, lists_or_share, part_of
from sdrseg.datasets.pictures import read_label
from sdrseg.datasets.source import Array, PictureFiles, Problem
from sdrseg.errors import DataError
from sdrseg.labels import VOID


class Panoptic(PictureFiles):
    """Images, PNG files of segments and JSON below one folder."""

    name = "folder"

    def __init__(self, root: Path) -> None:
        super().__init__()
        self.root = root = Path(root)
        settings = read_settings(root, named="COCO JSON")
        found = panoptic_files(root)
        if not found:
            raise DataError(f"{root}: no annotations/panoptic_*.json found.\n{LAYOUTS}")
        note = ""
        paths: dict[Any, Path] = {None: found[""]} if "" in found else {}
        if not paths:
            chosen, note = choose_parts(settings, root, found, "annotations/panoptic_{}*.json")
            paths = dict(chosen.items())
        loaded = {split: load_json(path) for split, path in paths.items()}
        names = {split: read_categories(paths[split], content["categories"])[0] for split, content in loaded.items()}
        first = next(iter(names.values()))
        for split, categories in names.items():
            if categories != first:
                raise DataError(
                    f"{paths[split]}: categories differ from {next(iter(paths.values()))}. Make them the same."
                )
        classes, label_of = arrange_named(settings, list(first.values()), next(iter(paths.values())), implied=False)
        self.classes = classes.names
        self.has_background = classes.has_background
        self.score_background = classes.has_background and settings.score_background
        self._label_of = {number: label_of[name] for number, name in first.items()}
        self._segments: dict[str, dict[int, int]] = {}
        part_names = {path: part for part, path in found.items()}
        ids = {split: self._add(paths[split], part_names[paths[split]], content) for split, content in loaded.items()}
        if None in ids:
            splits, note = lists_or_share(settings, root, self._images, self._masks)
        else:
            by = "files " + " and ".join(path.relative_to(root).as_posix() for path in paths.values())
            train, val = (ids.get(split, ()) for split in SPLITS)
            splits = Splits(train, val, by, self._problems)
            splits = check_splits(settings, root, splits, ids, self._images)
        self._ids = {"train": splits.train, "val": splits.val}
        self.split_by = splits.by
        self._problems = sorted({*self._problems, *splits.problems})
        self.notes = tuple(text for text in (note, classes.note) if text)
        self.format = f"COCO panoptic ({', '.join(path.name for path in paths.values())})"

    def mask(self, id: str) -> Array:
        stored = read_label(self._masks[id])
        if stored.ndim != 3:
            raise DataError(f"{self._masks[id]}: a panoptic mask must be an RGB picture; this one is grey.")
        numbers = pack(stored[:, :, ::-1])  # red is the lowest byte
        known = self._segments[id]
        found, index = np.unique(numbers, return_inverse=True)
        if foreign := [number for number in found.tolist() if number not in known]:
            raise DataError(f"{self._masks[id]}: segment {foreign[0]} is not in the JSON file. Export it again.")
        labels: Array = np.array([known[number] for number in found.tolist()], np.uint8)
        return labels[index].reshape(numbers.shape)

    def mask_content(self, id: str) -> bytes:
        return json.dumps(sorted(self._segments[id].items())).encode() + super().mask_content(id)

    @property
    def coding(self) -> str:
        return f"panoptic: {len(self.classes)} classes"

    def _add(self, path: Path, part: str, content: dict[str, list[Any]]) -> tuple[str, ...]:
        """Add the images of a JSON file that exist, with their masks and segments; returns their ids."""
        folders = [folder for folder in image_folders(self.root, path, part) if folder.is_dir()]
        masks = next((f for f in (path.with_suffix(""), self.root / path.stem) if f.is_dir()), None)
        if masks is None:
            raise DataError(f"{path.with_suffix('')}: no such folder; it must contain the PNG files of {path.name}.")
        names = {e["id"]: e.get("file_name") for e in content["images"] if isinstance(e, dict) and _is_id(e.get("id"))}
        ids = []
        for position, entry in enumerate(content["annotations"]):
            try:
                image, mask = _name(names.get(entry["image_id"])), _name(entry["file_name"])
                segments = {int(s["id"]): self._label_of[s["category_id"]] for s in entry["segments_info"]}
            except (KeyError, TypeError, ValueError) as error:
                self._problems.append(Problem(str(path), "broken annotation", f"annotations[{position}]: {error!r}"))
                continue
            id = (f"{part}/" if part else "") + Path(image).with_suffix("").as_posix()
            file = next((folder / image for folder in folders if (folder / image).is_file()), None)
            if file is None or not (masks / mask).is_file():
                kind, what = ("no image", image) if file is None else ("no mask", mask)
                self._problems.append(Problem(str(path), kind, f"annotations[{position}]: {what} does not exist"))
                continue
            if id in self._images:
                detail = f"annotations[{position}]: {image} has another annotation, which is used"
                self._problems.append(Problem(str(path), "duplicate id", detail))
                continue
            self._images[id], self._masks[id] = file, masks / mask
            self._segments[id] = {0: VOID, **segments}
            ids.append(id)
        return tuple(sorted(ids))


def panoptic_files(root: Path) -> dict[str, Path]:
    """The panoptic JSON files by split ("" if the name of a file contains none)."""
    found: dict[str, Path] = {}
    for path in sorted((root / "annotations").glob("panoptic*.json")):
        part = part_of(path.stem) or ""
        if part in found:
            raise DataError(f"{path}: {found[part].name} exists as well. Keep one of them.")
        found[part] = path
    return found


def _is_id(value: Any) -> bool:
    return isinstance(value, int | str)


def _name(value: Any) -> str:
    """A file name that was read from a file, if it stays inside the folder."""
    if not isinstance(value, str) or not value or Path(value).is_absolute() or ".." in Path(value).parts:
        raise ValueError(f"file_name {value!r}")
    return value
