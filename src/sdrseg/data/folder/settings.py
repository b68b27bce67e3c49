"""What the owner says of the data: dataset.toml or classes.txt, and the suggestion made where there is neither."""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sdrseg.data.source import MAX_CLASSES, VOID, read_label
from sdrseg.errors import DataError

TEMPLATE_MASKS = 20
"""So many masks are read to suggest a class list."""


@dataclass(frozen=True)
class Settings:
    """What dataset.toml or classes.txt says; `classes` is empty where they do not say it."""

    file: Path
    classes: tuple[str, ...] = ()
    ignore: int = VOID
    colours: tuple[str, ...] = ()  # "#rrggbb" in lower case
    ignore_colour: str = ""
    score_background: bool = True
    val: float = 0.2
    seed: int = 0


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_texts(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


_KEYS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "classes": ('a list of names like ["background", "cat"]', _is_texts),
    "ignore": ("a whole number from 0 to 65535", lambda v: _is_whole(v) and 0 <= v <= 65535),
    "colours": ('a list of colours like ["#000000", "#ff8000"]', _is_texts),
    "ignore_colour": ('a colour like "#ffffff"', lambda v: isinstance(v, str)),
    "score_background": ("true or false", lambda v: isinstance(v, bool)),
    "val": ("a number from 0 to below 1", lambda v: (_is_whole(v) or isinstance(v, float)) and 0 <= v < 1),
    "seed": ("a whole number", _is_whole),
}
_KEYS_FOR_COCO = ("score_background", "val", "seed")


def read_settings(root: Path, coco: bool = False) -> Settings:
    """Read dataset.toml or classes.txt; with `coco` the classes come from elsewhere and must not be there."""
    toml, names = root / "dataset.toml", root / "classes.txt"
    if toml.is_file() and names.is_file():
        raise DataError(f"{root}: both dataset.toml and classes.txt are there. Keep one of them.")
    if names.is_file():
        if coco:
            raise DataError(f"{names}: the classes come from the COCO JSON. Remove this file.")
        return Settings(names, _names_in_lines(names))
    if not toml.is_file():
        return Settings(toml)
    try:
        given = tomllib.loads(read_text(toml))
    except tomllib.TOMLDecodeError as error:
        raise DataError(f"{toml}: not valid TOML: {error}. Correct that place.") from error
    for key, value in given.items():
        if key not in _KEYS:
            nearest = difflib.get_close_matches(key, _KEYS, n=1, cutoff=0)[0]
            raise DataError(f"{toml}: unknown key {key!r}. Did you mean {nearest!r}? Valid keys: {', '.join(_KEYS)}.")
        if coco and key not in _KEYS_FOR_COCO:
            valid = ", ".join(_KEYS_FOR_COCO)
            raise DataError(f"{toml}: {key} cannot be set here: classes come from the COCO JSON. Valid keys: {valid}.")
        wanted, is_right = _KEYS[key]
        if not is_right(value):
            raise DataError(f"{toml}: {key} = {value!r} must be {wanted}.")
    if "classes" in given:
        given["classes"] = check_classes(toml, given["classes"])
    given["colours"] = tuple(_check_colour(toml, colour) for colour in given.get("colours", ()))
    if "ignore_colour" in given:
        given["ignore_colour"] = _check_colour(toml, given["ignore_colour"])
    settings = Settings(toml, **given)
    _check_coding(settings)
    return settings


