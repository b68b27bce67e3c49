"""`sdrseg extend`: one more step on top of a trained model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from sdrseg.config import Config, read_settings, write_setting
from sdrseg.datasets.extended import CHAIN, read_chain, write_chain
from sdrseg.datasets.index import map_with_threads
from sdrseg.engine.bases import RECIPE
from sdrseg.engine.class_weights import require_class_weights
from sdrseg.engine.job import Job, make_job, removed_classes
from sdrseg.engine.run import carry_out, without_effect
from sdrseg.engine.trackers import require_trackers
from sdrseg.errors import SdrsegError, UsageError
from sdrseg.extend.forecast import Forecast, forecast
from sdrseg.extend.newdata import Protocol, Unlabelled, read_new_data
from sdrseg.extend.notes import label_notes, memory_notes, old_data_notes, repeated_notes
from sdrseg.extend.parent import Parent, copy_steps, read_parent
from sdrseg.extend.plan import Plan, begun_method, choose_method, make_config, make_plan, method_notes
from sdrseg.extend.remember import Views, make_memory, needed, remembered, views_of
from sdrseg.extend.removed import added_again
from sdrseg.extend.replay import read_replay
from sdrseg.extend.review import EXTENSION, review
from sdrseg.extend.verdict import Limits, verdict
from sdrseg.files import write_json
from sdrseg.methods import find_method
from sdrseg.methods.own import file_digest
from sdrseg.metrics import StepScore
from sdrseg.terminal import progress


@dataclass(frozen=True)
class Extension:
    """The outcome. `result` is extension.json of the new step, `summary` is summary.json of the run."""

    run: Path
    step: int
    method: str
    notes: tuple[str, ...]
    forecast: dict[str, Any] | None
    result: dict[str, Any]
    summary: dict[str, Any]

    @property
    def met(self) -> bool:
        """Whether the requirements (max_forgetting, min_new_iou) are met."""
        return bool(self.result["verdict"]["met"])


def extend(
    model: str | Path,
    data: str | Path,
    out: str | Path,
    *,
    classes: str | Sequence[str] | None = None,
    method: str | None = None,
    step: int | None = None,
    unlabelled: Unlabelled = "background",
    negatives: bool = False,
    replay: str | Path | None = None,
    protocol: Protocol | None = None,
    images: str | Path | None = None,
    old_data: str | Path | None = None,
    max_forgetting: float | None = None,
    min_new_iou: float | None = None,
    config_file: str | Path | None = None,
    settings: Mapping[str, Any] | None = None,
    display: Any = None,
) -> Extension:
    """Add classes to the last step of a run (or to `step`) and write a new run. Repeat the call to resume.

    `classes`: the class or classes of the folder `data` to add; by default all that the model does not know.
    `unlabelled`: what unlabelled pixels are. `negatives`: also train on images without a new class. `replay`: a folder
    of labelled old images to train on. `protocol`: whether the labels of old classes are hidden (overlapped) or used
    (sequential). `images`: a folder of images of the old classes, for the memory of methods that need one.
    `old_data`: old data that have moved, or labelled test images of an imported model. The run is only read.
    """
    folder, out, limits = Path(data), Path(out), Limits(max_forgetting, min_new_iou)
    parent = read_parent(Path(model), step, None if old_data is None else Path(old_data), _missing(out))
    _require_options(parent, out, unlabelled, negatives, protocol)
    classes = [classes] if isinstance(classes, str) else classes
    new = read_new_data(parent, folder, classes, unlabelled=unlabelled, negatives=negatives, protocol=protocol)
    more = None if replay is None else read_replay(parent, Path(replay), new.classes)
    plan = make_plan(parent, new, more)
    views = views_of(parent, None if images is None else Path(images))
    if views is None and replay is not None:
        views = views_of(parent, Path(replay))
    known = remembered(parent)
    begun = begun_method(parent, out)
    name = choose_method(parent, method or begun, "memory" in known or views is not None)
    configured = partial(make_config, parent, name, len(new.train_ids), new.held_out > 0, replayed=plan.replayed)
    file = None if config_file is None else Path(config_file)
    config = configured(file, settings)
    job = _make_job(plan, name, config, out, display)
    job.replays, job.data, job.silenced = more is not None, folder, tuple(added_again(parent, new.names))
    job.chosen = tuple(sorted({*read_settings(file, ()), *(settings or {})}))
    usual = configured(None, None)
    built = job.method(config.of_step(plan.step.number), job.processes)
    built.require_state(parent.folder.load_memory(parent.step))
    uses = needed(built)
    notes = [
        *new.notes,
        *old_data_notes(parent, more),
        *repeated_notes(plan),
        *method_notes(parent, method, begun, name),
    ]
    notes += without_effect(job, usual)
    notes += [*memory_notes(name, uses, known, views is not None, images), *label_notes(job, plan)]
    if not job.folder.has_model(plan.step.number):
        _require_pictures(job, plan)
    before = None if _extension_file(job, plan).exists() else forecast(job, plan)
    options = {
        "data": data,
        "classes": ",".join(plan.scenario.classes[c] for c in plan.step.new),
        "method": method or name,
        "step": step,
        "unlabelled": None if unlabelled == "background" else unlabelled,
        "replay": replay,
        "protocol": protocol,
        "images": images,
        "old-data": old_data,
    }
    command = ["sdrseg", "extend", str(model), *_option_args(options, config, usual), *["--negatives"] * negatives]
    result: dict[str, Any] = {}

    def begin() -> None:
        _begin(job, plan, None if uses <= known else views)

    def after_step(score: StepScore) -> None:
        if score.step == plan.step.number:
            first = job.processes.rank == 0
            found = _reviewed(job, plan, score, before, limits, command) if first else None
            result.update(job.fabric.broadcast(found))

    printed = [*notes, *(before.sentences() if before is not None else [])]
    summary = carry_out(job, _identity(job, plan), notes=printed, prepare=begin, after_step=after_step)
    return Extension(out, plan.step.number, name, tuple(notes), result.get("forecast"), result, summary)


def _missing(out: Path) -> list[str]:
    """The prefixes of the data that were gone when an extension was begun in this folder: it goes on without them."""
    parts = read_chain(out)["parts"] if (out / CHAIN).exists() else []
    return [part.prefix for part in parts if not part.available]


def _require_options(
    parent: Parent, out: Path, unlabelled: Unlabelled, negatives: bool, protocol: Protocol | None
) -> None:
    """Raise an error if options are not possible, or not together."""
    parent.require_outside(out)
    if unlabelled not in ("background", "ignore"):
        raise UsageError(f"--unlabelled {unlabelled}: use background or ignore.")
    if negatives and unlabelled == "ignore":
        raise UsageError(
            "--negatives with --unlabelled ignore: images without a new class have no labelled pixel to learn from. "
            "Leave one of them out."
        )
    if protocol not in (None, "overlapped", "sequential"):
        raise UsageError(f"--protocol {protocol}: use overlapped or sequential.")


def _make_job(plan: Plan, name: str, config: Config, out: Path, display: Any) -> Job:
    """The job of the new step; raises an error if the configuration does not fit it."""
    require_trackers(config.run.loggers)
    require_class_weights(config, plan.scenario.classes)
    config.require_steps(len(plan.scenario))
    only = replace(plan.scenario, steps=(plan.step,))
    only.require_images([config.of_step(plan.step.number).train.batch_size])
    job = make_job(find_method(name), config, plan.source, plan.indexes, plan.scenario, out, None, display)
    job.earlier_digests = plan.parent.digests
    job.removed = removed_classes(plan.parent.scenario[-1], plan.parent.meta)
    return job


def _identity(job: Job, plan: Plan) -> dict[str, Any]:
    spec, parent = str(plan.scenario.spec), plan.parent
    identity: dict[str, Any] = {"spec": spec, "method": job.method.name, "preset": "default", "recipe": RECIPE}
    identity["extends"] = {"model": parent.sha256, "step": parent.step}
    if code := file_digest(job.method):
        identity["method_code"] = code
    return identity


def _option_args(options: Mapping[str, Any], config: Config, usual: Config) -> list[str]:
    """Options of the command line: those that are set, and settings that differ from the usual ones."""
    known = {s.key: s.value for s in usual.settings()}
    pairs = [(f"--{name}", str(value)) for name, value in options.items() if value is not None]
    pairs += [("--set", write_setting(s.key, s.value)) for s in config.settings() if known.get(s.key, usual) != s.value]
    return [arg for pair in pairs for arg in pair]


def _require_pictures(job: Job, plan: Plan) -> None:
    """Decode every new image once, so that a broken one is found before the run folder exists."""
    skip = job.config.run.on_bad_image == "skip"  # test images are never skipped
    ids = plan.new.val_ids if skip else (*plan.step.train_ids, *plan.new.val_ids)
    with progress("reading the new images") as report:
        for _ in map_with_threads(lambda id: plan.source.pair(id)[0].shape, ids, report):
            pass


def _begin(job: Job, plan: Plan, views: Views | None) -> None:
    """Copy the steps of the parent to the new run, with the memory that the method needs."""
    if job.processes.any(job.processes.rank == 0 and job.folder.has_model(plan.parent.step)):
        return  # as the first process sees it: others may come later, when it has copied the steps
    entry: dict[str, Any] | None = None
    step_folder = job.folder.step(plan.parent.step)
    if views is not None or job.silenced:
        entry = make_memory(job, plan.parent, views, step_folder)
    if job.processes.rank == 0:
        source = plan.source
        write_chain(job.folder.path, source.classes, source.score_background, source.parts, plan.parent.changes)
        copy_steps(plan.parent, job.folder, entry)
    job.fabric.barrier()


def _extension_file(job: Job, plan: Plan) -> Path:
    return job.folder.step(plan.step.number) / EXTENSION


def _reviewed(
    job: Job, plan: Plan, score: StepScore, before: Forecast | None, limits: Limits, command: Sequence[str]
) -> dict[str, Any]:
    """The comparison with the parent, computed now, or read from the file with a new verdict."""
    file = _extension_file(job, plan)
    if not file.exists():
        return review(job, plan, score, before, limits, command)
    saved = job.folder.read_json(str(file.relative_to(job.folder.path)))
    if not isinstance(saved, dict) or not {"forgetting", "new_iou"} <= saved.keys():
        raise SdrsegError(f"{file}: not written by sdrseg. Remove it, and it will be written again.")
    result: dict[str, Any] = {**saved, "verdict": verdict(saved, limits)}
    if result != saved:
        write_json(file, result)
    return result
