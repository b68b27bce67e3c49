"""Plans an extension: method, settings by the size of the data, and the new step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from sdrseg.config import Config, load_config
from sdrseg.config.sections import AUTO
from sdrseg.datasets.extended import Extended, Part
from sdrseg.datasets.index import ClassIndex
from sdrseg.datasets.source import Split
from sdrseg.decision import Decision
from sdrseg.engine.folder import RunFolder
from sdrseg.engine.job import read_masks, removed_classes
from sdrseg.errors import UsageError
from sdrseg.extend.by_size import EPOCHS, SCORES, settings_by_size
from sdrseg.extend.newdata import NewData
from sdrseg.extend.olddata import in_later_folders
from sdrseg.extend.parent import Parent
from sdrseg.extend.removed import added_again
from sdrseg.labels import VOID
from sdrseg.methods import METHODS, find_method, method_layers, own_sections, resolve_method
from sdrseg.scenario import Scenario, Step, parse_spec
from sdrseg.scenario.spec import Spec

KEPT = {"net": (), "data": (), "eval": ("every", "also"), "optim": (), "shapes": ()}
"""Sections copied from the parent's configuration, each with the keys that are not copied."""
DEFAULTS: dict[Decision, str] = {"softmax": "laps-softmax", "sigmoid": "laps", "sigmoid_all": "lwf-mc"}
WITHOUT_MEMORY = "sdr"
METHODS_FOR = {"softmax": "laps-softmax, sdr, mib or ft", "sigmoid": "laps", "sigmoid_all": "lwf-mc"}


def begun_method(parent: Parent, out: Path) -> str | None:
    """The method of an extension of this model that was begun in a folder: the same command resumes it."""
    saved = RunFolder(out).read_json("config.json") if (out / "config.json").exists() else None
    extends = {"model": parent.sha256, "step": parent.step}
    if not isinstance(saved, dict) or saved.get("extends") != extends or saved.get("method") not in METHODS:
        return None
    return str(saved["method"])


def choose_method(parent: Parent, name: str | None, memory: bool) -> str:
    """The named method, or the default for the model. `memory`: there is a memory, or there are images to make one."""
    if name is not None:
        return resolve_method(name)
    best = DEFAULTS[parent.decision]
    return WITHOUT_MEMORY if best == "laps-softmax" and not memory else best


def method_notes(parent: Parent, name: str | None, begun: str | None, chosen: str) -> list[str]:
    """A note if the default for the model was not possible.

    `name`: the method that the user named; `begun`: that of the extension to resume.
    """
    best = DEFAULTS[parent.decision]
    if name is not None or chosen == best:
        return []
    if begun is not None:
        return [f"the method is {chosen}, as when this extension was begun."]
    moved = "--old-data PATH if the old data have moved, or " if parent.scenario[0].train_ids else ""
    return [
        f"the method is {chosen}, not the default {best}: the model has no memory of the old classes, and their "
        f"training images are not available to make one. To use {best}, add {moved}--images FOLDER with images of old "
        f"classes, labelled or not."
    ]


