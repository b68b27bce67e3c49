"""After training: what each class kept and lost, and the worst images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from sdrseg.datasets.batches import eval_batches
from sdrseg.decision import decide
from sdrseg.engine.evaluate import labels_and_logits
from sdrseg.engine.job import Job
from sdrseg.engine.kept import agreement, merged_channels
from sdrseg.engine.saved import open_step
from sdrseg.extend.forecast import Forecast
from sdrseg.extend.plan import Plan
from sdrseg.extend.verdict import Limits, verdict
from sdrseg.files import write_json
from sdrseg.labels import VOID
from sdrseg.metrics import StepScore, as_background, iou_of_all, mean_of, with_known_background

EXTENSION = "extension.json"
MATRICES = ("confusion", "complete")
"""Confusion matrices in extension.json: on all old test images, and on those that label all classes."""
WORST = 6
"""How many images of each kind are saved for the report."""


def review(
    job: Job, plan: Plan, score: StepScore, before: Forecast | None, limits: Limits, command: Sequence[str]
) -> dict[str, Any]:
    """Compare the model with its parent on all test images, and write extension.json."""
    compared = _compare(job, plan)
    n_old, old_ids = len(plan.step.old), set(plan.parent.test_ids)
    kept = [c for c in range(n_old) if c not in score.removed]
    labelled = {id: job.labelled_channels(plan.step, id) for id in old_ids}
    known = [any(some is None or c in some for some in labelled.values()) for c in range(len(plan.step.channels))]
    both = _matrices(compared, old_ids, len(known))
    complete = _matrices(compared, {id for id, some in labelled.items() if some is None}, len(known))
    before_iou, after_iou = (
        np.where(known, iou_of_all(*matrices), np.nan) for matrices in zip(both, complete, strict=True)
    )
    names = list(score.names)
    old = [{"name": names[c], **_before_after(before_iou[c], after_iou[c])} for c in kept]
    measured = plan.counts_false_alarms
    new = [
        {"name": names[c], "iou": _points(score.iou[c]) if measured else None, "found": _points(score.accuracy[c])}
        for c in range(n_old, len(names))
    ]
    lost = mean_of(before_iou - after_iou, kept[1:])
    new_iou = mean_of(score.iou, range(n_old, len(names))) if measured else None
    result = {
        "step": plan.step.number,
        "old_images": len(old_ids),
        "held_out_images": plan.new.held_out,
        "unlabelled": plan.new.unlabelled,
        "old": old,
        "new": new,
        "forgetting": None if lost is None else 100 * lost,
        "new_iou": None if new_iou is None else 100 * new_iou,
        "kept_elsewhere": _agreement(compared, set(plan.new.val_ids)),
        "false_alarms_on_background": _alarms_on_background(complete[1], n_old),
        "regressions": _worst(compared, "regression"),
        "false_alarms": _worst(compared, "false_alarm"),
        "forecast": None if before is None else before.to_dict(),
        "command": list(command),
        **_as_lists(both, complete),
    }
    result["verdict"] = verdict(result, limits)
    write_json(job.folder.step(plan.step.number) / EXTENSION, result)
    return result


def without_classes(result: dict[str, Any], score: StepScore, n_old: int, background: bool) -> dict[str, Any]:
    """extension.json once the removed classes of this score count as background (`background`: whether that is scored).

    What only the models could tell becomes unknown. In files without matrices, so does what depends on pixels of the
    removed classes: the row of background or, where that is not scored, all rows of old classes.
    """
    channel = {name: c for c, name in enumerate(score.names)}
    old, new = ([one for one in result[key] if channel[one["name"]] not in score.removed] for key in ("old", "new"))
    for one in new:
        one["found"] = _points(score.accuracy[channel[one["name"]]])
        one["iou"] = None if one["iou"] is None else _points(score.iou[channel[one["name"]]])
    unknown = dict.fromkeys(("kept_elsewhere", "regressions", "false_alarms", "false_alarms_on_background"))
    result = {**result, **unknown, "old": old, "new": new}
    if not result.keys() >= {*MATRICES}:
        for one in old[:1] if background else old:
            one |= _before_after(np.nan, np.nan)
        return result
    both, complete = (
        [as_background(np.array(matrix, np.int64), score.removed, background) for matrix in result[key]]
        for key in MATRICES
    )
    before, after = (iou_of_all(*matrices) for matrices in zip(both, complete, strict=True))
    for one in old:
        c = channel[one["name"]]
        if c == 0 or one["lost"] is not None:  # the others were not measured
            one |= _before_after(before[c], after[c])
    return {
        **result,
        "false_alarms_on_background": _alarms_on_background(complete[1], n_old),
        **_as_lists(both, complete),
    }


def _as_lists(*of_each: Sequence[NDArray[np.int64]]) -> dict[str, Any]:
    """Confusion matrices of the models before and after, by their names in extension.json."""
    return {name: [matrix.tolist() for matrix in both] for name, both in zip(MATRICES, of_each, strict=True)}


def _before_after(before: float, after: float) -> dict[str, float | None]:
    return {"before": _points(before), "after": _points(after), "lost": _points(before - after)}


def _alarms_on_background(matrix: NDArray[np.int64], n_old: int) -> float | None:
    """The share of background that is predicted as a new class."""
    row = matrix[0]
    return float(row[n_old:].sum() / row.sum()) if row.sum() else None


@dataclass
class ImageComparison:
    """The predictions of both models for one image."""

    id: str
    matrices: tuple[NDArray[np.int64], NDArray[np.int64]]  # truth × prediction, parent's and new
    same: int  # pixels outside new classes on which both agree
    rest: int  # pixels outside new classes
    regression: float = 0.0  # share of pixels, correct pixels of old classes: parent minus new model
    false_alarm: float = 0.0  # share of pixels that the new model wrongly assigns to a new class


@torch.inference_mode()
def _compare(job: Job, plan: Plan) -> list[ImageComparison]:
    """Predict every test image with both models, in one process."""
    step, k = plan.step, len(plan.step.channels)
    number = step.number
    models = [open_step(job.folder.step(n), job.config.net) for n in (number - 1, number)]
    for network, _ in models:
        network.place_on(job.fabric.device).eval()
    sizes = plan.indexes["val"].size_by_id
    removed, merged = job.removed_channels(step), merged_channels(job, step)
    found: dict[str, ImageComparison] = {}
    multiple = models[0][0].multiple
    for batch in eval_batches(plan.source, step.test_ids, sizes, step.test_table, job.config, multiple=multiple):
        batch = batch.to(job.fabric.device)
        both = zip(*(labels_and_logits(job.fabric, network, batch) for network, _ in models), strict=True)
        for parts in both:
            predictions = [decide(part.logits.float(), d) for part, (_, d) in zip(parts, models, strict=True)]
            first, labels, padding, _ = parts[0]
            for offset, (truth, outside, before, after) in enumerate(zip(labels, padding, *predictions, strict=True)):
                id = batch.ids[first + offset]
                empty = np.zeros((k, k), np.int64), np.zeros((k, k), np.int64)
                one = found.setdefault(id, ImageComparison(id, empty, 0, 0))
                _add(one, truth, outside, before, after, len(step.old), merged)
    n_old = len(step.old)
    for one in found.values():
        pixels = max(1, int(one.matrices[0].sum()))
        labelled = job.labelled_channels(step, one.id)
        before, after = one.matrices = (
            as_background(with_known_background(one.matrices[0], labelled), removed, plan.source.score_background),
            as_background(with_known_background(one.matrices[1], labelled), removed, plan.source.score_background),
        )
        one.regression = float((np.trace(before[:n_old]) - np.trace(after[:n_old])) / pixels)
        one.false_alarm = float(after[:n_old, n_old:].sum() / pixels)
    return list(found.values())


def _add(one: ImageComparison, labels: Any, padding: Any, before: Any, after: Any, n_old: int, merged: Any) -> None:
    known, k = labels != VOID, len(merged)
    truth = labels[known].long()
    for matrix, predictions in zip(one.matrices, (before, after), strict=True):
        pairs = torch.bincount(truth * k + predictions[known], minlength=k * k)
        matrix += pairs.view(k, k).cpu().numpy()
    same, rest = agreement(labels, padding, before, after, n_old, merged).tolist()
    one.same += same
    one.rest += rest


def _matrices(compared: Sequence[ImageComparison], ids: set[str], k: int) -> list[NDArray[np.int64]]:
    """The parent's and the new matrix over some of the images."""
    return [sum((s.matrices[n] for s in compared if s.id in ids), np.zeros((k, k), np.int64)) for n in (0, 1)]


def _agreement(compared: Sequence[ImageComparison], ids: set[str]) -> float | None:
    """On the new images, the share of pixels outside the new classes on which both models agree."""
    rest = sum(s.rest for s in compared if s.id in ids)
    return sum(s.same for s in compared if s.id in ids) / rest if rest else None


def _worst(compared: Sequence[ImageComparison], kind: str) -> list[dict[str, Any]]:
    order = sorted(compared, key=lambda s: (-getattr(s, kind), s.id))
    return [{"id": s.id, "share": getattr(s, kind)} for s in order[:WORST] if getattr(s, kind) > 0]


def _points(value: float) -> float | None:
    return None if np.isnan(value) else float(100 * value)
