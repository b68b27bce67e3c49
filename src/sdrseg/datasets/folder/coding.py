"""What the values and colours of mask files mean."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sdrseg.datasets.folder.classes import IGNORE, Classes, arrange
from sdrseg.datasets.folder.settings import REST, Settings
from sdrseg.datasets.source import Array
from sdrseg.errors import DataError, nearest, quantity
from sdrseg.labels import VOID

VALUES = 65536
UNKNOWN = -1


class Coding:
    """Converts the values or colours of mask files to label maps of class ids and 255."""

    def __init__(self, settings: Settings) -> None:
        self.file = settings.file
        self.classes = _classes(settings)
        self.colours: dict[int, int] = {}
        self.values: NDArray[np.int16] | None = None
        self._has_table = bool(settings.values)
        if self._has_table:
            self._read_table(settings)
        elif settings.colours:
            pairs = zip(settings.colours, settings.classes, strict=True)
            labels = {colour: self._label(name) for colour, name in pairs}
            labels |= {settings.ignore_colour: VOID} if settings.ignore_colour else {}
            self.colours = {int(colour[1:], 16): label for colour, label in sorted(labels.items())}
        else:
            self.values = self._positions(settings)
        self._as_stored = self.values is not None and _is_identity(self.values, len(self.classes.names))

    def __str__(self) -> str:
        """Everything that determines how masks are read, as text."""
        values = {} if self.values is None else {int(v): int(self.values[v]) for v in np.flatnonzero(self.values >= 0)}
        return f"folder: {len(self.classes.names)} classes, values {values}, colours {self.colours}"

    def decode(self, stored: NDArray[Any], path: Path) -> Array:
        """The label map of a mask file."""
        if stored.ndim == 3 and self.values is not None and not self.colours:
            grey = stored[:, :, 0]
            if (stored == grey[:, :, None]).all():  # grey, saved as RGB
                stored = grey
        if stored.ndim == 3:
            return self._from_colours(stored, path)
        if self.values is None:
            # Palette indices and grey levels cannot be matched with the colour table.
            raise DataError(
                f"{path}: contains values, but {self.file} has a colour table (colours). "
                "Save this mask as RGB, or remove colours if all masks contain class ids."
            )
        return self._from_values(stored, path)

    def _label(self, name: str) -> int:
        if name in self.classes.names:
            return self.classes.label(name)
        if name == IGNORE:
            return VOID
        if name == "background" and self.classes.has_background:
            return 0
        known = [*self.classes.names[0 if self.classes.has_background else 1 :], IGNORE]
        raise DataError(f"{self.file}: values: {name!r} is not a class{nearest(name, known)}")

    def _positions(self, settings: Settings) -> NDArray[np.int16]:
        """Without a table, the value of a class is its position in the list."""
        values = np.full(VALUES, UNKNOWN, np.int16)
        values[VOID] = VOID
        for value, name in enumerate(settings.classes):
            values[value] = self.classes.label(name)
        if isinstance(settings.background, int):
            values[settings.background] = 0
        values[settings.ignore] = VOID
        return values

    def _read_table(self, settings: Settings) -> None:
        rest = settings.values.get(REST)
        values = np.full(VALUES, UNKNOWN, np.int16)
        if rest is not None:
            values[:] = self._label(rest)
        values[VOID] = values[settings.ignore] = VOID
        if isinstance(settings.background, int):
            values[settings.background] = 0
        elif self.classes.has_background and rest is None:
            values[0] = 0
        assigned = np.zeros(VALUES, bool)
        for key, name in settings.values.items():
            label = self._label(name)
            if key.startswith("#"):
                self.colours[int(key[1:], 16)] = label
            elif key != REST:
                first, _, last = key.partition("-")
                span = slice(int(first), int(last or first) + 1)
                if assigned[span].any():
                    twice = int(np.flatnonzero(assigned[span])[0]) + span.start
                    raise DataError(
                        f"{self.file}: values: the value {twice} occurs twice. Each value needs exactly one class."
                    )
                assigned[span], values[span] = True, label
        self.colours = dict(sorted(self.colours.items()))
        self.values = values if assigned.any() or not self.colours else None

    def _from_values(self, stored: NDArray[Any], path: Path) -> Array:
        assert self.values is not None
        if self._as_stored and stored.dtype == np.uint8:  # unknown values stay: the audit counts them
            labels = self.values[:256].copy()
            labels[labels < 0] = np.flatnonzero(labels < 0)
            table: Array = labels.astype(np.uint8)
            return np.take(table, stored)
        inside = (stored >= 0) & (stored < VALUES)
        labels = self.values[np.where(inside, stored, 0)]
        unknown = (labels < 0) | ~inside
        if unknown.any():
            found, counts = np.unique(stored[unknown], return_counts=True)
            raise DataError(self._unknown_value(int(found[0]), int(counts[0]), path))
        return labels.astype(np.uint8)

    def _unknown_value(self, value: int, pixels: int, path: Path) -> str:
        assert self.values is not None
        by_class = {n: np.flatnonzero(self.values == n).tolist() for n in np.unique(self.values) if n not in (-1, VOID)}
        ignored = np.flatnonzero(self.values == VOID).tolist()
        advice = f"the classes or ignore in {self.file}."
        if path.suffix.lower() in (".jpg", ".jpeg"):
            advice = (
                f'save masks as PNG files, because JPEG changes values. Ranges in {self.file} allow for that: "0-127".'
            )
        elif self._has_table:
            advice = (
                f'add it to the table `values` of {self.file}: {value} = "…", with a class, "background" or "{IGNORE}".'
            )
        means = [f"{_spans(known)} ({self.classes.names[n]})" for n, known in by_class.items()]
        many = quantity(pixels, "pixel")
        return (
            f"{path}: the value {value} ({many}) is neither one of the classes "
            f"({', '.join(means[:8])}{f', … {len(means)} in all' if len(means) > 8 else ''}) "
            f"nor ignored{f' ({_spans(ignored)})' if ignored else ''}. Correct the mask, or {advice}"
        )

    def _from_colours(self, rgb: NDArray[Any], path: Path) -> Array:
        packed = pack(rgb)
        if not self.colours:
            found = ", ".join(f"#{c:06x}" for c in np.unique(packed)[:5])
            toml = self.file.with_name("dataset.toml")
            raise DataError(
                f"{path}: a colour mask (with {found}, …), but {self.file} has no colour table. "
                f"Add `colours` to {toml}, one per class, or save the masks as 8-bit PNG of class ids."
            )
        colours = np.array(list(self.colours), np.uint32)
        labels = np.array(list(self.colours.values()), np.uint8)
        index = np.minimum(np.searchsorted(colours, packed), len(colours) - 1)
        unknown = packed[colours[index] != packed]
        if unknown.size:
            raise DataError(self._unknown_colour(unknown, path))
        return labels[index]

    def _unknown_colour(self, unknown: NDArray[np.uint32], path: Path) -> str:
        values, counts = np.unique(unknown, return_counts=True)
        most = int(values[np.argmax(counts)])
        near = min(self.colours, key=lambda colour: _distance(colour, most))
        label = self.colours[near]
        name = "the ignore colour" if label == VOID else f"class {self.classes.names[label]!r}"
        many, more = quantity(int(np.max(counts)), "pixel"), ""
        if len(values) > 1:
            more = f" ({quantity(len(values) - 1, 'more colour')}, {quantity(unknown.size, 'pixel')} in all)"
        return (
            f"{path}: {many} of the colour #{most:06x}{more}, which is not in the colour table of "
            f"{self.file}; the nearest is #{near:06x}, {name}. Add the colour to the table or correct the mask. "
            "Mixed colours come from antialiasing, resizing or JPEG: export as PNG without these."
        )


def _classes(settings: Settings) -> Classes:
    """The class list, or the names in the table of values in their order there."""
    if settings.classes:
        return arrange(settings, settings.classes)
    names = list(dict.fromkeys(name for name in settings.values.values() if name != IGNORE))
    grey = [key.partition("-")[0] for key in settings.values if not key.startswith("#")]
    return arrange(settings, names, implied=bool(grey) and REST not in grey and "0" not in grey)


def _is_identity(values: NDArray[np.int16], classes: int) -> bool:
    known = np.flatnonzero((values >= 0) & (values != VOID))
    return known.tolist() == list(range(classes)) and bool((values[known] == known).all())


def _spans(values: list[int]) -> str:
    """For example "1..3, 7" for 1, 2, 3, 7."""
    parts: list[list[int]] = []
    for value in values:
        if parts and value == parts[-1][1] + 1:
            parts[-1][1] = value
        else:
            parts.append([value, value])
    return ", ".join(str(a) if a == b else f"{a}..{b}" for a, b in parts[:8]) + (", …" if len(parts) > 8 else "")


def pack(rgb: NDArray[Any]) -> NDArray[np.uint32]:
    """(…, 3) colours as one number each, 0xrrggbb."""
    red, green, blue = (rgb[..., channel].astype(np.uint32) for channel in range(3))
    packed: NDArray[np.uint32] = red * 65536 + green * 256 + blue
    return packed


def _distance(colour: int, other: int) -> int:
    """The squared distance of two packed colours."""
    return sum(((colour >> shift & 255) - (other >> shift & 255)) ** 2 for shift in (16, 8, 0))
