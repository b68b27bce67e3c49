"""What a method may see and change: stages, classifier, surveys, labels, parameter groups and rows."""

from __future__ import annotations

import copy
import json
import os
import signal
from dataclasses import replace
from functools import cached_property, partial, partialmethod

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from runs import SPEC, TINY, Quiet, content, run
from sdrseg.config import parse_settings
from sdrseg.config.switches import Pseudo
from sdrseg.datasets.augment import normalise
from sdrseg.engine.fit import update
from sdrseg.engine.launch import InterruptedRunError, make_fabric
from sdrseg.engine.optimiser import make_optimiser
from sdrseg.engine.passes import CompiledPass
from sdrseg.engine.run import train
from sdrseg.engine.speed import make_pass
from sdrseg.methods import METHODS, Method, StepInfo
from sdrseg.methods.base import adds_code
from sdrseg.network import build_network

from methods_bench import N_NEW, N_OLD, begin, make_batch, make_config


class Curious(Method):
    """Uses all that a method may use."""

    name = "curious"
    summary = "survey, stages, classifier, groups, rows, decision"
    own_step0 = True
    replayable = True
    needs_stages = True
    decision = "sigmoid"
    row_rates = (0.0, 3.0)

    def __init__(self, config, processes=None):
        super().__init__(config, processes)
        self.mean = torch.zeros(64)
        self.surveys: list[tuple[str, list[str]]] = []

    def wants_survey(self, when):
        return (self.step.number, when) != (0, "before")

    def begin_survey(self, when):
        self.total, self.count = torch.zeros(64), torch.zeros(())
        self.surveys.append((when, []))

    def survey(self, batch, student, teacher):
        assert not torch.is_grad_enabled() and not self.student.training and len(student.stages) > 1
        assert (teacher is None) == (self.step.number == 0)
        self.surveys[-1][1].extend(batch.ids)
        self.total += student.embedding.sum((0, 2, 3))
        self.count += student.embedding[:, 0].numel()

    def end_survey(self, when):
        self.mean = self.processes.sum(self.total) / self.processes.sum(self.count)
        if when == "before" and self.step.number > 0:
            with torch.no_grad():
                self.student.classifier.weight[self.step.n_old :, :, 0, 0] = 0.01 * self.mean

    def parameter_groups(self, network, encoder, decoder):
        first, second = super().parameter_groups(network, encoder, decoder)
        return [{**first, "lr": 0.5 * encoder, "weight_decay": 0.0}, second]

    def more_terms(self, batch, student, teacher):
        rows = self.student.classifier.weight[self.step.n_old :, :, 0, 0]
        terms = {"rows": (rows - self.mean).square().mean()}
        if teacher is not None:
            pairs = zip(student.stages, teacher.stages, strict=True)
            terms["stages"] = sum(F.mse_loss(a.float(), b.float()) for a, b in pairs)
        return terms

    def state_dict(self):
        return super().state_dict() | {"curious.mean": self.mean}

    def load_state_dict(self, state):
        super().load_state_dict(state)
        self.mean = state["curious.mean"].clone()


@pytest.fixture
def curious(monkeypatch):
    monkeypatch.setitem(METHODS, "curious", Curious)
    made = []
    start = Curious.begin_step

    def remember(self, *given):
        made.append(self)
        start(self, *given)

    monkeypatch.setattr(Curious, "begin_step", remember)
    return made


def test_a_survey_sees_each_image_once_where_wanted_and_a_resumed_run_does_not_repeat_it(curious, tmp_path):
    run(tmp_path / "whole", "curious", bases=tmp_path / "b1")
    both = ["before", "after"]
    assert [[when for when, _ in method.surveys] for method in curious] == [["after"], both, both]
    scenario = json.loads((tmp_path / "whole/scenario.json").read_text())
    for method, step in zip(curious, scenario["steps"], strict=True):
        for _, seen in method.surveys:
            assert sorted(seen) == sorted(step["train_ids"])

    class Impatient(Quiet):
        def update(self, entry):
            if entry["step"] == 1 and entry["iteration"] == 1:
                os.kill(os.getpid(), signal.SIGINT)

    curious.clear()
    settings = [*TINY[:-1], "run.save_minutes=60"]
    with pytest.raises(InterruptedRunError):
        train(
            SPEC,
            "curious",
            tmp_path / "cut",
            settings=parse_settings(settings),
            bases=tmp_path / "b2",
            display=Impatient(),
        )
    run(tmp_path / "cut", "curious", bases=tmp_path / "b2")
    assert [[when for when, _ in m.surveys] for m in curious] == [["after"], ["before"], ["after"], both]
    assert content(tmp_path / "cut") == content(tmp_path / "whole")


