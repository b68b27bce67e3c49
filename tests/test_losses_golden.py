"""Every golden value of docs/specification.md, section 6, by the losses and by the slow reference, in float64."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from sdrseg.losses import official
from sdrseg.losses.contrast import attraction, attraction_norm, attraction_norm_sums, repulsion
from sdrseg.losses.cross_entropy import binary_cross_entropy_sums, cross_entropy_sums, unbiased_cross_entropy_sums
from sdrseg.losses.distillation import (
    binary_distillation_sums,
    cil_sums,
    distillation_sums,
    encoder_distillation_sums,
    unbiased_distillation_sums,
)
from sdrseg.losses.pixels import mean
from sdrseg.losses.prototypes import Prototypes, class_sums, in_batch, matching, pseudo_labels
from sdrseg.losses.sparsity import active_sums, class_maxima, sparsity_sums

import golden
import reference as slow
from golden import FEATURES, GRID, LABELS, LABELS_VOID, LOGITS, N_OLD, PROTOTYPES, TEACHER, K

EVERY_CLASS = torch.ones(K, dtype=torch.bool)
EVERY_PIXEL = torch.ones(LABELS.shape, dtype=torch.bool)
EVERY_POSITION = torch.ones(GRID.shape, dtype=torch.bool)
KNOWN = Prototypes(PROTOTYPES, torch.ones(K, dtype=torch.long))
PSEUDO = pseudo_labels(GRID, TEACHER, 4)
PSEUDO_OFFICIAL = torch.where(GRID == 0, PSEUDO, 0)

# The same for the reference
F_, Z_, T_, Y_, P_, GRID_ = (x.numpy() for x in (FEATURES, LOGITS, TEACHER, LABELS_VOID, PROTOTYPES, GRID))
SEEN_, TAKE_ = np.ones(K, int), [True] * K
PSEUDO_ = slow.pseudo_labels(GRID_, T_, 4)


def match(F: Tensor, average, distance="mse", normaliser="present") -> Tensor:
    current, present = in_batch(class_sums(F, PSEUDO, K), average)
    return matching(KNOWN, current, present, n_old=N_OLD, distance=distance, normaliser=normaliser)


def attract(F: Tensor) -> Tensor:
    return attraction(class_sums(F, GRID, K), KNOWN, EVERY_CLASS)


def attract_norm(F: Tensor, reduction) -> Tensor:
    return attraction_norm(attraction_norm_sums(F, GRID, KNOWN, EVERY_CLASS), reduction)


def repel(F: Tensor, average, normaliser="classes") -> Tensor:
    return repulsion(*in_batch(class_sums(F, GRID, K), average), EVERY_CLASS, normaliser)


def sparse(F: Tensor, variant, scope="image", detach_max=False) -> Tensor:
    maxima = class_maxima(F, GRID, K)
    if variant == "norm_max_overall":
        maxima = maxima.amax().reshape(1, 1)
    elif scope == "batch":
        maxima = maxima.amax(0, keepdim=True)
    return mean(sparsity_sums(F, GRID, variant, maxima.detach() if detach_max else maxima))


ROWS: dict[str, tuple[Callable[[], Tensor], Callable[[], float]]] = {
    "CE, all pixels": (
        lambda: mean(cross_entropy_sums(LOGITS, LABELS_VOID, count_void=True)),
        lambda: slow.cross_entropy(Z_, Y_, count_void=True),
    ),
    "CE, valid pixels": (
        lambda: mean(cross_entropy_sums(LOGITS, LABELS_VOID)),
        lambda: slow.cross_entropy(Z_, Y_),
    ),
    "UNCE, all pixels": (
        lambda: mean(unbiased_cross_entropy_sums(LOGITS, LABELS_VOID, N_OLD, count_void=True)),
        lambda: slow.unbiased_cross_entropy(Z_, Y_, N_OLD, count_void=True),
    ),
    "UNCE, valid pixels": (
        lambda: mean(unbiased_cross_entropy_sums(LOGITS, LABELS_VOID, N_OLD)),
        lambda: slow.unbiased_cross_entropy(Z_, Y_, N_OLD),
    ),
    "KD": (
        lambda: mean(distillation_sums(LOGITS, TEACHER, EVERY_PIXEL)) / N_OLD,
        lambda: slow.distillation(Z_, T_, EVERY_PIXEL.numpy()),
    ),
    "UNKD": (
        lambda: mean(unbiased_distillation_sums(LOGITS, TEACHER, EVERY_PIXEL)) / N_OLD,
        lambda: slow.unbiased_distillation(Z_, T_, EVERY_PIXEL.numpy()),
    ),
    "LwF-MC BCE": (
        lambda: mean(binary_cross_entropy_sums(LOGITS, LABELS_VOID)),
        lambda: slow.binary_cross_entropy(Z_, Y_),
    ),
    "LwF-MC distillation": (
        lambda: mean(binary_distillation_sums(LOGITS, TEACHER, EVERY_PIXEL)),
        lambda: slow.binary_distillation(Z_, T_, EVERY_PIXEL.numpy()),
    ),
    "CIL": (
        lambda: mean(cil_sums(LOGITS, TEACHER, LABELS_VOID, EVERY_PIXEL)),
        lambda: slow.cil(Z_, T_, Y_, EVERY_PIXEL.numpy()),
    ),
    "CIL, official": (
        lambda: official.cil(LOGITS, TEACHER, LABELS_VOID),
        lambda: slow.official_cil(Z_, T_, Y_),
    ),
    "matching, MSE, pixel means": (
        lambda: match(FEATURES, "pixel"),
        lambda: slow.matching(F_, PSEUDO_, P_, SEEN_, N_OLD, average="pixel"),
    ),
    "matching, MSE, image means": (
        lambda: match(FEATURES, "image"),
        lambda: slow.matching(F_, PSEUDO_, P_, SEEN_, N_OLD),
    ),
    "matching, Frobenius, pixel means": (
        lambda: match(FEATURES, "pixel", "frobenius", "n_old"),
        lambda: slow.matching(F_, PSEUDO_, P_, SEEN_, N_OLD, average="pixel", distance="frobenius", normaliser="n_old"),
    ),
    "matching, Frobenius, image means": (
        lambda: match(FEATURES, "image", "frobenius", "n_old"),
        lambda: slow.matching(F_, PSEUDO_, P_, SEEN_, N_OLD, distance="frobenius", normaliser="n_old"),
    ),
    "matching, official": (
        lambda: official.matching(FEATURES, PSEUDO_OFFICIAL, PROTOTYPES),
        lambda: slow.official_matching(F_, PSEUDO_OFFICIAL.numpy(), P_),
    ),
    "attraction": (
        lambda: attract(FEATURES),
        lambda: slow.attraction(F_, GRID_, P_, SEEN_, TAKE_),
    ),
    "attraction, sum of norms": (
        lambda: attract_norm(FEATURES, "sum"),
        lambda: slow.attraction(F_, GRID_, P_, SEEN_, TAKE_, "norm_sum"),
    ),
    "attraction, mean of norms": (
        lambda: attract_norm(FEATURES, "mean"),
        lambda: slow.attraction(F_, GRID_, P_, SEEN_, TAKE_, "norm_mean"),
    ),
    "attraction, official": (
        lambda: official.attraction(FEATURES, GRID, PROTOTYPES),
        lambda: slow.official_attraction(F_, GRID_, P_),
    ),
    "repulsion, 1/K, pixel means": (
        lambda: repel(FEATURES, "pixel"),
        lambda: slow.repulsion(F_, GRID_, TAKE_, average="pixel"),
    ),
    "repulsion, pairs, pixel means": (
        lambda: repel(FEATURES, "pixel", "pairs"),
        lambda: slow.repulsion(F_, GRID_, TAKE_, average="pixel", normaliser="pairs"),
    ),
    "repulsion, 1/K, image means": (
        lambda: repel(FEATURES, "image"),
        lambda: slow.repulsion(F_, GRID_, TAKE_),
    ),
    "repulsion, pairs, image means": (
        lambda: repel(FEATURES, "image", "pairs"),
        lambda: slow.repulsion(F_, GRID_, TAKE_, normaliser="pairs"),
    ),
    "repulsion, official": (
        lambda: official.repulsion(FEATURES, GRID),
        lambda: slow.official_repulsion(F_, GRID_),
    ),
    "sparsity, official": (
        lambda: official.sparsity(FEATURES, GRID, "class_max"),
        lambda: slow.official_sparsity(F_, GRID_),
    ),
    "sparsity, lasso of the official code": (
        lambda: official.lasso(FEATURES),
        lambda: slow.official_lasso(F_),
    ),
    "active channels": (
        lambda: mean(active_sums(FEATURES, GRID)),
        lambda: slow.active(F_, GRID_),
    ),
    "ILT's encoder loss": (
        lambda: mean(encoder_distillation_sums(FEATURES, FEATURES.roll(1, 1), EVERY_POSITION)),
        lambda: slow.encoder_distillation(F_, np.roll(F_, 1, 1), EVERY_POSITION.numpy()),
    ),
} | {
    f"sparsity, {variant}, {scope}": (
        lambda variant=variant, scope=scope: sparse(FEATURES, variant, scope),
        lambda variant=variant, scope=scope: slow.sparsity(F_, GRID_, variant, scope),
    )
    for variant, scope in [
        ("class_max", "batch"),
        ("class_max", "image"),
        ("norm_max", "image"),
        ("norm_max_overall", "batch"),
        ("norm_l2", "image"),
        ("power2", "batch"),
        ("power3", "batch"),
        ("power2", "image"),
        ("power3", "image"),
        ("entropy_l1", "image"),
        ("entropy_softmax", "image"),
        ("l1", "image"),
    ]
}


@pytest.mark.parametrize("row", ROWS)
def test_value(row):
    expected = golden.VALUES[row]
    ours, theirs = ROWS[row]
    value = ours()
    assert value.dtype == torch.float64
    assert value.item() == pytest.approx(expected, rel=0, abs=1e-8)
    assert theirs() == pytest.approx(expected, rel=0, abs=1e-8), "the reference itself"


GRADIENT_NORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "attraction": attract,
    "repulsion, 1/K, pixel means": lambda F: repel(F, "pixel"),
    "repulsion, 1/K, image means": lambda F: repel(F, "image"),
    "matching, MSE, pixel means": lambda F: match(F, "pixel"),
    "matching, MSE, image means": lambda F: match(F, "image"),
    "sparsity, batch maximum detached": lambda F: sparse(F, "class_max", "batch", detach_max=True),
    "sparsity, batch maximum": lambda F: sparse(F, "class_max", "batch"),
    "sparsity, image maximum": lambda F: sparse(F, "class_max", "image"),
}


@pytest.mark.parametrize("row", GRADIENT_NORMS)
def test_gradient_norm(row):
    F = FEATURES.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(GRADIENT_NORMS[row](F), F)
    assert gradient.norm().item() == pytest.approx(golden.VALUES[f"gradient: {row}"], rel=0, abs=1e-8)


@pytest.mark.parametrize(
    ("average", "count", "values"),
    [
        ("pixel", 11, [0.5234965, 0.60972028, 0.60503497, 0.45853147, 0.63566434, 0.6627972]),
        ("image", 2, [0.53014103, 0.60228205, 0.61592308, 0.45573077, 0.63137179, 0.65401282]),
    ],
)
def test_mean_of_class_0(average, count, values):
    sums = class_sums(FEATURES, GRID, K)
    means, present = in_batch(sums, average)
    assert sums.counted(average)[1][0] == count
    assert present.tolist() == [True, False, False, True, True]
    np.testing.assert_allclose(means[0], values, rtol=0, atol=1e-8)
    reference, n = slow.class_mean(F_, GRID_, 0, average)
    assert n == count
    np.testing.assert_allclose(reference, values, rtol=0, atol=1e-8)


def test_pseudo_map():
    expected = [["2001", "0010", "0000", "2000"], ["0020", "0000", "1000", "0020"]]
    assert [["".join(map(str, row)) for row in image] for image in PSEUDO_OFFICIAL.tolist()] == expected
    assert PSEUDO.tolist() == PSEUDO_.tolist()
    assert torch.equal(PSEUDO[GRID != 0], GRID[GRID != 0].long()), "new classes stay what they are"


SUMS = {"sum of F": FEATURES, "sum of z": LOGITS, "sum of t": TEACHER, "sum of p": PROTOTYPES}


@pytest.mark.parametrize("row", SUMS)
def test_sum_of_inputs(row):
    assert SUMS[row].sum().item() == pytest.approx(golden.VALUES[row], rel=0, abs=1e-8)


def test_every_row_of_the_specification_is_compared():
    assert golden.VALUES.keys() == {*SUMS, *ROWS, *(f"gradient: {row}" for row in GRADIENT_NORMS)}
