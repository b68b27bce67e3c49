"""Random inputs of losses, and every term beside its reference in plain NumPy."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from types import SimpleNamespace
from typing import Any, get_args

import numpy as np
import torch
from torch import Tensor

from sdrseg.labels import VOID
from sdrseg.losses import official
from sdrseg.losses.contrast import (
    attraction,
    attraction_image_sums,
    attraction_norm,
    attraction_norm_image_sums,
    attraction_norm_sums,
    repulsion,
    repulsion_from_nearest,
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
from sdrseg.losses.pixels import mean
from sdrseg.losses.prototypes import Prototypes, class_sums, in_batch, matching
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
TERMS["repulsion from the nearest prototype"] = Term(
    "F",
    lambda c: repulsion_from_nearest(*in_batch(class_sums(c.F, c.grid, c.K), "image"), c.prototypes, c.take),
    lambda n: slow.repulsion_from_nearest(n.F, n.grid, n.p, n.seen, n.take),
)
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
