"""For a model that another method trained, such as a shared step 0: the state of this run's method after a survey."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from sdrseg.config import Config
from sdrseg.datasets.batches import Batches, survey_batches
from sdrseg.engine.fit import survey
from sdrseg.engine.job import Job
from sdrseg.methods import Method, StepInfo
from sdrseg.network import load_network
from sdrseg.scenario import Step


def surveyed(job: Job, step: Step, config: Config, model: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What the method adds to the memory of step 0; empty if it trained step 0 itself or has no survey."""
    if job.method.survey is job.base[0].survey:
        return {}
    ids = step.train_ids
    cache = job.cache("train", "train", ids)
    batches = survey_batches(job.source, ids, step.train_table, config, share=job.share, cache=cache)
    method = survey_with(model, job, job.config, len(step.channels), batches)
    return {name: tensor for name, tensor in method.state_dict().items() if not name.startswith("prototypes.")}


def survey_with(
    model: Mapping[str, Tensor],
    job: Job,
    config: Config,
    classes: int,
    batches: Batches,
    through: Callable[[Method], Any] = lambda method: method,
) -> Method:
    """The run's method after a survey with a saved model, as at the end of a step 0 with all its classes.

    `through`: what passes the survey on to the method.
    """
    network = load_network(config.net, classes, model)
    network.place_on(job.fabric.device)
    method = job.method(config, job.processes)
    method.begin_step(StepInfo(0, 0, classes, job.protocol), network, None)
    network.load_state_dict(model)  # restored, because a method may initialise rows in step 0
    network.freeze_statistics()
    network.keep_stages = method.needs_stages
    surveyor = through(method)
    if surveyor.wants_survey("after"):
        survey(job.fabric, surveyor, network, None, batches, "after")
    return method
