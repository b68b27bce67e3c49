"""EWC, PI and RW against plain NumPy, over a few iterations with gradients made up by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from runs import run
from sdrseg.distributed import Processes
from sdrseg.engine.bases import base_of
from sdrseg.engine.checkpoint import load_tensors
from sdrseg.errors import SdrsegError
from sdrseg.losses import importance as ours
from sdrseg.methods import METHODS, From, StepInfo
from sdrseg.methods.importance import AllImportances
from sdrseg.network import build_network

from methods_bench import N_OLD, begin, make_config

RNG = np.random.default_rng(5)
WAY = RNG.normal(size=(24, 3, 2))  # the parameter before each iteration
GRADIENTS = RNG.normal(size=(24, 3, 2))


def tensor(array) -> torch.Tensor:
    return torch.from_numpy(np.asarray(array, np.float64))


def test_fisher_is_an_exponential_mean_of_squared_gradients():
    expected, found = np.ones((3, 2)), torch.ones(3, 2, dtype=torch.float64)
    for gradient in GRADIENTS:
        expected = 0.9 * gradient**2 + 0.1 * expected
        found = ours.fisher_update(found, tensor(gradient))
    assert np.allclose(found.numpy(), expected, atol=1e-12)


def test_path_integral():
    expected, found = np.zeros((3, 2)), torch.zeros(3, 2, dtype=torch.float64)
    for before, now, gradient in zip(WAY[:-1], WAY[1:], GRADIENTS[1:], strict=True):
        expected += gradient * (before - now)
        found = ours.path_update(found, tensor(gradient), tensor(before), tensor(now))
    omega = np.maximum(0, expected / ((WAY[-1] - WAY[0]) ** 2 + 1e-20)) + 0.5
    result = ours.path_importance(found, tensor(WAY[0]), tensor(WAY[-1]), torch.full((3, 2), 0.5, dtype=torch.float64))
    assert np.allclose(result.numpy(), omega, rtol=1e-12)


def test_riemannian_score():
    fisher = np.abs(RNG.normal(size=(3, 2)))
    expected = GRADIENTS[0] * (WAY[0] - WAY[1]) / (0.5 * fisher * (WAY[1] - WAY[0]) ** 2 + 1e-8)
    found = ours.score_update(
        torch.zeros(3, 2, dtype=torch.float64), tensor(GRADIENTS[0]), tensor(fisher), tensor(WAY[0]), tensor(WAY[1])
    )
    assert np.allclose(found.numpy(), expected, rtol=1e-12)
    positive = np.maximum(0, expected)
    assert np.allclose(ours.score_importance(found, None).numpy(), positive)
    assert np.allclose(ours.score_importance(found, tensor(np.ones((3, 2)))).numpy(), (positive + 1) / 2)


def test_importances_are_brought_to_0_to_1():
    values = RNG.normal(size=(4, 5))
    expected = (values - values.min()) / (values.max() - values.min() + 1e-8)
    assert np.allclose(ours.normalised(tensor(values)).numpy(), expected)
    assert torch.equal(ours.normalised(torch.ones(3)), torch.zeros(3))  # all alike: nothing stands out


def test_the_penalty_and_its_gradient_with_rows_that_are_new():
    now = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    old, weight = torch.randn(3, 3, dtype=torch.float64), torch.rand(3, 3, dtype=torch.float64)
    value = ours.penalty({"w": now}, {"w": old}, {"w": weight})
    there = now.detach()
    expected = sum(float(weight[i, j] * (there[i, j] - old[i, j]) ** 2) for i in range(3) for j in range(3))
    assert value.item() == pytest.approx(expected)
    (gradient,) = torch.autograd.grad(value, now)
    assert torch.allclose(gradient, ours.penalty_gradient(now.detach(), old, weight))
    assert not gradient[3:].any()


def test_the_penalty_never_enters_the_statistics():
    """EWC: with and without its penalty, the first update of the statistics in a later step is the same."""
    stages = [begin("ewc", "disjoint", settings=(f"importance.weight={w}",), lr=3e-4) for w in (0, 1000)]
    for stage in stages:
        with torch.no_grad():
            for parameter in stage.student.parameters():
                parameter += 0.01  # away from the anchor, so that the penalty has a gradient
        stage.iterate(1)
    free, held = (stage.method.memory["fisher"] for stage in stages)
    assert all(torch.equal(free[name], held[name]) for name in free)
    gradients = [dict(stage.student.named_parameters())["classifier.weight"].grad for stage in stages]
    added = 2 * 1000 * stages[1].method.importances["classifier.weight"] * 0.01
    assert torch.allclose((gradients[1] - gradients[0])[:N_OLD], added, rtol=1e-3, atol=5e-3)
    assert torch.equal(gradients[0][N_OLD:], gradients[1][N_OLD:])


# --- three steps against plain NumPy ---------------------------------------------------------------------------------

ITERATIONS, STEPS = 24, (3, 2, 2)  # rows that each step brings


def minmax(rows):
    return (rows - rows.min()) / (rows.max() - rows.min() + 1e-8)


def by_hand(name, way, gradients):
    """What is held of a bias after each step but the last: statistics row by row, normalised for each step's rows."""
    fisher, saved, omega, held = np.ones(0), None, np.zeros(0), []
    for step, rows in enumerate(STEPS):
        total = sum(STEPS[: step + 1])
        fisher, omega = np.append(fisher, np.ones(rows)), np.append(omega, np.zeros(rows))
        last, score, path = way[step][0], np.zeros(total), np.zeros(total)
        for iteration in range(1, ITERATIONS + 1):
            now, g = way[step][iteration - 1], gradients[step][iteration - 1]
            if name == "rw" and iteration in (11, 21):
                score += g * (last - now) / (0.5 * fisher * (now - last) ** 2 + 1e-8)
                last = now
            if name == "pi":
                path += g * (last - now)
                last = now
            fisher = 0.9 * g**2 + 0.1 * fisher
        omega = np.maximum(0, path / ((way[step][-1] - way[step][0]) ** 2 + 1e-20)) + omega
        score = np.maximum(0, score)
        if saved is not None:
            score[: len(saved)] = (score[: len(saved)] + saved) / 2
        saved = score
        parts = np.split(np.arange(total), np.cumsum(STEPS[: step + 1])[:-1])
        used = {"ewc": [fisher], "pi": [omega], "rw": [fisher, saved]}[name]
        held.append(sum(np.concatenate([minmax(kind[part]) for part in parts]) for kind in used))
    return held


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("name", ["ewc", "pi", "rw"])
def test_three_steps_of_importances(name, shared):
    """`shared`: step 0 is that of all three."""
    draw = np.random.default_rng(3)
    config = make_config(name, "default", "importance.weight=0")
    student = build_network(config.net, STEPS[0]).double()
    method = (AllImportances if shared else METHODS[name])(config, Processes(alone=True))
    way, gradients, held = [], [], []
    for step, rows in enumerate(STEPS):
        old = sum(STEPS[:step])
        method.begin_step(StepInfo(step, old, rows, "disjoint"), student, None)
        if step > 0:
            held.append(method.importances["classifier.bias"].numpy().copy())
        bias = student.classifier.bias
        moved = bias.detach().numpy().copy() + np.cumsum(0.1 * draw.normal(size=(ITERATIONS + 1, len(bias))), 0)
        moved[0] = bias.detach().numpy()
        way.append(moved)
        gradients.append(draw.normal(size=(ITERATIONS, len(bias))))
        for iteration in range(ITERATIONS):
            bias.grad = tensor(gradients[-1][iteration])
            method.after_backward(student)
            with torch.no_grad():
                bias.copy_(tensor(moved[iteration + 1]))
            method.after_update(student)
            if step == 1 and iteration == 12:  # stopped and resumed
                state = method.state_dict()
                method = METHODS[name](config, Processes(alone=True))
                method.begin_step(StepInfo(0, 0, 1, "disjoint"), student, None)
                method.load_state_dict(state)
        method.end_step(student)
        if step == 0:
            state = method.state_dict()
            method = METHODS[name](config, Processes(alone=True))
            method.load_state_dict(state)
    assert set(method.memory) == set(METHODS[name].carried)
    assert method.last_penalty == 0  # it is only logged, and would differ in its last digits after an interruption
    for found, expected in zip(held, by_hand(name, way, gradients), strict=False):
        np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-12)


