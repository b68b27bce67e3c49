"""`sdrseg train`: all steps of a scenario with one method."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from sdrseg.config import Config, load_config
from sdrseg.config.sections import AUTO
from sdrseg.datasets import read_spec
from sdrseg.datasets.extended import Extended
from sdrseg.datasets.pool import ImagePool
from sdrseg.engine.bases import RECIPE
from sdrseg.engine.batch_size import choose_batch_size
from sdrseg.engine.best import require_held_out_scores
from sdrseg.engine.evaluate import offline_iou, require_held_out, score_also, score_step, summarise
from sdrseg.engine.folder import RunFolder
from sdrseg.engine.job import Job, open_run_folder, prepare_job, scored_on
from sdrseg.engine.optimiser import learning_rates
from sdrseg.engine.requirements import require_possible
from sdrseg.engine.step import assemble, require_variances, train_step
from sdrseg.engine.trackers import require_trackers
from sdrseg.engine.training import Assembled
from sdrseg.methods import limits_in, method_layers, own_sections, resolve_method
from sdrseg.methods.finetune import Offline
from sdrseg.methods.own import file_digest
from sdrseg.methods.terms import only_later
from sdrseg.metrics import StepScore
from sdrseg.own_files import keep_copy
from sdrseg.scenario import find_source


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
    after_step: Callable[[StepScore], None] | None = None,
    begin_with: Path | None = None,
) -> dict[str, Any]:
    """Train every unfinished step, score each, and return the summary. Repeat the call to resume.

    `method_name`: a name, or a Python file that registers a method. `settings`: values such as {"train.epochs": 3}.
    `offline`: a finished run on all classes at once, to measure intransigence against.
    `images`: a pool of decoded images that several runs of this process share. `stop_at`: the `time.monotonic()` at
    which to save and stop, as Ctrl-C does. `after_step` gets the scores of each step; what it raises ends the run,
    which the same call resumes. `begin_with`: a run whose finished steps this one takes over.
    """
    out = Path(out)
    data, config_file, bases, offline = (None if p is None else Path(p) for p in (data, config_file, bases, offline))
    method_name = resolve_method(method_name)
    spec = read_spec(spec_text)
    layers = method_layers(method_name, preset, spec.task, spec.source)
    config = load_config(spec.source, config_file, settings, layers, own_sections(method_name))
    require_held_out_scores(config)
    require_trackers(config.run.loggers)
    bound = None if offline is None else offline_iou(offline, scored_on(config))
    job = prepare_job(spec, method_name, config, data, out, bases, display)
    require_possible(
        job.method, config, processes=job.processes.world, classes=job.scenario.classes, steps=len(job.scenario)
    )
    job.images = images or job.images
    job.interruption.stop_at = stop_at
    notes = choose_batch_size(job) if config.train.batch_size == AUTO else []
    config = job.config
    numbers = range(len(job.scenario))
    job.scenario.require_images([config.of_step(n).train.batch_size if job.iterates(n) else 1 for n in numbers])
    if job.processes.rank == 0:
        require_held_out(job)
    require_variances(job)
    ready: list[Assembled] = []
    if begin_with is None and not job.folder.has_model(0) and not job.base_is_stored():
        if job.processes.rank == 0:
            job.bases.require_writable()
        ready.append(assemble(job, job.scenario[0], *job.base[:2]))  # errors appear before the folder is created
    identity = {"spec": str(spec), "method": method_name, "preset": preset, "recipe": RECIPE}
    if code := file_digest(job.method):
        identity["method_code"] = code
    notes += [
        f"{section}.{key} is capped at {most:g} for the data set {spec.source} (see docs/methods.md)"
        for section, key, most in limits_in(layers)
        if getattr(getattr(config, section), key) == most
    ]
    notes += without_effect(job, load_config(spec.source, between=layers, own=own_sections(method_name)))
    if issubclass(job.method, Offline) and len(job.scenario) > 1:
        warning = f"warning: with several steps, {method_name} is fine-tuning, not an upper bound"
        notes.append(f"{warning}. For that, train {spec.source}:offline.")

    def begin() -> None:
        if begin_with is not None and job.processes.rank == 0:
            job.folder.take_steps(RunFolder(begin_with))

    return carry_out(job, identity, ready, bound, notes=notes, prepare=begin, after_step=after_step)


FITTED = "the network stays as it is; only the rows of new classes are fitted"


def without_effect(job: Job, usual: Config) -> list[str]:
    """If later steps only fit rows: a note on settings of their training that differ from the usual ones."""
    last, config = len(job.scenario) - 1, job.config
    extended = isinstance(job.source, Extended)  # step 0 is finished
    if last == 0 or any(job.iterates(number) for number in ([last] if extended else range(1, last + 1))):
        return []
    known = {s.key: s for s in config.settings()}
    later_terms = only_later(config)

    def trains(key: str) -> bool:
        """Whether a setting is used only in the iterations of later steps."""
        of_step = re.fullmatch(r"step\.\d+\.(.+)", key)
        key = of_step[1] if of_step else key
        later_only = (of_step or extended) and (known[key].iterating or f"{key}_later" in known)
        section = key.partition(".")[0]
        if section in config.own:
            return known[key].iterating
        return bool(later_only) or known[key].affects in ("later", "teacher") or section in later_terms

    before = {s.key: s.value for s in usual.settings()}
    names = [s.key for s in config.settings() if s.value != before.get(s.key) and trains(s.key)]
    return [f"where only rows are fitted, these settings do not change the result: {', '.join(names)}"] if names else []


def _rates(job: Job, step: int) -> str:
    """The learning rates of a step in words, or that it needs none."""
    config = job.config.of_step(step)
    if not job.method(config, job.processes).iterates(step):
        return FITTED
    encoder, decoder = learning_rates(config)
    if encoder == 0 < decoder:
        return f"{decoder:g}, encoder frozen"
    return f"{encoder:g}" + (f" (decoder {decoder:g})" if decoder != encoder else "")


def carry_out(
    job: Job,
    identity: dict[str, Any],
    ready: list[Assembled] | None = None,
    bound: dict[str, float | None] | None = None,
    *,
    notes: Sequence[str] = (),
    prepare: Callable[[], None] = lambda: None,
    after_step: Callable[[StepScore], None] | None = None,
) -> dict[str, Any]:
    """Open the run folder, train and score every unfinished step, and return the summary.

    `ready`: step 0, if already assembled; it is taken out, so that later steps can use its memory. `notes`: printed at
    the beginning. `prepare` is called in every process once the folder exists.
    """
    ready = [] if ready is None else ready
    try:
        if job.processes.rank == 0:
            open_run_folder(job, identity)
            keep_copy(job.method, job.folder.path / "method.py")
            keep_copy(find_source(job.scenario.spec.source), job.folder.path / "dataset.py")
        last = len(job.scenario) - 1
        numbers = [last] if "extends" in identity else range(last + 1)
        shown = ", then ".join(rates for rates, _ in groupby(_rates(job, number) for number in numbers))
        job.display.say(f"preset {identity['preset']}, {shown if shown == FITTED else f'learning rate {shown}'}")
        for note in notes:
            job.display.say(note)
        prepare()
        job.fabric.barrier()
        if job.fabric.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(job.fabric.device)  # earlier runs of this process do not count
        with job.interruption:
            for step in job.scenario:
                if not job.folder.has_model(step.number):
                    train_step(job, step, ready.pop() if ready and step.number == 0 else None)
                ready.clear()  # another process may have finished step 0 meanwhile
                job.interruption.check_signals()
                job.fabric.barrier()
                if not job.folder.has_metrics(step.number):
                    score_step(job, step)
                job.fabric.barrier()
                if after_step is not None:
                    after_step(StepScore.from_dict(job.folder.read_json(f"steps/{step.number}/metrics.json")))
                if step.number < last:
                    job.interruption.check_signals()
            score_also(job)
            return summarise(job, bound)
    finally:
        job.display.close()
        job.log.close()
        job.folder.close()
