"""The verbs about models that grow: each one call into this room. Heavy imports wait until a verb needs them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

MISSED = 3
"""Exit code where a demand on the model is not met."""

AsJson = Annotated[bool, typer.Option("--json", help="Print machine-readable JSON and nothing else.")]
Step = Annotated[int | None, typer.Option(help="A step of the run; the last finished one by default.")]


def add_verbs(app: typer.Typer) -> None:
    """Give the command line the verbs of this file."""
    for verb in (extend, history, rollback, classes):
        app.command()(verb)
    app.command("import")(import_model)


def extend(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="A run, or a step of it (RUN/steps/2).")],
    data: Annotated[Path, typer.Option(metavar="FOLDER", help="Images in which the new classes are labelled.")],
    out: Annotated[Path, typer.Option(metavar="RUN", help="Folder of the new run; the same command again resumes.")],
    classes: Annotated[
        str | None, typer.Option(metavar="A,B", help="The new classes; by default all that the model does not know.")
    ] = None,
    method: Annotated[
        str | None, typer.Option(help="A name from `sdrseg methods`, or FILE.py; by default what suits the model.")
    ] = None,
    step: Step = None,
    unlabelled: Annotated[
        str, typer.Option(help="What the rest of the images is: background, or ignore (neither learned nor scored).")
    ] = "background",
    negatives: Annotated[bool, typer.Option("--negatives", help="Train on images without a new class, too.")] = False,
    replay: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Labelled images of old classes, to be trained on beside.")
    ] = None,
    protocol: Annotated[
        str | None,
        typer.Option(help="Where masks hold old classes: overlapped (hide them) or sequential (learn them)."),
    ] = None,
    images: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Images of old classes, labelled or not, for methods with a memory."),
    ] = None,
    old_data: Annotated[
        Path | None, typer.Option(metavar="PATH", help="Where the data of the first run are, if they have moved.")
    ] = None,
    max_forgetting: Annotated[
        float | None, typer.Option(metavar="POINTS", help="Exit with code 3 if old classes lose more on average.")
    ] = None,
    min_new_iou: Annotated[
        float | None, typer.Option(metavar="IOU", help="Exit with code 3 if the new classes reach less, in per cent.")
    ] = None,
    config: Annotated[Path | None, typer.Option("--config", metavar="FILE", help="A TOML file with settings.")] = None,
    set: Annotated[
        list[str] | None, typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Change one setting; repeatable.")
    ] = None,
    json: AsJson = False,
) -> None:
    """Add classes to a trained model, without its old images. The old run stays as it is."""
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
NewRun = Annotated[Path, typer.Option(metavar="RUN", help="A new folder; the old run stays as it is.")]


def history(run: Run, json: AsJson = False) -> None:
    """Show the chain of steps behind a model: when, with which data and method, which classes, how good."""
    from sdrseg.extend.history import history as read
    from sdrseg.extend.show import show_history

    show_history(read(run), json)


def rollback(run: Run, step: Annotated[int, typer.Option(help="The step to go back to.")], out: NewRun) -> None:
    """Make a new run that ends with an earlier step, to extend it in another direction."""
    from sdrseg.extend.history import rollback as copy

    print(f"run folder: {copy(run, step, out)}")


def classes(
    run: Run,
    out: NewRun,
    rename: Annotated[
        list[str] | None, typer.Option(metavar="OLD=NEW", help="Another name for a class; repeatable.")
    ] = None,
    remove: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="A class that becomes background; repeatable.")
    ] = None,
) -> None:
    """Rename or remove classes of a model."""
    from sdrseg.errors import UsageError
    from sdrseg.extend.history import change_classes

    pairs = [text.partition("=") for text in rename or []]
    if wrong := [old for old, equals, new in pairs if not (equals and old and new)]:
        raise UsageError(f"--rename {wrong[0]}: write OLD=NEW.")
    print(f"run folder: {change_classes(run, out, {old: new for old, _, new in pairs}, remove or [])}")


def import_model(
    checkpoint: Annotated[Path, typer.Argument(metavar="CHECKPOINT", help="A state dict: .safetensors or .pth.")],
    arch: Annotated[
        str,
        typer.Option(help="deeplabv3_resnet50 or deeplabv3_resnet101 (torchvision), or smp's: unet, deeplabv3plus, …"),
    ],
    classes: Annotated[
        str, typer.Option(metavar="A,B", help="The names of its channels, background first, also if it has none.")
    ],
    out: NewRun,
    encoder: Annotated[str | None, typer.Option(help="Of segmentation_models_pytorch, such as resnet34.")] = None,
    crop: Annotated[int, typer.Option(min=32, help="The side of the crops it was trained on.")] = 512,
) -> None:
    """Take a model of segmentation_models_pytorch or torchvision as step 0 of a run, to predict with and to extend."""
    from sdrseg.extend.imported import import_model as take

    for note in take(checkpoint, out, arch, classes.split(","), encoder=encoder, crop=crop):
        print(f"note: {note}")
    print(f"run folder: {out}")
