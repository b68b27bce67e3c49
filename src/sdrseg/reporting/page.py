"""Renders the template. The resulting page needs no other file and no network."""

from __future__ import annotations

import hashlib
from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from sdrseg import __version__
from sdrseg.colours import LINES, hex_of, text_on
from sdrseg.errors import quantity
from sdrseg.reporting import MARK, charts, tables
from sdrseg.reporting.collect import RunRecord, command_line, scored_differently
from sdrseg.reporting.curves import loss_panels
from sdrseg.reporting.extension import Extension, photo_rows
from sdrseg.reporting.findings import figures, measures, sentence, unmeasured_classes, unmeasured_steps
from sdrseg.reporting.latent import Floats, Latent, Remembered
from sdrseg.reporting.panels import forgetting_panel, histogram_panel, latent_panels, miou_panels, sparsity_panels
from sdrseg.reporting.pictures import Row


@dataclass(eq=False)
class Gathered:
    """What a page shows besides the runs themselves. `notes` say what is missing and how to add it."""

    rows: list[Row] = field(default_factory=list)
    how_chosen: str = ""
    latents: list[Latent | None] = field(default_factory=list)
    prototypes: list[Floats | None] = field(default_factory=list)
    memories: list[Remembered | None] = field(default_factory=list)
    extensions: list[Extension] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def render(runs: Sequence[RunRecord], found: Gathered) -> str:
    """The whole page."""
    files = resources.files("sdrseg.reporting").joinpath("templates")
    script = files.joinpath("report.js").read_text(encoding="utf-8")
    environment = Environment(
        loader=PackageLoader("sdrseg.reporting"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["percent"] = lambda v: "–" if v is None else f"{100 * v:z.1f}"
    environment.filters["quantity"] = quantity
    environment.filters["one_decimal"] = "{:z.1f}".format
    first = max(runs, key=lambda run: run.last)
    colours = first.colours
    return environment.get_template("report.html.j2").render(
        mark=MARK,
        version=__version__,
        style=Markup(files.joinpath("report.css").read_text(encoding="utf-8")),
        script=Markup(script),
        script_hash=b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        lines=LINES,
        spec=runs[0].identity["spec"],
        runs=[_run(number, run) for number, run in enumerate(runs)],
        steps=_steps(first),
        last=first.last,
        classes=[
            {"channel": c, "name": name, "colour": hex_of(colours[c]), "ink": text_on(colours[c])}
            for c, name in enumerate(first.all_names)
            if c not in first.scores[-1].removed
        ],
        measures=measures(runs),
        figures=figures(runs),
        sentence=sentence(runs),
        unmeasured_classes=unmeasured_classes(runs),
        unmeasured_steps=unmeasured_steps(runs),
        scored_differently=scored_differently(runs),
        miou_panels=miou_panels(runs),
        forgetting=forgetting_panel(runs),
        losses=loss_panels(runs),
        sparsity=sparsity_panels(runs, found.latents),
        histogram=histogram_panel(runs, found.latents),
        latent=[
            latent_panels(run, latent, distances)
            for run, latent, distances in zip(runs, found.latents, found.prototypes, strict=True)
        ],
        memories=[(run.label, memory) for run, memory in zip(runs, found.memories, strict=True) if memory],
        found=found,
        photos=photo_rows(found.rows, found.extensions),
        settings=_settings(runs),
    )


def _run(number: int, run: RunRecord) -> dict[str, Any]:
    kept, names = run.kept, [run.names[c] for c in run.kept]
    heat, errors = tables.confusion(run.label, names, run.scores[-1].by_truth[np.ix_(kept, kept)])
    base = sum(c < run.scores[0].base for c in kept)
    by_step = [run.summary["class_by_step"][c] for c in kept]
    return {
        "number": number,
        "label": run.label,
        "swatch": charts.swatch(number),
        "path": str(run.path),
        "last": run.last,
        "finished": run.finished,
        "total": run.steps,
        "course": run.summary["miou_by_step"],
        "heat": tables.class_by_step(run.label, names, by_step, base),
        "confusion": heat,
        "errors": errors,
        "command": command_line(run),
        "identity": run.identity,
        "environment": run.environment,
        "hashes": [{"step": m["step"], "base": m.get("base"), **m["files"]} for m in run.metas],
    }


def _steps(run: RunRecord) -> list[dict[str, Any]]:
    names = run.scenario["classes"]
    return [
        {
            "number": step["number"],
            "new": [names[c] for c in step["new"]],
            "train": len(step["train_ids"]),
            "test": len(step["test_ids"]),
        }
        for step in run.scenario["steps"]
    ]


def _settings(runs: Sequence[RunRecord]) -> list[dict[str, Any]]:
    """Every setting of every run, and whether it differs; one that affects nothing counts as the same."""
    rows: list[tuple[str, list[Any]]] = [
        (key, [run.identity[key] for run in runs]) for key in ("method", "preset", "sdrseg")
    ]
    chosen = [{s.key: s.value for s in run.config.settings()} for run in runs]
    nothing = {s.key for run in runs for s in run.config.settings() if s.affects == "nothing"}
    keys = dict.fromkeys(key for values in chosen for key in values)  # a method may have settings of its own
    rows += [(key, [values.get(key, "") for values in chosen]) for key in keys]
    shown = [(key, list(map(str, values))) for key, values in rows]
    return [{"key": k, "values": v, "differs": k not in nothing and len(set(v)) > 1} for k, v in shown]
