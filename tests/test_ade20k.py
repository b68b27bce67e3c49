"""ADE20K: small trees like the real one. Value 0 is unlabelled: trained as a channel, never scored."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from sdrseg.config import Config
from sdrseg.datasets import open_source
from sdrseg.datasets.ade20k import HOME, Ade20k
from sdrseg.datasets.index import class_index
from sdrseg.errors import DataError
from sdrseg.scenario import Scenario, build_scenario, parse_spec

MASKS = {
    "training": {"ADE_train_00000002": [[0, 1], [1, 150]], "ADE_train_00000001": [[0, 0], [12, 120]]},
    "validation": {"ADE_val_00000001": [[0, 5], [101, 150]]},
}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    root = tmp_path / "ADEChallengeData2016"
    for folder, masks in MASKS.items():
        for id, pixels in masks.items():
            for kind, suffix, array in (("images", "jpg", np.zeros((2, 2, 3))), ("annotations", "png", pixels)):
                (root / kind / folder).mkdir(parents=True, exist_ok=True)
                Image.fromarray(np.array(array, np.uint8)).save(root / kind / folder / f"{id}.{suffix}")
    return root


def scenario(source: Ade20k, task: str, **policy) -> Scenario:
    train, val = (class_index(source, split) for split in ("train", "val"))
    return build_scenario(parse_spec(f"ade20k:{task}"), source, train, val, **policy)


@pytest.mark.parametrize("given", ["", "ADEChallengeData2016"])
def test_the_folder_itself_or_the_one_that_holds_it(tree: Path, given):
    source = open_source("ade20k", tree.parent / given, Config())
    assert isinstance(source, Ade20k)
    assert source.ids("train") == ("ADE_train_00000001", "ADE_train_00000002")
    assert source.ids("val") == ("ADE_val_00000001",)
    assert source.mask("ADE_train_00000002").tolist() == [[0, 1], [1, 150]]  # as it is: no value is shifted
    assert source.image("ADE_val_00000001").shape == (2, 2, 3)
    assert len(source.classes) == 151 and source.classes[1] == "wall" and source.classes[150] == "flag"
    assert (source.score_background, source.partition) == (False, "balanced")
    class_index(source, "train").require_sound(source)


@pytest.mark.parametrize("future", ["ignore", "background"])
@pytest.mark.parametrize("task", ["offline", "100-50@overlapped", "100-50~1@sequential", "100-5@disjoint"])
def test_unlabelled_pixels_are_trained_and_never_scored(tree: Path, task, future):
    for step in scenario(Ade20k(tree), task, eval_future=future, void_train="background").steps:
        assert step.train_table[0] == 0
        assert step.test_table[0] == step.val_table[0] == 255
        assert all(step.test_table[c] == 255 for c in step.future)


def test_labels_of_the_first_step(tree: Path):
    source = Ade20k(tree)
    step = scenario(source, "100-50@overlapped").steps[0]
    assert step.train_ids == source.ids("train")
    assert step.train_table[source.mask("ADE_train_00000001")].tolist() == [[0, 0], [12, 0]]  # 120 comes later
    assert step.test_table[source.mask("ADE_val_00000001")].tolist() == [[255, 5], [255, 255]]


def test_the_published_lists_demand_the_whole_set(tree: Path):
    with pytest.raises(DataError, match=r"ade20k:100-50: missing 20,194 training images .* first is ADE_train"):
        scenario(Ade20k(tree), "100-50@disjoint")


def test_the_wrong_folder_is_named_with_the_places_looked_at(tmp_path: Path):
    with pytest.raises(DataError) as caught:
        Ade20k(tmp_path)
    for word in (tmp_path / "images/training", tmp_path / "ADEChallengeData2016/images/training", HOME):
        assert str(word) in str(caught.value)


@pytest.mark.parametrize("folder", ["annotations/training", "images/validation", "annotations/validation"])
def test_a_missing_folder_is_named(tree: Path, folder):
    (tree / folder).rename(tree / "away")
    with pytest.raises(DataError) as caught:
        Ade20k(tree)
    assert str(tree / folder) in str(caught.value) and HOME in str(caught.value)


def test_what_has_no_partner_or_two_is_a_problem(tree: Path):
    (tree / "annotations/training/ADE_train_00000001.png").unlink()
    Image.new("L", (2, 2)).save(tree / "annotations/validation/ADE_val_00000009.png")
    Image.new("RGB", (2, 2)).save(tree / "images/training/ADE_train_00000002.webp")
    (tree / "annotations/training/.DS_Store").write_bytes(b"")
    (tree / "images/training/index.html").write_bytes(b"")
    source = Ade20k(tree)
    assert source.ids("train") == ("ADE_train_00000002",)
    assert sorted((p.kind, Path(p.file).name) for p in source.problems()) == [
        ("duplicate id", "ADE_train_00000002.webp"),
        ("no image", "ADE_val_00000009.png"),
        ("no mask", "ADE_train_00000001.jpg"),
        ("not the published set", tree.name),
        ("not the published set", tree.name),
    ]
