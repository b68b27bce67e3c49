"""What `sdrseg extend` says before it begins: on old data, on the memory, and on labels."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Sequence, Set
from pathlib import Path

from sdrseg.datasets.extended import Part
from sdrseg.datasets.source import Source
from sdrseg.engine.job import Job
from sdrseg.errors import quantity
from sdrseg.extend.parent import Parent
from sdrseg.extend.plan import WITHOUT_MEMORY, Plan
from sdrseg.methods import Method


def old_data_notes(parent: Parent, replay: tuple[Part, Sequence[str]] | None) -> list[str]:
    notes = list(parent.notes)
    if replay is not None and replay[0].data in [part.data for part in parent.parts if part.available]:
        notes.append(
            f"--replay {replay[0].data} also contains the old test images, so the scores of old classes are too "
            f"optimistic. Name a folder without them."
        )
    if not parent.parts:
        notes.append(
            "the model was imported without test images, so forgetting cannot be measured. Add --old-data FOLDER with "
            "labelled images of its classes."
        )
    elif not parent.test_ids:
        notes.append("without old test images, forgetting cannot be measured.")
    return notes


def repeated_notes(plan: Plan) -> list[str]:
    """A note if old test images are also among the new training images, as copies under any name."""
    new, old = (_files_by_size(plan.source, ids) for ids in (plan.new.train_ids, plan.parent.test_ids))
    trained = {_digest(file): file for size in new.keys() & old.keys() for file in new[size]}
    again = [file for size in new.keys() & old.keys() for file in old[size] if _digest(file) in trained]
    if not again:
        return []
    one = min(again)
    return [
        f"{quantity(len(again), 'old test image')} {'is' if len(again) == 1 else 'are'} also among the new training "
        f"images, such as {one} ({trained[_digest(one)].name}), so the scores of old classes may be too optimistic. "
        f"Leave them out of one of the two folders."
    ]


def _files_by_size(source: Source, ids: Iterable[str]) -> dict[int, list[Path]]:
    """The image files by their size in bytes; generated images have none."""
    found: dict[int, list[Path]] = defaultdict(list)
    for id in ids:
        if (file := Path(source.file(id, "image"))).is_file():
            found[file.stat().st_size].append(file)
    return found


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def memory_notes(method: str, uses: Set[str], known: Set[str], available: bool, images: str | Path | None) -> list[str]:
    """Notes if a memory is missing, or if there is no need to make one from --images.

    `uses`: what the method remembers of old classes; `known`: what the model has; `available`: whether there are images
    of old classes.
    """
    if not uses <= known and not available:
        return [
            f"the model has no memory of the old classes for {method}, and their images are not available, so {method} "
            f"works without one. To make one, add --images FOLDER with images of old classes, labelled or not."
        ]
    if images is not None and uses <= known:
        why = f"the model already has the memory that {method} uses" if uses else f"{method} uses no memory"
        return [f"--images {images} is not used: {why}."]
    return []


def label_notes(job: Job, plan: Plan) -> list[str]:
    """What the labels of the new images mean for training and scores."""
    method = job.method(job.config.of_step(plan.step.number), job.processes)
    trains = method.iterates(plan.step.number)
    notes = []
    if plan.new.protocol == "sequential" and not trains:
        notes.append(
            f"{method.name} leaves the old classes as they are: it learns from their labels only what the new classes "
            f"are not. Methods that train the network, such as {WITHOUT_MEMORY}, learn the old classes again."
        )
    return notes if plan.new.counts_false_alarms else [*notes, *_ignored_notes(plan, method, trains)]


def _ignored_notes(plan: Plan, method: Method, trains: bool) -> list[str]:
    """What it means if no held-out mask labels anything beside the new classes."""
    ignored = plan.new.unlabelled == "ignore"
    why = "unlabelled pixels are ignored" if ignored else "no held-out mask labels background"
    notes = [f"{why}, so false alarms in the new images are not counted"]
    if not plan.counts_false_alarms:
        notes[0] += " and, without old test images of step 0, --min-new-iou cannot be measured"
    if ignored and trains and not method.needs_teacher:
        notes.append(
            f"warning: {method.name} has nothing that keeps the new classes from spreading over unlabelled pixels. Use "
            f"another --method, or label the background."
        )
    return notes
