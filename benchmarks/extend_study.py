"""How well a class is added with few images: methods × images × learning rates, one line of JSON for each extension.

    python benchmarks/extend_study.py OUT --generated                      # coloured boxes, minutes on a CPU
    python benchmarks/extend_study.py OUT --voc PATH --base RUN --new sheep --images 10 25 50 100 0

RUN is a run whose step 0 knows 15 classes of VOC (such as voc:15-5@overlapped); 0 images means all. Every line names
the rate, so that a method is judged at its own best one and not at that of another.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import numpy as np
from PIL import Image

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

GENERATED = {
    "net.encoder": "toy16",
    "net.weights": "none",
    "net.decoder": "deeplabv3",
    "net.output_stride": 8,
    "net.bn_momentum_encoder": 0.1,
    "data.crop": 32,
    "data.scale": [0.8, 1.25],
    "train.epochs": 40,
    "train.batch_size": 8,
    "optim.lr": 0.05,
    "optim.decoder_lr_factor": 1.0,
    "optim.decoder_lr_factor_later": 1.0,
    "run.loggers": [],
}


def generated(out: Path, images: int) -> tuple[Path, Path]:
    """A base of six colours, trained once, and a folder of the seventh."""
    from extend_data import base_folder, masks_folder
    from sdrseg import train

    if not (out / "data").exists():
        base_folder(out / "data", 160)
    train("folder:offline", "ft", out / "base", data=out / "data", settings=GENERATED, bases=out / "bases")
    folder = out / f"new-{images}"
    return out / "base", folder if folder.exists() else masks_folder(folder, 7, images or 100)


def voc(out: Path, path: Path, name: str, images: int) -> Path:
    """A folder of training images of VOC with one class, in which nothing else is labelled."""
    from sdrseg.config import Config
    from sdrseg.data import open_source
    from sdrseg.data.index import class_index

    folder = out / f"{name}-{images}"
    if folder.exists():
        return folder
    source = open_source("voc", path, Config())
    label, index = source.classes.index(name), class_index(source, "train")
    ids = [id for id, row in zip(index.ids, index.present, strict=True) if row[label]]
    chosen = ids if images == 0 else [ids[i] for i in np.linspace(0, len(ids) - 1, min(images, len(ids))).astype(int)]
    for part in ("images", "masks"):
        (folder / part).mkdir(parents=True)
    for id in chosen:
        Image.fromarray(source.image(id)).save(folder / f"images/{id}.png")
        mask = source.mask(id)
        Image.fromarray(np.where(mask == label, 1, np.where(mask == 255, 255, 0)).astype(np.uint8)).save(
            folder / f"masks/{id}.png"
        )
    (folder / "dataset.toml").write_text(f'classes = ["background", "{name}"]\n')
    return folder


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__)
    words.add_argument("out", type=Path)
    words.add_argument("--generated", action="store_true")
    words.add_argument("--voc", type=Path)
    words.add_argument("--base", type=Path)
    words.add_argument("--new", default="sheep")
    words.add_argument("--images", type=int, nargs="+", default=[24])
    words.add_argument("--methods", nargs="+", default=["ft", "mib", "sdr", "laps-softmax"])
    words.add_argument("--rates", type=float, nargs="+", default=[0.0], help="optim.lr_later; 0: the default")
    given = words.parse_args()
    if not given.generated and (given.voc is None or given.base is None):
        words.error("give --generated, or --voc and --base")
    from sdrseg.extend.run import extend

    for images in given.images:
        base, folder = generated(given.out, images) if given.generated else (given.base, None)
        folder = folder or voc(given.out, given.voc, given.new, images)
        for rate in given.rates:
            for method in given.methods:
                start = time.monotonic()
                settings = {"run.loggers": [], **({"optim.lr_later": rate} if rate else {})}
                old = None if given.generated else given.voc
                run = given.out / f"{folder.name}-{method}-{rate:g}"
                done = extend(base, folder, run, step=0, method=method, settings=settings, old_data=old)
                row = {"images": images, "method": method, "rate": rate, "seconds": time.monotonic() - start}
                row |= {key: done.result[key] for key in ("forgetting", "new_iou", "old_images", "held_out_images")}
                with (given.out / "results.jsonl").open("a") as file:
                    file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
