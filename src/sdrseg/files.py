"""All files are written here: completely or not at all."""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any

from sdrseg.errors import SdrsegError


@contextmanager
def atomic_writer(path: Path) -> Iterator[IO[bytes]]:
    """Open a temporary file next to `path`; if the block succeeds, it is synced and renamed to `path`.

    If the block or the machine fails, `path` keeps its earlier content.
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
            raise SdrsegError(f"{path}: not written ({why}); the earlier content is intact.") from error
        raise
    _sync_folder(path.parent)


def write_json(path: Path, value: Any) -> None:
    """Write `value` as readable JSON, atomically."""
    with atomic_writer(path) as file:
        file.write((json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode())


def link_or_copy(source: Path, target: Path) -> None:
    """A hard link to a file, or a copy of it. Files of a finished step are never modified, so links are safe."""
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
    try:
        try:
            os.link(source.resolve(), temporary)
        except OSError:  # another disk, or a file system without links
            shutil.copy2(source, temporary)
        temporary.replace(target)
    except OSError as error:
        raise SdrsegError(
            f"{target}: cannot be written ({error.strerror}). Choose another folder with --out."
        ) from error


def sweep(folder: Path) -> None:
    """Remove temporary files that a killed process left directly in `folder`."""
    for file in folder.glob(".*.tmp"):
        if re.fullmatch(r"\..+\.[0-9a-f]{8}\.tmp", file.name) and file.is_file() and not file.is_symlink():
            file.unlink(missing_ok=True)


def plain_name(value: object, origin: Path) -> str:
    """A name that was read from the file `origin`, before it becomes part of a path."""
    if not (isinstance(value, str) and re.fullmatch(r"\w[\w-]*(\.[\w-]+)*", value, re.ASCII) and len(value) <= 100):
        raise SdrsegError(
            f"{origin}: {value!r} is not a name that sdrseg writes (letters, digits, - and _, single dots between). "
            f"Do not use this file; get a copy from where it was written."
        )
    return value


def require_writable(path: Path, advice: str, *, folder: bool = False) -> None:
    """Raise an error if `path`, a file or (`folder`) a folder for files, cannot be written. Nothing is created."""
    parent = path.absolute() if folder else path.absolute().parent
    try:
        with suppress(FileNotFoundError):
            os.lstat(path)  # fails for a name that is too long
        while not os.path.lexists(parent):
            parent = parent.parent
        TemporaryFile(dir=parent).close()
    except OSError as error:
        raise SdrsegError(f"{path}: cannot be written ({error.strerror}). {advice}") from error


def cache_folder() -> Path:
    """The folder of class indexes, bases and other computed files: $SDRSEG_CACHE, or in the user's cache folder."""
    if own := os.environ.get("SDRSEG_CACHE"):
        return Path(own)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "sdrseg"


def _sync_folder(folder: Path) -> None:
    """Sync the entry of a new file, if the file system supports it; its content is synced already."""
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
