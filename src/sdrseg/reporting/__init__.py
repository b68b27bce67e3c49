"""`sdrseg report`: one self-contained HTML page that compares runs. docs/report.md describes it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from sdrseg.errors import SdrsegError, UsageError, quantity
from sdrseg.files import atomic_writer, require_writable

if TYPE_CHECKING:
    from sdrseg.reporting.collect import RunRecord
    from sdrseg.reporting.page import Gathered
    from sdrseg.reporting.pictures import ModelOutput, Row

IMAGES = 10
SEARCHED = 2000  # bytes of a file that are searched for MARK
MARK = "sdrseg report"
"""Marks reports of sdrseg, which may be replaced; other files may not."""


def write_report(
    runs: str | Path | Sequence[str | Path],
    out: str | Path | None = None,
    data: str | Path | None = None,
    images: int = IMAGES,
    overwrite: bool = False,
) -> tuple[Path, list[str]]:
    """Write a report on some runs; returns its file and notes on what is missing.

    A file that is not a report is replaced only with `overwrite`.
    """
    paths = [Path(run) for run in ([runs] if isinstance(runs, str | Path) else runs)]
    out, data = (None if path is None else Path(path) for path in (out, data))
    if not paths:
        raise UsageError("name at least one run.")
    if out is not None:
        check_may_write(out, overwrite)  # before any work is done

    if data is not None and not data.exists():
        raise SdrsegError(f"{data}: no such folder. Name the folder of the data set with --data, or leave it out.")

    from sdrseg.reporting.collect import collect
    from sdrseg.reporting.page import render

    records = collect(paths)
    if out is None:
        out = Path(re.sub(r"[^\w.-]+", "-", records[0].identity["spec"])[:100] + ".html")
        check_may_write(out, overwrite)
    found = gather(records, data, images)
    if not found.rows and not overwrite and _has_pictures(out):
        raise SdrsegError(
            f"{out} has pictures, and the new page would have none. {found.notes[-1]} "
            "Otherwise, choose another name with --out, or add --overwrite."
        )
    page = render(records, found)
    with atomic_writer(out) as file:
        file.write(page.encode("utf-8", "replace"))
    return out, found.notes


def check_may_write(file: Path, overwrite: bool = False) -> None:
    """Raise an error if the file cannot be written, or exists and is not a report (unless `overwrite`)."""
    try:
        if file.is_dir():
            raise SdrsegError(f"{file} is a folder. Choose a file with --out.")
        require_writable(file, "Choose another file with --out.")
        if not file.exists():
            return
        with file.open("rb") as opened:
            ours = f'<meta name="generator" content="{MARK}'.encode() in opened.read(SEARCHED)
    except OSError as error:
        raise SdrsegError(f"{file}: {error.strerror}. Choose another name with --out.") from error
    if not (ours or overwrite):
        raise SdrsegError(
            f"{file} exists and is not an sdrseg report. Choose another name with --out, or add --overwrite."
        )


def _has_pictures(report: Path) -> bool:
    """Whether the file is a report with test images."""
    return report.exists() and b".photo-0{" in report.read_bytes()


def gather(runs: Sequence[RunRecord], data: Path | None, wanted: int) -> Gathered:
    """Read the memories of the runs and, if the data set is available, compute predictions and features."""
    from sdrseg.engine.job import TEST_IMAGES, scored_on
    from sdrseg.reporting.extension import picture, read_extension
    from sdrseg.reporting.latent import measure, prototype_distances, remembered
    from sdrseg.reporting.page import Gathered
    from sdrseg.reporting.pictures import apply_models, choose, load_images, open_data, start_row, takes_folder
    from sdrseg.terminal import progress

    found = Gathered(latents=[None] * len(runs), prototypes=[None] * len(runs), memories=[None] * len(runs))
    if (scored := scored_on(runs[0].config)) != TEST_IMAGES:
        found.notes.append(f"Scored on {scored}, not on the test images.")
    for number, run in enumerate(runs):
        try:
            memory = run.folder.load_memory(run.last)
        except SdrsegError as error:
            found.notes.append(f"Prototypes of {run.label} are missing: {error}")
            continue
        found.prototypes[number] = prototype_distances(memory, run.config.proto.average)
        found.memories[number] = remembered(memory)
    extended = [(run, one) for run in runs if (one := read_extension(run)) is not None]
    found.extensions = [one for _, one in extended]
    if wanted < 1:
        found.notes.append("No pictures or features, as requested (--images 0).")
        return found
    names = runs[0].all_names
    try:
        tests = open_data(runs, data)
        choice = choose(runs[0], tests, wanted)
        images = load_images(runs[0], tests.source, choice.ids)
    except SdrsegError as error:
        if data is not None:  # explicitly requested
            raise
        hint = " To add them, run `sdrseg report` again with --data PATH, as for `sdrseg train`."
        found.notes.append(
            f"Pictures and features are missing because the data set was not found: {error}"
            f"{hint if takes_folder(runs[0]) else ''}"
        )
        return found
    found.notes += tests.notes
    found.rows = [start_row(image, names, runs[0].colours) for image in images]
    found.how_chosen = _how_chosen(len(images), [names[c] for c in choice.missing])
    total, counter = len(images) * sum(len(run.scores) for run in runs), count(1)
    with progress("predicting test images") as advance:
        for number, run in enumerate(runs):
            for row in found.rows:
                row.predictions.append([])
            try:
                outputs = _collect_tiles(
                    apply_models(run, images), run, found.rows, lambda: advance(next(counter), total)
                )
                found.latents[number] = measure(outputs, run, len(names))
            except SdrsegError as error:
                found.notes.append(f"Predictions and features of {run.label} are missing: {error}")
    for run, extension in extended:
        try:
            picture(extension, run, tests)
        except SdrsegError as error:
            found.notes.append(f"Pictures of what {run.label} kept and lost are missing: {error}")
    return found


def _collect_tiles(
    outputs: Iterator[ModelOutput], run: RunRecord, rows: Sequence[Row], report: Callable[[], None]
) -> Iterator[ModelOutput]:
    """Add each prediction to its row, report progress, and pass it on."""
    from sdrseg.reporting.pictures import prediction_tile

    by_id = {row.id: row for row in rows}
    for one in outputs:
        tile = prediction_tile(one, run.label, run.all_names, run.colours)
        by_id[one.image.id].predictions[-1].append(tile)
        report()
        yield one


def _how_chosen(images: int, missing: Sequence[str]) -> str:
    counted = f"{quantity(images, 'test image')} {'was' if images == 1 else 'were'}"
    text = (
        f"{counted} chosen by labels only, before any prediction: each time the image with the most classes not yet "
        "shown, then with those shown least often; ties go to the first id. A class counts as shown if it covers at "
        "least 1\u00a0% of an image."
    )
    if missing:
        text += f" Not shown: {', '.join(missing)}; increase --images to show more."
    return text
