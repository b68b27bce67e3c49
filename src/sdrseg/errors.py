"""Errors for users. Each message names the file or value and says what to do."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches


class SdrsegError(Exception):
    """A problem outside the program: a file, a value, a disk. The command ends with exit code 1."""

    exit_code = 1
    prefix = "error: "


class DataError(SdrsegError):
    """A data set, an image or a mask that cannot be used as it is."""


class UsageError(SdrsegError):
    """A specification, option or setting that cannot be understood. The command ends with exit code 2."""

    exit_code = 2


def first_line(error: BaseException) -> str:
    """The message of another library's error, in one line of at most 200 characters; its type if it has no message."""
    line = next(iter(str(error).strip().splitlines()), "").rstrip(". ") or type(error).__name__
    return line if len(line) <= 200 else f"{line[:200]}…"


def nearest(text: str, valid: Sequence[str]) -> str:
    """The end of a message about an unknown value: the closest valid one, or all of them."""
    by_lower = {known.lower(): known for known in valid}
    close = get_close_matches(text.lower(), by_lower, n=1)
    return f"; did you mean {by_lower[close[0]]!r}?" if close else f"; known are {', '.join(valid)}."


def quantity(number: int, noun: str) -> str:
    """A number and its noun, in the plural unless there is one: "1 image", "1,200 images", "2 classes"."""
    plural = "es" if noun.endswith("s") else "s"
    return f"{number:,} {noun}" + ("" if number == 1 else plural)


def some(values: Sequence[object]) -> str:
    """At most ten values, and how many there are: "1, 2, …, 10, … (80 in all)"."""
    return ", ".join(map(str, values[:10])) + (f", … ({len(values)} in all)" if len(values) > 10 else "")
