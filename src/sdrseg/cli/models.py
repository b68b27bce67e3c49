"""Commands that use trained models."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from sdrseg.cli.options import AsJson, DataPath, SourceFile, StepNumber


def evaluate(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run.")],
    path: DataPath = None,
    transform: Annotated[
        str | None, typer.Option(help="crop512 or full_image; by default as in training (eval.transform).")
    ] = None,
    source: SourceFile = None,
    json: AsJson = False,
) -> None:
    """Score the saved models of a run again and compare with the scores from training."""
    from sdrseg.datasets import run_source_file
    from sdrseg.engine.show import evaluate_run

    if source is not None:
        run_source_file(source)
    if not evaluate_run(run, path, json, transform):
        raise typer.Exit(1)


def predict(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="A run, a step of it (RUN/steps/2) or an .onnx file.")],
    images: Annotated[
        list[str],
        typer.Argument(metavar="IMAGES", help="Image files, folders (searched recursively) or glob patterns."),
    ],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Output folder.")],
    step: StepNumber = None,
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


def export(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="A run, or a step of it (RUN/steps/2).")],
    out: Annotated[Path, typer.Option(metavar="FILE", help="A new file, such as model.onnx.")],
    format: Annotated[str, typer.Option(help="Output format; only onnx so far.")] = "onnx",
    step: StepNumber = None,
    check: Annotated[
        list[str] | None, typer.Option(metavar="IMAGES", help="Also check the exported model on these images.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing file.")] = False,
    json: AsJson = False,
) -> None:
    """Export a model to one ONNX file for images of any size, checked against PyTorch."""
    from sdrseg.exporting import export_model, show_export

    images = check or []
    show_export(export_model(model, out, format=format, step=step, check=images, overwrite=overwrite), json)


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN", help="Folders of runs of one scenario.")],
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
    from sdrseg.datasets import run_source_file
    from sdrseg.reporting import write_report

    if source is not None:
        run_source_file(source)
    file, notes = write_report(runs, out, path, images, overwrite)
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    print(f"{file} ({file.stat().st_size / 1e6:.2f} MB)")
