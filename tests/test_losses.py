"""The losses against the slow reference: values, gradients, and everything that can go wrong on the way.

`TERMS` holds every loss as one function of a `Case` (all inputs of a small batch), beside its reference; most tests go
through all of them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from types import SimpleNamespace
from typing import Any, get_args

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as nn

from sdrseg.kernels.plain import rows_of
from sdrseg.labels import VOID
from sdrseg.losses import official, prototypes
from sdrseg.losses.contrast import (
    attraction,
    attraction_image_sums,
    attraction_norm,
    attraction_norm_image_sums,
    attraction_norm_sums,
    repulsion,
    smallest_gap,
)
from sdrseg.losses.cross_entropy import binary_cross_entropy_sums, cross_entropy_sums, unbiased_cross_entropy_sums
from sdrseg.losses.distillation import (
    binary_distillation_sums,
    cil_sums,
    distillation_sums,
    encoder_distillation_sums,
    unbiased_distillation_sums,
)
from sdrseg.losses.pixels import masked_sums, mean, to_grid
from sdrseg.losses.prototypes import Prototypes, class_sums, in_batch, labels_on_grid, matching, pseudo_labels, update
from sdrseg.losses.sparsity import BY_CLASS, active_sums, class_maxima, hoyer_sums, sparsity_sums
from sdrseg.variants import SparsityVariant

import reference as slow

SEEDS = range(5)
EPSILON = 1e-6  # what a norm of 0 becomes, so that its gradient is finite


# ---------------------------------------------------------------------------------------------------------------------
# One small batch


@dataclass(frozen=True)
class Case:
    """Everything a loss may look at: features and their grid, logits and their labels, prototypes."""

    F: Tensor  # (B, C, h, w), not negative
    teacher: Tensor  # the features of the step before
    grid: Tensor  # (B, h, w) labels on the grid
    pseudo: Tensor  # (B, h, w) labels with the background told apart
    keep_grid: Tensor  # (B, h, w)
    z: Tensor  # (B, K, H, W)
    t: Tensor  # (B, n_old, H, W)
    y: Tensor  # (B, H, W)
    keep: Tensor
    p: Tensor  # (K, C)
    seen: Tensor  # (K,)
    take: Tensor  # (K,)
    K: int
    n_old: int

    @classmethod
    def random(cls, seed: int, *, B=2, C=4, h=3, w=3, H=4, W=4, K=5, n_old=3, zeros=False) -> Case:
        """With `zeros` about a third of the activations is 0, as after a ReLU; then nothing has a derivative there."""
        g = torch.Generator().manual_seed(seed)

        def values(*shape: int) -> Tensor:
            return torch.rand(*shape, generator=g, dtype=torch.float64)

        def labels(*shape: int) -> Tensor:
            y = torch.randint(0, K + 1, shape, generator=g)
            return torch.where(y == K, VOID, y)

        grid = labels(B, h, w)
        F = values(B, C, h, w) * 2
        return cls(
            F=(F - 0.6).clamp_min(0) if zeros else F + 0.05,
            teacher=values(B, C, h, w),
            grid=grid,
            pseudo=torch.where(grid == 0, torch.randint(0, n_old, grid.shape, generator=g), grid),
            keep_grid=values(B, h, w) > 0.3,
            z=values(B, K, H, W) * 6 - 3,
            t=values(B, n_old, H, W) * 6 - 3,
            y=labels(B, H, W),
            keep=values(B, H, W) > 0.3,
            p=values(K, C) + 0.05,
            seen=torch.randint(0, 5, (K,), generator=g),
            take=values(K) > 0.2,
            K=K,
            n_old=n_old,
        )

    @property
    def prototypes(self) -> Prototypes:
        return Prototypes(self.p, self.seen)

    def each(self, change: Callable[[str, Tensor], Tensor]) -> Case:
        tensors = {f.name: getattr(self, f.name) for f in fields(self)}
        return replace(self, **{name: change(name, x) for name, x in tensors.items() if isinstance(x, Tensor)})

    def images(self, part: slice) -> Case:
        return self.each(lambda name, x: x if name in ("p", "seen", "take") else x[part])

    def floating(self, dtype: torch.dtype, only: tuple[str, ...] = ("F", "teacher", "z", "t", "p")) -> Case:
        return self.each(lambda name, x: x.to(dtype) if name in only else x)

    def labels(self, dtype: torch.dtype) -> Case:
        return self.each(lambda name, x: x.to(dtype) if name in ("grid", "pseudo", "y") else x)

    def numpy(self) -> Any:
        arrays = self.each(lambda _, x: x.detach().numpy())
        return SimpleNamespace(**{f.name: getattr(arrays, f.name) for f in fields(arrays)})


@dataclass(frozen=True)
class Term:
    wrt: str  # the input that is trained
    ours: Callable[[Case], Tensor]
    theirs: Callable[[Any], float]


def _match(c: Case, average, distance, normaliser, background) -> Tensor:
    current, present = in_batch(class_sums(c.F, c.pseudo, c.K), average)
    return matching(
        c.prototypes,
        current,
        present,
        n_old=c.n_old,
        distance=distance,
        normaliser=normaliser,
        background=background,
    )


def _maxima(c: Case, variant: str, scope: str) -> Tensor | None:
    if variant == "norm_max_overall":
        return class_maxima(c.F, c.grid, c.K).amax().reshape(1, 1)
    if variant not in BY_CLASS:
        return None
    maxima = class_maxima(c.F, c.grid, c.K)
    return maxima.amax(0, keepdim=True) if scope == "batch" else maxima


SPARSITY = [
    (variant, scope)
    for variant in (*BY_CLASS, "norm_max", "norm_max_overall", "norm_l2", "entropy_l1", "entropy_softmax", "l1")
    for scope in (("image", "batch") if variant in BY_CLASS else ("image",))
]

TERMS: dict[str, Term] = {
    "CE": Term("z", lambda c: mean(cross_entropy_sums(c.z, c.y)), lambda n: slow.cross_entropy(n.z, n.y)),
    "CE, void counted": Term(
        "z",
        lambda c: mean(cross_entropy_sums(c.z, c.y, count_void=True)),
        lambda n: slow.cross_entropy(n.z, n.y, count_void=True),
    ),
    "UNCE": Term(
        "z",
        lambda c: mean(unbiased_cross_entropy_sums(c.z, c.y, c.n_old)),
        lambda n: slow.unbiased_cross_entropy(n.z, n.y, n.n_old),
    ),
    "UNCE, void counted": Term(
        "z",
        lambda c: mean(unbiased_cross_entropy_sums(c.z, c.y, c.n_old, count_void=True)),
        lambda n: slow.unbiased_cross_entropy(n.z, n.y, n.n_old, count_void=True),
    ),
    "LwF-MC BCE": Term(
        "z", lambda c: mean(binary_cross_entropy_sums(c.z, c.y)), lambda n: slow.binary_cross_entropy(n.z, n.y)
    ),
    "LwF-MC distillation": Term(
        "z",
        lambda c: mean(binary_distillation_sums(c.z, c.t, c.keep)),
        lambda n: slow.binary_distillation(n.z, n.t, n.keep),
    ),
    "KD": Term(
        "z",
        lambda c: mean(distillation_sums(c.z, c.t, c.keep)) / c.n_old,
        lambda n: slow.distillation(n.z, n.t, n.keep),
    ),
    "KD, alpha 1.7": Term(
        "z",
        lambda c: mean(distillation_sums(c.z, c.t, c.keep, alpha=1.7)) / c.n_old,
        lambda n: slow.distillation(n.z, n.t, n.keep, alpha=1.7),
    ),
    "UNKD": Term(
        "z",
        lambda c: mean(unbiased_distillation_sums(c.z, c.t, c.keep)) / c.n_old,
        lambda n: slow.unbiased_distillation(n.z, n.t, n.keep),
    ),
    "UNKD, alpha 1.7": Term(
        "z",
        lambda c: mean(unbiased_distillation_sums(c.z, c.t, c.keep, alpha=1.7)) / c.n_old,
        lambda n: slow.unbiased_distillation(n.z, n.t, n.keep, alpha=1.7),
    ),
    "CIL": Term("z", lambda c: mean(cil_sums(c.z, c.t, c.y, c.keep)), lambda n: slow.cil(n.z, n.t, n.y, n.keep)),
    "CIL, entropy weight 0.3": Term(
        "z",
        lambda c: mean(cil_sums(c.z, c.t, c.y, c.keep, entropy_weight=0.3)),
        lambda n: slow.cil(n.z, n.t, n.y, n.keep, entropy_weight=0.3),
    ),
    "ENC": Term(
        "F",
        lambda c: mean(encoder_distillation_sums(c.F, c.teacher, c.keep_grid)),
        lambda n: slow.encoder_distillation(n.F, n.teacher, n.keep_grid),
    ),
    "attraction": Term(
        "F",
        lambda c: attraction(class_sums(c.F, c.grid, c.K), c.prototypes, c.take),
        lambda n: slow.attraction(n.F, n.grid, n.p, n.seen, n.take),
    ),
    "attraction by image": Term(
        "F",
        lambda c: mean(attraction_image_sums(c.F, c.grid, c.prototypes, c.take)),
        lambda n: slow.attraction_by_image(n.F, n.grid, n.p, n.seen, n.take),
    ),
    "attraction, sum of norms": Term(
        "F",
        lambda c: attraction_norm(attraction_norm_sums(c.F, c.grid, c.prototypes, c.take), "sum"),
        lambda n: slow.attraction(n.F, n.grid, n.p, n.seen, n.take, "norm_sum"),
    ),
    "attraction, mean of norms": Term(
        "F",
        lambda c: attraction_norm(attraction_norm_sums(c.F, c.grid, c.prototypes, c.take), "mean"),
        lambda n: slow.attraction(n.F, n.grid, n.p, n.seen, n.take, "norm_mean"),
    ),
}
TERMS |= {
    f"attraction by image, {over} of norms": Term(
        "F",
        lambda c, o=over: mean(attraction_norm_image_sums(c.F, c.grid, c.prototypes, c.take, o)),
        lambda n, o=over: slow.attraction_by_image(n.F, n.grid, n.p, n.seen, n.take, f"norm_{o}"),
    )
    for over in ("sum", "mean")
}
TERMS |= {
    f"matching, {distance}, {average} means, by {normaliser}{', background' * background}": Term(
        "F",
        lambda c, a=average, d=distance, m=normaliser, b=background: _match(c, a, d, m, b),
        lambda n, a=average, d=distance, m=normaliser, b=background: slow.matching(
            n.F, n.pseudo, n.p, n.seen, n.n_old, average=a, distance=d, normaliser=m, background=b
        ),
    )
    for distance, (average, normaliser, background) in itertools.product(
        ("mse", "frobenius", "cosine"),
        (("image", "present", False), ("pixel", "present", True), ("pixel", "n_old", False), ("image", "n_old", True)),
    )
}
TERMS |= {
    f"repulsion, {average} means, by {normaliser}": Term(
        "F",
        lambda c, a=average, m=normaliser: repulsion(*in_batch(class_sums(c.F, c.grid, c.K), a), c.take, m),
        lambda n, a=average, m=normaliser: slow.repulsion(n.F, n.grid, n.take, average=a, normaliser=m),
    )
    for average, normaliser in itertools.product(("image", "pixel"), ("classes", "pairs"))
}
TERMS |= {
    f"sparsity, {variant}, by {scope}": Term(
        "F",
        lambda c, v=variant, s=scope: mean(sparsity_sums(c.F, c.grid, v, _maxima(c, v, s))),
        lambda n, v=variant, s=scope: slow.sparsity(n.F, n.grid, v, s),
    )
    for variant, scope in SPARSITY
}

METRICS: dict[str, Term] = {
    "Hoyer": Term("F", lambda c: mean(hoyer_sums(c.F, c.grid)), lambda n: slow.hoyer(n.F, n.grid)),
    "active channels": Term("F", lambda c: mean(active_sums(c.F, c.grid)), lambda n: slow.active(n.F, n.grid)),
    "smallest gap": Term("p", lambda c: smallest_gap(c.prototypes), lambda n: slow.smallest_gap(n.p, n.seen)),
}

OFFICIAL: dict[str, Term] = {
    "matching": Term(
        "F",
        lambda c: official.matching(c.F, c.pseudo, c.p),
        lambda n: slow.official_matching(n.F, n.pseudo, n.p),
    ),
    "attraction": Term(
        "F", lambda c: official.attraction(c.F, c.grid, c.p), lambda n: slow.official_attraction(n.F, n.grid, n.p)
    ),
    "repulsion": Term("F", lambda c: official.repulsion(c.F, c.grid), lambda n: slow.official_repulsion(n.F, n.grid)),
    "lasso": Term("F", lambda c: official.lasso(c.F), lambda n: slow.official_lasso(n.F)),
    "CIL": Term("z", lambda c: official.cil(c.z, c.t, c.y), lambda n: slow.official_cil(n.z, n.t, n.y)),
}
OFFICIAL_SPARSITY: list[Any] = [v for v in get_args(SparsityVariant) if v not in ("l0", "l1")]
OFFICIAL |= {
    f"sparsity, {variant}": Term(
        "F",
        lambda c, variant=variant: official.sparsity(c.F, c.grid, variant),
        lambda n, variant=variant: slow.official_sparsity(n.F, n.grid, variant),
    )
    for variant in OFFICIAL_SPARSITY
}

OF_FEATURES = [name for name, term in TERMS.items() if term.wrt == "F"]
OF_LOGITS = [name for name, term in TERMS.items() if term.wrt == "z"]


def value_and_gradient(term: Term, case: Case) -> tuple[Tensor, Tensor]:
    leaf = getattr(case, term.wrt).detach().clone().requires_grad_()
    value = term.ours(replace(case, **{term.wrt: leaf}))
    (gradient,) = torch.autograd.grad(value, leaf)
    return value.detach(), gradient


def finite_differences(term: Term, case: Case, step: float = 1e-5) -> np.ndarray:
    """The reference's gradient, one entry after the other."""
    inputs = case.numpy()
    x = getattr(inputs, term.wrt).copy()
    setattr(inputs, term.wrt, x)
    gradient = np.zeros_like(x)
    for index in np.ndindex(x.shape):
        here = x[index]
        x[index] = here + step
        above = term.theirs(inputs)
        x[index] = here - step
        below = term.theirs(inputs)
        x[index] = here
        gradient[index] = (above - below) / (2 * step)
    return gradient


