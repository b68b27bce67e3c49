"""The tables and plots of docs/performance.md about GPUs, made from results/speed/*.json.

    python scripts/speed_tables.py            # print the tables
    python scripts/speed_tables.py --write    # put them into docs/performance.md, and draw the plots into docs/images

The files are what `benchmarks/gpu.sh` wrote: rows of one training step each (step.py), and pipeline.py's figures; and
what `scripts/run_times.py` printed (runs.json), beside the scores of the same runs (results/voc-15-1-disjoint-*.json).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
from matplotlib.figure import Figure
from pages import print_or_write, table
from results_tables import seeds_of

ROOT = Path(__file__).parent.parent
SPEED = ROOT / "results/speed"
IMAGES = ROOT / "docs/images"
PASSES = ("plain", "graph", "compile")
COLOURS = {"ft": "#7a7a7a", "kd only": "#8fb8de", "sdr": "#1f5fa8"}
Row = dict[str, Any]
NOT_MEASURED = "not measured"


def read(pattern: str) -> dict[str, Any]:
    return {file.stem: json.loads(file.read_text()) for file in sorted(SPEED.glob(pattern))}


def steps(*names: str) -> list[Row]:
    """The rows of some files."""
    found = read("step-*.json")
    return [row for name in names for row in found[name]["rows"]]


def tables() -> str:
    parts = [
        _targets(),
        _main(),
        _profile(),
        _kernels(),
        _gains(),
        _others(),
        _growth(),
        _input(),
        _sizes(),
        _runs(),
        _whole_job(),
    ]
    return "\n".join(part for part in parts if part)


class Target(NamedTuple):
    """A target and the figure reached with each kind of pass."""

    what: str
    least: float | None
    most: float | None
    found: dict[str, float]

    @property
    def met(self) -> bool:
        """Whether every kind of pass meets it."""
        low, high = self.least or float("-inf"), self.most or float("inf")
        return all(low <= value <= high for value in self.found.values())


def targets() -> list[Target]:
    rows = {(r["batch"], r["speed"], r["method"]): r for n in (8, 24) for r in steps(f"step-resnet101-batch{n}")}
    many = {(r["batch"], r["speed"], r["method"]): r for r in steps("step-resnet101-151-classes")}
    by_threads: dict[int, dict[str, Row]] = {}
    for figures in read("pipeline-*.json").values():
        by_threads.setdefault(figures["workers"], {})[_pass(figures)] = figures

    def each(key: str, batch: int, method: str, of: dict[Any, Row] = rows) -> dict[str, float]:
        return {speed: of[batch, speed, method][key] for speed in PASSES[1:]}

    ms, plain_ms = each("ms", 8, "sdr"), each("ms", 8, "kd only")
    found = [Target("SDR, batch 8: images/s", 200, None, each("images_per_second", 8, "sdr"))]
    found += [
        Target(f"FT, batch {n}: images/s", least, None, each("images_per_second", n, "ft"))
        for n, least in ((8, 292), (24, 330))
    ]
    found.append(Target("SDR, batch 24: images/s (desirable)", 280, None, each("images_per_second", 24, "sdr")))
    found += [Target(f"SDR / FT, batch {n}: time", None, 1.4, each("time_ratio", n, "sdr")) for n in (8, 24)]
    share = {speed: 100 * (ms[speed] - plain_ms[speed]) / ms[speed] for speed in ms}
    found.append(Target("the four terms on the features, batch 8: % of the step", None, 3, share))
    found.append(Target("SDR / FT, batch 8: memory", None, 1.25, each("memory_ratio", 8, "sdr")))
    found += [
        Target(f"SDR / FT, 151 classes, batch {n}: memory", None, 1.3, each("memory_ratio", n, "sdr", many))
        for n in (4, 16)
    ]
    for threads, ways in sorted(by_threads.items(), reverse=True):
        rates = {way: 100 * figures["ratio"] for way, figures in ways.items()}
        found.append(Target(f"real / synthetic images, {threads} threads: % of the rate", 95, None, rates))
        scores = {way: figures["crop512_1_seconds"] for way, figures in ways.items()}
        found.append(Target(f"1,449 images decoded and scored, {threads} threads: s", None, 15, scores))
    minutes = sum(n * ms for _, n, _, ms in whole_job()) / 60000
    found.append(Target("VOC 15-1, six steps of 30 epochs, projected: minutes", None, 25, {"auto": minutes}))
    found += [
        Target(f"{name} on VOC 15-1, ResNet-50, 8 epochs: mIoU", 50, None, {"auto": 100 * proof(name.lower())["all"]})
        for name in ("MiB", "SDR")
    ]
    return found


def proof(method: str) -> dict[str, float]:
    """The mIoU of a run on VOC 15-1 after its last step."""
    return {kind: seeds_of(method)[0][kind] / 100 for kind in ("old", "new", "all")}


def _targets() -> str:
    lines = []
    for target in targets():
        asked = f"at least {target.least:g}" if target.most is None else f"at most {target.most:g}"
        digits = 2 if "/ FT" in target.what else 1
        cells = [f"{target.found[way]:.{digits}f}" if way in target.found else "" for way in (*PASSES[1:], "auto")]
        lines.append([target.what, asked, *cells, "yes" if target.met else "**no**"])
    heads = ["ResNet-101, 512×512 unless stated", "target"]
    heads += ["graph", "compiled", "`auto`", "met"]
    return "Targets and results:\n\n" + table(heads, lines)


def _pass(figures: Row) -> str:
    """The word of `run.speed` for what a pipeline's log said."""
    return "compile" if figures["passes"].startswith("compiled") else "graph"


