"""The model to extend: a finished step of a run, with its scenario, data and history."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sdrseg.config import Config
from sdrseg.config.engine import Optim
from sdrseg.datasets.extended import CHAIN, Part, read_chain
from sdrseg.decision import Decision, read_decision
from sdrseg.engine.folder import RunFolder, read_meta
from sdrseg.engine.saved import MADE_BY, find_step, made_by, step_config, unfinished_note
from sdrseg.errors import UsageError
from sdrseg.extend.olddata import find_old_data
from sdrseg.files import link_or_copy, write_json
from sdrseg.scenario import Scenario, parse_spec

IMPORTED = "imported"
"""The method of a model that was not trained here."""
STEP_FILES = ("model.safetensors", "memory.safetensors", "metrics.json", "extension.json", MADE_BY)


@dataclass(frozen=True)
class Parent:
    """A finished step of a run, and the steps before it."""

    folder: RunFolder
    step: int
    meta: dict[str, Any]
    config: Config  # of the run that made it
    scenario: Scenario  # up to this step
    digests: dict[str, str]  # of the masks it was trained and scored on
    parts: tuple[Part, ...]  # its data; those that are gone are marked
    test_ids: tuple[str, ...]  # the available images on which its classes can be scored
    score_background: bool
    changes: tuple[Any, ...]  # of its classes, for the history
    notes: tuple[str, ...] = ()  # on a step that is not finished, and on data that are gone or have changed
    rate_set: float | None = None  # the learning rate of later steps, if the user set one

    @property
    def classes(self) -> list[str]:
        """The names of its classes by channel."""
        return [str(c["name"]) for c in self.meta["classes"]]

    @property
    def decision(self) -> Decision:
        return read_decision(self.meta.get("decision", "softmax"), self.folder.step(self.step) / "meta.json")

    @property
    def sha256(self) -> str:
        return str(self.meta["files"]["model"]["sha256"])

    @property
    def source(self) -> str:
        """The name of its first data set."""
        return self.parts[0].source if self.parts else parse_spec(str(self.scenario.spec)).source

    def require_outside(self, out: Path) -> None:
        """Raise an error if a new run would be in the folder of this one."""
        if self.folder.path.resolve() in (out.resolve(), *out.resolve().parents):
            raise UsageError(f"--out {out}: {self.folder.path} must not be changed. Choose a folder outside it.")


def read_parent(
    model: Path, step: int | None = None, old_data: Path | None = None, missing: Collection[str] = ()
) -> Parent:
    """The last finished step of a run, or `step`. `old_data`: where its old data are now; `missing`: those that were
    gone when an extension was begun (`find_old_data`)."""
    if model.is_file():
        raise UsageError(f"{model}: a file cannot be extended. Name the folder of a run, or a step of it.")
    step_folder, run = find_step(model, step)
    if run is None:
        raise UsageError(f"{step_folder}: a step without its run cannot be extended. Name the folder of the run.")
    folder, meta = RunFolder(run), read_meta(step_folder)
    if not step_folder.name.isdigit():
        raise UsageError(f"{step_folder}: not a step of {run}.")
    number = int(step_folder.name)
    config = step_config(step_folder, run)
    scenario_file = folder.read_json("scenario.json")
    scenario = Scenario.from_dict(scenario_file, run / "scenario.json")
    scenario = replace(scenario, steps=scenario.steps[: number + 1])
    score_background, changes = bool(scenario[0].test_table[0] == 0), ()
    if (run / CHAIN).exists():
        chain = read_chain(run)
        known = [replace(part, train=()) for part in chain["parts"] if part.step <= number and part.val]
        score_background, changes = bool(chain["score_background"]), tuple(chain["changes"])
    else:
        known = [_first_part(folder, scenario, config)]
    digests = scenario_file["mask_digests"]
    found = find_old_data(known, scenario, digests, old_data, missing)
    unfinished = unfinished_note(model, step)
    if meta["method"] == IMPORTED and found.test_ids:  # not scored yet
        scenario = replace(scenario, steps=(replace(scenario[0], val_ids=found.test_ids, test_ids=found.test_ids),))
    return Parent(
        folder,
        number,
        meta,
        config,
        scenario,
        digests,
        found.parts,
        found.test_ids,
        score_background,
        changes,
        (*([unfinished] if unfinished else []), *found.notes),
        _rate_set(folder, number),
    )


def _rate_set(folder: RunFolder, step: int) -> float | None:
    """The learning rate of later steps that the user set last, for a step or for one before it.

    The run of an extension lists what was set; in any other run, the rate was set if it is not the default.
    """
    for number in range(step, -1, -1):
        saved = made_by(folder.step(number), folder.path)
        rate = step_config(folder.step(number), folder.path).optim.lr_later
        if "optim.lr_later" in saved.get("set", ()) or ("extends" not in saved and rate != Optim().lr_later):
            return rate
    return None


def _first_part(folder: RunFolder, scenario: Scenario, config: Config) -> Part:
    """The data set of an ordinary run, in the folder from which the run was last started."""
    starts = folder.read_environments()
    return Part(
        step=0,
        source=scenario.spec.source,
        data=starts[-1].get("data") if starts else None,
        shapes=config.to_dict()["shapes"],
        prefix="",
        names=scenario.classes,
        classes=tuple(range(len(scenario.classes))),
        val=(scenario[-1].test_split,),
    )


def copy_steps(parent: Parent, out: RunFolder, memory: dict[str, Any] | None) -> None:
    """Add the steps of its parent to a new run, as hard links if the file system supports them, otherwise as copies.

    `memory`: the entry of a new memory.safetensors, which is already in the folder of the last step.
    """
    for number in range(parent.step + 1):
        source, target = parent.folder.step(number), out.step(number)
        if out.has_model(number):
            continue
        target.mkdir(parents=True, exist_ok=True)
        meta, other = parent.folder.read_json(f"steps/{number}/meta.json"), memory if number == parent.step else None
        if other is not None:
            meta["files"]["memory"] = other
        for name in STEP_FILES:
            if (source / name).exists() and not (other is not None and name == other["file"]):
                link_or_copy(source / name, target / name)
        if not (source / MADE_BY).exists():
            write_json(target / MADE_BY, made_by(source, parent.folder.path))
        write_json(target / "meta.json", meta)
