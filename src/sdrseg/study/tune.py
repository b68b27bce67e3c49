"""Chooses settings on held-out training images; the test images are never read.

Two strategies: `search_ranges`, Optuna over ranges, with a journal that can be resumed and shared by several processes;
and without ranges `stability_decay` (decay.py).
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sdrseg.config import Config, load_config
from sdrseg.datasets import read_spec
from sdrseg.datasets.pool import ImagePool
from sdrseg.engine.folder import RunFolder
from sdrseg.engine.launch import InterruptedRunError, Interruption
from sdrseg.engine.run import train
from sdrseg.engine.watch import NotFiniteError
from sdrseg.errors import SdrsegError, UsageError, quantity
from sdrseg.files import write_json
from sdrseg.methods import method_layers, own_sections, resolve_method
from sdrseg.metrics import StepScore, mean_of
from sdrseg.study.ranges import Range

HOLDOUT = 0.2
RESUMES = "resumes"
"""The attribute of a trial that names the run it resumes: that of an interrupted trial with the same values."""
ORACLE = "ORACLE: scored on held-out images of all steps with all labels, which a method without old images lacks"
OWN = "scored on held-out images of each step with the labels of that step"


class EnoughError(SdrsegError):
    """A trial has all the results it needs."""


class BudgetError(SdrsegError):
    """The trials or the minutes of a search are used up."""


OUTPUTS = ("tune.json", "tune.svg", "tune.pdf", "tune.png", "trials", "journal.log")
"""What a search writes into its folder, after search.json."""


@dataclass(frozen=True)
class Trial:
    """One run of a search and its score."""

    stage: str
    values: Mapping[str, Any]
    score: float | None

    def to_dict(self) -> dict[str, Any]:
        return {"stage": self.stage, "values": dict(self.values), "score": self.score}


@dataclass
class Search:
    """What all trials of a search share, and their results."""

    spec: str
    method: str
    out: Path
    data: Path | None = None
    preset: str = "default"
    settings: Mapping[str, Any] = field(default_factory=dict)
    bases: Path | None = None
    oracle: bool = False
    display: Callable[[], Any] = lambda: None
    trials: list[Trial] = field(default_factory=list)
    images: ImagePool = field(default_factory=lambda: ImagePool(whole=True))
    interruption: Interruption = field(default_factory=Interruption)

    def require_new_classes(self) -> None:
        if read_spec(self.spec).task == "offline":
            raise UsageError(f"{self.spec} has one step. Tuning needs a scenario with later steps.")

    def claim(self, strategy: str, ranges: Sequence[Range] = ()) -> None:
        """Note in the folder what is searched there; raise an error if it belongs to another search."""
        facts = {"spec": self.spec, "method": self.method, "preset": self.preset, "strategy": strategy}
        facts |= {"ranges": ", ".join(sorted(map(str, ranges)))} if ranges else {}
        free = {s.key for s in self.config().settings() if s.affects == "nothing"}
        settings = {key: value for key, value in self.settings.items() if key not in free}
        own = json.loads(json.dumps({**facts, "oracle": self.oracle, "settings": settings}))
        file = self.out / "search.json"
        if not file.exists():
            there = [self.out / name for name in OUTPUTS if (self.out / name).exists()]
            if there and not file.exists():  # which another worker may have written by now, before anything else
                raise UsageError(
                    f"{there[0]} exists, but {file.name} does not: it is not of a search of this version of sdrseg. "
                    f"Choose a new folder with --out."
                )
            write_json(file, own)
            return
        saved = RunFolder(self.out).read_json(file.name)
        saved.setdefault("ranges", own.get("ranges"))  # searches of earlier versions did not save them
        if other := [key for key, value in own.items() if saved.get(key) != value]:
            parts = [f"{key}: {own[key]!r}, {saved.get(key)!r}" for key in other]
            raise UsageError(
                f"{self.out} has another search (now, in the folder): {'; '.join(parts)}. Choose another --out."
            )

    def config(self, method: str | None = None, values: Mapping[str, Any] | None = None) -> Config:
        name, spec = resolve_method(method or self.method), read_spec(self.spec)
        layers = method_layers(name, self.preset, spec.task, spec.source)
        return load_config(spec.source, None, {**self.settings, **(values or {})}, layers, own_sections(name))

    def require(self, ranges: Sequence[Range]) -> None:
        """Raise an error if a range has a value that its setting does not take."""
        for one in ranges:
            for value in one.ends:
                try:
                    self.config(values={one.key: value})
                except UsageError as error:
                    raise UsageError(f"--range {one.key}: {error}") from error

    def run(
        self,
        folder: str,
        method: str,
        values: Mapping[str, Any],
        after_step: Callable[[StepScore], None] | None,
        *,
        stop_at: float | None = None,
        begin_with: Path | None = None,
    ) -> Path:
        """Train with some values; a repeated call resumes the run. Returns its folder."""
        scope = "all" if self.oracle else "step"
        holdout = {"train.holdout": HOLDOUT, "train.holdout_scope": scope}
        self.interruption.check_signals()
        run_folder = self.out / "trials" / folder
        train(
            self.spec,
            method,
            run_folder,
            data=self.data,
            preset=self.preset,
            settings={**values, **holdout},
            bases=self.bases,
            display=self.display(),
            images=self.images,
            after_step=after_step,
            stop_at=stop_at,
            begin_with=begin_with,
        )
        return run_folder

    def write(self, chosen: Mapping[str, Any], strategy: str, finished: bool = True) -> dict[str, Any]:
        """Write the chosen values and all trials to tune.json."""
        result = {
            "spec": self.spec,
            "method": self.method,
            "preset": self.preset,
            "strategy": strategy,
            "finished": finished,
            "scored": ORACLE if self.oracle else OWN,
            "oracle": self.oracle,
            "chosen": dict(chosen),
            "settings": dict(self.settings),
            "trials": [trial.to_dict() for trial in self.trials],
        }
        write_json(self.out / "tune.json", result)
        return result


def new_of_step(score: StepScore, before: int) -> float:
    """The mIoU in per cent of the new classes of a step; `before`: the number of channels of the step before.

    Those of other steps after step 0 count as new too in a run's scores, and have labels in the sequential protocol.
    """
    return 100 * (mean_of(score.iou, range(before, len(score.names))) or 0.0)


def search_ranges(
    search: Search, ranges: Sequence[Range], trials: int | None, minutes: float | None, seed: int = 0
) -> dict[str, Any]:
    """Search with Optuna; trials that are behind after a step are pruned. The score of a trial is the mean over new
    steps of the mIoU on held-out images: of the new classes or, with the oracle, of all classes."""
    optuna = _optuna()
    if trials is None and minutes is None:
        raise UsageError("Limit the search with --trials NUMBER or --minutes MINUTES.")
    search.require_new_classes()
    search.require(ranges)

    def objective(trial: Any, values: Mapping[str, Any]) -> float:
        scores: list[float] = []
        channels = [0]  # after each step

        def after(score: StepScore) -> None:
            if score.step > 0:
                found = 100 * (score.miou()["all"] or 0.0) if search.oracle else new_of_step(score, channels[-1])
                scores.append(found)
                trial.report(sum(scores) / len(scores), score.step)
                if trial.should_prune():
                    raise EnoughError("pruned")
            channels.append(len(score.names))

        try:
            folder = trial.user_attrs.get(RESUMES, f"{trial.number}")
            search.run(folder, search.method, {**search.settings, **values}, after)
        except EnoughError as error:
            raise optuna.TrialPruned from error
        except NotFiniteError:
            return 0.0
        return sum(scores) / len(scores)

    search.claim("ranges", ranges)
    backend = optuna.storages.journal.JournalFileBackend(str(search.out / "journal.log"))
    study = optuna.create_study(
        study_name="tune",
        storage=optuna.storages.JournalStorage(backend),
        sampler=optuna.samplers.TPESampler(seed=seed + int(1000 * time.time()) % 1000),  # workers differ
        pruner=optuna.pruners.MedianPruner(n_startup_trials=4),
        direction="maximize",
        load_if_exists=True,
    )
    state = optuna.trial.TrialState
    end_states = (state.COMPLETE, state.PRUNED)
    stop_at = math.inf if minutes is None else time.monotonic() + 60 * minutes
    most = math.inf if trials is None else trials  # over all processes
    while time.monotonic() < stop_at and len(study.get_trials(deepcopy=False, states=end_states)) < most:
        trial = study.ask()
        values = {one.key: one.suggest(trial) for one in ranges}
        try:
            study.tell(trial, objective(trial, values))
        except optuna.TrialPruned:
            study.tell(trial, state=state.PRUNED)
        except (InterruptedRunError, KeyboardInterrupt):  # the next call resumes its run
            study.tell(trial, state=state.FAIL)
            study.enqueue_trial(values, user_attrs={RESUMES: trial.user_attrs.get(RESUMES, f"{trial.number}")})
            raise
        except BaseException:
            study.tell(trial, state=state.FAIL)
            raise
    done = study.get_trials(states=end_states)
    pruned = [trial for trial in done if trial.state == state.PRUNED]
    if len(done) == len(pruned):
        raise SdrsegError("No trial finished. Give the search more time.")
    search.trials = [Trial("pruned" if trial in pruned else "search", trial.params, trial.value) for trial in done]
    strategy = f"Optuna, {quantity(len(done), 'trial')}" + (f", {len(pruned)} of them pruned" if pruned else "")
    if study.best_value == 0:
        strategy += "; no trial learned a new class, so this choice is arbitrary: train longer"
    return search.write(study.best_trial.params, strategy)


def _optuna() -> Any:
    try:
        import optuna
    except ImportError as error:
        raise UsageError("A search over ranges needs Optuna: pip install 'sdrseg[tune]'.") from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna
