"""The page: everything that was found, put into the template. The result needs no other file and no network."""

from __future__ import annotations

import hashlib
from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from sdrseg import __version__
from sdrseg.report import charts, tables
from sdrseg.report.collect import RunRecord, command_line, finite, scored_differently
from sdrseg.report.colours import LINES, class_colours, hex_of, text_on
from sdrseg.report.curves import loss_panels
from sdrseg.report.findings import figures, measures, sentence
from sdrseg.report.latent import BINS, Floats, Latent, box_of, logged
from sdrseg.report.pictures import Row

MARK = "sdrseg report"
"""Stands in the head of every report, so that one of ours may be replaced and nobody else's file."""


@dataclass(eq=False)
class Gathered:
    """What goes into a page beside the runs themselves. `notes` say what is missing, and how to get it."""

    rows: list[Row] = field(default_factory=list)
    how_chosen: str = ""
    latents: list[Latent | None] = field(default_factory=list)
    prototypes: list[Floats | None] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def render(runs: Sequence[RunRecord], found: Gathered) -> str:
    """The whole page."""
    files = resources.files("sdrseg.report").joinpath("templates")
    script = files.joinpath("report.js").read_text(encoding="utf-8")
    environment = Environment(
        loader=PackageLoader("sdrseg.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["percent"] = lambda v: "–" if v is None else f"{100 * v:.1f}"
    first = max(runs, key=lambda run: run.last)
    colours = class_colours(len(first.all_names))
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
        ],
        measures=measures(runs),
        figures=figures(runs),
        sentence=sentence(runs),
        scored_differently=scored_differently(runs),
        courses=_courses(runs),
        forgetting=_forgetting(runs),
        losses=loss_panels(runs),
        sparsity=_sparsity(runs, found.latents),
        histogram=_histogram(runs, found.latents),
        latent=[_latent(run, *pair) for run, *pair in zip(runs, found.latents, found.prototypes, strict=True)],
        found=found,
        settings=_settings(runs),
    )


