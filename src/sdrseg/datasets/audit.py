"""The contents and problems of a data set. A broken file is one entry in the list of problems and stops nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from sdrseg.datasets.index import ClassIndex, class_index, map_with_threads
from sdrseg.datasets.source import Problem, Progress, Source, Split
from sdrseg.errors import DataError, quantity, some
from sdrseg.labels import VOID
from sdrseg.scenario import Scenario
from sdrseg.scenario.lists import workable_order, written

SPLITS: tuple[Split, ...] = ("train", "val")
LOSSY = {b"\xff\xd8\xff": "JPEG"}


@dataclass(frozen=True)
class ClassCount:
    """How often a class occurs, by split."""

    id: int
    name: str
    images: dict[Split, int]
    pixels: dict[Split, int]


@dataclass(frozen=True)
class Contents:
    """The contents of a data set."""

    name: str
    images: dict[Split, int]
    classes: tuple[ClassCount, ...]
    void_share: dict[Split, float]
    sizes: dict[Split, dict[str, str]]
    problems: tuple[Problem, ...]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def audit(source: Source, progress: Progress | None = None) -> tuple[Contents, dict[Split, ClassIndex]]:
    """Read every mask and every image of a data set; return its contents, with all problems, and the class indexes."""
    problems = list(source.problems())
    indexes: dict[Split, ClassIndex] = {}
    for split in SPLITS:
        indexes[split] = index = class_index(source, split, progress)
        problems += index.problems
        problems += _label_problems(source, index)
        problems += _image_problems(source, index, progress)
    problems += _class_problems(source, indexes)
    counts = tuple(
        ClassCount(
            c,
            name,
            {s: int(i.present[:, c].sum()) for s, i in indexes.items()},
            {s: int(i.pixels[:, c].sum()) for s, i in indexes.items()},
        )
        for c, name in enumerate(source.classes)
    )
    void = {s: int(i.pixels[:, VOID].sum()) / max(1, int(i.pixels.sum())) for s, i in indexes.items()}
    images = {s: len(i.ids) for s, i in indexes.items()}
    sizes = {s: _sizes(i) for s, i in indexes.items()}
    return Contents(source.name, images, counts, void, sizes, tuple(problems)), indexes


def _label_problems(source: Source, index: ClassIndex) -> Iterator[Problem]:
    last = len(source.classes) - 1
    for id, values in index.out_of_range(len(source.classes)):
        found = some([f"{value} ({quantity(pixels, 'pixel')})" for value, pixels in values.items()])
        detail = f"{found}; the classes are 0..{last} and 255 is void"
        yield Problem(source.file(id, "mask"), "value out of range", detail)
    readable = index.sizes.any(axis=1)
    labelled = index.pixels[:, 1:VOID].any(axis=1)
    for row in np.flatnonzero(readable & ~labelled):
        void = int(index.pixels[row, VOID])
        hint = ""
        if void:
            hint = f"; it has {quantity(void, 'pixel')} with the value {VOID} (void). If {VOID} is a class, add to "
            hint += 'dataset.toml: values = {255 = "…"}'
        yield Problem(
            source.file(index.ids[row], "mask"), "empty mask", f"contains no class; no step will use it{hint}"
        )
    for row in np.flatnonzero(index.digests.any(axis=1)):
        try:
            start = source.mask_content(index.ids[row])[:3]
        except (OSError, DataError):
            continue  # it was readable a moment ago; the next read reports it
        if start in LOSSY:
            detail = f"{LOSSY[start]} changes label values near edges; save masks as PNG"
            yield Problem(source.file(index.ids[row], "mask"), f"saved as {LOSSY[start]}", detail)


def _image_problems(source: Source, index: ClassIndex, progress: Progress | None) -> Iterator[Problem]:
    def check(row: int) -> Problem | None:
        id = index.ids[row]
        try:
            image = source.image(id)
        except (OSError, DataError) as error:
            file = source.file(id, "image")
            return Problem(file, "unreadable", str(error).removeprefix(f"{file}: "))
        size = index.sizes[row]
        return source.size_problem(id, image.shape[:2], size) if size.any() else None

    yield from (p for p in map_with_threads(check, range(len(index.ids)), progress) if p is not None)


def _class_problems(source: Source, indexes: dict[Split, ClassIndex]) -> Iterator[Problem]:
    for split, index in indexes.items():
        if index.ids:
            for c in range(1, len(source.classes)):
                if not index.pixels[:, c].any():
                    name = f"class {c} ({source.classes[c]})"
                    yield Problem(source.name, "class without images", f"{name} occurs in no {split} image")


def _sizes(index: ClassIndex) -> dict[str, str]:
    """Smallest, median and largest image by area, as "width×height", and the number of different sizes."""
    sizes = index.sizes[index.sizes.any(axis=1)].tolist()
    if not sizes:
        return {}
    ordered = sorted(sizes, key=lambda size: (size[0] * size[1], size))
    named = {"smallest": ordered[0], "median": ordered[len(ordered) // 2], "largest": ordered[-1]}
    different = len({tuple(size) for size in sizes})
    return {name: f"{width}×{height}" for name, (height, width) in named.items()} | {"different": str(different)}


@dataclass(frozen=True)
class StepFacts:
    """What the training images of a step contain, by their raw labels."""

    step: int
    train: int
    with_old: int  # images with a pixel of an old class (background aside)
    with_future: int  # images with a pixel of a class of a later step
    seen_before: int  # images that an earlier step also used


def step_facts(scenario: Scenario, train: ClassIndex) -> list[StepFacts]:
    """Count, for each step, the images with old classes, with future classes, and those used before."""
    row_of = {id: row for row, id in enumerate(train.ids)}
    seen: set[str] = set()
    facts = []
    for step in scenario.steps:
        present = train.present[[row_of[id] for id in step.train_ids]]

        def count_with(classes: Sequence[int], present: Any = present) -> int:
            return int(present[:, [c for c in classes if c != 0]].any(axis=1).sum())

        before = sum(id in seen for id in step.train_ids)
        facts.append(StepFacts(step.number, len(step.train_ids), count_with(step.old), count_with(step.future), before))
        seen.update(step.train_ids)
    return facts


def protocol_summary(scenario: Scenario, facts: Sequence[StepFacts]) -> str:
    """Which rules of the protocols the images follow, in a sentence or two."""
    if len(facts) == 1:
        return "There is only one step, so all protocols are the same."
    rest = scenario.classes[0]  # background, or "other" of data without
    times = Counter(id for step in scenario.steps for id in step.train_ids)
    repeated = sum(count > 1 for count in times.values())
    future, sequential = sum(f.with_future for f in facts), scenario.spec.protocol == "sequential"
    if repeated:
        used = f"{quantity(len(times), 'training image')} {'is' if repeated == 1 else 'are'} used"
        kind = f"{repeated} of the {used} in more than one step"
        kind += f"; {_uses(future)} a class of a later step, which is labelled as {rest} there" if future else ""
    elif future:
        kind = f"No image is used twice, but {_uses(future)} a class of a later step, which is labelled as {rest}"
    else:
        kind = "No image is used twice, and none contains a class of a later step"
    later = [f for f in facts if f.step > 0]
    old, total = sum(f.with_old for f in later), sum(f.train for f in later)
    contain = f"{old} of {quantity(total, 'image')} {'contains' if old == 1 else 'contain'} old classes"
    if not old:
        labels = "No image of a later step contains an old class, so all protocols give the same labels."
    elif sequential:
        labels = f"In the later steps, {contain}, whose labels sequential training keeps."
    else:
        labels = f"In the later steps, {contain}, which are labelled as {rest}."
    return f"{kind}. {labels}"


def _uses(count: int) -> str:
    return f"in {quantity(count, 'case')} an image contains"


def better_order(scenario: Scenario, train: ClassIndex) -> str | None:
    """If a step has no image: a specification with a class order in which every step has some, if one is found."""
    protocol = scenario.spec.protocol
    if protocol == "overlapped" or all(step.train_ids for step in scenario.steps) or len(scenario.steps) < 2:
        return None
    lists = workable_order(train.present, tuple(step.new for step in scenario.steps))
    return None if lists is None else f"{scenario.spec.source}:{written(scenario.classes, lists)}@{protocol}"
