"""Images and mask files: class ids in 8 or 16 bits, palette indices, or colours with a table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sdrseg.data.folder.settings import ask_for_classes, distance, pack, read_settings
from sdrseg.data.folder.splits import LAYOUTS, SPLITS, Splits, check_splits, lists_or_share, present_splits, unpaired
from sdrseg.data.source import PICTURE_SUFFIXES, VOID, Array, PictureFiles, Problem, find_by_id, read_label
from sdrseg.errors import DataError

SPLIT_FOLDERS = (("images/{}", "masks/{}"), ("{}/images", "{}/masks"))


class Folder(PictureFiles):
    """Images and mask files below one folder."""

    name = "folder"

    def __init__(self, root: Path) -> None:
        super().__init__()
        self.root = root = Path(root)
        self.settings = read_settings(root)
        splits = self._by_folders()
        if splits is None:
            self._find(root / "images", root / "masks")
            splits = lists_or_share(self.settings, root, self._images, self._masks)
        if not self.settings.classes:
            raise DataError(ask_for_classes(self.settings.file, self._masks.values()))
        self._ids = {"train": splits.train, "val": splits.val}
        self.split_by = splits.by
        self._problems = sorted(self._problems + splits.problems)
        self.classes = self.settings.classes
        self.score_background = self.settings.score_background
        meaning = {colour: label for label, colour in enumerate(self.settings.colours)}
        if self.settings.ignore_colour:
            meaning[self.settings.ignore_colour] = VOID
        self._colours = {int(colour[1:], 16): label for colour, label in sorted(meaning.items())}

    def mask(self, id: str) -> Array:
        path = self._masks[id]
        stored = read_label(path)
        if stored.ndim == 3:
            return self._from_colours(stored, path)
        if self._colours:
            # The index of a palette that some program chose, or a grey level, says nothing about the colour table.
            raise DataError(
                f"{path}: holds values, but {self.settings.file} has a colour table (colours). "
                "Save this mask as RGB, or remove colours if all masks hold class ids."
            )
        if stored.dtype != np.uint8:
            self._check_wide(stored, path)
        return np.where(stored == self.settings.ignore, VOID, stored).astype(np.uint8)

    @property
    def coding(self) -> str:
        return f"folder: {len(self.classes)} classes, ignore {self.settings.ignore}, colours {self._colours}"

    def _find(self, images: Path, masks: Path, prefix: str = "") -> None:
        """List the files of one pair of folders."""
        for folder, found in ((images, self._images), (masks, self._masks)):
            if not folder.is_dir():
                there = ", ".join(sorted(p.name for p in self.root.iterdir())[:10]) if self.root.is_dir() else ""
                raise DataError(f"{folder}: no such folder; {self.root} holds: {there or 'nothing'}.\n{LAYOUTS}")
            by_id, problems = find_by_id(folder, PICTURE_SUFFIXES)
            if not by_id:
                raise DataError(f"{folder}: no picture found ({' '.join(sorted(PICTURE_SUFFIXES))}).\n{LAYOUTS}")
            found.update((prefix + id, path) for id, path in by_id.items())
            self._problems += problems

    def _by_folders(self) -> Splits | None:
        """The split made by folders named train and val, if there are any."""
        found = {
            pair: {split: any((self.root / part.format(split)).is_dir() for part in pair) for split in SPLITS}
            for pair in SPLIT_FOLDERS
        }
        pairs = [pair for pair in SPLIT_FOLDERS if any(found[pair].values())]
        if not pairs:
            return None
        if len(pairs) == 2:
            raise DataError(f"{self.root}: both images/train (or val) and train/images (or val) are there. Keep one.")
        names = {split: pairs[0][0].format(split) for split in SPLITS}
        present = present_splits(self.settings, self.root, found[pairs[0]], names)
        for split in present:
            images, masks = (self.root / part.format(split) for part in pairs[0])
            self._find(images, masks, f"{split}/")
        problems = unpaired(self._images, self._masks)
        if pairs[0] == SPLIT_FOLDERS[0]:
            outside = (p for p in (self.root / "images").iterdir() if p.suffix.lower() in PICTURE_SUFFIXES)
            problems += [Problem(str(p), "in no split", "it lies beside the folders train and val") for p in outside]
        usable = sorted(self._images.keys() & self._masks.keys())
        train, val = (tuple(id for id in usable if id.startswith(f"{split}/")) for split in SPLITS)
        by = "folders " + " and ".join(names[split] for split in present)
        return check_splits(self.root, Splits(train, val, by, problems), need_val=self.settings.val > 0)

    def _from_colours(self, rgb: NDArray[Any], path: Path) -> Array:
        packed = pack(rgb)
        if not self._colours:
            found = ", ".join(f"#{c:06x}" for c in np.unique(packed)[:5])
            toml = self.root / "dataset.toml"
            raise DataError(
                f"{path}: a colour mask (it holds {found}, …), but {self.settings.file} has no colour table. "
                f"Give {toml} `colours`, one per class, or save the masks as 8-bit PNG of class ids."
            )
        colours = np.array(list(self._colours), np.uint32)
        labels = np.array(list(self._colours.values()), np.uint8)
        place = np.minimum(np.searchsorted(colours, packed), len(colours) - 1)
        unknown = packed[colours[place] != packed]
        if unknown.size:
            raise DataError(self._unknown_colour(unknown, path))
        return labels[place]

    def _unknown_colour(self, unknown: NDArray[np.uint32], path: Path) -> str:
        values, counts = np.unique(unknown, return_counts=True)
        most = int(values[np.argmax(counts)])
        nearest = min(self._colours, key=lambda colour: distance(colour, most))
        label = self._colours[nearest]
        name = "the ignore colour" if label == VOID else f"class {self.classes[label]!r}"
        more = f" ({len(values) - 1} more colours, {unknown.size} pixels in all)" if len(values) > 1 else ""
        return (
            f"{path}: {np.max(counts)} pixels have the colour #{most:06x}{more}, which is not in the colour table of "
            f"{self.settings.file}; the nearest there is #{nearest:06x}, {name}. Add the colour to the table or "
            "correct the mask; blended colours come from smoothing, resizing or JPEG: export as PNG without them."
        )

    def _check_wide(self, stored: NDArray[Any], path: Path) -> None:
        """Values of more than 8 bits must be known: a foreign one could not be handed on in 8."""
        values, counts = np.unique(stored, return_counts=True)
        foreign = ((values < 0) | (values >= len(self.classes))) & (values != self.settings.ignore)
        if foreign.any():
            raise DataError(
                f"{path}: the value {values[foreign][0]} ({counts[foreign][0]} pixels) is neither one of the "
                f"{len(self.classes)} classes (0..{len(self.classes) - 1}) nor the ignore value "
                f"{self.settings.ignore}. Correct the mask, or the classes or ignore in {self.settings.file}."
            )
