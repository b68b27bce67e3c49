"""Train one step, starting at the position of the batches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from sdrseg.config import Config
from sdrseg.datasets.augment import normalise
from sdrseg.datasets.batches import Batches
from sdrseg.datasets.order import TrainOrder
from sdrseg.engine.optimiser import set_learning_rates
from sdrseg.engine.passes import GraphPass, Pass
from sdrseg.engine.watch import Watch
from sdrseg.errors import quantity
from sdrseg.methods.own import require_appeared

if TYPE_CHECKING:
    from lightning.fabric import Fabric

    from sdrseg.methods.base import Method, When
    from sdrseg.network import Network


@torch.no_grad()
def update(optimiser: Any, method: Method, network: Network) -> None:
    """Update the parameters; in later steps, scale the update of each row of the classifier by `row_rates`.

    With any optimiser, that multiplies the row's learning rate, including weight decay and momentum.
    """
    factors = method.row_rates if method.step.number > 0 else (1.0, 1.0)
    before = [(p, p.clone()) for p in network.classifier.parameters()] if factors != (1.0, 1.0) else []
    optimiser.step()
    n_old = method.step.n_old
    for parameter, old in before:
        for factor, rows in zip(factors, (slice(n_old), slice(n_old, None)), strict=True):
            if factor == 0:
                parameter[rows] = old[rows]
            elif factor != 1:
                parameter[rows] = old[rows] + factor * (parameter[rows] - old[rows])


@torch.no_grad()
def survey(
    fabric: Fabric, method: Method, student: Network, teacher: Network | None, batches: Batches, when: When
) -> Counter[str]:
    """Call the method's survey hooks with all training data of a step; returns the unreadable images that were
    skipped, and how often."""
    student.eval()
    method.begin_survey(when)
    bad: Counter[str] = Counter()
    for batch in batches:
        bad.update(batch.bad)
        batch = batch.to(fabric.device)
        images = normalise(batch.images)
        with fabric.autocast():
            target = None if teacher is None else teacher(images)
            output = student(images)
        method.survey(batch, output, target)
    method.end_survey(when)
    student.train()
    return bad


def skipped(bad: Counter[str]) -> str:
    """What a user is told of images that were skipped."""
    each = ", ".join(f"{id} ({quantity(count, 'time')})" for id, count in sorted(bad.items()))
    return f"skipped {quantity(len(bad), 'image')} that cannot be read: {each}"


def fit(
    fabric: Fabric,
    compute: Pass | GraphPass,
    optimiser: Any,
    batches: Batches,
    config: Config,
    watch: Watch,
    save: Callable[[], None],
    validate: Callable[[int], bool],
    check: Callable[[bool], None],
) -> None:
    """Train on all remaining batches, or until `validate` (called after each epoch but the last) returns True."""
    method, student, total = compute.method, compute.student, watch.iterations
    network: Network = student.module
    order = batches.order
    assert isinstance(order, TrainOrder)
    appeared: set[str] = set()
    for batch in batches:
        set_learning_rates(optimiser, config.optim, watch.iteration, total)
        watch.rates = tuple(group["lr"] for group in optimiser.param_groups[:2])
        whole = batch.to(fabric.device)
        parts = whole.split(config.run.accumulate)
        expected = None
        if len(parts) > 1:
            assert isinstance(compute, Pass)  # a graph takes batches whole (speed.why_plain)
            expected = compute.relabelled(whole, parts)
        method.expect(expected, len(parts))
        compute.zero_gradients()
        for number, part in enumerate(parts, 1):
            with fabric.no_backward_sync(student, enabled=number < len(parts)):
                passed = compute(part)
                watch.add(passed.terms, passed.loss)
            appeared |= passed.terms.keys()
        method.after_backward(network)
        if config.optim.clip > 0:
            fabric.clip_gradients(student, optimiser, max_norm=config.optim.clip)
        update(optimiser, method, network)
        method.after_update(network)
        if watch.end_iteration(whole, lambda: method.metrics(part, passed.features)):  # noqa: B023 - called at once
            save()
        if watch.iteration == order.batches_per_epoch:
            require_appeared(method, appeared)
        ended = watch.iteration % order.batches_per_epoch == 0 and watch.iteration < total
        if ended and validate(batch.epoch + 1):
            return
        check(watch.logged)
