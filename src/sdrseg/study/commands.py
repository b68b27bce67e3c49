"""What the verbs about studies do and print."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sdrseg.distributed import Everyone
from sdrseg.errors import UsageError, nearest
from sdrseg.files import atomic_writer
from sdrseg.study.cell import read_cells
from sdrseg.study.compare import compare
from sdrseg.study.estimate import plan
from sdrseg.study.grid import Study, read_study
from sdrseg.study.paper import experiments_of, paper_table, study_of
from sdrseg.study.queue import Keep, finished_cells, run_queue
from sdrseg.study.render import to_csv, to_latex, to_markdown, to_terminal
from sdrseg.study.tables import Table, fill
from sdrseg.terminal import clock, console, print_json, print_table


def run_study(
    study: Study,
    out: Path | None,
    *,
    data: Path | None,
    bases: Path | None,
    cells: str | None,
    only: Sequence[str],
    results: Sequence[Path],
    minutes: float | None,
    keep: str,
    dry_run: bool,
    json: bool,
) -> bool:
    """Run the chosen experiments of a study, or show them; whether none failed."""
    if keep not in ("all", "last", "none"):
        raise UsageError(f"--keep-models {keep} is not possible: all, last or none.")
    kept: Keep = keep  # type: ignore[assignment]
    out, data, bases = out or Path(study.name), data or study.data, bases or study.bases
    chosen = study.chosen(cells, only)
    if dry_run:
        show_plan(study, [e.folder for e in chosen], plan(study.experiments, data, finished_cells(out, results)), json)
        return True
    outcome = run_queue(chosen, out, data=data, bases=bases, results=results, minutes=minutes, keep=kept)
    if Everyone().rank == 0:
        if json:
            print_json({"out": str(out), **vars(outcome)})
        else:
            console().print(f"{outcome.sentence()}. Results are in {out / 'results'}", soft_wrap=True)
            for label, why in outcome.failed.items():
                console().print(f"failed: {label}: {why}", soft_wrap=True)
    return not outcome.failed


def show_plan(study: Study, chosen: Sequence[str], rows: Sequence[dict[str, Any]], json: bool) -> None:
    """What would be run."""
    rows = [row for row in rows if row["name"] in set(chosen)]
    seconds = sum(row["seconds"] or 0 for row in rows if not row["done"])
    if json:
        print_json({"study": study.name, "seconds": round(seconds, 1), "cells": rows})
        return
    body = [
        [row["number"], row["label"], *("–" if row[k] is None else row[k] for k in ("images", "iterations"))]
        + ["done" if row["done"] else "–" if row["seconds"] is None else clock(row["seconds"])]
        for row in rows
    ]
    print_table(study.name, ["number", "experiment", "training images", "iterations", "time, about"], body)
    console().print(f"{len(rows)} experiments, about {clock(seconds)} to go", soft_wrap=True)


def run_file(file: Path, out: Path | None, **options: Any) -> bool:
    """`run_study` of a file."""
    return run_study(read_study(file), out, **options)


def show_table(table: Table, format: str, out: Path | None) -> None:
    """Print a table in a form, or write it into a new file."""
    forms = {"markdown": to_markdown, "csv": to_csv, "latex": to_latex}
    if format not in ("terminal", *forms):
        raise UsageError(f"--format {format} is not possible: terminal, {', '.join(forms)}.")
    if format == "terminal":
        if out is not None:
            raise UsageError("--out needs --format markdown, csv or latex.")
        console().print(to_terminal(table))
        return
    text = forms[format](table)
    if out is None:
        print(text, end="")
        return
    if out.exists():
        raise UsageError(f"{out} is there already. Name a new file.")
    with atomic_writer(out) as file:
        file.write(text.encode())


def compare_results(
    places: Sequence[Path], transform: str | None, reference: str | None, format: str, out: Path | None
) -> None:
    """`sdrseg compare`."""
    show_table(compare(read_cells(places), _known(transform), reference), format, out)


def paper_results(
    name: str,
    out: Path | None,
    *,
    seeds: Sequence[int],
    preset: str,
    settings: dict[str, Any],
    results: Sequence[Path],
    transform: str | None,
    format: str,
    to: Path | None,
    run: bool,
    dry_run: bool,
    **options: Any,
) -> bool:
    """`sdrseg tables`: show a table of the paper with our numbers, after running what is missing if asked to."""
    table = paper_table(name)
    grid = experiments_of(table, seeds, preset, settings)
    study, out = study_of(table, grid), out or Path(name)
    well = True
    if run or dry_run:
        well = run_study(study, out, results=results, dry_run=dry_run, **options)
    if not dry_run and Everyone().rank == 0:
        show_table(fill(table, grid, finished_cells(out, results), _known(transform)), format, to)
    return well


def _known(transform: str | None) -> str | None:
    if transform not in (None, "crop512", "full_image"):
        raise UsageError(f"--eval {transform} is not possible: crop512 or full_image.")
    return transform


def draw(kind: str, places: Sequence[Path], out: Path, data: Path | None, images: int, every_step: bool) -> list[Path]:
    """`sdrseg figures`: the files that were written."""
    from sdrseg.study import figures, model_figures

    if kind == "steps":
        return figures.draw_steps(read_cells(places), out)
    if kind == "per-class":
        return figures.draw_classes(read_cells(places), out)
    if kind == "qualitative":
        return model_figures.draw_qualitative(places, data, images, every_step, out)
    if kind == "histogram":
        return model_figures.draw_histogram(places, data, images, out)
    if kind == "latent":
        return model_figures.draw_latent(places, data, images, out)
    known = ["steps", "per-class", "qualitative", "histogram", "latent"]
    raise UsageError(f"unknown figure {kind!r}{nearest(kind, known)}")
