"""What is recorded while a step is trained: the log as JSON lines, trackers, and a progress display.

Terms are kept on the device and read every few iterations, so that logging never makes the GPU wait. A term that is
not finite is found then, before anything is saved; the message names the iteration and the images.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from sdrseg.datasets.batches import Batch
from sdrseg.engine.trackers import Trackers
from sdrseg.errors import SdrsegError
from sdrseg.threads import adapt

RECENT = 100  # iterations that are searched for the term that grew first
GROWN = 4.0  # a term has grown when it is this many times its earlier value
SHOW_SECONDS = 0.5  # between two updates of the display


class NotFiniteError(SdrsegError):
    """A loss term became infinite or not a number."""


class Log:
    """The log of a run as JSON lines, and its trackers. Only process 0 has one; the others have a `NoLog`."""

    def __init__(self, folder: Path, trackers: Trackers | None = None):
        self.file = folder / "log.jsonl"
        self._lines = self.file.open("ab")
        self.trackers = trackers

    def write(self, event: str, **values: Any) -> None:
        self._lines.write((json.dumps({"event": event, "time": round(time.time(), 3), **values}) + "\n").encode())
        self._lines.flush()
        if self.trackers is not None:
            self.trackers.event(event, values)

    @property
    def size(self) -> int:
        return self._lines.tell()

    def cut(self, size: int) -> None:
        """Remove the lines that were written after a saved state."""
        self._lines.truncate(size)
        self._lines.seek(size)

    def cut_step(self, step: int) -> None:
        """Remove the lines of a step that starts again (and an incomplete last line of a killed run)."""
        position, events = 0, (b'{"event": "train"', b'{"event": "validate"')
        lines = self.file.read_bytes().splitlines(keepends=True)
        for number, line in enumerate(lines):
            if not line.endswith(b"\n") or (line.startswith(events) and json.loads(line)["step"] >= step):
                self.cut(position)
                if any(later.startswith(b'{"event": "start"') for later in lines[number:]):
                    self.write("restart", step=step)  # the time since the last line is that between two processes
                return
            position += len(line)

    def close(self) -> None:
        self._lines.close()
        if self.trackers is not None:
            self.trackers.close()


class NoLog:
    """Writes nothing."""

    size = 0
    trackers = None

    def write(self, event: str, **values: Any) -> None: ...

    def cut(self, size: int) -> None: ...

    def cut_step(self, step: int) -> None: ...

    def close(self) -> None: ...


class Watch:
    """Count iterations, keep terms on the device until they are read, and determine when to save."""

    def __init__(
        self,
        step: int,
        iterations: int,
        log: Log | NoLog,
        display: Callable[[dict[str, Any]], None],
        log_every: int,
        save_seconds: float,
        iteration: int = 0,
        epochs: int = 1,
        weights: Mapping[str, str] = MappingProxyType({}),
        rate: str = "optim.lr",
    ):
        """`weights`: the setting of each term's weight, by its name; `rate`: that of the learning rate."""
        self.step, self.iterations, self.iteration, self.epochs = step, iterations, iteration, epochs
        self._log, self._display, self._weights, self._rate = log, display, weights, rate
        self._log_every, self._save_seconds = log_every, save_seconds
        self._kept: list[tuple[int, tuple[str, ...], Tensor]] = []  # iteration, names, values
        self._recent: dict[str, deque[tuple[int, float]]] = {}  # (iteration, size) of each term
        self._ids: dict[int, tuple[str, ...]] = {}
        self._images = 0
        self.logged = False
        self.rates: tuple[float, ...] = ()  # learning rates of encoder and decoder, for the log
        self.bad: Counter[str] = Counter()  # unreadable images that were skipped, and how often
        self._since = self._saved = self._shown = self._began = time.monotonic()
        self._first_seconds = 0.0  # seconds of the first iteration
        self._counted = 0  # iterations since `_began`
        self._first_is_over = False

    @torch.no_grad()
    def add(self, terms: dict[str, Tensor], loss: Tensor) -> None:
        """Add the terms of a batch or of a part of one."""
        values = [term.detach().to(loss.device, torch.float32) for term in (*terms.values(), loss)]
        self._kept.append((self.iteration, (*terms, "loss"), torch.stack(values)))

    def end_iteration(self, batch: Batch, metrics: Callable[[], dict[str, Tensor]]) -> bool:
        """Count one iteration; write to the log if it is due. Returns whether it is time to save."""
        self._ids[self.iteration] = batch.ids
        self.bad.update(batch.bad)
        self._images += len(batch.ids)
        self.iteration += 1
        self._counted += 1
        adapt()
        last = self.iteration == self.iterations
        self.logged = last or self.iteration % self._log_every == 0
        if not self.logged:
            if not self._first_is_over or time.monotonic() - self._shown > SHOW_SECONDS:
                losses = _means(self._read()) if batch.images.device.type == "cpu" else {}
                self._show(self._entry(batch.epoch, losses))
            return False
        self._write(metrics(), batch.epoch)
        if last or time.monotonic() - self._saved < self._save_seconds:
            return False
        self._saved = time.monotonic()
        return True

    def _write(self, metrics: dict[str, Tensor], epoch: int) -> None:
        values = self._read()
        for name, series in values.items():
            sizes = ((at, abs(value)) for at, value in series.items())
            self._recent.setdefault(name, deque(maxlen=RECENT)).extend(sizes)
        self._check(values)
        entry = self._entry(epoch, _means(values))
        entry["lr"] = list(self.rates)
        found = {name: float(value) for name, value in metrics.items()}  # some may be infinite, which JSON cannot say
        entry["metrics"] = {name: value for name, value in found.items() if math.isfinite(value)}
        if torch.cuda.is_available():
            entry["peak_memory_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 3)
        if self.bad:
            entry["bad_images"] = dict(self.bad)
        self._log.write("train", **entry)
        self._show(entry)
        self._kept, self._ids, self._images = [], {}, 0
        self._since = time.monotonic()

    def _read(self) -> Values:
        """All terms since the last line of the log, by iteration. On a GPU this waits for it."""
        result: Values = {}
        if not self._kept:
            return result
        numbers = iter(torch.cat([values for _, _, values in self._kept]).tolist())
        for iteration, names, _ in self._kept:
            for name in names:  # parts of a batch add up
                series = result.setdefault(name, {})
                series[iteration] = series.get(iteration, 0.0) + next(numbers)
        return result

    def _entry(self, epoch: int, losses: dict[str, float]) -> dict[str, Any]:
        seconds = time.monotonic() - self._since
        return {
            "step": self.step,
            "epoch": epoch,
            "iteration": self.iteration,
            "iterations": self.iterations,
            "losses": losses,
            "images_per_second": round(self._images / max(seconds, 1e-9), 2),
        }

    def _show(self, entry: dict[str, Any]) -> None:
        """Display an entry with elapsed and remaining time. The first iteration is slower and, if there are more, not
        counted."""
        self._shown = now = time.monotonic()
        elapsed = now - self._began + self._first_seconds
        each = (now - self._began) / self._counted
        left = each * (self.iterations - self.iteration)
        self._display({**entry, "epochs": self.epochs, "elapsed": elapsed, "left": left})
        if not self._first_is_over:
            self._first_is_over, self._first_seconds, self._began, self._counted = True, elapsed, now, 0

    def _check(self, values: Values) -> None:
        """Stop the run if any term was not finite since the last check."""
        firsts = {
            name: min((at for at, value in series.items() if not math.isfinite(value)), default=None)
            for name, series in values.items()
        }
        found = [at for at in firsts.values() if at is not None]
        if not found:
            return
        first = min(found)
        bad = [name for name, at in firsts.items() if at == first and name != "loss"] or ["loss"]
        what = f"the terms {', '.join(bad)} are" if len(bad) > 1 else f"the term {bad[0]} is"
        grown = self._grown_first()
        remedy = f"{self._weights[grown]} or {self._rate}" if grown in self._weights else self._rate
        raise NotFiniteError(
            f"step {self.step}, iteration {first}: {what} not finite; {grown} grew first. "
            f"Images: {', '.join(self._ids.get(first, ()))}. The last saved state is intact. Lower {remedy} and start "
            f"in a new folder, or run the same again with run.on_divergence=lower (--set, or [run] in a study's file)."
        )

    def _grown_first(self) -> str:
        """The first term that grew far beyond its earlier values."""
        finite = {name: [v for _, v in series if math.isfinite(v)] or [0.0] for name, series in self._recent.items()}
        initial = {name: statistics.median(some[: max(1, len(some) // 3)]) for name, some in finite.items()}
        grown = []
        for name in self._recent.keys() - {"loss"}:
            most = GROWN * max(initial[name], 0.01 * initial["loss"])  # distillation begins at 0
            beyond = [(at, value) for at, value in self._recent[name] if not value <= most]
            if beyond:
                at, value = beyond[0]
                grown.append((at, -value / most if most > 0 and math.isfinite(value) else -math.inf, name))
        return min(grown)[2] if grown else "loss"


Values = dict[str, dict[int, float]]
"""Terms by name and iteration."""


def _means(values: Values) -> dict[str, float]:
    count = len({at for series in values.values() for at in series})
    return {name: math.fsum(series.values()) / count for name, series in values.items()}
