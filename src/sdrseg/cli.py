"""The command line: verbs only, each one call into the library. Heavy imports wait until a verb needs them."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Annotated

import typer

from sdrseg import __version__
from sdrseg.errors import SdrsegError, UsageError
from sdrseg.extend import verbs as extending
from sdrseg.study.verbs import add_verbs
from sdrseg.threads import prepare

app = typer.Typer(
    help="Continual semantic segmentation: learn new classes without the old images and without forgetting.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

DataPath = Annotated[Path | None, typer.Option("--data", metavar="PATH", help="The folder of the data set.")]
ConfigFile = Annotated[Path | None, typer.Option("--config", metavar="FILE", help="A TOML file with settings.")]
Assignments = Annotated[
    list[str] | None, typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Change one setting; repeatable.")
]
SourceFile = Annotated[Path | None, typer.Option("--source", metavar="FILE.py", help="The file of a custom data set.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print machine-readable JSON and nothing else.")]


def _version(wanted: bool) -> None:
    if wanted:
        print(__version__)
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Continual semantic segmentation: learn new classes without the old images and without forgetting."""


@app.command()
def demo(
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder for the runs and the report; run again to resume.")],
    json: AsJson = False,
) -> None:
    """Compare fine-tuning, MiB and SDR on generated data: a few minutes, a table and a report."""
    from sdrseg.demo import run_demo

    run_demo(out, json)


@app.command()
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
    from sdrseg.data.inspect import inspect_data

    if inspect_data(spec, path, picture, config, parse_settings(set or []), json) and strict:
        raise typer.Exit(1)


@app.command()
def convert(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A folder of your own data, in any format we read.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="A new folder: images/, masks/ and dataset.toml.")],
    json: AsJson = False,
) -> None:
    """Convert your own data to images/, masks/ and dataset.toml. Training reads every format without this."""
    from sdrseg.data.convert import convert_data

    convert_data(folder, out, json)


@app.command()
def methods(
    name: Annotated[str | None, typer.Argument(help="Show one method: a name, or FILE.py.")] = None,
    preset: Annotated[str, typer.Option(help="default, paper or official.")] = "default",
    task: Annotated[str | None, typer.Option(help="A task that changes a weight, such as 15-1.")] = None,
    json: AsJson = False,
) -> None:
    """List the methods, or show the settings of one and where each value comes from."""
    from sdrseg.methods.show import show_method, show_methods

    if name is None:
        show_methods(json)
    else:
        show_method(name, preset, task, json)


@app.command()
def train(
    spec: Annotated[str, typer.Argument(help="A scenario, such as voc:15-1@disjoint, or an experiment, EXP.toml.")],
    out: Annotated[Path, typer.Option(metavar="RUN", help="Folder of the run; run the same command again to resume.")],
    method: Annotated[
        str | None, typer.Option(help="A name from `sdrseg methods`, or your own: FILE.py or FILE.py:NAME.")
    ] = None,
    path: DataPath = None,
    preset: Annotated[str | None, typer.Option(help="default, paper or official.")] = None,
    encoder: Annotated[str | None, typer.Option(help="The encoder, such as resnet18.")] = None,
    weights: Annotated[str | None, typer.Option(help="imagenet, none, or a file of pre-trained weights.")] = None,
    bases: Annotated[Path | None, typer.Option(metavar="DIR", help="Folder where runs share models of step 0.")] = None,
    offline: Annotated[
        Path | None, typer.Option(metavar="RUN", help="An offline run, to measure intransigence.")
    ] = None,
    on_bad_image: Annotated[
        str | None, typer.Option(help="When a training image cannot be read: stop (default) or skip.")
    ] = None,
    tune: Annotated[
        bool, typer.Option("--tune", help="Hold out 20 % of the training images and score those, not the test images.")
    ] = False,
    config: ConfigFile = None,
    set: Assignments = None,
    json: AsJson = False,
) -> None:
    """Train all steps of a scenario with one method and score each step."""
    from sdrseg.config import parse_settings
    from sdrseg.engine.run import train as run
    from sdrseg.engine.show import show_summary

    options = {"net.encoder": encoder, "net.weights": weights, "run.on_bad_image": on_bad_image}
    given = ({"train.holdout": 0.2} if tune else {}) | parse_settings(set or [])
    given |= {key: value for key, value in options.items() if value is not None}
    if spec.endswith(".toml"):
        from sdrseg.study.grid import read_experiment

        if method is not None or preset is not None or config is not None:
            raise UsageError(f"{spec} says method, preset and settings itself. Leave --method, --preset, --config out.")
        one, data_there, bases_there = read_experiment(Path(spec))
        spec, method, preset, given = str(one.spec), one.method, one.preset, {**one.settings, **given}
        path, bases = path or data_there, bases or bases_there
    if method is None:
        raise UsageError("Say which method to train with: --method NAME (`sdrseg methods` lists them).")
    summary = run(
        spec,
        method,
        out,
        data=path,
        preset=preset or "default",
        config_file=config,
        settings=given,
        bases=bases,
        offline=offline,
    )
    show_summary(out, summary, json)


@app.command()
def weights(
    encoder: Annotated[str | None, typer.Argument(help="Fetch the ImageNet weights of this encoder.")] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also write them to a .safetensors file, to take along.")
    ] = None,
    json: AsJson = False,
) -> None:
    """List pre-trained weights on this machine, fetch others by name, and say how to do without a network."""
    from sdrseg.pretrained import show_weights

    show_weights(encoder, out, json)