def make_config(
    parent: Parent,
    method: str,
    images: int,
    held_out: bool,
    file: Path | None,
    settings: Mapping[str, Any] | None,
    replayed: int = 0,
) -> Config:
    """The parent's network, data and optimiser settings, the method's losses, epochs by the number of new images.

    `replayed`: the number of old images to train on as well, which make an epoch longer.
    """
    saved = parent.config.to_dict()
    kept = {n: {k: v for k, v in saved[n].items() if k not in leave} for n, leave in KEPT.items()}
    by_size = settings_by_size(images, held_out, method, parent.config.optim.lr, parent.rate_set)
    if replayed:
        batch, epochs = by_size["train"]["batch_size"], by_size["train"]["epochs"]
        epochs = max(EPOCHS, math.ceil(epochs * (images // batch) / ((images + replayed) // batch)))
        by_size["train"] |= {"epochs": epochs} | ({"best_every": max(1, epochs // SCORES)} if held_out else {})
    layers = [
        (str(parent.folder.path / "config.json"), kept),
        *method_layers(method, "default", None, parent.source),
        ("extend", by_size),
    ]
    config = load_config(Extended.name, file, settings, layers, own_sections(method))
    if config.train.batch_size == AUTO:
        config = config.changed({"train.batch_size": by_size["train"]["batch_size"]})
    if changed := [
        s.key for s in config.settings() if s.key.startswith("net.") and _other_network(s.key, s.value, saved)
    ]:
        raise UsageError(f"{changed[0]} cannot change in a trained model. Leave it out.")
    decision = find_method(method)(config).decision
    if decision != parent.decision:
        raise UsageError(
            f"--method {method} cannot extend {parent.folder.path}: it trains a {decision} model, but this is a "
            f"{parent.decision} model. Use {METHODS_FOR[parent.decision]}."
        )
    return config


def _other_network(key: str, value: Any, saved: dict[str, Any]) -> bool:
    name = key.removeprefix("net.")
    return name != "weights" and not name.startswith("bn") and saved["net"].get(name, value) != value


@dataclass(frozen=True)
class Plan:
    """Everything that defines the new run."""

    parent: Parent
    new: NewData
    source: Extended
    indexes: dict[Split, ClassIndex]
    scenario: Scenario
    replayed: int  # the number of old training images
    left_out: Mapping[str, str]  # old test images of removed classes that a later folder holds out: the id there, by id

    @property
    def step(self) -> Step:
        return self.scenario[-1]

    @property
    def counts_false_alarms(self) -> bool:
        """Whether some scored image has labelled background, so that predicting a new class everywhere is punished."""
        whole = (self.source.labelled(id) is None for id in self.parent.test_ids)
        return self.new.counts_false_alarms or any(whole)


def make_plan(parent: Parent, new: NewData, replay: tuple[Part, tuple[str, ...]] | None) -> Plan:
    """Combine old and new data and append a step."""
    replayed = replay[1] if replay is not None else ()
    parts = [*parent.parts, *new.parts, *([replay[0]] if replay is not None else [])]
    source = Extended(new.classes, parts, parent.score_background)
    indexes = read_masks(source)
    left_out = _labelling_nothing_more(parent, source, in_later_folders(source, (*parent.test_ids, *new.val_ids)))
    parent = replace(parent, test_ids=tuple(id for id in parent.test_ids if id not in left_out))
    before = parent.scenario[-1]
    channels = before.channels + new.new
    position = {c: i for i, c in enumerate(channels)}
    train_table = np.full(256, VOID, np.uint8)
    train_table[: len(new.classes)] = 0
    train_table[list(position)] = list(position.values())
    test_table = before.test_table.copy()
    test_table[list(new.new)] = [position[c] for c in new.new]
    for channel, name in added_again(parent, new.names).items():  # its old labels are right again
        test_table[before.channels[channel]] = position[new.classes.index(name)]
    known, val = set(parent.test_ids), indexes["val"]
    shown = [id for id, row in zip(val.ids, val.present, strict=True) if id in known or row[list(new.new)].any()]
    step = Step(
        number=parent.step + 1,
        new=new.new,
        old=before.channels,
        future=tuple(c for c in range(len(new.classes)) if c not in position),
        train_ids=tuple(sorted((*new.train_ids, *replayed))),
        val_ids=new.val_ids,
        test_ids=tuple(sorted({*shown, *new.val_ids} - left_out.keys())),
        train_table=train_table,
        val_table=test_table,
        test_table=test_table,
    )
    steps = (*parent.scenario.steps, step)
    scenario = Scenario(chain_spec(steps, new.classes, new.protocol), new.classes, steps, ())
    return Plan(parent, new, source, indexes, scenario, len(replayed), left_out)


def _labelling_nothing_more(parent: Parent, source: Extended, copies: Mapping[str, str]) -> dict[str, str]:
    """Those old test images with a copy in a later folder that label nothing but removed classes. Others measure what
    old classes lose."""
    gone = removed_classes(parent.scenario[-1], parent.meta)
    labelled = {id: source.labelled(id) for id in copies}
    return {id: later for id, later in copies.items() if (some := labelled[id]) is not None and some <= gone}


def chain_spec(steps: Sequence[Step], classes: Sequence[str], protocol: str) -> Spec:
    """The specification: number of classes of step 0, then names by step, such as extended:6/zebra/okapi@overlapped."""
    names = [[classes[c] for c in step.new] for step in steps[1:]]
    steps_text = [str(len(steps[0].new) - 1), *(",".join(map(_quoted, step)) for step in names)]
    return parse_spec(f"{Extended.name}:{'/'.join(steps_text)}@{protocol}")


def _quoted(name: str) -> str:
    """A name as a specification can contain it, in quotes if needed."""
    plain = name.replace('"', "'")
    return f'"{plain}"' if any(sign in plain for sign in "@~:/,") or plain != plain.strip() else plain
