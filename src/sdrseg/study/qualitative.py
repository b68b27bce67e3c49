"""Test images with ground truth and the predictions of several runs, side by side."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from numpy.typing import NDArray

from sdrseg.colours import NOT_SCORED, hex_of
from sdrseg.labels import VOID
from sdrseg.reporting.collect import RunRecord
from sdrseg.reporting.pictures import TestImage, apply_models, inside
from sdrseg.study.figures import LEGEND_LINE, PAGE, broken_text, figure, save, text_width

GAP, BLOCK_GAP = 0.035, 0.1  # inches: between pictures, between images
LINE = 0.14  # inches, of text
LARGEST = 2.0  # the largest ratio of the widths of an image and a prediction

Pixels = NDArray[np.uint8]


@dataclass(frozen=True, eq=False)
class Block:
    """One test image: the photo (None: not shown), its ground truth, and rows of predictions (channels)."""

    photo: Pixels | None
    truth: Pixels
    predicted: list[list[Pixels]]

    @property
    def aspect(self) -> float:
        """Height by width."""
        height, width = self.truth.shape
        return float(height / width)


def draw_qualitative(
    runs: Sequence[RunRecord], images: Sequence[TestImage], every_step: bool, photos: bool, out: Path, dpi: int
) -> list[Path]:
    """One row per image with the runs as columns; with `every_step`, for each image one row per run and one column per
    step. Without `photos`, the ground truth stands alone: for images that must not be published."""
    last = runs[0].last
    steps = range(last + 1) if every_step else range(last, last + 1)
    predictions = {
        (n, s.step, s.image.id): s.predicted for n, run in enumerate(runs) for s in apply_models(run, images, steps)
    }
    blocks = []
    for image in images:
        part = inside(image)
        found = [[predictions[n, step, image.id][part] for step in steps] for n in range(len(runs))]
        rows = found if every_step else [[one for row in found for one in row]]
        photo = image.pixels.permute(1, 2, 0).numpy()[part] if photos else None
        blocks.append(Block(photo, image.labels.numpy()[part], rows))
    labels = [run.label for run in runs]
    colours = [hex_of(colour) for colour in runs[0].colours]
    names, headers = (labels, step_headers(runs[0])) if every_step else ([""], labels)
    masks = [mask for block in blocks for row in ([block.truth], *block.predicted) for mask in row]
    shown = sorted({int(c) for mask in masks for c in np.unique(mask)} - {VOID})
    legend = [Patch(facecolor=colours[c], label=runs[0].all_names[c]) for c in shown]
    palette = np.array([*runs[0].colours, *[NOT_SCORED] * (256 - len(colours))], np.uint8)
    return _draw(blocks, names, headers, palette, legend, out, dpi)


def step_headers(run: RunRecord) -> list[str]:
    """For each step, its number and its new class, or the number of new classes."""
    headers, known = [], 1  # the background
    for number, step in enumerate(run.scenario["steps"]):
        new = run.all_names[known : len(step["channels"])]
        known = len(step["channels"])
        new_text = f"{len(new)} classes" if len(new) != 1 else new[0]
        more = "+\u00a0" if number else ""  # a no-break space
        headers.append(f"step {number}\n{more}{new_text}")
    return headers


def _draw(
    blocks: Sequence[Block],
    names: Sequence[str],
    headers: Sequence[str],
    palette: Pixels,
    legend: Sequence[Patch],
    out: Path,
    dpi: int,
) -> list[Path]:
    rows, columns = len(names), len(headers)
    side_by_side = rows == 1  # the ground truth is next to the photo, otherwise below it
    scale = 1.0 if side_by_side else min(LARGEST, rows / 2)
    photos = blocks[0].photo is not None
    beside = 2 if side_by_side and photos else 1  # pictures to the left of the predictions
    lead = beside * scale  # their width, in predictions
    margin = 0.0
    for _ in range(2):  # the width of the names and the height of a row depend on each other
        width = (PAGE - margin - GAP * (columns + beside - 1)) / (lead + columns)
        broken = [broken_text(name, width * min(b.aspect for b in blocks)) for name in names]
        margin = _high(broken) + GAP if any(names) else 0.0
    titles = [broken_text(header, width + GAP) for header in headers]
    top = _high(titles) + 0.06
    fits = max(1, int(PAGE / (0.35 + max(text_width(str(patch.get_label())) for patch in legend))))
    lines = math.ceil(len(legend) / fits)
    heights = [rows * (width * block.aspect + GAP) - GAP for block in blocks]
    height = top + sum(heights) + BLOCK_GAP * len(blocks) + LEGEND_LINE * lines + 0.08

    with figure(PAGE, height) as fig:
        fig.set_layout_engine("none")
        right = width * lead + GAP * beside + margin  # the left edge of the predictions
        for k, title in enumerate(titles):
            _text(fig, right + k * (width + GAP) + width / 2, top - 0.05, title, va="bottom")
        if beside == 2:
            _text(fig, width / 2, top - 0.05, "image", va="bottom")
            _text(fig, width * 1.5 + GAP, top - 0.05, "truth", va="bottom")
        else:
            _text(fig, width * lead / 2, top - 0.05, "image and truth" if photos else "truth", va="bottom")
        y = top
        for block, block_height in zip(blocks, heights, strict=True):
            one = width * block.aspect
            wide, high = width * scale, one * scale
            stacked = [picture for picture in (block.photo, palette[block.truth]) if picture is not None]
            over, down = (wide + GAP, 0.0) if side_by_side else (0.0, high + GAP)
            spare = 0.0 if side_by_side else max(0.0, block_height - len(stacked) * (high + GAP) + GAP) / 2
            for n, picture in enumerate(stacked):
                _show(fig, n * over, y + spare + n * down, wide, high, picture)
            for r, row in enumerate(block.predicted):
                _text(fig, right - margin / 2, y + one / 2, broken[r], va="center", rotation=90)
                for k, predicted in enumerate(row):
                    _show(fig, right + k * (width + GAP), y, width, one, palette[predicted])
                y += one + GAP
            y += BLOCK_GAP - GAP
        fig.legend(
            handles=list(legend), loc="lower center", ncols=math.ceil(len(legend) / lines), frameon=False,
            handlelength=1, handleheight=1, columnspacing=1.2, borderpad=0, borderaxespad=0.3,
        )  # fmt: skip
        return save(fig, out, dpi)


def _high(texts: Sequence[str]) -> float:
    """Inches of the one with most lines."""
    return LINE * max(text.count("\n") + 1 for text in texts)


def _text(fig: Figure, x: float, y: float, text: str, **options: Any) -> None:
    """Text at inches from the left and from the top."""
    wide, high = fig.get_size_inches()
    fig.text(x / wide, 1 - y / high, text, ha="center", **options)


def _show(fig: Figure, x: float, y: float, width: float, height: float, pixels: Pixels) -> None:
    """A picture at inches from the left and from the top."""
    wide, high = fig.get_size_inches()
    axes = fig.add_axes((x / wide, 1 - (y + height) / high, width / wide, height / high))
    axes.imshow(pixels, aspect="auto", interpolation="nearest" if len(np.unique(pixels)) < 64 else "antialiased")
    axes.set_axis_off()
