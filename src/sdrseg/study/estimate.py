"""Estimates the work of an experiment and its time."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from sdrseg.datasets import open_source
from sdrseg.datasets.index import ClassIndex, class_index
from sdrseg.engine.bases import BaseStore, base_key, base_of
from sdrseg.errors import SdrsegError
from sdrseg.methods import find_method
from sdrseg.scenario import Scenario, build_scenario
from sdrseg.scenario.registry import find_source
from sdrseg.study.cell import Cell
from sdrseg.study.grid import Experiment

REFERENCE = {"resnet50": 375.0, "resnet101": 300.0, "toy16": 100.0}
"""Training images per second with SDR, crops of 512 and batches of 8, on one H200 (results/speed); toy16: roughly, for
crops of 64 on two cores. Used only until a study has its own results."""
SCORED = 400.0
"""Test images per second on one H200."""


@dataclass(frozen=True)
class Work:
    """The work of an experiment by step: training images, counted in every epoch; iterations; test images.

    A step that is not trained by gradient descent has no iteration and as many passes over its images as it surveys.
    """

    images: tuple[int, ...]
    iterations: tuple[int, ...]
    scored: tuple[int, ...]

    def without_base(self) -> Work:
        """The work if another experiment trains the model of step 0."""
        return Work((0, *self.images[1:]), (0, *self.iterations[1:]), self.scored)

    def to_dict(self) -> dict[str, Any]:
        return {
            "steps": len(self.images),
            "images": sum(self.images),
            "iterations": sum(self.iterations),
            "scored": sum(self.scored),
        }


def work_of(experiment: Experiment, data: Path | None) -> Work | None:
    """The work of an experiment, from the data if available, otherwise from known sizes; None if unknown."""
    sizes = _sizes(experiment, data)
    if sizes is None:
        return None
    train, test = sizes
    by_step = [_training(experiment, number, count) for number, count in enumerate(train)]
    images, iterations = zip(*by_step, strict=True)
    return Work(images, iterations, tuple(test))


def _training(experiment: Experiment, step: int, images: int) -> tuple[int, int]:
    """The training images, counted in every epoch, and the iterations of a step with this many images."""
    config = experiment.config.of_step(step)
    method = find_method(experiment.method)(config)
    if step > 0 and not method.iterates(step):
        return images * method.survey_views(step), 0
    iterations = images // config.train.batch_size * config.train.epochs
    return iterations * config.train.batch_size, iterations


def _sizes(experiment: Experiment, data: Path | None) -> tuple[Sequence[int], Sequence[int]] | None:
    spec, config = experiment.spec, experiment.config
    if (found := _scenario(experiment, data)) is not None:
        return [len(step.train_ids) for step in found[0]], [len(step.test_ids) for step in found[0]]
    protocol = "disjoint" if spec.protocol == "sequential" else spec.protocol  # the same images
    key = f"{spec.task}" if spec.task in ("offline", "random-5") else f"{spec.task}@{protocol}"
    known = None if spec.seed is not None else known_sizes().get(spec.source, {}).get(key)
    if known is None:
        return None
    kept = 1 - config.train.holdout
    return [round(kept * count) for count in known["train"]], known["test"]


@cache
def known_sizes() -> dict[str, dict[str, dict[str, list[int]]]]:
    """Training and test images of each step of the published scenarios."""
    text = resources.files("sdrseg").joinpath("resources/step_images.json").read_text()
    sizes: dict[str, dict[str, dict[str, list[int]]]] = json.loads(text)
    return sizes


_KNOWN: dict[Any, tuple[Scenario, ClassIndex]] = {}


def _scenario(experiment: Experiment, data: Path | None) -> tuple[Scenario, ClassIndex] | None:
    """The scenario and the index of the training images, if the data are available; read once."""
    spec, config = experiment.spec, experiment.config
    if data is None and find_source(spec.source).needs_folder:
        return None
    policy = config.scenario_policy()
    key = (spec, tuple(policy.items()), config.shapes, data)
    if key not in _KNOWN:
        source = open_source(spec.source, data, config)
        train, val = class_index(source, "train"), class_index(source, "val")
        _KNOWN[key] = build_scenario(spec, source, train, val, **policy), train
    return _KNOWN[key]


def _is_stored(experiment: Experiment, data: Path | None, bases: BaseStore) -> bool:
    """Whether the store contains the model of step 0; False if the data are not available."""
    if (found := _scenario(experiment, data)) is None:
        return False
    (scenario, train), protocol = found, experiment.spec.protocol or "sequential"
    method, config = base_of(find_method(experiment.method), experiment.config.of_step(0))
    return bases.has(base_key(method, config, scenario[0], train, protocol))


def _base(experiment: Experiment) -> str:
    """A key for models of step 0, without reading the data."""
    spec, (method, config) = experiment.spec, base_of(find_method(experiment.method), experiment.config.of_step(0))
    first = str(spec.task).partition("-")[0] if re.fullmatch(r"\d+-\d+", str(spec.task)) else spec.task
    protocol = "disjoint" if spec.protocol == "sequential" else spec.protocol
    matters = {s.key: s.plain for s in config.settings() if s.affects not in ("later", "score", "nothing")}
    return json.dumps([spec.source, first, spec.seed, protocol, method.name, matters])


def by_base(experiments: Sequence[Experiment]) -> list[Experiment]:
    """The same experiments, but those that share a model of step 0 one after the other: a queue that is stopped early
    has then trained no more of these models than it used."""
    groups: dict[str, list[Experiment]] = {}
    for experiment in experiments:
        groups.setdefault(_base(experiment), []).append(experiment)
    return [experiment for group in groups.values() for experiment in group]


def seconds_of(experiment: Experiment, work: Work, finished: Sequence[Cell] = ()) -> tuple[float, str]:
    """The estimated time, and for which machine: at the speed of finished cells with this network, otherwise at the
    reference speed."""
    net, crop = experiment.config.net, experiment.config.data.crop
    like = [
        cell
        for cell in finished
        if (cell["encoder"], cell["decoder"], cell["crop"]) == (net.encoder, net.decoder, crop)
        and cell["images_per_second"]
    ]
    if like:
        pace = statistics.median(cell["images_per_second"] for cell in like)
        machine = " or ".join(sorted({str(cell["device"]) for cell in like}))
    else:
        small = net.encoder == "toy16"
        pace = REFERENCE.get(net.encoder, REFERENCE["resnet101"]) * ((64 if small else 512) / crop) ** 2
        machine = "two CPU cores" if small else "one NVIDIA H200"
    return sum(work.images) / pace + sum(work.scored) / SCORED, machine


def plan(
    experiments: Sequence[Experiment], data: Path | None, finished: Sequence[Cell] = (), bases: Path | None = None
) -> list[dict[str, Any]]:
    """What `--dry-run` shows: each experiment with its work, its time and whether it is finished. `bases`: the store of
    models of step 0, if not the usual one."""
    done = {cell["config"] for cell in finished}
    rows = []
    known, store = set[str](), BaseStore(bases)
    for experiment in experiments:
        work, problem = None, None
        try:
            work = work_of(experiment, data)
        except SdrsegError as error:
            problem = str(error)
        if work is not None and experiment.hash not in done:
            if (base := _base(experiment)) in known or _is_stored(experiment, data, store):
                work = work.without_base()
            known.add(base)
        row: dict[str, Any] = {"name": experiment.folder, "label": experiment.label}
        row |= {"spec": str(experiment.spec), "method": experiment.method, "preset": experiment.preset}
        row |= {"seed": experiment.config.train.seed, "settings": dict(experiment.settings)}
        row |= work.to_dict() if work else dict.fromkeys(("steps", "images", "iterations", "scored"))
        seconds, row["machine"] = seconds_of(experiment, work, finished) if work else (None, None)
        row["seconds"] = None if seconds is None else round(seconds, 1)
        row |= {"problem": problem, "done": experiment.hash in done}
        rows.append(row)
    return rows
