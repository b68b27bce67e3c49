"""The direction of imports that docs/architecture.md promises: a room uses only those above it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "sdrseg"
ALLOWED = {  # of `room`, all that it may import of ours
    "errors": set(),
    "variants": set(),
    "kernels": {"errors"},
    "labels": set(),
    "losses": {"kernels", "labels", "variants"},
}
"""Rooms that others build on."""


def imported(file: Path) -> set[str]:
    """The rooms a file imports, wherever in it, also for types alone."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "sdrseg":
            names = [node.module] if node.module != "sdrseg" else [f"sdrseg.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names if alias.name.startswith("sdrseg.")]
        else:
            continue
        found |= {name.split(".")[1] for name in names}
    return found


def files(room: str) -> list[Path]:
    return sorted((SOURCE / room).rglob("*.py")) or [SOURCE / f"{room}.py"]


@pytest.mark.parametrize("room", ALLOWED)
def test_what_others_build_on_imports_nothing_above_it(room):
    for file in files(room):
        assert imported(file) - {room} <= ALLOWED[room], file


UPWARD = {
    "scenario": {"config", "data", "losses", "methods", "engine", "predict", "report", "cli", "kernels"},
    "config": {"losses", "kernels", "data", "engine", "predict", "report", "cli", "network"},
    "data": {"losses", "methods", "engine", "predict", "report", "cli", "network"},
    "network": {"data", "losses", "methods", "engine", "predict", "report", "cli"},
    "methods": {"engine", "predict", "report", "cli"},
    "metrics": {"engine", "predict", "report", "cli"},
    "engine": {"predict", "report", "cli", "export", "demo"},
    "predict": {"report", "cli", "demo"},
    "report": {"cli", "demo"},
}
"""Rooms, and those below them in docs/architecture.md that they must not use."""


@pytest.mark.parametrize("room", UPWARD)
def test_no_room_uses_one_below_it(room):
    for file in files(room):
        assert not imported(file) & UPWARD[room], file
