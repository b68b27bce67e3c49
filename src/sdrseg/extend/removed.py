"""Removed classes: they keep their channels, which count as background. One can be added again, as a new class."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence

from torch import Tensor

from sdrseg.extend.parent import Parent

SUFFIX = " (removed)"


def removed_name(name: str, taken: Collection[str]) -> str:
    """The name of a class after it was removed; `taken`: names of other classes."""
    name += SUFFIX
    return name if name not in taken else removed_name(name, taken)


def name_before(name: str) -> str:
    """The name that a removed class had; other names are returned unchanged."""
    return re.sub(f"({re.escape(SUFFIX)})+$", "", name)


def added_again(parent: Parent, names: Sequence[str]) -> dict[int, str]:
    """Removed classes of the model that are among the names of new classes: their channels and names."""
    classes = enumerate(parent.meta["classes"])
    found = {channel: name_before(str(c["name"])) for channel, c in classes if c.get("removed")}
    return {channel: name for channel, name in found.items() if name in names}


def forgotten(memory: Mapping[str, Tensor], channels: Sequence[int]) -> dict[str, Tensor]:
    """The memory of a method without some channels: their prototypes and remembered features."""
    kept = {name: tensor.clone() for name, tensor in memory.items()}
    if "memory.classes.owner" in kept:
        owner = kept["memory.classes.owner"]
        others = (owner[:, None] != owner.new_tensor(channels)).all(1)
        kept |= {name: tensor[others] for name, tensor in kept.items() if name.startswith("memory.classes.")}
    for name, tensor in kept.items():
        if name.startswith("prototypes."):
            tensor[list(channels)] = 0
    return kept