def test_one_step_0_for_all_three_which_is_plain_training(tmp_path):
    run(tmp_path / "ft", "ft")
    plain = (tmp_path / "ft/steps/0/model.safetensors").read_bytes()
    for name in ("ewc", "pi", "rw"):
        run(tmp_path / name, name)
        assert (tmp_path / name / "steps/0/model.safetensors").read_bytes() == plain
        for step, expected in ((0, {"fisher", "saved", "omega"}), (1, set(METHODS[name].carried))):
            kept = load_tensors(tmp_path / name / f"steps/{step}/memory.safetensors")
            assert {key.split(".")[1] for key in kept if key.count(".") > 2} == expected
    assert len(list((tmp_path / "bases").iterdir())) == 2  # plain training remembers nothing


def test_a_custom_method_with_code_trains_its_own_step_0():
    config = make_config("ewc")

    class Doubled(METHODS["ewc"]):
        name = "doubled"

        def gather(self, name, gradient, now):
            super().gather(name, 2 * gradient, now)

    class Stronger(METHODS["ewc"]):
        name = "stronger"
        switches = {**METHODS["ewc"].switches, "importance.weight": From(7.0, "a test")}

    class Sigmoids(METHODS["ewc"]):
        name = "sigmoids"
        decision = "sigmoid"  # it is saved with step 0

    kinds = (Doubled, Stronger, Sigmoids)
    assert [base_of(kind, config)[0] for kind in kinds] == [Doubled, AllImportances, Sigmoids]


