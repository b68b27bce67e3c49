"""Optimisers and schedules, each a function with its name in the settings."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sdrseg.config import Config
from sdrseg.config.engine import Optim
from sdrseg.errors import UsageError

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
    groups = [{**group, "initial_lr": group["lr"]} for group in _sound(method, network, lr, decoder)]
    for group in groups if any(group["lr"] > 0 for group in groups) else []:
        for parameter in group["params"]:
            parameter.requires_grad_(group["lr"] > 0)  # frozen parameters get no gradient
    fused = next(network.parameters()).is_cuda or None  # one kernel for many parameters
    return OPTIMISERS[config.optim.optimiser](groups, config.optim, fused)


def _sound(method: Method, network: Network, encoder: float, decoder: float) -> Groups:
    """The groups of a method, with lists of parameters; raises an error that names what is wrong with them."""

    def error(what: str) -> UsageError:
        return UsageError(
            f"method {method.name}: parameter_groups {what}. Return a list of groups such as "
            f'{{"params": [parameter, …], "lr": 0.01}}.'
        )

    groups = method.parameter_groups(network, encoder, decoder)
    if not isinstance(groups, list | tuple) or not groups:
        raise error(f"returns {groups!r}")
    names: dict[Tensor, str] = {parameter: name for name, parameter in network.named_parameters()}
    seen: set[Tensor] = set()
    sound = []
    for number, group in enumerate(groups, 1):
        if not isinstance(group, Mapping) or not {"params", "lr"} <= group.keys():
            raise error(f'has a group {number} without "params" or "lr"')
        params = [group["params"]] if isinstance(group["params"], Tensor) else list(group["params"])
        for parameter in params:
            if not isinstance(parameter, Tensor) or not parameter.is_leaf:
                raise error(f"has {type(parameter).__name__} in group {number}, which is no parameter")
            if parameter in seen:
                raise error(f"names {names.get(parameter, 'a parameter')} twice")
            seen.add(parameter)
        if isinstance(group["lr"], bool) or not isinstance(group["lr"], int | float) or not group["lr"] >= 0:
            raise error(f"has the learning rate {group['lr']!r} in group {number}")
        if params:
            sound.append({**group, "params": params})
    if not sound:
        raise error("has no parameter in any group")
    return sound


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
