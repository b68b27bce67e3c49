"""Pascal VOC 2012 segmentation with the additional labels of SBD: 10,582 training and 1,449 validation images."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import ClassVar

import numpy as np

from sdrseg.datasets.pictures import PICTURE_SUFFIXES
from sdrseg.datasets.source import Array, PictureFiles, Problem, Split, find_by_id
from sdrseg.errors import DataError

CLASSES = tuple(
    "background aeroplane bicycle bird boat bottle bus car cat chair cow diningtable dog horse motorbike person "
    "pottedplant sheep sofa train tvmonitor".split()
)
PUBLISHED: dict[Split, int] = {"train": 10582, "val": 1449}
TRAIN_LISTS = ("trainaug.txt", "train_aug.txt")
VOC_HOME = "http://host.robots.ox.ac.uk/pascal/VOC/voc2012/VOCtrainval_11-May-2012.tar"
SBD_HOME = "https://www2.eecs.berkeley.edu/Research/Projects/CS/vision/grouping/semantic_contours/benchmark.tgz"


class Voc(PictureFiles):
    """The standard VOCdevkit/VOC2012 layout.

    Training masks come from SegmentationClassAug if it exists, otherwise from SegmentationClass and SBD's `cls/*.mat`
    (field GTcls), in a folder `SBD`, `sbd` or `benchmark_RELEASE/dataset` next to VOC2012. Nothing is written.
    """

    name = "voc"
    own_data = False
    defaults: ClassVar = {}
    classes = CLASSES

    def __init__(self, path: Path):
        super().__init__()
        self.root = _find_root(path)
        self._sbd = _find_sbd(self.root)
        self._images, self._problems = find_by_id(self.root / "JPEGImages", PICTURE_SUFFIXES)
        self._augmented = self._find_masks(self.root / "SegmentationClassAug", PICTURE_SUFFIXES)
        own = self._find_masks(self.root / "SegmentationClass", PICTURE_SUFFIXES)
        self._sbd_masks = self._find_masks(self._sbd / "cls", (".mat",)) if self._sbd else {}
        self._masks = self._sbd_masks | own | self._augmented  # later ones take precedence
        if not self._masks:
            raise DataError(f"{self.root}: neither SegmentationClassAug nor SegmentationClass found. {_advice()}")
        val = self._list("val.txt")
        self._keep_complete("val", val)
        train = set(self._train_ids(val))
        for id in sorted(train & set(val)):
            self._problems.append(
                Problem(self.file(id, "image"), "in train and val", "kept in val, not used for training")
            )
        self._keep_complete("train", train - set(val))

    def mask(self, id: str) -> Array:
        return _read_sbd(self._masks[id]) if self._masks[id].suffix == ".mat" else super().mask(id)

    def _find_masks(self, folder: Path, suffixes: Iterable[str]) -> dict[str, Path]:
        if not folder.is_dir():
            return {}
        found, problems = find_by_id(folder, suffixes)
        self._problems += problems
        return found

    def _list(self, name: str) -> list[str]:
        path = self.root / "ImageSets/Segmentation" / name
        if not path.is_file():
            raise DataError(f"{path}: no such list. It is part of {VOC_HOME}")
        try:
            lines = path.read_text(encoding="utf-8-sig").splitlines()
        except UnicodeDecodeError as error:
            raise DataError(f"{path}: not a list of image ids in UTF-8 ({error}).") from error
        # A line is an id or, in the lists of earlier code, "/JPEGImages/ID.jpg /SegmentationClassAug/ID.png".
        return [Path(line.split()[0]).stem for line in lines if line.strip()]

    def _train_ids(self, val: Iterable[str]) -> Iterable[str]:
        """train_aug: SBD and VOC train together, without VOC val."""
        for name in TRAIN_LISTS:
            if (self.root / "ImageSets/Segmentation" / name).is_file():
                listed = self._list(name)
                if self._augmented or self._sbd_masks or all(id in self._masks for id in listed):
                    return listed
        if self._augmented:
            return self._augmented.keys() - set(val)
        if not self._sbd_masks:
            raise DataError(
                f"{self.root}: neither SegmentationClassAug nor SBD found. {_advice()} "
                f"Looked for SBD in: {', '.join(map(str, _sbd_candidates(self.root)))}"
            )
        return (self._sbd_masks.keys() | set(self._list("train.txt"))) - set(val)

    def _keep_complete(self, split: Split, ids: Iterable[str]) -> None:
        """Keep the ids that have an image and a mask, sorted; missing files become problems."""
        wanted = sorted(set(ids))
        for kind, folder, files in (
            ("image", "JPEGImages", self._images),
            ("mask", "SegmentationClassAug", self._masks),
        ):
            self._problems += [
                Problem(f"{self.root / folder / id}.*", f"no {kind}", f"listed in {split} but missing; left out")
                for id in wanted
                if id not in files
            ]
        self._ids[split] = tuple(id for id in wanted if id in self._images and id in self._masks)
        self.note_size(self.root, split, PUBLISHED[split])


def _find_root(path: Path) -> Path:
    candidates = [path, path / "VOC2012", path / "VOCdevkit" / "VOC2012"]
    for candidate in candidates:
        if (candidate / "JPEGImages").is_dir():
            return candidate
    raise DataError(f"{path}: no JPEGImages folder in {', '.join(map(str, candidates))}. {_advice()}")


def _sbd_candidates(root: Path) -> list[Path]:
    parents = [root, root.parent, root.parent.parent]
    return [b / name for b in parents for name in ("SBD", "sbd", "benchmark_RELEASE/dataset")]


def _find_sbd(root: Path) -> Path | None:
    return next((candidate for candidate in _sbd_candidates(root) if (candidate / "cls").is_dir()), None)


def _read_sbd(path: Path) -> Array:
    try:
        from scipy.io import loadmat
    except ImportError as error:
        raise DataError(f"{path}: reading SBD needs scipy. Install it with: pip install 'sdrseg[sbd]'") from error
    try:
        label = loadmat(path)["GTcls"]["Segmentation"].item()  # a struct with one element
    except Exception as error:  # scipy raises many kinds of errors on damaged files
        raise DataError(f"{path}: cannot be read as an SBD label file ({error}). Replace it.") from error
    if not isinstance(label, np.ndarray) or label.ndim != 2 or label.dtype != np.uint8:
        raise DataError(f"{path}: GTcls.Segmentation is not a label map of 8-bit class ids. Replace it.")
    return label


def _advice() -> str:
    return (
        f"Needed: VOC2012 ({VOC_HOME}), and either SegmentationClassAug (10,582 + 1,449 PNG masks) inside VOC2012 or "
        f"SBD ({SBD_HOME}) unpacked next to it as SBD/cls/*.mat."
    )
