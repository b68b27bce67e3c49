"""The summary of a report: scores, the best of each column, and a sentence, all from the summaries of the runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from sdrseg.metrics import partly_measured, step_averaged
from sdrseg.reporting.collect import RunRecord


@dataclass(frozen=True)
class Measure:
    """A column of the summary."""

    key: str
    name: str
    meaning: str
    read: Callable[[RunRecord], float | None]
    higher_is_better: bool = True
    in_extended: str | None = None  # its meaning in extended runs, if another


@dataclass(frozen=True)
class Figure:
    """A score of a run, as stored in its files."""

    key: str
    value: float | None
    best: bool


def _miou(group: str) -> Callable[[RunRecord], float | None]:
    def read(run: RunRecord) -> float | None:
        value: float | None = run.summary["miou"][group]
        return value

    return read


MEASURES = (
    Measure("old", "old", "mean IoU of the classes of step 0, with background where it is scored", _miou("old")),
    Measure("new", "new", "mean IoU of the classes of all later steps", _miou("new")),
    Measure("all", "all", "mean IoU of all classes, with background where it is scored", _miou("all")),
    Measure("harmonic", "harmonic", "harmonic mean of old and new", _miou("harmonic")),
    Measure("averaged", "step-averaged", "mean over the steps of all", lambda run: step_averaged(run.scores)),
    Measure(
        "forgetting",
        "forgetting",
        "mean over foreground classes of the best IoU after an earlier step minus that at the end, in points",
        lambda run: run.forgetting.mean,
        False,
        "mean over the old foreground classes of the IoU before the last step minus that after it, on the old test "
        "images, in points, as in Kept and lost",
    ),
    Measure(
        "intransigence",
        "intransigence",
        "mean over foreground classes of the IoU of an offline run minus that when the class was learned, in points",
        lambda run: run.summary.get("intransigence", {}).get("mean"),
        False,
    ),
)


def measures(runs: Sequence[RunRecord]) -> list[Measure]:
    """The first three columns, and all others that have a value for at least one run."""
    shown = [m for n, m in enumerate(MEASURES) if n < 3 or any(m.read(run) is not None for run in runs)]
    return [replace(m, meaning=m.in_extended) if m.in_extended and _extended(runs) else m for m in shown]


def _extended(runs: Sequence[RunRecord]) -> bool:
    return any(run.extension is not None for run in runs)


def figures(runs: Sequence[RunRecord]) -> list[list[Figure]]:
    """The scores of each run. The best is chosen among the runs with the most finished steps, if they differ."""
    last = max(run.last for run in runs)
    rows: list[list[Figure]] = [[] for _ in runs]
    for measure in measures(runs):
        values = [measure.read(run) for run in runs]
        compared = [v for v, run in zip(values, runs, strict=True) if v is not None and run.last == last]
        top = (max if measure.higher_is_better else min)(compared) if len(set(compared)) > 1 else None
        for row, value, run in zip(rows, values, runs, strict=True):
            best = top is not None and value == top and run.last == last
            row.append(Figure(measure.key, value, best))
    return rows


def sentence(runs: Sequence[RunRecord]) -> str:
    """The scores in words."""
    last = max(run.last for run in runs)
    compared_runs = [run for run in runs if run.last == last and run.summary["miou"]["all"] is not None]
    if not compared_runs:
        return "No class of the test images was scored."
    ranked = sorted(compared_runs, key=lambda run: -run.summary["miou"]["all"])
    best = ranked[0]
    means = best.summary["miou"]
    when = f"after step {last}" + ("" if best.finished else f" of {best.steps - 1}")
    over, of = best.scores[-1].measured()["all"]
    classes = "all classes" if over == of else f"{over} of {of} classes"
    text = f"{best.label} has {_percent(means['all'])} mIoU over {classes} {when}"
    if means["new"] is not None and means["old"] is not None:
        text += f" ({_percent(means['old'])} over the old ones, {_percent(means['new'])} over the new ones)"
    if len(ranked) > 1:
        second = ranked[1]
        ahead = round(100 * (means["all"] - second.summary["miou"]["all"]), 1)
        gap = f"{ahead:.1f} points more than {second.label}" if ahead > 0 else f"the same as {second.label}"
        text += f", {gap}" + (f", the best of {len(ranked)} runs" if ahead > 0 and len(ranked) > 2 else "")
    text += "." if over == of else ". The others were not measured."
    known = [(run, value) for run in compared_runs if (value := run.forgetting.mean) is not None]
    if not known:
        return text
    run, value = min(known, key=lambda pair: pair[1])
    worst, most = max(known, key=lambda pair: pair[1])
    basis = "of its IoU on the old test images" if _extended(runs) else "of its best IoU"
    if round(100 * most, 1) > round(100 * value, 1):  # as they are shown
        text += (
            f" {run.label} forgets least: an old class {_loses(value)} {basis} on average; with {worst.label}, it "
            f"{_loses(most)}."
        )
    else:
        text += f" An old class {_loses(value)} {basis} on average."
    by_class = list(zip(best.forgetting.by_class, best.names, strict=True))[1:]  # without background, like the mean
    losses = [(v, name) for v, name in by_class if v is not None and v > 0]
    if losses:
        most_lost = max(losses)
        text += f" With {best.label}, {most_lost[1]} loses the most ({_points(most_lost[0])})."
    return text


def unmeasured_classes(runs: Sequence[RunRecord]) -> list[str]:
    """A sentence for each run whose final means are over some of its classes only."""
    counts = [(run, *run.scores[-1].measured()["all"]) for run in runs]
    return [
        f"{run.label}: the means are over {over} of {of} classes; the scored images label no other."
        for run, over, of in counts
        if 0 < over < of
    ]


def unmeasured_steps(runs: Sequence[RunRecord]) -> list[str]:
    """A sentence for each run with steps whose means are over fewer classes than those of other steps."""
    found = [(run, partly_measured(run.scores)) for run in runs]
    return [
        f"{run.label}: after {'step' if len(steps) == 1 else 'steps'} {', '.join(map(str, steps))} some of the known "
        f"classes were not measured, so these means cannot be compared with those of other steps."
        for run, steps in found
        if steps
    ]


def _percent(value: float) -> str:
    return f"{100 * value:z.1f}\u00a0%"


def _loses(value: float) -> str:
    """That a class loses some points; a negative loss is a gain."""
    gained = round(100 * value, 1) < 0
    return f"{'gains' if gained else 'loses'} {_points(-value if gained else value)}"


def _points(value: float) -> str:
    return f"{100 * value:z.1f}\u00a0points"
