"""The one registry of data sets; `sdrseg.data.register_source` adds the built-in ones and a user's own alike."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any, ClassVar, Protocol

from sdrseg.errors import UsageError, nearest


class DataSetClass(Protocol):
    """What a data set's class says before any file is opened (see `sdrseg.data.source.Source`)."""

    needs_folder: ClassVar[bool]
    own_data: ClassVar[bool]
    defaults: ClassVar[Mapping[str, Mapping[str, Any]]]
    limits: ClassVar[Mapping[str, Mapping[str, float]]]


SOURCES: dict[str, type[DataSetClass]] = {}
"""The classes of data sets by name."""


def find_source(name: str) -> type[DataSetClass]:
    """The class of a data set."""
    if name not in SOURCES:
        import_module("sdrseg.data")  # which registers the built-in ones
    if name not in SOURCES:
        raise UsageError(
            f"unknown data set {name!r}{nearest(name, list(SOURCES))} One of your own is named by its file: FILE.py in "
            f"place of the name, or --source FILE.py for a run."
        )
    return SOURCES[name]