# ---------------------------------------------------------------------------------------------------------------------
# Values and gradients


@pytest.mark.parametrize("name", [*TERMS, *METRICS])
def test_value_is_the_reference(name):
    term = (TERMS | METRICS)[name]
    for seed, zeros in itertools.product(SEEDS, (False, True)):
        case = Case.random(seed, zeros=zeros)
        value = term.ours(case)
        assert value.shape == ()
        assert value.dtype == torch.float64
        assert value.item() == pytest.approx(term.theirs(case.numpy()), rel=1e-9, abs=1e-12), (seed, zeros)


@pytest.mark.parametrize("name", TERMS)
def test_gradient_is_the_reference(name):
    case = Case.random(10)
    _, gradient = value_and_gradient(TERMS[name], case)
    np.testing.assert_allclose(gradient, finite_differences(TERMS[name], case), rtol=1e-6, atol=1e-7)
    assert gradient.abs().max() > 1e-4, "the example says something"


@pytest.mark.parametrize("name", OFFICIAL)
def test_official_term_is_the_reference(name):
    for seed in SEEDS:
        case = Case.random(seed)
        assert OFFICIAL[name].ours(case).item() == pytest.approx(OFFICIAL[name].theirs(case.numpy()), rel=1e-9)
    _, gradient = value_and_gradient(OFFICIAL[name], case)
    np.testing.assert_allclose(gradient, finite_differences(OFFICIAL[name], case), rtol=1e-6, atol=1e-7)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**31),
    B=st.integers(1, 3),
    C=st.integers(2, 6),
    h=st.integers(1, 4),
    w=st.integers(1, 4),
    K=st.integers(2, 7),
)
def test_value_is_the_reference_in_any_shape(seed, B, C, h, w, K):
    case = Case.random(seed, B=B, C=C, h=h, w=w, H=w, W=h, K=K, n_old=max(1, K - 2), zeros=seed % 2 == 0)
    for name, term in TERMS.items():
        assert term.ours(case).item() == pytest.approx(term.theirs(case.numpy()), rel=1e-9, abs=1e-12), name


