"""The contents of result tables; render.py prints them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sdrseg.engine.job import TEST_IMAGES
from sdrseg.scenario import parse_spec
from sdrseg.study.cell import LOWERED, Cell, scores_of
from sdrseg.study.paper import Grid, PaperTable
from sdrseg.study.statistics import Spread, spread

NOT_RANKED = ("offline",)
LOWER_IS_BETTER = ("uncertain",)


@dataclass(frozen=True)
class Value:
    """One number of a table: ours over seeds, the paper's, and whether that is a misprint."""

    ours: Spread | None = None
    paper: float | None = None
    misprint: bool = False
    rank: int = 0
    """1: our best, 2: our second best."""

    @property
    def difference(self) -> float | None:
        return None if self.ours is None or self.paper is None or self.misprint else self.ours.mean - self.paper


@dataclass(frozen=True)
class Line:
    name: str
    values: tuple[Value, ...]
    ranked: bool = True


@dataclass(frozen=True)
class Block:
    """One scenario: a line per method (or what `header` says), a column per score."""

    title: str
    values: tuple[str, ...]
    lines: tuple[Line, ...]
    header: str = "Method"


@dataclass(frozen=True)
class Table:
    name: str
    title: str
    blocks: tuple[Block, ...]
    notes: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()


def fill(table: PaperTable, grid: Grid, cells: Sequence[Cell], transform: str | None = None) -> Table:
    """A table of the paper with our numbers."""
    by_hash = {cell["config"]: cell for cell in cells}
    found = {
        key: [by_hash[experiment.hash] for experiment in some if experiment.hash in by_hash]
        for key, some in grid.items()
    }
    missing = {e.label: None for some in grid.values() for e in some if e.hash not in by_hash}
    return paper_form(table, found, transform, tuple(missing))


def paper_form(
    table: PaperTable,
    found: Mapping[tuple[str, str], Sequence[Cell]],
    transform: str | None = None,
    missing: Sequence[str] = (),
) -> Table:
    """A table of the paper from cells by row and column."""
    if table.values == ("per_class",):
        blocks = [_per_class(table, found, column, transform) for column in table.columns]
    else:
        blocks = [_block(table, found, column, transform) for column in table.columns]
    notes = [f"{row.name}: {row.note}." for row in table.rows if row.note]
    for row in table.rows:
        notes += [
            f"misprint in the paper: {row.name}, {key}; {correct} is consistent with the others."
            for key, correct in row.misprints.items()
        ]
    scored = {cell["scored_on"] for cells in found.values() for cell in cells} - {TEST_IMAGES}
    notes += [f"Ours is scored on {what}." for what in sorted(scored)]
    notes += [
        f"{row}, {column}, seed {cell['seed']}: diverged and was trained with a lower learning rate "
        f"({cell['settings'][LOWERED]})."
        for (row, column), cells in found.items()
        for cell in cells
        if LOWERED in cell["settings"]
    ]
    return Table(table.name, table.title, tuple(block for block in blocks if block.lines), tuple(notes), tuple(missing))


def _block(
    table: PaperTable, found: Mapping[tuple[str, str], Sequence[Cell]], column: str, transform: str | None
) -> Block:
    lines = []
    for row in table.rows:
        printed = table.printed(row, column)
        scores = [scores_of(cell, transform, parse_spec(column)) for cell in found.get((row.name, column), ())]
        values = [
            Value(
                spread([s[name] for s in scores if s is not None and s.get(name) is not None]),
                printed.get(name),
                f"{column} {name}" in row.misprints,
            )
            for name in table.values
        ]
        if printed or row.is_run(column):
            lines.append(Line(row.name, tuple(values), row.method not in NOT_RANKED))
    return Block(column, table.values, ranked(lines, table.values))


def _per_class(
    table: PaperTable, found: Mapping[tuple[str, str], Sequence[Cell]], column: str, transform: str | None
) -> Block:
    """Lines are classes; columns are IoU and pixel accuracy of each method."""
    rows = [row for row in table.rows if row.is_run(column)]
    per_row = [[scores_of(cell, transform) for cell in found.get((row.name, column), ())] for row in rows]
    classes: list[dict[str, Any]] = next((s["per_class"] for scores in per_row for s in scores if s is not None), [])
    wanted = [(number, kind) for number in range(len(classes)) for kind in ("iou", "accuracy")]
    by_method = []
    for row, scores in zip(rows, per_row, strict=True):
        found_here = [[s["per_class"][n][kind] for s in scores if s is not None] for n, kind in wanted]
        values = [Value(spread([one for one in some if one is not None])) for some in found_here]
        by_method.append(Line(row.name, tuple(values), row.method not in NOT_RANKED))
    marked = ranked(by_method)
    lines = [
        Line(one["name"], tuple(value for line in marked for value in line.values[2 * n : 2 * n + 2]))
        for n, one in enumerate(classes)
    ]
    headers = tuple(f"{row.name} {kind}" for row in rows for kind in ("IoU", "accuracy"))
    return Block(column, headers, tuple(lines), "Class")


def ranked(lines: Sequence[Line], names: Sequence[str] = ()) -> tuple[Line, ...]:
    """The lines with rank 1 for the best of each column and 2 for the next; equal values share a rank."""
    result = [list(line.values) for line in lines]
    for column in range(max((len(line.values) for line in lines), default=0)):
        means = {
            number: round(value.mean, 1)
            for number, line in enumerate(lines)
            if line.ranked and (value := line.values[column].ours) is not None
        }
        lowest = column < len(names) and names[column] in LOWER_IS_BETTER
        for rank, best in enumerate(sorted(set(means.values()), reverse=not lowest)[:2], 1):
            for number, mean in means.items():
                if mean == best and len(means) > 1:
                    old = result[number][column]
                    result[number][column] = Value(old.ours, old.paper, old.misprint, rank)
    return tuple(Line(line.name, tuple(values), line.ranked) for line, values in zip(lines, result, strict=True))
