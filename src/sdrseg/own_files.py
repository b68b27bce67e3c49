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

Registry = dict[str, Any]

_BUILT_IN: list[tuple[Registry, frozenset[str]]] = []  # each registry, and the names it has without custom files
_LOADED: dict[Path, tuple[str, list[tuple[Registry, str]]]] = {}  # by file: its digest, and what it registered where


def built_in(registry: Registry) -> frozenset[str]:
    """Declare that a registry has its built-in entries, whose names are returned: later ones may be of custom files."""
    names = frozenset(registry)
    _BUILT_IN.append((registry, names))
    return names


def run_file(file: Path, known: Registry) -> list[str]:
    """Run a file unless this process has done so; returns the names that it registers in `known`."""
    try:
        content, path = file.read_bytes(), file.resolve()
    except OSError as error:
        raise UsageError(f"{file}: cannot be read ({error.strerror}).") from error
    digest = hashlib.sha256(content).hexdigest()
    last, names = _LOADED.get(path, ("", []))
    if last != digest or any(name not in registry for registry, name in names):
        _forget(names)  # the file has changed since
        _LOADED.pop(path, None)
        _LOADED[path] = digest, _run(file, path)
    return [name for registry, name in _LOADED[path][1] if registry is known]


def _run(file: Path, path: Path) -> list[tuple[Registry, str]]:
    """Run a file and return what it registers; a file that fails registers nothing."""
    before = {id(registry): set(registry) for registry, _ in _BUILT_IN}

    def registered() -> list[tuple[Registry, str]]:
        """What is new, also in registries that the file was the first to import."""
        return [(r, name) for r, own in _BUILT_IN for name in r if name not in before.get(id(r), own)]

    module_name = f"{OWN}{hashlib.sha256(str(path).encode()).hexdigest()[:12]}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None:
        raise UsageError(f"{file}: not a Python file; its name must end in .py.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        _forget(registered())
        if isinstance(error, UsageError):
            raise UsageError(f"{file}: {error}") from error
        if not isinstance(error, Exception):
            raise
        raise UsageError(_message(file, path, error)) from error
    return registered()


def _forget(names: list[tuple[Registry, str]]) -> None:
    for registry, name in names:
        registry.pop(name, None)


def keep_copy(kind: type, copy: Path) -> None:
    """Copy the custom file that defines a class, for reference; the copy is never executed."""
    if not kind.__module__.startswith(OWN) or copy.exists():
        return
    file = Path(str(sys.modules[kind.__module__].__file__))
    try:
        content = file.read_bytes()
    except OSError as error:
        raise UsageError(f"{file}: cannot be read ({error.strerror}).") from error
    if hashlib.sha256(content).hexdigest() != _LOADED[file][0]:
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
