"""The scores of stored bases: runs that share a model of step 0 share its scores on the same images."""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from functools import partial
from pathlib import Path

import torch

from sdrseg.datasets.extended import Extended
from sdrseg.datasets.index import map_with_threads
from sdrseg.datasets.source import Source
from sdrseg.engine.folder import read_meta
from sdrseg.engine.job import Job, device_name
from sdrseg.metrics import StepScore
from sdrseg.scenario import Step

VERSION = 1
"""Version of how a model is scored; changes that no setting records increment it."""


def score_file(job: Job, step: Step) -> Path | None:
    """The file for the score of this model on these images, or None if it is not a base of the store.

    Its name is a hash of what the score depends on, the images, the device and the version of torch included.
    """
    if job.processes.rank > 0 or step.number > 0 or isinstance(job.source, Extended):
        return None
    meta, key = read_meta(job.folder.step(0)), job.base[2]
    if meta.get("base") != key or not job.bases.has(key):
        return None
    config, masks = job.config, job.indexes[step.test_split].digest_by_id
    facts = [VERSION, meta["files"]["model"]["sha256"], meta["decision"], config.eval.transform, config.data.cache]
    facts += [config.eval.batch_size, config.run.precision, job.processes.world]
    facts += [device_name(job.fabric.device), torch.__version__]
    digest = hashlib.sha256(json.dumps(facts).encode())
    digest.update(step.test_table.tobytes())
    images = map_with_threads(partial(_content, job.source), step.test_ids)
    for id, content in zip(step.test_ids, images, strict=True):
        digest.update(f"{id} {masks[id]} {content}\0".encode())
    return job.bases.folder / key / f"score-{digest.hexdigest()[:24]}.json"


def _content(source: Source, id: str) -> str:
    try:
        content = source.image_content(id)
    except OSError:
        content = source.image(id).tobytes()  # this names the file that cannot be read
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def shared_score(job: Job, step: Step, file: Path | None) -> StepScore | None:
    """The score of the model of step 0, if another run has saved it in this file."""
    saved = None
    if file is not None:
        with suppress(OSError, ValueError):
            saved = json.loads(file.read_text())
    saved = job.fabric.broadcast(saved)  # only the first process has the file
    try:
        score = StepScore.from_dict(saved)
    except (KeyError, TypeError, ValueError):
        return None
    names, k = tuple(job.scenario.classes[c] for c in step.channels), len(step.channels)
    plain = (score.names, score.confusion.shape, score.unknown, score.removed) == (names, (k, k), (), ())
    return score if plain and score.complete is None and (score.confusion >= 0).all() else None
