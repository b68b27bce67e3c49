"""Optimisers and schedules, each a function with its name in the settings."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from sdrseg.config import Config
from sdrseg.config.engine import Optim

if TYPE_CHECKING:
    from sdrseg.methods.base import Method
    from sdrseg.network import Network

Groups = list[dict[str, Any]]


def learning_rates(config: Config) -> tuple[float, float]:
    """The initial learning rates of encoder and decoder. `config`: that of the step."""
    optim = config.optim
    lr = optim.lr
    if optim.lr_rule == "linear":
        lr *= config.train.batch_size / optim.reference_batch
    return lr * optim.encoder_lr_factor, lr * optim.decoder_lr_factor


def make_optimiser(network: Network, method: Method, config: Config) -> torch.optim.Optimizer:
    """The optimiser of the settings, with the groups of the method: by default one for the encoder, one for the
    decoder."""
    lr, decoder = learning_rates(config)
    groups = [{**group, "initial_lr": group["lr"]} for group in method.parameter_groups(network, lr, decoder)]
    for group in groups if any(group["lr"] > 0 for group in groups) else []:
        for parameter in group["params"]:
            parameter.requires_grad_(group["lr"] > 0)  # frozen parameters get no gradient
    fused = next(network.parameters()).is_cuda or None  # one kernel for many parameters
    return OPTIMISERS[config.optim.optimiser](groups, config.optim, fused)


def set_learning_rates(optimiser: Any, optim: Optim, iteration: int, iterations: int) -> None:
    """Set the learning rates of an iteration (from 0): the initial rates times the schedule, with a linear warm-up."""
    factor = SCHEDULES[optim.schedule](iteration / iterations, optim)
    if iteration < optim.warmup:
        factor *= (iteration + 1) / optim.warmup
    for group in optimiser.param_groups:
        group["lr"] = group["initial_lr"] * factor


def sgd(groups: Groups, optim: Optim, fused: bool | None) -> torch.optim.Optimizer:
    nesterov = optim.nesterov and optim.momentum > 0
    return torch.optim.SGD(
        groups, momentum=optim.momentum, nesterov=nesterov, weight_decay=optim.weight_decay, fused=fused
    )


def adamw(groups: Groups, optim: Optim, fused: bool | None) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, betas=optim.betas, weight_decay=optim.weight_decay, fused=fused)


def poly(done: float, optim: Optim) -> float:
    return float((1 - done) ** optim.power)


def cosine(done: float, optim: Optim) -> float:
    return (1 + math.cos(math.pi * done)) / 2


def constant(done: float, optim: Optim) -> float:
    return 1.0


OPTIMISERS: dict[str, Callable[[Groups, Optim, bool | None], torch.optim.Optimizer]] = {"sgd": sgd, "adamw": adamw}
SCHEDULES: dict[str, Callable[[float, Optim], float]] = {"poly": poly, "cosine": cosine, "constant": constant}
"""The factor of the learning rates as a function of the share of finished iterations."""
