"""One step of training, from the batches' position on."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from sdrseg.config import Config
from sdrseg.data.batches import Batches
from sdrseg.data.order import TrainOrder
from sdrseg.engine.passes import GraphPass, Pass
from sdrseg.engine.watch import Watch

if TYPE_CHECKING:
    from lightning.fabric import Fabric

    from sdrseg.network import Network


def learning_rates(config: Config) -> tuple[float, float]:
    """At the beginning of a step, of the encoder and of the decoder. `config`: that of the step."""
    optim = config.optim
    lr = optim.lr
    if optim.lr_rule == "linear":
        lr *= config.train.batch_size / optim.reference_batch
    return lr, lr * optim.decoder_lr_factor


def make_optimiser(network: Network, config: Config) -> torch.optim.SGD:
    """SGD with one group for the encoder and one for the decoder."""
    optim = config.optim
    lr, decoder = learning_rates(config)
    groups = [
        {"params": list(network.encoder_parameters()), "lr": lr, "initial_lr": lr},
        {"params": list(network.decoder_parameters()), "lr": decoder, "initial_lr": decoder},
    ]
    options: dict[str, Any] = {"momentum": optim.momentum, "nesterov": optim.nesterov}
    fused = next(network.parameters()).is_cuda or None  # one kernel for many parameters
    return torch.optim.SGD(groups, lr=lr, weight_decay=optim.weight_decay, fused=fused, **options)


def fit(
    fabric: Fabric,
    compute: Pass | GraphPass,
    optimiser: Any,
    batches: Batches,
    config: Config,
    watch: Watch,
    save: Callable[[], None],
    validate: Callable[[int], None],
    check: Callable[[bool], None],
) -> None:
    """Train on all batches that are left."""
    method, student, total = compute.method, compute.student, watch.iterations
    network: Network = student.module
    order = batches.order
    assert isinstance(order, TrainOrder)
    for batch in batches:
        for group in optimiser.param_groups:
            group["lr"] = group["initial_lr"] * (1 - watch.iteration / total) ** config.optim.power
        whole = batch.to(fabric.device)
        parts = whole.split(config.run.accumulate)
        method.expect(whole if len(parts) > 1 else None, len(parts))
        compute.forget_gradients()
        for number, part in enumerate(parts, 1):
            with fabric.no_backward_sync(student, enabled=number < len(parts)):
                passed = compute(part)
                watch.add(passed.terms, passed.loss)
        method.after_backward(network)
        if config.optim.clip > 0:
            fabric.clip_gradients(student, optimiser, max_norm=config.optim.clip)
        optimiser.step()
        method.after_update(network)
        if watch.end_iteration(whole, lambda: method.metrics(part, passed.features)):  # noqa: B023 - called at once
            save()
        if watch.iteration % order.batches_per_epoch == 0 and watch.iteration < total:
            validate(batch.epoch + 1)
        check(watch.logged)
