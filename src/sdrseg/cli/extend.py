"""Commands that add classes to trained models."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sdrseg.cli.options import AsJson, Assignments, ConfigFile, StepNumber

MISSED = 3
"""The exit code if the model misses what was required of it."""


def extend(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="A run, or a step of it (RUN/steps/2).")],
    data: Annotated[Path, typer.Option(metavar="FOLDER", help="Images in which the new classes are labelled.")],
    out: Annotated[
        Path, typer.Option(metavar="RUN", help="Folder of the new run; run the same command again to resume.")
    ],
    classes: Annotated[
        str | None, typer.Option(metavar="A,B", help="The new classes; by default every class the model does not know.")
    ] = None,
    method: Annotated[
        str | None, typer.Option(help="A name from `sdrseg methods`, or FILE.py; by default chosen for the model.")
    ] = None,
    step: StepNumber = None,
    unlabelled: Annotated[
        str, typer.Option(help="What unlabelled pixels are: background, or ignore (neither learned nor scored).")
    ] = "background",
    negatives: Annotated[bool, typer.Option("--negatives", help="Also train on images without a new class.")] = False,
    replay: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Labelled images of old classes to train on as well.")
    ] = None,
    protocol: Annotated[
        str | None,
        typer.Option(help="If masks contain old classes: overlapped (hide them) or sequential (use their labels)."),
    ] = None,
    images: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Images of old classes, labelled or not, for methods with a memory."),
    ] = None,
    old_data: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH",
            help="Where the old data are now; for an imported model, a folder of labelled test images.",
        ),
    ] = None,
    max_forgetting: Annotated[
        float | None,
        typer.Option(
            metavar="POINTS", help="Exit with code 3 if old classes lose more than this on average, or background."
        ),
    ] = None,
    min_new_iou: Annotated[
        float | None,
        typer.Option(metavar="IOU", help="Exit with code 3 if the new classes score below this, in per cent."),
    ] = None,
    config: ConfigFile = None,
    set: Assignments = None,
    json: AsJson = False,
) -> None:
    """Add classes to a trained model without its old images. The old run stays as it is."""
    from sdrseg.config import parse_settings
    from sdrseg.extend.run import extend as run
    from sdrseg.extend.show import show_extension

    done = run(
        model,
        data,
        out,
        classes=None if classes is None else classes.split(","),
        method=method,
        step=step,
        unlabelled=unlabelled,  # type: ignore[arg-type]
        negatives=negatives,
        replay=replay,
        protocol=protocol,  # type: ignore[arg-type]
        images=images,
        old_data=old_data,
        max_forgetting=max_forgetting,
        min_new_iou=min_new_iou,
        config_file=config,
        settings=parse_settings(set or []),
    )
    show_extension(done, json)
    if not done.met:
        raise typer.Exit(MISSED)


Run = Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run.")]
NewRun = Annotated[Path, typer.Option(metavar="RUN", help="A new folder for the run.")]


def history(
    run: Run,
    other: Annotated[
        Path | None, typer.Argument(metavar="OTHER", help="A run to compare with, extended from the same model.")
    ] = None,
    json: AsJson = False,
) -> None:
    """Show the steps that led to a model: date, data, method, classes and scores. With OTHER, compare two branches."""
    from sdrseg.extend.branches import branches
    from sdrseg.extend.history import history as read
    from sdrseg.extend.show import show_branches, show_history

    if other is None:
        show_history(read(run), json)
    else:
        show_branches(branches(run, other), json)


def rollback(run: Run, step: Annotated[int, typer.Option(help="The last step to keep.")], out: NewRun) -> None:
    """Copy a run up to an earlier step, to extend the model from there."""
    from sdrseg.extend.history import rollback as copy

    print(f"run folder: {copy(run, step, out)}")


def classes(
    run: Run,
    out: NewRun,
    rename: Annotated[list[str] | None, typer.Option(metavar="OLD=NEW", help="Rename a class; repeatable.")] = None,
    remove: Annotated[
        list[str] | None, typer.Option(metavar="A,B", help="Turn classes into background; repeatable.")
    ] = None,
) -> None:
    """Rename or remove classes of a model. The old run stays as it is."""
    from sdrseg.engine.saved import unfinished_note
    from sdrseg.errors import UsageError
    from sdrseg.extend.history import change_classes

    renamed: dict[str, str] = {}
    for text in rename or []:
        old, _, new = (part.strip() for part in text.partition("="))
        if not old or not new:
            raise UsageError(f"--rename {text}: write OLD=NEW.")
        if old in renamed:
            raise UsageError(f"--rename {text}: {old} is also renamed to {renamed[old]}. Name each class once.")
        renamed[old] = new
    changed = change_classes(run, out, renamed, remove or [])
    if note := unfinished_note(run, None):
        print(f"note: {note}")
    print(f"run folder: {changed}")


def import_model(
    checkpoint: Annotated[Path, typer.Argument(metavar="CHECKPOINT", help="A state dict: .safetensors or .pth.")],
    arch: Annotated[
        str,
        typer.Option(help="deeplabv3_resnet50 or deeplabv3_resnet101 (torchvision), or smp's: unet, deeplabv3plus, …"),
    ],
    classes: Annotated[
        str,
        typer.Option(
            metavar="A,B",
            help="The names of its output channels, background first (a name is needed even if the model has none).",
        ),
    ],
    out: NewRun,
    encoder: Annotated[
        str | None, typer.Option(help="An encoder of segmentation_models_pytorch, such as resnet34.")
    ] = None,
    crop: Annotated[int, typer.Option(min=32, help="The side of the crops it was trained on.")] = 512,
) -> None:
    """Import a model of segmentation_models_pytorch or torchvision as step 0 of a run, for prediction and extension."""
    from sdrseg.extend.imported import import_model as take

    for note in take(checkpoint, out, arch, classes.split(","), encoder=encoder, crop=crop):
        print(f"note: {note}")
    print(f"run folder: {out}")