def test_cross_entropy_is_torchs_own():
    case = Case.random(0)
    expected = nn.cross_entropy(case.z, case.y, ignore_index=VOID)
    torch.testing.assert_close(mean(cross_entropy_sums(case.z, case.y)), expected)


def test_unbiased_cross_entropy_with_only_background_old_is_cross_entropy():
    case = Case.random(0)
    assert torch.equal(unbiased_cross_entropy_sums(case.z, case.y, 1), cross_entropy_sums(case.z, case.y))


def test_unbiased_distillation_without_new_classes_is_distillation():
    case = Case.random(0, K=3, n_old=3)
    torch.testing.assert_close(
        unbiased_distillation_sums(case.z, case.t, case.keep), distillation_sums(case.z, case.t, case.keep)
    )


def test_unbiased_cross_entropy_of_an_old_label_is_that_of_background():
    case = Case.random(0)
    folded = torch.where(case.y < case.n_old, 0, case.y)
    assert torch.equal(
        unbiased_cross_entropy_sums(case.z, case.y, case.n_old),
        unbiased_cross_entropy_sums(case.z, folded, case.n_old),
    )


# ---------------------------------------------------------------------------------------------------------------------
# The feature grid and pseudo-labels


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(1, 40), st.integers(1, 40), st.sampled_from([1, 2, 4, 8]), st.integers(0, 3), st.integers(0, 3))
def test_to_grid_takes_the_first_pixel_of_each_cell(H, W, stride, below, right):
    """Of all sizes, with cells that lie outside below and to the right, as where `pan` pads to 8 strides."""
    h, w = -(-H // stride) + below, -(-W // stride) + right
    y = torch.arange(2 * H * W).reshape(2, H, W)
    assert to_grid(y, (h, w), stride, -1).tolist() == slow.to_grid(y.numpy(), h, w, stride, -1).tolist()
    assert to_grid(y > 0, (h, w), stride, False).tolist() == slow.to_grid(y.numpy() > 0, h, w, stride, False).tolist()


def test_to_grid_is_a_stride_for_multiples_and_keeps_other_axes():
    x = torch.rand(2, 3, 512, 64)
    assert torch.equal(to_grid(x, (32, 4), 16, 0), x[:, :, ::16, ::16])
    assert torch.equal(to_grid(x, (32, 4), 16, 0), nn.interpolate(x, (32, 4), mode="nearest"))
    assert to_grid(x[:, :, :511], (32, 4), 16, 0).shape == (2, 3, 32, 4)
    assert to_grid(torch.zeros(1, 7, 7, dtype=torch.uint8), (3, 3), 4, 255).dtype == torch.uint8


@pytest.mark.parametrize(("H", "W", "h", "w"), [(16, 16, 4, 4), (13, 17, 4, 5), (5, 5, 2, 2), (9, 12, 8, 8)])
def test_pseudo_labels_are_the_full_resolution_argmax_on_the_grid(H, W, h, w):
    for seed in SEEDS:
        case = Case.random(seed, H=H, W=W, h=h, w=w)
        for labels in (case.grid, case.grid.to(torch.uint8)):
            pseudo = pseudo_labels(labels, case.t, 4)
            assert pseudo.dtype == torch.int64
            assert pseudo.tolist() == slow.pseudo_labels(case.grid.numpy(), case.t.numpy(), 4).tolist()


def test_pseudo_labels_are_not_the_low_resolution_argmax():
    low = torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    logits = nn.interpolate(low, (128, 128), mode="bilinear")
    background = torch.zeros(1, 8, 8, dtype=torch.long)
    pseudo = pseudo_labels(background, logits, 16)
    assert torch.equal(pseudo, logits.argmax(1)[:, ::16, ::16])
    assert not torch.equal(pseudo, low.argmax(1))


def test_padding_and_cells_outside_are_void_and_the_label_type_stays():
    y = torch.tensor([[[0, 3], [7, 255]]], dtype=torch.uint8)
    padding = torch.tensor([[[False, True], [False, False]]])
    grid = labels_on_grid(y, padding, (2, 3), 1)
    assert grid.dtype == torch.uint8
    assert grid.tolist() == [[[0, 255, 255], [7, 255, 255]]]


def test_rows_are_positions_of_channels_without_a_copy():
    F = Case.random(0).F
    assert torch.equal(rows_of(F)[1, 3 * 1 + 2], F[1, :, 1, 2])
    assert rows_of(F).data_ptr() == F.data_ptr()


def test_masked_sums():
    values, keep = torch.tensor([1.0, 2.0, 4.0]), torch.tensor([True, False, True])
    assert masked_sums(values, keep).tolist() == [5, 2]
    assert masked_sums(values, torch.zeros(3, dtype=torch.bool)).tolist() == [0, 0]


# ---------------------------------------------------------------------------------------------------------------------
# Class sums and running prototypes


@pytest.mark.parametrize("average", ["image", "pixel"])
def test_in_batch_prototypes_are_the_reference(average):
    for seed in SEEDS:
        case = Case.random(seed)
        means, present = in_batch(class_sums(case.F, case.grid, case.K), average)
        for c in range(case.K):
            expected, count = slow.class_mean(case.F.numpy(), case.grid.numpy(), c, average)
            assert present[c] == (count > 0)
            np.testing.assert_allclose(means[c], 0 if expected is None else expected, rtol=1e-12)


@pytest.mark.parametrize("average", ["image", "pixel"])
def test_in_batch_prototypes_carry_the_right_gradient(average):
    case = Case.random(0)
    torch.autograd.gradcheck(
        lambda F: in_batch(class_sums(F, case.grid, case.K), average)[0], case.F.clone().requires_grad_()
    )


def test_class_sums_carry_the_right_gradient():
    case = Case.random(0)

    def differentiable(F: Tensor) -> tuple[Tensor, ...]:
        return tuple(x for x in class_sums(F, case.grid, case.K) if x.requires_grad)

    assert len(differentiable(case.F.clone().requires_grad_())) == 3
    torch.autograd.gradcheck(differentiable, case.F.clone().requires_grad_())


@pytest.mark.parametrize("decay", [None, 0.1])
@pytest.mark.parametrize("average", ["image", "pixel"])
def test_running_prototypes_over_several_batches(average, decay):
    take = torch.tensor([False, True, True, True, True])
    batches = [Case.random(seed, B=3) for seed in range(6)]
    prototypes = Prototypes(torch.zeros(5, 4, dtype=torch.float64), torch.zeros(5, dtype=torch.long))
    for case in batches:
        prototypes = update(prototypes, class_sums(case.F, case.grid, case.K), average, take, decay)
    arrays = [(case.F.numpy(), case.grid.numpy()) for case in batches]
    mean_, seen = slow.running_prototypes(arrays, 5, average, take.tolist(), decay)
    np.testing.assert_allclose(prototypes.mean, mean_, rtol=1e-12)
    assert prototypes.seen.dtype == torch.int64
    assert prototypes.seen.tolist() == seen.tolist()
    assert prototypes.known.tolist() == [False, True, True, True, True]
    assert prototypes.mean[0].eq(0).all(), "a class that is not taken stays"


@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.integers(0, 2**31), st.permutations(range(6)), st.integers(1, 5))
def test_cumulative_prototypes_do_not_depend_on_the_order_of_images_or_on_batches(seed, order, cut):
    case = Case.random(seed, B=6)
    every = torch.ones(case.K, dtype=torch.bool)
    for average in ("image", "pixel"):
        start = Prototypes(torch.zeros_like(case.p), torch.zeros_like(case.seen))
        whole = update(start, class_sums(case.F, case.grid, case.K), average, every)
        parts = start
        for images in (list(order[:cut]), list(order[cut:])):
            parts = update(parts, class_sums(case.F[images], case.grid[images], case.K), average, every)
        torch.testing.assert_close(parts.mean, whole.mean, rtol=1e-12, atol=1e-14)
        assert torch.equal(parts.seen, whole.seen)


