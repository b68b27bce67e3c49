"""Which training images a step sees. Every function takes the presence matrix (images × 256 raw label values) and the
class lists of the steps, and returns the row numbers of each step in ascending order."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import resources

import numpy as np
from numpy.typing import NDArray

from sdrseg.errors import DataError, quantity
from sdrseg.scenario.spec import draw

Rows = list[NDArray[np.intp]]
Lists = Sequence[Sequence[int]]
Presence = NDArray[np.bool_]

NO_STEP = 255
TARGET_IMAGES = 50
"""How many images per class the balanced split aims for (MiB's target; falling short only gives a warning)."""


def overlapped(present: Presence, lists: Lists) -> Rows:
    """Every image with a new class. An image may be in several steps and may contain old and future classes."""
    return [np.flatnonzero(_has_any(present, new)) for new in lists]


def latest(present: Presence, lists: Lists) -> Rows:
    """Every image with a new class and no future class: each image goes to the step of its latest class."""
    rows = []
    for k, new in enumerate(lists):
        future = [c for later in lists[k + 1 :] for c in later]
        rows.append(np.flatnonzero(_has_any(present, new) & ~_has_any(present, future)))
    return rows


def random_parts(ids: Sequence[str], present: Presence, classes: Sequence[int], parts: int, seed: int) -> Rows:
    """All images with any class, in `parts` random parts whose sizes differ by at most one."""
    labelled = np.flatnonzero(_has_any(present, classes))
    shuffled = np.array(sorted(labelled.tolist(), key=lambda row: draw(seed, ids[row])), np.intp)
    return [np.sort(part) for part in np.array_split(shuffled, parts)]


def published(data_set: str, task: str, ids: Sequence[str]) -> Rows | None:
    """The published disjoint lists of ADE20K, or None if the task has none."""
    if data_set != "ade20k":
        return None
    with np.load(str(resources.files("sdrseg").joinpath("resources/ade20k_lists.npz"))) as lists:
        if task not in lists:
            return None
        step_of = lists[task]
    row_of = {id: row for row, id in enumerate(ids)}
    steps = range(step_of[step_of < NO_STEP].max() + 1)
    wanted = [[f"ADE_train_{i + 1:08d}" for i in np.flatnonzero(step_of == k)] for k in steps]
    if missing := [id for step in wanted for id in step if id not in row_of]:
        raise DataError(
            f"ade20k:{task}: missing {quantity(len(missing), 'training image')} of the published lists, the first is "
            f"{missing[0]}. Complete images/training and annotations/training (20,210 files each)."
        )
    return [np.array([row_of[id] for id in step], np.intp) for step in wanted]


def balanced(present: Presence, lists: Lists, names: Sequence[str]) -> tuple[Rows, list[str]]:
    """MiB's greedy assignment: every image goes to exactly one step so that each class gets its share of images.

    For each class of the image: score = 120·(1 − assigned/total) + (Σ totals of the image's classes)/total. The class
    with the highest score decides the step; the count of each class of the image in that step increases by one. Images
    are visited by their smallest class id. The images of a step may contain old and future classes.
    """
    step_of_class = {c: k for k, new in enumerate(lists) for c in new if c != 0}
    classes = np.array(sorted(step_of_class))
    steps = np.array([step_of_class[c] for c in classes])
    inside = present[:, classes]
    total = inside.sum(axis=0)
    assigned = np.zeros(len(classes))
    chosen: list[list[int]] = [[] for _ in lists]
    labelled = np.flatnonzero(inside.any(axis=1))
    by_smallest_class = labelled[np.argsort(inside[labelled].argmax(axis=1), kind="stable")]
    for image in by_smallest_class:
        columns = np.flatnonzero(inside[image])
        score = 120 * (1 - assigned[columns] / total[columns]) + total[columns].sum() / total[columns]
        step = steps[columns[np.argmax(score)]]
        assigned[columns[steps[columns] == step]] += 1
        chosen[step].append(int(image))
    warnings = [
        f"class {c} ({names[c]}) gets {int(got)} of its {quantity(int(has), 'image')} in its step; "
        f"{min(TARGET_IMAGES, int(has))} is the target"
        for c, got, has in zip(classes, assigned, total, strict=True)
        if got < min(TARGET_IMAGES, has)
    ]
    return [np.array(sorted(rows), np.intp) for rows in chosen], warnings


def _has_any(present: Presence, classes: Sequence[int]) -> Presence:
    return np.asarray(present[:, [c for c in classes if c != 0]].any(axis=1))
