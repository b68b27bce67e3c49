"""Losses where they are likely to go wrong: nothing present, ties, huge values, half precision."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from loss_cases import (
    EPSILON,
    METRICS,
    OF_FEATURES,
    OF_LOGITS,
    SEEDS,
    TERMS,
    Case,
    value_and_gradient,
)
from sdrseg.kernels.plain import rows_of
from sdrseg.labels import VOID
from sdrseg.losses.contrast import (
    attraction,
    repulsion,
    smallest_gap,
)
from sdrseg.losses.pixels import to_grid
from sdrseg.losses.prototypes import Prototypes, class_sums, in_batch, update
from sdrseg.losses.sparsity import class_maxima

# ---------------------------------------------------------------------------------------------------------------------
# Pitfalls


def _relabel(c: Case, **to: int) -> Case:
    """old0=1: class 0 becomes class 1, in all label maps; all=255: everything does."""

    def change(name: str, x: Tensor) -> Tensor:
        if name not in ("grid", "pseudo", "y"):
            return x
        for old, new in to.items():
            x = torch.full_like(x, new) if old == "all" else torch.where(x == int(old.removeprefix("old")), new, x)
        return x

    return c.each(change)


def _nothing(c: Case) -> Case:
    return replace(_relabel(c, all=VOID), keep=c.keep & False, keep_grid=c.keep_grid & False)


EDGES: dict[str, Callable[[Case], Case]] = {
    "batch without background": lambda c: _relabel(c, old0=1),
    "background and void only": lambda c: _relabel(c, old1=0, old2=0, old3=0, old4=0),
    "no void": lambda c: _relabel(c, old255=0),
    "background only": lambda c: _relabel(c, all=0),
    "one new class only": lambda c: _relabel(c, all=4),
    "a class that vanished on the grid": lambda c: _relabel(c, old4=3),
    "all void": lambda c: _relabel(c, all=VOID),
    "one image all void": lambda c: c.each(
        lambda name, x: torch.cat([torch.full_like(x[:1], VOID), x[1:]]) if name in ("grid", "pseudo", "y") else x
    ),
    "nothing kept": _nothing,
    "no prototype yet": lambda c: replace(c, seen=c.seen * 0),
    "an old class without prototype": lambda c: replace(c, seen=torch.tensor([3, 0, 2, 5, 1])),
    "a zero prototype that was never seen": lambda c: replace(c, seen=c.seen * 0, p=c.p * 0),
    "no class may take part": lambda c: replace(c, take=c.take & False),
    "no activation at some positions": lambda c: replace(c, F=c.F * (torch.arange(3) > 0)),
    "a class without activation": lambda c: replace(c, F=c.F * (c.grid != 3)[:, None]),
    "no activation at all": lambda c: replace(c, F=c.F * 0),
}


def _without_coincident_means(names: list[str], edge: str) -> list[str]:
    """1/0 has no reference; `test_coincident_means` looks at it."""
    return [name for name in names if not (name.startswith("repulsion") and edge == "no activation at all")]


@pytest.mark.parametrize("edge", EDGES)
def test_edge_case_gives_the_reference_and_a_finite_gradient(edge):
    """Values agree in float64 (a norm of 0 may be up to 1e-6), gradients are finite in float64 and float32."""
    for seed, name in itertools.product(range(2), _without_coincident_means(list(TERMS), edge)):
        case = EDGES[edge](Case.random(seed))
        value, gradient = value_and_gradient(TERMS[name], case)
        assert value.item() == pytest.approx(TERMS[name].theirs(case.numpy()), rel=1e-9, abs=1e-12), name
        assert gradient.isfinite().all(), name
        value, gradient = value_and_gradient(TERMS[name], case.floating(torch.float32))
        assert value.isfinite(), name
        assert gradient.isfinite().all(), name


@pytest.mark.parametrize("name", TERMS)
def test_nothing_present_is_a_zero_attached_to_the_graph(name):
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        value, gradient = value_and_gradient(TERMS[name], _nothing(Case.random(0)).floating(dtype))
        assert value.item() == 0
        assert gradient.eq(0).all()


@pytest.mark.parametrize("name", METRICS)
@pytest.mark.parametrize("edge", EDGES)
def test_metrics_of_edge_cases_are_the_reference(edge, name):
    case = EDGES[edge](Case.random(0))
    expected = METRICS[name].theirs(case.numpy())
    assert METRICS[name].ours(case).item() == pytest.approx(expected, rel=1e-9, abs=1e-12)


def test_a_tiny_object_that_vanishes_on_the_grid_is_skipped():
    case = Case.random(0, H=9, W=9)
    y = torch.zeros(2, 9, 9, dtype=torch.long)
    y[0, 1, 1] = 4
    grid = to_grid(y, (3, 3), 3, VOID)
    sums = class_sums(case.F, grid, case.K)
    prototypes = update(case.prototypes, sums, "image", torch.ones_like(case.take))
    assert not in_batch(sums, "image")[1][4]
    assert torch.equal(prototypes.mean[4], case.p[4])
    assert prototypes.seen[4] == case.seen[4]


def test_repulsion_of_a_single_class_is_zero():
    case = replace(_relabel(Case.random(0), all=2), take=torch.ones(5, dtype=torch.bool))
    for normaliser in ("classes", "pairs"):
        value, gradient = value_and_gradient(TERMS[f"repulsion, image means, by {normaliser}"], case)
        assert value == 0
        assert gradient.eq(0).all()


def test_repulsion_of_two_classes_is_the_same_by_classes_and_by_pairs():
    case = _relabel(Case.random(0), old2=1, old3=0, old4=0)
    case = replace(case, take=torch.ones(5, dtype=torch.bool))
    by_classes, by_pairs = (TERMS[f"repulsion, image means, by {n}"].ours(case) for n in ("classes", "pairs"))
    assert by_classes > 0
    torch.testing.assert_close(by_classes, by_pairs)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_coincident_means_repel_finitely(dtype):
    case = replace(Case.random(0), take=torch.ones(5, dtype=torch.bool)).floating(dtype)
    for F in (torch.ones_like(case.F), torch.zeros_like(case.F)):
        value, gradient = value_and_gradient(TERMS["repulsion, pixel means, by classes"], replace(case, F=F))
        present = case.grid.unique().numel() - 1
        assert value.item() == pytest.approx((present - 1) * 1e6, rel=1e-3)
        assert gradient.isfinite().all()


def test_close_means_far_from_the_origin_repel_exactly():
    """Distances come from a Gram matrix: 0.01 apart at norm 450 would be lost in float32."""
    p = torch.full((3, 2048), 10.0)
    p[1, 0] += 0.01
    p[2, 0] += 3
    every = torch.ones(3, dtype=torch.bool)
    exact = 2 * (1 / (p[1, 0] - 10) + 1 / (p[2, 0] - 10) + 1 / (p[2, 0] - p[1, 0])) / 3
    torch.testing.assert_close(repulsion(p, every, every), exact, rtol=1e-5, atol=0)


ROOTS = [*(n for n in TERMS if "of norms" in n), *(n for n in TERMS if "frobenius" in n)]


@pytest.mark.parametrize("name", ROOTS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_square_roots_at_zero_have_a_finite_gradient(name, dtype):
    """Every feature lies on its prototype, which is a corner of the norm."""
    case = replace(Case.random(0), seen=torch.ones(5, dtype=torch.long), take=torch.ones(5, dtype=torch.bool))
    labels = torch.where(case.grid == VOID, 0, case.grid)
    case = replace(case, F=case.p[labels].permute(0, 3, 1, 2).contiguous(), grid=labels, pseudo=labels)
    value, gradient = value_and_gradient(TERMS[name], case.floating(dtype))
    assert 0 <= value.item() <= 20 * EPSILON
    assert gradient.isfinite().all()


@pytest.mark.parametrize("name", TERMS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_is_computed_in_float32(name, dtype):
    """The loss of rounded inputs is that of the same numbers in float64, to float32's precision."""
    inputs = ("F", "teacher", "z", "t")
    for seed in SEEDS:
        half = Case.random(seed).floating(dtype, inputs).floating(torch.float32, ("p",))
        value, gradient = value_and_gradient(TERMS[name], half)
        exact, exact_gradient = value_and_gradient(TERMS[name], half.floating(torch.float64))
        assert value.dtype == torch.float32
        assert value.item() == pytest.approx(exact.item(), rel=2e-6, abs=1e-6)
        assert gradient.dtype == dtype
        torch.testing.assert_close(gradient.double(), exact_gradient, rtol=0.02, atol=1e-3)


