"""Commands for methods and training."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sdrseg.cli.options import AsJson, Assignments, Bases, ConfigFile, DataPath, Preset
from sdrseg.errors import UsageError


def demo(
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder for the runs and the report; run again to resume.")],
    json: AsJson = False,
) -> None:
    """Compare fine-tuning, MiB and SDR on generated data: a few minutes, a table and a report."""
    from sdrseg.demo import run_demo

    run_demo(out, json)


def methods(
    name: Annotated[str | None, typer.Argument(help='Show one method: a name, or FILE.py. List some: "sdr*".')] = None,
    preset: Preset = "default",
    task: Annotated[str | None, typer.Option(help="A task that changes a weight, such as 15-1.")] = None,
    json: AsJson = False,
) -> None:
    """List the methods, or show the settings of one and where each value comes from."""
    from sdrseg.methods.show import show_method, show_methods

    if name is None or "*" in name:
        show_methods(name or "*", json)
    else:
        show_method(name, preset, task, json)


def weights(
    encoder: Annotated[str | None, typer.Argument(help="Fetch the ImageNet weights of this encoder.")] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Also write them to a .safetensors file, for a machine without internet access."
        ),
    ] = None,
    json: AsJson = False,
) -> None:
    """List the pre-trained weights on this machine, or fetch those of an encoder."""
    from sdrseg.pretrained import show_weights

    show_weights(encoder, out, json)


def train(
    spec: Annotated[str, typer.Argument(help="A scenario, such as voc:15-1@disjoint, or an experiment, EXP.toml.")],
    out: Annotated[
        Path | None,
        typer.Option(metavar="RUN", help="Folder of the run; run again to resume. By default named after EXP.toml."),
    ] = None,
    method: Annotated[
        str | None, typer.Option(help="A name from `sdrseg methods`, or your own: FILE.py or FILE.py:NAME.")
    ] = None,
    path: DataPath = None,
    preset: Annotated[str | None, typer.Option(help="default, paper or official.")] = None,
    encoder: Annotated[str | None, typer.Option(help="The encoder, such as resnet18.")] = None,
    weights: Annotated[str | None, typer.Option(help="imagenet, none, or a file of pre-trained weights.")] = None,
    bases: Bases = None,
    offline: Annotated[
        Path | None, typer.Option(metavar="RUN", help="An offline run, to measure intransigence.")
    ] = None,
    on_bad_image: Annotated[
        str | None, typer.Option(help="When a training image cannot be read: stop (default) or skip.")
    ] = None,
    holdout: Annotated[
        bool,
        typer.Option(
            "--holdout",
            help="Hold out 20 % of the training images; score those with all labels (oracle), not the test images.",
        ),
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
    settings = ({"train.holdout": 0.2} if holdout else {}) | parse_settings(set or [])
    settings |= {key: value for key, value in options.items() if value is not None}
    if spec.endswith(".toml"):
        from sdrseg.study.grid import read_experiment

        if method is not None or preset is not None or config is not None:
            raise UsageError(f"{spec} sets method, preset and settings. Leave out --method, --preset and --config.")
        experiment, file_data, file_bases = read_experiment(Path(spec))
        file, spec, method, preset, settings = (
            spec,
            str(experiment.spec),
            experiment.method,
            experiment.preset,
            {**experiment.settings, **settings},
        )
        path, bases, out = path or file_data, bases or file_bases, out or Path(Path(file).stem)
    if out is None:
        raise UsageError("No folder given. Add --out RUN.")
    if method is None:
        raise UsageError("No method given. Add --method NAME (`sdrseg methods` lists them).")
    summary = run(
        spec,
        method,
        out,
        data=path,
        preset=preset or "default",
        config_file=config,
        settings=settings,
        bases=bases,
        offline=offline,
    )
    show_summary(out, summary, json)
