"""Makes a memory for a model that was trained by a method without one, in one pass over images of its classes.

The images are the old training images, if available, or a folder of images, labelled or labelled by the model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from sdrseg.config import Config
from sdrseg.datasets import open_source
from sdrseg.datasets.batches import Batch, survey_batches
from sdrseg.datasets.extended import Extended
from sdrseg.datasets.folder.pairing import MASKS, find_layout, find_pairs, named
from sdrseg.datasets.pictures import PICTURE_SUFFIXES, read_image
from sdrseg.datasets.source import Array, Source, Split, find_by_id
from sdrseg.decision import Decision, decide
from sdrseg.engine.checkpoint import save_tensors
from sdrseg.engine.job import Job
from sdrseg.engine.shared import survey_with
from sdrseg.errors import DataError, SdrsegError, quantity
from sdrseg.extend.parent import Parent
from sdrseg.extend.removed import forgotten
from sdrseg.labels import VOID
from sdrseg.methods import Method

KEPT = {"memory", "prototypes"}
"""What a model may have kept of its classes, by the prefix of its tensors."""


class Pictures(Source):
    """Pictures without labels."""

    name = "pictures"

    def __init__(self, files: Mapping[str, Path]):
        self.classes = ("background", "anything")
        self._files = files

    def ids(self, split: Split) -> tuple[str, ...]:
        return tuple(sorted(self._files)) if split == "train" else ()

    def image(self, id: str) -> Array:
        return read_image(self._files[id])

    def mask(self, id: str) -> Array:
        return np.full(self.image(id).shape[:2], VOID, np.uint8)

    def file(self, id: str, kind: Literal["image", "mask"]) -> str:
        return str(self._files[id])


@dataclass(frozen=True, eq=False)
class Views:
    """Images of old classes, and how their labels are mapped."""

    source: Source
    ids: tuple[str, ...]
    table: Array
    labelled: bool
    description: str

    def channels(self, id: str) -> set[int]:
        """The channels that the mask of an image labels."""
        classes = self.source.labelled(id)
        named = range(len(self.source.classes)) if classes is None else classes
        return {int(self.table[c]) for c in named}


def views_of(parent: Parent, images: Path | None) -> Views | None:
    """Images of the model's classes: those in a folder, or the training images of the run if they are available."""
    channels = parent.scenario[-1].channels
    names = [parent.scenario.classes[c] for c in channels]
    table = np.full(256, VOID, np.uint8)
    if images is not None:
        source = _data_set(images)
        ids = () if source is None else (*source.ids("train"), *source.ids("val"))
        if source is not None and set(source.classes[1:]) & set(names[1:]):
            table[: len(source.classes)] = [names.index(n) if n in names[1:] else 0 for n in source.classes]
            return Views(source, ids, table, True, f"labelled images in {images}")
        if source is not None:
            files, masks = {id: Path(source.file(id, "image")) for id in ids}, 0
        else:
            files, masks = _pictures(images)
        pictures, without = Pictures(files), f" (without {quantity(masks, 'mask')})" if masks else ""
        said = f"pictures in {images}{without}, labelled by the model"
        return Views(pictures, pictures.ids("train"), table, False, said)
    parts = [replace(part, train=("train",), val=()) for part in parent.parts if part.available]
    source = Extended(parent.scenario.classes, parts)
    available = set(source.ids("train"))
    if not available.intersection(parent.scenario[0].train_ids):  # later steps do not label the classes of step 0
        return None
    ids = tuple(sorted({id for step in parent.scenario for id in step.train_ids if id in available}))
    table[: len(parent.scenario.classes)] = 0
    table[list(channels)] = range(len(channels))
    return Views(source, ids, table, True, "training images of the run")


def _data_set(folder: Path) -> Source | None:
    """The folder as a data set, if it is one."""
    if not folder.is_dir():
        raise DataError(f"--images {folder}: no such folder.")
    try:
        return open_source("folder", folder, Config())
    except SdrsegError:
        return None


