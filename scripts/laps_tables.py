"""The tables of docs/laps.md, made from results/held-out/*.json and results/*.json.

python scripts/laps_tables.py            # print them
python scripts/laps_tables.py --write    # put them into docs/laps.md, between the two marks there
"""

from __future__ import annotations

from pathlib import Path

from pages import print_or_write, table

from sdrseg.study.cell import Cell, read_cells

RESULTS = Path(__file__).parent.parent / "results"
UNSCALED = "b640df9"  # up to this commit, rows of init = closed_form were not scaled to the length of old rows


def tables() -> str:
    held = [c for c in read_cells([RESULTS / "held-out"]) if (c["scenario"], c["method"]) == ("15-1", "laps")]
    rows = [[_variant(c), *(f"{c[k]:.1f}" for k in ("old", "new", "all")), *_classes(c)] for c in _by_score(held)]
    heads = ["variant", "old", "new", "all", *_names(held[0])]
    first = "VOC 15-1 disjoint, short schedule, one seed, 20 % of the training images held out and scored:\n\n"
    tested = [c for c in read_cells([RESULTS]) if (c["scenario"], c["protocol"]) == ("15-1", "disjoint")]
    others = [[_variant(c), *(f"{c[k]:.1f}" for k in ("old", "new", "all")), *_classes(c)] for c in _by_score(tested)]
    return (
        f"{first}{table(heads, rows)}\nThe same on the test images, beside the other methods:\n\n{table(heads, others)}"
    )


def _by_score(cells: list[Cell]) -> list[Cell]:
    return sorted(cells, key=lambda cell: -cell["all"])


def _variant(cell: Cell) -> str:
    own = {k: v for k, v in cell["settings"].items() if k.startswith("laps.")}
    said = ", ".join(
        f"{k.removeprefix('laps.')} {v:g}" if isinstance(v, float) else f"{k.removeprefix('laps.')} {v}"
        for k, v in own.items()
    )
    unscaled = cell["method"] == "laps" and "laps.init" not in own and cell["commit"].startswith(UNSCALED)
    return cell["method"] + (f": {said}" if said else "") + (" (start not scaled)" if unscaled else "")


def _names(cell: Cell) -> list[str]:
    return [c["name"] for c in cell["per_class"] if c["step"] > 0]


def _classes(cell: Cell) -> list[str]:
    return [f"{c['iou']:.1f}" for c in cell["per_class"] if c["step"] > 0]


if __name__ == "__main__":
    print_or_write("laps.md", "laps_tables.py", tables())
