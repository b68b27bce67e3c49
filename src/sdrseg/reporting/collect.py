"""Reads run folders: scores, logs, settings and hashes of every finished step. Nothing is recomputed.

Only runs that were scored on the same images with the same labels can be compared.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from filecmp import cmp
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from sdrseg.colours import Colour, class_colours
from sdrseg.config import Config, saved_config, write_setting
from sdrseg.datasets.extended import Extended
from sdrseg.engine.folder import RunFolder
from sdrseg.engine.saved import usual_values
from sdrseg.errors import SdrsegError
from sdrseg.extend.review import EXTENSION
from sdrseg.methods import METHODS
from sdrseg.metrics import StepScore, summary
from sdrseg.scenario import SOURCES, parse_spec, saved_source

Entry = dict[str, Any]


class Forgetting(NamedTuple):
    """What the classes have lost: by channel after the last finished step, and the mean without background."""

    by_class: list[float | None]
    mean: float | None


@dataclass(frozen=True, eq=False)
class RunRecord:
    """One run, finished or not: `scores` has one entry for each step that was trained and scored."""

    label: str
    folder: RunFolder
    identity: dict[str, Any]  # spec, method, preset, sdrseg; terms, data_set, method_values: saved of custom code
    config: Config
    scenario: dict[str, Any]
    scores: tuple[StepScore, ...]
    metas: tuple[Entry, ...]
    environment: tuple[Entry, ...]
    log: tuple[Entry, ...]  # the "train" lines

    @property
    def path(self) -> Path:
        return self.folder.path

    @property
    def last(self) -> int:
        """The last finished step."""
        return len(self.scores) - 1

    @property
    def steps(self) -> int:
        return len(self.scenario["steps"])

    @property
    def finished(self) -> bool:
        return len(self.scores) == self.steps

    @property
    def names(self) -> tuple[str, ...]:
        """The classes by channel after the last finished step."""
        return self.scores[-1].names

    @property
    def kept(self) -> list[int]:
        """The channels of `names` without those of removed classes."""
        return [c for c in range(len(self.names)) if c not in self.scores[-1].removed]

    @property
    def all_names(self) -> tuple[str, ...]:
        """The classes by channel after the last step of the scenario."""
        return tuple(self.scenario["classes"][c] for c in self.scenario["steps"][-1]["channels"])

    @property
    def colours(self) -> tuple[Colour, ...]:
        """The colours of `all_names`."""
        return class_colours(self.scenario["steps"][-1]["channels"])

    @cached_property
    def summary(self) -> dict[str, Any]:
        """The summary in the run folder; for an unfinished run, a summary of its finished steps."""
        if self.finished and (self.path / "summary.json").exists():
            saved: dict[str, Any] = self.folder.read_json("summary.json")
            return saved
        return summary(self.scores)

    @cached_property
    def extension(self) -> Entry | None:
        """extension.json of the last finished step, if that was added by `sdrseg extend`."""
        name = f"steps/{self.last}/{EXTENSION}"
        return self.folder.read_json(name) if (self.path / name).exists() else None

    @cached_property
    def forgetting(self) -> Forgetting:
        """The best IoU after an earlier step minus the last; in an extended run, whose steps are scored on different
        images, the IoU before the last step minus that after it on the old test images."""
        if self.extension is None:
            found = self.summary["forgetting"]
            return Forgetting([row[-1] for row in found["by_class"]], found["final"])
        try:
            points = {one["name"]: number(one["lost"]) for one in self.extension["old"]}
            by_class = [None if (lost := points.get(name)) is None else lost / 100 for name in self.names]
            mean = number(self.extension["forgetting"])
        except (KeyError, TypeError, ValueError) as error:
            raise damaged(self, error) from error
        return Forgetting(by_class, None if mean is None else mean / 100)


def collect(paths: Sequence[Path]) -> list[RunRecord]:
    """Read runs for one report; all must have the scenario of the first."""
    twice = [path for number, path in enumerate(paths) if path.resolve() in {p.resolve() for p in paths[:number]}]
    if twice:
        raise SdrsegError(f"{twice[0]} is named twice. Name each run once.")
    folders = [RunFolder(path) for path in paths]
    identities = [_identity(folder) for folder in folders]
    labels = _labels(paths, [str(identity["method"]) for identity in identities])
    runs = [_read(f, i, label) for f, i, label in zip(folders, identities, labels, strict=True)]
    for run in runs[1:]:
        if (why := _other_scenario(runs[0], run)) is not None:
            raise SdrsegError(
                f"{run.path} cannot be compared with {runs[0].path}: {why}. Write a separate report for it."
            )
    return runs


def _identity(folder: RunFolder) -> dict[str, Any]:
    """The identity of a run, from config.json."""
    saved = folder.read_json("config.json")
    if not isinstance(saved, dict) or not {"spec", "method", "preset", "config"} <= saved.keys():
        raise SdrsegError(f"{folder.path / 'config.json'}: not the configuration of a run. Name the folder of a run.")
    return saved


def _labels(paths: Sequence[Path], methods: Sequence[str]) -> list[str]:
    """The methods if they differ, otherwise with the names of the folders, otherwise with their full paths."""
    for names in (methods, [f"{m} ({p.resolve().name})" for m, p in zip(methods, paths, strict=True)]):
        if len(set(names)) == len(names):
            return list(names)
    return [f"{m} ({p})" for m, p in zip(methods, paths, strict=True)]


def _read(folder: RunFolder, identity: dict[str, Any], label: str) -> RunRecord:
    config = saved_config(identity["config"], str(folder.path / "config.json"), identity.get("affect_nothing", ()))
    scenario = folder.read_json("scenario.json")
    scores, metas = [], []
    for number in range(len(scenario["steps"])):
        if not (folder.has_model(number) and folder.has_metrics(number)):
            break
        scores.append(StepScore.from_dict(folder.read_json(f"steps/{number}/metrics.json")))
        metas.append(folder.read_json(f"steps/{number}/meta.json"))
    if not scores:
        raise SdrsegError(
            f"{folder.path}: step 0 is not trained and scored yet. Finish a step with `sdrseg train` first. An "
            f"imported model is scored when it is extended."
        )
    environment = folder.read_environments()
    facts = {key: identity.get(key) for key in ("spec", "method", "preset", "terms", "data_set", "method_values")}
    facts["sdrseg"] = environment[-1].get("sdrseg") if environment else None
    log = tuple(entry for entry in folder.read_log() if entry["event"] == "train" and "losses" in entry)
    return RunRecord(label, folder, facts, config, scenario, tuple(scores), tuple(metas), tuple(environment), log)


def _other_scenario(first: RunRecord, other: RunRecord) -> str | None:
    """Why the scores of two runs cannot be compared, or None."""
    if (a := first.identity["spec"]) != (b := other.identity["spec"]):
        return f"its scenario is {b}, not {a}"
    own, theirs = first.scenario, other.scenario
    if own["classes"] != theirs["classes"]:
        return "its data set has different classes"
    held_out = [run["steps"][0]["test_split"] == "train" for run in (own, theirs)]
    if held_out[0] != held_out[1]:
        return "only one of them was scored on held-out training images (--holdout, train.holdout)"
    for step, other_step in zip(own["steps"], theirs["steps"], strict=True):
        for key, what in (("channels", "classes"), ("test_ids", "test images"), ("test_table", "labels at test time")):
            if step[key] != other_step[key]:
                return f"step {step['number']} has different {what}"
    tested = {id for step in own["steps"] for id in step["test_ids"]}
    digests = [{id: run["mask_digests"].get(id) for id in tested} for run in (own, theirs)]
    return "its test masks have different content" if digests[0] != digests[1] else None


def scored_differently(runs: Sequence[RunRecord]) -> list[str]:
    """Settings of the evaluation that are not the same in all runs."""
    values = [{s.key: s.value for s in run.config.settings() if s.affects == "score"} for run in runs]
    return [key for key in values[0] if len({str(v[key]) for v in values}) > 1]


def command_line(run: RunRecord) -> str:
    """A command that reproduces the run, with every setting that differs from its preset and method."""
    spec = parse_spec(run.identity["spec"])
    if spec.source == Extended.name:
        return _extend_command(run)
    method, preset = run.identity["method"], run.identity["preset"]
    of_method, of_data = _custom_files(run)
    args = ["sdrseg", "train", str(spec), "--method", f"{of_method}:{method}" if of_method else method]
    args += ["--preset", preset] if preset != "default" else []
    if of_data:
        args[2] = f"{of_data}{str(spec).removeprefix(spec.source)}"
    try:
        args += ["--data", "PATH"] if saved_source(spec.source, run.identity["data_set"]).needs_folder else []
        known = method in METHODS or run.identity["method_values"] is not None
        usual = usual_values(run.identity) if known else {}
    except SdrsegError:  # a custom data set that is not known here
        usual = {}  # write every setting
    for setting in run.config.settings():
        if setting.key not in usual or usual[setting.key] != setting.plain:
            args += ["--set", write_setting(setting.key, setting.value)]
    return shlex.join([*args, "--out", "RUN"])


def _custom_files(run: RunRecord) -> list[str]:
    """The files of the method and the data set, "" for built-in ones: their copies in the run, or FILE.py without one.

    A file that has both is named once, because its copies would register the same names twice.
    """
    copies = [run.path / name for name in ("method.py", "dataset.py")]
    known = [run.identity["method"] in METHODS, parse_spec(run.identity["spec"]).source in SOURCES]
    if all(copy.exists() for copy in copies) and cmp(copies[0], copies[1], shallow=False):
        copies[1] = copies[0]
    return [str(c) if c.exists() else "" if k else "FILE.py" for c, k in zip(copies, known, strict=True)]


def _extend_command(run: RunRecord) -> str:
    """The command of the last extension. A run that another command copied has none; its history is shown instead."""
    saved = run.extension or {"command": []}
    try:
        args = list(map(str, saved["command"]))
        if not args:
            return shlex.join(["sdrseg", "history", str(run.path)])
        verdict = saved["verdict"]
        for option in ("max_forgetting", "min_new_iou"):
            if verdict[option] is not None:
                args += [f"--{option.replace('_', '-')}", f"{verdict[option]:g}"]
    except (KeyError, TypeError, ValueError) as error:
        raise damaged(run, error) from error
    return shlex.join([*args, "--out", "RUN"])


def damaged(run: RunRecord, error: Exception) -> SdrsegError:
    file = run.folder.step(run.last) / EXTENSION
    return SdrsegError(
        f"{file}: not as `sdrseg extend` writes it ({error}). Remove it and run the same `sdrseg extend` again."
    )


def finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def number(value: Any) -> float | None:
    """A number of a file, or None."""
    if value is not None and not finite(value):
        raise ValueError(f"{value!r} is not a number")
    return None if value is None else float(value)
