"""Compares two runs that extend the same model: their last common step, and how each scores old classes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sdrseg.engine.folder import RunFolder
from sdrseg.errors import SdrsegError, UsageError
from sdrseg.extend.history import history
from sdrseg.extend.removed import name_before
from sdrseg.metrics import StepScore, mean_of
from sdrseg.scenario import Scenario


def branches(first: Path, second: Path) -> dict[str, Any]:
    """The steps that two runs share, and IoU of the classes of these steps: at the last shared step and at each end.

    Only pixels of these classes are counted, so that classes that only one run knows make no difference. A class that
    one run removed is left out: its pixels count as background in both or, if it was added again, not at all.
    """
    both = [history(run) for run in (first, second)]
    pairs = list(zip(*(found["steps"] for found in both), strict=False))
    shared = next((n for n, (a, b) in enumerate(pairs) if a["model"] != b["model"]), len(pairs))
    if shared == 0:
        raise UsageError(f"{first} and {second} have no step in common: their models of step 0 differ.")
    folders = [RunFolder(Path(found["run"])) for found in both]
    count = len(folders[0].read_json(f"steps/{shared - 1}/meta.json")["classes"])
    fork = min((_score(folder, shared - 1) for folder in folders), key=lambda score: len(score.removed))
    ends = [_score(folder, len(found["steps"]) - 1) for folder, found in zip(folders, both, strict=True)]
    removed = {c for score in ends for c in score.removed if c < count}
    dropped = removed - _as_background(folders, ends)
    values = [score.iou_over({*range(count)} - dropped)[:count] for score in (fork, *ends)]
    names, kept = fork.names, [c for c in range(1, count) if c not in removed]
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
        "new": [[n for c, n in enumerate(end.names) if c >= count and c not in end.removed] for end in ends],
        "removed": [[name_before(end.names[c]) for c in end.removed] for end in ends],
        "classes": rows,
        "mean": dict(zip(("fork", "first", "second"), means, strict=True)),
        "same_images": images[0] == images[1],
    }


def _as_background(folders: Sequence[RunFolder], ends: Sequence[StepScore]) -> set[int]:
    """Removed classes whose pixels are counted as background in a run, so they have to be counted in the other.

    Not those that were added again, whose pixels are in another row, nor any if background is not scored.
    """
    found = set()
    for folder, score in zip(folders, ends, strict=True):
        scenario = Scenario.from_dict(folder.read_json("scenario.json"), folder.path / "scenario.json")
        if scenario[-1].test_table[0] == 0:
            found |= {c for c in score.removed if name_before(score.names[c]) not in score.names}
    return found


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
