"""Images and mask files: class ids in 8 or 16 bits, palette indices, or colours with a table."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path

import numpy as np
from PIL import Image

from sdrseg.datasets.folder.classes import IGNORE
from sdrseg.datasets.folder.coding import Coding
from sdrseg.datasets.folder.pairing import find_layout, find_pairs, pair_lists
from sdrseg.datasets.folder.proposal import ask_for_classes
from sdrseg.datasets.folder.settings import Settings, read_settings, read_text
from sdrseg.datasets.folder.splits import (
    SPLITS,
    Splits,
    check_splits,
    choose_parts,
    list_files,
    lists_or_share,
    unpaired,
)
from sdrseg.datasets.pictures import PICTURE_SUFFIXES, open_picture, read_label
from sdrseg.datasets.source import Array, PictureFiles, Problem
from sdrseg.errors import DataError, quantity

LABELMAP = "labelmap.txt"
IGNORED = ("void", "ignore", "ignored")
"""Classes of a labelmap.txt that are neither learned nor scored."""


class Folder(PictureFiles):
    """Images and mask files below one folder."""

    name = "folder"

    def __init__(self, root: Path) -> None:
        super().__init__()
        self.root = root = Path(root)
        self.settings = read_settings(root)
        self.format = "images and masks"
        splits, split_note = self._split()
        self._by_colour = (root / LABELMAP).is_file() and not (self.settings.classes or self.settings.values)
        if self._by_colour:
            self.settings = _read_labelmap(self.settings, root / LABELMAP)
            self.format = f"Pascal VOC folders with {LABELMAP}"
        elif not (self.settings.classes or self.settings.values):
            self.settings = _read_classes_csv(self.settings, root)
        if not (self.settings.classes or self.settings.values):
            raise DataError(ask_for_classes(self.settings.file, [self._masks[id] for id in sorted(self._masks)]))
        self._ids = {"train": splits.train, "val": splits.val}
        self.split_by = splits.by
        self._problems = sorted({*self._problems, *splits.problems})
        self._coding = Coding(self.settings)
        self.classes = self._coding.classes.names
        self.has_background = self._coding.classes.has_background
        self.score_background = self._coding.classes.has_background and self.settings.score_background
        self.notes = tuple(note for note in (split_note, self._coding.classes.note) if note)

    def mask(self, id: str) -> Array:
        path = self._masks[id]
        return self._coding.decode(_read_as_rgb(path) if self._by_colour else read_label(path), path)

    @property
    def coding(self) -> str:
        return str(self._coding)

    def _split(self) -> tuple[Splits, str]:
        """Find images and masks and split them; with a note if the split needs an explanation."""
        root, settings = self.root, self.settings
        if listed := pair_lists(root):
            parts, note = choose_parts(settings, root, listed, "{}.txt")
            for pairs in parts.values():
                self._add(pairs.images, pairs.masks, pairs.problems)
            ids = [tuple(sorted(parts[split].images)) if split in parts else () for split in SPLITS]
            by = "lists of pairs: " + " and ".join(list_files(root)[part].name for part in listed)
            splits = Splits(ids[0], ids[1], by, self._problems)
            return check_splits(settings, root, splits, parts, self._images), note
        layout = find_layout(root)
        if "" in layout.parts:
            pairs = find_pairs(layout.parts[""], root, "")
            self._add(pairs.images, pairs.masks, pairs.problems)
            lists = root / "ImageSets/Segmentation"
            return lists_or_share(settings, root, pairs.images, pairs.masks, lists if list_files(lists) else None)
        named = {part: (part, folders) for part, folders in layout.parts.items()}
        chosen, note = choose_parts(settings, root, named, layout.name)
        for part, folders in chosen.values():
            pairs = find_pairs(folders, root, f"{part}/")
            self._add(pairs.images, pairs.masks, pairs.problems)
        problems = unpaired(self._images, self._masks)
        problems += [] if layout.parent is None else _outside(layout.parent)
        usable = sorted(self._images.keys() & self._masks.keys())
        prefixes = {split: f"{chosen[split][0]}/" for split in SPLITS if split in chosen}
        train, val = (
            tuple(i for i in usable if split in prefixes and i.startswith(prefixes[split])) for split in SPLITS
        )
        by = "folders " + " and ".join(folders[0].relative_to(root).as_posix() for _, folders in chosen.values())
        splits = Splits(train, val, by, problems)
        return check_splits(settings, root, splits, chosen), note

    def _add(self, images: dict[str, Path], masks: dict[str, Path], problems: list[Problem]) -> None:
        self._images |= images
        self._masks |= masks
        self._problems += problems


def _outside(folder: Path) -> list[Problem]:
    """Pictures next to the folders of the splits."""
    pictures = (path for path in folder.iterdir() if path.is_file() and path.suffix.lower() in PICTURE_SUFFIXES)
    return [
        Problem(str(path), "in no split", "it is next to the folders train and val, not in one of them")
        for path in pictures
    ]


def _read_as_rgb(path: Path) -> Array:
    """The colours of a mask, through its palette if it has one."""
    with open_picture(path) as picture:
        return np.asarray(picture if picture.mode == "RGB" else Image.Image.convert(picture, "RGB"))


def _read_labelmap(settings: Settings, file: Path) -> Settings:
    """Classes and colours of a labelmap.txt: lines such as "cat:128,0,0::"."""
    values: dict[str, str] = {}
    for number, line in enumerate(read_text(file).splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        name, _, rest = line.partition(":")
        numbers = rest.split(":")[0].split(",")
        try:
            red, green, blue = (int(number) for number in numbers)
            colour = f"#{bytes((red, green, blue)).hex()}"
        except ValueError:
            raise DataError(f"{file}, line {number}: {line!r} is not NAME:RED,GREEN,BLUE::. Correct it.") from None
        if colour in values:
            raise DataError(
                f"{file}, line {number}: {name.strip()!r} has the same colour as {values[colour]!r}. Change one."
            )
        values[colour] = IGNORE if name.strip().lower() in IGNORED else name.strip()
    if len(values) < 2:
        raise DataError(f"{file}: {quantity(len(values), 'colour')}; at least 2 are needed.")
    return replace(settings, file=file, values=values)


def _read_classes_csv(settings: Settings, root: Path) -> Settings:
    """Classes of Roboflow's _classes.csv, in the folder of the training images: "Pixel Value, Class"."""
    file = next((path for path in (root / "train/_classes.csv", root / "_classes.csv") if path.is_file()), None)
    if file is None:
        return settings
    values: dict[str, str] = {}
    for number, row in enumerate(csv.reader(read_text(file).splitlines()), 1):
        fields = [field.strip() for field in row]
        if len(fields) >= 2 and fields[0].isdigit() and int(fields[0]) < 65536:
            values[str(int(fields[0]))] = fields[1]
        elif number > 1 and fields:
            raise DataError(f"{file}, line {number}: {','.join(row)!r} is not VALUE, CLASS. Correct it.")
    return replace(settings, file=file, values=values)
