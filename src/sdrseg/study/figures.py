"""Figures for papers: 8 pt text, colours for colour-blind readers, column widths; SVG, PDF, PNG."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.textpath import TextPath

from sdrseg.colours import LINES
from sdrseg.engine.job import TEST_IMAGES
from sdrseg.errors import UsageError
from sdrseg.files import atomic_writer
from sdrseg.study.cell import Cell
from sdrseg.study.compare import Group, grouped, spec_of
from sdrseg.study.statistics import spread

COLUMN, PAGE = 3.25, 6.875  # inches: one column and two of a CVPR paper
LEGEND_LINE = 0.17  # inches
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
        fig = Figure(figsize=(width, height))
        FigureCanvasAgg(fig)
        yield fig


def save(fig: Figure, stem: Path, dpi: int = DPI, replace: bool = False) -> list[Path]:
    """Write a figure in all formats (dpi: of the PNG, and of pictures); `replace`: also over existing files."""
    files = [stem.with_name(f"{stem.name}.{kind}") for kind in FORMATS]
    if not replace and (existing := [file for file in files if file.exists()]):
        raise UsageError(f"{existing[0]} already exists. Choose another name with --out.")
    for file, kind in zip(files, FORMATS, strict=True):
        dated: dict[str, Any] = {"svg": {"Date": None}, "pdf": {"CreationDate": None}, "png": {}}[kind]
        smaller: dict[str, Any] = {"pil_kwargs": {"optimize": True}} if kind == "png" else {}
        with atomic_writer(file) as opened:
            fig.savefig(opened, format=kind, dpi=dpi, metadata=dated, **smaller)
    return files


def legend_below(fig: Figure, handles: Sequence[Any], labels: Sequence[str]) -> None:
    """A legend below the axes in as many columns as fit; the figure becomes higher by its lines."""
    if not labels:
        return
    handle_width, between = 0.4, 0.25  # inches: a handle with its gaps; between columns
    width, height = fig.get_size_inches()
    broken = [broken_text(label, width - handle_width - 0.1) for label in labels]
    widest = max(text_width(line) for label in broken for line in label.split("\n"))
    columns = max(1, int((width + between - 0.1) / (handle_width + between + widest)))
    lines = math.ceil(len(broken) / columns) * max(label.count("\n") + 1 for label in broken)
    fig.set_size_inches(width, height + LEGEND_LINE * lines)
    fig.legend(handles, broken, loc="outside lower center", ncols=columns, frameon=False)


def broken_text(text: str, width: float) -> str:
    """The text in lines of at most this width (inches)."""
    lines = []
    for line in text.split("\n"):
        parts, letters = [line], len(line)
        while letters > 1 and (widest := max(map(text_width, parts))) > width:
            letters = max(1, min(letters - 1, int(letters * width / widest)))
            parts = textwrap.wrap(line, letters)
        lines += parts
    return "\n".join(lines)


@cache
def text_width(text: str) -> float:
    """Inches of a line of 8 pt."""
    return float(TextPath((0, 0), text, size=8).get_extents().width) / 72 if text else 0.0


def line_style(number: int) -> dict[str, Any]:
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
    with figure(PAGE, 2.0) as fig:
        axes = fig.subplots(1, 3, sharex=True, sharey=True)
        for axis, kind in zip(axes, ("old", "new", "all"), strict=True):
            for number, (label, some) in enumerate(groups.items()):
                steps = range(len(some[0]["per_step"]))
                found = [
                    spread([c["per_step"][k][kind] for c in some if c["per_step"][k][kind] is not None]) for k in steps
                ]
                known = [(k, one) for k, one in zip(steps, found, strict=True) if one is not None]
                means = np.array([one.mean for _, one in known])
                spreads = np.array([one.std or 0.0 for _, one in known])
                shown_steps = [k for k, _ in known]
                style = line_style(number)
                axis.plot(shown_steps, means, label=label, **style)
                if spreads.any():
                    axis.fill_between(
                        shown_steps, means - spreads, means + spreads, color=style["color"], alpha=0.2, lw=0
                    )
            axis.set(title=f"{kind} classes", xlabel="step", ylim=(0, None))
            axis.xaxis.get_major_locator().set_params(integer=True)
        axes[0].set_ylabel("mIoU (%)")
        legend_below(fig, *axes[2].get_legend_handles_labels())
        fig.suptitle(broken_text(spec, PAGE), fontsize=8)
        return save(fig, out, dpi)


def draw_classes(cells: Sequence[Cell], out: Path, dpi: int = DPI) -> list[Path]:
    """IoU of each class after the last step; whiskers are the standard deviation over seeds."""
    spec, groups = one_scenario(cells)
    names = [row["name"] for row in cells[0]["per_class"]]
    introduced = [row["step"] for row in cells[0]["per_class"]]
    with figure(COLUMN, 0.7 + 0.16 * len(names)) as fig:
        axis = fig.subplots()
        for number, (label, some) in enumerate(groups.items()):
            rows = [
                spread([c["per_class"][k]["iou"] for c in some if c["per_class"][k]["iou"] is not None])
                for k in range(len(names))
            ]
            known = [(k, one) for k, one in enumerate(rows) if one is not None]
            shift = 0.5 * (number / max(1, len(groups) - 1) - 0.5) if len(groups) > 1 else 0.0
            style = {**line_style(number), "linestyle": ""}
            axis.errorbar(
                [one.mean for _, one in known],
                [k + shift for k, _ in known],
                xerr=[one.std or 0.0 for _, one in known],
                elinewidth=0.6,
                label=label,
                **style,
            )
        for k in range(1, len(names)):
            if introduced[k] != introduced[k - 1]:
                axis.axhline(k - 0.5, color="0.7", lw=0.5)
        axis.set(yticks=range(len(names)), yticklabels=names, xlim=(-2, 102), xlabel="IoU (%)")
        fig.suptitle(broken_text(spec, COLUMN), fontsize=8)
        axis.invert_yaxis()
        axis.grid(axis="x", color="0.9", lw=0.5)
        legend_below(fig, *axis.get_legend_handles_labels())
        return save(fig, out, dpi)
