"""Steps: the new classes of each step, its images, and how their labels are mapped (the three protocols)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from sdrseg.errors import SdrsegError, quantity
from sdrseg.labels import VOID
from sdrseg.scenario import selection
from sdrseg.scenario.lists import ClassLists
from sdrseg.scenario.spec import Spec, class_lists, draw, parse_spec

Table = NDArray[np.uint8]


class DataSet(Protocol):
    """The attributes of a data set that a scenario uses; every `Source` has them."""

    name: str
    classes: tuple[str, ...]
    score_background: bool
    partition: Literal["latest", "balanced"]


class Labelled(Protocol):
    """A class index: which raw label values (columns 0..255) occur in which image (rows)."""

    @property
    def ids(self) -> tuple[str, ...]: ...
    @property
    def present(self) -> NDArray[np.bool_]: ...


@dataclass(frozen=True, eq=False)
class Step:
    """One step: raw class ids, image ids and label tables.

    `channels[i]` is the raw id of the network's output i: background, the classes of earlier steps in order, then the
    new ones. A table maps each raw label value (0..255) to a channel or to 255 (void).
    """

    number: int
    new: tuple[int, ...]
    old: tuple[int, ...]
    future: tuple[int, ...]
    train_ids: tuple[str, ...]
    val_ids: tuple[str, ...]
    test_ids: tuple[str, ...]
    train_table: Table
    val_table: Table
    test_table: Table
    test_split: Literal["val", "train"] = "val"
    """Where val_ids and test_ids come from: "train" if they are held out for tuning."""

    @property
    def channels(self) -> tuple[int, ...]:
        return self.old + self.new


@dataclass(frozen=True, eq=False)
class Scenario:
    """All steps of one specification on one data set."""

    spec: Spec
    classes: tuple[str, ...]
    steps: tuple[Step, ...]
    warnings: tuple[str, ...]

    @staticmethod
    def from_spec(spec: str, data: str | Path | None = None, settings: Mapping[str, Any] | None = None) -> Scenario:
        """The steps of a specification on the data in a folder; settings such as {"train.holdout": 0.1}."""
        from sdrseg.datasets.scenarios import open_scenario

        return open_scenario(spec, data, settings)

    def __iter__(self) -> Iterator[Step]:
        return iter(self.steps)

    def __len__(self) -> int:
        return len(self.steps)

    def __getitem__(self, number: int) -> Step:
        return self.steps[number]

    def require_images(self, batch_sizes: Sequence[int]) -> None:
        """Raise an error if a step cannot fill one batch."""
        for step, at_least in zip(self.steps, batch_sizes, strict=True):
            names = ", ".join(self.classes[c] for c in step.new)
            if not step.train_ids:
                raise SdrsegError(
                    f"{self.spec}: step {step.number} ({names}) has no training image. `sdrseg data {self.spec}` shows "
                    f"which classes the masks contain and which images each step uses."
                )
            if len(step.train_ids) < at_least:
                few = quantity(len(step.train_ids), "training image")
                raise SdrsegError(
                    f"{self.spec}: step {step.number} ({names}) has {few}, fewer than the batch of {at_least}. "
                    "Use a smaller train.batch_size, another protocol, or add images."
                )

    def to_dict(self) -> dict[str, Any]:
        """The whole scenario as values for JSON."""
        fields = ("number", "new", "old", "future", "channels", "train_ids", "val_ids", "test_ids", "test_split")
        tables = ("train_table", "val_table", "test_table")
        return {
            "spec": str(self.spec),
            "classes": list(self.classes),
            "steps": [
                {f: getattr(s, f) for f in fields} | {t: getattr(s, t).tolist() for t in tables} for s in self.steps
            ],
            "warnings": list(self.warnings),
        }

    @classmethod
    def from_dict(cls, saved: Any, origin: object) -> Scenario:
        """The scenario that `to_dict` wrote; `origin` is its file, for messages."""
        try:
            steps = tuple(_read_step(step, number) for number, step in enumerate(saved["steps"]))
            names = tuple(str(name) for name in saved["classes"])
            if any(not 0 <= c < len(names) for step in steps for c in step.channels):
                raise ValueError("a class has no name")
            return cls(parse_spec(saved["spec"]), names, steps, tuple(map(str, saved["warnings"])))
        except (KeyError, TypeError, ValueError, OverflowError, IndexError) as error:
            raise SdrsegError(f"{origin}: not the scenario of a run ({error}). Restore it from a backup.") from error


def build_scenario(
    spec: Spec,
    data: DataSet,
    train: Labelled,
    val: Labelled,
    *,
    void_train: Literal["ignore", "background"] = "ignore",
    eval_future: Literal["ignore", "background"] = "ignore",
    holdout: float = 0.0,
    holdout_scope: Literal["all", "step"] = "all",
    left_out: Literal["refuse", "background", "ignore"] = "refuse",
) -> Scenario:
    """The steps of `spec` on a data set, given which classes its training and validation images contain.

    void_train: "background" turns void pixels into background in the masked protocols (disjoint, overlapped), as the
    official code does; sequential training keeps them void. eval_future: "background" scores classes of later steps
    as background at test time (if background is scored at all) instead of ignoring them. holdout: this share of the
    training images is held out; evaluation uses the held-out images of all steps so far and no validation images.
    holdout_scope: "step" scores only those of the step itself, with its training labels. left_out: how classes are
    treated that the task does not name.
    """
    lists = class_lists(spec, data.classes, left_out)
    unused = [c for c in range(len(data.classes)) if all(c not in step for step in lists)]
    as_background = dict.fromkeys(unused, 0) if left_out == "background" else {}
    chosen, warnings = _train_images(spec, lists, data, train)
    held_out_ids = {id for id in train.ids if held_out(id, holdout)}
    scored_ids: set[str] = set()
    steps = []
    for k, (new, train_ids) in enumerate(zip(lists, chosen, strict=True)):
        old = tuple(c for earlier in lists[:k] for c in earlier)
        future = tuple(c for later in lists[k + 1 :] for c in later)
        channels = old + new
        labelled = new or channels  # every part of a random split has labels for all classes
        background = {0: 0, **as_background} if data.score_background else {}
        position = {c: i for i, c in enumerate(channels)}
        foreground = {c: i for c, i in position.items() if c != 0}
        masked = spec.protocol != "sequential"
        train_map = dict.fromkeys((0, *old, *future), 0) | {c: position[c] for c in (labelled if masked else channels)}
        train_map |= as_background
        if masked and void_train == "background":
            train_map[VOID] = 0
        test_map = background | foreground
        if eval_future == "background" and data.score_background:
            test_map |= dict.fromkeys(future, 0)
        if holdout > 0 and holdout_scope == "step":
            scored_ids = set()
            test_map = {c: i for c, i in train_map.items() if c != VOID and (i != 0 or data.score_background)}
        scored_ids = scored_ids | held_out_ids.intersection(train_ids)
        scored, subset = (train, scored_ids) if holdout > 0 else (val, None)
        steps.append(
            Step(
                number=k,
                new=new,
                old=old,
                future=future,
                train_ids=tuple(id for id in train_ids if id not in held_out_ids),
                val_ids=_with_any(scored, labelled, subset),
                test_ids=_with_any(scored, channels, subset),
                train_table=_table(train_map),
                val_table=_table(background | {c: position[c] for c in labelled if c != 0}),
                test_table=_table(test_map),
                test_split="train" if holdout > 0 else "val",
            )
        )
        if holdout > 0 and train_ids and not held_out_ids.intersection(train_ids):
            raise SdrsegError(
                f"{spec}: train.holdout={holdout:g} holds out none of the {quantity(len(train_ids), 'image')} of step "
                f"{k}. Hold out a larger share, or add images."
            )
        if not train_ids:
            warnings.append(f"step {k} has no training image under @{spec.protocol}")
    return Scenario(spec, data.classes, tuple(steps), tuple(warnings))


def _train_images(
    spec: Spec, lists: ClassLists, data: DataSet, train: Labelled
) -> tuple[list[tuple[str, ...]], list[str]]:
    """Image ids per step and warnings, by the rule of the protocol and the data set."""
    warnings: list[str] = []
    if (spec.task or "").startswith("random-"):
        rows = selection.random_parts(train.ids, train.present, lists[0], len(lists), spec.seed or 0)
    elif spec.protocol == "overlapped":
        rows = selection.overlapped(train.present, lists)
    elif data.partition == "latest" or len(lists) == 1:
        rows = selection.latest(train.present, lists)
    elif spec.seed is None and (published := selection.published(data.name, spec.task or "", train.ids)) is not None:
        rows = published
    else:
        rows, warnings = selection.balanced(train.present, lists, data.classes)
    return [tuple(train.ids[i] for i in chosen) for chosen in rows], warnings


def held_out(id: str, share: float) -> bool:
    """Whether an image is held out. Depends on its id only, so it is the same in every step and for every seed."""
    return int.from_bytes(draw(None, f"hold out {id}")) < share * 2**64


def _with_any(images: Labelled, classes: Sequence[int], subset: set[str] | None = None) -> tuple[str, ...]:
    wanted = [c for c in classes if c != 0]
    found = (images.ids[i] for i in np.flatnonzero(images.present[:, wanted].any(axis=1)))
    return tuple(id for id in found if subset is None or id in subset)


def _read_step(saved: Any, number: int) -> Step:
    """A step that `Scenario.to_dict` wrote."""
    values: dict[str, Any] = {f: tuple(map(str, saved[f])) for f in ("train_ids", "val_ids", "test_ids")}
    values |= {f: tuple(map(int, saved[f])) for f in ("new", "old", "future")}
    for name in ("train_table", "val_table", "test_table"):
        values[name] = table = np.array(saved[name], np.uint8)
        table.flags.writeable = False
        if table.shape != (256,):
            raise ValueError(f"{name} of step {number}")
    if saved["test_split"] not in ("train", "val"):
        raise ValueError(f"test_split of step {number}")
    return Step(number=number, test_split=saved["test_split"], **values)


def _table(mapping: dict[int, int]) -> Table:
    table = np.full(256, VOID, np.uint8)
    table[list(mapping)] = list(mapping.values())
    table.flags.writeable = False
    return table
