"""The folder of new classes: what is added, what is left out, and what counts for the settings."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file

from extend_data import QUICK, SIDE, base_folder, base_run, coco_folder, masks_folder
from formats import save
from runs import Quiet
from sdrseg.errors import SdrsegError
from sdrseg.extend.newdata import read_new_data
from sdrseg.extend.parent import read_parent
from sdrseg.extend.run import extend


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    root = base_run(tmp_path_factory.mktemp("new"))
    masks_folder(root / "white", 7)
    return root


def test_a_category_that_no_image_shows_is_left_out_with_a_note(place, tmp_path):
    coco_folder(tmp_path / "black", 8)
    file = tmp_path / "black/annotations.json"
    content = json.loads(file.read_text())
    content["categories"].append({"id": 2, "name": "zebra"})
    file.write_text(json.dumps(content))
    parent = read_parent(place / "run")
    new = read_new_data(parent, tmp_path / "black", None)
    assert new.names == ["black"] and list(new.images) == ["black"]
    assert any(note.endswith("also names zebra, which no training image shows: left out.") for note in new.notes)
    with pytest.raises(SdrsegError, match=r"no training image shows zebra\. Leave the class out of --classes"):
        read_new_data(parent, tmp_path / "black", ["black", "zebra"])


def test_images_without_a_new_class_are_counted(place, tmp_path):
    masks_folder(tmp_path / "white", 7, 12)
    parent = read_parent(place / "run")
    assert not any("without a new class" in note for note in read_new_data(parent, tmp_path / "white", None).notes)
    trained = [Path(id).name for id in read_new_data(parent, tmp_path / "white", None).train_ids]
    for name in trained[:3]:
        save(tmp_path / f"white/masks/{name}.png", np.zeros((SIDE, SIDE)))
    notes = read_new_data(parent, tmp_path / "white", None).notes
    assert "3 images without a new class are left out; --negatives keeps them" in notes
    notes = read_new_data(parent, tmp_path / "white", None, unlabelled="ignore").notes
    assert "3 images without a new class are left out" in notes
    assert not any("without" in note for note in read_new_data(parent, tmp_path / "white", None, negatives=True).notes)


def test_replayed_images_do_not_count_for_the_settings_by_size(place, tmp_path):
    """70 images of which 10 are new are few: LAPS fits the new rows only, and others keep their iterations."""
    done = extend(place / "run", place / "white", tmp_path / "laps", replay=place / "base", display=Quiet())
    assert done.method == "laps-softmax" and done.forecast["trained"] > 63 and done.forecast["iterations"] == 0
    given = {"method": "ft", "settings": {"run.save_minutes": 60}, "display": Quiet()}
    alone, both = (
        extend(place / "run", place / "white", tmp_path / name, replay=replay, **given).forecast["iterations"]
        for name, replay in (("alone", None), ("both", place / "base"))
    )
    assert alone <= both <= alone * 1.05


def test_replayed_images_make_the_memory_if_there_are_no_others(place, tmp_path):
    base_folder(tmp_path / "some", 12)
    shutil.copytree(place / "run", tmp_path / "run")
    (tmp_path / "run/environment.json").write_text("[]")  # the folder of the old data is not known
    given = {"replay": tmp_path / "some", "settings": QUICK, "display": Quiet()}
    done = extend(tmp_path / "run", place / "white", tmp_path / "out", **given)
    assert done.method == "laps-softmax" and not any("no memory" in note for note in done.notes)
    assert any(name.startswith("memory.") for name in load_file(tmp_path / "out/steps/0/memory.safetensors"))
