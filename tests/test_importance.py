"""EWC, PI and RW against plain NumPy, over a few iterations with gradients made up by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sdrseg.losses import importance as ours

from methods_bench import N_OLD, begin

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
    added = 2 * 1000 * stages[1].method.held["classifier.weight"] * 0.01
    assert torch.allclose((gradients[1] - gradients[0])[:N_OLD], added, rtol=1e-3, atol=5e-3)
    assert torch.equal(gradients[0][N_OLD:], gradients[1][N_OLD:])
