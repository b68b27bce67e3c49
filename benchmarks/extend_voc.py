"""How well a class is added with few photographs: classes × images × methods on VOC, one small JSON file for each run.

    python benchmarks/extend_voc.py OUT --voc PATH --softmax BASE --sigmoid BASE [--held-out] [--budget 300]

BASE: exported models of step 0 of voc:15-1@disjoint (`sdrseg base export`), for methods with a softmax and for LAPS.
Each run trains the step that `sdrseg extend` would train: N images in which only the new class is labelled, a fifth of
them held out, with its settings by the size of the data. All runs share one process, so every image is decoded once.

--held-out scores training images instead of test images, and is for choosing settings: 500 training images of the base,
and 100 images of each new class that no run trains on. A run whose file exists in OUT is skipped.

    --variant NAME KEY=VALUE …   one more series of runs with other settings (repeatable); NAME@METHOD,METHOD: of these
    --set KEY=VALUE …            settings of all runs
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sdrseg.config import load_config
from sdrseg.config.read import parse_settings
from sdrseg.data import open_source
from sdrseg.data.extended import Extended
from sdrseg.data.index import class_index
from sdrseg.data.pool import ImagePool
from sdrseg.data.source import Source
from sdrseg.engine.bases import BaseStore
from sdrseg.engine.checkpoint import save_tensors
from sdrseg.engine.evaluate import score_saved
from sdrseg.engine.folder import RunFolder, source_commit
from sdrseg.engine.job import Job, make_job, read_masks
from sdrseg.engine.step import train_step
from sdrseg.engine.watch import NoLog
from sdrseg.extend.parent import Parent, copy_steps
from sdrseg.extend.plan import chain_spec, make_config
from sdrseg.extend.remember import Views, make_memory
from sdrseg.files import write_json
from sdrseg.labels import VOID
from sdrseg.methods import find_method, method_layers
from sdrseg.metrics import iou, mean_of
from sdrseg.scenario import Scenario, Step, build_scenario, parse_spec
from sdrseg.terminal import TrainingDisplay

SPEC = "voc:15-1@disjoint"
BASE = {"net.encoder": "resnet50", "net.stride_on": "conv1", "net.weights": "none", "eval.transform": "full_image"}
"""The settings of the base that matter here: those of experiments/short.toml."""
SIGMOID = ("laps",)
REMEMBERS = ("laps-softmax",)
OLD_HELD_OUT, NEW_HELD_OUT = 500, 100


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
    """What the log of a run would say: its last entry of each kind."""

    def __init__(self) -> None:
        self.last: dict[str, dict[str, Any]] = {}

    def write(self, event: str, **values: Any) -> None:
        self.last[event] = values


@dataclass(frozen=True)
class Study:
    """What all runs share."""

    source: Photos
    indexes: Any
    base: Step  # step 0, scored on the images of this study
    images: dict[str, tuple[str, ...]]  # of each new class, in the order in which they are taken
    views: Views  # images of old classes, for memories
    stand_for: float  # how many images each of them stands for
    pool: ImagePool
    scored_on: str

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


def make_study(given: argparse.Namespace) -> Study:
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
    what = "held-out training images" if given.held_out else "test images"
    source = Photos(voc, images, scored)
    seen = old[OLD_HELD_OUT:][: given.memory] if given.memory else old[OLD_HELD_OUT:]
    views = Views(voc, tuple(sorted(seen)), base.train_table, True, "training images")
    base = replace(base, test_ids=tuple(scored))
    stand_for = len(base.train_ids) / len(seen)
    return Study(source, read_masks(source), base, images, views, stand_for, ImagePool(whole=True), what)


def make_parent(study: Study, folder: Path, exported: Path, decision: str) -> Parent:
    """A run that ends with the exported base."""
    store = BaseStore(folder / "store")
    model, memory = store.load(store.import_from(exported))
    names = [study.source.classes[c] for c in study.base.channels]
    config = load_config("voc", None, BASE, method_layers("ft", "default", None, "voc"))
    classes = [{"channel": c, "id": c, "name": name, "step": 0} for c, name in enumerate(names)]
    run = RunFolder(folder / decision)
    meta = {"step": 0, "classes": classes, "decision": decision, "net": config.to_dict()["net"], "parent": None}
    run.save_step(0, model, memory, meta)
    scenario = Scenario(parse_spec(SPEC), study.source.classes, (study.base,), ())
    return Parent(run, 0, run.read_json("steps/0/meta.json"), config, scenario, {}, (), (), True, ())


def remembering(study: Study, parent: Parent, settings: dict[str, Any], folder: Path) -> Parent:
    """The same with a memory of its classes, for laps-softmax. Fewer images count as if they were all."""
    config = make_config(parent, "laps-softmax", 8, True, None, settings)
    config = config.changed({"train.batch_size": min(16, len(study.views.ids))})
    job = study.job(parent, "laps-softmax", config, (study.base, study.step(next(iter(study.images)), 10)), folder)
    run = RunFolder(folder)
    entry = make_memory(job, parent, study.views, run.step(0))
    copy_steps(parent, run, entry)
    memory = run.load_memory(0)
    for name in [name for name in memory if name.endswith(".points")]:
        memory[name] = memory[name] * study.stand_for
    meta = run.read_json("steps/0/meta.json")
    meta["files"]["memory"]["sha256"] = save_tensors(run.step(0) / "memory.safetensors", memory)
    write_json(run.step(0) / "meta.json", meta)
    return replace(parent, folder=run, meta=meta)


def measured(confusion: Any, names: Sequence[str]) -> dict[str, Any]:
    found = iou(confusion)
    return {
        "iou": {n: None if np.isnan(v) else float(100 * v) for n, v in zip(names, found, strict=True)},
        "old": 100 * (mean_of(found, range(1, 16)) or 0.0),
        "confusion": confusion.tolist(),
    }


def one(
    study: Study,
    parent: Parent,
    before: dict[str, Any],
    run: dict[str, Any],
    settings: dict[str, Any],
    iterations: int,
    folder: Path,
) -> dict[str, Any]:
    """Train and score one extension."""
    start = time.monotonic()
    step = study.step(run["class"], run["images"])
    config = make_config(parent, run["method"], len(step.train_ids), True, None, settings)
    if iterations:
        epochs = max(1, round(iterations / (len(step.train_ids) // config.train.batch_size)))
        config = config.changed({"train.epochs": epochs, "train.best_every": max(1, epochs // 10)})
    with tempfile.TemporaryDirectory(dir=folder) as place:
        job = study.job(parent, run["method"], config, (study.base, step), Path(place))
        copy_steps(parent, job.folder, None)
        train_step(job, step, None)
        trained = time.monotonic()
        score = score_saved(job, step)
        said = job.log.last  # type: ignore[union-attr]
    found = measured(score.confusion, score.names)
    lost = [before["iou"][n] - found["iou"][n] for n in score.names[1:16] if before["iou"][n] is not None]
    used = config.of_step(1)
    return {
        **run,
        "trained_on": len(step.train_ids),
        "new_iou": found["iou"][run["class"]],
        "lost": float(np.mean(lost)) if lost else None,
        "old_before": before["old"],
        **found,
        "iterations": said.get("train", {}).get("iteration"),
        "best": said.get("best"),
        "passes": said.get("passes", {}).get("how"),
        "seconds": trained - start,
        "seconds_of_scoring": time.monotonic() - trained,
        "epochs": used.train.epochs,
        "batch": used.train.batch_size,
        "lr": used.optim.lr,
        "decoder_lr_factor": used.optim.decoder_lr_factor,
    }


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("out", type=Path)
    words.add_argument("--voc", type=Path, required=True)
    words.add_argument("--softmax", type=Path, help="folder of a base trained with a softmax")
    words.add_argument("--sigmoid", type=Path, help="folder of a base of LAPS")
    words.add_argument("--new", nargs="+", default=["sheep", "train"])
    words.add_argument("--images", type=int, nargs="+", default=[50, 10, 25, 100, 0], help="0: all")
    words.add_argument("--methods", nargs="+", default=["laps-softmax", "laps", "sdr", "mib", "ft"])
    words.add_argument("--held-out", action="store_true")
    words.add_argument("--budget", type=float, default=1e9, help="seconds after which no run is begun")
    words.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE")
    words.add_argument("--variant", nargs="+", action="append", metavar="NAME KEY=VALUE")
    words.add_argument("--iterations", type=int, default=0, help="about so many in each run; 0: as sdrseg extend does")
    words.add_argument("--memory", type=int, default=0, help="images that laps-softmax remembers; 0: all of step 0")
    words.add_argument("--every", type=int, default=1, help="score every n-th image")
    words.add_argument("--limit", type=int, default=0, help="score so many images; for trying the script")
    words.add_argument("--seed", type=int, default=0)
    given = words.parse_args()
    begin, longest = time.monotonic(), 0.0
    common = {"run.loggers": [], "train.seed": given.seed, **parse_settings(given.set)}
    variants = {name: parse_settings(values) for name, *values in given.variant or [["default"]]}
    bases = {"softmax": given.softmax, "sigmoid": given.sigmoid}
    study = make_study(given)
    given.out.mkdir(parents=True, exist_ok=True)
    mode = "held-out" if given.held_out else "test"
    print(f"data read after {time.monotonic() - begin:.1f} s", flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        folder, parents, before = Path(scratch), {}, {}
        for decision, exported in bases.items():
            if exported is None:
                continue
            parents[decision] = parent = make_parent(study, folder, exported, decision)
            job = study.job(parent, "ft", parent.config, (study.base, study.step(given.new[0], 10)), parent.folder.path)
            score = score_saved(job, study.base)
            before[decision] = measured(score.confusion, score.names)
            write_json(given.out / f"{mode}-base-{decision}.json", before[decision])
            print(f"{decision}: old {before[decision]['old']:.1f}, {time.monotonic() - begin:.1f} s", flush=True)
        used = {m for v in variants for m in (v.partition("@")[2].split(",") if "@" in v else given.methods)}
        if "softmax" in parents and set(REMEMBERS) & used:
            parents["remembering"] = remembering(study, parents["softmax"], common, folder / "remembering")
            print(f"remembered after {time.monotonic() - begin:.1f} s", flush=True)
        for label, settings in variants.items():
            variant, _, only = label.partition("@")
            for count in given.images:
                for name in given.new:
                    for method in only.split(",") if only else given.methods:
                        kind = "sigmoid" if method in SIGMOID else "softmax"
                        run = {"variant": variant, "class": name, "images": count, "method": method, "scored": mode}
                        file = given.out / f"{mode}-{variant}-{name}-{count}-{method}.json"
                        if file.exists() or kind not in parents:
                            continue
                        if time.monotonic() - begin + longest > given.budget:
                            print("out of time")
                            return
                        at = time.monotonic()
                        mine = parents["remembering"] if method in REMEMBERS else parents[kind]
                        found = one(study, mine, before[kind], run, {**common, **settings}, given.iterations, folder)
                        where = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
                        facts = {"settings": settings, "device": where, "torch": torch.__version__}
                        write_json(file, {**found, **facts, "commit": source_commit()})
                        gc.collect()
                        longest = max(longest, time.monotonic() - at)
                        print(
                            f"{variant} {name} {count} {method}: new {found['new_iou'] or 0:.1f}, "
                            f"lost {found['lost']:.2f}, {found['iterations']} iterations, {found['seconds']:.1f} + "
                            f"{found['seconds_of_scoring']:.1f} s ({time.monotonic() - begin:.0f} s)",
                            flush=True,
                        )


if __name__ == "__main__":
    main()