def test_update_gives_fresh_tensors_without_gradient():
    case = Case.random(0)
    F = case.F.clone().requires_grad_()
    before = (case.p.clone(), case.seen.clone())
    after = update(case.prototypes, class_sums(F, case.grid, case.K), "image", torch.ones_like(case.take))
    assert not after.mean.requires_grad
    assert torch.equal(case.p, before[0])
    assert torch.equal(case.seen, before[1])
    assert not {after.mean.data_ptr(), after.seen.data_ptr()} & {case.p.data_ptr(), case.seen.data_ptr()}


def test_update_between_a_loss_and_its_backward_pass_does_no_harm():
    case = replace(Case.random(0), seen=torch.ones(5, dtype=torch.long))
    F = case.F.clone().requires_grad_()
    sums, prototypes = class_sums(F, case.grid, case.K), case.prototypes
    current, present = in_batch(sums, "image")
    loss = attraction(sums, prototypes, case.take) + matching(prototypes, current, present, n_old=case.n_old)
    (expected,) = torch.autograd.grad(loss, F, retain_graph=True)
    for _ in range(3):
        prototypes = update(prototypes, sums, "image", torch.ones_like(case.take))
    loss.backward()
    assert torch.equal(F.grad, expected)


def test_prototypes_of_a_batch_send_no_gradient_back_to_it():
    """The attraction sees prototypes that hold the batch already; they are constants all the same."""
    case = Case.random(0)
    F = case.F.clone().requires_grad_()
    sums = class_sums(F, case.grid, case.K)
    prototypes = update(case.prototypes, sums, "image", torch.ones_like(case.take))
    frozen = Prototypes(prototypes.mean.clone(), prototypes.seen.clone())
    gradients = [
        torch.autograd.grad(attraction(sums, p, case.take), F, retain_graph=True)[0] for p in (prototypes, frozen)
    ]
    assert torch.equal(*gradients)


