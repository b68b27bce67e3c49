"""What the commands print: tables on standard output, a progress bar on standard error."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

WIDTH_OF_A_FILE = 160  # when the output is no terminal


def console(stderr: bool = False) -> Console:
    stream = sys.stderr if stderr else sys.stdout
    return Console(stderr=stderr, width=None if stream.isatty() else WIDTH_OF_A_FILE, highlight=False, soft_wrap=False)


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """A table; numbers are right-aligned."""
    body = [[_text(cell) for cell in row] for row in rows]
    table = Table(title=title, title_justify="left", header_style="bold")
    for number, name in enumerate(columns):
        numeric = bool(body) and all(re.fullmatch(r"-?[\d,.]+( %)?", row[number]) for row in body)
        table.add_column(name, justify="right" if numeric else "left", overflow="fold")
    for row in body:
        table.add_row(*row)
    console().print(table)


def print_json(value: Any) -> None:
    sys.stdout.write(json.dumps(value, indent=2, ensure_ascii=False, default=list) + "\n")


@contextmanager
def progress(what: str) -> Iterator[Callable[[int, int], None]]:
    """A progress bar on standard error (nothing where that is no terminal); call it with (done, total)."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    screen = console(stderr=True)
    with Progress(*columns, console=screen, transient=True, disable=not screen.is_terminal) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _text(cell: Any) -> str:
    if isinstance(cell, int):
        return f"{cell:,}"
    return f"{cell:.2f}" if isinstance(cell, float) else str(cell)