def _main() -> str:
    """ResNet-101, 16 + 1 classes, 512×512: every pass and method at batch 8 and 24."""
    rows = {(r["batch"], r["speed"], r["method"]): r for n in (8, 24) for r in steps(f"step-resnet101-batch{n}")}
    heads = ["pass", "method"]
    heads += [f"batch {b}: {what}" for b in (8, 24) for what in ("ms", "images/s", "time / FT", "memory / FT")]
    lines = []
    for speed in PASSES:
        for method in ("ft", "kd only", "sdr", "step 0"):
            cells = []
            for batch in (8, 24):
                row = rows.get((batch, speed, method))
                cells += [NOT_MEASURED] * 4 if row is None else _four(row)
            lines.append([speed, method, *cells])
    return "ResNet-101, 16 + 1 classes, 512×512:\n\n" + table(heads, lines)


def profiles() -> dict[str, dict[str, float]]:
    """Milliseconds by kind of kernel, of FT and SDR replayed and compiled."""
    rows = {(r["speed"], r["method"]): r for r in steps("step-resnet101-batch8")}
    return {f"{s}, {m}": rows[s, m]["kernels"]["kinds"] for s in ("graph", "compile") for m in ("ft", "sdr")}


def _profile() -> str:
    found = profiles()
    kinds = next(iter(found.values()))
    lines = [[kind, *(f"{each[kind]:.1f}" for each in found.values())] for kind in kinds]
    lines.append(["sum", *(f"{sum(each.values()):.1f}" for each in found.values())])
    return "Milliseconds per iteration at batch 8, by kind of kernel:\n\n" + table(["kernels", *found], lines)


def _kernels() -> str:
    ways = ("least", "without", "compiled", "ours")
    lines = [
        [row["what"], *(f"{row[f'{way}_ms']:.2f}" if f"{way}_ms" in row else NOT_MEASURED for way in ways)]
        for said in read("kernels.json").values()
        for row in said["rows"]
    ]
    heads = ["forward and backward, ms", "memory traffic alone", "PyTorch", "compiled PyTorch", "our kernel"]
    return "Custom kernels, on maps of 512×512 images, batch 8:\n\n" + table(heads, lines) if lines else ""


ALONE = {
    "upsampling": "upsampling, 17 classes",
    "pixels": "cross-entropy and distillation, 16 + 1 classes",
    "rows": "terms on the features, 16 + 1 classes",
    "depthwise": "depthwise convolution, dilation 12",
    "norm": "batch norm, frozen",
    "views": "",
}
"""Kernels by the name that switches them off, and what `benchmarks/kernels.py` calls one call of them."""

UNUSED = {("compile", method, kernel) for method in ("ft", "sdr") for kernel in ("rows", "norm")}
UNUSED |= {("graph", "ft", "rows")}  # fine-tuning has no terms on the features


