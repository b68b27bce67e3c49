"""Every golden value of METHODS section 9, by the losses and by the slow reference, in float64."""

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
PSEUDO = pseudo_labels(GRID, TEACHER)
PSEUDO_OFFICIAL = torch.where(GRID == 0, PSEUDO, 0)

# The same for the reference
F_, Z_, T_, Y_, P_, GRID_ = (x.numpy() for x in (FEATURES, LOGITS, TEACHER, LABELS_VOID, PROTOTYPES, GRID))
SEEN_, TAKE_ = np.ones(K, int), [True] * K
PSEUDO_ = slow.pseudo_labels(GRID_, T_)


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


ROWS: dict[str, tuple[float, Callable[[], Tensor], Callable[[], float]]] = {
    "CE, all pixels": (
        1.7681733244,
        lambda: mean(cross_entropy_sums(LOGITS, LABELS_VOID, count_void=True)),
        lambda: slow.cross_entropy(Z_, Y_, count_void=True),
    ),
    "CE, valid pixels": (
        1.7751073374,
        lambda: mean(cross_entropy_sums(LOGITS, LABELS_VOID)),
        lambda: slow.cross_entropy(Z_, Y_),
    ),
    "UNCE, all pixels": (
        1.3424336560,
        lambda: mean(unbiased_cross_entropy_sums(LOGITS, LABELS_VOID, N_OLD, count_void=True)),
        lambda: slow.unbiased_cross_entropy(Z_, Y_, N_OLD, count_void=True),
    ),
    "UNCE, valid pixels": (
        1.3476981017,
        lambda: mean(unbiased_cross_entropy_sums(LOGITS, LABELS_VOID, N_OLD)),
        lambda: slow.unbiased_cross_entropy(Z_, Y_, N_OLD),
    ),
    "KD": (
        0.4138745926,
        lambda: mean(distillation_sums(LOGITS, TEACHER, EVERY_PIXEL)) / N_OLD,
        lambda: slow.distillation(Z_, T_, EVERY_PIXEL.numpy()),
    ),
    "UNKD": (
        0.4567317412,
        lambda: mean(unbiased_distillation_sums(LOGITS, TEACHER, EVERY_PIXEL)) / N_OLD,
        lambda: slow.unbiased_distillation(Z_, T_, EVERY_PIXEL.numpy()),
    ),
    "LwF-MC BCE": (
        3.7210858256,
        lambda: mean(binary_cross_entropy_sums(LOGITS, LABELS_VOID)),
        lambda: slow.binary_cross_entropy(Z_, Y_),
    ),
    "LwF-MC distillation": (
        2.2387136450,
        lambda: mean(binary_distillation_sums(LOGITS, TEACHER, EVERY_PIXEL)),
        lambda: slow.binary_distillation(Z_, T_, EVERY_PIXEL.numpy()),
    ),
    "CIL": (
        4.1835449236,
        lambda: mean(cil_sums(LOGITS, TEACHER, LABELS_VOID, EVERY_PIXEL)),
        lambda: slow.cil(Z_, T_, Y_, EVERY_PIXEL.numpy()),
    ),
    "CIL, official": (
        0.6252112092,
        lambda: official.cil(LOGITS, TEACHER, LABELS_VOID),
        lambda: slow.official_cil(Z_, T_, Y_),
    ),
    "matching, MSE, pixel means": (
        0.1420753640,
        lambda: match(FEATURES, "pixel"),
        lambda: slow.matching(F_, PSEUDO_, P_, SEEN_, N_OLD, average="pixel"),
    ),
    "matching, MSE, image means": (
        0.1547920673,
        lambda: match(FEATURES, "image"),
        lambda: slow.matching(F_, PSEUDO_, P_, SEEN_, N_OLD),
    ),
    "matching, Frobenius, pixel means": (
        0.6044388351,
        lambda: match(FEATURES, "pixel", "frobenius", "n_old"),
        lambda: slow.matching(F_, PSEUDO_, P_, SEEN_, N_OLD, average="pixel", distance="frobenius", normaliser="n_old"),
    ),
    "matching, Frobenius, image means": (
        0.6370007152,
        lambda: match(FEATURES, "image", "frobenius", "n_old"),
        lambda: slow.matching(F_, PSEUDO_, P_, SEEN_, N_OLD, distance="frobenius", normaliser="n_old"),
    ),
    "matching, official": (
        0.2152583111,
        lambda: official.matching(FEATURES, PSEUDO_OFFICIAL, PROTOTYPES),
        lambda: slow.official_matching(F_, PSEUDO_OFFICIAL.numpy(), P_),
    ),
    "attraction": (
        0.2245929661,
        lambda: attract(FEATURES),
        lambda: slow.attraction(F_, GRID_, P_, SEEN_, TAKE_),
    ),
    "attraction, sum of norms": (
        11.7894196407,
        lambda: attract_norm(FEATURES, "sum"),
        lambda: slow.attraction(F_, GRID_, P_, SEEN_, TAKE_, "norm_sum"),
    ),
    "attraction, mean of norms": (
        1.1039682104,
        lambda: attract_norm(FEATURES, "mean"),
        lambda: slow.attraction(F_, GRID_, P_, SEEN_, TAKE_, "norm_mean"),
    ),
    "attraction, official": (
        0.1045906350,
        lambda: official.attraction(FEATURES, GRID, PROTOTYPES),
        lambda: slow.official_attraction(F_, GRID_, P_),
    ),
    "repulsion, 1/K, pixel means": (
        6.2442398131,
        lambda: repel(FEATURES, "pixel"),
        lambda: slow.repulsion(F_, GRID_, TAKE_, average="pixel"),
    ),
    "repulsion, pairs, pixel means": (
        3.1221199065,
        lambda: repel(FEATURES, "pixel", "pairs"),
        lambda: slow.repulsion(F_, GRID_, TAKE_, average="pixel", normaliser="pairs"),
    ),
    "repulsion, 1/K, image means": (
        6.3586174162,
        lambda: repel(FEATURES, "image"),
        lambda: slow.repulsion(F_, GRID_, TAKE_),
    ),
    "repulsion, pairs, image means": (
        3.1793087081,
        lambda: repel(FEATURES, "image", "pairs"),
        lambda: slow.repulsion(F_, GRID_, TAKE_, normaliser="pairs"),
    ),
    "repulsion, official": (
        4.7559224498,
        lambda: official.repulsion(FEATURES, GRID),
        lambda: slow.official_repulsion(F_, GRID_),
    ),
    "sparsity, official": (
        3.7398372021,
        lambda: official.sparsity(FEATURES, GRID),
        lambda: slow.official_sparsity(F_, GRID_),
    ),
    "sparsity, lasso of the official code": (
        55.2534615385,
        lambda: official.lasso(FEATURES),
        lambda: slow.official_lasso(F_),
    ),
    "active channels": (
        5.625,
        lambda: mean(active_sums(FEATURES, GRID)),
        lambda: slow.active(F_, GRID_),
    ),
    "ILT's encoder loss": (
        0.2986716531,
        lambda: mean(encoder_distillation_sums(FEATURES, FEATURES.roll(1, 1), EVERY_POSITION)),
        lambda: slow.encoder_distillation(F_, np.roll(F_, 1, 1), EVERY_POSITION.numpy()),
    ),
} | {
    f"sparsity, {variant}, {scope}": (
        value,
        lambda variant=variant, scope=scope: sparse(FEATURES, variant, scope),
        lambda variant=variant, scope=scope: slow.sparsity(F_, GRID_, variant, scope),
    )
    for variant, scope, value in [
        ("class_max", "batch", 3.7398372021),
        ("class_max", "image", 3.7238002375),
        ("norm_max", "image", 3.3457195282),
        ("norm_max_overall", "batch", 3.7722465386),
        ("norm_l2", "image", 4.1476041148),
        ("power2", "batch", 0.6000700215),
        ("power3", "batch", 0.4125616380),
        ("power2", "image", 0.6047377899),
        ("power3", "image", 0.4189232522),
        ("entropy_l1", "image", 1.5735118515),
        ("entropy_softmax", "image", 1.7379991274),
        ("l1", "image", 3.4533413462),
    ]
}


