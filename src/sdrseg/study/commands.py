"""The commands for studies and their output."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sdrseg.distributed import Processes
from sdrseg.errors import UsageError, nearest, quantity
from sdrseg.files import atomic_writer
from sdrseg.study.cell import Cell, read_cells
from sdrseg.study.cluster import Machines, gather, make_workers, submit
from sdrseg.study.compare import abbreviated, compare, short_labels, spec_of
from sdrseg.study.estimate import by_base, plan
from sdrseg.study.grid import Experiment, Study, read_study
from sdrseg.study.paper import Grid, PaperTable, experiments_of, kept_settings, paper_table, study_of
from sdrseg.study.queue import finished_cells, require_data, run_queue
from sdrseg.study.render import to_csv, to_dict, to_latex, to_markdown, to_terminal
from sdrseg.study.tables import Table, fill
from sdrseg.terminal import clock, console, print_json, print_table


@dataclass(frozen=True)
class Options:
    """The common options of `sdrseg run` and `sdrseg tables`: which experiments to run, and how."""

    out: Path | None = None
    data: Path | None = None
    bases: Path | None = None
    cells: str | None = None
    only: Sequence[str] = ()
    results: Sequence[Path] = ()
    minutes: float | None = None
    keep: str = "all"
    dry_run: bool = False
    json: bool = False
    machines: Machines | None = None


def run_study(study: Study, options: Options, read: Callable[..., Study], arguments: Mapping[str, Any]) -> bool:
    """Run or show the chosen experiments of a study; returns whether none failed. `read`: reads it in workers."""
    if options.keep not in ("all", "last", "none"):
        raise UsageError(f"--keep-models {options.keep}: use all, last or none.")
    out = options.out or Path(study.name)
    data, bases = options.data or study.data, options.bases or study.bases
    chosen = study.chosen(options.cells, options.only)
    if options.dry_run:
        if data is not None:
            require_data(chosen, data, finished_cells(out, options.results))
        rows = plan(chosen, data, finished_cells(out, options.results), bases)
        show_plan(study, rows, options.json)
        return True
    if options.machines is None or options.machines.on == "local":  # the machines of a cluster may have other folders
        require_data(chosen, data, finished_cells(out, options.results))
    queue: dict[str, Any] = {"data": data, "bases": bases, "results": options.results}
    queue |= {"minutes": options.minutes, "keep": options.keep}
    if options.machines is not None:
        folders = tuple(e.folder for e in chosen)
        worker = {"read": read, "arguments": arguments, "out": out, "chosen": folders, "options": queue}
        return start_workers(options.machines, out, worker, options.json)
    outcome = run_queue(by_base(chosen), out, **queue)  # several workers had better begin with different bases
    if Processes().rank == 0:
        if options.json:
            print_json({"out": str(out), **vars(outcome)})
        else:
            console().print(f"{outcome.sentence()}. Results are in {out / 'results'}", soft_wrap=True)
            for label, why in outcome.failed.items():
                console().print(f"failed: {label}: {why}", soft_wrap=True)
    return not outcome.failed


def start_workers(machines: Machines, out: Path, worker: Mapping[str, Any], json: bool) -> bool:
    """Start workers. Waits for those on this machine, but not for those of SLURM."""
    jobs = submit(make_workers(machines.array, **worker), machines, out / "jobs")
    if machines.on == "slurm":
        names = [str(job.job_id) for job in jobs]
        if json:
            print_json({"out": str(out), "jobs": names})
        else:
            console().print(f"started {', '.join(names)}; logs are in {out / 'jobs'}, results in {out / 'results'}")
        return True
    result = gather(jobs)
    if json:
        print_json({"out": str(out), **result})
    else:
        console().print(f"{len(result['finished'])} finished. Results are in {out / 'results'}", soft_wrap=True)
        for label, why in result["failed"].items():
            console().print(f"failed: {label}: {why}", soft_wrap=True)
        if result["left"]:
            console().print(f"{len(result['left'])} left; run the same command again to resume", soft_wrap=True)
        for why in result["lost"]:
            console().print(f"a worker was lost: {why}. Run the same command again to resume.", soft_wrap=True)
    return not result["failed"] and not result["lost"]


def show_plan(study: Study, rows: Sequence[dict[str, Any]], json: bool) -> None:
    """Show the experiments that would run, with their numbers in the study."""
    numbers = {experiment.folder: number for number, experiment in enumerate(study.experiments, 1)}
    rows = [{"number": numbers[row["name"]], **row} for row in rows]
    left = [row for row in rows if not row["done"]]
    seconds, unknown = sum(row["seconds"] or 0 for row in left), sum(row["seconds"] is None for row in left)
    problems = Counter(row["problem"] for row in left if row["problem"])
    if json:
        print_json({"study": study.name, "seconds": round(seconds, 1), "unknown": unknown, "cells": rows})
        return
    body = [
        [row["number"], row["label"], *("–" if row[k] is None else row[k] for k in ("images", "iterations"))]
        + ["done" if row["done"] else "–" if row["seconds"] is None else clock(row["seconds"])]
        for row in rows
    ]
    print_table(study.name, ["number", "experiment", "training images", "iterations", "estimated time"], body)
    machines = ", ".join(dict.fromkeys(row["machine"] for row in left if row["machine"]))
    parts = [f"about {clock(seconds)} remaining on {machines}"] if machines else []
    elsewhere = unknown - problems.total()
    parts += [f"{elsewhere} of unknown length, because their data are not here (--data PATH)"] if elsewhere else []
    parts += [f"{problems.total()} of unknown length (below)"] if problems else []
    console().print(", ".join([quantity(len(rows), "experiment"), *(parts or ["none left"])]), soft_wrap=True)
    for problem, count in problems.items():
        console().print(f"{quantity(count, 'experiment')}: {problem}", soft_wrap=True)


def run_file(file: Path, options: Options) -> bool:
    """`sdrseg run`."""
    return run_study(read_study(file), options, read_study, {"file": file.resolve()})


def read_tables(names: Sequence[str], seeds: Sequence[int], preset: str, settings: Mapping[str, Any]) -> Study:
    """The experiments of tables of the paper."""
    return study_of([experiments_of(paper_table(name), seeds, preset, settings) for name in names], _study_name(names))


def _study_name(names: Sequence[str]) -> str:
    """The name of a study of tables, and of its folder."""
    return names[0] if len(names) == 1 else "tables"


def show_table(table: Table, format: str, out: Path | None) -> None:
    """Print a table in a format, or write it to a new file."""
    forms = {"markdown": to_markdown, "csv": to_csv, "latex": to_latex}
    if format not in ("terminal", *forms):
        raise UsageError(f"--format {format}: use terminal, {', '.join(forms)}.")
    if format == "terminal":
        if out is not None:
            raise UsageError("--to needs --format markdown, csv or latex.")
        console().print(to_terminal(table))
        return
    text = forms[format](table)
    if out is None:
        print(text, end="")
        return
    if out.exists():
        raise UsageError(f"{out} already exists. Choose a new file.")
    with atomic_writer(out) as file:
        file.write(text.encode())


def compare_results(
    paths: Sequence[Path], transform: str | None, reference: str | None, format: str, out: Path | None
) -> None:
    """`sdrseg compare`."""
    cells, transform = read_cells(paths), _known(transform)
    if reference is not None:
        full = {short: label for label, short in short_labels(compare(cells, transform)).items()}
        reference = full.get(reference, reference)
    table = compare(cells, transform, reference)
    show_table(table if format == "csv" else abbreviated(table), format, out)


def paper_results(
    names: Sequence[str],
    options: Options,
    *,
    seeds: Sequence[int],
    preset: str,
    settings: Mapping[str, Any],
    transform: str | None,
    format: str,
    to: Path | None,
    run: bool,
) -> bool:
    """`sdrseg tables`: show tables of the paper with our numbers; with `run`, first run missing experiments."""
    names = list(dict.fromkeys(names))
    if options.json and (to is not None or format != "terminal"):
        raise UsageError("--json prints the numbers; leave out --format and --to.")
    if to is not None and len(names) > 1:
        raise UsageError(f"--to {to}: takes one table, not {quantity(len(names), 'table')}.")
    unused = {"--cells": options.cells, "--only": options.only, "--budget": options.minutes}
    if not run and not options.dry_run and (given := [name for name, value in unused.items() if value]):
        raise UsageError(f"{given[0]} chooses what runs: add --run or --dry-run.")
    arguments: dict[str, Any] = {"names": names, "seeds": seeds, "preset": preset, "settings": settings}
    study = read_tables(**arguments)
    succeeded = True
    if run or options.dry_run:
        succeeded = run_study(study, options, read_tables, arguments)
    if options.dry_run or (run and options.json) or Processes().rank > 0:  # what --json prints is one document
        return succeeded
    out = options.out or Path(study.name)
    filled = {}
    for name in names:
        grid = experiments_of(paper_table(name), seeds, preset, settings)
        filled[name] = _filled(paper_table(name), grid, out, options, settings, transform)
    if options.json:
        numbers = {name: to_dict(table) for name, table in filled.items()}
        print_json(numbers if len(names) > 1 else numbers[names[0]])
    else:
        for table in filled.values():
            show_table(table, format, to)
    return succeeded


def _filled(
    table: PaperTable, grid: Grid, out: Path, options: Options, settings: Mapping[str, Any], transform: str | None
) -> Table:
    """A table of the paper with the results in the study's folder and in others."""
    cells = finished_cells(out, options.results)
    some = [experiment for row in grid.values() for experiment in row]
    notes = (*kept_settings(table, settings), *_not_shown(cells, some))
    if "uncertain" in table.values:
        from sdrseg.study.activations import with_activations

        cells, more = with_activations(cells, some, out, options.data)
        notes += more
    filled = fill(table, grid, cells, _known(transform))
    return replace(filled, notes=(*filled.notes, *notes))