@app.command()
def evaluate(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run.")],
    path: DataPath = None,
    transform: Annotated[
        str | None, typer.Option(help="crop512 or full_image, if not as in training (eval.transform).")
    ] = None,
    source: SourceFile = None,
    json: AsJson = False,
) -> None:
    """Score the saved models of a run again and compare with the scores from training."""
    from sdrseg.data import run_source_file
    from sdrseg.engine.show import evaluate_run

    if source is not None:
        run_source_file(source)
    if not evaluate_run(run, path, json, transform):
        raise typer.Exit(1)


@app.command()
def predict(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="A run, a step of it (RUN/steps/2) or an .onnx file.")],
    images: Annotated[
        list[str],
        typer.Argument(metavar="IMAGES", help="Image files, folders (searched recursively) or glob patterns."),
    ],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Output folder.")],
    step: Annotated[int | None, typer.Option(help="A step of the run; the last finished one by default.")] = None,
    overlays: Annotated[
        bool, typer.Option("--overlays", help="Also write each image with its classes in colour.")
    ] = False,
    probabilities: Annotated[
        bool, typer.Option("--probabilities", help="Also write the probability of each class (.npz, float16).")
    ] = False,
    tile: Annotated[
        int | None, typer.Option(help="Side of a tile in pixels; by default 512 to 1024, as memory allows.")
    ] = None,
    overlap: Annotated[
        int | None, typer.Option(help="Overlap of tiles in pixels; by default a quarter of a tile.")
    ] = None,
    batch_size: Annotated[int | None, typer.Option(help="Tiles per forward pass.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, …; by default a GPU if there is one.")] = None,
    max_pixels: Annotated[
        int | None, typer.Option(help="Refuse larger images; by default about 179 million pixels.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace existing results.")] = False,
    json: AsJson = False,
) -> None:
    """Segment images of any size with a trained model."""
    from sdrseg.predict.command import predict_images

    all_read = predict_images(
        model,
        images,
        out,
        step=step,
        overlays=overlays,
        probabilities=probabilities,
        tile=tile,
        overlap=overlap,
        batch_size=batch_size,
        device=device,
        max_pixels=max_pixels,
        overwrite=overwrite,
        json=json,
    )
    if not all_read:
        raise typer.Exit(1)


@app.command()
def export(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="A run, or a step of it (RUN/steps/2).")],
    out: Annotated[Path, typer.Option(metavar="FILE", help="A new file, such as model.onnx.")],
    format: Annotated[str, typer.Option(help="Output format; only onnx so far.")] = "onnx",
    step: Annotated[int | None, typer.Option(help="A step of the run; the last finished one by default.")] = None,
    check: Annotated[
        list[str] | None, typer.Option(metavar="IMAGES", help="Also check the exported model on these images.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing file.")] = False,
    json: AsJson = False,
) -> None:
    """Export a model to one ONNX file for images of any size, checked against PyTorch."""
    from sdrseg.export import export_model, show_export

    given = check or []
    show_export(export_model(model, out, format=format, step=step, check=given, overwrite=overwrite), json)


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run folders of one scenario.")],
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Output file; by default named after the scenario.")
    ] = None,
    path: DataPath = None,
    source: SourceFile = None,
    images: Annotated[int, typer.Option(min=0, max=100, help="Number of test images to show; 0 for none.")] = 10,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace FILE even if it is not an sdrseg report.")
    ] = False,
) -> None:
    """Compare runs in one self-contained HTML page: scores, pictures, losses, latent space, settings."""
    from sdrseg.data import run_source_file
    from sdrseg.report import write_report

    if source is not None:
        run_source_file(source)
    file, notes = write_report(runs, out, path, images, overwrite)
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    print(f"{file} ({file.stat().st_size / 1e6:.2f} MB)")


base = typer.Typer(help="Move models of step 0 between machines.")
app.add_typer(base, name="base")


@base.command("export")
def export_base(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run that has finished step 0.")],
    out: Annotated[Path, typer.Argument(metavar="DIR", help="A new folder for the shards.")],
    shard_size: Annotated[str | None, typer.Option(help="Largest size of a file, such as 15MB.")] = None,
) -> None:
    """Write the step-0 model of a run as float16 shards."""
    from sdrseg.engine.bases import export_base as write

    print(write(run, out, shard_size))


@base.command("import")
def import_base(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A folder written by `sdrseg base export`.")],
    bases: Annotated[
        Path | None, typer.Option(metavar="DIR", help="The store of bases; by default in the user's cache.")
    ] = None,
) -> None:
    """Add an exported base to the store, so that runs use it."""
    from sdrseg.engine.bases import BaseStore

    print(f"imported base {BaseStore(bases).import_from(folder)}")


extending.add_verbs(app)
add_verbs(app)


def main() -> None:
    """Run a command. Exit codes: 0 success, 1 error, 2 wrong usage, 3 a demand on a model is missed, 130 and 143
    stopped by a signal, state saved."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a name that the terminal cannot show is no failure
    prepare()
    try:
        app()
    except SdrsegError as error:
        print(f"{error.prefix}{error}", file=sys.stderr)
        sys.exit(error.exit_code)
