"""The tables of docs/extend.md about few images, and the plot, made from extend/by_size.py and results/extend/*.json.

    python scripts/extend_tables.py            # print the tables
    python scripts/extend_tables.py --write    # put them into docs/extend.md, and draw the plot into docs/images

The files are what `benchmarks/extend_voc.py` wrote.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from pages import print_or_write, table

from sdrseg.extend.by_size import OF_LAPS, REGIMES

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "results/extend"
PICTURE = ROOT / "docs/images/extend-voc.svg"
NARROW = "laps-softmax, decoder only"
METHODS = ("laps-softmax", NARROW, "laps", "sdr", "mib", "ft")
COLOURS = {
    "laps-softmax": "#c1440e",
    NARROW: "#e9a68a",
    "laps": "#e6a03c",
    "sdr": "#1f5fa8",
    "mib": "#8fb8de",
    "ft": "#7a7a7a",
}
WIDE = "wide"
"""Variants with this prefix were run with laps.encoder = 256, the default; others set it, or were run without it."""
IMPLIED = ("laps.init", "laps.fit_only", "laps.memory", "optim.lr_later")
"""Settings that "rows fitted" or "trained, learning rate …" implies."""
Row = dict[str, Any]


def read(scored: str) -> list[Row]:
    rows = [json.loads(file.read_text()) for file in sorted(RESULTS.glob(f"{scored}-*.json"))]
    rows = [row | ({"method": NARROW} if _decoder_only(row) else {}) for row in rows if "method" in row]
    return sorted(rows, key=_order)


def _decoder_only(row: Row) -> bool:
    """Whether new rows were fitted that see the decoder's output only."""
    wide = row["variant"].startswith(WIDE) or "laps.encoder" in row["settings"]
    return row["passes"] == "survey" and not wide


def _order(row: Row) -> Any:
    return row["class"], row["images"] or 10_000, METHODS.index(row["method"]), row["variant"]


def tables() -> str:
    laps = ", ".join(f"`laps.{key}` = {value}" for key, value in OF_LAPS.items())
    parts = [_regimes(), f"LAPS fits rows, so of these only the views apply to it; it uses {laps}.\n"]
    if tested := read("test"):
        parts.append(
            "Points that the old classes lost elsewhere, and IoU of the new class, on the 1,449 test images "
            '(`laps-softmax` with 16 views of each image, "decoder only" with one and `laps.encoder` = 0):\n'
        )
        parts.append(_by_method(tested, lambda r: f"{r['lost_elsewhere']:.1f}, {r['new_iou']:.1f}"))
        parts.append(
            "Seconds of training on one H200, mostly with two runs side by side (reading and scoring not counted):\n"
        )
        parts.append(_by_method(tested, lambda r: f"{r['seconds']:.0f}"))
        parts.append(f"![IoU of the new class, and loss of the old ones](images/{PICTURE.name})\n")
    if chosen := read("held-out"):
        counts = sorted({row["scored_images"] for row in chosen if row["scored_images"] >= 500})
        scored = " or ".join(f"{count:,}" for count in counts)
        parts.append(
            f"Points lost, IoU and seconds on {scored} held-out training images, or as many as the row says (CPU):\n"
        )
        parts.append(_held_out(chosen))
    return "\n".join(parts)


def _regimes() -> str:
    body, above = [], 1
    for one in REGIMES:
        size = f"{above} or more" if one.images is None else f"up to {one.images}"
        body.append([size, str(one.batch), str(one.iterations), f"1/{one.slower}", str(one.views)])
        above = (one.images or 0) + 1
    heads = ["training images", "batch", "iterations, at least", "learning rate, of that of step 0"]
    return table([*heads, "LAPS: views of each image"], body)


def _by_method(rows: list[Row], cell: Any) -> str:
    found = {(r["class"], r["images"], r["method"]): cell(r) for r in rows}
    lines = list(dict.fromkeys((r["class"], r["images"]) for r in rows))
    count = {(r["class"], r["images"]): r["given"] for r in rows}
    methods = [m for m in METHODS if any(r["method"] == m for r in rows)]
    heads = ["new class", "images", *(f"`{m}`" for m in methods)]
    body = [
        [name, f"{count[name, images]}{' (all)' if images == 0 else ''}"]
        + [found.get((name, images, method), "–") for method in methods]
        for name, images in lines
    ]
    return table(heads, body)


def _held_out(rows: list[Row]) -> str:
    found: dict[Any, dict[str, str]] = {}
    for r in sorted(rows, key=lambda r: (METHODS.index(r["method"]), r["images"] or 10_000, r["lr"], r["variant"])):
        fitted = r["passes"] == "survey"
        others = [f"`{key}` = {value}" for key, value in r["settings"].items() if key not in IMPLIED]
        how = ["rows fitted"] if fitted else [f"trained, learning rate {r['lr']:g}"]
        how += [f"on {r['scored_images']} images"] if r["scored_images"] < 500 else []
        key = f"`{r['method']}`", str(r["images"] or "all"), ", ".join([*how, *others])
        found.setdefault(key, {})[r["class"]] = f"{r['lost_elsewhere']:.1f}, {r['new_iou']:.1f}, {r['seconds']:.0f} s"
    heads = ["method", "images", "how", "sheep", "train"]
    return table(heads, [[*key, values.get("sheep", "–"), values.get("train", "–")] for key, values in found.items()])


def draw() -> Figure:
    rows = read("test")
    figure = Figure(figsize=(8, 5.2), layout="constrained")
    names = sorted({row["class"] for row in rows})
    grid = figure.subplots(2, len(names), sharex="col", squeeze=False)
    for column, name in enumerate(names):
        for method in [m for m in METHODS if any(row["method"] == m for row in rows)]:
            mine = [row for row in rows if (row["class"], row["method"]) == (name, method)]
            counts = [row["given"] for row in mine]
            for axes, key in zip(grid[:, column], ("new_iou", "lost_elsewhere"), strict=True):
                axes.plot(counts, [r[key] for r in mine], marker="o", ms=4, color=COLOURS[method], label=method)
        above, below = grid[:, column]
        above.set_title(name, fontsize=10)
        above.axhline(30, color="#bbbbbb", lw=0.8, ls=":")
        below.axhline(1, color="#bbbbbb", lw=0.8, ls=":")
        above.set_ylim(0)
        below.set_yscale("symlog", linthresh=1)
        below.set_ylim(-1.5, 100)
        below.set_yticks([-1, 0, 1, 10, 50], ["−1", "0", "1", "10", "50"])
        below.set_xscale("log")
        below.set_xlabel("images of the new class")
        ticks = sorted({row["given"] for row in rows if row["class"] == name})
        below.set_xticks(ticks, [str(tick) for tick in ticks])
        below.minorticks_off()
    grid[0, 0].set_ylabel("IoU of the new class")
    grid[1, 0].set_ylabel("points that old classes lost elsewhere")
    handles, labels = grid[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False, fontsize=8)
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=8)
    return figure


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"] and read("test"):
        matplotlib.rcParams["svg.hashsalt"] = "sdrseg"  # the same file every time
        draw().savefig(PICTURE, metadata={"Date": None})
    print_or_write("extend.md", "extend_tables.py", tables())
