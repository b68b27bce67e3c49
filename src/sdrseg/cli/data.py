"""Commands for data sets."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sdrseg.cli.options import AsJson, Assignments, ConfigFile, DataPath


def data(
    spec: Annotated[
        str,
        typer.Argument(
            help="A folder of your own data, a data set (voc, ade20k, folder, shapes, FILE.py), or a scenario such as "
            "voc:15-1@disjoint."
        ),
    ],
    path: DataPath = None,
    picture: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Save a picture grid of images and labels.")
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Exit with code 1 if there is any problem.")] = False,
    config: ConfigFile = None,
    set: Assignments = None,
    json: AsJson = False,
) -> None:
    """Show the contents of a data set and of each step of a scenario; check every file."""
    from sdrseg.config import parse_settings
    from sdrseg.datasets.inspect import inspect_data

    if inspect_data(spec, path, picture, config, parse_settings(set or []), json) and strict:
        raise typer.Exit(1)


def convert(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A folder of your own data, in any supported format.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="A new folder: images/, masks/ and dataset.toml.")],
    json: AsJson = False,
) -> None:
    """Convert your own data to images/, masks/ and dataset.toml. Training does not need this; it reads every format."""
    from sdrseg.datasets.convert import convert_data

    convert_data(folder, out, json)
