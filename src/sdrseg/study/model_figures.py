"""Figures that need the models of runs: activations and latent space."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.patches import Patch

from sdrseg.colours import hex_of
from sdrseg.errors import SdrsegError, UsageError, quantity
from sdrseg.reporting.collect import RunRecord, collect
from sdrseg.reporting.latent import BINS, UNCERTAIN, Latent, measure, share_uncertain
from sdrseg.reporting.pictures import TestImage, apply_models, choose, load_images, open_data
from sdrseg.study.figures import COLUMN, DPI, PAGE, figure, legend_below, line_style, save


def open_runs(
    paths: Sequence[Path], data: Path | None, images: int, ids: Sequence[str] = ()
) -> tuple[list[RunRecord], list[TestImage]]:
    """Finished runs of one scenario, and test images: those in `ids`, or `images` images that show all classes."""
    runs = collect(paths)
    for run in runs:
        if not run.finished:
            raise SdrsegError(f"{run.path}: not finished yet. Finish it with `sdrseg train` first.")
    known = runs[0].scenario["steps"][-1]["test_ids"]
    if wrong := [id for id in ids if id not in known]:
        raise UsageError(f"--id {wrong[0]}: not one of the {quantity(len(known), 'test image')}, such as {known[0]}.")
    tests = open_data(runs, data)
    if gone := [id for id in ids if id not in tests.ids]:
        raise SdrsegError(f"--id {gone[0]}: {' '.join(tests.notes)}")
    return runs, load_images(runs[0], tests.source, ids or choose(runs[0], tests, images).ids)


def measured(runs: Sequence[RunRecord], images: Sequence[TestImage]) -> list[Latent]:
    return [measure(apply_models(run, images), run, len(run.all_names)) for run in runs]


def draw_histogram(runs: Sequence[RunRecord], images: Sequence[TestImage], out: Path, dpi: int = DPI) -> list[Path]:
    """The distribution of activations, each divided by the largest of its class in the image."""
    latents = measured(runs, images)
    centres = (np.arange(BINS) + 0.5) / BINS
    with figure(COLUMN, 2.1) as fig:
        axis = fig.subplots()
        for number, (run, latent) in enumerate(zip(runs, latents, strict=True)):
            if latent.histogram is not None:
                share = 100 * share_uncertain(latent.histogram)
                label = f"{run.label} ({share:.1f} % in {UNCERTAIN[0]}–{UNCERTAIN[1]})"
                axis.plot(centres, np.maximum(latent.histogram, 1e-7), label=label, **line_style(number))
        axis.axvspan(*UNCERTAIN, color="0.93", lw=0)
        axis.set(yscale="log", xlim=(0, 1), xlabel="activation / class maximum", ylabel="share of activations")
        legend_below(fig, *axis.get_legend_handles_labels())
        return save(fig, out, dpi)


def draw_latent(runs: Sequence[RunRecord], images: Sequence[TestImage], out: Path, dpi: int = DPI) -> list[Path]:
    """The same cells of the features before and after the last step, in two principal components."""
    pairs = [(run, one.projection) for run, one in zip(runs, measured(runs, images), strict=True)]
    shown = [(run, one) for run, one in pairs if one is not None]
    if not shown:
        raise SdrsegError("These runs have only one step; the figure shows features before and after a step.")
    with figure(PAGE, 2.6 * len(shown) + 0.2) as fig:
        axes = fig.subplots(len(shown), 2, squeeze=False)
        used: set[int] = set()
        for line, (run, projection) in zip(axes, shown, strict=True):
            all_points = np.concatenate(projection.points)
            low, high = all_points.min(axis=0), all_points.max(axis=0)
            margin = 0.03 * np.maximum(high - low, 1e-6)
            limits = np.stack([low - margin, high + margin])
            for axis, points, step in zip(line, projection.points, (projection.before, projection.after), strict=True):
                for c in sorted(set(projection.channels.tolist())):
                    used.add(c)
                    class_points = points[projection.channels == c]
                    axis.plot(*class_points.T, ls="", marker=".", ms=2.5, color=hex_of(run.colours[c]))
                axis.set(title=f"{run.label}, step {step}", xticks=[], yticks=[])
                axis.set(xlim=limits[:, 0], ylim=limits[:, 1])
            line[0].set_ylabel(f"{100 * projection.explained:.0f} % of the variance")
        names, colours = runs[0].all_names, runs[0].colours
        shown_classes = sorted(used)
        patches = [Patch(facecolor=hex_of(colours[c])) for c in shown_classes]
        legend_below(fig, patches, [names[c] for c in shown_classes])
        return save(fig, out, dpi)
