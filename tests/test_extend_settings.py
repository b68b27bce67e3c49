"""Which settings an extension takes over, and that every step of a chain keeps its own."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import sdrseg
from extend_data import QUICK, base_run, coco_folder, masks_folder
from runs import Quiet
from sdrseg.engine.rescore import score_again
from sdrseg.errors import SdrsegError
from sdrseg.extend.history import change_classes, rollback
from sdrseg.extend.parent import read_parent
from sdrseg.extend.plan import make_config
from sdrseg.extend.run import extend

OTHER = {"data.crop": 40, "eval.transform": "crop512"}


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A `run` with optim.lr = 0.05, extended in `7` (10 images, other settings) and in `8` (another learning rate)."""
    root = base_run(tmp_path_factory.mktemp("settings"))
    masks_folder(root / "white", 7)
    coco_folder(root / "black", 8)
    extend(root / "run", root / "white", root / "7", settings=QUICK | OTHER, display=Quiet())
    extend(root / "7", root / "black", root / "8", settings=QUICK | {"optim.lr_later": 1e-4}, display=Quiet())
    return root


def rate(run: Path, step: int | None = None) -> float:
    """The learning rate with which a step would be extended with 100 images: a tenth of 0.05, unless one was set."""
    return make_config(read_parent(run, step), "mib", 100, False, None, None).optim.lr_later


def settings_of(run: Path, step: int | None = None) -> dict:
    return read_parent(run, step).config.to_dict()


def saved(run: Path) -> dict:
    return json.loads((run / "config.json").read_text())


def test_only_a_learning_rate_that_was_set_is_kept(place, tmp_path):
    assert saved(place / "7")["config"]["optim"]["lr_later"] == pytest.approx(0.05 / 25)  # by the number of images
    assert rate(place / "run") == rate(place / "7") == rate(place / "7", 0) == pytest.approx(0.005)
    assert rate(place / "8") == 1e-4
    assert rate(place / "8", 0) == rate(place / "8", 1) == pytest.approx(0.005)
    change_classes(place / "8", tmp_path / "renamed", {"white": "snow"}, [])
    assert rate(tmp_path / "renamed") == 1e-4 and rate(tmp_path / "renamed", 1) == pytest.approx(0.005)
    extend(place / "8", masks_folder(tmp_path / "orange", 9), tmp_path / "9", settings=QUICK, display=Quiet())
    assert rate(tmp_path / "9") == 1e-4  # set two extensions ago
    assert rate(tmp_path / "9", 1) == pytest.approx(0.005)


def test_what_follows_from_another_method_or_class_is_not_listed(place, tmp_path):
    """Settings that the user set are."""
    masks_folder(tmp_path / "data", 9, 90)  # so many that other settings are usual
    given = {"method": "ft", "settings": QUICK, "display": Quiet()}
    extend(place / "run", place / "white", tmp_path / "out", **given)
    end = r"\. Choose another folder with --out, or use the same options to resume\.$"
    for data, changed, differences in (
        (place / "white", {"method": "sdr"}, "method: 'sdr', 'ft'"),
        (tmp_path / "data", {}, "spec: '[^']*orange[^']*', '[^']*white[^']*'"),
        (place / "white", {"settings": QUICK | {"optim.clip": 3.0}}, "optim.clip: 3.0, [0-9.]+"),
        (
            place / "white",
            {"method": "sdr", "settings": QUICK | {"optim.clip": 3.0}},
            "method: 'sdr', 'ft'; optim.clip: .*",
        ),
    ):
        with pytest.raises(SdrsegError) as error:
            extend(place / "run", data, tmp_path / "out", **{**given, **changed})
        assert re.search(rf"\(now, in the folder\): {differences}{end}", str(error.value)), str(error.value)


def test_a_learning_rate_in_a_file_counts_as_set(place, tmp_path):
    (tmp_path / "few.toml").write_text("[optim]\nlr_later = 1e-4\n")
    given = {"config_file": tmp_path / "few.toml", "settings": QUICK, "display": Quiet()}
    extend(place / "run", place / "white", tmp_path / "two", **given)
    assert rate(tmp_path / "two") == 1e-4


def test_every_step_keeps_its_own_settings(place, tmp_path):
    for run in (place / "7", place / "8"):
        assert settings_of(run, 0) == settings_of(place / "run")
        assert [sdrseg.load(run, step).crop for step in (0, 1)] == [32, 40]
    assert settings_of(place / "8", 1) == settings_of(place / "7")
    rollback(place / "8", 0, tmp_path / "0")
    rollback(place / "8", 1, tmp_path / "1")
    for back, original in (("0", "run"), ("1", "7")):
        assert saved(tmp_path / back) == {**saved(place / original), "spec": saved(tmp_path / back)["spec"]}
    assert settings_of(tmp_path / "1", 0) == settings_of(place / "run")


def test_every_step_is_scored_again_as_it_was_scored(place):
    assert [r["same"] for r in score_again(place / "7")] == [True, True]
    assert [r["same"] for r in score_again(place / "7", transform="crop512")] == [None, True]


def test_a_chain_of_an_earlier_version_can_be_read(place, tmp_path):
    """It has the settings of its last step only."""
    rollback(place / "7", 1, tmp_path / "old")
    for file in (tmp_path / "old").glob("steps/*/run.json"):
        file.unlink()
    assert settings_of(tmp_path / "old", 0)["data"]["crop"] == 40
    assert rate(tmp_path / "old") == rate(tmp_path / "old", 0) == pytest.approx(0.005)
