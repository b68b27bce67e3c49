"""Names of loss variants, apart from torch so that the configuration can be read without it."""

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