@pytest.mark.parametrize("variant", ["class_max", "norm_max", "norm_l2", "entropy_l1", "l0", "power2"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_sparsity_of_vectors_without_activation_is_finite(variant, dtype):
    case = Case.random(0).floating(dtype)
    F = case.F.clone()
    F[0, :, 0] = 0
    F[1, :, 1] = 6e-8  # the smallest float16; below the guard
    value, gradient = value_and_gradient(TERMS[f"sparsity, {variant}, by image"], replace(case, F=F))
    assert 0 < value.item() < 100
    assert gradient.isfinite().all()


@pytest.mark.parametrize("name", TERMS)
def test_autocast_does_not_lower_the_precision(name):
    """Forward under autocast, backward outside, as torch recommends."""
    term, case = TERMS[name], Case.random(0).floating(torch.float32)
    expected, expected_gradient = value_and_gradient(term, case)
    leaf = getattr(case, term.wrt).clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        value = term.ours(replace(case, **{term.wrt: leaf}))
    value.backward()
    assert torch.equal(value, expected)
    assert torch.equal(leaf.grad, expected_gradient)


@pytest.mark.parametrize("name", [*TERMS, *METRICS])
def test_labels_may_be_of_any_integer_type(name):
    term = (TERMS | METRICS)[name]
    case = Case.random(3, zeros=True)
    values = [term.ours(case.labels(dtype)) for dtype in (torch.int64, torch.uint8, torch.int32)]
    assert torch.equal(values[0], values[1])
    assert torch.equal(values[0], values[2])


@pytest.mark.parametrize("name", OF_LOGITS)
def test_huge_logits_stay_finite(name):
    case = Case.random(0).floating(torch.float32)
    case = replace(case, z=case.z * 3e3, t=case.t * 3e3)
    value, gradient = value_and_gradient(TERMS[name], case)
    assert value.isfinite()
    assert gradient.isfinite().all()


@pytest.mark.parametrize("name", [*OF_FEATURES, *METRICS])
def test_channels_last_makes_no_difference(name):
    term = (TERMS | METRICS)[name]
    case = Case.random(0, zeros=True)
    last = replace(case, F=case.F.to(memory_format=torch.channels_last))
    torch.testing.assert_close(term.ours(last), term.ours(case), rtol=1e-13, atol=0)


def _largest(F: Tensor, mask: Tensor) -> Tensor:
    """The maximum of the chosen positions as `Tensor.max` takes it; 0 where there are none."""
    chosen = F.permute(0, 2, 3, 1)[mask]
    return chosen.max() if chosen.numel() else F.sum() * 0


def test_ties_share_the_gradient_of_the_maximum_evenly():
    g = torch.Generator().manual_seed(0)
    F = torch.randint(0, 4, (3, 4, 5, 5), generator=g).double().requires_grad_()
    y = Case.random(0, B=3, h=5, w=5).grid
    weight = torch.rand(3, 5, generator=g, dtype=torch.float64)
    ours = class_maxima(F, y, 5)
    image = torch.arange(3)[:, None, None]
    theirs = torch.stack([torch.stack([_largest(F, (y == c) & (image == b)) for c in range(5)]) for b in range(3)])
    torch.testing.assert_close(ours, theirs)
    gradients = [torch.autograd.grad((weight * maxima).sum(), F)[0] for maxima in (ours, theirs)]
    torch.testing.assert_close(*gradients)
    shares = gradients[0][gradients[0] > 0].unique().numel()
    assert shares > 3, "several ties of different sizes"


def test_a_detached_teacher_gets_no_gradient():
    case = Case.random(0)
    t, teacher, z, F = (x.clone().requires_grad_() for x in (case.t, case.teacher, case.z, case.F))
    detached = replace(case, z=z, F=F, t=t.detach(), teacher=teacher.detach())
    sum(TERMS[name].ours(detached) for name in ("KD", "UNKD", "CIL", "LwF-MC distillation", "ENC")).backward()
    assert t.grad is None
    assert teacher.grad is None
    assert z.grad.abs().sum() > 0
    assert F.grad.abs().sum() > 0


def test_prototypes_of_matching_and_attraction_are_constants():
    case = Case.random(1)
    for name in ("attraction", "matching, mse, image means, by present"):
        value, gradient = value_and_gradient(TERMS[name], case)
        pulled = case.F - 0.05 * gradient / gradient.norm()
        assert TERMS[name].ours(replace(case, F=pulled)) < value


def test_what_is_not_kept_does_not_matter():
    case = Case.random(0)
    other = Case.random(1)
    swapped = replace(
        case,
        z=torch.where(case.keep[:, None], case.z, other.z),
        t=torch.where(case.keep[:, None], case.t, other.t),
        F=torch.where(case.keep_grid[:, None], case.F, other.F),
    )
    for name in ("KD", "UNKD", "CIL", "LwF-MC distillation", "ENC"):
        value, gradient = value_and_gradient(TERMS[name], swapped)
        assert torch.equal(value, TERMS[name].ours(case))
        kept = case.keep if TERMS[name].wrt == "z" else case.keep_grid
        assert gradient.movedim(1, -1)[~kept].eq(0).all()


@pytest.mark.parametrize("name", [name for name in OF_FEATURES if name != "ENC"])
def test_features_of_void_do_not_matter(name):
    case = Case.random(0)
    void = (case.grid == VOID)[:, None]
    assert void.any()
    swapped = replace(case, F=torch.where(void, 1e4, case.F))
    value, gradient = value_and_gradient(TERMS[name], swapped)
    torch.testing.assert_close(value, TERMS[name].ours(case))
    assert gradient.movedim(1, -1)[void[:, 0]].eq(0).all()


@pytest.mark.parametrize(("spread", "bound"), [(1.0, 1e-6), (0.3, 1e-5), (0.1, 1e-4), (0.03, 1e-3), (0.01, 5e-3)])
def test_attraction_from_sums_cancels_little_in_float32(spread, bound):
    """Features within `spread` of their prototype (relative), 2048 channels: value and gradient against float64.

    The gradient does not cancel; the value does once all features are within a hundredth of their prototype.
    """
    g = torch.Generator().manual_seed(0)
    p = torch.rand(3, 2048, generator=g) * (torch.rand(3, 2048, generator=g) > 0.5)
    labels = torch.randint(0, 3, (2, 16, 16), generator=g)
    noise = torch.randn(2, 16, 16, 2048, generator=g) * p.square().mean().sqrt()
    F = (p[labels] + spread * noise).permute(0, 3, 1, 2).requires_grad_()
    prototypes, every = Prototypes(p, torch.ones(3, dtype=torch.long)), torch.ones(3, dtype=torch.bool)
    value = attraction(class_sums(F, labels, 3), prototypes, every)
    (gradient,) = torch.autograd.grad(value, F)
    apart = rows_of(F.detach().double()) - p.double()[labels.flatten(1)]
    by_class = [apart[labels.flatten(1) == c] for c in range(3)]
    exact = sum(x.square().mean() for x in by_class) / 3
    assert value.item() == pytest.approx(exact.item(), rel=bound)
    share = torch.tensor([2 / (3 * x.numel()) for x in by_class], dtype=torch.float64)[labels.flatten(1)]
    torch.testing.assert_close(rows_of(gradient.double()), apart * share[:, :, None], rtol=1e-5, atol=1e-12)


def test_smallest_gap_needs_two_known_prototypes():
    p = torch.tensor([[0.0, 0], [3, 4], [0, 1]])
    assert smallest_gap(Prototypes(p, torch.tensor([1, 1, 0]))) == 5
    assert smallest_gap(Prototypes(p, torch.tensor([1, 1, 1]))) == 1
    assert smallest_gap(Prototypes(p, torch.tensor([0, 1, 0]))) == math.inf