@pytest.mark.parametrize("settings", [(), ("pseudo.threshold=0.3", "ce.kind=unbiased", "kd.weight=1")])
def test_stages_classifier_and_new_labels_in_a_compiled_pass(curious, monkeypatch, settings):
    monkeypatch.setattr(CompiledPass, "backend", "aot_eager")
    found = []
    for speed in ("plain", "compile"):
        config = make_config("curious", "default", f"run.speed={speed}", *settings)
        torch.manual_seed(0)
        student = build_network(config.net, N_OLD)
        teacher = copy.deepcopy(student).eval().requires_grad_(False)
        student.keep_stages = teacher.keep_stages = True
        method = Curious(config)
        method.begin_step(StepInfo(1, N_OLD, N_NEW, "disjoint"), student, teacher)
        fabric = make_fabric(config)
        compute = make_pass(fabric, method, fabric.setup(student.train()), teacher, config, 0, print)
        for _ in range(2):
            compute.zero_gradients()
            passed = compute(make_batch(1, "disjoint", 4))
        assert compute.how == {"plain": "plain", "compile": "compiled"}[speed]
        assert {"rows", "stages"} <= passed.terms.keys()
        found.append(torch.cat([p.grad.flatten() for p in student.parameters()]))
    assert float((found[0] - found[1]).norm() / found[0].norm()) < 1e-5


# --- rows and groups -------------------------------------------------------------------------------------------------


def test_rows_move_at_their_own_rates_as_if_they_were_apart(curious):
    """Old rows bit for bit; new ones as in a group of their own with three times the rate."""
    config = make_config("curious", "default", "optim.weight_decay=0.1")
    student = build_network(config.net, N_OLD)
    method = Curious(config)
    method.begin_step(StepInfo(1, N_OLD, N_NEW, "disjoint"), student, None)
    optimiser = make_optimiser(student, method, config.of_step(1))
    assert [g["lr"] for g in optimiser.param_groups] == [0.5 * config.optim.lr_later, config.optim.lr_later]
    assert [g["weight_decay"] for g in optimiser.param_groups] == [0.0, 0.1]
    weight = student.classifier.weight
    old, new = weight[:N_OLD].detach().clone(), weight[N_OLD:].detach().clone().requires_grad_()
    options = {"momentum": config.optim.momentum, "nesterov": config.optim.nesterov, "weight_decay": 0.1}
    apart = torch.optim.SGD([new], lr=3 * config.optim.lr_later, **options)
    for seed in range(4):
        torch.manual_seed(seed)
        for parameter in student.parameters():
            parameter.grad = torch.randn_like(parameter)
        new.grad = weight.grad[N_OLD:].clone()
        update(optimiser, method, student)
        apart.step()
    assert torch.equal(weight[:N_OLD], old)
    torch.testing.assert_close(weight[N_OLD:], new, rtol=1e-5, atol=1e-6)
    method.step = StepInfo(0, 0, N_OLD, "disjoint")
    update(optimiser, method, student)
    assert not torch.equal(weight[:N_OLD], old)  # in step 0 all rows learn


# --- labels ----------------------------------------------------------------------------------------------------------


def by_hand(batch, teacher, decision, threshold):
    """Pseudo-labels pixel by pixel."""
    labels = batch.labels.numpy().copy()
    t = teacher.logits.double().numpy()
    for b, y, x in np.ndindex(*labels.shape):
        z = t[b, :, y, x]
        if decision == "softmax":
            p = np.exp(z - z.max())
            p = p / p.sum()
        else:
            p = 1 / (1 + np.exp(-z))
            p[0] = 1 - p[1:].max()
        best = int(p.argmax())
        if labels[b, y, x] == 0 and best > 0 and p[best] >= threshold:
            labels[b, y, x] = best
    return labels


def ready(*settings, decision="softmax"):
    """A method in step 1, its batch, and what student and teacher say."""
    stage = begin("mib", "disjoint", settings=settings, base_iterations=30, base_lr=0.05)
    stage.method.step = replace(stage.method.step, teacher_decision=decision)
    images = normalise(stage.batch.images)
    with torch.no_grad():
        return stage.method, stage.batch, stage.student(images), stage.teacher(images)


