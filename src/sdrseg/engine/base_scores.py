"""The scores of stored bases: runs that share a model of step 0 share its scores on the same images."""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from sdrseg.datasets.extended import Extended
from sdrseg.engine.bases import files_digest
from sdrseg.engine.folder import read_meta
from sdrseg.engine.job import Job, device_name
from sdrseg.errors import SdrsegError
from sdrseg.files import write_json
from sdrseg.metrics import StepScore
from sdrseg.scenario import Step

VERSION = 1
"""Version of how a model is scored; changes that no setting records increment it."""


def shared_score(job: Job, step: Step) -> StepScore | None:
    """The score of the model of step 0, if another run has saved it beside the base."""
    saved = None
    if job.processes.rank == 0 and (file := _file(job, step)) is not None:
        with suppress(OSError, ValueError):
            saved = json.loads(file.read_text())
    saved = job.fabric.broadcast(saved)
    try:
        score = StepScore.from_dict(saved)
    except (KeyError, TypeError, ValueError):
        return None
    names, k = tuple(job.scenario.classes[c] for c in step.channels), len(step.channels)
    plain = (score.names, score.confusion.shape, score.unknown, score.removed) == (names, (k, k), (), ())
    return score if plain and score.complete is None and (score.confusion >= 0).all() else None


def share_score(job: Job, step: Step, score: StepScore) -> None:
    """Save the score of step 0 for other runs, if the store can be written."""
    if job.processes.rank == 0 and (file := _file(job, step)) is not None:
        with suppress(SdrsegError):
            write_json(file, score.to_dict())


def _file(job: Job, step: Step) -> Path | None:
    """The file for the score of this model on these images, or None if it is not a base of the store.

    Its name is a hash of everything that the score depends on, the model and the device included.
    """
    if step.number > 0 or isinstance(job.source, Extended):
        return None
    meta = read_meta(job.folder.step(0))
    key = job.base[2]
    if meta.get("base") != key or not job.bases.has(key):
        return None
    config, masks = job.config, job.indexes[step.test_split].digest_by_id
    facts: list[Any] = [VERSION, meta["files"]["model"]["sha256"], meta["decision"], config.eval.transform]
    facts += [config.eval.batch_size, config.run.precision, device_name(job.fabric.device), job.processes.world]
    digest = hashlib.sha256(json.dumps(facts).encode())
    digest.update("\0".join(f"{id} {masks[id]}" for id in step.test_ids).encode())
    digest.update(step.test_table.tobytes())
    digest.update(files_digest(job.source, step.test_ids).encode())
    return job.bases.folder / key / f"score-{digest.hexdigest()[:24]}.json"
