"""The official code's terms, and what the published sparsity term does."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as nn

from loss_cases import (
    OFFICIAL,
    OFFICIAL_SPARSITY,
    TERMS,
    Case,
    value_and_gradient,
)
from sdrseg.kernels import rows
from sdrseg.labels import VOID
from sdrseg.losses import official
from sdrseg.losses.contrast import (
    attraction,
    repulsion,
)
from sdrseg.losses.pixels import mean
from sdrseg.losses.prototypes import Prototypes, class_sums, in_batch, matching, update
from sdrseg.losses.sparsity import BY_CLASS, class_maxima, hoyer_sums, sparsity_sums

import reference as slow

# ---------------------------------------------------------------------------------------------------------------------
# What is wrong in the official code, each computed both ways


def _two_images(size: int = 4) -> tuple[Tensor, Tensor]:
    """Class 1 in one image, class 2 in both; channels with very different means, as after training."""
    g = torch.Generator().manual_seed(0)
    level = torch.rand(64, generator=g, dtype=torch.float64)[:, None, None] * 4
    F = level * torch.rand(2, 64, size, size, generator=g, dtype=torch.float64)
    y = torch.zeros(2, size, size, dtype=torch.long)
    y[0, : size // 4] = 1
    y[:, size // 2 : 3 * size // 4] = 2
    return F, y


def test_bug_a_mixes_channels_when_a_class_is_in_two_images():
    F, y = _two_images()
    true, _ = in_batch(class_sums(F, y, 3), "pixel")
    alone, shared = (official.scrambled(F, y, c) for c in (1, 2))
    torch.testing.assert_close(alone.mean(1), true[1])
    assert not torch.allclose(shared.mean(1), true[2])
    assert torch.equal(shared, torch.from_numpy(slow.official_scrambled(F.numpy(), y.numpy(), 2)))
    assert torch.corrcoef(torch.stack([shared.mean(1), true[2]]))[0, 1] < 0.5
    torch.testing.assert_close(shared.mean(), true[2].mean(), msg="the same values, in the wrong place")


def test_bug_a_enters_the_running_prototypes():
    F, y = _two_images()
    p, count = torch.zeros(3, 64, dtype=torch.float64), torch.zeros(3, dtype=torch.long)
    for _ in range(2):
        official.update_prototypes(p, count, F, y, drop_smallest=False)
    expected, seen = np.zeros((3, 64)), np.zeros(3, int)
    for _ in range(2):
        expected, seen = slow.official_prototypes(expected, seen, F.numpy(), y.numpy(), drop_smallest=False)
    np.testing.assert_allclose(p, expected, rtol=1e-12)
    assert count.tolist() == seen.tolist()
    start = Prototypes(torch.zeros_like(p), torch.zeros_like(count))
    ours = update(start, class_sums(F, y, 3), "pixel", torch.ones(3, dtype=torch.bool))
    torch.testing.assert_close(ours.mean[1], p[1])
    assert (ours.mean[2] - p[2]).abs().max() > 0.1


def test_bug_b_drops_a_class_when_there_is_no_background():
    F, y = _two_images()
    y = torch.where(y == 0, 1, y)
    p, count = torch.zeros(3, 64, dtype=torch.float64), torch.zeros(3, dtype=torch.long)
    official.update_prototypes(p, count, F, y, drop_smallest=True)
    assert count.tolist() == [0, 0, 8], "class 1 is lost"
    start = Prototypes(torch.zeros_like(p), torch.zeros_like(count))
    ours = update(start, class_sums(F, y, 3), "pixel", torch.tensor([False, True, True]))
    assert ours.seen.tolist() == [0, 24, 8]


def test_bug_b_only_background_changes_nothing_and_does_not_crash():
    F, y = _two_images()
    y = torch.zeros_like(y)
    p, count = torch.rand(3, 64, dtype=torch.float64), torch.tensor([0, 3, 2])
    before = p.clone()
    official.update_prototypes(p, count, F, y, drop_smallest=True)
    ours = update(Prototypes(p, count), class_sums(F, y, 3), "pixel", torch.tensor([False, True, True]))
    assert torch.equal(p, before)
    assert torch.equal(ours.mean, before)
    assert ours.seen.tolist() == count.tolist() == [0, 3, 2]


@pytest.mark.parametrize("class_id", [1, 2])
def test_bug_c_matches_the_mean_activation_of_all_channels(class_id):
    """In the official code a constant vector is closer to the "in-batch prototype" than the class's true mean is."""
    F, y = _two_images(16)
    pseudo = torch.where(y == class_id, class_id, 0)
    true = in_batch(class_sums(F, y, 3), "pixel")[0][class_id]
    constant = torch.full_like(true, true.mean().item())
    to_true, to_constant = (official.matching(F, pseudo, p.expand(3, -1)) for p in (true, constant))
    assert to_constant < to_true / 10
    known = torch.ones(3, dtype=torch.long)
    current, present = in_batch(class_sums(F, pseudo, 3), "pixel")
    ours = [matching(Prototypes(p.expand(3, -1), known), current, present, n_old=3) for p in (true, constant)]
    assert ours[0] < 1e-20 < ours[1]


