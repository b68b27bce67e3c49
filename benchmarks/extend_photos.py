"""The data of extend_voc.py: which photographs of VOC its runs train on, remember and score."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from sdrseg.config import load_config
from sdrseg.datasets import open_source
from sdrseg.datasets.extended import Extended
from sdrseg.datasets.index import class_index
from sdrseg.datasets.pool import ImagePool
from sdrseg.datasets.source import Source
from sdrseg.engine.job import Job, make_job, read_masks
from sdrseg.engine.watch import NoLog
from sdrseg.extend.parent import Parent
from sdrseg.extend.plan import chain_spec
from sdrseg.extend.remember import Views
from sdrseg.labels import VOID
from sdrseg.methods import find_method
from sdrseg.scenario import Scenario, Step, build_scenario, parse_spec
from sdrseg.terminal import TrainingDisplay

SPEC = "voc:15-1@disjoint"
BASE = {"net.encoder": "resnet50", "net.stride_on": "conv1", "net.weights": "none", "eval.transform": "full_image"}
"""The settings of the base that matter here: those of experiments/short.toml."""
OLD_HELD_OUT, NEW_HELD_OUT = 1000, 40
"""Training images that are scored with --held-out: a new class is about as rare among them as in the test images."""


class Photos(Extended):
    """The data of all runs. Train: every training image of the new classes. Val: what is scored in the end, and
    CLASS/ID, a training image in which only that class is labelled, to be scored while a run is trained."""

    def __init__(self, voc: Source, images: dict[str, Sequence[str]], scored: Sequence[str]):
        self.classes, self.parts, self.score_background, self._voc = voc.classes, (), True, voc
        self._ids = {
            "train": tuple(sorted({id for ids in images.values() for id in ids})),
            "val": (*sorted(scored), *(f"{name}/{id}" for name in sorted(images) for id in sorted(images[name]))),
        }

    def image(self, id: str) -> Any:
        return self._voc.image(id.rpartition("/")[2])

    def mask(self, id: str) -> Any:
        mask = self._voc.mask(id.rpartition("/")[2])
        told = self.labelled(id)
        return mask if told is None else np.where((mask == VOID) | np.isin(mask, [*told]), mask, 0).astype(np.uint8)

    def mask_content(self, id: str) -> bytes:
        return id.partition("/")[0].encode() + self._voc.mask_content(id.rpartition("/")[2])

    def labelled(self, id: str) -> frozenset[int] | None:
        name, prefixed, _ = id.partition("/")
        return frozenset({self.classes.index(name)}) if prefixed else None

    def file(self, id: str, kind: Any) -> str:
        return self._voc.file(id.rpartition("/")[2], kind)

    def problems(self) -> list[Any]:
        return []


class Notes(NoLog):
    """What the log of a run would say: its last entry of each kind, and the losses."""

    def __init__(self) -> None:
        self.last: dict[str, dict[str, Any]] = {}
        self.losses: list[dict[str, float]] = []

    def write(self, event: str, **values: Any) -> None:
        self.last[event] = values
        if event == "train":
            self.losses.append({name: float(f"{value:.4g}") for name, value in values["losses"].items()})


@dataclass(frozen=True)
class Study:
    """What all runs share."""

    source: Photos
    indexes: Any
    base: Step  # step 0, scored on the images of this study
    images: dict[str, tuple[str, ...]]  # of each new class, in the order in which they are taken
    views: Views  # images of old classes, for memories
    stand_for: float  # how many images each of them stands for
    pool: ImagePool = field(default_factory=lambda: ImagePool(whole=True))

    def job(self, parent: Parent, method: str, config: Any, steps: tuple[Step, ...], out: Path) -> Job:
        scenario = Scenario(chain_spec(steps, self.source.classes, "overlapped"), self.source.classes, steps, ())
        quiet = TrainingDisplay(0, active=False)
        job = make_job(find_method(method), config, self.source, self.indexes, scenario, out, None, quiet)
        job.images, job.log = self.pool, Notes()
        return job

    def step(self, name: str, count: int) -> Step:
        """The step that adds a class with so many images (0: all), a fifth of them held out."""
        label, ids = self.source.classes.index(name), self.images[name][: count or None]
        held = max(1, len(ids) // 5)
        channels = (*self.base.channels, label)
        test_table = self.base.test_table.copy()
        test_table[label] = len(self.base.channels)
        train_table = np.full(256, VOID, np.uint8)
        train_table[: len(self.source.classes)] = 0
        train_table[label] = len(self.base.channels)
        return Step(
            number=1,
            new=(label,),
            old=self.base.channels,
            future=tuple(c for c in range(len(self.source.classes)) if c not in channels),
            train_ids=tuple(sorted(ids[held:])),
            val_ids=tuple(sorted(f"{name}/{id}" for id in ids[:held])),
            test_ids=self.base.test_ids,
            train_table=train_table,
            val_table=test_table,
            test_table=test_table,
        )


def shuffled(ids: Sequence[str], seed: int) -> list[str]:
    return sorted(ids, key=lambda id: hashlib.sha256(f"{seed} {id}".encode()).digest())


def make_study(given: Any) -> Study:
    """`given`: the options of extend_voc.py."""
    config = load_config("voc", None, BASE)
    voc = open_source("voc", given.voc, config)
    train, val = class_index(voc, "train"), class_index(voc, "val")
    base = build_scenario(parse_spec(SPEC), voc, train, val, **config.scenario_policy())[0]
    old = shuffled(base.train_ids, given.seed)
    images, unused = {}, []
    for name in given.new:
        has = train.present[:, voc.classes.index(name)]
        order = shuffled([id for id, one in zip(train.ids, has, strict=True) if one], given.seed)
        if given.held_out:
            unused += order[:NEW_HELD_OUT]
        images[name] = order
    held = set(unused)
    images = {name: tuple(id for id in order if id not in held) for name, order in images.items()}
    scored = [*old[:OLD_HELD_OUT], *sorted(held)] if given.held_out else list(val.ids)
    scored = sorted(scored)[:: given.every]
    if given.limit:
        scored = scored[:: max(1, len(scored) // given.limit)][: given.limit]
        images = {name: order[: max(given.images)] for name, order in images.items()}
    source = Photos(voc, images, scored)
    seen = old[OLD_HELD_OUT:][: given.memory] if given.memory else old[OLD_HELD_OUT:]
    views = Views(voc, tuple(sorted(seen)), base.train_table, True, "training images")
    base = replace(base, test_ids=tuple(scored))
    stand_for = len(base.train_ids) / len(seen)
    return Study(source, read_masks(source), base, images, views, stand_for)
