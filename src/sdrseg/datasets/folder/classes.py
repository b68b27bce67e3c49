"""Which class is the background.

Class 0 of every data set is the background. If there is none, we add a class "other" for pixels that are not labelled
yet; it is never scored.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sdrseg.datasets.folder.settings import Settings, check_classes
from sdrseg.errors import DataError, nearest
from sdrseg.labels import VOID

NONE = "none"
IGNORE = "ignore"
OTHER = ("other", "not labelled yet", "no class")
"""The name of class 0 if there is no background: the first of these that is not a class."""


@dataclass(frozen=True)
class Classes:
    """The classes of a data set, class 0 first, and a note on assumptions."""

    names: tuple[str, ...]
    has_background: bool
    note: str = ""

    def label(self, name: str) -> int:
        return self.names.index(name)


def looks_like_background(name: str) -> bool:
    """Whether a class has one of the usual names of the background."""
    return re.sub(r"[\W_]", "", name.lower()) in ("background", "bg", "unlabelled", "unlabeled")


def arrange(settings: Settings, names: Sequence[str], implied: bool = False, file: Path | None = None) -> Classes:
    """Put the background first. `implied`: pixels outside all polygons are background, named or not.

    `file`: where the names come from, if not from the settings.
    """
    background, file = settings.background, file or settings.file
    check_classes(file, names)
    if isinstance(background, int):
        chosen = names[background] if background < len(names) and not settings.values else "background"
        return _with_background(file, names, chosen)
    if background is not None:
        if background in names:
            return _with_background(file, names, background)
        if background == NONE:
            return _without(file, names)
        raise DataError(f"{file}: background = {background!r} is not a class{nearest(background, [*names, NONE])}")
    background_name = next((name for name in names if looks_like_background(name)), None)
    if background_name is not None or implied:
        return _with_background(file, names, background_name or "background")
    note = (
        f"Class 0, {names[0]!r}, is not called background, so we assume that there is none and treat {names[0]!r} like "
        f'any other class. Confirm this with `background = "none"` in {file}; if it is the background, write '
        f"`background = {_quoted(names[0])}`."
    )
    return _without(file, names, note)


def arrange_named(
    settings: Settings, names: Sequence[str], file: Path, implied: bool = True
) -> tuple[Classes, dict[str, int]]:
    """The classes of annotations that use names, and the label of each name after applying `values`."""
    check_classes(file, names)
    for name in settings.values:
        if name not in names:
            raise DataError(f"{settings.file}: values: {name!r} is not a class of {file}{nearest(name, list(names))}")
    target_of = {name: settings.values.get(name, name) for name in names}
    kept = [name for name in dict.fromkeys(target_of.values()) if name != IGNORE or IGNORE in names]
    classes = arrange(settings, kept, implied, file)
    return classes, {name: classes.label(target) if target in kept else VOID for name, target in target_of.items()}


def _with_background(file: Path, names: Sequence[str], background: str) -> Classes:
    ordered = (background, *(name for name in names if name != background))
    if len(ordered) < 2:
        raise DataError(f"{file}: the background is the only class. Name at least one more.")
    moved = f"The class {background!r} is the background and becomes class 0." if background in names[1:] else ""
    return Classes(check_classes(file, ordered), True, moved)


def _without(file: Path, names: Sequence[str], note: str = "") -> Classes:
    other = next(name for name in OTHER if name not in names)
    added = f"There is no background: class 0, {other!r}, is for pixels that are not labelled yet and is not scored."
    return Classes(check_classes(file, (other, *names)), False, f"{note} {added}".strip())


def _quoted(name: str) -> str:
    return '"' + name.replace("\\", "\\\\").replace('"', '\\"') + '"'