@pytest.mark.parametrize("row", ROWS)
def test_value(row):
    expected, ours, theirs = ROWS[row]
    value = ours()
    assert value.dtype == torch.float64
    assert value.item() == pytest.approx(expected, rel=0, abs=1e-8)
    assert theirs() == pytest.approx(expected, rel=0, abs=1e-8), "the reference itself"


GRADIENT_NORMS: dict[str, tuple[float, Callable[[Tensor], Tensor]]] = {
    "attraction": (0.0684602723, attract),
    "repulsion, 1/K, pixel means": (6.1558455120, lambda F: repel(F, "pixel")),
    "repulsion, 1/K, image means": (6.4320354294, lambda F: repel(F, "image")),
    "matching, MSE, pixel means": (0.1143710983, lambda F: match(F, "pixel")),
    "matching, MSE, image means": (0.1236563919, lambda F: match(F, "image")),
    "sparsity, batch maximum detached": (0.3436680649, lambda F: sparse(F, "class_max", "batch", detach_max=True)),
    "sparsity, batch maximum": (0.7501588456, lambda F: sparse(F, "class_max", "batch")),
    "sparsity, image maximum": (0.6712657930, lambda F: sparse(F, "class_max", "image")),
}


@pytest.mark.parametrize("row", GRADIENT_NORMS)
def test_gradient_norm(row):
    expected, loss = GRADIENT_NORMS[row]
    F = FEATURES.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(loss(F), F)
    assert gradient.norm().item() == pytest.approx(expected, rel=0, abs=1e-8)


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


@pytest.mark.parametrize(
    ("name", "total"),
    [("FEATURES", 110.5069230769), ("LOGITS", 11), ("TEACHER", 194), ("PROTOTYPES", 13.5)],
)
def test_sum_of_inputs(name, total):
    assert getattr(golden, name).sum().item() == pytest.approx(total, rel=0, abs=1e-8)
