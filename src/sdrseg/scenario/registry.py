"""The registry of data sets; `sdrseg.datasets.register_source` adds built-in and custom ones."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any, ClassVar, Protocol

from sdrseg.errors import UsageError, nearest


class DataSetClass(Protocol):
    """What is known of a data set before any file is opened (see `sdrseg.datasets.source.Source`)."""

    needs_folder: ClassVar[bool]
    own_data: ClassVar[bool]
    defaults: ClassVar[Mapping[str, Mapping[str, Any]]]
    limits: ClassVar[Mapping[str, Mapping[str, float]]]


SOURCES: dict[str, type[DataSetClass]] = {}
"""Data sets by name."""


def find_source(name: str) -> type[DataSetClass]:
    """The class of a data set."""
    if name not in SOURCES:
        import_module("sdrseg.datasets")  # registers the built-in ones
    if name not in SOURCES:
        raise UsageError(
            f"unknown data set {name!r}{nearest(name, list(SOURCES))} For a custom data set, write FILE.py instead of "
            f"the name, or add --source FILE.py to a command that reads a run."
        )
    return SOURCES[name]
