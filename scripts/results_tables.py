"""The tables of docs/results.md, made from results/*.json (the summary.json of runs, one file a run).

    python scripts/results_tables.py            # print them
    python scripts/results_tables.py --write    # put them into docs/results.md, between the two marks there

A file is named DATASET-TASK-PROTOCOL-METHOD.json.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from pages import print_or_write, table

ROOT = Path(__file__).parent.parent
NAME = re.compile(r"(?P<scenario>\w+-[\w-]+-(disjoint|overlapped|sequential))-(?P<method>[\w+-]+)")

PAPER = {  # old, new, all after the last step, as printed in the paper's table
    "voc-15-1-disjoint": {
        "ft": (5.8, 4.9, 5.6),
        "lwf": (26.2, 15.1, 23.6),
        "lwf-mc": (6.9, 2.1, 5.7),
        "ilt": (6.7, 1.2, 5.4),
        "cil": (33.3, 15.9, 29.1),
        "mib": (39.0, 15.0, 33.3),
        "sdr": (59.2, 12.9, 48.1),
        "sdr+mib": (59.4, 14.3, 48.7),
        "offline": (77.5, 68.5, 75.4),
    }
}
KINDS = ("old", "new", "all")
Runs = dict[str, dict[str, Any]]  # summaries by method


def read_results(folder: Path = ROOT / "results") -> dict[str, Runs]:
    """The summaries by scenario and method."""
    found: dict[str, Runs] = {}
    for file in sorted(folder.glob("*.json")):
        if name := NAME.fullmatch(file.stem):
            found.setdefault(name["scenario"], {})[name["method"]] = json.loads(file.read_text())
    return found


def tables(results: dict[str, Runs]) -> str:
    """All tables, as Markdown."""
    return "\n".join(
        f"### {scenario}\n\n{_last_step(runs, PAPER.get(scenario, {}))}\n{_course(runs)}\n{_classes(runs)}"
        for scenario, runs in results.items()
    )


def _last_step(runs: Runs, paper: dict[str, tuple[float, ...]]) -> str:
    """Ours beside the paper's, methods in its order; "–" where a side has none."""
    rows = []
    for method in sorted({*runs, *paper}, key=lambda m: (m not in runs, [*paper, m].index(m))):
        ours: list[float | None] = [None] * 6
        if run := runs.get(method):
            ours = [*(run["miou"][kind] for kind in KINDS), run["miou"]["all_without_background"]]
            ours += [run["step_averaged_miou"], run["forgetting"]["final"]]
        printed = [f"{value:.1f}" for value in paper[method]] if method in paper else ["–"] * len(KINDS)
        rows.append([method, *map(_percent, ours), *printed])
    heads = ["method", *KINDS, "all, no background", "step-averaged", "forgetting"]
    return "After the last step:\n\n" + table([*heads, *(f"*paper: {kind}*" for kind in KINDS)], rows)


def _course(runs: Runs) -> str:
    rows = []
    for method, run in runs.items():
        rows += [[method, kind, *(_percent(step[kind]) for step in run["miou_by_step"])] for kind in KINDS]
        rows.append([method, "forgetting", *map(_percent, run["forgetting"]["by_step"])])
    steps = max(run["steps"] for run in runs.values())
    return "After each step:\n\n" + table(["method", "", *(f"step {k}" for k in range(steps))], rows)


def _classes(runs: Runs) -> str:
    names = next(iter(runs.values()))["classes"]
    rows = []
    for number, name in enumerate(names):
        courses = [[iou for iou in run["class_by_step"][number] if iou is not None] for run in runs.values()]
        rows.append([name, *(f"{_percent(course[0])} → {_percent(course[-1])}" for course in courses)])
    return "IoU of each class, after the step that brought it → after the last step:\n\n" + table(
        ["class", *runs], rows
    )


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:z.1f}"


if __name__ == "__main__":
    print_or_write("results.md", "results_tables.py", tables(read_results()))
