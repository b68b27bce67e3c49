"""Figures for papers: 8 pt text, colours for colour-blind readers, column widths; SVG, PDF, PNG."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from sdrseg.colours import LINES
from sdrseg.engine.job import TEST_IMAGES
from sdrseg.errors import UsageError
from sdrseg.files import atomic_writer
from sdrseg.study.cell import Cell
from sdrseg.study.compare import Group, grouped, spec_of
from sdrseg.study.statistics import spread

COLUMN, PAGE = 3.35, 6.9  # inches: one column, two
DPI = 300  # pixels per inch in the PNG
FORMATS = ("svg", "pdf", "png")
DASHES = ("-", "--", ":", "-.", (0, (5, 1)), (0, (3, 1, 1, 1)))
MARKERS = "os^DXv"
STYLE: Any = {
    "font.size": 8,
    "axes.titlesize": 8,
    "axes.labelsize": 8,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "legend.fontsize": 8,
    "axes.linewidth": 0.6,
    "lines.linewidth": 1.2,
    "lines.markersize": 3.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "sdrseg",  # the same figure is the same file
    "pdf.fonttype": 42,
    "figure.constrained_layout.use": True,
}


@contextmanager
def figure(width: float, height: float) -> Iterator[Figure]:
    """A figure in our style."""
    with matplotlib.rc_context(STYLE):
        made = Figure(figsize=(width, height))
        FigureCanvasAgg(made)
        yield made


def save(made: Figure, stem: Path, dpi: int = DPI) -> list[Path]:
    """Write a figure in all formats (dpi: of the PNG, and of pictures); existing files are not replaced."""
    files = [stem.with_name(f"{stem.name}.{kind}") for kind in FORMATS]
    if there := [file for file in files if file.exists()]:
        raise UsageError(f"{there[0]} already exists. Choose another name with --out.")
    for file, kind in zip(files, FORMATS, strict=True):
        dated: dict[str, Any] = {"svg": {"Date": None}, "pdf": {"CreationDate": None}, "png": {}}[kind]
        smaller: dict[str, Any] = {"pil_kwargs": {"optimize": True}} if kind == "png" else {}
        with atomic_writer(file) as opened:
            made.savefig(opened, format=kind, dpi=dpi, metadata=dated, **smaller)
    return files


def look_of(number: int) -> dict[str, Any]:
    """Colour, dash and marker of a line; any two lines differ in more than colour."""
    beyond = number // len(LINES)
    dash, marker = DASHES[(number + beyond) % len(DASHES)], MARKERS[(number + beyond) % len(MARKERS)]
    return {"color": LINES[number % len(LINES)], "linestyle": dash, "marker": marker}


def one_scenario(cells: Sequence[Cell]) -> tuple[str, Group]:
    """The scenario that all cells share, with what was scored unless that is the test images, and its setups."""
    specs = list(dict.fromkeys(spec_of(cell) for cell in cells))
    if len(specs) != 1:
        some = f" ({specs[0]} and {specs[1]})" if specs else ""
        raise UsageError(f"A figure shows runs of one scenario, but these are from {len(specs)}{some}.")
    scored = sorted({cell["scored_on"] for cell in cells} - {TEST_IMAGES})
    return "\n".join([specs[0], *(f"scored on {what}" for what in scored)]), grouped(cells)


def draw_steps(cells: Sequence[Cell], out: Path, dpi: int = DPI) -> list[Path]:
    """mIoU of old, new and all classes after each step; bands are the standard deviation over seeds."""
    spec, groups = one_scenario(cells)
    with figure(PAGE, 2.1) as made:
        axes = made.subplots(1, 3, sharex=True, sharey=True)
        for axis, kind in zip(axes, ("old", "new", "all"), strict=True):
            for number, (label, some) in enumerate(groups.items()):
                steps = range(len(some[0]["per_step"]))
                found = [
                    spread([c["per_step"][k][kind] for c in some if c["per_step"][k][kind] is not None]) for k in steps
                ]
                at = [(k, one) for k, one in zip(steps, found, strict=True) if one is not None]
                means = np.array([one.mean for _, one in at])
                spreads = np.array([one.std or 0.0 for _, one in at])
                places = [k for k, _ in at]
                look = look_of(number)
                axis.plot(places, means, label=label, **look)
                if spreads.any():
                    axis.fill_between(places, means - spreads, means + spreads, color=look["color"], alpha=0.2, lw=0)
            axis.set(title=f"{kind} classes", xlabel="step", ylim=(0, 100))
            axis.xaxis.get_major_locator().set_params(integer=True)
        axes[0].set_ylabel("mIoU (%)")
        made.legend(
            *axes[2].get_legend_handles_labels(), loc="outside lower center", ncols=min(6, len(groups)), frameon=False
        )
        made.suptitle(spec, fontsize=8)
        return save(made, out, dpi)


def draw_classes(cells: Sequence[Cell], out: Path, dpi: int = DPI) -> list[Path]:
    """IoU of each class after the last step; whiskers are the standard deviation over seeds."""
    spec, groups = one_scenario(cells)
    names = [row["name"] for row in cells[0]["per_class"]]
    introduced = [row["step"] for row in cells[0]["per_class"]]
    with figure(COLUMN, 0.8 + 0.16 * len(names)) as made:
        axis = made.subplots()
        for number, (label, some) in enumerate(groups.items()):
            rows = [
                spread([c["per_class"][k]["iou"] for c in some if c["per_class"][k]["iou"] is not None])
                for k in range(len(names))
            ]
            known = [(k, one) for k, one in enumerate(rows) if one is not None]
            shift = 0.5 * (number / max(1, len(groups) - 1) - 0.5) if len(groups) > 1 else 0.0
            look = {**look_of(number), "linestyle": ""}
            axis.errorbar(
                [one.mean for _, one in known],
                [k + shift for k, _ in known],
                xerr=[one.std or 0.0 for _, one in known],
                elinewidth=0.6,
                label=label,
                **look,
            )
        for k in range(1, len(names)):
            if introduced[k] != introduced[k - 1]:
                axis.axhline(k - 0.5, color="0.7", lw=0.5)
        axis.set(yticks=range(len(names)), yticklabels=names, xlim=(-2, 102), xlabel="IoU (%)", title=spec)
        axis.invert_yaxis()
        axis.grid(axis="x", color="0.9", lw=0.5)
        made.legend(loc="outside lower center", ncols=min(3, len(groups)), frameon=False)
        return save(made, out, dpi)
