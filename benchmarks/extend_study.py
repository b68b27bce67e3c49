"""How well a class is added to a model of coloured boxes: methods × learning rates, one line of JSON for each run.

    python benchmarks/extend_study.py OUT [--rates 0.0005 0.002]        # minutes on a CPU

Every line names the rate, so that a method is judged at its own best one and not at that of another. Photographs:
extend_voc.py.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

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


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__)
    words.add_argument("out", type=Path)
    words.add_argument("--images", type=int, nargs="+", default=[24])
    words.add_argument("--methods", nargs="+", default=["ft", "mib", "sdr", "laps-softmax"])
    words.add_argument("--rates", type=float, nargs="+", default=[0.0], help="optim.lr_later; 0: the default")
    given = words.parse_args()
    from sdrseg.extend.run import extend

    for images in given.images:
        base, folder = generated(given.out, images)
        for rate in given.rates:
            for method in given.methods:
                start = time.monotonic()
                settings = {"run.loggers": [], **({"optim.lr_later": rate} if rate else {})}
                run = given.out / f"{folder.name}-{method}-{rate:g}"
                done = extend(base, folder, run, step=0, method=method, settings=settings)
                row = {"images": images, "method": method, "rate": rate, "seconds": time.monotonic() - start}
                row |= {key: done.result[key] for key in ("forgetting", "new_iou", "old_images", "held_out_images")}
                with (given.out / "results.jsonl").open("a") as file:
                    file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
