"""For a model that another method trained, such as a shared step 0: the memory of this run's method after a survey."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from sdrseg.config import Config
from sdrseg.datasets.batches import Batches, survey_batches
from sdrseg.engine.fit import skipped, survey
from sdrseg.engine.job import Job
from sdrseg.methods import Method, StepInfo
from sdrseg.network import load_network
from sdrseg.scenario import Step


def surveyed(
    job: Job, step: Step, config: Config, model: Mapping[str, Tensor], memory: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """The memory of step 0: that of the method that trained it, with what a survey by this run's method changes."""
    if job.method.survey is job.base[0].survey:
        return dict(memory)
    ids = step.train_ids
    cache = job.cache("train", "train", ids)
    batches = survey_batches(job.source, ids, step.train_table, config, share=job.share, cache=cache)
    found, changed = survey_with(model, job, job.config, len(step.channels), batches)
    return {**memory, **{name: tensor for name, tensor in found.items() if name in changed or name not in memory}}


def survey_with(
    model: Mapping[str, Tensor],
    job: Job,
    config: Config,
    classes: int,
    batches: Batches,
    through: Callable[[Method], Any] = lambda method: method,
) -> tuple[dict[str, Tensor], set[str]]:
    """The memory of the run's method after a survey with a saved model, as at the end of a step 0 with all its classes,
    and the names of the tensors that the survey made or changed.

    `through`: what passes the survey on to the method.
    """
    network = load_network(config.net, classes, model)
    network.place_on(job.fabric.device)
    method = job.method(config, job.processes)
    method.begin_step(StepInfo(0, 0, classes, job.protocol), network, None)
    network.load_state_dict(model)  # restored, because a method may initialise rows in step 0
    network.freeze_statistics()
    network.keep_stages = method.needs_stages
    before = {name: tensor.clone() for name, tensor in method.state_dict().items()}
    surveyor = through(method)
    if surveyor.wants_survey("after"):
        if bad := job.processes.counted(survey(job.fabric, surveyor, network, None, batches, "after")):
            job.display.say(skipped(bad))
    found = method.state_dict()
    return found, {name for name, t in found.items() if name not in before or not torch.equal(t, before[name])}