class Surveyed(METHODS["ewc"]):
    """A survey after step 0, which the class that trains it does not make."""

    trains_step0_like = AllImportances
    seen = 0

    def survey(self, batch, student, teacher):
        self.seen += len(batch.ids)

    def state_dict(self):
        return super().state_dict() | {"seen": torch.tensor(self.seen)}


class SurveyedFisher(Surveyed):
    """One that replaces some of the statistics."""

    trains_step0_like = AllImportances

    def end_survey(self, when):
        self.memory["fisher"]["classifier.bias"] = torch.full_like(self.memory["fisher"]["classifier.bias"], 7.0)


class Counted(METHODS["ft"]):
    """A statistic that exists only after the survey."""

    own_step0, sign, count = True, 1, None

    def wants_survey(self, when):
        return when == "after"

    def survey(self, batch, student, teacher):
        self.count = (self.count or 0) + self.sign * len(batch.ids)

    def state_dict(self):
        return super().state_dict() | ({"count": torch.tensor(self.count)} if self.count is not None else {})


class CountedDown(Counted):
    trains_step0_like = Counted
    sign = -1

    def survey(self, batch, student, teacher):
        super().survey(batch, student, teacher)


def test_what_a_survey_makes_replaces_what_the_trainer_of_step_0_made(tmp_path, monkeypatch):
    found = []
    for name, kind in (("counted", Counted), ("counted-down", CountedDown)):
        monkeypatch.setattr(kind, "name", name, raising=False)
        monkeypatch.setitem(METHODS, name, kind)
    for name in ("counted", "counted-down"):
        run(tmp_path / name, name)
        found.append(int(load_tensors(tmp_path / name / "steps/0/memory.safetensors")["count"]))
    assert found[0] > 0 and found == [found[0], -found[0]]


def test_a_survey_changes_only_what_it_changes(tmp_path, monkeypatch):
    """In the memory of a shared step 0, also where that was trained before."""
    kinds = {"surveyed": Surveyed, "surveyed-fisher": SurveyedFisher}
    for name, kind in kinds.items():
        monkeypatch.setattr(kind, "name", name, raising=False)
        monkeypatch.setitem(METHODS, name, kind)
    memories = {}
    for name in ("surveyed", "ewc", "surveyed-fisher"):
        run(tmp_path / name, name)
        memories[name] = load_tensors(tmp_path / name / "steps/0/memory.safetensors")
    seen = memories["surveyed"].pop("seen")
    assert seen > 0 and memories["surveyed"].keys() == memories["ewc"].keys()
    for name, tensor in memories["ewc"].items():
        assert torch.equal(memories["surveyed"][name], tensor), name
        wanted = torch.full_like(tensor, 7.0) if name == "importance.fisher.classifier.bias" else tensor
        assert torch.equal(memories["surveyed-fisher"][name], wanted), name


class Counting(METHODS["ewc"]):
    """Its own statistics, kept from step to step, also where step 0 is that of the three methods."""

    name = "counting"
    trains_step0_like = AllImportances

    def begin_statistics(self, parameters):
        super().begin_statistics(parameters)
        self.memory["steps"] = {"": self.memory.get("steps", {"": torch.zeros(())})[""] + 1}


def test_statistics_of_a_custom_method_are_kept():
    config = make_config("ewc")
    student = build_network(config.net, 2)
    base = AllImportances(config, Processes(alone=True))
    base.begin_step(StepInfo(0, 0, 2, "disjoint"), student, None)
    base.end_step(student)
    method = Counting(config, Processes(alone=True))
    method.load_state_dict(base.state_dict())
    for step in (1, 2):
        method.begin_step(StepInfo(step, step + 1, 1, "disjoint"), student, None)
        method.end_step(student)
        state, method = method.state_dict(), Counting(config, Processes(alone=True))
        method.load_state_dict(state)
        assert method.memory.keys() == {"fisher", "steps"} and method.memory["steps"][""] == step


def test_a_state_without_some_statistics_is_explained():
    """As an earlier version saved it."""
    config = make_config("pi")
    student = build_network(config.net, 2)
    method = METHODS["pi"](config, Processes(alone=True))
    method.begin_step(StepInfo(0, 0, 2, "disjoint"), student, None)
    state = {key: tensor for key, tensor in method.state_dict().items() if ".path." not in key}
    with pytest.raises(SdrsegError, match=r"method pi: the saved state lacks path\. .* start in a new folder"):
        method.load_state_dict(state)


def test_a_model_without_statistics_is_explained():
    method = METHODS["rw"](make_config("rw"), Processes(alone=True))
    for names in ([], ["prototypes.sum"], ["importance.fisher.head.weight", "importance.iteration"]):
        with pytest.raises(SdrsegError, match=r"rw needs statistics of the steps before \(fisher, saved\), which this"):
            method.require_state(names)
    method.require_state(["importance.fisher.head.weight", "importance.saved.head.weight"])


def test_new_rows_keep_their_own_score():
    found = ours.score_importance(torch.tensor([2.0, -1.0, 2.0]), torch.tensor([1.0, 1.0]))
    assert found.tolist() == [1.5, 0.5, 2.0]
