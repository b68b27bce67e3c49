"""What a new memory is made from: labels, where they say everything, and the model's predictions where they do not."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from extend_data import QUICK, SIDE, base_folder, base_run, coco_folder, masks_folder
from formats import save
from runs import Quiet
from sdrseg.datasets.batches import Batch
from sdrseg.errors import DataError
from sdrseg.extend.parent import read_parent
from sdrseg.extend.remember import Views, _pictures, _Survey, views_of
from sdrseg.extend.run import extend
from sdrseg.labels import VOID
from sdrseg.methods.laps_softmax import LAPSSoftmax

GIVEN = {"settings": QUICK, "display": Quiet()}


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A `run` of six classes and its extension `7` by white, both without a memory."""
    root = base_run(tmp_path_factory.mktemp("remember"))
    masks_folder(root / "white", 7)
    coco_folder(root / "black", 8)
    extend(root / "run", root / "white", root / "7", method="ft", **GIVEN)
    return root


def test_which_channels_are_labelled(place, tmp_path):
    parent = read_parent(place / "7")
    chain = views_of(parent, None)
    assert {frozenset(chain.channels(id)) for id in chain.ids if id.startswith("step1/")} == {frozenset([7])}
    assert {frozenset(chain.channels(id)) for id in chain.ids if id[0] == "i"} == {frozenset(range(8))}
    folder = views_of(parent, base_folder(tmp_path / "three", 6, classes=(1, 2, 3)))
    assert folder.channels(folder.ids[0]) == {0, 1, 2, 3}


def without_classes(root: Path) -> None:
    (root / "dataset.toml").unlink()


def beside_each_other(root: Path) -> None:
    without_classes(root)
    for mask in (root / "masks").iterdir():
        mask.rename(root / f"images/{mask.stem}_mask.png")
    (root / "masks").rmdir()
    (root / "images").rename(root.with_name("moved"))
    root.rmdir()
    root.with_name("moved").rename(root)


def nothing(root: Path) -> None:
    """Masks of a class that the model does not know, with a list of classes."""


@pytest.mark.parametrize("change", [nothing, without_classes, beside_each_other])
def test_masks_are_not_taken_for_pictures(place, tmp_path, change):
    folder = masks_folder(tmp_path / "orange", 9, 6)
    change(folder)
    views = views_of(read_parent(place / "7"), folder)
    assert not views.labelled and {Path(id).name for id in views.ids} == {f"n{n:03}" for n in range(6)}
    assert all(np.ptp(views.source.image(id), axis=2).any() for id in views.ids)  # coloured


def test_only_masks_are_left_out_of_pictures(tmp_path):
    """Not the second photograph of each pair, nor photographs in further folders."""
    colours = np.full((SIDE, SIDE, 3), 40, np.uint8)
    for name in ("a.png", "a_l.png", "b.png", "b_l.png"):
        save(tmp_path / f"stereo/{name}", colours)
    found, masks = _pictures(tmp_path / "stereo")
    assert len(found) == 4 and masks == 0
    for name in ("images/a.png", "images/b.png", "more/c.png"):
        save(tmp_path / f"beside/{name}", colours)
    for name in ("a", "b"):
        save(tmp_path / f"beside/masks/{name}.png", colours[..., 0])
    found, masks = _pictures(tmp_path / "beside")
    assert sorted(file.name for file in found.values()) == ["a.png", "b.png", "c.png"] and masks == 2


def test_masks_next_to_pictures_that_form_no_data_set_are_an_error(place, tmp_path):
    folder = masks_folder(tmp_path / "orange", 9, 6)
    without_classes(folder)
    (folder / "images").rename(folder / "camera")
    with pytest.raises(DataError, match=r"orange: masks would be taken for photographs\. Name a folder without"):
        views_of(read_parent(place / "7"), folder)
    shutil.rmtree(folder / "masks")
    assert len(views_of(read_parent(place / "7"), folder).ids) == 6


class Recorder:
    """In place of a method: the labels that it sees."""

    def __init__(self):
        self.latent = SimpleNamespace(terms=lambda batch, features, teacher: self.seen.append(batch.labels))
        self.seen: list[torch.Tensor] = []

    def survey(self, batch, student, teacher):
        self.seen.append(batch.labels)


@pytest.mark.parametrize("labelled", [True, False])
def test_an_unlabelled_pixel_is_background_unless_an_unlabelled_class_is_predicted(labelled):
    """Channels 0 to 4 are the classes 0, 3, 5, 6, 9; one mask labels all classes, one only 5 and 9."""
    table = np.full(256, VOID, np.uint8)
    table[[0, 3, 5, 6, 9]] = range(5)
    known = {"all": None, "some": frozenset({5, 9})}
    source = SimpleNamespace(classes=tuple("abcdefghij"), labelled=known.get)
    draw = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 5, 12, 12, generator=draw)
    labels = torch.randint(0, 6, (2, 12, 12), generator=draw).to(torch.uint8)
    labels[labels == 5] = VOID
    padding = torch.zeros(2, 12, 12, dtype=torch.bool)
    padding[1, -3:] = True
    labels[padding] = VOID
    expected = labels.clone()
    for image, channels in enumerate(({1, 2, 3, 4}, {2, 4})):
        for y in range(12):
            for x in range(12):
                predicted = max(range(5), key=lambda c: float(logits[image, c, y, x]))
                if not labelled:
                    expected[image, y, x] = VOID if padding[image, y, x] else predicted
                elif labels[image, y, x] == 0 and predicted != 0 and predicted not in channels:
                    expected[image, y, x] = VOID
    assert not labelled or ((expected != labels).any() and (expected[0] == labels[0]).all())
    batch = Batch(torch.zeros(2, 3, 12, 12, dtype=torch.uint8), labels.clone(), padding, ("all", "some"))
    method, views = Recorder(), Views(source, ("all", "some"), table, labelled, "")
    _Survey(method, views, "softmax").survey(batch, SimpleNamespace(logits=logits, features=None), None)
    assert len(method.seen) == 2 and all(torch.equal(seen, expected) for seen in method.seen)
    assert torch.equal(batch.labels, labels)


def test_old_objects_of_later_steps_are_not_remembered_as_background(place, tmp_path, monkeypatch):
    """The images of step 1 label white alone; the model finds most of the old boxes in them."""
    seen: dict[str, list[int]] = {"step 0": [], "step 1": []}
    survey = LAPSSoftmax.survey

    def watched(self, batch, student, teacher):
        if self.step.number == 0:
            for id, labels, logits in zip(batch.ids, batch.labels, student.logits, strict=True):
                predicted = logits.argmax(0)
                hidden = (labels == 0) & (predicted > 0) & (predicted < 7)
                seen["step 1" if id.startswith("step1/") else "step 0"].append(int(hidden.sum()))
        survey(self, batch, student, teacher)

    monkeypatch.setattr(LAPSSoftmax, "survey", watched)
    extend(place / "7", place / "black", tmp_path / "8", method="laps-softmax", **GIVEN)
    assert len(seen["step 0"]) == 48 and sum(seen["step 0"]) > 0  # errors of the model: there the labels are right
    assert len(seen["step 1"]) > 0 and sum(seen["step 1"]) == 0
