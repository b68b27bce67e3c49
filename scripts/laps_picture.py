"""What LAPS remembers after step 0, as a picture: classes and clusters of background in two dimensions.

    python scripts/laps_picture.py RUN/steps/0 --out docs/images/laps-memory.svg

RUN/steps/0 holds meta.json (class names) and memory.safetensors. The plane is that of the two directions in which the
means of the classes differ most; ellipses hold one standard deviation.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib import pyplot as plt
from matplotlib.patches import Ellipse
from safetensors.numpy import load_file

from sdrseg.colours import class_colours


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("step", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    names = [c["name"] for c in json.loads((given.step / "meta.json").read_text())["classes"]]
    kept = {key: value.astype(np.float64) for key, value in load_file(given.step / "memory.safetensors").items()}
    classes = {key.removeprefix("memory.classes."): value for key, value in kept.items() if "memory.classes." in key}
    background = {key.removeprefix("memory.background."): v for key, v in kept.items() if "memory.background." in key}
    centre = classes["mean"].mean(0)
    plane = np.linalg.svd(classes["mean"] - centre, full_matrices=False)[2][:2]

    mpl.rcParams |= {"font.size": 8, "svg.hashsalt": "sdrseg"}
    figure, axes = plt.subplots(figsize=(5.5, 3.8), layout="constrained")
    x, y = plane @ (background["mean"] - centre).T
    share = background["points"] / background["points"].sum()
    axes.scatter(x, y, 2000 * share, color="0.75", label=f"background, {len(share)} clusters (area: share of pixels)")
    colours = class_colours(range(len(names)))
    for row, owner in enumerate(classes["owner"].astype(int)):
        at = plane @ (classes["mean"][row] - centre)
        along = plane @ classes["factor"][row]
        spread = along @ along.T + plane @ np.diag(classes["variance"][row]) @ plane.T
        sizes, directions = np.linalg.eigh(spread)
        angle = np.degrees(np.arctan2(directions[1, 1], directions[0, 1]))
        colour = np.array(colours[owner]) / 255
        wide, high = 2 * np.sqrt(sizes[1]), 2 * np.sqrt(sizes[0])
        axes.add_patch(Ellipse(at, wide, high, angle=angle, color=colour, alpha=0.25, linewidth=0))
        axes.annotate(names[owner], at, ha="center", va="center", color=colour * 0.6)
    axes.autoscale_view()
    axes.set(xlabel="first direction", ylabel="second direction")
    axes.legend(loc="lower left", frameon=False)
    numbers = sum(value.size for part in (classes, background) for value in part.values())
    axes.set_title(f"Remembered after step 0: {len(classes['owner'])} classes and background, {numbers:,} numbers")
    figure.savefig(given.out, metadata={"Date": None})


if __name__ == "__main__":
    main()