# ---------------------------------------------------------------------------------------------------------------------
# Sums of parts are sums of the whole: what makes distributed training exact

SUMS: dict[str, Callable[[Case], Tensor | tuple[Tensor, ...]]] = {
    "cross_entropy_sums": lambda c: cross_entropy_sums(c.z, c.y),
    "cross_entropy_sums, void counted": lambda c: cross_entropy_sums(c.z, c.y, count_void=True),
    "unbiased_cross_entropy_sums": lambda c: unbiased_cross_entropy_sums(c.z, c.y, c.n_old),
    "binary_cross_entropy_sums": lambda c: binary_cross_entropy_sums(c.z, c.y),
    "distillation_sums": lambda c: distillation_sums(c.z, c.t, c.keep),
    "unbiased_distillation_sums": lambda c: unbiased_distillation_sums(c.z, c.t, c.keep),
    "cil_sums": lambda c: cil_sums(c.z, c.t, c.y, c.keep),
    "binary_distillation_sums": lambda c: binary_distillation_sums(c.z, c.t, c.keep),
    "encoder_distillation_sums": lambda c: encoder_distillation_sums(c.F, c.teacher, c.keep_grid),
    "class_sums": lambda c: class_sums(c.F, c.grid, c.K),
    "attraction_image_sums": lambda c: attraction_image_sums(c.F, c.grid, c.prototypes, c.take),
    "attraction_norm_sums": lambda c: attraction_norm_sums(c.F, c.grid, c.prototypes, c.take),
    "attraction_norm_image_sums": lambda c: attraction_norm_image_sums(c.F, c.grid, c.prototypes, c.take),
    "hoyer_sums": lambda c: hoyer_sums(c.F, c.grid),
    "active_sums": lambda c: active_sums(c.F, c.grid),
} | {
    f"sparsity_sums, {variant}": lambda c, v=variant: sparsity_sums(c.F, c.grid, v, _maxima(c, v, "image"))
    for variant in dict(SPARSITY)
    if variant != "norm_max_overall"
}


