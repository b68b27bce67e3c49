"""Classes that are added to a trained model: what is kept, what is refused, and what a new run is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import sdrseg
from extend_data import NAMES, base_folder, coco_folder, masks_folder, yolo_folder
from runs import Quiet
from sdrseg.engine.evaluate import score_again
from sdrseg.engine.run import train
from sdrseg.extend.run import extend

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


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A base of six classes in `run`, and folders of new classes in three formats."""
    root = tmp_path_factory.mktemp("extend")
    base_folder(root / "base")
    masks_folder(root / "white", 7)
    coco_folder(root / "black", 8)
    yolo_folder(root / "orange", 9)
    train(
        "folder:offline", "ft", root / "run", data=root / "base", settings=SMALL, bases=root / "bases", display=Quiet()
    )
    return root


def files(folder: Path) -> dict[str, bytes]:
    return {str(f.relative_to(folder)): f.read_bytes() for f in sorted(folder.rglob("*")) if f.is_file()}


def test_a_class_is_added_and_the_old_run_stays_as_it_is(place, tmp_path):
    before = files(place / "run")
    done = extend(place / "run", place / "white", tmp_path / "two", settings=QUICK, display=Quiet())
    assert files(place / "run") == before
    assert done.step == 1 and [c["name"] for c in done.result["new"]] == ["white"]
    model = sdrseg.load(tmp_path / "two")
    assert [c.name for c in model.classes] == list(NAMES[:8])
    assert [c.step for c in model.classes] == [0] * 7 + [1]
    chained = json.loads((tmp_path / "two/steps/1/meta.json").read_text())["parent"]
    first = json.loads((place / "run/steps/0/meta.json").read_text())["files"]["model"]["sha256"]
    assert chained == first
    again = score_again(tmp_path / "two")
    assert [r["same"] for r in again] == [True, True]
