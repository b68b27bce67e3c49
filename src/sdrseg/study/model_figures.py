"""Figures that need the models of runs: predictions, activations, the latent space."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.colors import ListedColormap
from matplotlib.patches import Patch

from sdrseg.colours import NOT_SCORED, hex_of
from sdrseg.errors import SdrsegError
from sdrseg.labels import VOID
from sdrseg.report.collect import RunRecord, collect
from sdrseg.report.latent import BINS, Latent, measure
from sdrseg.report.pictures import TestImage, choose, load_images, look, open_data
from sdrseg.study.figures import COLUMN, PAGE, figure, look_of, save

UNCERTAIN = (0.3, 0.85)
"""The activations of which the paper says that its sparsity term removes them."""


def _open(paths: Sequence[Path], data: Path | None, images: int) -> tuple[list[RunRecord], list[TestImage]]:
    runs = collect(paths)
    for run in runs:
        if not run.finished:
            raise SdrsegError(f"{run.path}: not finished yet. Let `sdrseg train` finish it first.")
    source, index = open_data(runs, data)
    return runs, load_images(runs[0], source, choose(runs[0], source, index, images).ids)


def draw_qualitative(paths: Sequence[Path], data: Path | None, images: int, every_step: bool, out: Path) -> list[Path]:
    """Test images, their truth, and what each run predicts: after the last step, or after every one."""
    runs, chosen = _open(paths, data, images)
    colours = [hex_of(colour) for colour in (*runs[0].colours, NOT_SCORED)]
    palette: dict[str, Any] = {"cmap": ListedColormap(colours), "vmin": -0.5, "vmax": len(colours) - 0.5}
    palette["interpolation"] = "nearest"
    predicted: dict[tuple[int, int, str], Any] = {}
    for number, run in enumerate(runs):
        for seen in look(run, chosen):
            if every_step or seen.step == run.last:
                predicted[number, seen.step, seen.image.id] = seen.predicted
    heads, rows = _layout(runs, chosen, predicted, every_step)
    width = PAGE / len(heads)
    used: set[int] = set()
    with figure(PAGE, 0.9 * width * len(rows) + 0.6) as made:
        axes = made.subplots(len(rows), len(heads), squeeze=False)
        for axis, head in zip(axes[0], heads, strict=True):
            axis.set_title(head)
        for line, row in zip(axes, rows, strict=True):
            for axis, (name, kind, shown) in zip(line, row, strict=True):
                axis.set(xticks=[], yticks=[], ylabel=name)
                axis.spines[:].set_visible(False)
                if kind == "photo":
                    axis.imshow(shown)
                elif kind == "mask":
                    values = np.where(shown == VOID, len(colours) - 1, shown)
                    used |= set(np.unique(values).tolist()) - {len(colours) - 1}
                    axis.imshow(values, **palette)
        names = runs[0].all_names
        patches = [Patch(facecolor=colours[c], label=names[c]) for c in sorted(used)]
        made.legend(handles=patches, loc="outside lower center", ncols=min(7, max(1, len(patches))), frameon=False)
        return save(made, out)


Shown = tuple[str, str, Any]  # name of the row, kind of picture, pixels


def _layout(
    runs: Sequence[RunRecord], chosen: Sequence[TestImage], predicted: dict[tuple[int, int, str], Any], every_step: bool
) -> tuple[list[str], list[list[Shown]]]:
    """Heads of the columns, and rows: one an image, or with every step one for each image and run."""
    rows: list[list[Shown]] = []
    last = runs[0].last
    for image in chosen:
        photo = ("", "photo", image.pixels.permute(1, 2, 0).numpy())
        truth = ("", "mask", image.labels.numpy())
        if not every_step:
            rows.append([photo, truth, *(("", "mask", predicted[n, last, image.id]) for n in range(len(runs)))])
            continue
        for number, run in enumerate(runs):
            begin: list[Shown] = [photo, truth] if number == 0 else [("", "", None), ("", "", None)]
            begin[0] = (run.label, *begin[0][1:])
            rows.append([*begin, *(("", "mask", predicted[number, k, image.id]) for k in range(last + 1))])
    heads = [f"step {k}" for k in range(last + 1)] if every_step else [run.label for run in runs]
    return ["image", "truth", *heads], rows


def measured(runs: Sequence[RunRecord], chosen: Sequence[TestImage]) -> list[Latent]:
    return [measure(look(run, chosen), run, len(run.all_names)) for run in runs]


def share_uncertain(latent: Latent) -> float | None:
    """The share of activations, divided by the largest of their class, between 0.3 and 0.85."""
    if latent.histogram is None:
        return None
    edges = np.linspace(0, 1, BINS + 1)
    low, high = UNCERTAIN
    inside = np.clip(np.minimum(edges[1:], high) - np.maximum(edges[:-1], low), 0, None) * BINS
    return float((latent.histogram * inside).sum())


def draw_histogram(paths: Sequence[Path], data: Path | None, images: int, out: Path) -> list[Path]:
    """How activations are distributed, each divided by the largest of its class in the image."""
    runs, chosen = _open(paths, data, images)
    latents = measured(runs, chosen)
    centres = (np.arange(BINS) + 0.5) / BINS
    with figure(COLUMN, 2.4) as made:
        axis = made.subplots()
        for number, (run, latent) in enumerate(zip(runs, latents, strict=True)):
            if latent.histogram is not None:
                share = 100 * (share_uncertain(latent) or 0)
                label = f"{run.label} ({share:.1f} % in {UNCERTAIN[0]}–{UNCERTAIN[1]})"
                axis.plot(centres, np.maximum(latent.histogram, 1e-7), label=label, **look_of(number))
        axis.axvspan(*UNCERTAIN, color="0.93", lw=0)
        axis.set(yscale="log", xlim=(0, 1), xlabel="activation / class maximum", ylabel="share of activations")
        made.legend(loc="outside lower center", frameon=False)
        return save(made, out)


def draw_latent(paths: Sequence[Path], data: Path | None, images: int, out: Path) -> list[Path]:
    """The same cells of the features before and after the last step, in two principal components."""
    runs, chosen = _open(paths, data, images)
    pairs = [(run, one.projection) for run, one in zip(runs, measured(runs, chosen), strict=True)]
    shown = [(run, one) for run, one in pairs if one is not None]
    if not shown:
        raise SdrsegError("These runs have one step; the figure shows features before and after a step.")
    with figure(PAGE, 2.6 * len(shown) + 0.5) as made:
        axes = made.subplots(len(shown), 2, squeeze=False)
        used: set[int] = set()
        for line, (run, projection) in zip(axes, shown, strict=True):
            every = np.concatenate(projection.points)
            for axis, points, step in zip(line, projection.points, (projection.before, projection.after), strict=True):
                for c in sorted(set(projection.channels.tolist())):
                    used.add(c)
                    of_class = points[projection.channels == c]
                    axis.plot(*of_class.T, ls="", marker=".", ms=2.5, color=hex_of(run.colours[c]))
                axis.set(title=f"{run.label}, step {step}", xticks=[], yticks=[])
                axis.set(xlim=(every[:, 0].min(), every[:, 0].max()), ylim=(every[:, 1].min(), every[:, 1].max()))
            line[0].set_ylabel(f"{100 * projection.explained:.0f} % of the variance")
        names, colours = runs[0].all_names, runs[0].colours
        patches = [Patch(facecolor=hex_of(colours[c]), label=names[c]) for c in sorted(used)]
        made.legend(handles=patches, loc="outside lower center", ncols=min(7, max(1, len(patches))), frameon=False)
        return save(made, out)
