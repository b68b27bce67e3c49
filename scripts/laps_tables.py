"""The tables of docs/laps.md, made from results/held-out/, results/*.json, results/laps*/.

python scripts/laps_tables.py            # print them
python scripts/laps_tables.py --write    # put them into docs/laps.md, between the two marks there
"""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean
from typing import Any

from pages import print_or_write, table

from sdrseg.methods import METHODS
from sdrseg.study.cell import Cell, read_cells

RESULTS = Path(__file__).parent.parent / "results"
UNSCALED = "b640df9"  # up to this commit, rows of init = closed_form were not scaled to the length of old rows

DECODER = "laps-decoder"  # the folder of results from before laps.encoder: what this row of the ablation is now
TRAINED = {key.removeprefix("laps."): source.value for key, source in METHODS["laps-trained"].switches.items()}


def tables() -> str:
    held = [c for c in read_cells([RESULTS / "held-out"]) if (c["scenario"], c["method"]) == ("15-1", "laps")]
    rows = [_row(name, some) for name, some in _by_score(held)]
    heads = ["variant", "old", "new", "all", *_names(held[0])]
    first = "VOC 15-1 disjoint, short schedule, one seed, 20 % of the training images held out and scored:\n\n"
    tested = [c for c in read_cells([RESULTS, RESULTS / "laps-trained"]) if c["epochs"] == [8, 8]]
    tested += [{**c, "method": DECODER} for c in read_cells([RESULTS / DECODER])]
    tested = [c for c in tested if (c["scenario"], c["protocol"]) == ("15-1", "disjoint")]
    others = [[*_row(name, some), str(len(some))] for name, some in _by_score(tested)]
    return (
        f"{first}{table(heads, rows)}\nThe same on the test images, beside the other methods (means over seeds):\n\n"
        f"{table([*heads, 'seeds'], others)}"
        f"\n{_frozen_rows()}"
    )


def _frozen_rows() -> str:
    """Rows fitted on the features of frozen models."""
    found, second = (json.loads((RESULTS / "laps" / f"frozen-rows{n}.json").read_text()) for n in ("", "-softmax"))
    return f"""\
Only new rows, fitted by logistic regression on the features of step 0, which stay as they are: 600 training images
scored on cells of 16×16 pixels with all labels (`benchmarks/frozen_rows.py`). The base has seen their old classes.
Before, these have {found["before"]:.1f}:

{_fitted(found)}
The same with the softmax model of step 0 and, for new rows, principal components of the encoder's features
(`laps.encoder`) besides the decoder's output. Scores of a softmax have no zero, so level zero is meaningless here.
Before, old classes have {second["before"]:.1f}:

{_fitted(second)}"""


def _fitted(found: dict[str, Any]) -> str:
    first = found["variants"][3]
    rows = []
    for v in found["variants"]:
        changes = [f"{key} {v[key]}".removesuffix(".0") for key in _changed(v, first)]
        iou = [*v["iou"].values()]
        numbers = [sum(iou[:16]) / 16, sum(iou[16:]) / 5, sum(iou) / 21, *iou[16:]]
        rows.append([", ".join(changes) or "memory features, all images", *(f"{number:.1f}" for number in numbers)])
    return table(["variant", "old", "new", "all", *[*first["iou"]][16:]], rows)


def _changed(variant: dict[str, Any], first: dict[str, Any]) -> list[str]:
    return [key for key in variant if key != "iou" and variant[key] != first[key]]


def _by_score(cells: list[Cell]) -> list[tuple[str, list[Cell]]]:
    """The results of each variant, one for each seed; the best variant first."""
    variants: dict[str, list[Cell]] = {}
    for cell in cells:
        variants.setdefault(_variant(cell), []).append(cell)
    return sorted(variants.items(), key=lambda item: -fmean(cell["all"] for cell in item[1]))


def _row(variant: str, cells: list[Cell]) -> list[str]:
    scores = [[*(cell[kind] for kind in ("old", "new", "all")), *_classes(cell)] for cell in cells]
    return [variant, *(f"{fmean(values):.1f}" for values in zip(*scores, strict=True))]


def _variant(cell: Cell) -> str:
    """The method and what differs from it; "trained" stands for the settings of `laps-trained`."""
    own = {k.removeprefix("laps."): v for k, v in cell["settings"].items() if k.startswith("laps.")}
    unscaled = own.get("init") == "closed_form" and cell["commit"].startswith(UNSCALED)
    trained = own.get("fit_only") is False
    if trained:
        own = {k: v for k, v in own.items() if k != "fit_only" and (k, v) not in TRAINED.items()}
    said = ", ".join(f"{k} {v:g}" if isinstance(v, float) else f"{k} {v}" for k, v in own.items())
    name = cell["method"] + (" trained" if trained else "")
    return name + (f": {said}" if said else "") + (" (start not scaled)" if unscaled else "")


def _names(cell: Cell) -> list[str]:
    return [c["name"] for c in cell["per_class"] if c["step"] > 0]


def _classes(cell: Cell) -> list[float]:
    return [c["iou"] for c in cell["per_class"] if c["step"] > 0]


if __name__ == "__main__":
    print_or_write("laps.md", "laps_tables.py", tables())
