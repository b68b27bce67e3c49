"""ADE20K SceneParsing (ADEChallengeData2016): 20,210 training and 2,000 validation images, 150 classes.

Mask value 0 means "unlabelled / other": it is trained as channel 0 and never scored. There is no void.
"""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import ClassVar

from sdrseg.datasets.pictures import PICTURE_SUFFIXES
from sdrseg.datasets.source import PictureFiles, Problem, Split, find_by_id
from sdrseg.errors import DataError

HOME = "http://data.csail.mit.edu/places/ADEchallenge/ADEChallengeData2016.zip"
FOLDERS: dict[Split, str] = {"train": "training", "val": "validation"}
PUBLISHED: dict[Split, int] = {"train": 20210, "val": 2000}


class Ade20k(PictureFiles):
    """The ADEChallengeData2016 layout: images/training and annotations/training, and likewise for validation."""

    name = "ade20k"
    own_data = False
    score_background = False
    partition = "balanced"
    defaults: ClassVar = {"train": {"batch_size": 4, "epochs": 60}, "optim": {"lr": 1e-2, "lr_later": 1e-3}}

    def __init__(self, path: Path):
        super().__init__()
        names = resources.files("sdrseg").joinpath("resources/ade20k_classes.txt").read_text().splitlines()
        self.classes = tuple(names)
        candidates = [path, path / "ADEChallengeData2016"]
        root = next((candidate for candidate in candidates if (candidate / "images" / "training").is_dir()), None)
        if root is None:
            tried = ", ".join(str(candidate / "images/training") for candidate in candidates)
            raise DataError(f"{path}: ADE20K not found (looked for {tried}). Download {HOME} and unpack it there.")
        self.root = root
        for split, folder in FOLDERS.items():
            self._pair(split, root / "images" / folder, root / "annotations" / folder)

    def _pair(self, split: Split, image_folder: Path, mask_folder: Path) -> None:
        for folder in (image_folder, mask_folder):
            if not folder.is_dir():
                raise DataError(f"{folder}: no such folder. It is part of {HOME}")
        images, image_problems = find_by_id(image_folder, PICTURE_SUFFIXES)
        masks, mask_problems = find_by_id(mask_folder, PICTURE_SUFFIXES)
        self._problems += image_problems + mask_problems
        self._problems += [Problem(str(images[i]), "no mask", "left out") for i in sorted(images.keys() - masks)]
        self._problems += [Problem(str(masks[i]), "no image", "left out") for i in sorted(masks.keys() - images)]
        self._images |= images
        self._masks |= masks
        self._ids[split] = tuple(sorted(images.keys() & masks))
        self.note_size(self.root, split, PUBLISHED[split])
