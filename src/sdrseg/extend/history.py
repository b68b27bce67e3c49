"""The history of a model, rollback to an earlier step, and renaming or removing classes, each as a new run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import mean
from typing import Any

from sdrseg.datasets.extended import CHAIN, Extended, Part, read_chain, write_chain
from sdrseg.datasets.index import class_index
from sdrseg.engine.folder import ENVIRONMENT, FORMAT, RunFolder
from sdrseg.engine.job import TEST_IMAGES
from sdrseg.engine.saved import MADE_BY, find_step, made_by
from sdrseg.errors import SdrsegError, UsageError, nearest
from sdrseg.extend.parent import IMPORTED, STEP_FILES, Parent, read_parent
from sdrseg.extend.plan import chain_spec
from sdrseg.extend.removed import removed_name
from sdrseg.extend.review import EXTENSION, without_classes
from sdrseg.extend.verdict import Limits, verdict
from sdrseg.files import link_or_copy, require_writable, write_json
from sdrseg.metrics import StepScore, as_background, summary
from sdrseg.scenario import parse_spec


def history(run: Path) -> dict[str, Any]:
    """Every finished step of a run: date, method, data, new classes, and mean IoU of these and of earlier classes."""
    last, top = find_step(run, None)
    if top is None:
        raise UsageError(f"{run}: a step without its run has no history. Name the folder of the run.")
    folder = RunFolder(top)
    chain = read_chain(top) if (top / CHAIN).exists() else None
    parts = [] if chain is None else chain["parts"]
    steps = []
    for number in range(int(last.name) + 1):
        meta = folder.read_json(f"steps/{number}/meta.json")
        steps.append(
            {
                "step": number,
                "made": meta.get("made"),
                "method": meta["method"],
                "data": "–" if meta["method"] == IMPORTED else _data(folder, parts, number, meta["spec"]),
                "classes": [c["name"] for c in meta["classes"] if c["step"] == number and c["channel"] > 0],
                "model": meta["files"]["model"]["sha256"],
                "parent": meta["parent"],
                **_scores(folder, number, sum(c["step"] < number for c in meta["classes"])),
            }
        )
    broken = [s["step"] for s, before in zip(steps[1:], steps, strict=False) if s["parent"] != before["model"]]
    return {
        "run": str(top),
        "steps": steps,
        "changes": [] if chain is None else list(chain["changes"]),
        "broken": broken,
    }


def _data(folder: RunFolder, parts: Sequence[Part], step: int, spec: str) -> str:
    """The folder of a step's data, or the name of data without one. `parts`: those of an extended run."""
    if before := [part for part in parts if part.step <= step]:
        part = max(before, key=lambda part: part.step)  # the first of a step: the others are held-out or old images
        return part.data or part.source
    starts = folder.read_environments()
    return str((starts[-1].get("data") if starts else None) or parse_spec(spec).source)


def _scores(folder: RunFolder, step: int, earlier: int) -> dict[str, Any]:
    """The means after a step, where the first `earlier` channels are old, and over how many classes they are."""
    if not folder.has_metrics(step):
        return {"new_miou": None, "old_miou": None, "measured": None}
    score = replace(StepScore.from_dict(folder.read_json(f"steps/{step}/metrics.json")), base=earlier)
    return {"new_miou": score.miou()["new"], "old_miou": score.miou()["old"], "measured": score.measured()["all"]}


def rollback(run: Path, step: int, out: Path) -> Path:
    """Copy a run up to an earlier step, to extend the model from there; the old run stays as it is."""
    parent = read_parent(run, step)
    _copy_run(parent, out, {}, frozenset(), f"back to step {step} of {parent.folder.path.resolve()}")
    return out


def change_classes(run: Path, out: Path, rename: Mapping[str, str], remove: Sequence[str]) -> Path:
    """Copy a run with renamed classes; removed classes are predicted as background.

    `remove`: names, or several of them with commas in between.
    """
    parent = read_parent(run)
    if not rename and not remove:
        raise UsageError("nothing to change: add --rename OLD=NEW or --remove NAME.")
    gone = {c["name"] for c in parent.meta["classes"] if c.get("removed")}
    names = [name for name in parent.classes if name not in gone]
    each = [[text] if text in names else [name.strip() for name in text.split(",")] for text in remove]
    remove = list(dict.fromkeys(name for some in each for name in some))
    for name in (*rename, *remove):
        if name == names[0]:
            raise UsageError(f"{name}: the class of all other pixels cannot be renamed or removed.")
        if name not in names[1:]:
            raise UsageError(f"{parent.folder.path}: there is no class {name!r}{nearest(name, names[1:])}")
    if twice := set(rename) & set(remove):
        raise UsageError(f"{twice.pop()} is both renamed and removed. Choose one.")
    if nameless := [old for old, new in rename.items() if not new.strip()]:
        raise UsageError(f"--rename {nameless[0]}={rename[nameless[0]]}: a class needs a name.")
    after = [rename.get(name, name) for name in parent.scenario.classes]
    if len(set(after)) < len(after):
        raise UsageError(f"--rename: two classes would have the same name: {', '.join(after)}.")
    description = [f"{old} renamed to {new}" for old, new in rename.items()] + [f"{name} removed" for name in remove]
    _copy_run(parent, out, dict(rename), frozenset(remove), ", ".join(description))
    return out


