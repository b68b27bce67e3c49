"""Evaluation of steps and runs: one confusion matrix on the device, every image exactly once over all processes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torchmetrics.functional.classification import multiclass_confusion_matrix

from sdrseg.datasets.augment import normalise
from sdrseg.datasets.batches import Batch, Batches, eval_batches
from sdrseg.datasets.extended import Extended
from sdrseg.datasets.index import map_with_threads
from sdrseg.decision import Decision, decide
from sdrseg.distributed import Processes
from sdrseg.engine.base_scores import score_file, shared_score
from sdrseg.engine.folder import RunFolder, second_score
from sdrseg.engine.job import TEST_IMAGES, Job
from sdrseg.engine.preview import PICTURES, predicted_pictures
from sdrseg.engine.saved import open_step, scoring_config
from sdrseg.errors import DataError, SdrsegError, UsageError
from sdrseg.files import write_json
from sdrseg.labels import VOID
from sdrseg.metrics import StepScore, as_background, summary, with_known_background
from sdrseg.network import Network
from sdrseg.scenario import Step
from sdrseg.terminal import progress
from sdrseg.threads import adapt
from sdrseg.tiles import SIDES, logit_strips

if TYPE_CHECKING:
    from lightning.fabric import Fabric

LARGEST = SIDES[0] ** 2
"""Images with more pixels are scored in strips."""
SMALL = 512**2
"""Images with up to this many pixels are scored in batches of eval.batch_size, larger ones in smaller batches."""


@torch.inference_mode()
def confusion(
    fabric: Fabric, network: Network, batches: Batches, classes: int, decision: Decision = "softmax"
) -> NDArray[np.int64]:
    """(K, K) pixels: row = truth, column = prediction. Void and padding are not counted."""
    was_training = network.training
    network.eval()
    total = torch.zeros(classes, classes, dtype=torch.int64, device=fabric.device)
    for batch in batches:
        adapt()
        for part in labels_and_logits(fabric, network, batch.to(fabric.device)):
            total += multiclass_confusion_matrix(
                decide(part.logits, decision), part.labels.long(), classes, ignore_index=VOID, validate_args=False
            )
    network.train(was_training)
    result: NDArray[np.int64] = Processes().sum(total).cpu().numpy()
    return result


class Labelled(NamedTuple):
    """Some images of a batch, or a strip of one: labels, padding and logits."""

    first: int  # the position of the first image in the batch
    labels: Tensor
    padding: Tensor
    logits: Tensor


def labels_and_logits(fabric: Fabric, network: Network, batch: Batch) -> Iterator[Labelled]:
    """Labels and logits of a batch. Very large images come in strips, as in `sdrseg predict`."""

    def forward(images: Tensor) -> Tensor:
        with fabric.autocast():
            logits: Tensor = network(normalise(images)).logits
        return logits

    pixels = batch.images.shape[-2] * batch.images.shape[-1]
    if pixels <= LARGEST:
        size = len(batch.images) if pixels <= SMALL else max(1, 8 * SMALL // pixels)
        for first in range(0, len(batch.images), size):
            some = slice(first, first + size)
            yield Labelled(first, batch.labels[some], batch.padding[some], forward(batch.images[some]))
        return
    for number, (image, labels, padding) in enumerate(zip(batch.images, batch.labels, batch.padding, strict=True)):
        tile = SIDES[0]
        for top, logits in logit_strips(
            image, forward, tile=tile, overlap=tile // 4, multiple=network.multiple, batch_size=1
        ):
            rows = slice(top, top + logits.shape[1])
            yield Labelled(number, labels[None, rows], padding[None, rows], logits[None])


def score(
    job: Job,
    step: Step,
    network: Network,
    decision: Decision,
    transform: str | None = None,
    ids: Sequence[str] | None = None,
) -> StepScore:
    """The scores of a network on the images of a step. `transform`: replaces eval.transform; `ids`: only these images.

    Masks may label only some classes (`Source.labelled`); `with_known_background` and `StepScore` say what then counts.
    """
    config = job.config
    if transform is not None:
        config = replace(config, eval=replace(config.eval, transform=transform))  # type: ignore[arg-type]
    last = job.scenario[-1]
    sizes = job.indexes[step.test_split].size_by_id
    existing = sizes.keys() & {*last.test_ids, *step.test_ids}  # images of other steps may be gone
    cache = job.cache("score", step.test_split, sorted(existing))
    ids_by_labels: dict[frozenset[int] | None, list[str]] = {}
    for id in step.test_ids if ids is None else ids:
        ids_by_labels.setdefault(job.labelled_channels(step, id), []).append(id)
    channels = range(len(step.channels))
    matrix, complete = np.zeros((2, len(channels), len(channels)), np.int64)
    for labels, some in ids_by_labels.items():
        batches = eval_batches(
            job.source,
            some,
            sizes,
            step.test_table,
            config,
            share=job.share,
            cache=cache,
            multiple=network.multiple,
        )
        found = confusion(job.fabric, network, batches, len(channels), decision)
        matrix += with_known_background(found, labels)
        complete += found if labels is None else 0
    names = tuple(job.scenario.classes[c] for c in step.channels)
    labelled = frozenset().union(*(channels if labels is None else labels for labels in ids_by_labels))
    unknown = tuple(channel for channel in channels if channel not in labelled)
    removed = job.removed_channels(step)
    background = bool(step.test_table[0] == 0)
    matrix, complete = (as_background(one, removed, background) for one in (matrix, complete))
    of_some = complete if ids_by_labels.keys() - {None} else None
    return StepScore(step.number, names, len(job.scenario[0].channels), matrix, unknown, removed, of_some)


def require_held_out(job: Job) -> None:
    """If bad images are skipped, raise an error if a held-out one cannot be read.

    Held-out images replace the test images: scores without some of them could not be compared.
    """
    left = [step for step in job.scenario if not job.folder.has_metrics(step.number)]
    ids = sorted({id for step in left if step.test_split == "train" for id in step.test_ids})
    if job.config.run.on_bad_image == "stop" or not ids:
        return

    def problem(id: str) -> str | None:
        try:
            job.source.pair(id)
        except DataError as error:
            return str(error)
        return None

    with progress("reading held-out images") as report:
        wrong = [why for why in map_with_threads(problem, ids, report) if why is not None]
    if wrong:
        more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
        raise DataError(
            f"{wrong[0]} This image is held out{more} for scoring, and scored images are never skipped. "
            f"`sdrseg data` lists every problem. Repair or remove these files."
        )


Model = tuple[Network, Decision]


def score_saved(job: Job, step: Step, transform: str | None = None, model: Model | None = None) -> StepScore:
    """The scores of a step's saved model. `model`: this one, if it is open already."""
    job = replace(job, config=scoring_config(job.folder, step.number, job.config))
    return score(job, step, *(model or _open(job, step)), transform)


