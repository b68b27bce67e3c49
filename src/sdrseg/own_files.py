"""Runs custom Python files, once per process, to register what they define."""

from __future__ import annotations

import hashlib
import importlib.util
import sys
import traceback
from pathlib import Path
from typing import Any

from sdrseg.errors import UsageError
from sdrseg.files import atomic_writer

OWN = "sdrseg_own_"
"""The prefix of the module names of custom files."""

_LOADED: dict[tuple[Path, int], tuple[str, list[str]]] = {}  # by file and registry: its digest, what it registered


def run_file(file: Path, known: dict[str, Any]) -> list[str]:
    """Run a file unless this process has done so; returns the names that it registers in `known`."""
    try:
        content, path = file.read_bytes(), file.resolve()
    except OSError as error:
        raise UsageError(f"{file}: cannot be read ({error.strerror}).") from error
    digest, key = hashlib.sha256(content).hexdigest(), (path, id(known))
    if key in _LOADED and _LOADED[key][0] == digest and all(name in known for name in _LOADED[key][1]):
        return _LOADED[key][1]
    for name in _LOADED.pop(key, ("", []))[1]:  # the file has changed since
        known.pop(name, None)
    before = set(known)
    module_name = f"{OWN}{hashlib.sha256(str(path).encode()).hexdigest()[:12]}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None:
        raise UsageError(f"{file}: not a Python file; its name must end in .py.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        for name in set(known) - before:
            del known[name]
        if isinstance(error, UsageError):
            raise UsageError(f"{file}: {error}") from error
        if not isinstance(error, Exception):
            raise
        raise UsageError(_message(file, path, error)) from error
    names = [name for name in known if name not in before]
    _LOADED[key] = (digest, names)
    return names


def keep_copy(kind: type, copy: Path) -> None:
    """Copy the custom file that defines a class, for reference; the copy is never executed."""
    if not kind.__module__.startswith(OWN) or copy.exists():
        return
    file = Path(str(sys.modules[kind.__module__].__file__))
    try:
        content = file.read_bytes()
    except OSError as error:
        raise UsageError(f"{file}: cannot be read ({error.strerror}).") from error
    if hashlib.sha256(content).hexdigest() not in [d for (path, _), (d, _) in _LOADED.items() if path == file]:
        raise UsageError(f"{file}: changed while the run was starting. Run the command again.")
    with atomic_writer(copy) as out:
        out.write(content)


def _message(file: Path, path: Path, error: Exception) -> str:
    line: int | str | None = next(
        (f.lineno for f in reversed(traceback.extract_tb(error.__traceback__)) if f.filename == str(path)), "?"
    )
    reason = str(error)
    if isinstance(error, SyntaxError) and error.filename == str(path):
        line, reason = error.lineno or "?", error.msg
    return f"{file}, line {line}: {type(error).__name__}: {reason}"
