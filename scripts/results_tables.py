"""Makes the tables of docs/results.md from results/*.json and results/held-out, one file per result (`sdrseg result`).

    python scripts/results_tables.py            # print them
    python scripts/results_tables.py --write    # write them to docs/results.md, between its two marks

Sections are grouped by how runs were trained (network, epochs, batch, …). A section has the paper's tables for which it
has results, then other results, scores by step and class, and a list of all runs. Settings of SDR that were tried on
held-out training images come last.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pages import print_or_write, table

from sdrseg.scenario import parse_spec
from sdrseg.study.cell import Cell, read_cells
from sdrseg.study.compare import compare, grouped, spec_of
from sdrseg.study.paper import Row, paper_tables
from sdrseg.study.render import to_markdown
from sdrseg.study.statistics import difference, spread
from sdrseg.study.tables import Table, paper_form

ROOT = Path(__file__).parent.parent
PAPER_EPOCHS = 30
HOW = ("train", "net", "data", "optim", "eval", "run")
"""Settings of these sections describe how a run was trained; all others are part of the experiment."""


def read_results(folder: Path = ROOT / "results") -> list[Cell]:
    return read_cells([folder])


EARLIER = {"kd.weight": 100.0}
"""The setting of SDR on 15-5 that README quotes, and names, as long as the default was not run there."""


def seeds_of(method: str, scenario: str = "15-1") -> list[Cell]:
    """The results on VOC disjoint, short schedule, that README and, of the first seed, docs/performance.md quote."""
    found = [
        cell
        for cell in read_results()
        if (spec_of(cell), cell["method"], cell["preset"]) == (f"voc:{scenario}@disjoint", method, "default")
        and (cell["encoder"], cell["epochs"], cell["batch"]) == ("resnet50", [8, 8], [16, 8])
    ]
    usual = found if method == "laps" else [cell for cell in found if not _tried(cell)]
    return sorted(usual or [cell for cell in found if _tried(cell) == EARLIER], key=lambda cell: cell["seed"])


def tables(cells: Sequence[Cell]) -> str:
    """All sections, as Markdown; the one with the most results first."""
    sections: dict[str, list[Cell]] = {}
    for cell in cells:
        sections.setdefault(_schedule(cell), []).append(cell)
    ordered = sorted(sections.values(), key=lambda some: (-len(some), _schedule(some[0])))
    return "\n".join([*(_section(some) for some in ordered), held_out()])


def held_out(folder: Path = ROOT / "results" / "held-out") -> str:
    """Settings of SDR on held-out training images, by scenario, the best first."""
    cells = [cell for cell in read_results(folder) if cell["method"] == "sdr"]
    cells.sort(key=lambda cell: (spec_of(cell), -cell["all"]))
    new = [one["name"] for one in cells[0]["per_class"] if one["step"] > 0]
    rows = []
    for cell in cells:
        iou = {one["name"]: one["iou"] for one in cell["per_class"]}
        scores = [cell["old"], cell["new"], cell["all"], iou["background"], *(iou[name] for name in new)]
        rows.append([spec_of(cell), in_words(_tried(cell)) or "the default", *(f"{score:.1f}" for score in scores)])
    heads = ["scenario", "settings", "old", "new", "all", "background", *new]
    return f"### SDR on held-out training images\n\n{table(heads, rows)}"


def in_words(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{k}={v:g}" if isinstance(v, float) else f"{k}={v}" for k, v in settings.items())


def gap(one: Sequence[Cell], other: Sequence[Cell], kind: str) -> str:
    """The mean difference of a score, paired by seed, with its 95 % interval."""
    a, b = ({cell["seed"]: cell[kind] for cell in some} for some in (one, other))
    found = difference("", "", kind, a, b)
    if found is None or found.half is None:
        return "–"
    values = (round(v, 1) + 0.0 for v in (found.mean, found.mean - found.half, found.mean + found.half))  # never -0.0
    return "{:+.1f} ({:+.1f} to {:+.1f})".format(*values)


def _schedule(cell: Cell) -> str:
    """How a run was trained, as a heading."""
    batch, epochs = cell["batch"], cell["epochs"]
    then = f" then {batch[1]}" if batch[1] != batch[0] else ""
    later = f" then {epochs[1]}" if epochs[1] != epochs[0] else ""
    short = "short schedule: " if max(epochs) < PAPER_EPOCHS and cell["dataset"] == "voc" else ""
    words = [f"{short}{cell['encoder']} {cell['decoder']}", f"{cell['crop']}×{cell['crop']}"]
    words += [f"{epochs[0]}{later} epochs", f"batch {batch[0]}{then}", f"weights {cell['weights']}"]
    said = ("train.epochs", "train.epochs_later", "train.batch_size", "train.batch_size_later", "train.seed")
    said += ("net.encoder", "net.decoder", "net.weights", "data.crop", "eval.transform")
    others = {k: v for k, v in cell["settings"].items() if k.partition(".")[0] in HOW and k not in said}
    return ", ".join([cell["dataset"].upper() + ", " + words[0], *words[1:], *(f"{k}={v}" for k, v in others.items())])


def _tried(cell: Cell) -> dict[str, Any]:
    """The settings of a result that belong to the experiment."""
    return {key: value for key, value in cell["settings"].items() if key.partition(".")[0] not in HOW}


def _section(cells: Sequence[Cell]) -> str:
    parts = [f"### {_schedule(cells[0])}\n"]
    shown: set[str] = set()
    for paper in paper_tables().values():
        found = {
            (row.name, column): [c for c in cells if _stands_for(c, row, column)]
            for row in paper.rows
            for column in paper.columns
        }
        new = {cell["config"] for some in found.values() for cell in some} - shown
        if paper.values != ("per_class",) and new:
            shown |= {cell["config"] for some in found.values() for cell in some}
            parts.append(to_markdown(_cut(paper_form(paper, found))))
    rest = [cell for cell in cells if cell["config"] not in shown]
    specs = {spec_of(cell) for cell in rest}
    if rest:
        beside = [c for c in cells if spec_of(c) in specs and (c in rest or (_tried(c) == {} and c["method"] in OFTEN))]
        parts.append("Not in the paper's tables:\n\n" + _compared(beside))
    if several := [c for some in _groups(cells).values() if len(some) > 1 for c in some]:
        parts.append("Over seeds:\n\n" + _compared(several))
        parts.append(_pairs(several))
    parts += [_course(cells), _classes(cells), _origin(cells)]
    return "\n".join(filter(None, parts))


OFTEN = ("ft", "mib", "sdr", "laps")
"""Methods that others are compared with."""


def _compared(cells: Sequence[Cell]) -> str:
    """Means and differences by scenario; the reference is MiB if it is among them."""
    parts = []
    for spec in dict.fromkeys(spec_of(cell) for cell in cells):
        some = list({json.dumps([c["setup"], c["seed"]]): c for c in cells if spec_of(c) == spec}.values())
        parts.append(to_markdown(compare(some, reference="mib" if "mib" in grouped(some) else None)))
    return "\n".join(parts)


PAIRS = (("sdr", "mib"), ("sdr+mib", "mib"), ("sdr", "sdr+mib"), ("laps", "sdr"))
"""Methods that differ by what the text asks about."""


def _pairs(cells: Sequence[Cell]) -> str:
    """Differences between methods, paired by seed, where the seeds suffice for an interval."""
    rows = []
    for spec in dict.fromkeys(spec_of(cell) for cell in cells):
        by_method = grouped([cell for cell in cells if spec_of(cell) == spec])
        for a, b in PAIRS:
            texts = [gap(by_method.get(a, ()), by_method.get(b, ()), kind) for kind in ("old", "new", "all")]
            if "–" not in texts:
                rows.append([spec, f"{a} − {b}", *texts])
    if not rows:
        return ""
    heads = ["scenario", "difference", "old", "new", "all"]
    return "Differences paired by seed, with 95 % intervals:\n\n" + table(heads, rows)


def _stands_for(cell: Cell, row: Row, column: str) -> bool:
    """Whether a result belongs in this cell of a table."""
    wanted = str(parse_spec(row.spec or column))
    mine = {key: value for key, value in row.settings.items() if key.partition(".")[0] not in HOW}
    weights = row.settings.get("net.weights", cell["weights"])
    fits = cell["preset"] == "default" and _tried(cell) == mine and weights == cell["weights"]
    return fits and cell["method"] == row.method and spec_of(cell) == wanted and row.is_run(column)


def _cut(whole: Table) -> Table:
    """A table without the scenarios and notes that have no result."""
    blocks = [b for b in whole.blocks if any(value.ours for line in b.lines for value in line.values)]
    kept = [note for note in whole.notes if "misprint" not in note or any(b.title in note for b in blocks)]
    return Table(whole.name, whole.title, tuple(blocks), tuple(kept))


def _groups(cells: Sequence[Cell]) -> dict[tuple[str, str], list[Cell]]:
    return {
        (spec, label): some
        for spec in dict.fromkeys(spec_of(cell) for cell in cells)
        for label, some in grouped([cell for cell in cells if spec_of(cell) == spec]).items()
    }


def _course(cells: Sequence[Cell]) -> str:
    """mIoU of all classes learned so far after each step, for scenarios with more than one step."""
    rows = []
    for (spec, label), some in _groups(cells).items():
        steps = len(some[0]["per_step"])
        if steps > 1:
            means = [
                spread([c["per_step"][k]["all"] for c in some if c["per_step"][k]["all"] is not None])
                for k in range(steps)
            ]
            averaged = spread([c["step_averaged"] for c in some if c["step_averaged"] is not None])
            lost = spread([c["forgetting"] for c in some if c["forgetting"] is not None])
            ends = [one.text() if one else "–" for one in (averaged, lost)]
            rows.append([spec, label, ", ".join(m.text() if m else "–" for m in means), *ends])
    if not rows:
        return ""
    return "mIoU of all classes learned so far, after each step:\n\n" + table(
        ["scenario", "method", "after steps 0, 1, …", "step-averaged", "forgetting"], rows
    )


def _classes(cells: Sequence[Cell]) -> str:
    """IoU of each class after the step that introduced it and after the last step, for methods in OFTEN, disjoint."""
    parts = []
    for spec in dict.fromkeys(spec_of(cell) for cell in cells if cell["protocol"] == "disjoint"):
        some = [c for c in cells if spec_of(c) == spec and c["method"] in OFTEN and not _tried(c)]
        some = [c for c in some if c["preset"] == "default" and c["seed"] == min(o["seed"] for o in some)]
        some.sort(key=lambda c: OFTEN.index(c["method"]))
        rows = []
        for number, one in enumerate(some[0]["per_class"] if some else ()):
            courses = [[c["per_class"][number][key] for key in ("iou_when_new", "iou")] for c in some]
            texts = [" → ".join("–" if v is None else f"{v:.1f}" for v in course) for course in courses]
            rows.append([one["name"], *texts])
        if rows:
            parts.append(f"{spec}, IoU of each class, when new → after the last step (first seed):\n\n")
            parts[-1] += table(["class", *(c["method"] for c in some)], rows)
    return "\n".join(parts)


def _origin(cells: Sequence[Cell]) -> str:
    """A list of all runs."""
    rows = []
    for cell in sorted(cells, key=lambda c: (spec_of(c), c["method"], c["seed"], c["config"])):
        also = cell["also"] or {}
        tried = ", ".join(f"{k}={v}" for k, v in _tried(cell).items())
        both = [f"{cell['all']:.1f} ({cell['eval']})", *([f"{also['all']:.1f} ({also['eval']})"] if also else [])]
        pace = "–" if cell["images_per_second"] is None else f"{cell['images_per_second']:.0f}"
        took = "–" if cell["seconds"] is None else f"{cell['seconds']:.0f}"
        rows.append(
            [spec_of(cell), " ".join(filter(None, [cell["method"], cell["preset"], tried])), str(cell["seed"])]
            + [
                ", ".join(both),
                took,
                cell["base"],
                pace,
                cell["device"] or "–",
                (cell["commit"] or "–")[:9],
                cell["config"],
            ]
        )
    heads = ["scenario", "method, preset, settings", "seed", "all", "seconds", "step 0", "images/s", "device", "commit"]
    return "All runs:\n\n" + table([*heads, "configuration"], rows)


if __name__ == "__main__":
    print_or_write("results.md", "results_tables.py", tables(read_results()))
