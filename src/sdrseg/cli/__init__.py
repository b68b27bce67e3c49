"""The command line. Each command is one call into the library; heavy imports wait until a command needs them."""

from __future__ import annotations

import io
import sys
from typing import Annotated

import typer

from sdrseg import __version__
from sdrseg.cli import base, data, extend, models, study, training
from sdrseg.errors import SdrsegError
from sdrseg.threads import prepare

app = typer.Typer(
    help="Continual semantic segmentation: learn new classes without the old images and without forgetting.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        print(__version__)
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Continual semantic segmentation: learn new classes without the old images and without forgetting."""


for command in (  # in the order of --help
    *(training.demo, data.data, data.convert, training.methods, training.train, training.weights),
    *(models.evaluate, models.predict, models.export, models.report),
    *(extend.extend, extend.history, extend.rollback, extend.classes),
    *(study.run, study.result, study.compare, study.tables, study.figures, study.tune),
):
    app.command()(command)
app.command("import")(extend.import_model)
app.add_typer(base.app, name="base")


def main() -> None:
    """Run a command.

    Exit codes: 0 success, 1 error, 2 wrong usage, 3 a model misses what was required of it, 130 and 143 stopped by a
    signal with the state saved.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # names the terminal cannot show must not stop a command
    prepare()
    try:
        app()
    except SdrsegError as error:
        print(f"{error.prefix}{error}", file=sys.stderr)
        sys.exit(error.exit_code)
