"""How long `sdrseg extend` takes on a CPU with a small encoder: sheep from 10 and 50 photographs of VOC, ResNet-18.

    python benchmarks/extend_cpu.py PATH_OF_VOC OUT [--images 10 50] [--crop 256] [--iterations 40]

The base has random weights and saw 16 photographs of cats once: the scores mean nothing, the time does. The default
method fits new rows only; one that iterates does not stop early, so all iterations are counted. Writes
OUT/extend-cpu.json: seconds, and CPU seconds of all threads, which matter if other programs run.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from PIL import Image

CAT, SHEEP = 8, 17


def photographs(voc: Path, label: int) -> Iterator[tuple[str, np.ndarray]]:
    for name in sorted((voc / "VOC2012/ImageSets/Segmentation/trainaug.txt").read_text().split()):
        with Image.open(voc / f"VOC2012/SegmentationClassAug/{name}.png") as file:
            mask = np.asarray(file)
        if (mask == label).mean() > 0.03:
            yield name, np.where(mask == label, 1, 0).astype(np.uint8)


def folder(voc: Path, out: Path, name: str, label: int, count: int) -> Path:
    """Masks of one class at native size."""
    (out / "images").mkdir(parents=True)
    (out / "masks").mkdir()
    for (photo, mask), _ in zip(photographs(voc, label), range(count), strict=False):
        (found,) = (voc / "VOC2012/JPEGImages").glob(f"{photo}.*")
        (out / "images" / found.name).symlink_to(found.resolve())
        Image.fromarray(mask).save(out / f"masks/{photo}.png")
    (out / "dataset.toml").write_text(f'classes = ["background", "{name}"]\n')
    return out


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("voc", type=Path)
    words.add_argument("out", type=Path, help="a new folder")
    words.add_argument("--images", type=int, nargs="+", default=[10, 50])
    words.add_argument("--crop", type=int, default=256)
    words.add_argument("--iterations", type=int, default=0, help="only about so many; 0: all")
    given = words.parse_args()
    from sdrseg import train
    from sdrseg.extend.run import extend

    base = folder(given.voc, given.out / "cats", "cat", CAT, 20)
    small = {"net.encoder": "resnet18", "net.weights": "none", "data.crop": given.crop, "train.epochs": 1}
    train("folder:offline", "ft", given.out / "base", data=base, settings=small, bases=given.out / "bases")
    rows = []
    for images in given.images:
        new = folder(given.voc, given.out / f"sheep-{images}", "sheep", SHEEP, images)
        start, used = time.monotonic(), time.process_time()
        settings = {"train.patience": 0}
        if given.iterations:
            settings["train.epochs"] = max(
                1, given.iterations // (images * 4 // 5 // 4)
            )  # a fifth is held out; batch 4
        done = extend(given.out / "base", new, given.out / f"run-{images}", settings=settings)
        row = {"images": images, "method": done.method, "iterations": done.forecast["iterations"]}
        row |= {"seconds": time.monotonic() - start, "cpu_seconds": time.process_time() - used}
        row |= {"forecast_seconds": done.forecast["seconds"], "load": os.getloadavg()[0]}
        rows.append(row)
        facts = {"encoder": "resnet18", "weights": "random", "crop": given.crop, "threads": torch.get_num_threads()}
        facts |= {"cores": os.cpu_count(), "torch": torch.__version__, "early_stop": False, "runs": rows}
        (given.out / "extend-cpu.json").write_text(json.dumps(facts, indent=2) + "\n")


if __name__ == "__main__":
    main()
