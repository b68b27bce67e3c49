"""Makes the tables of docs/results.md on generated data, from results/terms and results/schedule.

    python scripts/shapes_tables.py            # print them
    python scripts/shapes_tables.py --write    # write them to docs/results.md, between its two marks

Their experiments are those of experiments/terms-shapes.toml and experiments/schedule-shapes.toml.
"""

from __future__ import annotations

from collections.abc import Sequence

from pages import print_or_write, table
from results_tables import ROOT, gap, in_words, read_results

from sdrseg.study.cell import Cell
from sdrseg.study.statistics import spread

SAME = ("train.holdout", "train.seed", "latent.step0")
"""Settings that are not named in the tables: those of all rows, and that the terms act in step 0 of LAPS."""
SCORES = ("old", "new", "all")
Variants = dict[tuple[str, str], list[Cell]]


def tables() -> str:
    terms, schedule = (variants(read_results(ROOT / "results" / name)) for name in ("terms", "schedule"))
    return f"""\
shapes:8-1@disjoint, five seeds, 20 % of the training images held out and scored. The last two columns are differences
paired by seed, with 95 % intervals.

**SDR's terms** at their usual weight and at a hundred times it (`experiments/terms-shapes.toml`); differences to MiB or
to LAPS without them:

{of_terms(terms)}
**Later steps of SDR**, as usual 10 epochs, batch 16, learning rate 0.02 and scale_crop, **and pseudo-labels**
(`experiments/schedule-shapes.toml`); differences to the same method without the change:

{of_schedule(schedule | {key: some for key, some in terms.items() if key not in schedule})}"""


def variants(cells: Sequence[Cell]) -> Variants:
    """Results by method and by what was changed, one for each seed."""
    found: Variants = {}
    for cell in cells:
        changed = {key: value for key, value in cell["settings"].items() if key not in SAME}
        found.setdefault((cell["method"], in_words(changed)), []).append(cell)
    return found


def of_terms(found: Variants) -> str:
    named = [("mib", ""), ("ft", ""), ("sdr+mib", ""), ("sdr", "")]
    own = [key for method in ("mib", "laps", "laps-trained") for key in sorted(found) if key[0] == method]
    rows = dict.fromkeys([*named, *own])
    return _rows(found, {key: (key[0] if key[0].startswith("laps") else "mib", "") for key in rows})


def of_schedule(found: Variants) -> str:
    chosen = [("sdr", ""), *sorted(k for k in found if k[0] == "sdr" and k[1] and not k[1].startswith("pseudo"))]
    chosen += [(method, changed) for method in ("lwf", "mib", "sdr") for changed in ("", "pseudo.threshold=0.5")]
    return _rows(found, {key: (key[0], "") for key in dict.fromkeys(chosen)})


def _rows(found: Variants, bases: dict[tuple[str, str], tuple[str, str]]) -> str:
    rows = []
    for key, base in bases.items():
        means = [spread([cell[kind] for cell in found[key]]) for kind in SCORES]
        gaps = [gap(found[key], found[base], kind) if key != base else "–" for kind in ("new", "all")]
        rows.append([" ".join(filter(None, key)), *(mean.text() if mean else "–" for mean in means), *gaps])
    return table(["method, settings", *SCORES, "new, difference", "all, difference"], rows)


if __name__ == "__main__":
    print_or_write("results.md", "shapes_tables.py", tables())
