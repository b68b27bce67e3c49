"""The registry of data sets; `sdrseg.datasets.register_source` adds built-in and custom ones."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any, ClassVar, Protocol

from sdrseg.errors import UsageError, nearest


class DataSetClass(Protocol):
    """What is known of a data set before any file is opened (see `sdrseg.datasets.source.Source`)."""

    name: str
    needs_folder: ClassVar[bool]
    own_data: ClassVar[bool]
    internal: ClassVar[bool]
    defaults: ClassVar[Mapping[str, Mapping[str, Any]]]
    limits: ClassVar[Mapping[str, Mapping[str, float]]]


SOURCES: dict[str, type[DataSetClass]] = {}
"""Data sets by name."""


DECLARED = ("needs_folder", "own_data", "defaults", "limits")


def declarations(name: str) -> dict[str, Any]:
    """What a custom data set declares, to be saved with a run; empty for built-in ones."""
    source = find_source(name)
    return {} if source.__module__.startswith("sdrseg.") else {key: getattr(source, key) for key in DECLARED}


def saved_source(name: str, declared: Mapping[str, Any] | None) -> type[DataSetClass]:
    """The class of a run's data set, or, if its file has not been run, a class with what the run saved of it."""
    if known_source(name) or not isinstance(declared, Mapping) or not declared.keys() >= set(DECLARED):
        return find_source(name)
    return type(name, (), {"name": name, **{key: declared[key] for key in DECLARED}})


def find_source(name: str | type[DataSetClass]) -> type[DataSetClass]:
    """The class of a data set; a class is returned as it is."""
    if not isinstance(name, str):
        return name
    if (source := known_source(name)) is None:
        possible = [name for name, source in SOURCES.items() if not source.internal]
        raise UsageError(
            f"unknown data set {name!r}{nearest(name, possible)} For a custom data set, write FILE.py instead of "
            f"the name, or add --source FILE.py to a command that reads a run."
        )
    return source


def known_source(name: str) -> type[DataSetClass] | None:
    """The class of a data set, or None if there is none of this name."""
    if name not in SOURCES:
        import_module("sdrseg.datasets")  # registers the built-in ones
    return SOURCES.get(name)
