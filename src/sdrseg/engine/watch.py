"""What is written down while a step is trained: JSON lines (the truth), TensorBoard, and a progress display.

Terms are added up on the device and read every few iterations, so that logging never makes the GPU wait. A term that is
not finite is noticed then, with the iteration and the images at which it first was, and before anything is saved.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sdrseg.data.batches import Batch
from sdrseg.errors import SdrsegError
from sdrseg.threads import adapt

NEVER = 2**62
SHOW_SECONDS = 0.5  # between two updates of the display that wait for nothing


class NotFiniteError(SdrsegError):
    """A loss term became infinite or not a number."""


class Log:
    """The JSON lines of a run, and TensorBoard beside it. Only process 0 has one."""

    def __init__(self, folder: Path, tensorboard: bool = True):
        self.file = folder / "log.jsonl"
        self._lines = self.file.open("ab")
        self._board: Any = None
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self._board = SummaryWriter(str(folder / "tensorboard"))

    def write(self, event: str, **values: Any) -> None:
        self._lines.write((json.dumps({"event": event, "time": round(time.time(), 3), **values}) + "\n").encode())
        self._lines.flush()
        if self._board is not None and event == "train":
            for name, value in values["losses"].items():
                self._board.add_scalar(f"step{values['step']}/{name}", value, values["iteration"])

    @property
    def size(self) -> int:
        return self._lines.tell()

    def cut(self, size: int) -> None:
        """Forget what was written after a saved state."""
        self._lines.truncate(size)
        self._lines.seek(size)

    def cut_step(self, step: int) -> None:
        """Forget a step that begins anew (and a last line that a kill left unfinished)."""
        place, of_a_step = 0, (b'{"event": "train"', b'{"event": "validate"')
        for line in self.file.read_bytes().splitlines(keepends=True):
            if not line.endswith(b"\n") or (line.startswith(of_a_step) and json.loads(line)["step"] >= step):
                self.cut(place)
                return
            place += len(line)

    def close(self) -> None:
        self._lines.close()
        if self._board is not None:
            self._board.close()


class Watch:
    """Counts iterations, adds up terms on the device, and says when to save."""

    def __init__(
        self,
        step: int,
        iterations: int,
        log: Log | None,
        display: Callable[[dict[str, Any]], None],
        log_every: int,
        save_seconds: float,
        iteration: int = 0,
        epochs: int = 1,
    ):
        self.step, self.iterations, self.iteration, self.epochs = step, iterations, iteration, epochs
        self._log, self._display = log, display
        self._log_every, self._save_seconds = log_every, save_seconds
        self._sums: dict[str, Tensor] = {}
        self._first_bad: dict[str, Tensor] = {}
        self._ids: dict[int, tuple[str, ...]] = {}
        self._images = 0
        self.logged = False
        self.bad: Counter[str] = Counter()  # unreadable images that were skipped, and how often
        self._since = self._saved = self._shown = self._began = time.monotonic()
        self._before = 0.0  # seconds of the first iteration
        self._counted = 0  # iterations since `_began`
        self._first_is_over = False

    @torch.no_grad()
    def add(self, terms: dict[str, Tensor], loss: Tensor) -> None:
        """Take in the terms of a batch or of a part of one."""
        for name, term in [*terms.items(), ("loss", loss)]:
            value = term.detach()
            here = torch.where(value.isfinite(), NEVER, self.iteration)
            self._first_bad[name] = torch.minimum(self._first_bad[name], here) if name in self._first_bad else here
            self._sums[name] = self._sums[name] + value if name in self._sums else value.clone()

    def end_iteration(self, batch: Batch, metrics: Callable[[], dict[str, Tensor]]) -> bool:
        """Count one iteration; log if it is time to. Returns whether it is time to save."""
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
                self._show(self._entry(batch.epoch, self._losses() if batch.images.device.type == "cpu" else {}))
            return False
        self._write(metrics(), batch.epoch)
        if last or time.monotonic() - self._saved < self._save_seconds:
            return False
        self._saved = time.monotonic()
        return True

    def _write(self, metrics: dict[str, Tensor], epoch: int) -> None:
        self._check()
        entry = self._entry(epoch, self._losses())
        entry["metrics"] = {name: float(value) for name, value in metrics.items()}
        if torch.cuda.is_available():
            entry["peak_memory_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 3)
        if self.bad:
            entry["bad_images"] = dict(self.bad)
        if self._log is not None:
            self._log.write("train", **entry)
        self._show(entry)
        self._sums, self._first_bad, self._ids, self._images = {}, {}, {}, 0
        self._since = time.monotonic()

    def _losses(self) -> dict[str, float]:
        """The means since the last line of the log. On a GPU this waits for it."""
        count = max(1, len(self._ids))
        return {name: float(value) / count for name, value in self._sums.items()}

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
        """Display an entry with the time taken and the time left, which the first iteration tells only roughly: where
        there are more, it is not counted."""
        self._shown = now = time.monotonic()
        elapsed = now - self._began + self._before
        each = (now - self._began) / self._counted
        left = each * (self.iterations - self.iteration)
        self._display({**entry, "epochs": self.epochs, "elapsed": elapsed, "left": left})
        if not self._first_is_over:
            self._first_is_over, self._before, self._began, self._counted = True, elapsed, now, 0

    def _check(self) -> None:
        """Stop the run if any term was not finite since the last look."""
        if not self._first_bad:
            return
        names = list(self._first_bad)
        firsts = torch.stack([self._first_bad[name] for name in names]).tolist()
        first = min(firsts)
        if first < NEVER:
            bad = [name for name, at in zip(names, firsts, strict=True) if at == first and name != "loss"]
            what = f"the terms {', '.join(bad)} are" if len(bad) > 1 else f"the term {(bad or ['loss'])[0]} is"
            raise NotFiniteError(
                f"step {self.step}, iteration {first}: {what} not finite. "
                f"Images: {', '.join(self._ids.get(first, ()))}. The last saved state is intact; try a smaller "
                f"learning rate (optim.lr, optim.lr_later) or weight, then start in a new folder."
            )