def _copy_run(parent: Parent, out: Path, rename: dict[str, str], remove: frozenset[str], description: str) -> None:
    """Copy the steps of a run up to one of them, and add a line to the history. config.json is written last."""
    parent.require_outside(out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise SdrsegError(f"{out} already exists. Choose a new folder with --out.")
    require_writable(out, "Choose another folder with --out.", folder=True)
    new, folder = RunFolder(out), parent.folder
    named = rename | {name: removed_name(name, parent.scenario.classes) for name in remove}
    classes = tuple(named.get(name, name) for name in parent.scenario.classes)
    scores = []
    for number in range(parent.step + 1):
        source, target = folder.step(number), new.step(number)
        target.mkdir(parents=True, exist_ok=True)
        for name in (*STEP_FILES[:2], *([MADE_BY] if (source / MADE_BY).exists() else [])):
            link_or_copy(source / name, target / name)
        meta = folder.read_json(f"steps/{number}/meta.json")
        if folder.has_metrics(number):
            scored = folder.read_json(f"steps/{number}/metrics.json")
            score = _rescored(StepScore.from_dict(scored), named, remove, parent.score_background)
            scores.append((score, scored.get("scored_on", TEST_IMAGES)))
            write_json(target / "metrics.json", {**scored, **score.to_dict()})
            if (source / EXTENSION).exists():
                extension = folder.read_json(f"steps/{number}/{EXTENSION}")
                renamed = _renamed(extension, score, meta["classes"], named, remove, parent.score_background)
                write_json(target / EXTENSION, renamed)
        if parse_spec(meta["spec"]).source == Extended.name:
            meta["spec"] = str(chain_spec(parent.scenario.steps[: number + 1], classes, meta["protocol"]))
        for one in meta["classes"]:
            one |= {"id": 0, "removed": True} if one["name"] in remove else {}  # predictions contain ids, not channels
            one["name"] = named.get(one["name"], one["name"])
        write_json(target / "meta.json", meta)
    if len(scores) == parent.step + 1:
        write_json(out / "summary.json", {**summary([s for s, _ in scores]), "scored_on": scores[-1][1]})
    saved = made_by(folder.step(parent.step), folder.path)
    parts = parent.parts
    spec = chain_spec(parent.scenario.steps, classes, parent.scenario.spec.protocol or "sequential")
    scenario = replace(parent.scenario, spec=spec, classes=classes)
    digests = parent.digests | class_index(Extended(classes, parts), "val").digest_by_id
    write_json(out / "scenario.json", {**scenario.to_dict(), "mask_digests": digests})
    change = {"date": datetime.now(UTC).isoformat(timespec="seconds"), "what": description}
    recorded = read_chain(folder.path)["parts"] if (folder.path / CHAIN).exists() else []
    known = {part.prefix for part in recorded if part.available}  # a folder that is missing now may come back
    parts = tuple(replace(part, available=part.available or part.prefix in known) for part in parts)
    write_chain(out, classes, parent.score_background, parts, [*parent.changes, change])
    if (folder.path / ENVIRONMENT).exists() and not (new.step(parent.step) / MADE_BY).exists():  # of that run's steps
        link_or_copy(folder.path / ENVIRONMENT, out / ENVIRONMENT)
    write_json(out / "config.json", {**saved, "spec": str(spec), "format": FORMAT})


def _rescored(score: StepScore, named: Mapping[str, str], remove: frozenset[str], background: bool) -> StepScore:
    """The score with the new names; removed classes count as background. `background`: whether that is scored."""
    removed = {c for c, name in enumerate(score.names) if name in remove} | {*score.removed}
    names = tuple(named.get(name, name) for name in score.names)
    matrix = as_background(score.confusion, sorted(removed), background)
    complete = None if score.complete is None else as_background(score.complete, sorted(removed), background)
    return replace(score, names=names, confusion=matrix, removed=tuple(sorted(removed)), complete=complete)


def _renamed(
    extension: dict[str, Any],
    score: StepScore,
    classes: Sequence[Mapping[str, Any]],
    named: Mapping[str, str],
    remove: frozenset[str],
    background: bool,
) -> dict[str, Any]:
    """extension.json with the new names, and as if removed classes had been background. `score`: that of the step
    without them; `classes`: those of the step, by channel; `background`: whether it is scored. The command contains the
    old names, so it is left out."""
    if not named:
        return extension

    def rename(name: str) -> str:
        return named.get(name, name)

    forecast = extension["forecast"]
    if forecast is not None:
        pairs = forecast["similar"].items()
        similar = {
            rename(n): {rename(o): share for o, share in old.items() if o not in remove}
            for n, old in pairs
            if n not in remove
        }
        images = {rename(n): count for n, count in forecast["images"].items() if n not in remove}
        forecast = {**forecast, "images": images, "similar": similar}
    rows = {key: [{**one, "name": rename(one["name"])} for one in extension[key]] for key in ("old", "new")}
    result = {**extension, **rows, "forecast": forecast, "command": []}
    if remove & {one["name"] for one in classes}:
        n_old = sum(one["step"] < extension["step"] for one in classes)
        result = without_classes(result, score, n_old, background)
    lost = [one["lost"] for one in result["old"][1:] if one["lost"] is not None]
    reached = [one["iou"] for one in result["new"] if one["iou"] is not None]
    result |= {"forgetting": mean(lost) if lost else None, "new_iou": mean(reached) if reached else None}
    limits = Limits(*(extension["verdict"][key] for key in ("max_forgetting", "min_new_iou")))
    return {**result, "verdict": verdict(result, limits)}
