"""The losses against the slow reference: values, gradients, and everything that can go wrong on the way.

`TERMS` holds every loss as one function of a `Case` (all inputs of a small batch), beside its reference; most tests go
through all of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as nn

from loss_cases import (
    METRICS,
    OFFICIAL,
    SEEDS,
    SPARSITY,
    TERMS,
    Case,
    _maxima,
    finite_differences,
    value_and_gradient,
)
from sdrseg.kernels.plain import rows_of
from sdrseg.labels import VOID
from sdrseg.losses.contrast import (
    attraction,
    attraction_image_sums,
    attraction_norm_image_sums,
    attraction_norm_sums,
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

import reference as slow

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
