"""What the commands print: tables on standard output, a progress bar on standard error."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

FILE_WIDTH = 160  # when the output is not a terminal


def console(stderr: bool = False) -> Console:
    """A console that prints text literally: names of files and classes may contain [brackets] and :colons:."""
    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() else FILE_WIDTH
    return Console(stderr=stderr, width=width, highlight=False, markup=False, emoji=False)


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """A table; numbers are right-aligned."""
    cells = [[_text(cell) for cell in row] for row in rows]
    table = Table(header_style="bold")
    for number, name in enumerate(columns):
        numeric = bool(cells) and all(re.fullmatch(r"-?[\d,.]+( %)?|–", row[number]) for row in cells)
        table.add_column(name, justify="right" if numeric else "left", overflow="fold")
    for row in cells:
        table.add_row(*(Text(cell) for cell in row))  # literal: names may contain [brackets]
    console().print(Text(title, style="italic"), soft_wrap=True)  # a title of the table would be as narrow as this
    console().print(table)


def print_json(value: Any) -> None:
    sys.stdout.write(json.dumps(value, indent=2, default=list) + "\n")  # ASCII: safe with every encoding


@contextmanager
def progress(label: str) -> Iterator[Callable[[int, int], None]]:
    """A progress bar on standard error, if that is a terminal; call it with (done, total)."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    stderr_console = console(stderr=True)
    with Progress(*columns, console=stderr_console, transient=True, disable=not stderr_console.is_terminal) as bar:
        task = bar.add_task(label, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _text(cell: Any) -> str:
    if isinstance(cell, int) and not isinstance(cell, bool):
        return f"{cell:,}"
    return f"{cell:.2f}" if isinstance(cell, float) else str(cell)


ORACLE = ", all labels (oracle)"


class TrainingDisplay:
    """The progress of a run: a live line on a terminal, plain lines elsewhere. `active` only in process 0."""

    PLAIN_SECONDS = 10.0  # between two plain lines

    def __init__(self, steps: int, active: bool = True, head: Text | None = None) -> None:
        self._console = console(stderr=True)
        self._steps, self._active = steps, active
        live = active and self._console.is_terminal
        self._last_line = 0.0
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
        self._bar = Progress(*columns, TextColumn("{task.fields[pace]}"), console=self._console)
        self._losses = Text(overflow="ellipsis", no_wrap=True)
        self._live = (
            Live(Group(*([head] if head else []), self._bar, self._losses), console=self._console, transient=True)
            if live
            else None
        )
        self._task: Any = None
        self._step = -1

    def say(self, text: str) -> None:
        if self._active and text:
            self._console.print(text, markup=False)

    def update(self, entry: dict[str, Any]) -> None:
        """Show an entry of the log; `losses` are empty where reading them would make a GPU wait."""
        losses = "  ".join(f"{name} {value:.4g}" for name, value in entry["losses"].items())
        memory = f", {entry['peak_memory_gib']:.1f} GiB" if "peak_memory_gib" in entry else ""
        total = f"/{self._steps - 1}" if self._steps else ""  # 0: not known
        position = f"step {entry['step']}{total} epoch {entry['epoch'] + 1} of {entry['epochs']}"
        speed = entry["images_per_second"]
        pace = f"elapsed {clock(entry['elapsed'])}, left {clock(entry['left'])}"
        pace += f", {speed:.{0 if speed >= 10 else 1}f} images/s{memory}"
        last = entry["iteration"] == entry["iterations"]
        if self._live is not None:
            self._live.start()  # only now: an earlier failure leaves the terminal as it was
            if self._task is None or entry["step"] != self._step:
                if self._task is not None:
                    self._bar.remove_task(self._task)
                self._task, self._step = self._bar.add_task(position, pace=pace), entry["step"]
            progress = {"completed": entry["iteration"], "total": entry["iterations"], "pace": pace}
            self._bar.update(self._task, description=position, **progress)
            self._losses.plain = losses or self._losses.plain
        elif time.monotonic() - self._last_line > self.PLAIN_SECONDS or last or entry["step"] != self._step:
            self._last_line, self._step = time.monotonic(), entry["step"]
            self.say("  ".join(filter(None, [position, f"{entry['iteration']}/{entry['iterations']}", losses, pace])))

    def scored(self, score: Any, oracle: bool) -> None:
        """Print the score after a step; `oracle`: on held-out images with all labels."""
        means = _means(score.miou(), score.measured())
        found = (
            f"mIoU {means}" + (f" on held-out images{ORACLE}" if oracle else "") if means else "not scored: no images"
        )
        self.say(f"step {score.step}: {found}")

    def validated(self, step: int, epoch: int, miou: dict[str, float | None], oracle: bool) -> None:
        """Print a validation score during a step; `miou` may contain "kept", the share of `Kept`."""
        kept = miou.get("kept")
        more = "" if kept is None else f", {100 * kept:.1f} % of the other pixels as before"
        self.say(f"step {step}, epoch {epoch}: mIoU {_means(miou)} on held-out images{ORACLE if oracle else ''}{more}")

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()


def clock(seconds: float) -> str:
    """Such as 0:07, 12:30 or 3:05:00."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"


def _means(miou: dict[str, float | None], measured: dict[str, tuple[int, int]] | None = None) -> str:
    """The means, without "all" if no old class has a score. `measured`: over how many classes they are."""
    parts = []
    for name in ("old", "new") if miou["old"] is None else ("old", "new", "all"):
        over, of = (measured or {}).get(name, (0, 0))
        if (value := miou[name]) is not None:
            parts.append(f"{name} {100 * value:z.1f}" + (f" (over {over} of {of} classes)" if over < of else ""))
    return ", ".join(parts)
