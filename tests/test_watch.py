"""What is seen of a run while it trains: the log, the display, signals."""

from __future__ import annotations

import json
import os
import signal

import pytest
import torch

import sdrseg.engine.watch as watch_module
import sdrseg.terminal as terminal
from runs import TINY, Quiet
from sdrseg.config import parse_settings
from sdrseg.datasets.batches import Batch
from sdrseg.distributed import Processes
from sdrseg.engine.bases import export_base
from sdrseg.engine.launch import InterruptedRunError, Interruption, cpu_warning
from sdrseg.engine.run import train
from sdrseg.engine.watch import Log, NoLog, NotFiniteError, Watch
from sdrseg.errors import SdrsegError
from sdrseg.study.cell import cell_of, seconds_in
from sdrseg.terminal import TrainingDisplay


def test_a_step_that_begins_anew_leaves_nothing_of_itself_in_the_log(tmp_path):
    """Epochs may be shorter than the stretches that are logged."""
    log = Log(tmp_path)
    log.write("train", step=0, losses={})
    log.write("score", step=0)
    size = log.size
    log.write("validate", step=1, epoch=1)
    log.write("validate", step=1, epoch=2)
    log.write("train", step=1, losses={})
    log.cut_step(1)
    assert log.size == size
    log.close()
    left = [json.loads(line)["event"] for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert left == ["train", "score"]


@pytest.mark.parametrize("killed", [False, True])
def test_time_before_a_step_begins_anew_in_another_process_does_not_count(tmp_path, killed):
    """The line of the start of that process is among those that are removed."""
    log = Log(tmp_path)
    log.write("start")
    log.write("score", step=0)
    log.write("train", step=1)
    if killed:
        log.write("start")
    log.cut_step(1)
    log.close()
    left = [json.loads(line)["event"] for line in log.file.read_text().splitlines()]
    assert left == ["start", "score", *(["restart"] if killed else [])]
    events = [("start", 0), ("score", 10), ("restart", 1000), ("train", 1005)]
    assert seconds_in([{"event": event, "time": time} for event, time in events]) == 15


def test_a_display_takes_the_terminal_only_when_there_is_something_to_show(monkeypatch):
    """A run that is refused ends before it could give the terminal (and its cursor) back."""
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    display = TrainingDisplay(2)
    assert display._live is not None and not display._live.is_started
    display.say("a warning")
    display.close()
    losses = {"losses": {"ce": 1.0}, "step": 0, "epoch": 0, "epochs": 1, "images_per_second": 1.0}
    losses |= {"elapsed": 1.0, "left": 1.0}
    display = TrainingDisplay(2)
    try:
        for iteration in (1, 2):
            display.update({**losses, "iteration": iteration, "iterations": 2})
            assert display._live.is_started
    finally:
        display.close()
    assert not display._live.is_started


class Clock:
    """A clock that is moved by hand."""

    def __init__(self):
        self.now = 100.0

    def monotonic(self):
        return self.now

    def time(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr(watch_module, "time", made)
    monkeypatch.setattr(terminal, "time", made)
    return made


def batch(epoch: int) -> Batch:
    labels = torch.zeros(2, 4, 4, dtype=torch.uint8)
    return Batch(torch.zeros(2, 3, 4, 4, dtype=torch.uint8), labels, labels.bool(), ("a", "b"), epoch)


def test_progress_is_shown_from_the_first_iteration_on(clock):
    """One slow iteration (7 s), then quicker ones (2 s); nothing is logged before the twentieth."""
    shown = []
    watch = Watch(0, 40, NoLog(), shown.append, 20, 1e9, epochs=4)
    for iteration in range(20):
        clock.now += 7 if iteration == 0 else 2
        watch.add({"ce": torch.tensor(float(iteration))}, torch.tensor(1.0))
        watch.end_iteration(batch(iteration // 10), dict)
    assert len(shown) == 20
    first, second, last = shown[0], shown[1], shown[-1]
    assert (first["iteration"], first["epochs"], first["losses"]["ce"]) == (1, 4, 0.0)
    assert (first["elapsed"], first["left"]) == (7, 39 * 7)
    assert (second["elapsed"], second["left"], second["losses"]["ce"]) == (9, 38 * 2, 0.5)  # the mean so far
    assert (last["elapsed"], last["left"], last["losses"]["ce"]) == (7 + 19 * 2, 20 * 2, 9.5)
    assert last["images_per_second"] == round(2 * 20 / (7 + 19 * 2), 2)


def test_quick_iterations_are_not_all_shown(clock):
    shown = []
    watch = Watch(0, 1000, NoLog(), shown.append, 1000, 1e9)
    for _ in range(100):
        clock.now += 0.0625
        watch.add({"ce": torch.tensor(1.0)}, torch.tensor(1.0))
        watch.end_iteration(batch(0), dict)
    assert [entry["iteration"] for entry in shown] == [1, *range(10, 101, 9)]


def test_plain_lines_say_epoch_iteration_elapsed_and_left(clock, capsys):
    display = TrainingDisplay(2)
    entry = {"step": 0, "epoch": 0, "epochs": 30, "iterations": 660, "losses": {"ce": 2.5}, "images_per_second": 1.14}
    for iteration, elapsed in ((1, 7), (2, 9), (3, 30)):
        clock.now += 4 * iteration
        display.update({**entry, "iteration": iteration, "elapsed": elapsed, "left": 4613})
    display.update({**entry, "step": 1, "losses": {}, "iteration": 1, "elapsed": 3, "left": 59.7})
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "step 0/1 epoch 1 of 30  1/660  ce 2.5  elapsed 0:07, left 1:16:53, 1.1 images/s",
        "step 0/1 epoch 1 of 30  3/660  ce 2.5  elapsed 0:30, left 1:16:53, 1.1 images/s",
        "step 1/1 epoch 1 of 30  1/660  elapsed 0:03, left 1:00, 1.1 images/s",
    ]


def test_large_encoders_are_slow_on_a_cpu():
    assert cpu_warning(torch.device("cpu"), "resnet18", 11_176_512) == ""
    assert cpu_warning(torch.device("cuda"), "resnet101", 42_500_160) == ""
    said = cpu_warning(torch.device("cpu"), "resnet101", 42_500_160)
    assert said == "warning: resnet101 is slow on a CPU; try --encoder resnet18"


@pytest.mark.parametrize(
    ("signals", "code"),
    [
        ([signal.SIGTERM] * 3, 143),
        ([signal.SIGINT], 130),
        ([signal.SIGTERM, signal.SIGINT], 130),
        ([signal.SIGINT, signal.SIGTERM], 130),
        ([signal.SIGINT, signal.SIGTERM, signal.SIGINT], None),
    ],
)
def test_only_a_second_ctrl_c_stops_without_saving(signals, code):
    saved = []
    with Interruption(Processes(alone=True)) as interruption:
        interruption.save = lambda: saved.append(True)

        def all_of_them():
            for number in signals:
                os.kill(os.getpid(), number)
            interruption.check(True)

        with pytest.raises(KeyboardInterrupt if code is None else InterruptedRunError) as stopped:
            all_of_them()
    assert bool(saved) == (code is not None)
    assert code is None or stopped.value.exit_code == code


def test_a_signal_that_a_run_did_not_notice_stops_what_comes_next():
    """It arrives in the last scoring of a run of a queue, or between two of its runs."""
    with Interruption(Processes(alone=True)) as queue:
        with Interruption(Processes(alone=True)) as run:
            run.check_signals()
            os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(InterruptedRunError) as stopped:
            queue.check_signals()
        assert stopped.value.exit_code == 143
        with Interruption(Processes(alone=True)) as following, pytest.raises(InterruptedRunError):
            following.check_signals()
    with Interruption(Processes(alone=True)) as another:
        another.check_signals()


def diverging(log_every: int, courses: dict[str, list[float]], step: int = 1) -> str:
    """The message of a watch that is shown these terms."""
    weights = {"kd": "kd.weight", "pm": "pm.weight"}
    given = {"weights": weights, "rate": "optim.lr_later" if step else "optim.lr"}
    watch = Watch(step, len(courses["ce"]), NoLog(), lambda entry: None, log_every, 1e9, **given)
    with pytest.raises(NotFiniteError) as error:
        for values in zip(*courses.values(), strict=True):
            terms = dict(zip(courses, map(torch.tensor, values), strict=True))
            watch.add(terms, torch.tensor(sum(values)))
            watch.end_iteration(batch(0), dict)
    return str(error.value)


inf, nan = float("inf"), float("nan")


@pytest.mark.parametrize("log_every", [1, 2, 5])
def test_a_divergence_names_the_term_that_grew_first_and_its_setting(log_every):
    """All become NaN at once, but kd has grown since the third iteration and ce since the fourth."""
    terms = {"ce": [1.0, 1.2, 1.1, 90.0, nan], "kd": [0.5, 0.6, 4.0, 1e30, nan], "pm": [0.1, 0.1, 0.1, 0.1, nan]}
    said = diverging(log_every, terms)
    assert said.startswith("step 1, iteration 4: the terms ce, kd, pm are not finite; kd grew first. Images: a, b.")
    assert "Lower kd.weight or optim.lr_later and start in a new folder" in said and "on_divergence=lower" in said


@pytest.mark.parametrize("log_every", [1, 3, 20])
def test_a_long_tail_that_is_not_finite_does_not_hide_what_grew_first(log_every):
    """As many values as are kept; pm has grown from the second iteration on, kd when all was lost."""
    tail = [nan] * 16
    terms = {"ce": [2.0] * 4, "kd": [0.1, 0.1, 0.1, 50.0], "pm": [1e-9, 0.01, 0.6, 12.0]}
    terms = {name: [*values, *tail] for name, values in terms.items()}
    assert "pm grew first" in diverging(log_every, terms)


def test_terms_that_were_never_finite_are_named_where_another_began_at_zero():
    """The loss has no finite value then, by which the growth of others could be measured."""
    said = diverging(20, {"ce": [inf] * 6, "kd": [0.0, 0.0, 0.0, 0.0, 0.5, 0.7]})
    assert "the term ce is not finite; ce grew first" in said


def test_a_term_without_a_weight_is_lowered_by_the_rate():
    said = diverging(1, {"ce": [1.0, inf]}, step=0)
    assert "the term ce is not finite; ce grew first" in said and "Lower optim.lr and start" in said


def test_parts_of_a_batch_add_up_in_the_log():
    shown = []
    watch = Watch(0, 4, NoLog(), shown.append, 2, 1e9)
    for _ in range(2):
        for part in (1.0, 2.0):
            watch.add({"ce": torch.tensor(part)}, torch.tensor(2 * part))
        watch.end_iteration(batch(0), dict)
    assert shown[-1]["losses"] == {"ce": 3.0, "loss": 6.0}


@pytest.mark.parametrize("where", [0, 1])
def test_a_lowered_rate_survives_a_stop(tmp_path, monkeypatch, where):
    """The step goes on with that rate, and says so; a step 0 that was trained with it is no base."""
    import sdrseg.engine.training as engine

    real, tried, stopped = engine.make_optimiser, [], []

    def make_optimiser(network, method, config):
        tried.append((method.step.number, config.optim.lr))
        return real(network, method, config)

    class Exploding(Watch):
        def _check(self, values):
            if self.step == where and self.iteration >= 3 and tried[-1][1] > 0.01:
                raise NotFiniteError("not finite. Images: x.")
            if self.step == where and self.iteration >= 5 and not stopped:
                stopped.append(self.iteration)
                raise RuntimeError("stopped")
            super()._check(values)

    monkeypatch.setattr(engine, "make_optimiser", make_optimiser)
    monkeypatch.setattr(engine, "Watch", Exploding)
    settings = parse_settings(
        [*TINY, "optim.lr=0.02", "optim.lr_later=0.02", "train.epochs=3", "run.on_divergence=lower"]
    )
    given = {"bases": tmp_path / "bases", "display": Quiet()}
    with pytest.raises(RuntimeError, match="stopped"):
        train("shapes:9-1@disjoint", "ft", tmp_path / "run", settings=settings, **given)
    train("shapes:9-1@disjoint", "ft", tmp_path / "run", settings=settings, **given)
    rates = [rate for step, rate in tried if step == where]
    assert rates == pytest.approx([0.02, 0.02 / 3, 0.02 / 3])
    resumed = [e for e in map(json.loads, (tmp_path / "run/log.jsonl").open()) if e["event"] == "resume"]
    assert [(e["step"], e["iteration"]) for e in resumed] == [(where, 2), (where, 4)]
    metas = [json.loads((tmp_path / f"run/steps/{n}/meta.json").read_text()) for n in (0, 1)]
    assert [m.get("lowered_rate") for m in metas] == [pytest.approx(1 / 3) if n == where else None for n in (0, 1)]
    assert len(list((tmp_path / "bases").glob("*/meta.json"))) == where and ("base" in metas[0]) == bool(where)
    if where == 0:
        with pytest.raises(SdrsegError, match="no base that other runs can share: its learning rate was lowered"):
            export_base(tmp_path / "run", tmp_path / "travel", None, tmp_path / "bases")
    cell = cell_of(tmp_path / "run")
    assert cell["settings"]["lowered_rate"] == f"step {where} × 0.33"


def test_a_run_that_diverges_continues_with_a_lower_rate(tmp_path, monkeypatch):
    """Step 1 fails at iteration 3 until its rate is a ninth: first from the saved state, then from the beginning."""
    import sdrseg.engine.training as engine

    real, tried = engine.make_optimiser, []

    def make_optimiser(network, method, config):
        tried.append((method.step.number, config.optim.lr))
        return real(network, method, config)

    class Exploding(Watch):
        def _check(self, values):
            assert self._weights["kd"] == "kd.weight"
            if self.step == 1 and self.iteration >= 3 and tried[-1][1] > 0.003:
                raise NotFiniteError("step 1, iteration 3: the term kd is not finite; kd grew first. Images: x.")
            super()._check(values)

    monkeypatch.setattr(engine, "make_optimiser", make_optimiser)
    monkeypatch.setattr(engine, "Watch", Exploding)
    settings = parse_settings([*TINY, "optim.lr_later=0.02", "train.epochs=3", "run.on_divergence=stop"])
    given = {"bases": tmp_path / "bases", "display": Quiet()}
    with pytest.raises(NotFiniteError):
        train("shapes:9-1@disjoint", "ft", tmp_path / "run", settings=settings, **given)
    assert json.loads((tmp_path / "run/state/current.json").read_text())["iteration"] == 2
    settings["run.on_divergence"] = "lower"
    train("shapes:9-1@disjoint", "ft", tmp_path / "run", settings=settings, **given)
    assert [step for step, _ in tried] == [0, 1, 1, 1, 1]
    assert [rate for _, rate in tried] == pytest.approx([0.02, 0.02, 0.02, 0.02 / 3, 0.02 / 9])
    said = [text for text in given["display"].said if "Retrying" in str(text)]
    assert said[0].endswith("kd grew first. Retrying with 0.33 of the learning rate.") and "with 0.11 of" in said[1]
    meta = json.loads((tmp_path / "run/steps/1/meta.json").read_text())
    assert meta["lowered_rate"] == pytest.approx(1 / 9)
    resumed = [e for e in map(json.loads, (tmp_path / "run/log.jsonl").open()) if e["event"] == "resume"]
    assert [e["iteration"] for e in resumed] == []  # the last attempt began at the beginning
