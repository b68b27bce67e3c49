"""What to expect before training: the amount of data, similar old classes, time and memory."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch

from sdrseg.datasets.augment import normalise
from sdrseg.datasets.batches import eval_batches, train_order
from sdrseg.engine.evaluate import confusion
from sdrseg.engine.job import Job
from sdrseg.engine.saved import open_step
from sdrseg.errors import DataError, quantity
from sdrseg.extend.plan import Plan
from sdrseg.metrics import as_background

EXAMINED = 100
"""The number of training images in which similar old classes are counted."""
NOTABLE = 0.05
"""The share of the pixels of a new class from which an old class counts as similar."""


@dataclass(frozen=True)
class Forecast:
    """The forecast of an extension."""

    images: dict[str, int]  # of each new class
    trained: int  # all training images
    held_out: int
    similar: dict[str, dict[str, float]]  # new class -> old class -> share of its pixels
    iterations: int  # 0 if only new rows are fitted
    views: int  # of each image, if only new rows are fitted
    seconds: float
    gibibytes: float  # of memory, without decoded images

    def to_dict(self) -> dict[str, Any]:
        return dict(self.__dict__)

    def sentences(self) -> list[str]:
        counts = ", ".join(f"{name} in {count}" for name, count in self.images.items())
        lines = [f"{quantity(self.trained, 'training image')} ({counts}), {self.held_out} held out"]
        for name, old in self.similar.items():
            lines += [
                f"{100 * share:.0f} % of {name} pixels are now predicted as '{other}'" for other, share in old.items()
            ]
        duration = f"{max(2, self.seconds):.0f} seconds" if self.seconds < 120 else f"{self.seconds / 60:.0f} minutes"
        fitted = f"{quantity(self.views, 'pass')} over the images"
        work = f"at most {self.iterations} iterations" if self.iterations else fitted
        memory = f"{self.gibibytes:.1f} GiB of memory"
        lines.append(f"{work}: about {duration} of training (remembering and scoring come on top) and {memory}")
        return lines


def forecast(job: Job, plan: Plan) -> Forecast:
    """Apply the old model to the new images, and time one image."""
    step, config = plan.step, job.config.of_step(plan.step.number)
    network, decision = open_step(plan.parent.folder.step(plan.parent.step), config.net)
    network.place_on(job.fabric.device)
    n_old, index = len(step.old), plan.indexes["train"]
    own = [id for id in step.train_ids if id in set(plan.new.train_ids)]
    some = own[:: max(1, len(own) // EXAMINED)]
    if config.run.on_bad_image == "skip":
        some = [id for id in some if _is_readable(plan, id)]
    sizes, table = index.size_by_id, step.train_table
    batches = eval_batches(plan.source, some, sizes, table, config, share=job.share, multiple=network.multiple)
    found = confusion(job.fabric, network, batches, len(step.channels), decision)
    matrix = as_background(found, job.removed_channels(step))
    similar: dict[str, dict[str, float]] = {}
    for channel, name in enumerate((plan.scenario.classes[c] for c in step.new), n_old):
        shares = matrix[channel, 1:n_old] / max(1, matrix[channel].sum())
        notable = [c for c in shares.argsort()[::-1] if shares[c] >= NOTABLE]
        similar[name] = {plan.parent.classes[c + 1]: float(shares[c]) for c in notable}
    method = job.method(config, job.processes)
    trains, views = method.iterates(step.number), method.survey_views(step.number)
    iterations = len(train_order(step.train_ids, config, job.share)) if trains else 0
    seconds, saved = _one_image(job, network, config.data.crop, trains)
    batch = config.train.batch_size
    weights = sum(p.numel() for p in network.parameters()) * 4
    copies = 4 if trains else 1  # student, gradient, momentum, teacher
    memory = (batch * saved + copies * weights) / 2**30
    return Forecast(
        plan.new.images,
        len(step.train_ids),
        plan.new.held_out,
        similar,
        iterations,
        views,
        (iterations * batch or views * len(step.train_ids)) * seconds,
        memory,
    )


def _is_readable(plan: Plan, id: str) -> bool:
    try:
        plan.source.pair(id)
    except DataError:
        return False
    return True


def _one_image(job: Job, network: Any, crop: int, trains: bool) -> tuple[float, int]:
    """Seconds for one crop, and the bytes of its feature maps. `trains`: with a teacher and backward."""
    network.eval()
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.data_ptr()] = tensor.nbytes
        return tensor

    image = normalise(torch.zeros(1, 3, crop, crop, dtype=torch.uint8, device=job.fabric.device))
    for _ in range(2):  # the first time takes longer
        start = time.monotonic()
        with job.fabric.autocast():
            with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
                loss = network(image).logits.float().mean()
            if trains:
                with torch.no_grad():
                    network(image)
        if trains:
            loss.backward()
        if job.fabric.device.type == "cuda":
            torch.cuda.synchronize(job.fabric.device)
        seconds = time.monotonic() - start
    network.zero_grad(set_to_none=True)
    return seconds, sum(kept.values())
