"""The three data sets of docs/own-data.md, made of photographs of Pascal VOC.

    python scripts/own_data_photos.py PATH_OF_VOC OUT

traffic/  120 photographs in which only buses, cars and persons are labelled, and nothing is background
export/   120 photographs of birds, cats and dogs as Roboflow exports them: polygons in _annotations.coco.json
sheep/    40 photographs of sheep with black-and-white masks

Photographs are reduced to 320 pixels. Which ones are used follows from the order of their names.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
from contourpy import contour_generator
from numpy.typing import NDArray
from PIL import Image

Array = NDArray[np.uint8]
BIRD, BUS, CAR, CAT, DOG, PERSON, SHEEP, VOID = 3, 6, 7, 8, 12, 15, 17, 255
SIDE = 320
VISIBLE = 0.03  # of the pixels


class Photographs:
    """The training images of VOC with their labels, each used once."""

    def __init__(self, voc: Path):
        self.voc = voc / "VOC2012"
        self._left = list(self._labelled())

    def _labelled(self) -> Iterator[tuple[str, Array]]:
        for name in sorted((self.voc / "ImageSets/Segmentation/trainaug.txt").read_text().split()):
            with Image.open(self.voc / f"SegmentationClassAug/{name}.png") as mask:
                mask.thumbnail((SIDE, SIDE), Image.Resampling.NEAREST)
                yield name, np.asarray(mask)

    def take(self, count: int, suits: Callable[[frozenset[int]], bool]) -> list[tuple[str, Array]]:
        """The first photographs whose visible classes are suitable."""
        found = [(name, mask) for name, mask in self._left if suits(visible(mask))][:count]
        if len(found) < count:
            raise SystemExit(f"{self.voc}: {len(found)} suitable photographs of {count}")
        used = {name for name, _ in found}
        self._left = [(name, mask) for name, mask in self._left if name not in used]
        return found

    def save(self, name: str, file: Path, size: tuple[int, int]) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        (original,) = (self.voc / "JPEGImages").glob(f"{name}.*")
        with Image.open(original) as picture:
            picture.resize(size, Image.Resampling.LANCZOS).save(file, quality=90)


def visible(mask: Array) -> frozenset[int]:
    values, counts = np.unique(mask, return_counts=True)
    return frozenset(int(v) for v, n in zip(values, counts, strict=True) if n >= VISIBLE * mask.size) - {0, VOID}


def traffic(photographs: Photographs, out: Path) -> None:
    vehicles = [{BUS}, {CAR}]
    chosen = [photo for kind in vehicles for photo in photographs.take(35, lambda seen, kind=kind: seen == kind)]
    chosen += photographs.take(50, lambda seen: PERSON in seen and bool(seen & {BUS, CAR}))
    for name, mask in chosen:
        labels = np.full_like(mask, VOID)
        for value, label in enumerate((BUS, CAR, PERSON)):
            labels[mask == label] = value
        save_pair(photographs, out, name, labels)
    (out / "dataset.toml").write_text('classes = ["bus", "car", "person"]\n')


def sheep(photographs: Photographs, out: Path) -> None:
    for name, mask in photographs.take(40, lambda seen: seen == {SHEEP}):
        save_pair(photographs, out, name, np.where(mask == SHEEP, 255, 0).astype(np.uint8))


def save_pair(photographs: Photographs, out: Path, name: str, labels: Array) -> None:
    photographs.save(name, out / f"images/{name}.jpg", labels.shape[::-1])
    (out / "masks").mkdir(parents=True, exist_ok=True)
    Image.fromarray(labels).save(out / f"masks/{name}.png")


def export(photographs: Photographs, out: Path) -> None:
    names = {BIRD: "bird", CAT: "cat", DOG: "dog"}
    chosen = {kind: photographs.take(40, lambda seen, kind=kind: seen == {kind}) for kind in names}
    for part, first, last in (("train", 0, 28), ("valid", 28, 36), ("test", 36, 40)):
        some = [photo for kind in names for photo in chosen[kind][first:last]]
        categories = [{"id": 0, "name": "animals", "supercategory": "none"}]
        categories += [{"id": n, "name": name, "supercategory": "animals"} for n, name in enumerate(names.values(), 1)]
        images, annotations = [], []
        for number, (name, mask) in enumerate(some):
            file = f"{name}_jpg.rf.{hashlib.md5(name.encode()).hexdigest()}.jpg"
            photographs.save(name, out / part / file, mask.shape[::-1])
            images.append({"id": number, "file_name": file, "height": mask.shape[0], "width": mask.shape[1]})
            for category, value in enumerate(names, 1):
                for outline in outlines(mask == value):
                    (left, top), (right, bottom) = outline.min(0), outline.max(0)
                    one = {"id": len(annotations), "image_id": number, "category_id": category, "iscrowd": 0}
                    box = [float(x) for x in (left, top, right - left, bottom - top)]
                    points = [round(float(x), 1) for x in outline.ravel()]
                    annotations.append({**one, "bbox": box, "area": box[2] * box[3], "segmentation": [points]})
        facts = {"info": {"description": "as Roboflow exports COCO"}, "categories": categories}
        text = json.dumps({**facts, "images": images, "annotations": annotations})
        (out / part / "_annotations.coco.json").write_text(text)


def outlines(region: NDArray[np.bool_]) -> Sequence[NDArray[np.float64]]:
    """The outer outlines of the connected parts, as (points, 2); a box of 30 pixels at least."""
    padded = np.pad(region, 1).astype(float)
    polygons, offsets = contour_generator(z=padded, fill_type="OuterOffset").filled(0.5, 2.0)
    outer = [points[: ends[1]] - 0.5 for points, ends in zip(polygons, offsets, strict=True)]
    return [points for points in outer if np.ptp(points, axis=0).prod() >= 30]


def make_folders(description: str | None, *makers: Callable[[Photographs, Path], None]) -> Path:
    """Read VOC and the new folder from the command line; each function fills the subfolder of its name."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("voc", type=Path, help="the folder that contains VOC2012")
    parser.add_argument("out", type=Path, help="a new folder")
    args = parser.parse_args()
    args.out.mkdir(parents=True)
    photographs = Photographs(args.voc)
    for make in makers:
        make(photographs, args.out / make.__name__)
    return Path(args.out)


if __name__ == "__main__":
    make_folders(__doc__, traffic, export, sheep)