def _pictures(folder: Path) -> tuple[dict[str, Path], int]:
    """All pictures in a folder by id, without the masks if it has images and masks, but no list of classes; and the
    number of these masks."""
    masks: set[Path] = set()
    with suppress(DataError):
        for part, folders in find_layout(folder).parts.items():
            found = find_pairs(folders, folder, f"{part}/").masks.values()
            masks.update(file for file in found if folders[0] != folders[1] or _has_values(file))
    pictures, _ = find_by_id(folder, PICTURE_SUFFIXES)
    pictures = {id: file for id, file in pictures.items() if file not in masks}
    if not pictures:
        raise DataError(f"--images {folder}: no pictures in this folder.")
    if not masks and (other := named(folder, MASKS, pictures=True)):
        raise DataError(f"--images {folder}: {other.name} would be taken for photographs. Name a folder without masks.")
    return pictures, len(masks)


def _has_values(file: Path) -> bool:
    """Whether a picture next to another one has one value per pixel, as a mask; it may also be a second photograph."""
    with suppress(OSError, ValueError), Image.open(file) as picture:
        return picture.mode in ("1", "L", "P", "I", "I;16")
    return False


def remembered(parent: Parent) -> set[str]:
    """What the model has kept of its classes: prototypes, if all classes have one, and the memory of LAPS."""
    memory = parent.folder.load_memory(parent.step)
    found = {name.partition(".")[0] for name in memory} & KEPT
    seen = memory.get("prototypes.image.seen")
    shown = [c["channel"] for c in parent.meta["classes"] if c["channel"] > 0 and not c.get("removed")]
    if seen is not None and not bool((seen[shown] > 0).all()):  # LAPS does not update prototypes
        found.discard("prototypes")
    return found


def needed(method: Method) -> set[str]:
    """What the method uses of the old classes, as `remembered` names it."""
    surveys = type(method).survey is not Method.survey
    compares = any(method.latent.weights()[name] > 0 for name in ("pm", "attract", "repel"))
    return ({"memory"} if surveys else set()) | ({"prototypes"} if compares else set())


def make_memory(job: Job, parent: Parent, views: Views | None, folder: Path) -> dict[str, Any]:
    """Write memory.safetensors: what the model has, what the method finds in `views`, without silenced channels."""
    memory = parent.folder.load_memory(parent.step)
    if views is not None:
        lost = KEPT - remembered(parent)
        memory = _surveyed(job, parent, views) | {n: t for n, t in memory.items() if n.partition(".")[0] not in lost}
    entry = {"file": "memory.safetensors", "sha256": ""}
    if job.processes.rank == 0:
        entry["sha256"] = save_tensors(folder / "memory.safetensors", forgotten(memory, job.silenced))
    return entry


def _surveyed(job: Job, parent: Parent, views: Views) -> dict[str, Tensor]:
    """Let the method survey images as after a step 0 with all these classes."""
    config = job.config.of_step(parent.step + 1)
    model = parent.folder.load_step(parent.step)[1]
    job.display.say(f"remembering old classes from {quantity(len(views.ids), 'image')}: {views.description}")
    batches = survey_batches(views.source, views.ids, views.table, config, share=job.share)
    surveyor = partial(_Survey, views=views, decision=parent.decision)
    found, _ = survey_with(model, job, config, len(parent.classes), batches, surveyor)
    return {name: t for name, t in found.items() if name.startswith(("memory.", "prototypes."))}


class _Survey:
    """A method that also updates prototypes during a survey, with predictions as labels if there are none.

    If a mask does not label all classes, unlabelled pixels that are predicted as one of the others are left out: they
    are not background.
    """

    def __init__(self, method: Method, views: Views, decision: Decision):
        self._method, self._views, self._decision = method, views, decision

    def __getattr__(self, name: str) -> Any:
        return getattr(self._method, name)

    def wants_survey(self, when: str) -> bool:
        return True

    def survey(self, batch: Batch, student: Any, teacher: Any) -> None:
        predicted = decide(student.logits.float(), self._decision)
        if self._views.labelled:
            labels = batch.labels.masked_fill((batch.labels == 0) & self._hidden(batch.ids, predicted), VOID)
        else:
            labels = predicted.to(batch.labels.dtype).masked_fill(batch.padding, VOID)
        batch = replace(batch, labels=labels)
        self._method.latent.terms(batch, student.features, None)
        self._method.survey(batch, student, teacher)

    def _hidden(self, ids: Sequence[str], predicted: Tensor) -> Tensor:
        """(B, H, W): whether the predicted class is one that the mask of the image does not label."""
        labelled = [predicted.new_tensor(sorted({0, *self._views.channels(id)})) for id in ids]
        return torch.stack([~torch.isin(one, known) for one, known in zip(predicted, labelled, strict=True)])