def read_text(path: Path) -> str:
    """A text file; the byte order mark that some editors put first is taken off."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 text (byte {error.start}). Save it as UTF-8.") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}). Check the file and its permissions.") from error


def _names_in_lines(path: Path) -> tuple[str, ...]:
    lines = read_text(path).rstrip().splitlines()
    for number, line in enumerate(lines, 1):
        if not line.strip():
            raise DataError(f"{path}: line {number} is blank. Each line names a class: remove it or name the class.")
    return check_classes(path, lines)


def check_classes(file: Path, classes: Iterable[str]) -> tuple[str, ...]:
    """The class names without outer blanks; errors name the file."""
    names = tuple(name.strip() for name in classes)
    for position, name in enumerate(names):
        if not name:
            raise DataError(f"{file}: the class at position {position} has an empty name. Give it one.")
        if name in names[:position]:
            raise DataError(f"{file}: class {name!r} is there twice (positions {names.index(name)} and {position}).")
    if len(names) < 2:
        raise DataError(f"{file}: {len(names)} class(es) {list(names)}; at least 2 are needed, the background first.")
    if len(names) > MAX_CLASSES:
        raise DataError(f"{file}: {len(names)} classes; at most {MAX_CLASSES} fit. Merge or remove some.")
    return names


def _check_colour(file: Path, colour: str) -> str:
    if not re.fullmatch("#[0-9a-fA-F]{6}", colour):
        raise DataError(f'{file}: {colour!r} is not a colour. Write it as "#rrggbb", e.g. "#ff8000".')
    return colour.lower()


def _check_coding(settings: Settings) -> None:
    """What holds between the settings."""
    file, classes, colours = settings.file, settings.classes, settings.colours
    if settings.ignore < len(classes):
        name = classes[settings.ignore]
        raise DataError(f"{file}: ignore = {settings.ignore} is also the id of class {name!r}. Choose another value.")
    if classes and colours and len(colours) != len(classes):
        raise DataError(
            f"{file}: {len(colours)} colours for {len(classes)} classes. Give one colour per class, in order."
        )
    if settings.ignore_colour and not colours:
        raise DataError(
            f"{file}: ignore_colour = {settings.ignore_colour!r} without colours. Add colours or remove it."
        )
    table = (*colours, settings.ignore_colour)
    for colour in table:
        if table.count(colour) > 1:
            raise DataError(f"{file}: the colour {colour!r} is there twice. Each class (and ignore) needs its own.")


def ask_for_classes(file: Path, masks: Iterable[Path]) -> str:
    """The message for a folder without class list: what to save, made from what the first masks hold."""
    values: set[int] = set()
    colours: set[int] = set()
    for path in list(masks)[:TEMPLATE_MASKS]:
        with suppress(DataError):  # the audit names unreadable masks; here the others are enough
            stored = read_label(path)
            found = colours if stored.ndim == 3 else values
            found.update(np.unique(pack(stored) if stored.ndim == 3 else stored).tolist())
    if colours:
        return _template_for_colours(file, sorted(colours))
    return _template_for_values(file, sorted(values))


def _template_for_values(file: Path, values: list[int]) -> str:
    above = [value for value in values if value >= MAX_CLASSES]
    ignore = VOID if VOID in above or not above else above[-1]
    count = max([value for value in values if 0 <= value < MAX_CLASSES], default=0) + 1
    held = f"the masks hold the values {_some(values)}"
    # Black and white masks are common, and their object would never be learned.
    binary = "; if it is your object, store it as 1 instead" if values == [0, VOID] else ""
    return _template(file, held, max(count, 2), f"ignore = {ignore}  # neither learned nor scored{binary}")


def _template_for_colours(file: Path, colours: list[int]) -> str:
    names = [f"#{colour:06x}" for colour in colours]
    if len(names) == 1:  # a table needs two
        names.append("#ffffff" if names[0] == "#000000" else "#000000")
    table = ", ".join(f'"{name}"' for name in names[:MAX_CLASSES])
    held = f"the masks hold the colours {_some(names)}"
    return _template(file, held, min(len(names), MAX_CLASSES), f"colours = [{table}]")


def _template(file: Path, held: str, classes: int, last: str) -> str:
    names = ", ".join(f'"{name}"' for name in ("background", *(f"class {i}" for i in range(1, classes))))
    return (
        f"{file.parent}: no class list; {held}. Put this into {file}, with your names:\n\n"
        f"classes = [{names}]  # in the order of the values; the first is the background\n{last}\n"
    )


def _some(things: Sequence[object]) -> str:
    return ", ".join(map(str, things[:12])) + (f", … ({len(things)} in all)" if len(things) > 12 else "")


def pack(rgb: NDArray[Any]) -> NDArray[np.uint32]:
    """(…, 3) colours as one number each, 0xrrggbb."""
    red, green, blue = (rgb[..., channel].astype(np.uint32) for channel in range(3))
    packed: NDArray[np.uint32] = red * 65536 + green * 256 + blue
    return packed


def distance(colour: int, other: int) -> int:
    """The squared distance of two packed colours."""
    return sum(((colour >> shift & 255) - (other >> shift & 255)) ** 2 for shift in (16, 8, 0))
