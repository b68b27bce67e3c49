"""Small copies of one data set in the formats that people have: what each writes, and what has to be read from it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import yaml
from PIL import Image

NAMES = ("background", "bird", "cat", "dog")
COLOURS = np.array([[90, 90, 90], [220, 60, 60], [60, 200, 60], [60, 60, 230]])
SIDE = 32


class Scene(NamedTuple):
    part: str  # train, val or test
    name: str
    boxes: tuple[tuple[int, int, int, int, int], ...]  # class, left, top, right, bottom

    @property
    def mask(self) -> np.ndarray:
        mask = np.zeros((SIDE, SIDE), np.uint8)
        for label, left, top, right, bottom in self.boxes:
            mask[top:bottom, left:right] = label
        return mask

    def save_image(self, file: Path) -> None:
        noise = np.random.default_rng(len(self.name) + int(self.name[-2:])).integers(-20, 20, (SIDE, SIDE, 3))
        save(file, (COLOURS[self.mask] + noise).clip(0, 255))

    def polygon(self, box: Sequence[int]) -> list[float]:
        _, left, top, right, bottom = box
        return [left, top, right, top, right, bottom, left, bottom]


def save(file: Path, pixels: object) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.asarray(pixels, np.uint8)).save(file)


def save_heic(file: Path, pixels: object) -> None:
    """As telephones save photographs, without loss."""
    from pillow_heif import register_heif_opener

    register_heif_opener()
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.asarray(pixels, np.uint8)).save(file, format="HEIF", quality=-1, chroma=444)


def write(file: Path, text: object) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text if isinstance(text, str) else json.dumps(text))


def scenes() -> list[Scene]:
    """Twelve to train on, four with each class, some beside the class before it; three to validate, three to test."""
    found = []
    for number in range(18):
        part = "train" if number < 12 else "val" if number < 15 else "test"
        label = 1 + number % 3
        boxes = [(label, 2, 2, 14 + number % 5, 15)]
        if label > 1 and number % 2:
            boxes.append((label - 1, 18, 18, 30, 28))
        found.append(Scene(part, f"photo{number:02}", tuple(boxes)))
    return found


def coco(of: Sequence[Scene], dummy: bool = False, folder: str = "") -> dict:
    """Instances; with `dummy` as Roboflow numbers them: 0 stands above the others."""
    categories = [{"id": c, "name": NAMES[c], "supercategory": "animals" if dummy else ""} for c in (1, 2, 3)]
    if dummy:
        categories.insert(0, {"id": 0, "name": "animals", "supercategory": "none"})
    images = [{"id": n, "file_name": f"{folder}{s.name}.jpg", "height": SIDE, "width": SIDE} for n, s in enumerate(of)]
    annotations = [
        {"id": 100 * n + m, "image_id": n, "category_id": box[0], "iscrowd": 0, "segmentation": [scene.polygon(box)]}
        for n, scene in enumerate(of)
        for m, box in enumerate(scene.boxes)
    ]
    return {"images": images, "annotations": annotations, "categories": categories}


def parts_of(of: Sequence[Scene]) -> dict[str, list[Scene]]:
    return {part: [scene for scene in of if scene.part == part] for part in ("train", "val", "test")}


def roboflow_coco(root: Path) -> None:
    for part, of in parts_of(scenes()).items():
        folder = root / part.replace("val", "valid")
        write(folder / "_annotations.coco.json", coco(of, dummy=True))
        for scene in of:
            scene.save_image(folder / f"{scene.name}.jpg")


def cvat_coco(root: Path) -> None:
    write(root / "annotations/instances_default.json", coco(scenes()))
    for scene in scenes():
        scene.save_image(root / f"images/{scene.name}.jpg")


def panoptic(root: Path) -> None:
    for part, of in parts_of(scenes()).items():
        told = {**coco(of), "annotations": []}
        told["categories"].append({"id": 9, "name": "background", "isthing": 0})
        for number, scene in enumerate(of):
            segments = {0: 70000, **{label: 300 * label + number for label in (1, 2, 3)}}  # beyond one colour channel
            numbers = np.vectorize(segments.get)(scene.mask)
            pixels = np.stack([numbers % 256, numbers // 256 % 256, numbers // 65536], -1)
            save(root / f"annotations/panoptic_{part}2017/{scene.name}.png", pixels)
            info = [{"id": segments[c], "category_id": int(c) or 9} for c in np.unique(scene.mask)]
            told["annotations"].append({"image_id": number, "file_name": f"{scene.name}.png", "segments_info": info})
            scene.save_image(root / f"{part}2017/{scene.name}.jpg")
        write(root / f"annotations/panoptic_{part}2017.json", told)


def stuff_maps(root: Path) -> None:
    for scene in scenes():
        scene.save_image(root / f"{scene.part}2017/{scene.name}.jpg")
        save(root / f"stuffthingmaps/{scene.part}2017/{scene.name}.png", np.array([255, 91, 105, 120])[scene.mask])
    write(root / "dataset.toml", 'values = {91 = "bird", 105 = "cat", 120 = "dog", 255 = "background"}\n')


def yolo_lines(scene: Scene) -> str:
    return "".join(
        f"{box[0] - 1} {' '.join(str(number / SIDE) for number in scene.polygon(box))}\n" for box in scene.boxes
    )


def yolo(root: Path) -> None:
    for scene in scenes():
        scene.save_image(root / f"images/{scene.part}/{scene.name}.jpg")
        write(root / f"labels/{scene.part}/{scene.name}.txt", yolo_lines(scene))
    paths = {part: f"images/{part}" for part in ("train", "val", "test")}
    write(root / "data.yaml", yaml.safe_dump({"path": "../datasets/animals", **paths, "names": list(NAMES[1:])}))


def roboflow_yolo(root: Path) -> None:
    for scene in scenes():
        folder = root / scene.part.replace("val", "valid")
        scene.save_image(folder / f"images/{scene.name}.jpg")
        write(folder / f"labels/{scene.name}.txt", yolo_lines(scene))
    paths = {part: f"../{part.replace('val', 'valid')}/images" for part in ("train", "val", "test")}
    write(root / "data.yaml", yaml.safe_dump({**paths, "nc": 3, "names": dict(enumerate(NAMES[1:]))}))


def yolo_whole(root: Path) -> None:
    for scene in scenes():
        scene.save_image(root / f"images/{scene.name}.jpg")
        write(root / f"labels/{scene.name}.txt", yolo_lines(scene))
    write(root / "data.yaml", yaml.safe_dump({"nc": 3, "names": list(NAMES[1:])}))


def labelme(root: Path) -> None:
    for scene in scenes():
        scene.save_image(root / f"{scene.name}.jpg")
        shapes = [
            {"label": NAMES[box[0]], "shape_type": "polygon", "points": np.reshape(scene.polygon(box), (4, 2)).tolist()}
            for box in scene.boxes
        ]
        shapes[0] |= {"shape_type": "rectangle", "points": [shapes[0]["points"][0], shapes[0]["points"][2]]}
        write(root / f"{scene.name}.json", {"imagePath": f"{scene.name}.jpg", "imageData": None, "shapes": shapes})


def pascal(root: Path) -> None:
    colours = np.array([[0, 0, 0], [128, 0, 0], [0, 128, 0], [128, 128, 0]])
    for scene in scenes():
        scene.save_image(root / f"JPEGImages/{scene.name}.jpg")
        save(root / f"SegmentationClass/{scene.name}.png", colours[scene.mask])
    for part, of in parts_of(scenes()).items():
        write(root / f"ImageSets/Segmentation/{part}.txt", "".join(f"{scene.name}\n" for scene in of))
    lines = [f"{name}:{','.join(map(str, colour))}::" for name, colour in zip(NAMES, colours, strict=True)]
    write(root / "labelmap.txt", "\n".join(["# label:color_rgb:parts:actions", *lines, ""]))


def labels_folder(root: Path) -> None:
    for scene in scenes():
        scene.save_image(root / f"Images/{scene.name}.jpg")
        save(root / f"labels/{scene.name}.png", scene.mask)
    write(root / "classes.txt", "\n".join(NAMES))


def side_by_side(root: Path) -> None:
    for scene in scenes():
        folder = root / scene.part.replace("val", "valid")
        scene.save_image(folder / f"{scene.name}.jpg")
        save(folder / f"{scene.name}_mask.png", scene.mask)
    rows = [f"{value}, {name}" for value, name in enumerate(NAMES)]
    write(root / "train/_classes.csv", "\n".join(["Pixel Value, Class", *rows, ""]))


def pairs(root: Path) -> None:
    for part, of in parts_of(scenes()).items():
        for scene in of:
            scene.save_image(root / f"camera/{scene.name}.jpg")
            save(root / f"truth/{scene.name}_L.png", scene.mask)
        write(root / f"{part}.txt", "".join(f"/camera/{s.name}.jpg /truth/{s.name}_L.png\n" for s in of))
    write(root / "dataset.toml", f"classes = {list(NAMES)}\n")


def no_val(root: Path) -> None:
    for scene in scenes():
        if scene.part != "val":
            scene.save_image(root / f"{scene.part}/{scene.name}.png")
            save(root / f"{scene.part}annot/{scene.name}.png", scene.mask)
    write(root / "dataset.toml", f"classes = {list(NAMES)}\n")


FORMATS: dict[str, tuple[Callable[[Path], None], str]] = {
    "roboflow_coco": (roboflow_coco, "COCO JSON (train/_annotations.coco.json"),
    "cvat_coco": (cvat_coco, "COCO JSON (annotations/instances_default.json"),
    "panoptic": (panoptic, "COCO panoptic (panoptic_train2017.json"),
    "stuff_maps": (stuff_maps, "images and masks"),
    "yolo": (yolo, "YOLO polygons (data.yaml)"),
    "roboflow_yolo": (roboflow_yolo, "YOLO polygons (data.yaml)"),
    "yolo_whole": (yolo_whole, "YOLO polygons (data.yaml)"),
    "labelme": (labelme, "LabelMe JSON"),
    "pascal": (pascal, "Pascal VOC folders with labelmap.txt"),
    "labels_folder": (labels_folder, "images and masks"),
    "side_by_side": (side_by_side, "images and masks"),
    "pairs": (pairs, "images and masks"),
    "no_val": (no_val, "images and masks"),
}
"""How each is written, and how it is called when it is read."""