def _run(number: int, run: RunRecord) -> dict[str, Any]:
    heat, errors = tables.confusion(run.label, run.names, run.scores[-1].confusion)
    base = run.scores[0].base
    return {
        "number": number,
        "label": run.label,
        "swatch": charts.swatch(number),
        "path": str(run.path),
        "last": run.last,
        "finished": run.finished,
        "total": run.steps,
        "course": run.summary["miou_by_step"],
        "heat": tables.class_by_step(run.label, run.names, run.summary["class_by_step"], base),
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


def _courses(runs: Sequence[RunRecord]) -> list[dict[str, Any]]:
    """A chart for old, new and all classes."""
    titles = {"old": "Old classes (step 0)", "new": "New classes (later steps)", "all": "All classes"}
    values = [c[g] for run in runs for c in run.summary["miou_by_step"] for g in titles if c[g] is not None]
    top = charts.nice_range([100 * v for v in values] or [1.0])[1]
    last = max(run.steps for run in runs) - 1
    result = []
    for group, title in titles.items():
        series = [
            charts.Series(
                run.label,
                number,
                range(len(run.scores)),
                [None if c[group] is None else 100 * c[group] for c in run.summary["miou_by_step"]],
            )
            for number, run in enumerate(runs)
        ]
        ends = [f"{s.label} {v:.1f}" for s in series if (v := s.y[-1]) is not None]
        if not ends:
            continue
        every = max(1, round(last / 10))
        axes = charts.Axes(
            (-0.25, last + 0.25), (0, top), [(k, str(k)) for k in range(0, last + 1, every)], "step", "mIoU in %"
        )
        name = f"{title}: mean IoU in per cent by step. At the end: {', '.join(ends)}."
        result.append({"title": title, "chart": charts.lines(series, axes, name)})
    return result


def _forgetting(runs: Sequence[RunRecord]) -> dict[str, Any] | None:
    """Of each class that any run has known for longer than one step, in points."""
    names = max(runs, key=lambda run: run.last).names
    table: list[list[float | None]] = []
    for channel in range(len(names)):
        lost = [run.summary["forgetting"]["by_class"] for run in runs]
        table.append([rows[channel][-1] if channel < len(rows) else None for rows in lost])
    rows = [(name, values) for name, values in zip(names, table, strict=True) if any(v is not None for v in values)]
    if not rows:
        return None
    scaled = [(name, [None if v is None else 100 * v for v in values]) for name, values in rows]
    mean = [f"{run.label} {100 * v:.1f}" for run in runs if (v := run.summary["forgetting"]["final"]) is not None]
    name = f"Forgetting of each class in points at the end. Mean over foreground classes: {', '.join(mean)}."
    return {"chart": charts.dots(scaled, [run.label for run in runs], name), "rows": rows}


def _sparsity(runs: Sequence[RunRecord], latents: Sequence[Latent | None]) -> dict[str, Any] | None:
    """Hoyer's measure and active channels after each step: of the shown images, or else of the log."""
    measured = all(latent is not None for latent in latents)
    result = []
    for key, metric, title in (("hoyer", "hoyer", "Hoyer sparsity"), ("active", "active_channels", "Active channels")):
        series = []
        for number, (run, latent) in enumerate(zip(runs, latents, strict=True)):
            values = getattr(latent, key) if measured else logged(run, metric)
            series.append(charts.Series(run.label, number, range(len(values)), values))
        known = [v for s in series for v in s.y if v is not None and finite(v)]
        if not known:
            return None
        last = max(run.steps for run in runs) - 1
        span = (0.0, 1.0) if key == "hoyer" else charts.nice_range(known)
        ticks = [(k, str(k)) for k in range(0, last + 1, max(1, round(last / 10)))]
        axes = charts.Axes((-0.25, last + 0.25), span, ticks, "step", title)
        ends = ", ".join(f"{s.label} {s.y[-1]:.3g}" for s in series if s.y[-1] is not None)
        chart = charts.lines(series, axes, f"{title} of the features by step. At the end: {ends}.", say="{:.3g}".format)
        result.append({"title": title, "chart": chart})
    width = max((latent.channels for latent in latents if latent is not None), default=0)
    return {"panels": result, "measured": measured, "width": width}


def _histogram(runs: Sequence[RunRecord], latents: Sequence[Latent | None]) -> dict[str, Any] | None:
    middles = [(b + 0.5) / BINS for b in range(BINS)]
    series = [
        charts.Series(run.label, number, middles, [v if v > 0 else None for v in latent.histogram.tolist()])
        for number, (run, latent) in enumerate(zip(runs, latents, strict=True))
        if latent is not None and latent.histogram is not None
    ]
    known = [v for s in series for v in s.y if v is not None]
    if not known:
        return None
    low = 10.0 ** max(-6, int(f"{min(known):e}".split("e")[1]))
    axes = charts.Axes((0, 1), (low, 1), [(v / 5, f"{v / 5:g}") for v in range(6)], "activation / class maximum", "share", True)
    parts = []
    for one, latent in zip(series, [x for x in latents if x is not None and x.histogram is not None], strict=True):
        assert latent.histogram is not None
        middle = sum(v for v, x in zip(latent.histogram.tolist(), middles, strict=True) if 0.3 <= x <= 0.85)
        parts.append(f"{one.label} {100 * middle:.1f} %")
    name = f"Histogram of activations divided by the largest of their class. Between 0.3 and 0.85: {', '.join(parts)}."
    chart = charts.lines(series, axes, name, markers=False)
    negative = any(latent is not None and latent.negative for latent in latents)
    return {"chart": chart, "middle": parts, "negative": negative}


def _latent(run: RunRecord, latent: Latent | None, apart: Floats | None) -> dict[str, Any]:
    heat, pairs = (None, []) if apart is None else tables.distances(run.label, run.names, apart)
    result: dict[str, Any] = {"label": run.label, "distances": heat, "pairs": pairs, "panels": []}
    projection = None if latent is None else latent.projection
    if projection is not None:
        box = box_of([projection])
        colours = [hex_of(c) for c in class_colours(len(run.all_names))]
        for when, step, points, channels in zip(
            ("before", "after"),
            (projection.before, projection.after),
            projection.points,
            projection.channels,
            strict=True,
        ):
            by_class = {int(c): points[channels == c].tolist() for c in sorted(set(channels.tolist()))}
            name = (
                f"{run.label}, {when} step {projection.after}: features of {len(points)} cells of {len(by_class)} "
                f"classes on two principal components."
            )
            title = f"{when} step {projection.after} (model of step {step})"
            result["panels"].append({"title": title, "chart": charts.scatter(by_class, colours, box, name)})
        result["explained"] = projection.explained
        result["step"] = projection.after
    return result


def _settings(runs: Sequence[RunRecord]) -> list[dict[str, Any]]:
    """Every setting of every run, and whether they differ."""
    rows: list[tuple[str, list[Any]]] = [
        (key, [run.identity[key] for run in runs]) for key in ("method", "preset", "sdrseg")
    ]
    dicts = [run.config.to_dict() for run in runs]
    rows += [
        (f"{section}.{key}", [values[section][key] for values in dicts])
        for section, keys in dicts[0].items()
        for key in keys
    ]
    return [
        {"key": key, "values": [str(v) for v in values], "differs": len({str(v) for v in values}) > 1}
        for key, values in rows
    ]
