"""Do the defaults for one's own data train without diverging? Short runs over methods, classes, batches and crops.

`python stability.py` generates data sets (or, with --photographs, makes them from VOC's images) and trains a few
iterations of two steps for every combination. A run has diverged if a term is not finite, or if the loss of step 1 at
its end is more than twice what it was in the beginning.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from sdrseg.config import parse_settings
from sdrseg.datasets.voc import Voc
from sdrseg.engine.run import train
from sdrseg.engine.watch import NotFiniteError

METHODS = ["ft", "lwf", "lwf-mc", "ilt", "cil", "mib", "ewc", "pi", "rw", "sdr", "laps"]


def generate(folder: Path, classes: int, images: int, size: int, seed: int = 0) -> None:
    """Images of textured rectangles: a background, and `classes` classes that each have a colour of their own."""
    random = np.random.default_rng(seed)
    colours = random.integers(0, 256, (classes + 1, 3))
    for number in range(images):
        mask = np.zeros((size, size), np.uint8)
        new = number % 2 == 0  # half of the images show the class of step 1
        for c in [*random.integers(1, max(2, classes), 3), *([classes] if new else [])]:
            top, left = random.integers(0, size // 2, 2)
            height, width = random.integers(size // 4, size // 2, 2)
            mask[top : top + height, left : left + width] = c
        noise = random.normal(0, 40, (size, size, 3))
        picture = np.clip(colours[mask] + noise, 0, 255).astype(np.uint8)
        _write(folder, f"{number:04d}", picture, mask)
    _describe(folder, classes)


def photographs(folder: Path, voc: Path, classes: int, images: int, size: int) -> None:
    """VOC's photographs and masks: the class of step 1 is the person, the old ones are the first of the others."""
    kept = {15: classes} | {c: n for n, c in enumerate([c for c in range(1, 21) if c != 15][: classes - 1], 1)}
    table = np.zeros(256, np.uint8)
    table[255] = 255
    for value, id in kept.items():
        table[value] = id
    count, source = {True: 0, False: 0}, Voc(voc)
    for id in source.ids("val"):
        if sum(count.values()) == images:
            break
        mask = table[source.mask(id)]
        new = bool((mask == classes).any())
        if not ((mask > 0) & (mask < 255)).any() or count[new] >= images // 2:
            continue
        count[new] += 1
        image = Image.fromarray(source.image(id))
        shape = (size * image.width // image.height, size)
        resized = Image.fromarray(mask).resize(shape, Image.Resampling.NEAREST)
        _write(folder, id, np.asarray(image.resize(shape)), np.asarray(resized))
    _describe(folder, classes)


def _write(folder: Path, name: str, picture: Any, mask: Any) -> None:
    for kind, content in (("images", picture), ("masks", mask)):
        (folder / kind).mkdir(parents=True, exist_ok=True)
        Image.fromarray(content).save(folder / kind / f"{name}.png")


def _describe(folder: Path, classes: int) -> None:
    names = json.dumps(["background", *(f"class{n}" for n in range(1, classes + 1))])
    (folder / "dataset.toml").write_text(f"classes = {names}\n")


class Losses:
    """A display that keeps the losses of step 1."""

    def __init__(self) -> None:
        self.losses: list[dict[str, float]] = []

    def update(self, entry: dict[str, Any]) -> None:
        if entry["step"] == 1:
            self.losses.append(entry["losses"])

    def say(self, text: str) -> None: ...
    def scored(self, *_: Any) -> None: ...
    def validated(self, *_: Any) -> None: ...
    def close(self) -> None: ...


def short_run(
    method: str, data: Path, old: int, settings: dict[str, Any], scratch: Path, protocol: str = "disjoint"
) -> dict[str, Any]:
    """Two steps of a method; whether it diverged, and the losses."""
    display = Losses()
    given = {"run.log_every": 1, "run.save_minutes": 1e6, "data.workers": 0, **settings}
    started, problem, result = time.monotonic(), "", {}
    try:
        with tempfile.TemporaryDirectory(dir=scratch) as out:
            spec = f"folder:{old}-1@{protocol}"
            bases = scratch / "bases"
            result = train(spec, method, Path(out, "run"), data=data, settings=given, bases=bases, display=display)
    except NotFiniteError as error:
        problem = str(error)
    course = [entry["loss"] for entry in display.losses]
    last = course[-max(1, len(course) // 5) :]
    if not problem and course and not np.mean(last) < 2 * max(course[0], 0.5):
        problem = f"the loss went from {course[0]:.3g} to {np.mean(last):.3g}"
    return {
        "problem": problem,
        "first": course[0] if course else None,
        "last": float(np.mean(last)) if last else None,
        "largest": max(course, default=None),
        "miou": result.get("miou", {}).get("all"),
        "seconds": time.monotonic() - started,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", default=METHODS)
    parser.add_argument("--old", type=int, nargs="+", default=[1, 2, 7, 20, 150], help="old classes")
    parser.add_argument("--crop", type=int, nargs="+", default=[64, 128, 512])
    parser.add_argument("--batch", type=int, nargs="+", default=[2, 8, 16])
    parser.add_argument("--weights", nargs="+", default=["none"], help="none, imagenet or a file")
    parser.add_argument("--encoder", default="resnet18")
    parser.add_argument("--iterations", type=int, default=40, help="of each step, about")
    parser.add_argument("--photographs", type=Path, metavar="VOC2012", help="make the data of VOC's photographs")
    parser.add_argument("--set", nargs="*", default=[], metavar="SECTION.KEY=VALUE")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    more = parse_settings(given.set)
    rows = []
    with tempfile.TemporaryDirectory() as text:
        scratch = Path(text)
        for old, crop, batch, weights in itertools.product(given.old, given.crop, given.batch, given.weights):
            images = max(24, 3 * batch)
            data = scratch / f"{old}-{crop}-{images}"
            if not data.exists() and given.photographs:
                photographs(data, given.photographs, old + 1, images, crop)
            elif not data.exists():
                generate(data, old + 1, images, crop)
            epochs = max(1, given.iterations // max(1, int(images * 0.4) // batch))
            settings = {"data.crop": crop, "train.batch_size": batch, "train.epochs": epochs}
            settings |= {"net.encoder": given.encoder, "net.weights": weights}
            settings |= more
            for method in given.methods:
                cell = {"method": method, "old": old, "crop": crop, "batch": batch, "weights": weights}
                row = cell | short_run(method, data, old, settings, scratch)
                rows.append(row)
                if not given.json:
                    numbers = [f"{row[k]:.3g}" for k in ("first", "largest", "last", "miou") if row[k] is not None]
                    print(*cell.values(), "DIVERGED" if row["problem"] else "ok", *numbers, row["problem"], flush=True)
    if given.json:
        print(json.dumps({"arguments": sys.argv[1:], "rows": rows}, indent=2))
    else:
        print(f"{sum(bool(row['problem']) for row in rows)} of {len(rows)} runs diverged")


if __name__ == "__main__":
    main()
