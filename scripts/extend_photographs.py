"""The data of the transcript in docs/extend.md, made of photographs of Pascal VOC.

    python scripts/extend_photographs.py PATH_OF_VOC OUT

base/       160 photographs of birds, buses, cats and horses, all labelled, in masks
sheep/      40 photographs in which only sheep are labelled, in black-and-white masks
trains/     40 of trains, as COCO
aeroplanes/ 12 of aeroplanes, as YOLO

Photographs are reduced to 320 pixels. Which ones are used follows from the order of their names.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from own_data_photos import Photographs, make_folders, outlines, save_pair, sheep

AEROPLANE, TRAIN = 1, 19
BASE = {3: "bird", 6: "bus", 8: "cat", 13: "horse"}


def base(photographs: Photographs, out: Path) -> None:
    for kind in BASE:
        for name, mask in photographs.take(40, lambda seen, kind=kind: seen == {kind}):
            labels = np.where(mask == 255, mask, 0)
            for value, label in enumerate(BASE, 1):
                labels[mask == label] = value
            save_pair(photographs, out, name, labels)
    (out / "dataset.toml").write_text(f"classes = {json.dumps(['background', *BASE.values()])}\n")


def trains(photographs: Photographs, out: Path) -> None:
    images, annotations = [], []
    for number, (name, mask) in enumerate(photographs.take(40, lambda seen: seen == {TRAIN})):
        photographs.save(name, out / f"images/{name}.jpg", mask.shape[::-1])
        images.append({"id": number, "file_name": f"{name}.jpg", "height": mask.shape[0], "width": mask.shape[1]})
        for outline in outlines(mask == TRAIN):
            one = {"id": len(annotations), "image_id": number, "category_id": 1, "iscrowd": 0}
            annotations.append({**one, "segmentation": [[round(float(x), 1) for x in outline.ravel()]]})
    document = {"images": images, "annotations": annotations, "categories": [{"id": 1, "name": "train"}]}
    (out / "annotations.json").write_text(json.dumps(document))


def aeroplanes(photographs: Photographs, out: Path) -> None:
    for number, (name, mask) in enumerate(photographs.take(12, lambda seen: seen == {AEROPLANE})):
        part = "val" if number % 4 == 0 else "train"
        photographs.save(name, out / f"images/{part}/{name}.jpg", mask.shape[::-1])
        shares = [outline / mask.shape[::-1] for outline in outlines(mask == AEROPLANE)]
        lines = [" ".join(["0", *(f"{x:.5f}" for x in share.ravel())]) for share in shares]
        (out / f"labels/{part}").mkdir(parents=True, exist_ok=True)
        (out / f"labels/{part}/{name}.txt").write_text("\n".join([*lines, ""]))
    (out / "data.yaml").write_text("train: images/train\nval: images/val\nnames: [aeroplane]\n")


if __name__ == "__main__":
    made = make_folders(__doc__, base, sheep, trains, aeroplanes)
    (made / "sheep/dataset.toml").write_text('[values]\n0 = "background"\n255 = "sheep"\n')
