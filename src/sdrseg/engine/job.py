"""Everything that is fixed before the first step of a run: data, scenario, devices, folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from sdrseg.config import Config
from sdrseg.datasets import open_source
from sdrseg.datasets.batches import train_order
from sdrseg.datasets.cache import PixelCache
from sdrseg.datasets.extended import Extended
from sdrseg.datasets.index import ClassIndex, class_index
from sdrseg.datasets.order import Share
from sdrseg.datasets.pool import ImagePool, Purpose
from sdrseg.datasets.sealed import Sealed
from sdrseg.datasets.source import Source, Split
from sdrseg.distributed import Processes
from sdrseg.engine.bases import BaseStore, base_key, base_of
from sdrseg.engine.environment import environment
from sdrseg.engine.folder import RunFolder, read_meta
from sdrseg.engine.launch import Interruption, make_fabric
from sdrseg.engine.trackers import Trackers
from sdrseg.engine.watch import Log, NoLog
from sdrseg.errors import SdrsegError
from sdrseg.files import write_json
from sdrseg.labels import VOID
from sdrseg.methods import Method, find_method, method_values
from sdrseg.methods.own import source_digest
from sdrseg.methods.terms import TERMS
from sdrseg.scenario import Scenario, Spec, Step, build_scenario, declarations
from sdrseg.terminal import TrainingDisplay, progress


@dataclass
class Job:
    """Everything that is fixed before the first step."""

    spec: str
    method: type[Method]
    config: Config
    source: Source
    indexes: dict[Split, ClassIndex]
    scenario: Scenario
    folder: RunFolder
    fabric: Any
    processes: Processes
    bases: BaseStore
    display: Any
    interruption: Interruption
    log: Log | NoLog = field(default_factory=NoLog)
    images: ImagePool = field(default_factory=ImagePool)
    data: Path | None = None
    """The folder of the data set."""
    replays: bool = False
    """Whether training includes old images with labels."""
    removed: frozenset[int] = frozenset()
    """Classes that the user has removed: they count as background."""
    silenced: tuple[int, ...] = ()
    """Channels of the model to extend that must not be predicted any more: removed classes that are added again."""
    earlier_digests: dict[str, str] = field(default_factory=dict)
    """Digests of masks that earlier steps of an extended run used and that may be gone."""
    chosen: tuple[str, ...] = ()
    """The settings that the user set for an extension."""

    @property
    def synchronised(self) -> bool:
        """Whether batch norm sees the images of all processes."""
        return self.processes.world > 1 and self.fabric.device.type == "cuda"

    @property
    def share(self) -> Share:
        return Share(self.processes.rank, self.processes.world)

    @cached_property
    def base(self) -> tuple[type[Method], Config, str]:
        """The method, configuration and key of step 0; found once, because that reads the file of weights."""
        method, config = base_of(self.method, self.config.of_step(0))
        return method, config, base_key(method, config, self.scenario[0], self.indexes["train"], self.protocol)

    def base_is_stored(self) -> bool:
        """Whether the store contains step 0, according to the first process."""
        return self.processes.any(self.processes.rank == 0 and self.bases.has(self.base[2]))

    @property
    def protocol(self) -> str:
        return self.scenario.spec.protocol or "sequential"

    def iterates(self, step: int) -> bool:
        """Whether a step is trained by gradient descent."""
        return step == 0 or self.method(self.config.of_step(step), self.processes).iterates(step)

    def iterations_alike(self, step: Step) -> int:
        """Iterations of a step and of later ones with the same computation. Step 0 differs: it trains batch norm."""
        left = self.scenario.steps[step.number :] if step.number > 0 else [step]
        return sum(len(train_order(s.train_ids, self.config.of_step(s.number), self.share)) for s in left)

    def cache(self, purpose: Purpose, split: Split, ids: Sequence[str]) -> PixelCache | None:
        """The decoded images of a step if they fit in memory, reused while they include all requested images.

        Training that skips bad images decodes them each time: building a cache of them would fail.
        """
        if purpose == "train" and self.config.run.on_bad_image == "skip":
            return None
        return self.images.cache(purpose, self.source, self.indexes[split], ids, self.config, self.fabric.device)

    def watched(self, step: Step) -> tuple[str, ...]:
        """The images that are scored while a step is trained: held-out ones of its own data in an extended run."""
        return step.val_ids if isinstance(self.source, Extended) else step.test_ids

    def removed_channels(self, step: Step) -> tuple[int, ...]:
        return tuple(channel for channel, id in enumerate(step.channels) if id in self.removed)

    def labelled_channels(self, step: Step, id: str) -> frozenset[int] | None:
        """The channels of the classes that the mask of an image labels; None: all of them.

        A class that was removed and added again has a new channel, and old labels are labels of that one.
        """
        classes = self.source.labelled(id)
        return None if classes is None else frozenset(int(step.test_table[c]) for c in classes) - {VOID}

    @property
    def oracle(self) -> bool:
        """Whether scores use labels that are not available to a method without old images."""
        return self.config.oracle and not isinstance(self.source, Extended)

    @property
    def scored_on(self) -> str:
        return EXTENDED_IMAGES if isinstance(self.source, Extended) else scored_on(self.config)


TEST_IMAGES = "the test images"
EXTENDED_IMAGES = "the available old test images and the held-out images of each extension"


def scored_on(config: Config) -> str:
    """The images on which a run is scored, in words."""
    share = config.train.holdout
    if share == 0:
        return TEST_IMAGES
    labels = ", all labels (oracle)" if config.oracle else " of each step with its labels"
    return f"held-out training images ({100 * share:g} %){labels}"


def prepare_job(
    spec: Spec, method_name: str, config: Config, data: Path | None, out: Path, bases: Path | None, display: Any
) -> Job:
    """Read the data, build the scenario and find the devices; nothing is written."""
    method = find_method(method_name)
    source = open_source(spec.source, data, config)
    if config.train.holdout > 0:
        source = Sealed(source)
    indexes = read_masks(source)
    scenario = build_scenario(spec, source, indexes["train"], indexes["val"], **config.scenario_policy())
    job = make_job(method, config, source, indexes, scenario, out, bases, display)
    job.data = data
    return job


def reopen_job(out: Path, config: Config) -> Job:
    """An extended run as its folder describes it, with the data that are available, to score its models again."""
    source = Extended.open_available(out)
    saved = RunFolder(out).read_json("scenario.json")
    scenario = Scenario.from_dict(saved, out / "scenario.json")
    job = make_job(find_method("ft"), config, source, read_masks(source), scenario, out, None, None)
    job.earlier_digests = saved["mask_digests"]
    for step in scenario:
        if job.folder.has_model(step.number):
            job.removed |= removed_classes(step, read_meta(job.folder.step(step.number)))
    return job


def removed_classes(step: Step, meta: Mapping[str, Any]) -> frozenset[int]:
    """The classes of a step that its meta.json marks as removed."""
    return frozenset(id for id, one in zip(step.channels, meta["classes"], strict=True) if one.get("removed"))


def read_masks(source: Source) -> dict[Split, ClassIndex]:
    """The class indexes, if all masks are usable."""
    with progress(f"reading {source.name}") as report:
        indexes: dict[Split, ClassIndex] = {split: class_index(source, split, report) for split in ("train", "val")}
    for index in indexes.values():
        index.require_sound(source)
    return indexes


def make_job(
    method: type[Method],
    config: Config,
    source: Source,
    indexes: dict[Split, ClassIndex],
    scenario: Scenario,
    out: Path,
    bases: Path | None,
    display: Any,
) -> Job:
    """A job from its parts; finds the devices."""
    fabric = make_fabric(config)
    processes = Processes()
    return Job(
        spec=str(scenario.spec),
        method=method,
        config=config,
        source=source,
        indexes=indexes,
        scenario=scenario,
        folder=RunFolder(out),
        fabric=fabric,
        processes=processes,
        bases=BaseStore(bases),
        display=display or TrainingDisplay(len(scenario), processes.rank == 0),
        interruption=Interruption(processes),
    )


def open_run_folder(job: Job, identity: dict[str, Any]) -> None:
    """Lock the run folder and write its metadata. The caller must always close it."""
    existed = job.folder.open(identity, job.config, _facts(job, identity["preset"]))
    if existed and (job.folder.path / "scenario.json").exists():
        _require_same_data(job, job.folder.read_json("scenario.json"))
    facts = environment(device_name(job.fabric.device), job.processes.world, job.data)
    job.folder.note_environment(facts)
    write_json(job.folder.path / "scenario.json", {**job.scenario.to_dict(), "mask_digests": _digests(job)})
    trackers = Trackers(job.config.run.loggers, job.folder.path, identity, job.config.to_dict(), job.oracle)
    job.log = Log(job.folder.path, trackers)
    job.log.write("start", **identity, **{key: facts[key] for key in ("sdrseg", "processes", "device", "commit")})
    for note in job.source.notes:
        job.display.say(note)
    for warning in job.scenario.warnings:
        job.display.say(f"warning: {warning}")


def _facts(job: Job, preset: str) -> dict[str, Any]:
    """What reading the run needs of custom code: the meaning of the terms, settings of its own that affect nothing, the
    values that a custom method sets, and the declarations of the data set. For an extension, also the settings that
    were set."""
    terms = {term.name: term.summary for term in (*TERMS.values(), *job.method.own_terms)}
    own = job.config.own
    nothing = [s.key for s in job.config.settings() if s.key.partition(".")[0] in own and s.affects == "nothing"]
    spec = job.scenario.spec
    values = method_values(job.method.name, preset, spec.task, spec.source) if source_digest(job.method) else {}
    optional = {"affect_nothing": nothing, "method_values": values, "data_set": declarations(spec.source)}
    optional |= {"set": list(job.chosen)}
    return {"terms": terms} | {key: value for key, value in optional.items() if value}


def _digests(job: Job) -> dict[str, str]:
    return job.earlier_digests | job.indexes["train"].digest_by_id | job.indexes["val"].digest_by_id


def _require_same_data(job: Job, saved: dict[str, Any]) -> None:
    """Raise an error if images, masks or classes differ from those that earlier steps were trained on."""
    if (difference := data_difference(job, saved)) is not None:
        options = " and the same options" if isinstance(job.source, Extended) else ""
        raise SdrsegError(f"{difference} Use the original data{options}, or choose another folder with --out.")


def data_difference(job: Job, saved: dict[str, Any]) -> str | None:
    """How images, masks or classes differ from those of finished and started steps, as a sentence."""
    if list(job.scenario.classes) != saved["classes"]:
        return (
            f"{job.folder.path} is a run of data with the classes {', '.join(saved['classes'])}, not "
            f"{', '.join(job.scenario.classes)}."
        )
    digests, saved_digests = _digests(job), saved["mask_digests"]
    for step, saved_step in zip(job.scenario, saved["steps"], strict=True):
        if not (job.folder.has_model(step.number) or job.folder.state_of(step.number)):
            continue
        for ids, saved_ids, use in (
            (step.train_ids, saved_step["train_ids"], "trained on"),
            (step.test_ids, saved_step["test_ids"], "scored on"),
        ):
            now, then = {i: digests[i] for i in ids}, {i: saved_digests[i] for i in saved_ids}
            if changed := sorted(i for i in now.keys() | then.keys() if now.get(i) != then.get(i)):
                what = "is new" if changed[0] not in then else "is gone" if changed[0] not in now else "has changed"
                more = f" (and {len(changed) - 1} more)" if len(changed) > 1 else ""
                return (
                    f"{job.folder.path}: step {step.number} was {use} other images or masks: {changed[0]} {what}{more}."
                )
    return None


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
