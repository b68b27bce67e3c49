"""Loss curves: one chart for each term, all steps one after the other, a line for each run."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from sdrseg.methods import METHODS
from sdrseg.methods.terms import TERMS
from sdrseg.reporting.charts import Axes, Series, lines, nice_range
from sdrseg.reporting.collect import RunRecord, finite

POINTS = 50  # of a curve in one step; if the log has more lines, neighbours are averaged
WIDE = 30.0  # values with a larger ratio are drawn on a logarithmic scale


def meaning(name: str, runs: Sequence[RunRecord] = ()) -> str:
    """What a term means, from the runs or, if they do not say, from the known methods; "" if these do not either."""
    of_methods = {term.name: term for method in METHODS.values() for term in method.own_terms}
    known = {"loss": "total, weighted"} | {n: term.summary for n, term in (of_methods | TERMS).items()}
    for run in runs:
        known |= run.identity["terms"] or {}
    return known.get(name, "")


def loss_panels(runs: Sequence[RunRecord]) -> list[dict[str, Any]]:
    """The charts, the total first. All steps have the same width, for any number of iterations."""
    terms = list(dict.fromkeys(term for run in runs for entry in run.log for term in entry["losses"]))
    terms.sort(key=lambda term: term != "loss")
    steps = max(run.steps for run in runs)
    panels = []
    for term in terms:
        series = []
        for number, run in enumerate(runs):
            x, y = _curve(run, term)
            if any(v is not None for v in y):
                series.append(Series(run.label, number, x, y))
        known = [v for one in series for v in one.y if v is not None]
        if not known:
            continue
        log = min(known) > 0 and max(known) / min(known) > WIDE
        span = (min(known), max(known)) if log else nice_range(known)
        every = max(1, round(steps / 8))
        ticks = [(k + 0.5, str(k)) for k in range(0, steps, every)]
        axes = Axes((0, steps), span, ticks, "step", "log scale" if log else "", log, range(1, steps))
        ends = ", ".join(f"{one.label} {one.y[-1]:.3g}" for one in series if one.y[-1] is not None)
        name = f"Loss term {term} in training, by step and iteration. Final values: {ends}."
        panels.append(
            {
                "term": term,
                "meaning": meaning(term, runs),
                "runs": [one.label for one in series],
                "chart": lines(series, axes, name, markers=False),
            }
        )
    return panels


def _curve(run: RunRecord, term: str) -> tuple[list[float], list[float | None]]:
    """Points of a term: x = step + fraction of its iterations, with a gap between steps."""
    xs: list[float] = []
    ys: list[float | None] = []
    for step in sorted({entry["step"] for entry in run.log}):
        found = [
            (step + entry["iteration"] / entry["iterations"], entry["losses"][term])
            for entry in run.log
            if entry["step"] == step and finite(entry["losses"].get(term))
        ]
        if not found:
            continue
        parts = min(POINTS, len(found))
        cuts = [len(found) * n // parts for n in range(parts + 1)]
        for a, b in pairwise(cuts):
            xs.append(sum(x for x, _ in found[a:b]) / (b - a))
            ys.append(sum(y for _, y in found[a:b]) / (b - a))
        xs.append(step + 1)
        ys.append(None)
    return xs[:-1], ys[:-1]
