"""Chooses settings on held-out training images; the test images are never read.

Two strategies. `stability_decay`, after De Lange et al.: first the learning rate, by fine-tuning on the first new step;
then the largest stability weight, halved until the new classes are learned nearly as well as by fine-tuning.
`search_ranges`: Optuna over ranges, with a journal that can be resumed and shared by several processes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sdrseg.config import Config, load_config
from sdrseg.data import read_spec
from sdrseg.data.pool import ImagePool
from sdrseg.engine.run import train
from sdrseg.engine.watch import NotFiniteError
from sdrseg.errors import SdrsegError, UsageError, quantity
from sdrseg.files import write_json
from sdrseg.methods import method_layers, own_sections, resolve_method
from sdrseg.metrics import StepScore
from sdrseg.study.ranges import Range, around, stability_of

HOLDOUT = 0.2
WITHIN = 0.2
"""How much worse than fine-tuning the new classes may be learned, as a share."""
LARGEST, HALVINGS = 8.0, 10
ORACLE = "ORACLE: scored on held-out images of all steps with all labels, which no method without old images has"
OWN = "scored on held-out images of each step with the labels of that step"


class EnoughError(SdrsegError):
    """A trial has all the results it needs."""


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

    def config(self, method: str | None = None) -> Config:
        name, spec = resolve_method(method or self.method), read_spec(self.spec)
        layers = method_layers(name, self.preset, spec.task, spec.source)
        return load_config(spec.source, None, self.settings, layers, own_sections(name))

    def run(
        self, folder: str, method: str, values: Mapping[str, Any], after_step: Callable[[StepScore], None] | None
    ) -> dict[str, Any]:
        """Train with some values; a repeated call resumes the run or returns its result."""
        scope = "all" if self.oracle else "step"
        held = {"train.holdout": HOLDOUT, "train.holdout_scope": scope}
        return train(
            self.spec,
            method,
            self.out / "trials" / folder,
            data=self.data,
            preset=self.preset,
            settings={**self.settings, **values, **held},
            bases=self.bases,
            display=self.display(),
            images=self.images,
            after_step=after_step,
        )

    def first_new(self, stage: str, folder: str, method: str, values: Mapping[str, Any]) -> float:
        """Train up to the first new step; returns the mIoU of its new classes on held-out images, in per cent."""
        found: list[float] = []

        def after(score: StepScore) -> None:
            if score.step == 1:
                found.append(100 * (score.miou()["new"] or 0.0))
                raise EnoughError("the first new step is done")

        try:
            self.run(folder, method, values, after)
        except EnoughError:
            pass
        except NotFiniteError:
            found.append(0.0)  # it diverged
        if not found:
            raise UsageError(f"{self.spec} has only one step. Tuning needs a scenario with new classes.")
        self.trials.append(Trial(stage, dict(values), round(found[0], 4)))
        return found[0]

    def write(self, chosen: Mapping[str, Any], strategy: str) -> dict[str, Any]:
        """Write the chosen values and all trials to tune.json."""
        result = {
            "spec": self.spec,
            "method": self.method,
            "preset": self.preset,
            "strategy": strategy,
            "scored": ORACLE if self.oracle else OWN,
            "oracle": self.oracle,
            "chosen": dict(chosen),
            "settings": dict(self.settings),
            "trials": [trial.to_dict() for trial in self.trials],
        }
        write_json(self.out / "tune.json", result)
        return result


def stability_decay(search: Search, rates: Sequence[float] | None = None) -> dict[str, Any]:
    """The default strategy: the learning rate by fine-tuning, then the largest stability weight that still learns."""
    if search.oracle:
        raise UsageError("--oracle needs a search over ranges: add --search or --range.")
    usual = search.config()
    weights = stability_of(usual)
    best: tuple[float, float] | None = None
    for rate in rates or around(usual.of_step(1).optim.lr):
        score = search.first_new("learning rate", f"lr-{rate:g}", "ft", {"optim.lr_later": rate})
        best = max(best or (score, -rate), (score, -rate))  # with equal scores, the smaller rate
        search.write({"optim.lr_later": -best[1]}, "stability decay, not finished")
    assert best is not None
    reference, rate = best[0], -best[1]
    chosen: dict[str, Any] = {"optim.lr_later": rate}
    factor = LARGEST
    for _ in range(HALVINGS if weights else 0):
        scaled = {key: float(f"{value * factor:.4g}") for key, value in weights.items()}
        score = search.first_new("stability", f"weight-{factor:g}", search.method, {**scaled, "optim.lr_later": rate})
        chosen |= scaled
        if score >= (1 - WITHIN) * reference:
            break
        factor /= 2
    strategy = "stability decay (De Lange et al.), on the first new step"
    if reference == 0:
        strategy += (
            "; fine-tuning learned none of its classes with any rate, so this choice is meaningless: train longer"
        )
    return search.write(chosen, strategy)


def search_ranges(
    search: Search, ranges: Sequence[Range], trials: int | None, minutes: float | None, seed: int = 0
) -> dict[str, Any]:
    """Search with Optuna; trials that are behind after a step are pruned. The score of a trial is the mean over new
    steps of the mIoU on held-out images: of the new classes or, with the oracle, of all classes."""
    optuna = _optuna()
    if trials is None and minutes is None:
        raise UsageError("Limit the search: add --trials NUMBER or --minutes MINUTES.")
    kind = "all" if search.oracle else "new"

    def objective(trial: Any) -> float:
        values = {one.key: one.suggest(trial) for one in ranges}
        seen: list[float] = []

        def after(score: StepScore) -> None:
            if score.step > 0:
                seen.append(100 * (score.miou()[kind] or 0.0))
                trial.report(sum(seen) / len(seen), score.step)
                if trial.should_prune():
                    raise EnoughError("pruned")

        try:
            search.run(f"{trial.number}", search.method, values, after)
        except EnoughError as error:
            raise optuna.TrialPruned from error
        except NotFiniteError:
            return 0.0
        if not seen:
            raise UsageError(f"{search.spec} has only one step. Tuning needs a scenario with new classes.")
        return sum(seen) / len(seen)

    search.out.mkdir(parents=True, exist_ok=True)
    backend = optuna.storages.journal.JournalFileBackend(str(search.out / "journal.log"))
    study = optuna.create_study(
        study_name=f"{search.spec} {search.method} {'oracle' if search.oracle else 'own'}",
        storage=optuna.storages.JournalStorage(backend),
        sampler=optuna.samplers.TPESampler(seed=seed + int(1000 * time.time()) % 1000),  # workers differ
        pruner=optuna.pruners.MedianPruner(n_startup_trials=4),
        direction="maximize",
        load_if_exists=True,
    )
    left = None if trials is None else max(0, trials - sum(t.state.is_finished() for t in study.trials))
    if left != 0:
        study.optimize(objective, n_trials=left, timeout=None if minutes is None else 60 * minutes, catch=())
    done = [trial for trial in study.trials if trial.value is not None]
    if not done:
        raise SdrsegError("No trial finished. Give the search more time.")
    search.trials = [Trial("search", trial.params, trial.value) for trial in done]
    return search.write(study.best_trial.params, f"Optuna, {quantity(len(done), 'trial')}")


def _optuna() -> Any:
    try:
        import optuna
    except ImportError as error:
        raise UsageError("A search over ranges needs Optuna: pip install 'sdrseg[tune]'.") from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna
