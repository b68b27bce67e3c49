"""All steps of a scenario with one method: what `sdrseg train` does."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from timm.layers.norm_act import convert_sync_batchnorm

from sdrseg.config import Config, load_config
from sdrseg.data import read_spec
from sdrseg.data.batches import survey_batches, train_batches
from sdrseg.data.order import TrainOrder
from sdrseg.data.pool import ImagePool
from sdrseg.decision import Decision, read_decision
from sdrseg.engine.bases import RECIPE
from sdrseg.engine.checkpoint import (
    load_optimiser,
    load_random_state,
    optimiser_tensors,
    random_state,
    under_prefix,
    with_prefix,
)
from sdrseg.engine.evaluate import offline_iou, require_held_out, score, score_also, score_step, summarise
from sdrseg.engine.fit import fit, survey
from sdrseg.engine.job import Job, open_run_folder, prepare_job, scored_on
from sdrseg.engine.launch import cpu_warning
from sdrseg.engine.optimiser import learning_rates, make_optimiser
from sdrseg.engine.passes import make_pass
from sdrseg.engine.watch import NotFiniteError, Watch
from sdrseg.errors import UsageError
from sdrseg.methods import Method, StepInfo, limits_in, method_layers, own_sections, resolve_method
from sdrseg.methods.base import When
from sdrseg.methods.finetune import Offline
from sdrseg.methods.latent import require_official
from sdrseg.methods.own import file_digest, keep_source, require_super, require_weights
from sdrseg.network import Network, build_network, require_variance, statistics_warning
from sdrseg.scenario import Step
from sdrseg.weights import load_weights

Assembled = tuple[Method, Network, Network | None]  # method, student, teacher


def train(
    spec_text: str,
    method_name: str,
    out: str | Path,
    *,
    data: str | Path | None = None,
    preset: str = "default",
    config_file: str | Path | None = None,
    settings: Mapping[str, Any] | None = None,
    bases: str | Path | None = None,
    offline: str | Path | None = None,
    display: Any = None,
    images: ImagePool | None = None,
    stop_at: float | None = None,
) -> dict[str, Any]:
    """Train every step that is not done yet, score each, and return the summary. The same call again resumes.

    `method_name`: a name, or a Python file that registers a method. `settings`: values such as {"train.epochs": 3}.
    `offline`: a finished run on all classes at once, to measure intransigence against.
    `images`: a pool of decoded images that several runs of this process share. `stop_at`: the `time.monotonic()` at
    which to save and stop, as Ctrl-C does.
    """
    out = Path(out)
    data, config_file, bases, offline = (None if p is None else Path(p) for p in (data, config_file, bases, offline))
    method_name = resolve_method(method_name)
    spec = read_spec(spec_text)
    layers = method_layers(method_name, preset, spec.task, spec.source)
    config = load_config(spec.source, config_file, settings, layers, own_sections(method_name))
    if config.eval.every and config.train.holdout == 0:
        raise UsageError("eval.every scores during training, which needs held-out images: set train.holdout=0.2 too.")
    bound = None if offline is None else offline_iou(offline, scored_on(config))
    job = prepare_job(spec, method_name, config, data, out, bases, display)
    job.images = images or job.images
    job.interruption.stop_at = stop_at
    require_official(config, job.everyone.world)
    job.scenario.require_images([config.of_step(step.number).train.batch_size for step in job.scenario.steps])
    if job.everyone.rank == 0:
        require_held_out(job)
    ready = None
    if not job.folder.has_model(0) and not job.base_is_stored():
        if job.everyone.rank == 0:
            job.bases.require_writable()
        ready = assemble(job, job.scenario[0], *job.base[:2])  # what is wrong is said before the folder is made
    identity = {"spec": str(spec), "method": method_name, "preset": preset, "recipe": RECIPE}
    if code := file_digest(job.method):
        identity["method_code"] = code
    try:
        if job.everyone.rank == 0:
            open_run_folder(job, identity)
            keep_source(job.method, job.folder.path)
        rates = [learning_rates(config.of_step(number)) for number in range(min(2, len(job.scenario)))]
        spoken = ", then ".join(f"{low:g}" + (f" (decoder {high:g})" if high != low else "") for low, high in rates)
        job.display.say(f"preset {preset}, learning rate {spoken}")
        if issubclass(job.method, Offline) and len(job.scenario) > 1:
            say = f"warning: with several steps, {method_name} is fine-tuning and no bound to compare with"
            job.display.say(f"{say}. For that, train {spec.source}:offline.")
        for section, key, most in limits_in(layers):
            if getattr(getattr(config, section), key) == most:
                job.display.say(f"{section}.{key} is capped at {most:g} for generated data (see docs/methods.md)")
        job.fabric.barrier()
        with job.interruption:
            for step in job.scenario:
                if not job.folder.has_model(step.number):
                    _train_step(job, step, ready)
                ready = None  # later steps need the memory
                job.fabric.barrier()
                if not job.folder.has_metrics(step.number):
                    score_step(job, step)
                job.fabric.barrier()
            score_also(job)
            return summarise(job, bound)
    finally:
        job.display.close()
        if job.log is not None:
            job.log.close()
        job.folder.close()


LOWER = 1 / 3
TIMES = 4


def _train_step(job: Job, step: Step, ready: Assembled | None) -> None:
    """Fit one step and save the model; where it diverges, again with lower rates if run.on_divergence says so."""
    for times in range(TIMES + 1):
        rate = LOWER**times
        try:
            _fit_step(job, step, ready, rate)
            return
        except NotFiniteError as error:
            if job.config.run.on_divergence == "stop" or times == TIMES:
                raise
            job.interruption.save = None
            if times > 0 and job.everyone.rank == 0:
                job.folder.drop_state()  # the state itself may be on the way to infinity
            job.fabric.barrier()
            job.display.say(
                f"{str(error).partition(' Images:')[0]} Again, with {rate * LOWER:.2g} of the learning rate."
            )
            ready = assemble(job, step, *job.base[:2]) if step.number == 0 else None


def _fit_step(job: Job, step: Step, ready: Assembled | None, rate: float) -> None:
    """Fit one step from its beginning or from the saved state, and save the model. `ready`: if assembled already;
    `rate`: a factor of the learning rate."""
    method_type, config, key = job.method, job.config.of_step(step.number), None
    if step.number == 0:
        method_type, config, key = job.base
    config = config.changed({"optim.lr": config.optim.lr * rate})
    if key is not None and ready is None:
        job.display.say(f"step 0: taken from the store of bases ({key})")
        if job.everyone.rank == 0:
            decision = method_type(config).decision
            job.folder.save_step(0, *job.bases.load(key), _meta(job, step, config, decision, {"base": key}))
        return
    method, student, teacher = ready or assemble(job, step, method_type, config)
    cache = job.cache("train", "train", step.train_ids)
    shown: dict[str, Any] = {"share": job.share, "cache": cache}
    batches = train_batches(job.source, step.train_ids, step.train_table, config, **shown)
    order = batches.order
    assert isinstance(order, TrainOrder)
    iterations = len(order)
    parameters = sum(p.numel() for p in student.encoder_parameters())
    if step.number <= 1 and (slow := cpu_warning(job.fabric.device, config.net.encoder, parameters)):
        job.display.say(slow)  # in step 1 too: step 0 may come from the store

    def look(when: When) -> None:
        if method_type.survey is not Method.survey:
            once = survey_batches(job.source, step.train_ids, step.train_table, config, **shown)
            survey(job.fabric, method, student, teacher, once, when)

    if step.number == 0 and (warning := statistics_warning(config.net, iterations)):
        job.display.say(f"warning: {warning}")
    state = job.folder.load_state(step.number)
    done = 0
    if state is None:
        look("before")
    optimiser = make_optimiser(student, method, config)
    if state is not None:
        facts, tensors = state
        done = facts["iteration"]
        student.load_state_dict(under_prefix("model", tensors))
        load_optimiser(optimiser, under_prefix("optimiser", tensors))
        method.load_state_dict({n: t.to(job.fabric.device) for n, t in under_prefix("method", tensors).items()})
        load_random_state(under_prefix("random", tensors))
        order.load_state_dict(facts["order"])
        if job.log is not None:
            job.log.cut(facts["log_bytes"])
            job.log.write("resume", step=step.number, iteration=done)
        job.display.say(f"step {step.number}: resuming at iteration {done} of {iterations}")
    elif job.log is not None:
        job.log.cut_step(step.number)
    wrapped, optimiser = job.fabric.setup(student, optimiser)
    log_every, save_seconds, epochs = config.run.log_every, 60 * config.run.save_minutes, config.train.epochs
    watch = Watch(step.number, iterations, job.log, job.display.update, log_every, save_seconds, done, epochs)

    if state is not None and job.everyone.rank == 0:
        watch.bad.update(state[0].get("bad_images", {}))

    def save() -> None:
        if job.everyone.rank == 0:
            parts = {"model": student.state_dict(), "optimiser": optimiser_tensors(optimiser)}
            parts |= {"method": method.state_dict(), "random": random_state()}
            tensors = {name: t for part, named in parts.items() for name, t in with_prefix(part, named).items()}
            facts = {"step": step.number, "iteration": watch.iteration, "order": order.state_dict()}
            facts["bad_images"] = watch.bad
            job.folder.save_state(tensors, {**facts, "log_bytes": job.log.size if job.log is not None else 0})

    def validate(epoch: int) -> None:
        if config.eval.every and epoch % config.eval.every == 0:
            miou = score(job, step, student, method.decision).miou()
            if job.log is not None:
                job.log.write("validate", step=step.number, epoch=epoch, miou=miou, scored_on=job.scored_on)
            job.display.validated(step.number, epoch, miou)

    job.interruption.save = save
    compute = make_pass(job.fabric, method, wrapped, teacher, config, job.iterations_alike(step), job.display.say)
    fit(job.fabric, compute, optimiser, batches, config, watch, save, validate, job.interruption.check)
    job.interruption.save = None
    if job.log is not None:
        job.log.write("passes", step=step.number, how=compute.how)
    bad = job.everyone.counted(watch.bad)
    if bad:
        skipped = ", ".join(f"{id} ({count} times)" for id, count in sorted(bad.items()))
        job.display.say(f"step {step.number}: {len(bad)} images could not be read and were skipped: {skipped}")
    look("after")
    method.end_step(student)
    if job.everyone.rank == 0:
        model, memory = student.state_dict(), method.state_dict()
        more = ({"base": key} if key else {}) | ({"lowered_rate": rate} if rate < 1 else {})
        meta = _meta(job, step, config, method.decision, more)
        job.folder.save_step(step.number, model, memory, meta)
        if key is not None and not bad and rate == 1:  # without the skipped images it would be another one
            job.bases.save(key, model, memory, {"spec": job.spec, "classes": len(step.channels)})


def assemble(job: Job, step: Step, method_type: type[Method], config: Config) -> Assembled:
    """Method, student and teacher as they are when a step begins."""
    torch.manual_seed(config.train.seed * 1000 + step.number)
    old, new = len(step.old), len(step.new)
    decision: Decision = "softmax"
    student = build_network(config.net, old if step.number > 0 else new)
    teacher = None
    for held in [config, job.config.of_step(1)] if step.number == 0 < len(job.scenario.steps) - 1 else [config]:
        if held.net.bn == "train" and not job.synchronised:
            least = max(1, held.train.batch_size // (job.everyone.world * held.run.accumulate))
            require_variance(student, least, held.data.crop)
    method = method_type(config, job.everyone)
    require_super(method, "__init__", "latent")
    require_weights(method)
    if step.number == 0:
        job.display.say(load_weights(student, config.net.weights, config.net))
    else:
        meta, model, memory = job.folder.load_step(step.number - 1)
        decision = read_decision(meta.get("decision", "softmax"), job.folder.step(step.number - 1) / "meta.json")
        student.load_state_dict(model)
        method.load_state_dict({n: t.to(job.fabric.device) for n, t in memory.items()})
        if new > 0 and method.needs_teacher:
            teacher = copy.deepcopy(student).eval().requires_grad_(False)
    for network in (student, teacher):
        if network is not None:
            network.keep_stages = method.needs_stages
            network.place_on(job.fabric.device)
    method.begin_step(StepInfo(step.number, old, new, job.protocol, decision), student, teacher)
    require_super(method, "begin_step", "step")
    student.place_on(job.fabric.device)
    student.train()
    if config.net.bn == "freeze_stats":
        student.freeze_statistics()
    elif job.synchronised:
        convert_sync_batchnorm(student)  # type: ignore[no-untyped-call]
    elif job.everyone.world > 1:
        job.display.say("batch norm: there is no synchronised one on this device; each process uses its own images")
    return method, student, teacher


def _meta(job: Job, step: Step, config: Config, decision: Decision, more: dict[str, Any]) -> dict[str, Any]:
    """What a saved model is: classes by channel, where they came from, and its parent."""
    came = {c: s.number for s in job.scenario for c in s.new}
    parent = None
    if step.number > 0:
        parent = job.folder.read_json(f"steps/{step.number - 1}/meta.json")["files"]["model"]["sha256"]
    return {
        "step": step.number,
        "spec": job.spec,
        "protocol": job.scenario.spec.protocol,
        "method": job.method.name,
        "classes": [
            {"channel": channel, "id": id, "name": job.scenario.classes[id], "step": came[id]}
            for channel, id in enumerate(step.channels)
        ],
        "decision": decision,
        "net": config.to_dict()["net"],
        "parent": parent,
        **more,
    }
