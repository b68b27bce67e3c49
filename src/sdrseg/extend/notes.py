"""What `sdrseg extend` says before it begins: on old data, on the memory, and on labels."""

from __future__ import annotations

from collections.abc import Sequence, Set
from pathlib import Path

from sdrseg.datasets.extended import Part
from sdrseg.engine.job import Job
from sdrseg.errors import quantity
from sdrseg.extend.olddata import same_images
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
    """Notes if old test images are also among the new images, as copies under any name."""
    notes = []
    if found := plan.left_out:
        one = min(found)
        are, count = ("is", "it counts") if len(found) == 1 else ("are", "they count")
        notes.append(
            f"{quantity(len(found), 'old test image')} {are} also held out in a later folder, such as "
            f"{_file(plan, one)} ({_file(plan, found[one]).name}), so {count} once, with the labels of that folder."
        )
    trained, old = set(plan.new.train_ids), set(plan.parent.test_ids)
    groups = same_images(plan.source, [*trained, *old])
    again = {id: min(trained.intersection(same)) for same in groups if trained & {*same} for id in old & {*same}}
    if again:
        one = min(again)
        are = "is" if len(again) == 1 else "are"
        notes.append(
            f"{quantity(len(again), 'old test image')} {are} also among the new training images, such as "
            f"{_file(plan, one)} ({_file(plan, again[one]).name}), so the scores of old classes may be too optimistic. "
            f"Leave them out of one of the two folders."
        )
    return notes


def _file(plan: Plan, id: str) -> Path:
    return Path(plan.source.file(id, "image"))


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