def _not_shown(cells: Sequence[Cell], experiments: Sequence[Experiment]) -> tuple[str, ...]:
    """A note on results of the same methods and scenarios that a table leaves out."""
    shown, known = {e.hash for e in experiments}, {(str(e.spec), e.method) for e in experiments}
    others = [c for c in cells if c["config"] not in shown and (spec_of(c), c["method"]) in known]
    if not others:
        return ()
    found = f"Not shown: {quantity(len(others), 'result')} with other settings or seeds"
    return (f"{found}; --config, --set, --preset and --seeds select what is shown.",)


def _known(transform: str | None) -> str | None:
    if transform not in (None, "crop512", "full_image"):
        raise UsageError(f"--eval {transform}: use crop512 or full_image.")
    return transform


def draw(
    kind: str,
    paths: Sequence[Path],
    out: Path,
    *,
    data: Path | None,
    images: int,
    ids: Sequence[str],
    every_step: bool,
    photos: bool,
    dpi: int,
) -> list[Path]:
    """`sdrseg figures`: draw a figure; returns the files."""
    from sdrseg.study import figures, model_figures, qualitative

    from_results = {"steps": figures.draw_steps, "per-class": figures.draw_classes}
    if kind in from_results:
        return from_results[kind](read_cells(paths), out, dpi)
    from_models = {"histogram": model_figures.draw_histogram, "latent": model_figures.draw_latent}
    if kind not in ("qualitative", *from_models):
        known = [*from_results, "qualitative", *from_models]
        raise UsageError(f"unknown figure {kind!r}{nearest(kind, known)}")
    runs, chosen = model_figures.open_runs(paths, data, images, ids)
    if kind == "qualitative":
        return qualitative.draw_qualitative(runs, chosen, every_step, photos, out, dpi)
    return from_models[kind](runs, chosen, out, dpi)
