"""Commands for many runs."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any

import typer

from sdrseg.cli.options import AsJson, Assignments, Bases, ConfigFile, DataPath, Preset, SourceFile

Out = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="Folder for runs and results; by default named after the file or the table."),
]
Cells = Annotated[str | None, typer.Option(metavar="NUMBERS", help="Only these experiments, such as 1-5,8.")]
Only = Annotated[
    list[str] | None,
    typer.Option(
        metavar="PATTERN", help="Only experiments that match, such as sdr, voc:15-1* or seed=1; or one of several."
    ),
]
Budget = Annotated[
    float | None, typer.Option(metavar="MINUTES", min=0, help="Stop after this time; run again to resume.")
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Show what would run and about how long it would take.")]
Results = Annotated[
    list[Path] | None,
    typer.Option(metavar="DIR", help="Folders with results; experiments found there are not run again."),
]
On = Annotated[
    str | None, typer.Option(metavar="WHERE", help="Start workers: slurm, or local (processes on this machine).")
]
Array = Annotated[int, typer.Option(min=1, help="With --on: the number of workers.")]
Gpus = Annotated[int, typer.Option(min=0, help="With --on: GPUs per worker.")]
Slurm = Annotated[
    list[str] | None,
    typer.Option(metavar="KEY=VALUE", help="With --on slurm: an option for sbatch, such as partition=gpu."),
]
KeepModels = Annotated[
    str, typer.Option(metavar="WHICH", help="Which models of finished runs to keep: all, last or none.")
]


def run(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Experiments in TOML; lists make a grid.")],
    out: Out = None,
    path: DataPath = None,
    bases: Bases = None,
    cells: Cells = None,
    only: Only = None,
    budget: Budget = None,
    results: Results = None,
    keep_models: KeepModels = "all",
    on: On = None,
    array: Array = 1,
    gpus: Gpus = 0,
    slurm: Slurm = None,
    dry_run: DryRun = False,
    json: AsJson = False,
) -> None:
    """Run all experiments in a file, one after the other. Finished ones are not run again."""
    from sdrseg.study.commands import Options, run_file

    machines = _machines(on, array, gpus, budget, slurm)
    how = (budget, keep_models, dry_run, json, machines)
    if not run_file(file, Options(out, path, bases, cells, only or [], results or [], *how)):
        raise typer.Exit(1)


def _machines(on: str | None, array: int, gpus: int, budget: float | None, slurm: list[str] | None) -> Any:
    from sdrseg.errors import UsageError
    from sdrseg.study.cluster import Machines

    if on is None:
        return None
    if wrong := [text for text in slurm or [] if "=" not in text]:
        raise UsageError(f"--slurm {wrong[0]}: write KEY=VALUE, such as partition=gpu.")
    pairs = dict(text.split("=", 1) for text in slurm or [])
    minutes = 24 * 60 if budget is None else math.ceil(budget) + 10  # time to save
    return Machines(on, array, gpus, minutes, pairs)


def result(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN", help="Folders of finished runs.")],
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Write one small JSON file per run there.")] = None,
) -> None:
    """Print the results of finished runs as JSON, or write one small file per run."""
    from sdrseg.study.cell import cell_of, write_cell
    from sdrseg.terminal import print_json

    if out is None:
        print_json([cell_of(run) for run in runs])
    else:
        for run in runs:
            print(write_cell(run, out))


Format = Annotated[str, typer.Option(help="terminal, markdown, csv or latex (booktabs).")]
Transform = Annotated[
    str | None, typer.Option("--eval", help="Which scores to show: crop512 or full_image; by default those of the run.")
]
ToFile = Annotated[Path | None, typer.Option("--to", metavar="FILE", help="A new file for the table.")]


def compare(
    paths: Annotated[list[Path], typer.Argument(metavar="RUN", help="Runs, results, or folders of results.")],
    reference: Annotated[
        str | None, typer.Option(metavar="ROW", help="Compare with this row; by default one with most seeds.")
    ] = None,
    transform: Transform = None,
    format: Format = "terminal",
    to: ToFile = None,
) -> None:
    """Compare runs: mean and standard deviation over seeds, and confidence intervals of the differences."""
    from sdrseg.study.commands import compare_results

    compare_results(paths, transform, reference, format, to)


def tables(
    names: Annotated[
        list[str], typer.Argument(metavar="NAME", help="voc, ade20k, ablation, sparsity, standard, random-split, …")
    ],
    execute: Annotated[bool, typer.Option("--run", help="First run the missing experiments.")] = False,
    out: Out = None,
    path: DataPath = None,
    bases: Bases = None,
    seeds: Annotated[str, typer.Option(metavar="NUMBERS", help="Seeds, such as 1,2,3.")] = "0",
    preset: Preset = "default",
    config: ConfigFile = None,
    set: Assignments = None,
    cells: Cells = None,
    only: Only = None,
    budget: Budget = None,
    results: Results = None,
    keep_models: KeepModels = "all",
    on: On = None,
    array: Array = 1,
    gpus: Gpus = 0,
    slurm: Slurm = None,
    transform: Transform = None,
    format: Format = "terminal",
    to: ToFile = None,
    dry_run: DryRun = False,
    json: AsJson = False,
) -> None:
    """Show tables of the paper with our numbers next to them; with --run, train what is missing."""
    from sdrseg.config import read_settings
    from sdrseg.study.commands import Options, paper_results
    from sdrseg.study.grid import parse_numbers

    machines = _machines(on, array, gpus, budget, slurm)
    how = (budget, keep_models, dry_run, json, machines)
    succeeded = paper_results(
        names,
        Options(out, path, bases, cells, only or [], results or [], *how),
        seeds=parse_numbers(seeds, "--seeds"),
        preset=preset,
        settings=read_settings(config, set or []),
        transform=transform,
        format=format,
        to=to,
        run=execute,
    )
    if not succeeded:
        raise typer.Exit(1)


def figures(
    kind: Annotated[str, typer.Argument(help="steps, per-class, qualitative, histogram or latent.")],
    paths: Annotated[list[Path], typer.Argument(metavar="RUN", help="Runs; for steps and per-class also results.")],
    out: Annotated[Path | None, typer.Option(metavar="NAME", help="Files NAME.svg, NAME.pdf, NAME.png.")] = None,
    path: DataPath = None,
    images: Annotated[int, typer.Option(min=1, max=100, help="Number of test images.")] = 4,
    ids: Annotated[
        list[str] | None,
        typer.Option("--id", metavar="ID", help="A test image; by default some that show all classes."),
    ] = None,
    every_step: Annotated[bool, typer.Option("--every-step", help="qualitative: predictions after each step.")] = False,
    photos: Annotated[bool, typer.Option(help="qualitative: show the images besides their masks.")] = True,
    dpi: Annotated[int, typer.Option(min=50, max=1200, help="Pixels per inch of the PNG.")] = 300,
    source: SourceFile = None,
) -> None:
    """Draw a figure for a paper as SVG, PDF and PNG."""
    from sdrseg.datasets import run_source_file
    from sdrseg.study.commands import draw

    if source is not None:
        run_source_file(source)
    how: dict[str, Any] = {"every_step": every_step, "photos": photos, "dpi": dpi}
    for file in draw(kind, paths, out or Path(kind), data=path, images=images, ids=ids or [], **how):
        print(file)


def tune(
    spec: Annotated[str, typer.Argument(help="A scenario, such as voc:15-1@disjoint.")],
    method: Annotated[str, typer.Option(help="A name from `sdrseg methods`, or your own: FILE.py or FILE.py:NAME.")],
    out: Annotated[
        Path, typer.Option(metavar="DIR", help="Folder for the trials; run the same command again to resume.")
    ],
    path: DataPath = None,
    preset: Preset = "default",
    range: Annotated[
        list[str] | None, typer.Option(metavar="KEY=LOW:HIGH[:log]", help="Search this setting with Optuna.")
    ] = None,
    search: Annotated[bool, typer.Option("--search", help="Search the published ranges with Optuna.")] = False,
    trials: Annotated[int | None, typer.Option(min=1, help="Stop after this number of trials in all.")] = None,
    minutes: Annotated[float | None, typer.Option(min=0, help="Stop after this time.")] = None,
    oracle: Annotated[
        bool,
        typer.Option(
            "--oracle",
            help="Score held-out images of all steps with all labels; the results are marked as oracle.",
        ),
    ] = False,
    bases: Bases = None,
    config: ConfigFile = None,
    set: Assignments = None,
    json: AsJson = False,
) -> None:
    """Choose settings on held-out training images; the test images are not read.

    Without ranges, each new step is tuned in turn: first the learning rate, by fine-tuning; then the stability weight,
    which starts large and is halved until the new classes are learned nearly as well as by fine-tuning (De Lange et
    al.).
    """
    from sdrseg.config import read_settings
    from sdrseg.study.tune import Search
    from sdrseg.study.tuning import tune as start

    options = Search(spec, method, out, path, preset, read_settings(config, set or []), bases, oracle)
    start(options, ranges=range or [], published=search, trials=trials, minutes=minutes, json=json)
