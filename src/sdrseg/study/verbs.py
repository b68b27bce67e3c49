"""The verbs about studies: each one call into this room. Heavy imports wait until a verb needs them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

AsJson = Annotated[bool, typer.Option("--json", help="Print machine-readable JSON and nothing else.")]


def add_verbs(app: typer.Typer) -> None:
    """Give the command line the verbs of this file."""
    for verb in (result,):
        app.command()(verb)


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
