"""A picture grid of a data set: images with their labels, one row per step of a scenario."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from PIL import Image

from sdrseg.colours import colour_table
from sdrseg.datasets.source import Array, Source
from sdrseg.errors import DataError, SdrsegError, quantity
from sdrseg.files import atomic_writer, require_writable
from sdrseg.labels import VOID
from sdrseg.scenario import Scenario

COLUMNS = 6
CELL = (2.2, 1.35)  # inches: width and height of an image next to its label map, including the title
TITLE = 0.32
LEGEND = 0.6
MAX_ROWS = 64  # later steps are not shown
OURS = "sdrseg"  # written into the PNG, so that only pictures made by sdrseg are replaced


def check_may_write(file: Path) -> None:
    """Raise an error if the file cannot be written or is a picture that sdrseg did not make."""
    require_writable(file, "Choose another file with --picture.")
    if not file.exists():
        return
    try:
        with Image.open(file) as picture:
            if picture.info.get("Software") == OURS:
                return
    except Exception:  # not a picture, or not readable: not ours in any case
        pass
    raise SdrsegError(f"{file} exists and was not made by sdrseg. Choose another name with --picture.")


def save_grid(source: Source, scenario: Scenario | None, file: Path) -> None:
    """Save a grid: each row shows some training images, each next to its label map as the step uses it."""
    if scenario is None:
        table = np.arange(256, dtype=np.uint8)
        rows = [("train", source.ids("train"), table), ("val", source.ids("val"), table)]
        channels: Sequence[int] = range(len(source.classes))
    else:
        rows = [(_title(source, s.new, s.number), s.train_ids, s.train_table) for s in scenario.steps]
        channels = scenario.steps[-1].channels
    left_out, rows = len(rows[MAX_ROWS:]), rows[:MAX_ROWS]
    colours = colour_table()
    width, height = COLUMNS * CELL[0], len(rows) * CELL[1] + LEGEND
    figure = Figure(figsize=(width, height), dpi=110)
    FigureCanvasAgg(figure)
    raw = np.full(256, VOID, np.uint8)
    raw[: len(channels)] = channels  # the colour of a class does not depend on its channel
    used: set[int] = set()
    for number, (title, ids, table) in enumerate(rows):
        bottom = height - (number + 1) * CELL[1]
        position = (0.01, (bottom + CELL[1] - 0.08) / height)
        figure.text(*position, title, fontsize=8, va="top", weight="bold", parse_math=False)
        for column, id in enumerate(_spread(ids)):
            box = (column * CELL[0] + 0.05, bottom + 0.03, CELL[0] - 0.1, CELL[1] - TITLE)
            axis = figure.add_axes((box[0] / width, box[1] / height, box[2] / width, box[3] / height), anchor="W")
            axis.set_axis_off()
            try:
                image, mask = source.pair(id)
            except DataError:
                axis.text(0.5, 0.5, f"{id}\nunreadable", ha="center", va="center", fontsize=6, parse_math=False)
                continue
            label = table[mask]
            used |= {int(v) for v in np.unique(label) if v != VOID}
            axis.imshow(_side_by_side(image, colours[raw[label]]))
    known = [c for c in sorted(used) if c < len(channels)]
    legend = [Patch(color=colours[channels[c]] / 255, label=source.classes[channels[c]]) for c in known]
    legend.append(Patch(facecolor="white", edgecolor="grey", label="void"))
    key = figure.legend(handles=legend, loc="lower center", ncols=min(11, len(legend)), fontsize=7, frameon=False)
    for text in key.get_texts():
        text.set_parse_math(False)
    if left_out:
        figure.text(0.01, 0.03 / height, f"and {quantity(left_out, 'more step')}", fontsize=8)
    with atomic_writer(file) as out:
        figure.savefig(out, format="png", metadata={"Software": OURS})


def _title(source: Source, new: Sequence[int], number: int) -> str:
    names = ", ".join(source.classes[c] for c in new) or "another random part, all classes"
    return f"step {number}: {names if len(names) < 150 else names[:147] + '…'}"


def _spread(ids: Sequence[str]) -> list[str]:
    """A few ids, evenly spaced in the list."""
    return [ids[i] for i in sorted({int(i) for i in np.linspace(0, len(ids) - 1, COLUMNS)})] if ids else []


def _side_by_side(image: Array, label: Array) -> Array:
    step = max(1, max(image.shape[:2]) // 256)  # thumbnails need not have every pixel
    return np.concatenate([image[::step, ::step], label[::step, ::step]], axis=1)
