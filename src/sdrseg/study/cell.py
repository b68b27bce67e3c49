"""A cell: one finished run as one small JSON file with fixed keys. Tables, figures and docs/results.md come from cells.

A cell needs no model: config.json, scenario.json, summary.json, steps/*/metrics.json and log.jsonl of a run are enough.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any, get_args, get_type_hints

from sdrseg.config import Config, saved_config
from sdrseg.config.sections import Eval
from sdrseg.engine.folder import RunFolder, second_score
from sdrseg.engine.saved import usual_values
from sdrseg.errors import SdrsegError, UsageError
from sdrseg.files import write_json
from sdrseg.metrics import StepScore, mean_of, without_nan
from sdrseg.scenario import Spec, class_lists, parse_spec

Cell = dict[str, Any]

IDENTITY = ("dataset", "scenario", "protocol", "method", "preset", "seed")
SETUP = ("encoder", "decoder", "crop", "batch", "epochs", "eval", "augment", "lr", "bn", "weights")
SCORES = ("old", "new", "all", "all_full_image", "pixel_accuracy", "all_no_background")
DETAILS = ("also", "per_class", "per_step", "forgetting", "step_averaged", "scored_on", "scored_images")
ORIGIN = ("base", "seconds", "images_per_second", "device", "version", "commit", "settings", "setup", "config")
LOWERED = "lowered_rate"
"""In the settings of a cell: the steps that diverged, and the factor of their learning rate."""
KEYS = (*IDENTITY, *SETUP, *SCORES, *DETAILS, *ORIGIN)


def cell_of(run: Path) -> Cell:
    """The cell of a finished run. Scores are per cent, background included unless a key says otherwise."""
    folder = RunFolder(run)
    saved = folder.read_json("config.json")
    if not (run / "summary.json").exists():
        raise SdrsegError(f"{run}: not finished yet. Run its command again to finish it first.")
    config = saved_config(saved["config"], str(run / "config.json"), saved.get("affect_nothing", ()))
    spec, done = parse_spec(saved["spec"]), folder.read_json("summary.json")
    last = int(done["steps"]) - 1
    scores = [StepScore.from_dict(folder.read_json(f"steps/{k}/metrics.json")) for k in range(last + 1)]
    identity = saved["spec"], saved["method"], saved["preset"], saved.get("method_code")
    first, later = config.of_step(0), config.of_step(1)
    main = _means(scores[-1])
    also = _second(folder, config, scores)
    by_transform = {config.eval.transform: main["all"]} | ({also["eval"]: also["all"]} if also else {})
    lowered = _lowered_rates(folder, last)
    cell: Cell = {
        "dataset": spec.source,
        "scenario": spec.task if spec.seed is None else f"{spec.task}~{spec.seed}",
        "protocol": spec.protocol,
        "method": saved["method"],
        "preset": saved["preset"],
        "seed": config.train.seed,
        "encoder": config.net.encoder,
        "decoder": config.net.decoder,
        "crop": config.data.crop,
        "batch": [first.train.batch_size, later.train.batch_size],
        "epochs": [first.train.epochs, later.train.epochs],
        "eval": config.eval.transform,
        "augment": config.data.augment,
        "lr": [config.optim.lr, config.optim.lr_later],
        "bn": config.net.bn_later,
        "weights": Path(config.net.weights).name,
        **main,
        "all_full_image": by_transform.get("full_image"),
        "also": also,
        "per_class": _per_class(scores),
        "per_step": [{"step": score.step, **_means(score)} for score in scores],
        "forgetting": _percent(done["forgetting"]["final"]),
        "step_averaged": _percent(done["step_averaged_miou"]),
        "scored_on": done["scored_on"],
        "scored_images": _scored_images(folder),
        **_origin(folder, saved, config),
        "settings": _settings(saved, config) | lowered,
        "setup": config_hash(*identity, config, seed=False, outcome=lowered),
        "config": config_hash(*identity, config),
    }
    return {key: cell[key] for key in KEYS}


def write_cell(run: Path, out: Path) -> Path:
    """Write the cell of a run to the folder `out`; a file with the same result is left as it is."""
    cell = cell_of(run)
    file = out / f"{cell_name(cell)}.json"
    if not file.exists():
        write_json(file, cell)
    elif read_cell(file) != cell:
        raise SdrsegError(
            f"{file} contains another result of this configuration. Move that file, or choose another folder."
        )
    return file


def cell_name(cell: Cell) -> str:
    """The name of the file of a cell: the experiment, and the beginning of the hash of its configuration."""
    scenario = "".join(c if c.isalnum() or c in "-~" else "_" for c in str(cell["scenario"]))[:60]
    parts = [cell["dataset"], scenario, cell["protocol"], cell["method"], cell["preset"], f"seed{cell['seed']}"]
    return "-".join(map(str, parts)) + f"-{cell['config'][:8]}"


def read_cell(file: Path) -> Cell:
    """A cell from its file."""
    if not file.exists():
        raise UsageError(f"{file}: no such file or folder. Name runs, results or folders of results.")
    try:
        cell = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SdrsegError(f"{file}: cannot be read ({error}). Write it again with `sdrseg result RUN`.") from error
    if isinstance(cell, dict):
        cell.setdefault("scored_images", None)  # in older results
    if not isinstance(cell, dict) or (missing := [key for key in KEYS if key not in cell]):
        lacks = f" (it has no {missing[0]})" if isinstance(cell, dict) else ""
        raise SdrsegError(f"{file}: not a result{lacks}. Write it again with `sdrseg result RUN`.")
    return cell


def read_cells(paths: Sequence[Path]) -> list[Cell]:
    """Cells from files, folders of such files, and finished runs."""
    cells = []
    for path in paths:
        if (path / "config.json").exists():
            cells.append(cell_of(path))
        elif path.is_dir():
            cells += [read_cell(file) for file in sorted(path.glob("*.json"))]
        else:
            cells.append(read_cell(path))
    return cells


def scores_of(cell: Cell, transform: str | None = None, like: Spec | None = None) -> Mapping[str, Any] | None:
    """The scores of a cell with a transform (its own by default); None if it was not scored with it.

    `like`: another scenario of the data, whose old and new classes are used for an offline run.
    """
    also = cell["also"] or {}
    chosen = cell if transform in (None, cell["eval"]) else also if also.get("eval") == transform else None
    one_group = like is None or like.task == "offline" or str(like.task).startswith("random-")
    if chosen is None or one_group or cell["scenario"] != "offline":
        return chosen
    assert like is not None
    ious = [row["iou"] for row in chosen["per_class"]]
    first = len(class_lists(like, tuple(row["name"] for row in chosen["per_class"]))[0])
    parts = {"old": ious[:first], "new": ious[first:]}
    return {**chosen} | {
        name: fmean(known) if (known := [value for value in part if value is not None]) else None
        for name, part in parts.items()
    }


def _scored_images(folder: RunFolder) -> str:
    """A hash of the test images of the last step and of their masks."""
    saved = folder.read_json("scenario.json")
    ids, digests = saved["steps"][-1]["test_ids"], saved["mask_digests"]
    return hashlib.sha256(json.dumps([[id, digests.get(id)] for id in ids]).encode()).hexdigest()[:16]


def _means(score: StepScore) -> dict[str, float | None]:
    miou = score.miou()
    return {name: _percent(miou[name]) for name in ("old", "new", "all")} | {
        "pixel_accuracy": _percent(mean_of(score.accuracy, range(len(score.names)))),
        "all_no_background": _percent(miou["all_without_background"]),
    }


def _second(folder: RunFolder, config: Config, scores: Sequence[StepScore]) -> dict[str, Any] | None:
    """The score of the last step with another transform, if there is one."""
    for transform in get_args(get_type_hints(Eval)["transform"]):
        name = f"steps/{scores[-1].step}/{second_score(transform)}"
        if transform != config.eval.transform and (folder.path / name).exists():
            score = StepScore.from_dict(folder.read_json(name))
            return {"eval": transform, **_means(score), "per_class": _per_class(scores, score)}
    return None


def _per_class(scores: Sequence[StepScore], second: StepScore | None = None) -> list[dict[str, Any]]:
    """The final IoU and pixel accuracy of each class, and its IoU after the step that introduced it. `second`: another
    score of the last step, which is the only one that has it."""
    by_step = {score.step: score for score in (scores if second is None else [second])}
    end = by_step[scores[-1].step]
    ious, accuracy = end.iou, end.accuracy
    rows = []
    for channel, name in enumerate(end.names):
        first = next(score for score in scores if len(score.names) > channel)
        new = by_step.get(first.step)
        values = {"iou": ious[channel], "accuracy": accuracy[channel]}
        values["iou_when_new"] = None if new is None else new.iou[channel]
        rows.append({"name": name, "step": first.step, **{key: _percent(value) for key, value in values.items()}})
    return rows


def _percent(value: float | None) -> float | None:
    return None if value is None or without_nan(value) is None else round(100 * float(value), 4)


def seconds_in(log: Sequence[Mapping[str, Any]]) -> float:
    """The wall time of a run, without the time between a stop and the next start."""
    times = [(float(entry["time"]), entry["event"] in ("start", "resume", "restart")) for entry in log]
    return sum(now - before for (before, _), (now, begins) in pairwise(times) if not begins)


def _origin(folder: RunFolder, saved: Mapping[str, Any], config: Config) -> dict[str, Any]:
    """Run time and device, from the log or, for older logs, from environment.json."""
    log = folder.read_log()
    start = next((entry for entry in log if entry["event"] == "start" and "device" in entry), {})
    if not start:
        start = next(reversed(folder.read_environments()), {})
    trained = [entry for entry in log if entry["event"] == "train"]
    images = seconds = 0.0
    before: dict[int, int] = {}
    for entry in trained:
        step, iteration = entry["step"], entry["iteration"]
        count = (iteration - before.get(step, 0)) * config.of_step(step).train.batch_size
        before[step] = iteration
        images += count
        seconds += count / max(entry["images_per_second"], 1e-9)
    base = "trained" if any(entry["step"] == 0 for entry in trained) else "taken from the store"
    if folder.has_model(0) and folder.read_json("steps/0/meta.json").get("base_rounded"):
        base += ", rounded to float16"
    return {
        "base": base,
        "seconds": round(seconds_in(log), 1) if log else None,
        "images_per_second": round(images / seconds, 2) if seconds else None,
        "device": start.get("device"),
        "version": start.get("sdrseg"),
        "commit": start.get("commit"),
    }


def _settings(saved: Mapping[str, Any], config: Config) -> dict[str, Any]:
    """Every setting that affects results and differs from the data set, the preset and the method."""
    usual = usual_values(saved)
    matters = [s for s in config.settings() if s.affects != "nothing"]
    changed = {s.key: s.plain for s in matters if s.key not in usual or s.plain != usual[s.key]}
    return changed | ({"net.weights": Path(config.net.weights).name} if "net.weights" in changed else {})


def _lowered_rates(folder: RunFolder, last: int) -> dict[str, str]:
    """{"lowered_rate": "step 1 × 0.33"} if steps diverged and were trained with a lower learning rate; else {}."""
    metas = {k: folder.read_json(f"steps/{k}/meta.json") for k in range(last + 1) if folder.has_model(k)}
    rates = {k: meta["lowered_rate"] for k, meta in metas.items() if "lowered_rate" in meta}
    return {LOWERED: ", ".join(f"step {k} × {rate:.2g}" for k, rate in rates.items())} if rates else {}


def config_hash(
    spec: str,
    method: str,
    preset: str,
    code: str | None,
    config: Config,
    seed: bool = True,
    outcome: Mapping[str, str] | None = None,
) -> str:
    """A hash of everything that a result depends on except the data: the same experiment has the same hash everywhere.

    It always includes a method's own settings, because a run is read without the method that declares their defaults.
    `outcome`: what training changed, so that it is another setup than that of other seeds.
    """
    own = {f"{name}.{key}" for name, section in config.own.items() for key in vars(section)}
    matters = [s for s in config.settings() if s.affects != "nothing" and (s.key in own or not s.is_default)]
    values = {s.key: s.plain for s in matters if seed or s.key != "train.seed"}
    values["net.weights"] = Path(config.net.weights).name
    facts = [spec, method, preset, code or None, values, *([dict(outcome)] if outcome else [])]
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]
