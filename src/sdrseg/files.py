"""The one place that writes files: whole or not at all."""

from __future__ import annotations

import json
import os
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any

from sdrseg.errors import SdrsegError


@contextmanager
def atomic_writer(path: Path) -> Iterator[IO[bytes]]:
    """Open a temporary file next to `path`; if the block succeeds, it is synced and renamed to `path`.

    If the block fails, or the machine does, `path` holds what it held before.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        opened = temporary.open("xb")
    except OSError as error:
        raise SdrsegError(f"{path}: cannot be written ({error.strerror}). Choose a folder you can write to.") from error
    try:
        with opened as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError):
            why = error.strerror or error
            raise SdrsegError(f"{path}: not written ({why}); what was there before is intact.") from error
        raise
    _sync_folder(path.parent)


def write_json(path: Path, value: Any) -> None:
    """Write `value` as readable JSON, atomically."""
    with atomic_writer(path) as file:
        file.write((json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode())


def sweep(folder: Path) -> None:
    """Remove the temporary files that a process left directly in `folder` because it was killed while it wrote."""
    for file in folder.glob(".*.tmp"):
        if re.fullmatch(r"\..+\.[0-9a-f]{8}\.tmp", file.name) and file.is_file() and not file.is_symlink():
            file.unlink(missing_ok=True)


def plain_name(value: object, origin: Path) -> str:
    """A name that was read from the file `origin`, before it becomes part of a path. It has one form."""
    if not (isinstance(value, str) and re.fullmatch(r"\w[\w-]*(\.[\w-]+)*", value, re.ASCII) and len(value) <= 100):
        raise SdrsegError(
            f"{origin}: {value!r} is not a name that sdrseg writes (letters, digits, - and _, single dots between). "
            f"Do not use this file; get a copy from where it was written."
        )
    return value


def require_writable(place: Path, advice: str, *, folder: bool = False) -> None:
    """Stop, before any work is done, if `place`, a file or a folder for files, cannot be written. Nothing is made."""
    where = place.absolute() if folder else place.absolute().parent
    try:
        with suppress(FileNotFoundError):
            os.lstat(place)  # a name may be too long, for one
        while not os.path.lexists(where):
            where = where.parent
        TemporaryFile(dir=where).close()
    except OSError as error:
        raise SdrsegError(f"{place}: cannot be written ({error.strerror}). {advice}") from error


def cache_folder() -> Path:
    """Where computed facts about data sets are kept: $SDRSEG_CACHE, else the user's cache folder."""
    if own := os.environ.get("SDRSEG_CACHE"):
        return Path(own)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "sdrseg"


def _sync_folder(folder: Path) -> None:
    """Make a new name last, where the file system can: the file itself is written and synced already."""
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
