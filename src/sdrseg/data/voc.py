"""Pascal VOC 2012 segmentation with the additional labels of SBD: 10,582 training and 1,449 validation images."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from sdrseg.data.source import PICTURE_SUFFIXES, Array, PictureFiles, Problem, Split, find_by_id
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

    Training masks come from SegmentationClassAug where it exists; otherwise they are put together from
    SegmentationClass and SBD's `cls/*.mat` (field GTcls), found in a folder `SBD`, `sbd` or `benchmark_RELEASE/dataset`
    beside VOC2012. Nothing is written.
    """

    name = "voc"
    classes = CLASSES

    def __init__(self, path: Path):
        super().__init__()
        self.root = _find_root(path)
        self._sbd = _find_sbd(self.root)
        self._images, self._problems = find_by_id(self.root / "JPEGImages", PICTURE_SUFFIXES)
        # Later folders only fill gaps: the augmented masks first, then VOC's own, then SBD's.
        for folder in (self.root / "SegmentationClassAug", self.root / "SegmentationClass"):
            if folder.is_dir():
                found, twice = find_by_id(folder, PICTURE_SUFFIXES)
                self._masks = found | self._masks
                self._problems += twice
        if self._sbd is not None:
            self._masks = {file.stem: file for file in (self._sbd / "cls").glob("*.mat")} | self._masks
        if not self._masks:
            raise DataError(f"{self.root}: neither SegmentationClassAug nor SegmentationClass is there. {_advice()}")
        val = self._list("val.txt")
        self._keep_complete("val", val)
        self._keep_complete("train", self._train_ids(val))

    def mask(self, id: str) -> Array:
        return _read_sbd(self._masks[id]) if self._masks[id].suffix == ".mat" else super().mask(id)

    def _list(self, name: str) -> list[str]:
        path = self.root / "ImageSets/Segmentation" / name
        if not path.is_file():
            raise DataError(f"{path}: no such list. It comes with {VOC_HOME}")
        # A line is an id, or "/JPEGImages/ID.jpg /SegmentationClassAug/ID.png" in the lists of earlier code.
        return [Path(line.split()[0]).stem for line in path.read_text().splitlines() if line.strip()]

    def _train_ids(self, val: Iterable[str]) -> Iterable[str]:
        """train_aug: SBD and VOC train together, without VOC val."""
        for name in TRAIN_LISTS:
            if (self.root / "ImageSets/Segmentation" / name).is_file():
                return self._list(name)
        if (augmented := self.root / "SegmentationClassAug").is_dir():
            return {path.stem for path in augmented.iterdir()} - set(val)
        if self._sbd is None:
            raise DataError(
                f"{self.root}: SegmentationClassAug is not there, and no SBD to build it from. {_advice()} "
                f"Looked for SBD in: {', '.join(map(str, _sbd_places(self.root)))}"
            )
        return ({path.stem for path in (self._sbd / "cls").glob("*.mat")} | set(self._list("train.txt"))) - set(val)

    def _keep_complete(self, split: Split, ids: Iterable[str]) -> None:
        """Keep the ids that have an image and a mask, sorted; what is missing becomes a problem."""
        wanted = sorted(set(ids))
        for kind, folder, files in (
            ("image", "JPEGImages", self._images),
            ("mask", "SegmentationClassAug", self._masks),
        ):
            self._problems += [
                Problem(f"{self.root / folder / id}.*", f"no {kind}", f"listed in {split} but not there; left out")
                for id in wanted
                if id not in files
            ]
        self._ids[split] = tuple(id for id in wanted if id in self._images and id in self._masks)
        self.note_size(self.root, split, PUBLISHED[split])


def _find_root(path: Path) -> Path:
    places = [path, path / "VOC2012", path / "VOCdevkit" / "VOC2012"]
    for place in places:
        if (place / "JPEGImages").is_dir():
            return place
    raise DataError(f"{path}: no JPEGImages folder in {', '.join(map(str, places))}. {_advice()}")


def _sbd_places(root: Path) -> list[Path]:
    beside = [root, root.parent, root.parent.parent]
    return [b / name for b in beside for name in ("SBD", "sbd", "benchmark_RELEASE/dataset")]


def _find_sbd(root: Path) -> Path | None:
    return next((place for place in _sbd_places(root) if (place / "cls").is_dir()), None)


def _read_sbd(path: Path) -> Array:
    try:
        from scipy.io import loadmat
    except ImportError as error:
        raise DataError(f"{path}: reading SBD needs scipy. Install it with: pip install 'sdrseg[sbd]'") from error
    try:
        label = loadmat(path, simplify_cells=True)["GTcls"]["Segmentation"]
    except Exception as error:  # the reader raises almost anything on broken bytes
        raise DataError(f"{path}: cannot be read as an SBD label file ({error}). Replace it.") from error
    return np.asarray(label, np.uint8)


def _advice() -> str:
    return (
        f"Needed: VOC2012 ({VOC_HOME}), and either SegmentationClassAug (10,582 + 1,449 PNG masks) inside VOC2012 or "
        f"SBD ({SBD_HOME}) unpacked beside it as SBD/cls/*.mat."
    )
