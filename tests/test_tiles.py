"""Tiles by memory, their count, images one after the other, legends and photographs of telephones."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import sdrseg as library
from extend_data import SMALL, base_folder
from formats import save, save_heic
from runs import Quiet
from sdrseg.datasets.shapes import Shapes
from sdrseg.engine.rescore import score_again
from sdrseg.engine.run import train
from sdrseg.errors import DataError
from sdrseg.predict.images import pixels_of
from sdrseg.predict.legend import with_legend
from sdrseg.tiles import fitting_tiles, tile_count

GIB = 2**30
SCENE = Shapes(size=64, train=1, val=1).image("val-00000")


@pytest.mark.parametrize(
    ("free", "classes", "crop", "side"),
    [
        (0, 21, 96, 512),  # not known
        (GIB // 2, 21, 96, 512),
        (2 * GIB, 21, 96, 768),
        (4 * GIB, 21, 96, 1024),
        (4 * GIB, 151, 96, 768),
        (80 * GIB, 21, 96, 1024),
        (GIB // 2, 21, 2048, 2048),  # trained on larger ones
    ],
)
def test_tiles_are_as_large_as_memory_allows_and_at_least_512(free, classes, crop, side):
    found, together = fitting_tiles(free, classes, crop)
    assert found == side and together >= 1
    assert together == 1 or together * side**2 * (800 + 16 * classes) <= free / 2


def test_a_small_crop_does_not_make_small_tiles(trained):
    model = library.load(trained)
    assert model.crop == 32 and model.tile >= 512


def test_progress_counts_tiles(trained):
    model, image, said = library.load(trained), np.resize(SCENE, (100, 170, 3)), []
    model.predict(image, tile=64, overlap=16, report=lambda done, total: said.append((done, total)))
    count = tile_count(100, 170, 64, 16, model.multiple)
    assert count == 2 * 4 and said == [(n + 1, count) for n in range(count)]
    assert math.prod([1, 1]) == model.tiles(64, 64)


@pytest.mark.parametrize("form", ["list", "generator", "array", "tensor"])
def test_many_images_in_every_form(trained, form):
    model = library.load(trained)
    batch = np.stack([SCENE, SCENE[::-1], SCENE[:, ::-1]])
    forms = {
        "list": list(batch),
        "generator": (image for image in batch),
        "array": batch,
        "tensor": torch.from_numpy(batch.copy()).permute(0, 3, 1, 2),
    }
    ticks = []
    masks = [p.mask for p in model.predict_each(forms[form], batch_size=2, tick=ticks.append)]
    assert sum(ticks) == len(masks) == 3
    for image, mask in zip(batch, masks, strict=True):
        assert (mask != model.predict(image).mask).mean() < 1e-3


def test_a_generator_is_read_a_few_images_ahead(trained):
    model, read = library.load(trained), []

    def images():
        for number in range(6):
            read.append(number)
            yield SCENE

    predictions = model.predict_each(images(), batch_size=2)
    next(predictions)
    assert read == [0, 1, 2]
    assert len(list(predictions)) == 5 and read == list(range(6))
    assert model.predict_many(iter(())) == []


def test_the_bar_of_many_images_counts_their_tiles(sdrseg, trained, monkeypatch):
    from contextlib import contextmanager

    import sdrseg.predict.command as command

    said = []

    @contextmanager
    def progress(what):
        yield lambda done, total: said.append((done, total))

    monkeypatch.setattr(command, "progress", progress)
    Image.fromarray(np.resize(SCENE, (100, 170, 3))).save("a.png")
    Image.fromarray(SCENE).save("b.png")
    Path("c.png").write_bytes(b"no picture")
    sdrseg("predict", trained, "a.png", "c.png", "b.png", "--out", "o", "--tile", 64, "--overlap", 16, "--json")
    assert sorted(said)[-1] == (8 + 1 + 1, 8 + 1 + 1) and len(said) >= 4


def test_several_images_for_one_name_predict_each():
    with pytest.raises(DataError, match="2 images at once: predict_each predicts several"):
        pixels_of(["a.png", "b.png"])


def test_a_heic_photograph_is_read_or_named_with_what_it_needs(sdrseg, trained, monkeypatch):
    Path("in").mkdir()
    Image.fromarray(SCENE).save("in/a.png")
    save_heic(Path("in/b.HEIC"), SCENE)
    assert sdrseg("predict", trained, "in", "--out", "both")[0] == 0
    masks = [np.asarray(Image.open(f"both/masks/{name}.png")) for name in "ab"]
    assert masks[0].shape == masks[1].shape == SCENE.shape[:2]
    monkeypatch.setitem(sys.modules, "pillow_heif", None)  # not installed
    code, out, err = sdrseg("predict", trained, "in", "--out", "o", "--json")
    told = json.loads(out)
    assert code == 1 and len(told["images"]) == 1 and [f["image"] for f in told["failed"]] == ["in/b.HEIC"]
    assert "in/b.HEIC" in err and "pip install 'sdrseg[heif]'" in err


def test_a_legend_below_the_image_shows_the_colours():
    picture = Image.new("RGB", (200, 50), (1, 2, 3))
    assert with_legend(picture, []) is picture
    names = ["cat", "a name that is far too long for a picture of two hundred pixels", "kočka", "[b]"]
    colours = [(230, 159, 0), (86, 180, 233), (0, 158, 115), (240, 228, 66)]
    whole = np.asarray(with_legend(picture, list(zip(names, colours, strict=True))))
    assert whole.shape[1] == 200 and (whole[:50] == (1, 2, 3)).all()
    below = whole[50:].reshape(-1, 3)
    for colour in colours:
        assert (below == colour).all(1).sum() >= 80  # a square
    assert (below == (255, 255, 255)).all(1).mean() > 0.5


def test_an_overlay_names_the_classes_that_are_there(trained):
    prediction = library.load(trained).predict(SCENE)
    plain, told = prediction.overlay(), prediction.overlay(legend=True)
    np.testing.assert_array_equal(np.asarray(told)[:64], np.asarray(plain))
    assert (told.height > 64) == bool((prediction.mask > 0).any())


def test_scoring_in_strips_or_in_small_batches_counts_the_same(trained, monkeypatch):
    """Images that are too large to be scored whole, or many at a time, are scored like others."""
    import sdrseg.engine.evaluate as evaluate

    whole = score_again(trained)
    assert all(step["same"] for step in whole)
    monkeypatch.setattr(evaluate, "SMALL", 1)
    assert score_again(trained) == whole
    monkeypatch.setattr(evaluate, "LARGEST", 1)
    assert score_again(trained) == whole


def test_large_images_are_scored_as_they_are_predicted(trained, monkeypatch):
    """The confusion matrix of one image in tiles is that of the mask that `predict` makes of it."""
    from types import SimpleNamespace

    import sdrseg.engine.evaluate as evaluate
    from sdrseg.datasets.batches import Batch

    model, image = library.load(trained), np.resize(SCENE, (100, 170, 3))
    truth = np.random.default_rng(0).integers(0, len(model.classes), (100, 170)).astype(np.uint8)
    truth[:3] = 255
    monkeypatch.setattr(evaluate, "LARGEST", 1)
    monkeypatch.setattr(evaluate, "SIDES", (64,))
    labels = torch.from_numpy(truth)[None]
    batch = Batch(torch.from_numpy(image.copy()).permute(2, 0, 1)[None], labels, labels == 255, ("a",))
    fabric = SimpleNamespace(device=torch.device("cpu"), autocast=lambda: torch.autocast("cpu", enabled=False))
    found = evaluate.confusion(fabric, model.network, [batch], len(model.classes))
    mask = model.predict(image, tile=64, overlap=16, batch_size=1).mask  # ids are channels in this run
    expected = np.zeros_like(found)
    np.add.at(expected, (truth[truth < 255], mask[truth < 255]), 1)
    np.testing.assert_array_equal(found, expected)


def test_scores_and_predictions_agree_on_images_that_need_padding(tmp_path):
    """The image pooling of deeplabv3 sees the padding, so that both have to pad alike: to multiples of the stride 8."""
    data = base_folder(tmp_path / "data", 40)
    for file in [*(data / "images").iterdir(), *(data / "masks").iterdir()]:
        whole = np.array(Image.open(file))
        save(file, np.tile(whole, (2, 2, 1)[: whole.ndim])[:36, :44])
    quick = {**SMALL, "train.epochs": 8, "eval.transform": "full_image", "eval.batch_size": 3}
    given = {"data": data, "settings": quick, "bases": tmp_path / "bases", "display": Quiet()}
    train("folder:offline", "ft", tmp_path / "run", **given)
    scored = json.loads((tmp_path / "run/steps/0/metrics.json").read_text())["confusion"]
    expected, model = np.zeros_like(scored), library.load(tmp_path / "run", device="cpu")
    ids = json.loads((tmp_path / "run/scenario.json").read_text())["steps"][0]["test_ids"]
    for id in ids:
        truth = np.array(Image.open(data / f"masks/{id}.png"))
        np.add.at(expected, (truth, model.predict(data / f"images/{id}.png").mask), 1)
    assert model.multiple == 8 and ids
    np.testing.assert_array_equal(scored, expected)


def test_evaluate_with_another_transform(sdrseg, trained):
    code, out, _ = sdrseg("evaluate", trained, "--transform", "crop512", "--json")
    told = json.loads(out)
    assert code == 0 and [step["same"] for step in told] == [None] * 3 and told[0]["transform"] == "crop512"
    code, out, _ = sdrseg("evaluate", trained, "--transform", "full_image", "--json")  # that of the run
    assert code == 0 and all(step["same"] for step in json.loads(out))
    code, _, err = sdrseg("evaluate", trained, "--transform", "full")
    assert code == 2 and "full_image" in err
