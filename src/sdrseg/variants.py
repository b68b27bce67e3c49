"""Names of loss variants, which settings and losses share. No torch: a configuration is read without it."""

from typing import Literal

SparsityVariant = Literal[
    "class_max",
    "norm_max",
    "norm_max_overall",
    "norm_l2",
    "power2",
    "power3",
    "entropy_l1",
    "entropy_softmax",
    "l0",
    "l1",
]