def _gains() -> str:
    """What each kernel saves of whole steps (`benchmarks/step.py --without`), beside one call of it by itself."""
    alone = {row["what"]: row for said in read("kernels.json").values() for row in said["rows"]}
    rows = [row for said in read("step-*.json").values() for row in said["rows"]]
    whole = {
        (row["speed"], row["method"], key.removeprefix("gain_")): gain
        for row in rows
        if (row["encoder"], row["batch"], row["old"], row["new"]) == ("resnet101", 8, 16, 1)
        for key, gain in row.items()
        if key.startswith("gain_")
    }
    for fed in read("pipeline-*.json").values():
        if "without_views_images_per_second" in fed and fed["batch"] == 8:
            gain = 1 - fed["without_views_images_per_second"] / fed["real_images_per_second"]
            whole["compile" if "compiled" in fed["passes"] else "graph", fed["method"], "views"] = gain
    lines = []
    for kernel, what in ALONE.items():
        cells = [
            f"{alone[what][f'{way}_ms']:.2f}" if f"{way}_ms" in alone.get(what, {}) else NOT_MEASURED
            for way in ("without", "compiled", "ours")
        ]
        for speed in PASSES[1:]:
            for method in ("ft", "sdr"):
                gain = whole.get((speed, method, kernel))
                known = NOT_MEASURED if gain is None else f"{100 * gain:.1f} %"
                cells.append("not used" if (speed, method, kernel) in UNUSED else known)
        lines.append([f"{kernel}" + (f" ({what})" if what else ""), *cells])
    heads = ["kernel (one call of it)", "PyTorch, ms", "compiled PyTorch, ms", "ours, ms"]
    heads += [f"saves of {method.upper()}, {speed}" for speed in PASSES[1:] for method in ("ft", "sdr")]
    return "What each kernel saves, batch 8, 16 + 1 classes:\n\n" + table(heads, lines)


def _others() -> str:
    """Other networks and numbers of classes, FT beside SDR."""
    rows = steps("step-resnet101-151-classes", "step-resnet50-batch16")
    heads = ["network", "classes", "batch", "pass", "FT: ms", "images/s", "GiB"]
    heads += ["SDR: ms", "images/s", "GiB", "time / FT", "memory / FT"]
    lines = []
    for ft, sdr in zip(rows[::2], rows[1::2], strict=True):
        assert (ft["method"], sdr["method"]) == ("ft", "sdr")
        cells = [
            f"{r[key]:.{n}f}" for r in (ft, sdr) for key, n in (("ms", 1), ("images_per_second", 0), ("peak_gib", 1))
        ]
        ratios = [f"{sdr['time_ratio']:.2f}", f"{sdr['memory_ratio']:.2f}"]
        lines.append([ft["encoder"], f"{ft['old']} + {ft['new']}", str(ft["batch"]), ft["speed"], *cells, *ratios])
    return "Other settings, 512×512:\n\n" + table(heads, lines)


def growing() -> dict[str, dict[str, list[tuple[float, Row]]]]:
    """Rows of replayed passes by what changes and by method, in the order of (value, row)."""
    rows = [row for said in read("growth-*.json").values() for row in said["rows"]]
    kept: dict[tuple[Any, ...], Row] = {}
    for row in rows:  # a setting measured twice counts once
        kept.setdefault(tuple(row[k] for k in ("method", "size", "batch", "old", "new")), row)
    found: dict[str, dict[str, list[tuple[float, Row]]]] = {}
    for (method, size, batch, old, new), row in sorted(kept.items(), key=lambda item: item[0]):
        if method not in ("ft", "sdr"):
            continue
        if (size, old, new) == (512, 16, 1):
            found.setdefault("batch", {}).setdefault(method, []).append((batch, row))
        if (batch, old, new) == (8, 16, 1):
            found.setdefault("size", {}).setdefault(method, []).append((size, row))
        if (batch, size) == (8, 512):
            found.setdefault("classes", {}).setdefault(method, []).append((old + new, row))
    return found