@pytest.mark.parametrize("classes", [1, 2, 3, 4])
def test_bug_d_weighs_classes_geometrically(classes):
    """One class at a time is 1 away from its prototype, the others are on theirs: the loss is the class's weight."""
    y = torch.arange(classes).reshape(1, 1, classes)
    p = torch.zeros(classes, 4, dtype=torch.float64)
    prototypes, every = Prototypes(p, torch.ones(classes, dtype=torch.long)), torch.ones(classes, dtype=torch.bool)
    for j in range(1, classes + 1):
        F = (y == j - 1).double()[:, None].expand(1, 4, 1, classes)
        assert official.attraction(F, y, p).item() == pytest.approx(classes ** -(classes - j + 1.0))
        assert attraction(class_sums(F, y, classes), prototypes, every).item() == pytest.approx(1 / classes)


def test_bug_d_gives_three_classes_a_27th_a_9th_and_a_third():
    y = torch.arange(3).reshape(1, 1, 3)
    weights = [
        official.attraction((y == j).double()[:, None].expand(1, 4, 1, 3), y, torch.zeros(3, 4)).item()
        for j in range(3)
    ]
    assert weights == pytest.approx([1 / 27, 1 / 9, 1 / 3])


@pytest.mark.parametrize(("classes", "spurious"), [(25, False), (26, True), (60, True)])
def test_bug_e_adds_spurious_neighbours_above_25_classes(classes, spurious):
    """One image, so that bug A is away; 10 from each other, yet "1 / distance" of some to themselves enters."""
    g = torch.Generator().manual_seed(0)
    y = torch.arange(classes).reshape(1, 1, classes)
    F = (torch.randn(1, 256, 1, classes, generator=g) + 3).abs()
    exact = slow.official_repulsion(F.double().numpy(), y.numpy())
    measured = official.repulsion(F, y).item()
    every = torch.ones(classes, dtype=torch.bool)
    ours = repulsion(*in_batch(class_sums(F, y, classes), "pixel"), every, "pairs").item()
    assert ours == pytest.approx(exact, rel=1e-5)
    if spurious:
        assert measured > 2 * exact
    else:
        assert measured == pytest.approx(exact, rel=1e-5)


def test_official_repulsion_of_one_class_is_zero():
    F, y = _two_images()
    assert official.repulsion(F.requires_grad_(), torch.zeros_like(y)) == 0


def _sparsity(F: Tensor, y: Tensor, variant: Any) -> float:
    """Ours."""
    return mean(sparsity_sums(F, y, variant, class_maxima(F, y, 2))).item()


def _special(case: str) -> tuple[Tensor, Tensor]:
    """Features and labels on the grid in the cases where the official code is known to differ from our formulas."""
    F, y = _two_images()
    if case == "void":
        y = torch.where(y == 1, VOID, y)
    if case == "only background":
        y = torch.zeros_like(y)
    if case == "only void":
        y = torch.full_like(y, VOID)
    if case == "dead vectors":
        F = torch.where(torch.arange(4) == 1, 0, F)
    if case == "all zero":
        F = torch.zeros_like(F)
    return F, y


@pytest.mark.parametrize("variant", OFFICIAL_SPARSITY)
@pytest.mark.parametrize("case", ["void", "only background", "only void", "dead vectors", "all zero"])
def test_official_sparsity_of_special_cases(case, variant):
    """Void is a class, and a vector without activation counts. 0 where all is 0 after the normalisation; by class
    maxima that is also where all is background."""
    F, y = _special(case)
    expected = slow.official_sparsity(F.numpy(), y.numpy(), variant)
    value = official.sparsity(F.requires_grad_(), y, variant)
    assert value.item() == pytest.approx(expected, rel=1e-9)
    nothing_left = (case == "all zero" and variant != "entropy_softmax") or (
        case == "only background" and variant in BY_CLASS
    )
    assert (value == 0) == nothing_left
    assert torch.autograd.grad(value, F)[0].isfinite().all()


def test_official_sparsity_by_hand():
    """Features (2, 1) of class 1 and (4, 4) of void: by class maxima (1, ½) and (1, 1), as by the vectors' own."""
    F = torch.tensor([[[[2.0, 4.0]], [[1.0, 4.0]]]], dtype=torch.float64)
    e, ratio = math.e, (math.e + math.sqrt(math.e)) / 1.5
    by_hand = {"power2": (1.25 / 1.5 + 1) / 2, "power3": (1.125 / 1.5 + 1) / 2}
    by_hand |= dict.fromkeys(("class_max", "norm_max"), (ratio + e) / 2)
    for variant, expected in by_hand.items():
        assert official.sparsity(F, torch.tensor([[[1, VOID]]]), variant).item() == pytest.approx(expected)
        ours = _sparsity(F, torch.tensor([[[1, VOID]]]), variant)
        assert ours == pytest.approx({"power2": 1.25 / 1.5, "power3": 1.125 / 1.5}.get(variant, ratio))  # without void


