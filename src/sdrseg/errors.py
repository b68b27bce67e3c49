"""The errors a user can meet. Each message names the file or value and says what to do."""

from __future__ import annotations


class SdrsegError(Exception):
    """Something that is wrong outside the program: a file, a value, a disk. The command ends with exit code 1."""

    exit_code = 1
    prefix = "error: "


class DataError(SdrsegError):
    """A data set, an image or a mask that cannot be used as it is."""


class UsageError(SdrsegError):
    """A specification, option or setting that cannot be understood. The command ends with exit code 2."""

    exit_code = 2


def first_line(error: Exception) -> str:
    """What another library's error says, in one line; its kind where it says nothing."""
    return next(iter(str(error).splitlines()), type(error).__name__)