def _growth() -> str:
    heads = ["varied", "value", "FT: ms per image", "SDR: ms per image", "time / FT", "SDR: GiB per image"]
    lines = []
    for what, by_method in growing().items():
        for (value, ft), (_, sdr) in zip(by_method["ft"], by_method["sdr"], strict=True):
            each = [row["ms"] / row["batch"] for row in (ft, sdr)]
            memory = f"{sdr['peak_gib'] / sdr['batch']:.2f}"
            lines.append([what, f"{value:g}", *(f"{ms:.2f}" for ms in each), f"{each[1] / each[0]:.2f}", memory])
    title = (
        "Cost by size, batch and classes: ResNet-101, replayed as a graph (512×512, batch 8, 17 classes unless varied)"
    )
    return f"{title}:\n\n{table(heads, lines)}"


def _input() -> str:
    heads = ["threads", "passes", "synthetic, images/s", "real, images/s", "ratio"]
    heads += ["decoding 548 images, s", "scoring (crop512), s: first time", "second time"]
    lines = []
    for figures in read("pipeline-*.json").values():
        rates = [figures[f"{kind}_images_per_second"] for kind in ("synthetic", "real")]
        cells = [f"{figures[key]:.1f}" for key in ("cache_seconds", "crop512_1_seconds", "crop512_2_seconds")]
        shares = [*(f"{r:.0f}" for r in rates), f"{figures['ratio']:.3f}"]
        lines.append([str(figures["workers"]), _pass(figures), *shares, *cells])
    return "Training on real and on synthetic images, and scoring the 1,449 test images of VOC:\n\n" + table(
        heads, lines
    )


def _sizes() -> str:
    found = [read(f"{name}.json").get(name) for name in ("new-sizes-without", "new-sizes")]
    if None in found:
        return ""
    kinds = sorted(found[0]["kinds"], key=lambda kind: -found[0]["kinds"][kind])
    lines = [
        [kind, *(f"{said['kinds'][kind]:.1f}" for said in found)] for kind in kinds if found[0]["kinds"][kind] >= 1
    ]
    for name, key in (("a whole batch, first time", "new_ms"), ("second time", "again_ms")):
        lines.append([name, *(f"{said[key]:.0f}" for said in found)])
    title = "Cost of the first batch of a new image size (ResNet-101, batch 16, inference)"
    return f"{title}:\n\n" + table(["layers", "without our kernel, ms", "with it, ms"], lines)


def _runs() -> str:
    lines = []
    for run in json.loads((SPEED / "runs.json").read_text()):
        first, *later = run["steps"]
        parts = [f"{sum(step[part] for step in later):.0f}" for part in ("before", "training", "scoring")]
        rates = [step["images_per_second"] for step in later]
        own = [f"{first[part]:.0f}" if part in first else "–" for part in ("before", "training")]
        own.append(f"{first['images_per_second']:.0f}" if "training" in first else "–")
        lines.append([run["method"], *(f"{100 * proof(run['method'])[kind]:.1f}" for kind in ("old", "new", "all"))])
        lines[-1] += [f"{run['seconds']:.0f}", *own, f"{first['scoring']:.0f}", *parts]
        lines[-1].append(f"{min(rates):.0f} to {max(rates):.0f}")
    heads = ["run", "mIoU: old", "new", "all", "whole run, s"]
    heads += ["step 0: decoding, s", "training, s", "images/s", "first score, s"]
    heads += ["five later steps: decoding, s", "training, s", "scores, s", "images/s"]
    title = "The runs on VOC 15-1 (ResNet-50, 8 epochs; all replayed as graphs; full images), and where their time went"
    return f"{title}:\n\n{table(heads, lines)}"


def fed() -> float:
    """The least share of the rate with synthetic images that was reached with real ones."""
    return min(figures["ratio"] for figures in read("pipeline-*.json").values())


