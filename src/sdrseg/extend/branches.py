"""Compares two runs that extend the same model: their last common step, and how each scores old classes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from sdrseg.engine.folder import RunFolder
from sdrseg.errors import SdrsegError, UsageError
from sdrseg.extend.history import history
from sdrseg.metrics import StepScore, mean_of


def branches(first: Path, second: Path) -> dict[str, Any]:
    """The steps that two runs share, and IoU of the classes of these steps: at the last shared step and at each end.

    Only pixels of these classes are counted, so that classes that only one run knows make no difference.
    """
    both = [history(run) for run in (first, second)]
    pairs = list(zip(*(found["steps"] for found in both), strict=False))
    shared = next((n for n, (a, b) in enumerate(pairs) if a["model"] != b["model"]), len(pairs))
    if shared == 0:
        raise UsageError(f"{first} and {second} have no step in common: their models of step 0 differ.")
    folders = [RunFolder(Path(found["run"])) for found in both]
    count = len(folders[0].read_json(f"steps/{shared - 1}/meta.json")["classes"])
    scores = [_score(folders[0], shared - 1)]
    scores += [_score(folder, len(found["steps"]) - 1) for folder, found in zip(folders, both, strict=True)]
    values = [score.iou_over(count)[:count] for score in scores]
    names, removed = scores[0].names, {c for score in scores for c in score.removed}
    kept = [c for c in range(1, count) if c not in removed]
    rows = [
        {"name": names[c], **{key: _number(v[c]) for key, v in zip(("fork", "first", "second"), values, strict=True)}}
        for c in kept
    ]
    scored = [c for c in kept if not any(np.isnan(v[c]) for v in values)]
    means = [mean_of(v, scored) for v in values]
    images = [_old_images(folder, shared) for folder in folders]
    return {
        "runs": [found["run"] for found in both],
        "shared_steps": shared,
        "new": [[name for step in found["steps"][shared:] for name in step["classes"]] for found in both],
        "classes": rows,
        "mean": dict(zip(("fork", "first", "second"), means, strict=True)),
        "same_images": images[0] == images[1],
    }


def _score(folder: RunFolder, step: int) -> StepScore:
    if not folder.has_metrics(step):
        raise SdrsegError(f"{folder.path}: step {step} is not scored yet. Wait for the run, or resume it.")
    return StepScore.from_dict(folder.read_json(f"steps/{step}/metrics.json"))


def _old_images(folder: RunFolder, shared: int) -> dict[str, str]:
    """The test images of the shared steps that the last step was also scored on, with the digests of their masks."""
    scenario = folder.read_json("scenario.json")
    digests, last = scenario["mask_digests"], set(scenario["steps"][-1]["test_ids"])
    ids = {id for step in scenario["steps"][:shared] for id in step["test_ids"]}
    return {id: digests.get(id, "") for id in sorted(ids & last)}


def _number(value: float) -> float | None:
    return None if np.isnan(value) else float(value)
