"""Run one step: assemble, resume, fit, save."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import timm.layers
import torch

from sdrseg.config import Config
from sdrseg.datasets.extended import Extended
from sdrseg.decision import Decision
from sdrseg.engine.bases import files_digest
from sdrseg.engine.checkpoint import seed_all
from sdrseg.engine.class_weights import class_weights
from sdrseg.engine.job import Job
from sdrseg.engine.launch import cpu_warning
from sdrseg.engine.saved import open_step
from sdrseg.engine.shared import surveyed
from sdrseg.engine.training import Assembled, StepTraining
from sdrseg.engine.watch import NotFiniteError
from sdrseg.methods import Method, StepInfo
from sdrseg.methods.memory import nbytes_of, parts_of
from sdrseg.methods.own import require_loaded, require_super, require_weights
from sdrseg.network import Network, build_network
from sdrseg.network_statistics import require_variance, statistics_warning
from sdrseg.scenario import Step
from sdrseg.weights import load_weights

Tensors = Mapping[str, torch.Tensor]


RATE_FACTOR = 1 / 3  # of the learning rate, at each retry after a divergence
RETRIES = 4


def train_step(job: Job, step: Step, ready: Assembled | None) -> None:
    """Fit one step and save the model; if it diverges, retry with lower learning rates if run.on_divergence is set so.

    `ready`: method and networks, if already assembled.
    """
    for retry in range(min(job.folder.retries(step.number), RETRIES), RETRIES + 1):
        try:
            _train_once(job, step, ready, retry)
            return
        except NotFiniteError as error:
            if job.config.run.on_divergence == "stop" or retry == RETRIES:
                raise
            job.interruption.save = None
            if retry > 0 and job.processes.rank == 0:
                job.folder.drop_state()  # the state itself may already be diverging
            job.fabric.barrier()
            job.display.say(
                f"{str(error).partition(' Images:')[0]} Retrying with {RATE_FACTOR ** (retry + 1):.2g} of the learning "
                f"rate."
            )
            ready = assemble(job, step, *job.base[:2]) if step.number == 0 else None


def _train_once(job: Job, step: Step, ready: Assembled | None, retry: int) -> None:
    """Fit one step from its beginning or from the saved state, and save the model. `retry`: how often the learning rate
    was lowered."""
    rate = RATE_FACTOR**retry
    method_type, config, key = job.method, job.config.of_step(step.number), None
    if step.number == 0:
        method_type, config, key = job.base
    config = config.changed({"optim.lr": config.optim.lr * rate})
    if key is not None and ready is None:
        rounded = job.bases.rounded(key)
        how = ", rounded to float16 when it was exported" if rounded else ""
        job.display.say(f"step 0: taken from the store of bases ({key}{how})")
        known = job.bases.images(key) if job.processes.rank == 0 else None
        if known is not None and known != files_digest(job.source, step.train_ids):
            job.display.say(
                "warning: files of images have other sizes than those with which this base was trained. If the images "
                "have changed, pass another --bases."
            )
        stored = job.bases.load(key) if job.processes.rank == 0 else None  # other machines may not have the store
        model, memory = job.fabric.broadcast(stored)
        memory = surveyed(job, step, config, model, memory)
        if job.processes.rank == 0:
            decision = method_type(config).decision
            _save(job, step, model, memory, _meta(job, step, config, decision, {"base": key, "base_rounded": rounded}))
        return
    assembled = method, student, _ = ready or assemble(job, step, method_type, config)
    training = StepTraining(job, step, config, assembled, retry)
    _warn(job, step, config, student, training.iterations)
    bad = training.run()
    method.end_step(student)
    model, memory = student.state_dict(), method.state_dict()
    own = surveyed(job, step, config, model, memory) if step.number == 0 else memory
    is_base = key is not None and not bad and rate == 1  # otherwise it is not the base of this key
    if job.processes.rank == 0:
        more = ({"base": key} if is_base else {}) | ({"lowered_rate": rate} if rate < 1 else {})
        meta = _meta(job, step, config, method.decision, more)
        _save(job, step, model, own, meta)
        if key is not None and is_base:
            facts = {"spec": job.spec, "classes": len(step.channels)}
            job.bases.save(key, model, memory, {**facts, "images": files_digest(job.source, step.train_ids)})


def _save(job: Job, step: Step, model: Tensors, memory: Tensors, meta: dict[str, Any]) -> None:
    remembered = nbytes_of(parts_of(memory)) or sum(tensor.nbytes for tensor in memory.values())
    job.log.write("memory", step=step.number, bytes=remembered)
    job.folder.save_step(step.number, model, memory, meta)


def _warn(job: Job, step: Step, config: Config, student: Network, iterations: int) -> None:
    parameters = sum(p.numel() for p in student.encoder_parameters())
    slow = cpu_warning(job.fabric.device, config.net.encoder, parameters)
    if slow and step.number <= 1 and not isinstance(job.source, Extended):
        job.display.say(slow)  # in step 1 too: step 0 may come from the store
    if step.number == 0 and (warning := statistics_warning(config.net, iterations)):
        job.display.say(f"warning: {warning}")


def require_variances(job: Job) -> None:
    """Raise an error if an unfinished step would train batch norm on one image at a time."""
    done = job.folder.has_model(0) or job.base_is_stored()
    later = [job.config.of_step(1)] if len(job.scenario) > 1 and job.iterates(1) else []
    for config in later if done else [job.base[1], *later]:
        at_once = config.train.batch_size // (job.processes.world * config.run.accumulate)
        if config.net.bn == "train" and not job.synchronised and at_once <= 1:
            require_variance(build_network(config.net, 2), config.data.crop)


def assemble(job: Job, step: Step, method_type: type[Method], config: Config) -> Assembled:
    """Method, student and teacher at the beginning of a step."""
    seed_all(config.train.seed * 1000 + step.number)
    old, new = len(step.old), len(step.new)
    decision: Decision = "softmax"
    if step.number == 0:
        student = build_network(config.net, new)
    else:
        student, decision = open_step(job.folder.step(step.number - 1), config.net)
        student.silence(job.silenced)
    teacher = None
    method = method_type(config, job.processes)
    require_super(method, "__init__", "latent")
    if step.number == 0:
        job.display.say(load_weights(student, config.net.weights, config.net))
    else:
        memory = job.folder.load_memory(step.number - 1)
        method.require_state(memory)
        method.load_state_dict({n: t.to(job.fabric.device) for n, t in memory.items()})
        require_loaded(method, memory)
        if new > 0 and method.needs_teacher:
            teacher = copy.deepcopy(student).eval().requires_grad_(False)
    for network in (student, teacher):
        if network is not None:
            network.keep_stages = method.needs_stages
            network.place_on(job.fabric.device)
    weights = class_weights(config, step, job.indexes["train"], job.scenario.classes)
    info = StepInfo(step.number, old, new, job.protocol, decision, weights, job.replays)
    method.begin_step(info, student, teacher)
    require_super(method, "begin_step", "step")
    require_weights(method)  # they may depend on the step
    student.place_on(job.fabric.device)
    student.train()
    if config.net.bn == "freeze_stats":
        student.freeze_statistics()
    elif job.synchronised:
        timm.layers.convert_sync_batchnorm(student)  # type: ignore[attr-defined, no-untyped-call]
    elif job.processes.world > 1:
        job.display.say("batch norm is not synchronised on this device; each process uses its own images")
    return method, student, teacher


def _meta(job: Job, step: Step, config: Config, decision: Decision, more: dict[str, Any]) -> dict[str, Any]:
    """Metadata of a saved model: its classes by channel, the steps that introduced them, and its parent."""
    introduced_in = {c: s.number for s in job.scenario for c in s.new}
    parent = None
    if step.number > 0:
        parent = job.folder.read_json(f"steps/{step.number - 1}/meta.json")["files"]["model"]["sha256"]
    return {
        "step": step.number,
        "spec": job.spec,
        "protocol": job.scenario.spec.protocol,
        "method": job.method.name,
        "classes": [
            {"channel": channel, "id": id, "name": job.scenario.classes[id], "step": introduced_in[id]}
            | ({"id": 0, "removed": True} if id in job.removed else {})
            for channel, id in enumerate(step.channels)
        ],
        "decision": decision,
        "net": config.to_dict()["net"],
        "parent": parent,
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
        **more,
    }
