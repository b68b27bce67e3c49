"""How logits become a class and probabilities. A step's meta.json names its decision, so no method is needed later.

softmax      classes exclude each other: softmax over all channels
sigmoid      a binary decision per class; background where all are negative, regardless of channel 0
sigmoid_all  a binary decision per channel, background included (LwF-MC)
"""

from __future__ import annotations

from typing import Any, Literal, get_args

import torch
from torch import Tensor

from sdrseg.errors import SdrsegError

Decision = Literal["softmax", "sigmoid", "sigmoid_all"]


def scores(logits: Tensor, decision: Decision, dim: int = 1) -> Tensor:
    """Logits whose largest channel is the decision: with `sigmoid`, channel 0 is set to 0."""
    if decision != "sigmoid":
        return logits
    classes = logits.narrow(dim, 1, logits.shape[dim] - 1)
    return torch.cat([torch.zeros_like(logits.narrow(dim, 0, 1)), classes], dim)


def decide(logits: Tensor, decision: Decision, dim: int = 1) -> Tensor:
    """The channel of each pixel."""
    return scores(logits, decision, dim).argmax(dim)


def probabilities(logits: Tensor, decision: Decision, dim: int = 1) -> Tensor:
    """The probability of each channel; the largest is the decision. Only those of a softmax sum to 1.

    sigmoid: that of background is 1 − the largest of the classes, so it is at least ½ where no class is positive. It
    is not Π(1 − σ), which would fall with the number of classes and could be the largest where a class is positive.
    """
    if decision == "softmax":
        return logits.softmax(dim)
    each = logits.sigmoid()
    if decision == "sigmoid_all":
        return each
    classes = each.narrow(dim, 1, each.shape[dim] - 1)
    background = 1 - classes.amax(dim, keepdim=True)
    return torch.cat([background, classes], dim)


def read_decision(value: Any, origin: object) -> Decision:
    """The decision named in a file."""
    if value not in get_args(Decision):
        raise SdrsegError(f"{origin}: decision {value!r} is none of {', '.join(get_args(Decision))}.")
    found: Decision = value
    return found
