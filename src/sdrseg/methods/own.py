"""A user's own methods: a Python file in place of a name, and how their code enters the keys of bases."""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import sys
import traceback
from pathlib import Path

from sdrseg.errors import UsageError
from sdrseg.methods.base import Method

OWN = "sdrseg_own_"
_LOADED: dict[Path, tuple[str, list[str]]] = {}  # files of this process: their digest and the methods they registered
_DIGESTS: dict[type[Method], str] = {}


def load_method_file(text: str, known: dict[str, type[Method]]) -> str:
    """FILE.py, or FILE.py:NAME where the file registers several: run the file and return the name of the method."""
    head, colon, wanted = text.rpartition(":")
    file, wanted = (Path(head), wanted) if colon and head.endswith(".py") else (Path(text), "")
    names = _run(file, known)
    if not names:
        raise UsageError(f"{file}: registers no method. Put @sdrseg.register_method above your class.")
    if wanted and wanted not in names:
        raise UsageError(f"{text}: {file} registers no method {wanted!r}, but {', '.join(names)}.")
    if not wanted and len(names) > 1:
        raise UsageError(f"{file}: registers {', '.join(names)}. Say which one: {file}:{names[0]}")
    return wanted or names[0]


def _run(file: Path, known: dict[str, type[Method]]) -> list[str]:
    """Run a file once a process; the names that it registers."""
    try:
        content, place = file.read_bytes(), file.resolve()
    except OSError as error:
        raise UsageError(f"{file}: cannot be read ({error.strerror}).") from error
    digest = hashlib.sha256(content).hexdigest()
    if place in _LOADED and _LOADED[place][0] == digest:
        return _LOADED[place][1]
    for name in _LOADED.pop(place, ("", []))[1]:  # the file has changed since
        known.pop(name, None)
    before = set(known)
    module_name = f"{OWN}{hashlib.sha256(str(place).encode()).hexdigest()[:12]}"
    spec = importlib.util.spec_from_file_location(module_name, place)
    assert spec is not None and spec.loader is not None
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
        line: int | str | None = next(
            (f.lineno for f in reversed(traceback.extract_tb(error.__traceback__)) if f.filename == str(place)), "?"
        )
        what = str(error)
        if isinstance(error, SyntaxError) and error.filename == str(place):
            line, what = error.lineno or "?", error.msg
        raise UsageError(f"{file}, line {line}: {type(error).__name__}: {what}") from error
    names = [name for name in known if name not in before]
    _LOADED[place] = (digest, names)
    return names


def file_digest(method: type[Method]) -> str:
    """The start of the SHA-256 of the file that a method was given as, "" for one that was given by name."""
    return source_digest(method)[:12] if method.__module__.startswith(OWN) else ""


def require_super(method: Method, hook: str, left: str) -> None:
    """Stop if a hook of a user's method did not call the one it overrides, which leaves an attribute behind."""
    if not hasattr(method, left):
        raise UsageError(f"method {method.name}: its {hook} has to call super().{hook}(…).")


def require_weights(method: Method) -> None:
    """Stop if a user's `weights` dropped weights that are configured: their terms would weigh 1."""
    if dropped := [name for name in Method.weights(method) if name not in method.weights()]:
        raise UsageError(
            f"method {method.name}: its weights() leaves out {', '.join(dropped)}. Begin with super().weights()."
        )
    added = [name for name in method.weights() if name not in Method.weights(method)]
    kind = type(method)
    if added and kind.more_terms is Method.more_terms and kind.terms is Method.terms:
        raise UsageError(
            f"method {method.name}: its weights() names {', '.join(added)}, but nothing computes that. Write a method "
            f"more_terms() that returns it (is it misspelt?)."
        )


def source_digest(method: type[Method]) -> str:
    """SHA-256 of the code of a user's own method, "" for ours: a base it has trained is not one of a later version.

    That of the moment when it was registered, which is the code that runs: the file may be edited meanwhile.
    """
    if method.__module__.startswith("sdrseg."):
        return ""
    if method not in _DIGESTS:
        _DIGESTS[method] = _digest(method)
    return _DIGESTS[method]


def _digest(method: type[Method]) -> str:
    file = getattr(sys.modules.get(method.__module__), "__file__", None)
    try:
        code = Path(file).read_bytes() if file else inspect.getsource(method).encode()
    except (OSError, TypeError):
        return "unknown"
    return hashlib.sha256(code).hexdigest()
