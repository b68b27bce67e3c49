"""The charts of a report, each with a title and a text alternative."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from sdrseg.colours import hex_of
from sdrseg.errors import quantity
from sdrseg.reporting import charts, tables
from sdrseg.reporting.collect import RunRecord, finite
from sdrseg.reporting.latent import BINS, UNCERTAIN, Floats, Latent, box_of, logged, share_uncertain


def miou_panels(runs: Sequence[RunRecord]) -> list[dict[str, Any]]:
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
        if not ends or (group == "old" and all(c["new"] is None for run in runs for c in run.summary["miou_by_step"])):
            continue  # without new classes, old is the same as all
        every = max(1, round(last / 10))
        axes = charts.Axes(
            (-0.25, last + 0.25), (0, top), [(k, str(k)) for k in range(0, last + 1, every)], "step", "mIoU in %"
        )
        name = f"{title}: mean IoU in per cent by step. Final values: {', '.join(ends)}."
        result.append({"title": title, "chart": charts.lines(series, axes, name)})
    return result


def forgetting_panel(runs: Sequence[RunRecord]) -> dict[str, Any] | None:
    """Forgetting, in points, of each class that any run has known for more than one step."""
    names = max(runs, key=lambda run: run.last).names
    table: list[list[float | None]] = []
    for channel in range(len(names)):
        lost = [run.forgetting.by_class for run in runs]
        table.append([values[channel] if channel < len(values) else None for values in lost])
    rows = [(name, values) for name, values in zip(names, table, strict=True) if any(v is not None for v in values)]
    if not rows:
        return None
    scaled = [(name, [None if v is None else 100 * v for v in values]) for name, values in rows]
    mean = [f"{run.label} {100 * v:z.1f}" for run in runs if (v := run.forgetting.mean) is not None]
    name = f"Final forgetting of each class in points. Mean over foreground classes: {', '.join(mean)}."
    return {"chart": charts.dots(scaled, [run.label for run in runs], name), "rows": rows}


def sparsity_panels(runs: Sequence[RunRecord], latents: Sequence[Latent | None]) -> dict[str, Any] | None:
    """Hoyer's measure and active channels after each step, from the shown images or otherwise from the log."""
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
        chart = charts.lines(
            series, axes, f"{title} of the features by step. Final values: {ends}.", text_of="{:.3g}".format
        )
        result.append({"title": title, "chart": chart})
    width = max((latent.channels for latent in latents if latent is not None), default=0)
    return {"panels": result, "measured": measured, "width": width}


def histogram_panel(runs: Sequence[RunRecord], latents: Sequence[Latent | None]) -> dict[str, Any] | None:
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
    ticks = [(v / 5, f"{v / 5:g}") for v in range(6)]
    axes = charts.Axes((0, 1), (low, 1), ticks, "activation / class maximum", "share (log scale)", True)
    parts = []
    for one, latent in zip(series, [x for x in latents if x is not None and x.histogram is not None], strict=True):
        assert latent.histogram is not None
        parts.append(f"{one.label} {100 * share_uncertain(latent.histogram):.1f}\u00a0%")
    between = f"Between {UNCERTAIN[0]} and {UNCERTAIN[1]}: {', '.join(parts)}."
    name = f"Histogram of activations divided by the largest of their class. {between}"
    chart = charts.lines(series, axes, name, markers=False)
    negative = any(latent is not None and latent.negative for latent in latents)
    return {"chart": chart, "between": between, "negative": negative}


def latent_panels(run: RunRecord, latent: Latent | None, distances: Floats | None) -> dict[str, Any]:
    kept, names = run.kept, [run.names[c] for c in run.kept]
    heat, pairs = (None, []) if distances is None else tables.distances(run.label, names, distances[np.ix_(kept, kept)])
    result: dict[str, Any] = {"label": run.label, "distances": heat, "pairs": pairs, "panels": []}
    projection = None if latent is None else latent.projection
    if projection is not None:
        box = box_of(projection)
        colours = [hex_of(colour) for colour in run.colours]
        channels = projection.channels
        panels = zip(("before", "after"), (projection.before, projection.after), projection.points, strict=True)
        for when, step, points in panels:
            by_class = {int(c): points[channels == c].tolist() for c in sorted(set(channels.tolist()))}
            name = (
                f"{run.label}, {when} step {projection.after}: features of {quantity(len(points), 'cell')} of "
                f"{quantity(len(by_class), 'class')} on two principal components."
            )
            title = f"{when} step {projection.after} (model of step {step})"
            result["panels"].append({"title": title, "chart": charts.scatter(by_class, colours, box, name)})
        result["explained"] = projection.explained
        result["step"] = projection.after
    return result