def _open(job: Job, step: Step) -> Model:
    network, decision = open_step(job.folder.step(step.number), job.config.net)
    return network.place_on(job.fabric.device), decision


def score_step(job: Job, step: Step) -> None:
    """Evaluate the saved model of a step and write metrics.json; some predictions go to the trackers."""
    file, model = score_file(job, step), cache(lambda: _open(job, step))
    if (result := shared_score(job, step, file)) is None:
        result = score_saved(job, step, model=model())
        if file is not None:
            with suppress(SdrsegError):  # a store that can only be read
                write_json(file, result.to_dict())
    if job.processes.rank == 0:
        if job.log.trackers:
            shown = predicted_pictures(job, step, *model(), PICTURES)
            job.log.trackers.pictures("image, truth, prediction", shown, step.number)
        found = result.to_dict()
        write_json(job.folder.step(step.number) / "metrics.json", {**found, "scored_on": job.scored_on})
        classes = {one["name"]: one["iou"] for one in found["classes"]}
        job.log.write("score", step=step.number, miou=result.miou(), classes=classes, scored_on=job.scored_on)
        job.display.scored(as_shown(job, step, result), job.oracle)


def as_shown(job: Job, step: Step, result: StepScore) -> StepScore:
    """A score as messages show it: in an extension, the classes of every earlier step are old, not only of step 0."""
    return replace(result, base=len(step.old)) if isinstance(job.source, Extended) and step.old else result


def score_also(job: Job) -> None:
    """Also score the last step with the transform of eval.also, if it differs and is not done yet."""
    transform, step = job.config.eval.also, job.scenario[-1]
    file = job.folder.step(step.number) / second_score(transform)
    if transform in ("none", job.config.eval.transform) or file.exists():
        return
    result = score_saved(job, step, transform)
    if job.processes.rank == 0:
        write_json(file, {**result.to_dict(), "scored_on": job.scored_on})
        job.log.write("score_also", step=step.number, transform=transform, miou=result.miou())
        percent = 100 * (result.miou()["all"] or 0)
        job.display.say(f"step {step.number}: mIoU with {transform} on {job.scored_on}: {percent:.1f}")


def summarise(job: Job, bound: dict[str, float | None] | None) -> dict[str, Any]:
    """Write summary.json from the scores of all steps."""
    numbers = range(len(job.scenario))
    scores = [StepScore.from_dict(job.folder.read_json(f"steps/{k}/metrics.json")) for k in numbers]
    result = {**summary(scores, bound), "scored_on": job.scored_on}
    if job.processes.rank == 0:
        write_json(job.folder.path / "summary.json", result)
    return result


def offline_iou(run: Path, wanted: str) -> dict[str, float | None]:
    """The IoU of each class by name after the last step of a run, which must be scored on the same images."""
    folder = RunFolder(run)
    done = folder.read_json("summary.json")
    if (found := done.get("scored_on", TEST_IMAGES)) != wanted:
        raise UsageError(
            f"--offline {run} is scored on {found}, but this run is scored on {wanted}. "
            f"Train both with the same train.holdout."
        )
    last = done["steps"] - 1
    return {c["name"]: c["iou"] for c in folder.read_json(f"steps/{last}/metrics.json")["classes"]}
