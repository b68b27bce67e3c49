"""The best model of a step by its score on held-out images, and stopping early."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

import sdrseg.engine.training as engine
from runs import content, run
from sdrseg.errors import UsageError

SPEC = "shapes:9-1@disjoint"
HELD = ("train.holdout=0.3", "train.best_every=1", "train.epochs=4")


@pytest.fixture
def scores(monkeypatch):
    """Scores as the test says, by step and epoch, in the order in which they are asked for; the models scored."""
    given: dict[int, list[float]] = {0: [], 1: []}
    seen: dict[int, list[float]] = {0: [], 1: []}

    def score(job, step, network, decision, **_):
        seen[step.number].append(float(next(network.parameters()).detach().sum()))
        value = given[step.number].pop(0)
        return SimpleNamespace(miou=lambda: {"old": value, "new": None, "all": value})

    monkeypatch.setattr(engine, "score", score)
    return given, seen


def events(folder, name: str) -> list[dict]:
    return [e for e in map(json.loads, (folder / "log.jsonl").read_text().splitlines()) if e["event"] == name]


def test_the_best_model_of_each_step_is_kept(tmp_path, scores):
    given, seen = scores
    given |= {0: [0.1, 0.4, 0.3, 0.2], 1: [0.1, 0.2, 0.2, 0.5]}
    folder = tmp_path / "run"
    run(folder, "ft", *HELD, spec=SPEC)
    assert [(e["step"], e["epoch"], e["score"]) for e in events(folder, "best")] == [(0, 2, 0.4), (1, 4, 0.5)]
    first = {s: load_first_parameter(folder, s) for s in (0, 1)}
    assert first == {0: pytest.approx(seen[0][1]), 1: pytest.approx(seen[1][3])}
    assert len(set(seen[0])) == 4  # every epoch is another model


def load_first_parameter(folder, step: int) -> float:
    """The sum over the parameter that the scores above look at."""
    from sdrseg.predict import load

    return float(next(load(folder, step).network.parameters()).sum())


def test_a_step_ends_when_patience_does_but_not_before_anything_is_learned(tmp_path, scores):
    given, _ = scores
    given |= {0: [0.3, 0.2, 0.1], 1: [0.0, 0.0, 0.0, 0.4]}
    folder = tmp_path / "run"
    run(folder, "ft", *HELD, "train.patience=2", spec=SPEC)
    assert [(e["step"], e["epoch"]) for e in events(folder, "best")] == [(0, 1), (1, 4)]
    assert [e["epoch"] for e in events(folder, "validate") if e["step"] == 0] == [1, 2, 3]


def test_a_resumed_run_knows_its_best_model(tmp_path, monkeypatch):
    """Stopped after every iteration of an epoch and at its end, before and after the score."""
    run(tmp_path / "whole", "sdr", *HELD, spec=SPEC, bases=tmp_path / "b1")
    real = engine.score

    class KilledError(Exception):
        pass

    def dying(job, step, network, decision, **_):
        raise KilledError

    monkeypatch.setattr(engine, "score", dying)
    with pytest.raises(KilledError):  # the state was saved at the end of the epoch, before its score
        run(tmp_path / "killed", "sdr", *HELD, spec=SPEC, bases=tmp_path / "b2")
    monkeypatch.setattr(engine, "score", real)
    run(tmp_path / "killed", "sdr", *HELD, spec=SPEC, bases=tmp_path / "b2")
    assert content(tmp_path / "killed") == content(tmp_path / "whole")
    assert events(tmp_path / "killed", "best") and [e["epoch"] for e in events(tmp_path / "killed", "best")] == [
        e["epoch"] for e in events(tmp_path / "whole", "best")
    ]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["train.best_every=1"], r"train\.best_every scores during training.*train\.holdout=0\.2"),
        (["train.patience=3", "train.holdout=0.2"], r"train\.best_every=1"),
        (["eval.every=1"], r"eval\.every scores during training"),
    ],
)
def test_missing_files_are_reported_before_any_work(tmp_path, settings, message):
    with pytest.raises(UsageError, match=message):
        run(tmp_path / "run", "ft", *settings)
    assert not (tmp_path / "run").exists()
