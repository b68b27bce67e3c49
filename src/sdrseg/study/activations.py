"""The share of uncertain activations of finished runs, measured once from their models and stored with the results."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sdrseg.errors import SdrsegError
from sdrseg.files import write_json
from sdrseg.reporting.collect import collect
from sdrseg.reporting.latent import BINS, normalised_counts, share_uncertain
from sdrseg.reporting.pictures import apply_models, choose, load_images, open_data
from sdrseg.scenario import find_source
from sdrseg.study.cell import Cell
from sdrseg.study.grid import Experiment

IMAGES = 100


def measure_run(path: Path, data: Path | None, images: int = IMAGES) -> dict[str, Any]:
    """The histogram of activations after the last step on test images, and the share of uncertain ones in per cent."""
    (run,) = collect([path])
    tests = open_data([run], data)
    chosen = load_images(run, tests.source, choose(run, tests, images).ids)
    counts = np.zeros(BINS)
    for output in apply_models(run, chosen, [run.last]):
        counts += normalised_counts(output.features.clamp_min(0), output.labels, len(run.all_names))
    shares = counts / max(counts.sum(), 1)
    return {"uncertain": 100 * share_uncertain(shares), "images": len(chosen), "histogram": shares.tolist()}


def with_activations(
    cells: Sequence[Cell], experiments: Iterable[Experiment], out: Path, data: Path | None
) -> tuple[list[Cell], tuple[str, ...]]:
    """The cells with the key `uncertain` where it is known or can be measured, and reasons why others lack it."""
    known: dict[str, float] = {}
    reasons: dict[str, None] = {}
    finished = {cell["config"] for cell in cells}
    for experiment in experiments:
        file = out / "activations" / f"{experiment.folder}.json"
        if experiment.hash not in finished:
            continue
        if not file.exists():
            run = out / "runs" / experiment.folder
            if not run.exists():
                reasons[f"Not measured where the run with its models is not in {out / 'runs'}."] = None
                continue
            try:
                write_json(file, measure_run(run, data))
            except SdrsegError as error:
                option = " (--data PATH)" if find_source(experiment.spec.source).needs_folder else ""
                reasons[f"Not measured, since it needs the models and the data{option}: {error}"] = None
                continue
        known[experiment.hash] = float(json.loads(file.read_text())["uncertain"])
    measured = [cell | {"uncertain": known[cell["config"]]} if cell["config"] in known else cell for cell in cells]
    return measured, tuple(reasons)
