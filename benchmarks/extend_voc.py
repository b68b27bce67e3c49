"""How well a class is added with few photographs: classes × images × methods on VOC, one small JSON file for each run.

    python benchmarks/extend_voc.py OUT --voc PATH --softmax BASE --sigmoid BASE [--held-out] [--budget 300]

BASE: exported models of step 0 of voc:15-1@disjoint (`sdrseg base export`), for methods with a softmax and for LAPS.
Each run trains the step that `sdrseg extend` would train: N images in which only the new class is labelled, a fifth of
them held out, with its settings by the size of the data. All runs share one process, so every image is decoded once.

--held-out scores training images instead of test images, and is for choosing settings: 1,000 training images of the
base, and 40 images of each new class that no run trains on. A run whose file exists in OUT is skipped.

    --variant NAME KEY=VALUE …   one more series of runs with other settings (repeatable); NAME@METHOD,METHOD: of these
    --set KEY=VALUE …            settings of all runs
"""

from __future__ import annotations

import argparse
import gc
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch

from extend_photos import BASE, SPEC, Study, make_study
from sdrseg.config import load_config
from sdrseg.config.read import parse_settings
from sdrseg.datasets.batches import eval_batches
from sdrseg.engine.bases import BaseStore
from sdrseg.engine.checkpoint import save_tensors
from sdrseg.engine.environment import source_commit
from sdrseg.engine.evaluate import confusion, score_saved
from sdrseg.engine.folder import RunFolder
from sdrseg.engine.saved import open_step
from sdrseg.engine.step import train_step
from sdrseg.extend.parent import Parent, copy_steps
from sdrseg.extend.plan import make_config
from sdrseg.extend.remember import make_memory
from sdrseg.files import write_json
from sdrseg.methods import method_layers
from sdrseg.metrics import iou, mean_of
from sdrseg.scenario import Scenario, parse_spec

REMEMBERS = {"laps": "sigmoid", "laps-softmax": "softmax"}
"""The methods whose parent has a memory, and the model that it starts from."""


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
    write_json(run.path / "config.json", {"config": config.to_dict()})
    scenario = Scenario(parse_spec(SPEC), study.source.classes, (study.base,), ())
    return Parent(run, 0, run.read_json("steps/0/meta.json"), config, scenario, {}, (), (), True, ())


def remembering(study: Study, parent: Parent, method: str, settings: dict[str, Any], folder: Path) -> Parent:
    """The same with a memory of its classes, for LAPS. Fewer images count as if they were all."""
    config = make_config(parent, method, 8, True, None, settings)
    config = config.changed({"train.batch_size": min(16, len(study.views.ids))})
    job = study.job(parent, method, config, (study.base, study.step(next(iter(study.images)), 10)), folder)
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


def measured(matrix: Any, names: Sequence[str]) -> dict[str, Any]:
    found = iou(matrix)
    return {
        "iou": {n: None if np.isnan(v) else float(100 * v) for n, v in zip(names, found, strict=True)},
        "confusion": matrix.tolist(),
    }


def score_before(study: Study, parent: Parent, name: str) -> dict[str, Any]:
    """The scores of the base on the same images and labels as those of a run that adds a class."""
    step = study.step(name, 10)
    job = study.job(parent, "ft", parent.config, (study.base, step), parent.folder.path)
    network, decision = open_step(parent.folder.step(0), parent.config.net)
    network.place_on(job.fabric.device)
    sizes, cache = job.indexes["val"].size_by_id, job.cache("score", "val", step.test_ids)
    batches = eval_batches(study.source, step.test_ids, sizes, step.test_table, parent.config, cache=cache)
    matrix = confusion(job.fabric, network, batches, len(step.channels), decision)
    return measured(matrix, [study.source.classes[c] for c in step.channels])


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
    matrices = [np.array(scored["confusion"]) for scored in (before, found)]
    lost = mean_of(iou(matrices[0]) - iou(matrices[1]), range(1, 16))
    for matrix in matrices:
        matrix[-1] = 0  # without the pixels of the new class
    elsewhere = mean_of(iou(matrices[0]) - iou(matrices[1]), range(1, 16))
    used = config.of_step(1)
    return {
        **run,
        "given": len(step.train_ids) + len(step.val_ids),
        "trained_on": len(step.train_ids),
        "new_iou": found["iou"][run["class"]],
        "lost": None if lost is None else 100 * lost,
        "lost_elsewhere": None if elsewhere is None else 100 * elsewhere,
        "scored_images": len(step.test_ids),
        **found,
        "iterations": said.get("train", {}).get("iteration"),
        "best": said.get("best"),
        "losses": job.log.losses,  # type: ignore[union-attr]
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
    words.add_argument("--memory", type=int, default=0, help="images that LAPS remembers; 0: all of step 0")
    words.add_argument("--every", type=int, default=1, help="score every n-th image")
    words.add_argument("--limit", type=int, default=0, help="score so many images; for trying the script")
    words.add_argument("--seed", type=int, default=0)
    given = words.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        carry_out(given, Path(scratch))


def carry_out(given: argparse.Namespace, folder: Path) -> None:
    """All runs that are not done yet, within the budget."""
    begin, longest = time.monotonic(), 0.0
    common = {"run.loggers": [], "train.seed": given.seed, **parse_settings(given.set)}
    variants = {name: parse_settings(values) for name, *values in given.variant or [["default"]]}
    methods = {v: v.partition("@")[2].split(",") if "@" in v else given.methods for v in variants}
    mode = "held-out" if given.held_out else "test"
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    where = {"device": device, "torch": torch.__version__, "commit": source_commit()}
    study = make_study(given)
    parents, before = {}, {}
    for decision, exported in (("softmax", given.softmax), ("sigmoid", given.sigmoid)):
        if exported is not None:
            parents[decision] = parent = make_parent(study, folder, exported, decision)
            for name in given.new:
                before[decision, name] = found = score_before(study, parent, name)
                write_json(given.out / f"{mode}-base-{decision}-{name}.json", {**found, **where})
    for method, decision in REMEMBERS.items():
        if decision in parents and any(method in some for some in methods.values()):
            parents[method] = remembering(study, parents[decision], method, common, folder / method)
    print(f"ready after {time.monotonic() - begin:.0f} s", flush=True)
    for variant, count, name in product(variants, given.images, given.new):
        for method in methods[variant]:
            label, kind = variant.partition("@")[0], REMEMBERS.get(method, "softmax")
            file = given.out / f"{mode}-{label}-{name}-{count}-{method}.json"
            if file.exists() or kind not in parents:
                continue
            if time.monotonic() - begin + longest > given.budget:
                print("out of time")
                return
            start = time.monotonic()
            run = {"variant": label, "class": name, "images": count, "method": method, "scored": mode}
            parent, settings = parents.get(method, parents[kind]), variants[variant]
            found = one(study, parent, before[kind, name], run, {**common, **settings}, given.iterations, folder)
            write_json(file, {**found, "settings": {**parse_settings(given.set), **settings}, **where})
            gc.collect()
            longest = max(longest, time.monotonic() - start)
            print(
                f"{label} {name} {count} {method}: new {found['new_iou'] or 0:.1f}, lost {found['lost'] or 0:.2f}, "
                f"{found['iterations']} iterations, {found['seconds']:.1f} + {found['seconds_of_scoring']:.1f} s "
                f"({time.monotonic() - begin:.0f} s)",
                flush=True,
            )


if __name__ == "__main__":
    main()
