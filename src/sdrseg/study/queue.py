"""Runs a study as a queue: one experiment after the other. Failures are reported, and an interrupted queue resumes."""

from __future__ import annotations

import gc
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from rich.text import Text

from sdrseg.datasets import open_source
from sdrseg.datasets.pool import ImagePool
from sdrseg.distributed import Processes
from sdrseg.engine.folder import RunInUseError
from sdrseg.engine.launch import InterruptedRunError, Interruption
from sdrseg.engine.run import train
from sdrseg.errors import SdrsegError, UsageError
from sdrseg.files import atomic_writer, require_writable
from sdrseg.study.cell import Cell, read_cells, write_cell
from sdrseg.study.estimate import plan
from sdrseg.study.grid import Experiment
from sdrseg.terminal import TrainingDisplay, clock

Keep = Literal["all", "last", "none"]


@dataclass
class Outcome:
    """The outcome of a queue: labels of experiments by their state, and why some failed."""

    finished: list[str] = field(default_factory=list)
    before: list[str] = field(default_factory=list)
    elsewhere: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)

    def sentence(self) -> str:
        parts = [
            (len(self.finished), "finished now"),
            (len(self.before), "finished before"),
            (len(self.elsewhere), "running in another process"),
            (len(self.failed), "failed"),
            (len(self.left), "left; run the same command again to resume"),
        ]
        return ", ".join(f"{count} {what}" for count, what in parts if count) or "nothing to run"


class QueueDisplay(TrainingDisplay):
    """The display of a run, with the queue above it."""

    def __init__(self, total: int, active: bool) -> None:
        self._header, self._total, self._number, self._name = Text("the queue"), total, 0, ""
        self._later = self._start = self._expected = 0.0
        super().__init__(0, active, self._header)

    def begin(self, number: int, experiment: Experiment, steps: int, expected: float, later: float) -> None:
        """Start an experiment; `expected` and `later`: estimated seconds for it and for those after it."""
        self._number, self._name, self._expected, self._later = number, experiment.label, expected, later
        self._start, self._step, self._steps = time.monotonic(), -1, steps
        super().say(f"[{number}/{self._total}] {experiment.label}, about {clock(expected + later)} left in all")

    def update(self, entry: dict[str, Any]) -> None:
        left = self._later + max(self._expected - (time.monotonic() - self._start), 0)
        self._header.plain = f"{self._number}/{self._total} {self._name}: about {clock(left)} left in all"
        super().update(entry)


def finished_cells(out: Path, more: Sequence[Path] = ()) -> list[Cell]:
    """The results in the folder of a study, if it has any, and in other folders."""
    if missing := [folder for folder in more if not folder.exists()]:
        raise UsageError(f"--results {missing[0]}: no such folder.")
    return read_cells([*([out / "results"] if (out / "results").exists() else []), *more])


def require_data(experiments: Sequence[Experiment], data: Path | None, finished: Sequence[Cell]) -> None:
    """Raise an error if there are unfinished experiments and none of their data sets can be opened."""
    done = {cell["config"] for cell in finished}
    configs = {e.spec.source: e.config for e in experiments if e.hash not in done}
    errors = []
    for name, config in configs.items():
        try:
            open_source(name, data, config)
        except SdrsegError as error:
            errors.append(error)
    if errors and len(errors) == len(configs):
        raise errors[0]


def run_queue(
    experiments: Sequence[Experiment],
    out: Path,
    *,
    data: Path | None = None,
    bases: Path | None = None,
    results: Sequence[Path] = (),
    minutes: float | None = None,
    keep: Keep = "all",
    display: Any = None,
) -> Outcome:
    """Run what is not finished, in order, for at most `minutes`. Runs go to out/runs, results to out/results."""
    require_writable(out, "Choose another folder with --out.", folder=True)
    cells = finished_cells(out, results)
    done = {cell["config"] for cell in cells}
    outcome = Outcome(before=[e.label for e in experiments if e.hash in done])
    queue = [e for e in experiments if e.hash not in done]
    rows = {row["name"]: row for row in plan(experiments, data, cells, bases)}
    expected = {name: row["seconds"] or 0.0 for name, row in rows.items()}
    spent = estimated = 0.0  # measured and estimated time so far, to correct the estimates
    display = display or QueueDisplay(len(queue), Processes().rank == 0)
    images = ImagePool(whole=True)
    stop_at = None if minutes is None else time.monotonic() + 60 * minutes
    with Interruption() as interruption:
        for number, experiment in enumerate(queue):
            label = experiment.label
            if (out / "results" / f"{experiment.folder}.json").exists():  # another worker was faster
                outcome.before.append(label)
                continue
            if stop_at is not None and time.monotonic() > stop_at:
                outcome.left += [e.label for e in queue[number:]]
                break
            interruption.check_signals()
            pace = spent / estimated if estimated else 1.0
            later = pace * sum(expected[e.folder] for e in queue[number + 1 :])
            steps = rows[experiment.folder]["steps"] or 0
            display.begin(number + 1, experiment, steps, pace * expected[experiment.folder], later)
            start = time.monotonic()
            try:
                _run(experiment, out, data, bases, keep, display, images, stop_at)
                outcome.finished.append(label)
                spent, estimated = spent + time.monotonic() - start, estimated + expected[experiment.folder]
            except RunInUseError:
                outcome.elsewhere.append(label)
            except InterruptedRunError:
                if stop_at is None or time.monotonic() < stop_at:
                    raise  # interrupted by the user
                outcome.left += [e.label for e in queue[number:]]
                break
            except Exception as error:
                outcome.failed[label] = _failure(error, out / "errors" / f"{experiment.folder}.txt")
                display.say(f"failed: {outcome.failed[label]}")
            finally:
                gc.collect()
                torch.cuda.empty_cache()
    display.close()
    return outcome


def _run(
    experiment: Experiment,
    out: Path,
    data: Path | None,
    bases: Path | None,
    keep: Keep,
    display: Any,
    images: ImagePool,
    stop_at: float | None,
) -> None:
    folder = out / "runs" / experiment.folder
    train(
        str(experiment.spec),
        experiment.method,
        folder,
        data=data,
        preset=experiment.preset,
        settings=experiment.settings,
        bases=bases,
        display=display,
        images=images,
        stop_at=stop_at,
    )
    if Processes().rank == 0:
        write_cell(folder, out / "results")
        drop_models(folder, keep)


def drop_models(folder: Path, keep: Keep) -> None:
    """Remove all models of a finished run, or all but the last; scores, log and settings stay."""
    steps = sorted((folder / "steps").iterdir(), key=lambda step: int(step.name))
    for step in {"all": [], "last": steps[:-1], "none": steps}[keep]:
        for part in ("model", "memory"):
            (step / f"{part}.safetensors").unlink(missing_ok=True)


def _failure(error: Exception, file: Path) -> str:
    """Why an experiment failed, in a sentence; the traceback of an unexpected error is saved."""
    if isinstance(error, SdrsegError):
        return str(error)
    with atomic_writer(file) as written:
        written.write("".join(traceback.format_exception(error)).encode())
    return f"{type(error).__name__}: {error} (traceback: {file})"
