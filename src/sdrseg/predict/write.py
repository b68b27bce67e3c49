"""What `sdrseg predict` writes: masks, overlays, probabilities, and the areas of classes."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sdrseg.datasets.pictures import mask_picture
from sdrseg.errors import SdrsegError
from sdrseg.files import atomic_writer, require_writable, write_json
from sdrseg.predict.images import Input
from sdrseg.predict.prediction import Prediction, write_picture

COLUMNS = ("image", "id", "class", "pixels", "share")


class Outputs:
    """The output folder: masks/NAME.png, overlays/NAME.png, probabilities/NAME.npz, areas.csv and areas.json."""

    def __init__(self, folder: Path, overlays: bool, probabilities: bool):
        self.folder = folder
        self._kinds = {"masks": ".png"}
        self._kinds |= {"overlays": ".png"} if overlays else {}
        self._kinds |= {"probabilities": ".npz"} if probabilities else {}

    def files(self, image: Input) -> dict[str, Path]:
        """The output files of an image, by kind."""
        return {kind: self.folder / kind / f"{image.name}{suffix}" for kind, suffix in self._kinds.items()}

    def check(self, inputs: Sequence[Input], overwrite: bool) -> None:
        """Raise an error if the folder cannot be written or files would be overwritten."""
        require_writable(self.folder, "Choose another --out.", folder=True)
        existing = [file for file in self._all(inputs) if os.path.lexists(file)]
        input_files = {image.path.resolve() for image in inputs}
        if own := [file for file in existing if file.resolve() in input_files]:
            raise SdrsegError(f"{own[0]} is one of the images and would be replaced by a result. Choose another --out.")
        if existing and not overwrite:
            more = f" and {len(existing) - 1} more" if len(existing) > 1 else ""
            raise SdrsegError(f"{existing[0]}{more}: already exists. Choose another --out, or add --overwrite.")

    def write(self, image: Input, prediction: Prediction) -> None:
        files = self.files(image)
        write_picture(files["masks"], mask_picture(prediction.mask), overwrite=True)
        if "overlays" in files:
            write_picture(files["overlays"], prediction.overlay(legend=True), overwrite=True)
        if "probabilities" in files:
            with atomic_writer(files["probabilities"]) as out:
                np.savez_compressed(
                    out,
                    probabilities=prediction.probabilities.astype(np.float16),
                    ids=np.array([c.id for c in prediction.classes], np.uint8),
                    names=np.array([c.name for c in prediction.classes]),
                )

    def write_areas(self, summary: dict[str, Any]) -> None:
        """Write areas.csv, with one line per image and class, and areas.json, the whole summary."""
        text = io.StringIO(newline="")
        lines = csv.writer(text)
        lines.writerow(COLUMNS)
        for entry in summary["images"]:
            for name, area in entry["areas"].items():
                lines.writerow([entry["image"], area["id"], name, area["pixels"], f"{area['share']:.6g}"])
        with atomic_writer(self.folder / "areas.csv") as out:
            out.write(text.getvalue().encode())
        write_json(self.folder / "areas.json", summary)

    def _all(self, inputs: Sequence[Input]) -> Iterator[Path]:
        yield from (self.folder / name for name in ("areas.csv", "areas.json"))
        for image in inputs:
            yield from self.files(image).values()
