"""The images of new classes: their classes, problems in them, and how their labels are mapped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from sdrseg.config import Config
from sdrseg.datasets import open_source
from sdrseg.datasets.extended import Part
from sdrseg.datasets.index import ClassIndex, class_index
from sdrseg.datasets.source import MAX_CLASSES, Source, Split
from sdrseg.errors import DataError, UsageError, nearest, quantity
from sdrseg.extend.parent import Parent
from sdrseg.labels import VOID
from sdrseg.terminal import progress

Unlabelled = Literal["background", "ignore"]
Protocol = Literal["overlapped", "sequential"]
FEW = 10
"""A class with fewer images gets a warning."""
ONLY_NEW = "no mask labels a pixel outside the new classes. If unlabelled pixels (255) are background, save them as 0."
ALL_SPLITS: tuple[Split, ...] = ("train", "val")


@dataclass(frozen=True)
class NewData:
    """A folder with images of new classes, as the extended run uses it."""

    classes: tuple[str, ...]  # the common list: the classes of the model, then the new ones
    new: tuple[int, ...]  # the new ones, as positions in `classes`
    parts: tuple[Part, ...]
    train_ids: tuple[str, ...]  # with their prefix
    val_ids: tuple[str, ...]
    images: dict[str, int]  # of each new class, in training
    protocol: Protocol
    unlabelled: Unlabelled  # "ignore" also where masks label the new classes only and all else is void
    counts_false_alarms: bool  # whether a held-out mask labels anything beside the new classes
    notes: tuple[str, ...]

    @property
    def names(self) -> list[str]:
        """The names of the new classes."""
        return [self.classes[c] for c in self.new]

    @property
    def held_out(self) -> int:
        """The number of images that are scored but not used for training."""
        return len(self.val_ids) if self.parts[0].val else 0


def read_new_data(
    parent: Parent,
    folder: Path,
    wanted: Sequence[str] | None,
    *,
    unlabelled: Unlabelled = "background",
    negatives: bool = False,
    protocol: Protocol | None = None,
) -> NewData:
    """Open a folder and check it before any work starts."""
    source = open_source("folder", folder, Config())
    indexes = {split: read_index(source, split) for split in ALL_SPLITS}
    names = new_names(parent, source, wanted, folder)
    unused: list[str] = []
    if wanted is None:
        names, unused = _used(names, source, indexes)
    own = [source.classes.index(name) for name in names]
    only_new = unlabelled == "background" and not any(_beside(index, own) for index in indexes.values())
    if only_new:
        if negatives:
            raise UsageError(f"--negatives: {folder}: {ONLY_NEW}")
        unlabelled = "ignore"
    chosen = _protocol(parent, source, indexes, folder, protocol)
    classes = (*parent.scenario.classes, *(n for n in names if n not in parent.scenario.classes))
    if len(classes) > MAX_CLASSES:
        raise UsageError(f"{len(classes)} classes are too many: a model can have {MAX_CLASSES}, including background.")
    known = {*parent.classes, *names}
    others = [n for n in source.classes[1:] if n not in known and _occurs(indexes, source, n)]
    part = _part(parent, source, folder, names, classes, _splits(indexes, own), chosen, unlabelled)
    parts = [part] if part.val else [part, replace(part, prefix=f"{part.prefix}again/", train=(), val=part.train)]
    rows = [
        (id, row) for split in part.train for id, row in zip(indexes[split].ids, indexes[split].present, strict=True)
    ]
    images = {name: sum(bool(row[c]) for _, row in rows) for name, c in zip(names, own, strict=True)}
    if empty := [name for name, count in images.items() if count == 0]:
        raise DataError(
            f"{folder}: no training image shows {', '.join(empty)}. Leave the class out of --classes, or add images "
            f"(`sdrseg data {folder}` counts every class)."
        )
    unseen = [name for name in names if not _occurs({"val": indexes["val"]}, source, name)]
    train_ids = sorted(part.prefix + id for id, row in rows if negatives or row[own].any())
    val_ids = [parts[-1].prefix + id for split in parts[-1].val for id in indexes[split].ids]
    return NewData(
        classes=classes,
        new=tuple(classes.index(name) for name in names),
        parts=tuple(parts),
        train_ids=tuple(train_ids),
        val_ids=tuple(sorted(val_ids)),
        images=images,
        protocol=chosen,
        unlabelled=unlabelled,
        counts_false_alarms=unlabelled == "background" and any(_beside(indexes[s], own) for s in parts[-1].val),
        notes=(
            *source.notes,
            *([f"{folder}: {ONLY_NEW}"] if only_new else []),
            *_class_notes(folder, others, unused, unlabelled),
            *_held_out_notes(folder, part, unseen, len(indexes["val"].ids)),
            *_image_notes(images, len(rows) - len(train_ids), unlabelled),
            *_sizes(parent, indexes, folder),
        ),
    )


def _splits(indexes: dict[Any, ClassIndex], own: Sequence[int]) -> tuple[tuple[Split, ...], tuple[Split, ...]]:
    """The splits for training and for scores; none is left for scores where all images have to be trained on."""
    if not indexes["train"].ids or not indexes["train"].present[:, own].any():
        return ALL_SPLITS, ()  # there are so few images that all were held out
    return ("train",), (("val",) if indexes["val"].present[:, own].any() else ())


def _part(
    parent: Parent,
    source: Source,
    folder: Path,
    names: Sequence[str],
    classes: tuple[str, ...],
    splits: tuple[tuple[Split, ...], tuple[Split, ...]],
    protocol: Protocol,
    unlabelled: Unlabelled,
) -> Part:
    """The folder as a part of the extended data. `names`: the new classes; `classes`: the common list."""
    rest = 0 if unlabelled == "background" else VOID
    return Part(
        step=parent.step + 1,
        source="folder",
        data=str(folder.resolve()),
        shapes={},
        prefix=f"step{parent.step + 1}/",
        names=source.classes,
        classes=tuple(_common_id(name, names, classes, parent, protocol, rest) for name in source.classes),
        labelled=tuple(classes.index(name) for name in names) if protocol == "overlapped" else None,
        train=splits[0],
        val=splits[1],
    )


def _class_notes(folder: Path, others: Sequence[str], unused: Sequence[str], unlabelled: Unlabelled) -> list[str]:
    """Notes on classes of the folder that are not added."""
    notes = []
    if others:
        what = "background" if unlabelled == "background" else "ignored"
        notes.append(f"{folder} also labels {', '.join(others)}; they are not in --classes and become {what}.")
    if unused:
        notes.append(f"{folder} also names {', '.join(unused)}, which no training image shows: left out.")
    return notes


def _held_out_notes(folder: Path, part: Part, unseen: Sequence[str], held_out: int) -> list[str]:
    """Notes if no image is held out, or if those that are do not show the new classes in `unseen`."""
    shows = f"no held-out image shows {', '.join(unseen)}"
    if part.val:
        return [f"{folder}: {shows}, so its IoU cannot be measured. Add some to the folder val."] if unseen else []
    why = shows if held_out and "val" not in part.train else "no image is held out"
    return [
        f"{folder}: {why}, so the new classes are scored on the training images and these scores are too optimistic. "
        f"Add images, or a folder val."
    ]


def _image_notes(images: dict[str, int], left_out: int, unlabelled: Unlabelled) -> list[str]:
    """Notes if a class has few images, and on the number of images that are left out."""
    notes = []
    for name, count in images.items():
        if count < FEW:
            notes.append(f"{name} is in {quantity(count, 'training image')}; {FEW} or more are advisable.")
    if left_out:
        keep = "; --negatives keeps them" if unlabelled == "background" else ""
        are = "is" if left_out == 1 else "are"
        notes.append(f"{quantity(left_out, 'image')} without a new class {are} left out{keep}")
    return notes


def new_names(parent: Parent, source: Source, wanted: Sequence[str] | None, folder: Path) -> list[str]:
    """The classes to add: those in `wanted`, or all classes of the folder that the model does not know."""
    available, known = list(source.classes[1:]), parent.classes
    if wanted is None:
        if not (found := [name for name in available if name not in known]):
            raise UsageError(f"{folder}: the model already knows all of its classes ({', '.join(available)}).")
        return found
    names = [name.strip() for name in wanted if name.strip()]
    if not names or len(set(names)) < len(names):
        raise UsageError(f"--classes {','.join(wanted)}: name each new class once.")
    for name in names:
        if name == known[0]:
            why = "the model's class of all other pixels. Leave it out"
            raise UsageError(f"--classes {name}: {why}, or rename it in {folder} if it is another class.")
        if name in known:
            since = parent.meta["classes"][known.index(name)]["step"]
            raise UsageError(
                f"--classes {name}: the model has had a class of this name since step {since}. If this is another one, "
                f"rename it in {folder} or in the model (`sdrseg classes {parent.folder.path} --rename {name}=NAME`)."
            )
        if name not in available:
            raise UsageError(f"--classes {name}: {folder} has no such class{nearest(name, available)}")
    return names


def _used(names: Sequence[str], source: Source, indexes: dict[Any, ClassIndex]) -> tuple[list[str], list[str]]:
    """The names of classes that training images show, or any image if these show none, and the others."""
    for some in (indexes["train"],), tuple(indexes.values()):
        shown = [n for n in names if any(index.present[:, source.classes.index(n)].any() for index in some)]
        if shown:
            return shown, [n for n in names if n not in shown]
    return list(names), []


def read_index(source: Source, split: Split) -> ClassIndex:
    """The class index of a split, if all masks are usable."""
    with progress("reading the new images") as report:
        index = class_index(source, split, report)
    index.require_sound(source)
    return index


def _beside(index: ClassIndex, own: Sequence[int]) -> bool:
    """Whether some mask labels a pixel outside these classes."""
    others = [value for value in range(VOID) if value not in own]
    return bool(index.present[:, others].any())


def _occurs(indexes: dict[Any, ClassIndex], source: Source, name: str) -> bool:
    return any(index.present[:, source.classes.index(name)].any() for index in indexes.values())


def _common_id(
    name: str, names: Sequence[str], classes: Sequence[str], parent: Parent, protocol: Protocol, rest: int
) -> int:
    """The common id of a class of the folder."""
    if name in names or (protocol == "sequential" and name in parent.classes[1:]):
        return classes.index(name)
    return rest


def _protocol(
    parent: Parent, source: Source, indexes: dict[Any, ClassIndex], folder: Path, wanted: Protocol | None
) -> Protocol:
    """The protocol: `wanted`, or overlapped. If masks contain old classes, the user has to choose."""
    if wanted is not None:
        return wanted
    old = [name for name in source.classes[1:] if name in parent.classes[1:] and _occurs(indexes, source, name)]
    if not old:
        return "overlapped"
    column = [source.classes.index(name) for name in old]
    images = sum(int(index.present[:, column].any(axis=1).sum()) for index in indexes.values())
    raise UsageError(
        f"{folder}: old classes are also labelled ({', '.join(old)}; in {quantity(images, 'mask')}). If masks label "
        f"every visible old class, add --protocol sequential to use these labels. If only some are labelled, add "
        f"--protocol overlapped to treat them as unlabelled."
    )


def _sizes(parent: Parent, indexes: dict[Any, ClassIndex], folder: Path) -> list[str]:
    """A note if the images are much smaller or larger than those the model was trained on."""
    shorter = np.concatenate([index.sizes.min(axis=1) for index in indexes.values()])
    crop, middle = parent.config.data.crop, float(np.median(shorter))
    if crop / 2 <= middle <= 4 * crop:
        return []
    return [
        f"{folder}: the shorter side of its images is {middle:.0f} pixels; the model was trained on crops of {crop}. "
        f"Objects of a different size may be learned badly. Resize the images if you can."
    ]
