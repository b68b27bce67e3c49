"""Commands that move models of step 0 between machines."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Bases = Annotated[Path | None, typer.Option(metavar="DIR", help="The store of bases; by default in the user's cache.")]
app = typer.Typer(help="Move models of step 0 between machines.")


@app.command("export")
def export_base(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run that has finished step 0.")],
    out: Annotated[Path, typer.Argument(metavar="DIR", help="A new folder for the shards.")],
    shard_size: Annotated[str | None, typer.Option(help="Largest size of a file, such as 15MB.")] = None,
    bases: Bases = None,
) -> None:
    """Write the base of a run, its shared model of step 0, as float16 shards."""
    from sdrseg.engine.bases import export_base as write

    print(write(run, out, shard_size, bases))


@app.command("import")
def import_base(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A folder written by `sdrseg base export`.")],
    bases: Bases = None,
) -> None:
    """Add an exported base to the store, so that runs use it."""
    from sdrseg.engine.bases import BaseStore

    print(f"imported base {BaseStore(bases).import_from(folder)}")
