"""Predictions are the same everywhere, where images are padded: what compares models pads like `sdrseg predict`."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import extend_data
from extend_data import QUICK, base_run, masks_folder
from runs import Quiet
from sdrseg.datasets.extended import Extended
from sdrseg.extend.run import extend
from sdrseg.predict import load
from sdrseg.reporting.collect import collect
from sdrseg.reporting.pictures import apply_models, inside, load_images, open_data


@pytest.fixture(scope="module")
def out(tmp_path_factory) -> Path:
    """An extended run on images of 36×36 pixels, which a network of stride 8 pads to 40; the default would be 48."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(extend_data, "SIDE", 36)
        root = base_run(tmp_path_factory.mktemp("padding"))
        masks_folder(root / "white", 7, 12)
        settings = QUICK | {"train.best_every": 1}
        extend(root / "run", root / "white", root / "out", method="ft", settings=settings, display=Quiet())
    return root / "out"


@pytest.fixture(scope="module")
def predicted(out) -> dict[str, tuple[np.ndarray, list[np.ndarray]]]:
    """By test image: its mask as channels, and what both models predict for it."""
    source, models = Extended.open_available(out), [load(out, step=number) for number in (0, 1)]
    found = {}
    for id in json.loads((out / "scenario.json").read_text())["steps"][-1]["test_ids"]:
        image = Image.open(source.file(id, "image"))
        assert image.size == (36, 36)
        found[id] = np.asarray(source.mask(id)), [model.predict(image).mask for model in models]
    return found


def test_both_models_are_compared_on_images_padded_as_in_prediction(out, predicted):
    result = json.loads((out / "steps/1/extension.json").read_text())
    old = {id: found for id, found in predicted.items() if not id.startswith("step1/")}
    assert len(old) == result["old_images"] > 5
    for number, matrix in enumerate(result["confusion"]):
        counts = np.zeros((8, 8), int)
        for truth, channels in old.values():
            np.add.at(counts, (truth.ravel(), channels[number].ravel()), 1)
        assert counts.tolist() == matrix
    assert result["kept_elsewhere"] == kept_of(predicted)


def test_the_share_that_is_kept_in_training_is_that_of_the_predictions(out, predicted):
    log = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    (validated,) = [entry for entry in log if entry["event"] == "validate" and entry["step"] == 1]
    assert validated["kept"] == kept_of(predicted)


def kept_of(predicted) -> float:
    """On the new images, the share of pixels without the new class, 7, on which both models agree."""
    pairs = [
        before[truth != 7] == after[truth != 7]
        for id, (truth, (before, after)) in predicted.items()
        if id.startswith("step1/")
    ]
    same = np.concatenate(pairs)
    return int(same.sum()) / len(same)


def test_the_pictures_of_a_report_are_the_predictions(out, predicted):
    (run,) = collect([out])
    tests = open_data([run], None)
    outputs = list(apply_models(run, load_images(run, tests.source, tests.ids)))
    assert len(outputs) == 2 * len(predicted)
    for one in outputs:
        expected = predicted[one.image.id][1][one.step]
        assert (one.predicted[inside(one.image)] == expected).all()