def whole_job() -> list[tuple[str, int, str, float]]:
    """VOC 15-1 disjoint with SDR, ResNet-101, 30 epochs, batch 8: parts, their number, and milliseconds each."""
    rows = {(r["speed"], r["method"]): r["ms"] for r in steps("step-resnet101-batch8")}
    pipeline = read("pipeline-*.json")
    images, later, test = 8437, (378, 299, 420, 500, 548), 1449
    first, after = 30 * (images // 8), 30 * sum(n // 8 for n in later)
    decoding = pipeline["pipeline-graph"]["cache_seconds"] / pipeline["pipeline-graph"]["images"]
    scoring = pipeline["pipeline-graph"]["crop512_2_seconds"]
    return [
        ("step 0, compiled", first, "iterations", rows["compile", "step 0"] / fed()),
        ("five later steps, replayed as a graph", after, "iterations", rows["graph", "sdr"] / fed()),
        ("decoding", images + sum(later) + test, "images", 1000 * decoding),
        ("scoring (crop512)", 6, "times", 1000 * scoring),
    ]


def _whole_job() -> str:
    parts = whole_job()
    lines = [[name, f"{n:,} {unit}", f"{ms:.1f}", f"{n * ms / 60000:.1f}"] for name, n, unit, ms in parts]
    lines.append(["sum", "", "", f"{sum(n * ms for _, n, _, ms in parts) / 60000:.1f}"])
    return (
        "VOC 15-1 disjoint, SDR, ResNet-101, 512×512, batch 8, 30 epochs, one H200, **projected** from the figures "
        f"above (steps at {fed():.3f} of their synthetic rate), without compiling:\n\n"
    ) + table(["part", "number", "ms each", "minutes"], lines)


def _four(row: Row) -> list[str]:
    ratios = [f"{row[name]:.2f}" if row["method"] != "step 0" else "" for name in ("time_ratio", "memory_ratio")]
    return [f"{row['ms']:.1f}", f"{row['images_per_second']:.0f}", *ratios]


def draw_passes() -> Figure:
    figure = Figure(figsize=(7, 2.6), layout="constrained")
    for axes, batch in zip(figure.subplots(1, 2, sharey=True), (8, 24), strict=True):
        rows = steps(f"step-resnet101-batch{batch}")
        methods = [m for m in COLOURS if any(row["method"] == m for row in rows)]
        passes = [speed for speed in PASSES if any(row["speed"] == speed for row in rows)]
        for number, method in enumerate(methods):
            mine = {row["speed"]: row["images_per_second"] for row in rows if row["method"] == method}
            width = 0.8 / len(methods)
            places = [passes.index(speed) + (number - (len(methods) - 1) / 2) * width for speed in mine]
            bars = axes.bar(places, list(mine.values()), width, color=COLOURS[method], label=method)
            axes.bar_label(bars, fmt="%.0f", fontsize=7)
        axes.set_xticks(range(len(passes)), passes)
        axes.set_title(f"batch {batch}", fontsize=9)
    figure.axes[0].set_ylabel("images/s")
    figure.axes[0].legend(frameon=False, fontsize=8)
    return _plain(figure)


def draw_growth() -> Figure:
    figure = Figure(figsize=(8, 2.6), layout="constrained")
    units = {"batch": "images per batch", "size": "pixels per side", "classes": "classes"}
    for axes, (what, by_method) in zip(figure.subplots(1, 3), growing().items(), strict=True):
        for method, points in by_method.items():
            times = [row["ms"] / row["batch"] for _, row in points]
            axes.plot([value for value, _ in points], times, "o-", color=COLOURS[method], label=method)
        axes.set_xlabel(units[what])
        axes.set_ylim(bottom=0)
    figure.axes[0].set_ylabel("ms per image")
    figure.axes[0].legend(frameon=False, fontsize=8)
    return _plain(figure)


def draw_profile() -> Figure:
    figure = Figure(figsize=(8, 2.4), layout="constrained")
    axes, found = figure.subplots(), profiles()
    kinds = [kind for kind in next(iter(found.values())) if max(each[kind] for each in found.values()) > 0.5]
    left = [0.0] * len(found)
    for number, kind in enumerate(kinds):
        widths = [each[kind] for each in found.values()]
        colour = matplotlib.colormaps["tab20c"](number / 20 if number < 8 else 0.9)
        axes.barh(list(found), widths, left=left, color=colour, label=kind)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds of kernels per iteration, batch 8")
    axes.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    return _plain(figure)


def _plain(figure: Figure) -> Figure:
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=8)
    return figure


if __name__ == "__main__":
    print_or_write("performance.md", "speed_tables.py", tables())
    if sys.argv[1:] == ["--write"]:
        matplotlib.rcParams["svg.hashsalt"] = "sdrseg"  # the same file every time
        for name, draw in (("passes", draw_passes), ("growth", draw_growth), ("profile", draw_profile)):
            draw().savefig(IMAGES / f"speed-{name}.svg", metadata={"Date": None})
