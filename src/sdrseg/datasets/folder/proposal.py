"""Proposes a dataset.toml for masks without a class list, from the values they contain."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import numpy as np

from sdrseg.datasets.folder.coding import pack
from sdrseg.datasets.pictures import read_label
from sdrseg.datasets.source import MAX_CLASSES
from sdrseg.errors import DataError, some
from sdrseg.labels import VOID

MASKS = 200
"""The number of masks that are read, evenly spaced in the list."""
BLUR = 20
"""JPEG changes most values by less than this."""
FREQUENT = 0.002
"""The share of pixels from which a value in a JPEG file counts as a class."""


def ask_for_classes(file: Path, masks: Sequence[Path]) -> str:
    """The message for a folder without a class list: what to save as dataset.toml."""
    values: Counter[int] = Counter()  # pixels by value
    colours: set[int] = set()
    blurred = any(path.suffix.lower() in (".jpg", ".jpeg") for path in masks)
    chosen = sorted({round(index) for index in np.linspace(0, len(masks) - 1, MASKS)}) if masks else []
    for path in (masks[index] for index in chosen):
        with suppress(DataError):  # the audit names unreadable masks; here the others are enough
            stored = read_label(path)
            if stored.ndim == 3 and (stored == stored[:, :, :1]).all():
                stored = stored[:, :, 0]
            if stored.ndim == 3:
                colours.update(np.unique(pack(stored)).tolist())
            else:
                found, counts = np.unique(stored, return_counts=True)
                values.update(dict(zip(found.tolist(), counts.tolist(), strict=True)))
    peaks = _peaks(values)
    if blurred and (colours or len(peaks) < 2):
        return f"{file.parent}: the masks are JPEG files, in which values and colours change. Save them as PNG files."
    if colours:
        names = [f"#{colour:06x}" for colour in sorted(colours | {value * 0x010101 for value in values})]
        contents, lines = f"colours {some(names)}", _table([f'"{name}"' for name in names[:MAX_CLASSES]])
    else:
        known = sorted(value for value in values if value >= 0)
        contents, lines = f"values {some(known)}", _ranges(peaks) if blurred else _for_values(known)
    read = "" if len(masks) <= MASKS else f" (in {len(chosen)} of {len(masks)} masks)"
    return (
        f"{file.parent}: no class list; the masks contain the {contents}{read}. Save this as {file}, with your names "
        f'(background = "none" if no class is the background):\n\n{lines}\n'
    )


def _for_values(values: list[int]) -> str:
    """A list of classes if the values are consecutive, otherwise a table of values."""
    classes = [value for value in values if value != VOID]
    largest = max(classes, default=0)
    if largest < MAX_CLASSES and 2 * len(classes) > largest and values != [0, VOID]:
        names = ", ".join(
            f'"{name}"' for name in ("background", *(f"class {i}" for i in range(1, max(largest, 1) + 1)))
        )
        gaps = [value for value in range(largest) if value not in classes]
        missing = f"; not seen in the masks: {some(gaps)}" if gaps else ""
        return f"classes = [{names}]  # the position is the value{missing}\nignore = 255  # neither learned nor scored"
    return _table([str(value) for value in values[:MAX_CLASSES]])


def _peaks(pixels: Counter[int]) -> list[int]:
    """The values of the classes before JPEG changed some."""
    peaks: list[int] = []
    for value, count in pixels.most_common():
        if count >= FREQUENT * pixels.total() and all(abs(value - peak) > BLUR for peak in peaks):
            peaks.append(value)
    return sorted(peaks)


def _ranges(peaks: list[int]) -> str:
    """Ranges around these values that end halfway between them."""
    ends = [(low + high) // 2 for low, high in pairwise(peaks)]
    keys = [f"{low}-{high}" for low, high in zip([0, *(end + 1 for end in ends)], [*ends, 255], strict=True)]
    return f"# JPEG changes values, so these are ranges. Better: save the masks as PNG files.\n{_table(keys)}"


def _table(keys: list[str]) -> str:
    """One line per value or colour; the largest value, next to others, usually means unlabelled."""
    names = ["background", *(f"class {number}" for number in range(1, len(keys) + 1))]
    if len(keys) > 2 and keys[-1] in (str(VOID), "65535"):
        names[len(keys) - 1] = "ignore"
    return "\n".join(["[values]", *(f'{key} = "{name}"' for key, name in zip(keys, names, strict=False))])
