"""Mistakes in custom methods are named before a step is trained; what a method adds survives a resume."""

from __future__ import annotations

import json
import os
import random
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from runs import SPEC, TINY, Quiet, content, run
from sdrseg.config import parse_settings
from sdrseg.engine.launch import InterruptedRunError, make_fabric
from sdrseg.engine.optimiser import make_optimiser
from sdrseg.engine.passes import Pass
from sdrseg.engine.run import train
from sdrseg.errors import UsageError
from sdrseg.methods import METHODS, Method, StepInfo, register_method
from sdrseg.methods.sdr import SDR
from sdrseg.network import build_network

from methods_bench import N_OLD, begin, make_config


def optimiser_of(groups, kind: type[Method] = Method) -> torch.optim.Optimizer:
    """The optimiser of a method whose parameter_groups is `groups`."""
    config = make_config("ft")
    network = build_network(config.net, N_OLD)
    made = type("Grouped", (kind,), {"name": "grouped", "parameter_groups": lambda self, *given: groups(*given)})
    return make_optimiser(network, made(config), config)


def test_groups_may_be_iterators():
    found = optimiser_of(lambda net, a, b: [{"params": net.decoder_parameters(), "lr": b}])
    config = make_config("ft")
    names = [name for name, _ in build_network(config.net, N_OLD).named_parameters() if not name.startswith("encoder")]
    assert len(found.param_groups[0]["params"]) == len(names) > 0
    some = optimiser_of(lambda net, a, b: [{"params": [], "lr": a}, {"params": [net.classifier.bias], "lr": b}])
    assert len(some.param_groups) == 1
    one = optimiser_of(lambda net, a, b: [{"params": net.classifier.weight, "lr": b, "weight_decay": 0.5}])
    assert len(one.param_groups[0]["params"]) == 1 and one.param_groups[0]["weight_decay"] == 0.5


@pytest.mark.parametrize(
    ("groups", "said"),
    [
        (lambda net, a, b: [], r"parameter_groups returns \[\]"),
        (lambda net, a, b: net.decoder_parameters(), "parameter_groups returns <generator"),
        (lambda net, a, b: [{"params": list(net.parameters())}], 'a group 1 without "params" or "lr"'),
        (lambda net, a, b: [{"params": iter(()), "lr": a}, {"params": [], "lr": b}], "no parameter in any group"),
        (
            lambda net, a, b: [{"params": net.parameters(), "lr": a}, {"params": [net.classifier.bias], "lr": b}],
            r"names classifier\.bias twice",
        ),
        (lambda net, a, b: [{"params": [net.classifier], "lr": a}], "has Conv2d in group 1, which is no parameter"),
        (lambda net, a, b: [{"params": [2 * net.classifier.bias], "lr": a}], "has Tensor in group 1"),
        (lambda net, a, b: [{"params": [net.classifier.bias], "lr": "0.1"}], "has the learning rate '0.1' in group 1"),
        (lambda net, a, b: [{"params": [net.classifier.bias], "lr": float("nan")}], "learning rate nan in group 1"),
    ],
)
def test_mistakes_in_groups_are_named(groups, said):
    with pytest.raises(UsageError, match=f"method grouped: .*{said}.* Return a list of groups such as"):
        optimiser_of(groups)


class Forgetful(SDR):
    """Does not save what SDR remembers."""

    name = "forgetful"

    def state_dict(self):
        return {}


class Careless(SDR):
    """Does not load it."""

    name = "careless"

    def load_state_dict(self, state):
        pass


class Counting(Method):
    name = "counting"

    def state_dict(self):
        return super().state_dict() | {"count": 3}


@pytest.mark.parametrize(
    ("kind", "said", "done"),
    [
        (Forgetful, r"its state_dict\(\) lacks prototypes\..*Begin with super\(\)\.state_dict\(\)", 1),
        (Careless, r"its load_state_dict\(\) does not load prototypes\.", 1),
        (Counting, r"its state_dict\(\) has 'count' of type int\. Save tensors", 1),
    ],
)
def test_mistakes_in_the_state_are_named_before_a_step_is_trained(tmp_path, monkeypatch, kind, said, done):
    monkeypatch.setitem(METHODS, kind.name, kind)
    with pytest.raises(UsageError, match=f"method {kind.name}: {said}"):
        run(tmp_path / "run", kind.name)
    assert [p.name for p in (tmp_path / "run/steps").glob("*/meta.json")] == ["meta.json"] * done
    assert not list((tmp_path / "run").glob("state/*"))


