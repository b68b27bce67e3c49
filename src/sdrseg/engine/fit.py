"""One step of training, from the batches' position on."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sdrseg.config import Config
from sdrseg.data.augment import normalise
from sdrseg.data.batches import Batches
from sdrseg.engine.watch import Watch
from sdrseg.methods.base import Method

if TYPE_CHECKING:
    from lightning.fabric import Fabric

    from sdrseg.network import Network


def make_optimiser(network: Network, config: Config, step: int) -> torch.optim.SGD:
    """SGD with one group for the body and one for the head."""
    optim = config.optim
    lr, factor = (optim.lr, optim.head_lr_factor) if step == 0 else (optim.lr_later, optim.head_lr_factor_later)
    if optim.lr_rule == "linear":
        lr *= config.train.batch_size / optim.reference_batch
    groups = [
        {"params": list(network.body_parameters()), "lr": lr, "initial_lr": lr},
        {"params": list(network.head_parameters()), "lr": lr * factor, "initial_lr": lr * factor},
    ]
    return torch.optim.SGD(
        groups, lr=lr, momentum=optim.momentum, nesterov=optim.nesterov, weight_decay=optim.weight_decay
    )


def fit(
    fabric: Fabric,
    method: Method,
    student: Any,
    teacher: Network | None,
    optimiser: Any,
    batches: Batches,
    config: Config,
    watch: Watch,
    save: Callable[[], None],
    check: Callable[[bool], None],
) -> None:
    """Train `student` (wrapped by Fabric) on all batches that are left."""
    network: Network = student.module
    total = watch.iterations
    weights = method.weights()
    for batch in batches:
        optimiser.zero_grad(set_to_none=True)
        for group in optimiser.param_groups:
            group["lr"] = group["initial_lr"] * (1 - watch.iteration / total) ** config.optim.power
        whole = batch.to(fabric.device)
        parts = whole.split(config.run.accumulate)
        method.expect(whole if len(parts) > 1 else None, len(parts))
        for number, part in enumerate(parts, 1):
            with fabric.no_backward_sync(student, enabled=number < len(parts)):
                images = normalise(part.images)
                seen = None
                if teacher is not None:
                    with torch.no_grad(), fabric.autocast():
                        seen = teacher(images)
                output = student(images)
                terms = method.terms(part, output, seen)
                loss: Tensor = sum(weights.get(name, 1.0) * term for name, term in terms.items())  # type: ignore[assignment]
                fabric.backward(loss)
                watch.add(terms, loss)
        method.after_backward(network)
        if config.optim.clip > 0:
            fabric.clip_gradients(student, optimiser, max_norm=config.optim.clip)
        optimiser.step()
        method.after_update(network)
        if watch.end_iteration(whole, lambda: method.metrics(part, output)):  # noqa: B023 - called at once
            save()
        check(watch.logged)
