"""The command line: verbs only, each one call into the library. Heavy imports wait until a verb needs them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from sdrseg import __version__
from sdrseg.errors import SdrsegError

app = typer.Typer(
    help="Continual semantic segmentation: learn new classes without the old images and without forgetting.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

DataPath = Annotated[Path | None, typer.Option("--data", metavar="PATH", help="The folder that holds the data set.")]
ConfigFile = Annotated[Path | None, typer.Option("--config", metavar="FILE", help="Settings in TOML.")]
Assignments = Annotated[list[str] | None, typer.Option("--set", metavar="SECTION.KEY=VALUE", help="One setting.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print machine-readable JSON and nothing else.")]


def _version(wanted: bool) -> None:
    if wanted:
        print(__version__)
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it.")] = False,
) -> None:
    """Continual semantic segmentation: learn new classes without the old images and without forgetting."""


@app.command()
def data(
    spec: Annotated[str, typer.Argument(help="voc, ade20k, folder, shapes, or a scenario such as voc:15-1@disjoint.")],
    path: DataPath = None,
    picture: Annotated[Path | None, typer.Option(metavar="FILE", help="Where the picture grid goes.")] = None,
    strict: Annotated[bool, typer.Option("--strict", help="End with exit code 1 if there is any problem.")] = False,
    config: ConfigFile = None,
    set: Assignments = None,
    json: AsJson = False,
) -> None:
    """Show what a data set holds and what each step of a scenario sees; check every file."""
    from sdrseg.data.inspect import inspect_data

    if inspect_data(spec, path, picture, config, set or [], json) and strict:
        raise typer.Exit(1)


def main() -> None:
    """Run a verb. Exit codes: 0 done, 1 an error of ours, 2 wrong usage."""
    try:
        app()
    except SdrsegError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