class Surveying(Method):
    """Makes what it remembers in the survey, as docs/add-a-method.md says."""

    name = "surveying"
    summary = "sums of a survey"
    own_step0 = True

    def begin_survey(self, when):
        self.sums = torch.zeros(())

    def survey(self, batch, student, teacher):
        self.sums += student.features.mean()

    def state_dict(self):
        return super().state_dict() | {"surveying.sums": self.sums}


def test_state_may_be_made_in_the_survey(tmp_path, monkeypatch):
    monkeypatch.setitem(METHODS, "surveying", Surveying)
    assert run(tmp_path / "run", "surveying")["steps"] == 3


def test_labels_instead_of_a_batch_are_named(monkeypatch):
    stage = begin("ft", "disjoint")
    monkeypatch.setattr(METHODS["ft"], "relabel", lambda self, batch, teacher: batch.labels)
    fabric = make_fabric(stage.method.config)
    with pytest.raises(UsageError, match=r"relabel\(\) returns Tensor\. Return the batch with other labels"):
        Pass(fabric, stage.method, fabric.setup(stage.student), stage.teacher)(stage.batch)


@pytest.mark.parametrize("name", ["my method", "a/b", "../up", "a:b", "x.py", "é" * 61])
def test_a_name_that_cannot_be_that_of_a_file_is_refused(name):
    made = type("Named", (Method,), {"name": name, "summary": "s"})
    with pytest.raises(UsageError, match="the name of a method consists of at most 60 letters"):
        register_method(made)
    assert name not in METHODS


def test_the_weight_of_a_penalty_that_a_method_lacks_is_refused(tmp_path):
    with pytest.raises(UsageError, match=r"importance\.weight = 500: ft has no penalty .* Use ewc, pi, rw"):
        run(tmp_path / "run", "ft", "importance.weight=500")
    assert not (tmp_path / "run").exists()


class Scaled(Method):
    """Learns a scale of its own, makes it anew when it is loaded, and draws from NumPy and Python."""

    name = "scaled"
    summary = "a parameter and random numbers of its own"
    own_step0 = True

    def begin_step(self, step: StepInfo, student, teacher) -> None:
        super().begin_step(step, student, teacher)
        self.scale = nn.Parameter(torch.ones(()))

    def parameter_groups(self, network, encoder, decoder):
        groups = super().parameter_groups(network, encoder, decoder)
        return [*groups, {"params": [self.scale], "lr": 10 * decoder}]

    def more_terms(self, batch, student, teacher):
        wanted = 3 + np.random.rand() + random.random()  # noqa: NPY002
        return {"scale": (self.scale - wanted).square()}

    def state_dict(self):
        return super().state_dict() | ({"scaled.scale": self.scale.detach()} if hasattr(self, "scale") else {})

    def load_state_dict(self, state):
        super().load_state_dict(state)
        if "scaled.scale" in state:
            self.scale = nn.Parameter(state["scaled.scale"].clone())


class Impatient(Quiet):
    """Interrupts step 1 once."""

    interrupted = False

    def update(self, entry):
        if entry["step"] == 1 and entry["iteration"] >= 3 and not self.interrupted:
            self.interrupted = True
            os.kill(os.getpid(), signal.SIGINT)


def test_a_method_with_parameters_and_random_numbers_resumes_exactly(tmp_path, monkeypatch):
    monkeypatch.setitem(METHODS, "scaled", Scaled)
    given = {"settings": parse_settings(TINY)}

    def trained(name: str, display: Quiet) -> Path:
        np.random.seed(5)  # noqa: NPY002 - what came before does not matter
        random.seed(5)
        for _ in range(2):
            try:
                train(SPEC, "scaled", tmp_path / name, bases=tmp_path / f"bases-{name}", display=display, **given)
            except InterruptedRunError:
                np.random.seed(6)  # noqa: NPY002
                random.seed(6)
        return tmp_path / name

    whole, cut = trained("whole", Quiet()), trained("cut", Impatient())
    assert [e["event"] for e in map(json.loads, (cut / "log.jsonl").open())].count("resume") == 1
    assert content(whole) == content(cut)