@pytest.mark.parametrize("name", SUMS)
def test_sums_of_a_split_batch_add_up(name):
    case = Case.random(0, B=4, zeros=True)
    for cut in range(5):
        whole, first, second = (
            SUMS[name](part) for part in (case, case.images(slice(cut)), case.images(slice(cut, 4)))
        )
        if isinstance(whole, Tensor):
            whole, first, second = (whole,), (first,), (second,)
        for all_images, a, b in zip(whole, first, second, strict=True):
            torch.testing.assert_close(a + b, all_images, rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("variant", [*BY_CLASS, "norm_max_overall"])
def test_sparsity_sums_add_up_with_the_maxima_of_the_whole_batch(variant):
    case = Case.random(0, B=4, zeros=True)
    maxima = _maxima(case, variant, "batch")
    whole = sparsity_sums(case.F, case.grid, variant, maxima)
    parts = [sparsity_sums(case.F[i], case.grid[i], variant, maxima) for i in (slice(0, 1), slice(1, 4))]
    torch.testing.assert_close(sum(parts), whole, rtol=1e-13, atol=1e-14)


def test_class_maxima_are_those_of_each_image():
    case = Case.random(0, B=4, zeros=True)
    maxima = class_maxima(case.F, case.grid, case.K)
    for b, c in itertools.product(range(4), range(case.K)):
        expected = slow.class_maximum(case.F.numpy(), case.grid.numpy(), c, b)
        assert maxima[b, c].item() == pytest.approx(expected, rel=1e-15)


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


@pytest.mark.parametrize("variant", OFFICIAL_SPARSITY)
def test_official_sparsity_of_void_background_and_dead_vectors(variant):
    """Void counts as a class, a vector without activation counts; by class maxima, background alone gives 0."""
    F, y = _two_images()
    for features in (F, torch.where(torch.arange(4) == 1, 0, F)):
        for labels in (y, torch.where(y == 1, VOID, y), torch.zeros_like(y)):
            expected = slow.official_sparsity(features.numpy(), labels.numpy(), variant)
            assert official.sparsity(features, labels, variant).item() == pytest.approx(expected, rel=1e-9)
            assert (expected == 0) == (variant in BY_CLASS and not labels.any())


@pytest.mark.parametrize("variant", [v for v in OFFICIAL_SPARSITY if v != "entropy_softmax"])
def test_official_sparsity_of_features_that_are_all_zero_is_zero(variant):
    features = torch.zeros(2, 8, 4, 4, requires_grad=True)
    value = official.sparsity(features, torch.ones(2, 4, 4, dtype=torch.long), variant)
    assert value == 0
    assert torch.autograd.grad(value, features)[0].isfinite().all()


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
    F, y = f[None, :, None, None].double(), torch.zeros(1, 1, 1, dtype=torch.long)
    return mean(sparsity_sums(F, y, "class_max", class_maxima(F, y, 1))).item()


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
    for add_up in (prototypes._added_by_products, prototypes._added_one_by_one):
        torch.manual_seed(classes)
        x = torch.randn(3, 6, 4, 5, dtype=torch.float64, requires_grad=True)
        sums = add_up(x, x.square().sum(1).flatten(1), labels, classes)
        weights = [torch.randn_like(total) for total in sums]
        sum((w * total).sum() for w, total in zip(weights, sums, strict=True)).backward()
        results.append((*sums, x.grad))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
