"""Coloured tables: IoU by class and step, confusion, distances. They are HTML, so that screen readers can read them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sdrseg.colours import hex_of, shade, text_on

LARGEST = 40  # classes in a square table; with more, only the largest entries are listed


@dataclass(frozen=True)
class Cell:
    """One coloured cell. `value` is the number from the files."""

    text: str
    value: float | None = None
    background: str = ""
    ink: str = ""
    hint: str = ""


@dataclass(frozen=True)
class Heat:
    """A table with named rows and columns."""

    name: str
    corner: str
    columns: Sequence[str]
    rows: Sequence[tuple[str, Sequence[Cell]]]
    groups: Sequence[int] = ()  # rows with a line above them
    tall: bool = False  # column names are vertical


@dataclass(frozen=True)
class Entry:
    """One entry of a square table that is too large to show."""

    row: str
    column: str
    text: str
    value: float


def coloured(value: float | None, share: float, text: str, hint: str = "", warm: bool = False) -> Cell:
    if value is None or np.isnan(value):
        return Cell("", hint=hint)
    background = shade(share, warm)
    return Cell(text, value, hex_of(background), text_on(background), hint)


def class_by_step(label: str, names: Sequence[str], table: Sequence[Sequence[float | None]], base: int) -> Heat:
    """IoU of each class after each step, as in summary.json."""
    steps = range(len(table[0]))
    rows = []
    for name, values in zip(names, table, strict=True):
        cells = [
            coloured(v, v or 0, "" if v is None else f"{100 * v:z.1f}", f"{name} after step {k}")
            for k, v in enumerate(values)
        ]
        rows.append((name, cells))
    starts = [base] if base < len(names) else []
    return Heat(f"IoU of each class after each step, {label}", "class", [f"step {k}" for k in steps], rows, starts)


def confusion(label: str, names: Sequence[str], matrix: NDArray[np.int64]) -> tuple[Heat | None, list[Entry]]:
    """The predictions for the pixels of each class, in per cent of the class, and the largest errors."""
    shares = matrix / np.maximum(matrix.sum(1, keepdims=True), 1)
    present = matrix.sum(1) > 0
    wrong = np.where(np.eye(len(names), dtype=bool), 0, shares)
    order = np.argsort(-wrong, axis=None, kind="stable")[:10]
    errors = [
        Entry(names[i // len(names)], names[i % len(names)], f"{100 * wrong.flat[i]:.1f}\u00a0%", float(wrong.flat[i]))
        for i in map(int, order)
        if wrong.flat[i] > 0
    ]
    if len(names) > LARGEST:
        return None, errors
    rows = []
    for i, name in enumerate(names):
        cells = []
        for j, other in enumerate(names):
            share = float(shares[i, j])
            text = f"{100 * share:.0f}" if share >= 0.005 else ""
            hint = f"{name} predicted as {other}: {100 * share:.1f} %"
            value = share if present[i] and text else None  # empty cells are not coloured
            cells.append(coloured(value, share, text, hint, warm=i != j))
        rows.append((name, cells))
    title = f"Confusion matrix after the last step, {label}: row = truth, column = prediction, per cent of the row"
    return Heat(title, "truth", list(names), rows, tall=True), errors


def distances(label: str, names: Sequence[str], distance: NDArray[np.float64]) -> tuple[Heat | None, list[Entry]]:
    """Distances between the prototypes of classes, and the nearest pairs. NaN: no prototype."""
    upper = np.where(np.triu(np.ones_like(distance, dtype=bool), 1), distance, np.nan)
    order = np.argsort(upper, axis=None, kind="stable")[:10]
    pairs = [
        Entry(names[i // len(names)], names[i % len(names)], f"{upper.flat[i]:.3g}", float(upper.flat[i]))
        for i in map(int, order)
        if not np.isnan(upper.flat[i])
    ]
    if len(names) > LARGEST:
        return None, pairs
    largest = float(np.nanmax(upper)) if pairs else 1.0
    rows = []
    for i, name in enumerate(names):
        cells = [
            coloured(
                None if i == j else float(distance[i, j]),
                float(distance[i, j]) / (largest or 1),
                _two(float(distance[i, j])),
                f"{name} to {other}: {distance[i, j]:.4g}",
            )
            for j, other in enumerate(names)
        ]
        rows.append((name, cells))
    return Heat(f"Distances between prototypes, {label}", "class", list(names), rows, tall=True), pairs


def _two(value: float) -> str:
    """Two significant digits without an exponent."""
    if np.isnan(value):
        return ""
    return f"{value:.0f}" if value >= 9.95 else f"{value:.1f}" if value >= 0.995 else f"{value:.2f}".lstrip("0")
