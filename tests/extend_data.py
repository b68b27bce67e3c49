"""Small folders of coloured boxes on grey: a base of six classes, and folders that label new classes only."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import yaml

from formats import save, write
from runs import Quiet
from sdrseg.engine.run import train

NAMES = ("background", "red", "green", "blue", "yellow", "pink", "cyan", "white", "black", "orange")
COLOURS = np.array(
    [
        [110, 110, 110],
        [230, 30, 30],
        [30, 200, 30],
        [30, 30, 230],
        [230, 230, 30],
        [230, 30, 230],
        [30, 220, 220],
        [250, 250, 250],
        [5, 5, 5],
        [250, 140, 20],
    ]
)
SMALL = {
    "net.encoder": "toy16",
    "net.weights": "none",
    "net.decoder": "deeplabv3",
    "net.output_stride": 8,
    "net.bn_momentum_encoder": 0.1,
    "data.crop": 32,
    "data.scale": [0.9, 1.1],
    "train.epochs": 12,
    "train.batch_size": 8,
    "optim.lr": 0.05,
    "optim.lr_later": 0.02,
    "optim.decoder_lr_factor": 1.0,
    "optim.decoder_lr_factor_later": 1.0,
    "run.loggers": [],
}
QUICK = {"train.epochs": 1, "train.best_every": 0, "train.patience": 0}
SIDE = 32
Boxes = list[tuple[int, int, int, int, int]]  # class, left, top, right, bottom


def boxes_of(seed: int, classes: Sequence[int], beside: Sequence[int] = ()) -> Boxes:
    """One box of a class, and in the other corner one of another."""
    draw = np.random.default_rng(seed)
    a, b = draw.integers(9, 15, 2)
    found: Boxes = [(int(draw.choice(classes)), 1, 1, 1 + int(a), 1 + int(b))]
    if len(beside):
        found.append((int(draw.choice(beside)), 18, 18, 18 + int(b) - 2, 18 + int(a) - 2))
    return found


def mask_of(boxes: Boxes, kept: Sequence[int] | None = None) -> np.ndarray:
    mask = np.zeros((SIDE, SIDE), np.uint8)
    for label, left, top, right, bottom in boxes:
        if kept is None or label in kept:
            mask[top:bottom, left:right] = label
    return mask


def picture(boxes: Boxes, seed: int) -> np.ndarray:
    noise = np.random.default_rng(seed).integers(-15, 16, (SIDE, SIDE, 3))
    return (COLOURS[mask_of(boxes)] + noise).clip(0, 255).astype(np.uint8)


def base_folder(root: Path, images: int = 60, classes: Sequence[int] = (1, 2, 3, 4, 5, 6)) -> Path:
    """All classes labelled."""
    for n in range(images):
        boxes = boxes_of(n, classes, classes)
        save(root / f"images/i{n:03}.png", picture(boxes, n))
        save(root / f"masks/i{n:03}.png", mask_of(boxes))
    write(root / "dataset.toml", f"classes = {list(NAMES[: max(classes) + 1])}\n")
    return root


def base_run(root: Path) -> Path:
    """A folder `base` of six classes and a `run` on it."""
    base_folder(root / "base")
    train(
        "folder:offline", "ft", root / "run", data=root / "base", settings=SMALL, bases=root / "bases", display=Quiet()
    )
    return root


def new_scenes(label: int, images: int, old: Sequence[int] = (1, 2, 3, 4, 5, 6)) -> list[tuple[str, Boxes]]:
    """Boxes of a new class beside old ones."""
    return [(f"n{n:03}", boxes_of(1000 * label + n, [label], old)) for n in range(images)]


def masks_folder(root: Path, label: int, images: int = 12, *, all_labelled: bool = False) -> Path:
    """Black and white masks of one class; with `all_labelled`, masks of class ids with the old ones, too."""
    for name, boxes in new_scenes(label, images):
        save(root / f"images/{name}.png", picture(boxes, int(name[1:])))
        mask = mask_of(boxes) if all_labelled else mask_of(boxes, [label]) // label * 255
        save(root / f"masks/{name}.png", mask)
    text = (
        f"classes = {list(NAMES[: label + 1])}\n"
        if all_labelled
        else f'values = {{0 = "background", 255 = "{NAMES[label]}"}}\n'
    )
    write(root / "dataset.toml", text)
    return root


def coco_folder(root: Path, label: int, images: int = 12) -> Path:
    scenes = new_scenes(label, images)
    told = {
        "images": [
            {"id": n, "file_name": f"{name}.png", "height": SIDE, "width": SIDE} for n, (name, _) in enumerate(scenes)
        ],
        "categories": [{"id": 1, "name": NAMES[label]}],
        "annotations": [
            {"id": n, "image_id": n, "category_id": 1, "iscrowd": 0, "segmentation": [_polygon(boxes[0])]}
            for n, (_, boxes) in enumerate(scenes)
        ],
    }
    write(root / "annotations.json", told)
    for name, boxes in scenes:
        save(root / f"images/{name}.png", picture(boxes, int(name[1:])))
    return root


def yolo_folder(root: Path, label: int, images: int = 12) -> Path:
    for n, (name, boxes) in enumerate(new_scenes(label, images)):
        part = "val" if n % 4 == 0 else "train"
        save(root / f"images/{part}/{name}.png", picture(boxes, int(name[1:])))
        write(root / f"labels/{part}/{name}.txt", f"0 {' '.join(str(v / SIDE) for v in _polygon(boxes[0]))}\n")
    write(root / "data.yaml", yaml.safe_dump({"train": "images/train", "val": "images/val", "names": [NAMES[label]]}))
    return root


def _polygon(box: tuple[int, int, int, int, int]) -> list[int]:
    _, left, top, right, bottom = box
    return [left, top, right, top, right, bottom, left, bottom]