@pytest.mark.parametrize(("decision", "threshold"), [("softmax", 0.4), ("softmax", 1.0), ("sigmoid", 0.7)])
def test_background_that_the_teacher_knows_gets_its_class(decision, threshold):
    method, batch, _, teacher = ready(f"pseudo.threshold={threshold}", decision=decision)
    found = method.relabel(batch, teacher)
    expected = by_hand(batch, teacher, decision, threshold)
    np.testing.assert_array_equal(found.labels.numpy(), expected)
    assert found.labels.dtype == torch.uint8
    if threshold < 1:
        assert 0 < (found.labels != batch.labels).sum() < (batch.labels == 0).sum()
    assert torch.equal(method.relabel(batch, None).labels, batch.labels)


@pytest.mark.parametrize("kd", [0, 10])
@pytest.mark.parametrize("reduction", ["valid", "all"])
def test_a_relabelled_pixel_has_the_plain_cross_entropy(kd, reduction):
    method, batch, student, teacher = ready("pseudo.threshold=0.4", f"kd.weight={kd}", f"ce.reduction={reduction}")
    terms = method.terms(method.relabel(batch, teacher), student, teacher)
    labels, z = by_hand(batch, teacher, "softmax", 0.4), student.logits.double().numpy()
    loss, count = 0.0, 0
    for b, y, x in np.ndindex(*labels.shape):
        own, powers = labels[b, y, x], np.exp(z[b, :, y, x])
        count += own != 255 or reduction == "all"
        if own != 255:
            q = powers[:N_OLD].sum() if own == 0 else powers[own]
            loss -= np.log(q / powers.sum())
    assert terms["ce"].item() == pytest.approx(loss / count, rel=1e-5)
    method.config = replace(method.config, pseudo=Pseudo())
    plain = method.terms(batch, student, teacher)
    assert terms["ce"] != plain["ce"]
    if kd:
        assert terms["kd"] == plain["kd"]


def test_a_method_with_a_term_of_its_own_gets_its_teacher():
    class Own(Method):
        name, summary = "own", "own"

        def more_terms(self, batch, student, teacher):
            return {}

    assert Own(make_config("ft")).needs_teacher
    assert not any(METHODS[name](make_config(name)).needs_teacher for name in ("ft", "offline", "ewc", "pi", "rw"))
    assert METHODS["ewc"](make_config("ewc", "default", "kd.weight=1")).needs_teacher


@pytest.mark.parametrize(
    "hook", ["after_backward", "after_update", "end_step", "begin_survey", "distilled", "row_rates"]
)
def test_a_method_with_any_code_of_its_own_gets_its_teacher(hook):
    def code(self, *given):
        return getattr(super(kind, self), hook)(*given)

    kind = type("Own", (Method,), {"name": "own", "summary": "own", hook: code})
    assert kind(make_config("ft")).needs_teacher
    kind = type("OwnEWC", (METHODS["ewc"],), {hook: code})
    assert kind(make_config("ewc")).needs_teacher


class Scaled:
    """A descriptor."""

    def __get__(self, method, kind):
        return 1.0


@pytest.mark.parametrize(
    "code",
    [
        partialmethod(lambda self, *given, scale: None, scale=2.0),
        partial(lambda *given, scale: None, scale=2.0),
        classmethod(lambda cls, *given: None),
        staticmethod(lambda *given: None),
        cached_property(lambda self: None),
        Scaled(),
        F.relu,
    ],
    ids=lambda code: type(code).__name__,
)
@pytest.mark.parametrize("base", ["ft", "ewc"])
def test_code_of_any_kind_counts_as_code_of_its_own(code, base):
    kind = type("Own", (METHODS[base],), {"name": "own", "summary": "own", "after_update": code})
    assert kind(make_config(base)).needs_teacher


def test_a_value_in_place_of_code_counts_as_code():
    kind = type("Own", (METHODS["ft"],), {"name": "own", "summary": "own", "decision": "sigmoid"})
    assert adds_code(kind, METHODS["ft"]) and not adds_code(METHODS["mib"], METHODS["ft"])


def test_a_method_without_code_of_its_own_has_a_teacher_only_for_its_terms():
    values = {"name": "own", "summary": "own", "needs_stages": True}
    assert not type("Own", (METHODS["ft"],), values)(make_config("ft")).needs_teacher
    assert type("Own", (METHODS["mib"],), values)(make_config("mib")).needs_teacher
    assert not type("Own", (METHODS["rw"],), values)(make_config("rw")).needs_teacher
    values |= {"settings": Pseudo, "trains_step0_like": METHODS["ft"], "__annotations__": {"needs_stages": bool}}
    mixin = type("Mixin", (), {"needs_stages": True})
    assert not type("Own", (mixin, METHODS["ft"]), values)(make_config("ft")).needs_teacher
