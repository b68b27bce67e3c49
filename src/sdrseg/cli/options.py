"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

AsJson = Annotated[bool, typer.Option("--json", help="Print machine-readable JSON and nothing else.")]
Assignments = Annotated[
    list[str] | None, typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Change one setting; repeatable.")
]
Bases = Annotated[Path | None, typer.Option(metavar="DIR", help="Folder where runs share models of step 0.")]
ConfigFile = Annotated[Path | None, typer.Option("--config", metavar="FILE", help="A TOML file with settings.")]
DataPath = Annotated[Path | None, typer.Option("--data", metavar="PATH", help="The folder of the data set.")]
Preset = Annotated[str, typer.Option(help="default, paper or official.")]
SourceFile = Annotated[Path | None, typer.Option("--source", metavar="FILE.py", help="The file of a custom data set.")]
StepNumber = Annotated[int | None, typer.Option(help="A step of the run; the last finished one by default.")]
