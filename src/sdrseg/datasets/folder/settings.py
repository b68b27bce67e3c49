"""The settings of own data, dataset.toml or classes.txt, with checks of every key."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sdrseg.datasets.source import MAX_CLASSES
from sdrseg.errors import DataError, nearest, quantity
from sdrseg.labels import VOID

REST = "rest"
"""All values that are not in the table of values."""
FORMATS = ("masks", "coco", "panoptic", "yolo", "labelme")


@dataclass(frozen=True)
class Settings:
    """The contents of dataset.toml or classes.txt; `classes` is empty if they name none."""

    file: Path
    classes: tuple[str, ...] = ()
    background: str | int | None = None  # a name, "none", or a value in the masks; None: not set
    values: dict[str, str] = field(default_factory=dict)  # "127", "10-19", "#ff8000" or "rest": the name of a class
    ignore: int = VOID
    colours: tuple[str, ...] = ()  # "#rrggbb" in lower case
    ignore_colour: str = ""
    score_background: bool = True
    format: str = ""
    score: str = ""  # "val" or "test": the split that is scored
    val: float = 0.2
    seed: int = 0


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_texts(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


_KEYS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "classes": ('a list of names like ["background", "cat"]', _is_texts),
    "background": (
        'the name of a class, "none", or a value in the masks',
        lambda v: isinstance(v, str) or _is_whole(v),
    ),
    "values": (
        'a table like {127 = "fire", 254 = "smoke"}',
        lambda v: isinstance(v, dict) and _is_texts([*v.values()]),
    ),
    "ignore": ("a whole number from 0 to 65535", lambda v: _is_whole(v) and 0 <= v <= 65535),
    "colours": ('a list of colours like ["#000000", "#ff8000"]', _is_texts),
    "ignore_colour": ('a colour like "#ffffff"', lambda v: isinstance(v, str)),
    "score_background": ("true or false", lambda v: isinstance(v, bool)),
    "format": (f"one of {', '.join(FORMATS)}", lambda v: v in FORMATS),
    "score": ('"val" or "test"', lambda v: v in ("val", "test")),
    "val": ("a number from 0 to below 1", lambda v: (_is_whole(v) or isinstance(v, float)) and 0 <= v < 1),
    "seed": ("a whole number", _is_whole),
}
_KEYS_FOR_NAMED = ("background", "values", "score_background", "format", "score", "val", "seed")
"""Keys that may be set if the classes come from the annotations."""


def read_settings(root: Path, named: str = "", also: tuple[str, ...] = ()) -> Settings:
    """Read dataset.toml or classes.txt.

    `named`: where the classes come from, if not from these files; the keys of `values` are then names. `also`: keys
    that may be set even then.
    """
    toml, names = root / "dataset.toml", root / "classes.txt"
    if toml.is_file() and names.is_file():
        raise DataError(f"{root}: found both dataset.toml and classes.txt. Keep one of them.")
    if names.is_file():
        if named and "classes" not in also:
            raise DataError(f"{names}: the classes come from the {named}. Remove this file.")
        return Settings(names, _names_in_lines(names))
    if not toml.is_file():
        return Settings(toml)
    try:
        values = tomllib.loads(read_text(toml))
    except tomllib.TOMLDecodeError as error:
        raise DataError(f"{toml}: not valid TOML: {error}. Correct it.") from error
    for key, value in values.items():
        if key not in _KEYS:
            raise DataError(f"{toml}: unknown key {key!r}{nearest(key, list(_KEYS))}")
        if named and key not in _KEYS_FOR_NAMED + also:
            valid = ", ".join(_KEYS_FOR_NAMED + also)
            raise DataError(f"{toml}: {key} cannot be set here: classes come from the {named}. Valid keys: {valid}.")
        wanted, is_valid = _KEYS[key]
        if not is_valid(value):
            raise DataError(f"{toml}: {key} = {value!r} must be {wanted}.")
    if "classes" in values:
        values["classes"] = check_classes(toml, values["classes"])
    values["colours"] = tuple(_check_colour(toml, colour) for colour in values.get("colours", ()))
    if "ignore_colour" in values:
        values["ignore_colour"] = _check_colour(toml, values["ignore_colour"])
    values["values"] = {
        key if named else _check_value(toml, key): name.strip() for key, name in values.get("values", {}).items()
    }
    settings = Settings(toml, **values)
    _check_coding(settings)
    return settings


def read_format(root: Path) -> str:
    """The format that dataset.toml names, if any; `read_settings` checks the other keys."""
    try:
        format = tomllib.loads(read_text(root / "dataset.toml")).get("format", "")
    except (DataError, tomllib.TOMLDecodeError):
        return ""
    return format if format in FORMATS else ""


def read_text(path: Path) -> str:
    """The contents of a text file, without a byte order mark."""
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
            raise DataError(
                f"{path}: line {number} is blank. Each line names a class: remove the line or name the class."
            )
    return check_classes(path, lines, "line")


def check_classes(file: Path, classes: Iterable[str], counted: str = "entry") -> tuple[str, ...]:
    """The class names without surrounding blanks; errors name the file and count its entries (or lines) from 1."""
    names = tuple(name.strip() for name in classes)
    for number, name in enumerate(names, 1):
        if not name:
            raise DataError(f"{file}: {counted} {number}: the name of the class is empty. Add one.")
        if name in names[: number - 1]:
            first = f"{counted} {names.index(name) + 1} and {counted} {number}"
            raise DataError(f"{file}: {first} both name the class {name!r}. Rename one.")
    if not names:
        raise DataError(f"{file}: no classes. Name at least one, and the background if there is one.")
    if len(names) > MAX_CLASSES:
        raise DataError(f"{file}: {len(names)} classes; at most {MAX_CLASSES} fit. Merge or remove some.")
    return names


def _check_colour(file: Path, colour: str) -> str:
    if not re.fullmatch("#[0-9a-fA-F]{6}", colour):
        raise DataError(f'{file}: {colour!r} is not a colour. Write it as "#rrggbb", e.g. "#ff8000".')
    return colour.lower()


def _check_value(file: Path, key: str) -> str:
    """A key of the table of values, normalised."""
    if key.startswith("#"):
        return _check_colour(file, key)
    span = re.fullmatch(r"(\d{1,5})(?:-(\d{1,5}))?", key)
    if key != REST and not (span and int(span[1]) <= int(span[2] or span[1]) <= 65535):
        raise DataError(
            f'{file}: values: {key!r} is not a value. Write 127, 10-19, "#ff8000", or {REST} for all other values.'
        )
    return key


def _check_coding(settings: Settings) -> None:
    """Check that the settings fit together."""
    file, classes, colours = settings.file, settings.classes, settings.colours
    if settings.values and colours:
        raise DataError(f"{file}: values and colours are both set. Move the colours to values, or remove one of them.")
    if settings.values:
        return
    if settings.ignore < len(classes):
        name = classes[settings.ignore]
        raise DataError(f"{file}: ignore = {settings.ignore} is also the id of class {name!r}. Choose another value.")
    if classes and colours and len(colours) != len(classes):
        raise DataError(
            f"{file}: {quantity(len(colours), 'colour')} for {quantity(len(classes), 'class')}. "
            "Write one colour per class, in order."
        )
    if settings.ignore_colour and not colours:
        raise DataError(
            f"{file}: ignore_colour = {settings.ignore_colour!r} without colours. Add colours or remove it."
        )
    table = (*colours, settings.ignore_colour)
    for colour in table:
        if table.count(colour) > 1:
            raise DataError(f"{file}: the colour {colour!r} occurs twice. Each class (and ignore) needs its own.")
