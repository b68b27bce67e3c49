"""The paper's tables: their numbers, and the experiments that reproduce them."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from sdrseg.errors import UsageError, nearest
from sdrseg.methods import METHODS
from sdrseg.methods.terms import TERMS
from sdrseg.study.grid import Experiment, Study, make_experiment


@dataclass(frozen=True)
class Row:
    """A row of a table. Without `method` it has only numbers of the paper; `spec`: one run for all columns."""

    name: str
    method: str | None = None
    spec: str | None = None
    only: str = ""
    note: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    misprints: Mapping[str, float] = field(default_factory=dict)
    paper: Sequence[Sequence[float]] = ()

    def is_run(self, column: str) -> bool:
        return self.method in METHODS and column.endswith(self.only)


@dataclass(frozen=True)
class PaperTable:
    """One table: columns are scenarios, `values` the scores of each."""

    name: str
    title: str
    columns: tuple[str, ...]
    values: tuple[str, ...]
    rows: tuple[Row, ...]

    def printed(self, row: Row, column: str) -> dict[str, float]:
        """The paper's numbers by score."""
        index = self.columns.index(column)
        numbers = row.paper[index] if index < len(row.paper) else ()
        return {name: n for name, n in zip(self.values, numbers, strict=False) if not math.isnan(n)}


@cache
def paper_tables() -> dict[str, PaperTable]:
    read = tomllib.loads(resources.files("sdrseg").joinpath("resources/paper.toml").read_text(encoding="utf-8"))
    return {
        name: PaperTable(
            name,
            table["title"],
            tuple(table["columns"]),
            tuple(table["values"]),
            tuple(Row(**row) for row in table["row"]),
        )
        for name, table in read.items()
    }


def paper_table(name: str) -> PaperTable:
    if name not in paper_tables():
        raise UsageError(f"unknown table {name!r}{nearest(name, list(paper_tables()))}")
    return paper_tables()[name]


Grid = dict[tuple[str, str], list[Experiment]]  # by row and column, one experiment per seed


def experiments_of(table: PaperTable, seeds: Sequence[int], preset: str, settings: Mapping[str, Any]) -> Grid:
    """The experiments of a table; `settings` override those of the data set and the methods, but not those that define
    a row, such as random weights."""
    grid: Grid = {}
    for row in table.rows:
        for column in table.columns:
            if row.is_run(column):
                point = {"spec": row.spec or column, "method": row.method, "preset": preset, **settings, **row.settings}
                grid[row.name, column] = [
                    make_experiment({**point, "seed": seed}, tuple(row.settings), f"table {table.name}", Path())
                    for seed in seeds
                ]
    return grid


def kept_settings(table: PaperTable, settings: Mapping[str, Any]) -> tuple[str, ...]:
    """Notes on given settings that some rows do not take, because another value defines them, and on those that give
    methods a term that they do not have."""
    notes = []
    weights = {term.weight for term in TERMS.values() if term.weight}
    printed = [(row, METHODS[row.method].values()) for row in table.rows if row.method and row.paper]
    for key, value in settings.items():
        usual = {row.name: values.get(key) for row, values in printed if key not in row.settings}
        changed = [name for name, source in usual.items() if source is None or source.value == 0]
        if key in weights and value and changed:
            notes.append(f"{', '.join(changed)}: without {key} in the paper; {key}={value} adds this term.")
        rows: dict[str, list[str]] = {}
        for row in table.rows:
            if row.method in METHODS and row.settings.get(key, value) != value:
                rows.setdefault(f"{key}={row.settings[key]}", []).append(row.name)
        for own, names in rows.items():
            which = "these rows" if len(names) > 1 else "the row"
            notes.append(f"{', '.join(names)}: {own} defines {which} ({key}={value} was given).")
    return tuple(notes)


def study_of(grids: Sequence[Grid], name: str) -> Study:
    """The experiments of tables as a study: those that several cells share are run once."""
    unique = {experiment.hash: experiment for grid in grids for some in grid.values() for experiment in some}
    return Study(name, tuple(unique.values()))
