"""The verbs about studies: each one call into this room. Heavy imports wait until a verb needs them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

AsJson = Annotated[bool, typer.Option("--json", help="Print machine-readable JSON and nothing else.")]


def add_verbs(app: typer.Typer) -> None:
    """Give the command line the verbs of this file."""
    for verb in (run, result):
        app.command()(verb)


DataPath = Annotated[Path | None, typer.Option("--data", metavar="PATH", help="The folder that holds the data set.")]
Out = Annotated[Path | None, typer.Option(metavar="DIR", help="Where runs and results go; by default named as FILE.")]
Bases = Annotated[Path | None, typer.Option(metavar="DIR", help="Where models of step 0 are kept and shared.")]
Cells = Annotated[str | None, typer.Option(metavar="NUMBERS", help="Only these experiments, such as 1-5,8.")]
Only = Annotated[list[str] | None, typer.Option(metavar="PATTERN", help="Only these: sdr, voc:15-1*, seed=1, …")]
Budget = Annotated[
    float | None, typer.Option(metavar="MINUTES", min=0, help="Stop after this time; run again to resume.")
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Show what would be run, and about how long it takes.")]
Results = Annotated[
    list[Path] | None, typer.Option(metavar="DIR", help="More folders with results; what they hold is not run.")
]
KeepModels = Annotated[str, typer.Option(metavar="WHICH", help="Models to keep of finished runs: all, last or none.")]


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
    dry_run: DryRun = False,
    json: AsJson = False,
) -> None:
    """Run all experiments of a file, one after the other. What is finished is not run again."""
    from sdrseg.study.commands import run_file

    all_well = run_file(
        file,
        out,
        data=path,
        bases=bases,
        cells=cells,
        only=only or [],
        results=results or [],
        minutes=budget,
        keep=keep_models,
        dry_run=dry_run,
        json=json,
    )
    if not all_well:
        raise typer.Exit(1)


def result(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of finished runs.")],
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Write one small JSON file a run there.")] = None,
) -> None:
    """Print the results of finished runs as JSON, or write one small file for each."""
    from sdrseg.study.cell import cell_of, write_cell
    from sdrseg.terminal import print_json

    if out is None:
        print_json([cell_of(run) for run in runs])
    else:
        for run in runs:
            print(write_cell(run, out))
