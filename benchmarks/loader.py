"""Training images per second: the loader against torchvision's transforms, on the same files in the same run.

    python benchmarks/loader.py --data PATH    # VOC; without --data: $SDRSEG_VOC
    python benchmarks/loader.py --generated    # generated scenes, written as JPEG files of 500×375 pixels

Ours is what training runs: decode, a random scale of 0.5 to 2, padding, a 512×512 crop, a flip, labels by a table, a
batch of 8. It ends with uint8 images and labels, which are normalised on the device; "+ normalise" does that on the
CPU as well (float32 images, int64 labels), and so ends where the reference ends.

The reference is put together from the public transforms of torchvision.transforms.v2, in the order of torchvision's
own training reference for segmentation: RandomResize of the shorter side to 0.5 to 2 times `base`,
RandomHorizontalFlip, RandomCrop(512, pad_if_needed), ToDtype(float32, int64), Normalize, default collation in batches
of 8. `base` is the mean shorter side of the files, so that both sides resize to about the same number of pixels.
"tensor" turns the decoded image into a tensor first, "PIL" after the crop; masks are tv_tensors.Mask in both. The
reference maps no labels and makes no padding mask.

Times are CPU time of one process with one thread, so that images per second are per core. Decoding is common to both
sides (the same library reads the same files), so it is given apart from the rest. A ratio is the reference's time over
ours in the same round: above 1, ours is faster. Below 1 in total, against either reference, the exit code is 1.

The last table is wall-clock throughput with worker processes and with the cache of decoded images in RAM.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch.utils.data import DataLoader, Dataset, default_collate
from torchvision import tv_tensors
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as F

from sdrseg.config import load_config, parse_settings
from sdrseg.datasets.augment import MEAN, STD, normalise
from sdrseg.datasets.batches import Augmented, Decoded, train_batches
from sdrseg.datasets.cache import build_cache
from sdrseg.datasets.shapes import Shapes
from sdrseg.datasets.source import Source
from sdrseg.datasets.voc import Voc
from sdrseg.labels import VOID
from sdrseg.terminal import print_json, print_table

from timing import Spread, plain, ratio, rounds, spread, versions

CROP = 512
BATCH = 8
OURS, NORMALISED, TENSOR, PIL = "sdrseg", "sdrseg + normalise", "torchvision, tensor", "torchvision, PIL"
REFERENCES = (TENSOR, PIL)
Pictures = tuple[Image.Image, Image.Image]


def generate(folder: Path, images: int) -> None:
    """The layout of VOC with drawn scenes of 500×375 pixels."""
    scenes = Shapes(size=500, train=images, val=1)
    for name in ("JPEGImages", "SegmentationClassAug", "ImageSets/Segmentation"):
        (folder / name).mkdir(parents=True)
    for split, file in (("train", "trainaug.txt"), ("val", "val.txt")):
        for id in scenes.ids(split):
            image, mask = scenes.pair(id)
            Image.fromarray(image[:375]).save(folder / f"JPEGImages/{id}.jpg", quality=90)
            Image.fromarray(mask[:375]).save(folder / f"SegmentationClassAug/{id}.png")
        (folder / "ImageSets/Segmentation" / file).write_text("\n".join(scenes.ids(split)))


def train_table() -> NDArray[np.uint8]:
    """The labels of the first step of 15-5."""
    table = np.full(256, VOID, np.uint8)
    table[:21] = [*range(16), 0, 0, 0, 0, 0]
    return table


def decode(source: Source, id: str) -> Pictures:
    image, mask = Image.open(source.file(id, "image")).convert("RGB"), Image.open(source.file(id, "mask"))
    mask.load()
    return image, mask


def reference(backend: str, base: int) -> Callable[[Pictures], Any]:
    """The pipeline of the module's description on (image, mask)."""
    dtypes = {tv_tensors.Image: torch.float32, tv_tensors.Mask: torch.int64, "others": None}
    geometry = [
        v2.RandomResize(min_size=base // 2, max_size=2 * base),
        v2.RandomHorizontalFlip(0.5),
        v2.RandomCrop(CROP, pad_if_needed=True, fill={tv_tensors.Mask: VOID, "others": 0}),
    ]
    start = [v2.ToImage(), *geometry] if backend == TENSOR else [*geometry, v2.ToImage()]
    transforms = v2.Compose([*start, v2.ToDtype(dtypes, scale=True), v2.Normalize(MEAN, STD), v2.ToPureTensor()])
    return lambda pictures: transforms(pictures[0], tv_tensors.Mask(F.pil_to_tensor(pictures[1])))


class Stopwatch:
    """Adds up the CPU time of the calls of one function."""

    def __init__(self, function: Callable[..., Any]):
        self.function, self.seconds = function, 0.0

    def __call__(self, *arguments: Any) -> Any:
        start = time.process_time()
        result = self.function(*arguments)
        self.seconds += time.process_time() - start
        return result


class TimedSource:
    """A source as far as `Decoded` uses it, with the time that decoding takes."""

    def __init__(self, source: Source):
        self.pair = Stopwatch(source.pair)


@dataclass(frozen=True)
class Material:
    """The files of one run."""

    source: Source
    ids: tuple[str, ...]
    base: int

    def batches(self) -> Iterable[list[int]]:
        return (list(range(start, start + BATCH)) for start in range(0, len(self.ids), BATCH))

    def config(self, *settings: str) -> Any:
        return load_config("voc", None, parse_settings([f"data.crop={CROP}", f"train.batch_size={BATCH}", *settings]))


def choose(source: Source, images: int) -> Material:
    """The same random files every time, in whole batches."""
    ids = sorted(source.ids("train"))
    ids = random.Random(0).sample(ids, min(images, len(ids)) // BATCH * BATCH)
    base = round(sum(min(source.mask(id).shape) for id in ids) / len(ids))
    return Material(source, tuple(ids), base)


def run_ours(material: Material, normalised: bool) -> Callable[[int], float]:
    def side(number: int) -> float:
        source: Any = TimedSource(material.source)
        samples = Decoded(source, material.ids, train_table(), Augmented(material.config()))
        for rows in material.batches():
            batch = samples.batch([(number, row) for row in rows])
            if normalised:
                images, labels = normalise(batch.images), batch.labels.long()
                assert images.shape == (BATCH, 3, CROP, CROP) and images.dtype == torch.float32
                assert labels.shape == (BATCH, CROP, CROP)
        return source.pair.seconds

    return side


def run_reference(material: Material, backend: str) -> Callable[[int], float]:
    transform = reference(backend, material.base)

    def side(number: int) -> float:
        torch.manual_seed(number)
        timed = Stopwatch(decode)
        for rows in material.batches():
            images, labels = default_collate([transform(timed(material.source, material.ids[row])) for row in rows])
            assert images.shape == (BATCH, 3, CROP, CROP) and images.dtype == torch.float32
            assert labels.shape == (BATCH, 1, CROP, CROP) and labels.dtype == torch.int64
        return timed.seconds

    return side


def per_core(material: Material, repetitions: int) -> dict[str, Any]:
    """Milliseconds per image of every side, and the ratios."""
    sides = {OURS: run_ours(material, False), NORMALISED: run_ours(material, True)}
    sides |= {backend: run_reference(material, backend) for backend in REFERENCES}
    total, decoding = rounds(sides, repetitions)
    rest = {name: [t - d for t, d in zip(total[name], decoding[name], strict=True)] for name in sides}

    def each(seconds: Sequence[float]) -> Spread:
        return spread([1000 * s / len(material.ids) for s in seconds])

    return {
        "milliseconds": {
            name: {"decode": each(decoding[name]), "transform": each(rest[name]), "total": each(total[name])}
            for name in sides
        },
        "images_per_second": {name: spread([len(material.ids) / s for s in total[name]]) for name in sides},
        "ratio": {
            ours: {
                backend: {"transform": ratio(rest[backend], rest[ours]), "total": ratio(total[backend], total[ours])}
                for backend in REFERENCES
            }
            for ours in (OURS, NORMALISED)
        },
    }


class Files(Dataset[Any]):
    """The reference as a data set for worker processes."""

    def __init__(self, material: Material, epochs: int):
        self.material, self.ids = material, material.ids * epochs

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, row: int) -> Any:
        return reference(TENSOR, self.material.base)(decode(self.material.source, self.ids[row]))


def throughput(material: Material, repetitions: int, epochs: int = 3) -> list[dict[str, Any]]:
    """Images per second of wall-clock time, from the first batch to the last, so that no start is counted."""
    sizes = {id: material.source.mask(id).shape for id in material.ids}
    cache = build_cache(material.source, sizes, "cpu", threads=1)

    def ours(workers: int, cached: bool = False) -> Iterable[Any]:
        config = material.config(f"data.workers={workers}", f"train.epochs={epochs}")
        return train_batches(material.source, material.ids, train_table(), config, cache=cache if cached else None)

    def theirs(workers: int) -> Iterable[Any]:
        return DataLoader(Files(material, epochs), BATCH, num_workers=workers)

    def timed(make: Callable[[], Iterable[Any]]) -> Callable[[int], float]:
        def side(_: int) -> float:
            batches = iter(make())
            next(batches)
            start = time.perf_counter()
            images = BATCH * sum(1 for _ in batches)
            return images / (time.perf_counter() - start)

        return side

    def built(threads: int) -> Callable[[int], float]:
        def side(_: int) -> float:
            start = time.perf_counter()
            build_cache(material.source, sizes, "cpu", threads)
            return len(sizes) / (time.perf_counter() - start)

        return side

    cached = "sdrseg, cache in RAM"
    filling = {threads: f"filling the cache, {threads} threads" for threads in (1, 2)}
    pairs = {w: (f"sdrseg, {w} workers", f"{TENSOR}, {w} workers") for w in (0, 1, 2)}
    sides = {cached: timed(lambda: ours(0, cached=True))}
    for w, (one, other) in pairs.items():
        sides |= {one: timed(lambda w=w: ours(w)), other: timed(lambda w=w: theirs(w))}
    sides |= {name: built(threads) for threads, name in filling.items()}
    _, speeds = rounds(sides, repetitions)
    against = dict(pairs.values()) | {cached: pairs[0][0], filling[2]: filling[1]}
    return [
        {
            "loader": one,
            "images_per_second": spread(speeds[one]),
            "than": other,
            "its_images_per_second": spread(speeds[other]),
            "ratio": ratio(speeds[one], speeds[other]),
        }
        for one, other in against.items()
    ]


def show(result: dict[str, Any]) -> None:
    files = result["files"]
    print(f"{files['images']} {files['kind']} images, mean shorter side {files['base']}. Median (quartiles).")
    rows = [
        (name, *(str(times[part]) for part in ("decode", "transform", "total")), str(result["images_per_second"][name]))
        for name, times in result["milliseconds"].items()
    ]
    print_table(
        "CPU milliseconds per image, and images per second per core",
        ("pipeline", "decode", "transform", "total", "images/s"),
        rows,
    )
    faster = [
        (ours, backend, str(values["transform"]), str(values["total"]))
        for ours, against in result["ratio"].items()
        for backend, values in against.items()
    ]
    print_table("Times faster", ("pipeline", "than", "transform", "total"), faster)
    print_table(
        "Images per second of wall-clock time",
        ("loader", "images/s", "than", "images/s", "times faster"),
        [tuple(map(str, row.values())) for row in result["throughput"]],
    )
    print(f"Required: a ratio of at least 1 in total. {'Met.' if result['met'] else 'NOT met.'}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=os.environ.get("SDRSEG_VOC") or None, help="folder of VOC2012")
    parser.add_argument("--generated", action="store_true", help="generated files, even if $SDRSEG_VOC is set")
    parser.add_argument("--images", type=int, default=96, help=f"how many files; at least {BATCH}")
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--json", action="store_true", help="machine-readable output")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        path = None if arguments.generated else arguments.data
        if path is None:
            generate(path := Path(folder), arguments.images)
            kind = "generated"
        else:
            kind = "VOC"
        material = choose(Voc(Path(path)), arguments.images)
        suffixes = sorted({Path(material.source.file(id, "image")).suffix for id in material.ids})
        files = {"kind": f"{kind} {'/'.join(suffixes)}", "images": len(material.ids), "base": material.base}
        measured = per_core(material, arguments.repetitions)
        speeds = throughput(material, max(1, arguments.repetitions // 2))
    met = all(values["total"].median >= 1 for against in measured["ratio"].values() for values in against.values())
    result = {"versions": versions(), "files": files, **measured, "throughput": speeds, "met": met}
    if arguments.json:
        print_json(plain(result))
    else:
        show(result)
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
