"""`sdrseg tune`: its output and plots."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.ticker import NullFormatter

from sdrseg.config import write_setting
from sdrseg.study.decay import stability_decay
from sdrseg.study.figures import COLUMN, PAGE, figure, legend_below, line_style, save
from sdrseg.study.ranges import default_ranges, parse_range
from sdrseg.study.tune import Search, search_ranges
from sdrseg.terminal import console, print_json, print_table


def tune(
    search: Search,
    *,
    ranges: Sequence[str],
    published: bool,
    trials: int | None,
    minutes: float | None,
    json: bool,
) -> None:
    """Search, then show the trials, the chosen values and a command that trains with them."""
    with search.interruption:
        if ranges or published:
            usual = search.config()
            chosen = [parse_range(text, usual) for text in ranges] or default_ranges(usual)
            result = search_ranges(search, chosen, trials, minutes)
        else:
            result = stability_decay(search, trials, minutes)
    plots = draw_trials(result, search.out / "tune")
    command = train_command(search, result["chosen"])
    if json:
        print_json({**result, "command": command, "plots": [str(file) for file in plots]})
        return
    rows = [
        [trial["stage"], _values_text(trial["values"]), "–" if trial["score"] is None else f"{trial['score']:.1f}"]
        for trial in result["trials"]
    ]
    print_table(f"{result['strategy']}; {result['scored']}", ["stage", "values", "mIoU"], rows)
    lines = [f"plots: {', '.join(map(str, plots))}"]
    if result["chosen"]:
        lines = [f"chosen: {_values_text(result['chosen'])}", *lines, f"train with these values: {command}"]
    for line in lines:
        console().print(line, soft_wrap=True)


def _values_text(values: Mapping[str, Any]) -> str:
    parts = {key: f"{value:.4g}" if isinstance(value, float) else str(value) for key, value in values.items()}
    return ", ".join(f"{key}={part}" for key, part in parts.items())


def train_command(search: Search, chosen: Mapping[str, Any]) -> str:
    """A command that trains with the chosen values, scored on the test images."""
    args = ["sdrseg", "train", search.spec, "--method", search.method]
    args += ["--preset", search.preset] if search.preset != "default" else []
    args += ["--data", str(search.data)] if search.data is not None else []
    args += ["--bases", str(search.bases)] if search.bases is not None else []
    for key, value in {**search.settings, **chosen}.items():
        args += ["--set", write_setting(key, value)]
    return shlex.join([*args, "--out", "RUN"])


def draw_trials(result: Mapping[str, Any], out: Path) -> list[Path]:
    """Plot the score against each value that was varied; with more trials the plots are drawn again, as tune.json."""
    trials = [trial for trial in result["trials"] if trial["score"] is not None]
    keys = list(dict.fromkeys(key for trial in trials for key in trial["values"]))
    stages = list(dict.fromkeys(trial["stage"] for trial in trials))
    width = min(PAGE, max(COLUMN, 2.3 * len(keys)))
    with figure(width, 2.0) as made:
        axes = made.subplots(1, max(1, len(keys)), squeeze=False, sharey=True)[0]
        for axis, key in zip(axes, keys, strict=False):
            for number, stage in enumerate(stages):
                points = [(t["values"][key], t["score"]) for t in trials if t["stage"] == stage and key in t["values"]]
                if points:
                    values, scores = zip(*points, strict=True)
                    axis.plot(values, scores, label=stage, **{**line_style(number), "linestyle": ""})
            known = [t["values"][key] for t in trials if key in t["values"]]
            if all(isinstance(v, int | float) and v > 0 for v in known) and max(known) > 10 * min(known):
                low, high = math.floor(math.log10(min(known))), math.ceil(math.log10(max(known)))
                axis.set(xscale="log", xlim=(0.8 * 10**low, 1.25 * 10**high))  # with labels at whole decades only
                axis.xaxis.set_minor_formatter(NullFormatter())
            axis.set_xlabel(key)
        axes[0].set_ylabel("mIoU (%)" + (", ORACLE" if result["oracle"] else ""))
        legend_below(made, *axes[0].get_legend_handles_labels())
        return save(made, out, replace=True)
