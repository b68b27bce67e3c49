"""Choosing settings without ranges, after De Lange et al. (A continual learning survey): step by step, in two phases.

Maximal plasticity: the learning rate with which fine-tuning, from the model of the step before, learns the new classes
best. Stability decay: with this rate, the method's largest stability weight, halved until the new classes are learned
nearly as well as by fine-tuning. The model of that trial is the one from which the next step continues.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sdrseg.engine.folder import RunFolder
from sdrseg.engine.launch import InterruptedRunError
from sdrseg.engine.watch import NotFiniteError
from sdrseg.errors import UsageError, quantity
from sdrseg.files import write_json
from sdrseg.methods import find_method, resolve_method
from sdrseg.metrics import StepScore
from sdrseg.study.queue import drop_models
from sdrseg.study.ranges import STABILITY, around, stability_of
from sdrseg.study.tune import BudgetError, EnoughError, Search, Trial, new_of_step

WITHIN = 0.2
"""The score of new classes may be lower than that of fine-tuning by this share."""
LARGEST, HALVINGS = 8.0, 10
PLAIN = ("data", "eval", "train", "shapes", "net", "optim", "run")
"""Sections of settings that fine-tuning has in common with every method."""
STRATEGY = "stability decay (De Lange et al.), step by step"


@dataclass
class Decay:
    """A search step by step: its budget, and the values chosen so far."""

    search: Search
    trials: int | None = None
    stop_at: float | None = None

    def __post_init__(self) -> None:
        self.chosen: dict[str, Any] = {}
        self.unmet: list[str] = []  # steps in which no weight let the method learn as well as demanded
        self.before = Path()  # the run from which the next step continues

    def up_to(self, step: int, folder: str, method: str, values: Mapping[str, Any]) -> float:
        """Train a run from the one before up to a step; the hold-out's mIoU of the step's new classes, in per cent."""
        found: list[float] = []
        channels = [0]  # after each step

        def after(score: StepScore) -> None:
            if score.step == step:
                found.append(new_of_step(score, channels[-1]))
                raise EnoughError("the step is done")
            channels.append(len(score.names))

        begin_with = self.before if step > 0 else None
        try:
            self.search.run(folder, method, values, after, stop_at=self.stop_at, begin_with=begin_with)
        except EnoughError:
            pass
        except NotFiniteError:
            found.append(0.0)  # nothing is learned with these values
        except InterruptedRunError as error:
            if self.stop_at is None or time.monotonic() < self.stop_at:
                raise  # interrupted by the user
            raise BudgetError("the time is up") from error
        return found[0]

    def trial(self, step: int, stage: str, folder: str, method: str, values: Mapping[str, Any]) -> float:
        """Score values for one step."""
        spent = self.trials is not None and len(self.search.trials) >= self.trials
        if spent or (self.stop_at is not None and time.monotonic() > self.stop_at):
            raise BudgetError("the budget is used up")
        file = self.search.out / "trials" / folder / "trial.json"
        known = RunFolder(file.parent).read_json(file.name) if file.exists() else {}
        settings = self._settings(method) | _of_step(step, values)
        if known.get("settings") != settings:
            known = {"settings": settings, "score": round(self.up_to(step, folder, method, settings), 4)}
            write_json(file, known)
        self.search.trials.append(Trial(f"step {step}: {stage}", dict(values), known["score"]))
        return float(known["score"])

    def _settings(self, method: str) -> dict[str, Any]:
        """For the method, the user's and the chosen settings; for fine-tuning, those of the method without its losses:
        also its optimiser, so that a learning rate is chosen for the one that uses it."""
        if method == self.search.method:
            return {**self.search.settings, **self.chosen}
        used = {s.key: s.plain for s in self.search.config().settings() if s.key.partition(".")[0] in ("net", "optim")}
        own_settings = {k: v for k, v in self.search.settings.items() if k.split(".")[-2] in PLAIN}
        return used | own_settings

    def choose(self, step: int, rates: Sequence[float], weights: Mapping[str, float]) -> float:
        """Choose learning rate and stability weights of one step; returns the score of fine-tuning."""
        scores = {
            rate: self.trial(step, "learning rate", f"step{step}-lr-{rate:g}", "ft", {"optim.lr": rate})
            for rate in rates
        }
        rate = max(scores, key=lambda rate: (scores[rate], -rate))  # of equal scores, the smaller rate
        factor, scaled = LARGEST, dict(weights)
        for _ in range(HALVINGS):
            scaled = {key: float(f"{value * factor:.4g}") for key, value in weights.items()}
            name = f"step{step}-weight-{factor:g}"
            score = self.trial(step, "stability", name, self.search.method, {**scaled, "optim.lr": rate})
            if score >= (1 - WITHIN) * scores[rate] or not weights:
                break
            factor /= 2
        else:
            self.unmet.append(str(step))
        self.chosen |= _of_step(step, {"optim.lr": rate, **scaled})
        self.before = self.search.out / "trials" / name
        for folder in (self.search.out / "trials").glob(f"step{step}-*"):
            if folder != self.before:
                drop_models(folder, "none")  # their scores stay
        return scores[rate]


def _of_step(step: int, values: Mapping[str, Any]) -> dict[str, Any]:
    return {f"step.{step}.{key}": value for key, value in values.items()}


def stability_decay(
    search: Search, trials: int | None = None, minutes: float | None = None, rates: Sequence[float] = ()
) -> dict[str, Any]:
    """The default strategy, within a budget. The same call with a larger budget resumes it."""
    if search.oracle:
        raise UsageError("--oracle belongs to a search over ranges: add --search or --range.")
    search.require_new_classes()
    usual, method = search.config(), find_method(resolve_method(search.method))
    if not method(usual.of_step(1)).iterates(1):
        raise UsageError(
            f"{search.method} trains nothing in later steps, so learning rates and weights do not matter there. Search "
            f"settings of its own, such as --range {method.own_section()}.SETTING=LOW:HIGH."
        )
    search.claim("stability decay")
    decay = Decay(search, trials, None if minutes is None else time.monotonic() + 60 * minutes)
    strategy, unlearned = STRATEGY, []
    try:
        decay.up_to(0, "step0", search.method, search.settings)
        decay.before = search.out / "trials" / "step0"
        steps = len(RunFolder(decay.before).read_json("scenario.json")["steps"])
        for step in range(1, steps):
            candidates = rates or around(usual.of_step(step).optim.lr)
            if decay.choose(step, candidates, stability_of(usual)) == 0:
                unlearned.append(str(step))
            search.write(decay.chosen, f"{STRATEGY}, not finished", finished=False)
    except BudgetError:
        done = {key.split(".")[1] for key in decay.chosen}
        strategy += f", stopped by its budget after {quantity(len(done), 'step')}"
        strategy += ": run the same command with a larger budget to resume"
        return search.write(decay.chosen, strategy, finished=False)
    if unlearned:
        where = f"step {', '.join(unlearned)}"
        strategy += (
            f"; in {where} fine-tuning learned no new class with any rate, so this choice is arbitrary: train longer"
        )
    if not stability_of(usual):
        strategy += (
            f"; {search.method} has none of {', '.join(STABILITY)}, so only learning rates were chosen: add --range "
            f"SECTION.SETTING=LOW:HIGH to search weights of its own"
        )
    if decay.unmet:
        strategy += (
            f"; in step {', '.join(decay.unmet)} the new classes were not learned {1 - WITHIN:.0%} as well as by "
            f"fine-tuning with any weight, so the smallest was taken"
        )
    return search.write(decay.chosen, strategy)