def test_cil_of_the_official_code_pushes_the_student_away_from_the_teacher():
    case = Case.random(0)
    case = replace(case, y=torch.zeros_like(case.y), keep=torch.ones_like(case.keep))
    padded = torch.cat([case.t, torch.full_like(case.z[:, case.n_old :], -30)], 1)

    def disagreement(z: Tensor) -> float:
        return nn.kl_div(z.log_softmax(1), padded.softmax(1), reduction="batchmean").item()

    before = disagreement(case.z)
    for term, closer in ((TERMS["CIL"], True), (OFFICIAL["CIL"], False)):
        value, gradient = value_and_gradient(term, case)
        moved = case.z - 0.3 * gradient / gradient.abs().max()
        assert term.ours(replace(case, z=moved)) < value, "a step downhill"
        assert (disagreement(moved) < before) == closer


# ---------------------------------------------------------------------------------------------------------------------
# What the published sparsity term does


def _published(f: Tensor) -> float:
    """The term of one feature vector, alone in its class."""
    return _sparsity(f[None, :, None, None].double(), torch.zeros(1, 1, 1, dtype=torch.long), "class_max")


def test_published_sparsity_is_smallest_for_all_ones_and_large_for_a_single_spike():
    assert _published(torch.ones(2048)) == pytest.approx(math.e, rel=1e-12)
    assert _published(torch.eye(2048)[7]) == pytest.approx(2047 + math.e, rel=1e-12)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.lists(st.floats(0, 10), min_size=1, max_size=20).filter(lambda f: max(f) > 0.01))
def test_published_sparsity_is_never_below_e(f):
    assert _published(torch.tensor(f)) >= math.e - 1e-9


@pytest.mark.parametrize("variant", ["power2", "power3"])
def test_power_variants_also_prefer_many_small_activations(variant):
    spike, flat = torch.eye(64)[:1].double(), torch.full((1, 64), 0.1, dtype=torch.float64)
    flat[0, 0] = 1
    y = torch.zeros(1, 1, 1, dtype=torch.long)
    values = [
        mean(sparsity_sums(f[:, :, None, None], y, variant, torch.ones(1, 1, dtype=torch.float64)))
        for f in (spike, flat)
    ]
    assert values[0] == 1
    assert values[1] < 0.25


def _hoyer_after_descent(variant, steps: int) -> tuple[float, float]:
    g = torch.Generator().manual_seed(0)
    F = torch.rand(2, 16, 3, 3, generator=g, dtype=torch.float64).square()
    case = replace(Case.random(0, C=16), grid=torch.zeros(2, 3, 3, dtype=torch.long), F=F.requires_grad_())
    before = mean(hoyer_sums(F, case.grid)).item()
    optimiser = torch.optim.Adam([F], lr=0.01)
    for _ in range(steps):
        optimiser.zero_grad()
        TERMS[f"sparsity, {variant}, by image"].ours(case).backward()
        optimiser.step()
        F.data.clamp_min_(0)
    return before, mean(hoyer_sums(F, case.grid)).item()


@pytest.mark.parametrize("variant", ["class_max", "norm_max"])
def test_descent_on_the_published_ratio_makes_features_dense(variant):
    before, after = _hoyer_after_descent(variant, steps=200)
    assert before > 0.3
    assert after < 0.01


@pytest.mark.parametrize("variant", ["entropy_l1", "entropy_softmax", "l0", "l1"])
def test_descent_on_entropy_l0_or_l1_makes_features_sparse(variant):
    before, after = _hoyer_after_descent(variant, steps=40)
    assert after > before + 0.15


@pytest.mark.parametrize("classes", [2, 7, 151])
def test_class_sums_by_products_and_one_by_one_are_the_same(classes):
    """The one way is used on GPUs, the other on CPUs."""
    torch.manual_seed(classes)
    results = []
    labels = torch.randint(0, classes, (3, 20), dtype=torch.uint8)
    labels[0, :5] = 255
    for add_up in (rows._sums_by_matmul, rows._sums_by_index_add):
        torch.manual_seed(classes)
        x = torch.randn(3, 6, 4, 5, dtype=torch.float64, requires_grad=True)
        sums = add_up(x, x.square().sum(1).flatten(1), labels, classes)
        weights = [torch.randn_like(total) for total in sums]
        sum((w * total).sum() for w, total in zip(weights, sums, strict=True)).backward()
        results.append((*sums, x.grad))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
