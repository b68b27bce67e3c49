"""How logits become a class and probabilities, and that scores, predictions and exports follow what a step says."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from runs import run
from sdrseg.datasets.shapes import Shapes
from sdrseg.decision import decide, probabilities, scores
from sdrseg.engine.rescore import score_again
from sdrseg.errors import SdrsegError
from sdrseg.predict import load

DECISIONS = ("softmax", "sigmoid", "sigmoid_all")


def by_hand(logits: list[float], decision: str) -> tuple[int, list[float]]:
    """Channel and probabilities of one pixel, in plain Python."""
    if decision == "softmax":
        powers = [np.exp(z - max(logits)) for z in logits]
        each = [p / sum(powers) for p in powers]
        return int(np.argmax(logits)), each
    each = [1 / (1 + np.exp(-z)) for z in logits]
    if decision == "sigmoid_all":
        return int(np.argmax(logits)), each
    best = 1 + int(np.argmax(logits[1:]))
    return (best if logits[best] > 0 else 0), [1 - max(each[1:]), *each[1:]]


@given(st.lists(st.integers(-200, 200), min_size=2, max_size=5, unique=True), st.sampled_from(DECISIONS))
def test_decisions_and_probabilities_of_a_pixel(values, decision):
    logits = [value / 20 for value in values]
    pixel = torch.tensor(logits, dtype=torch.float64)[None, :, None, None]
    channel, expected = by_hand(logits, decision)
    found = probabilities(pixel, decision)[0, :, 0, 0]
    assert decide(pixel, decision).item() == scores(pixel, decision).argmax(1).item() == channel
    np.testing.assert_allclose(found, expected, rtol=1e-9)
    assert decide(pixel[0], decision, 0).item() == channel
    assert found[channel] == found.max()


@pytest.fixture(scope="module")
def by_sigmoids(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sigmoids")
    run(folder / "run", "lwf-mc", bases=folder / "bases")
    return folder / "run"


def test_lwf_mc_decides_by_sigmoids(by_sigmoids):
    assert [json.loads(f.read_text())["decision"] for f in sorted(by_sigmoids.glob("steps/*/meta.json"))] == [
        "sigmoid_all"
    ] * 3
    model = load(by_sigmoids, device="cpu")
    image = Shapes(size=32, train=1, val=1).image("val-00000")
    found = model.predict(image).probabilities
    assert found.max() <= 1 and abs(found.sum(0) - 1).max() > 1e-3
    assert all(again["same"] for again in score_again(by_sigmoids))


def test_background_is_where_no_class_is_positive(by_sigmoids, tmp_path):
    """The same weights under another decision: predict, evaluate and export follow meta.json."""
    pytest.importorskip("onnxruntime")
    from sdrseg.exporting import export_model

    shutil.copytree(by_sigmoids, tmp_path / "run")
    meta = tmp_path / "run/steps/2/meta.json"
    meta.write_text(json.dumps(json.loads(meta.read_text()) | {"decision": "sigmoid"}))
    image = Shapes(size=32, train=1, val=1).image("val-00000")
    all_rows, pinned = (load(f, device="cpu").predict(image, probabilities=True) for f in (by_sigmoids, meta.parent))
    sure = pinned.probabilities[1:].max(0) > 0.5
    ids = np.array([c.id for c in pinned.classes])
    assert ((pinned.mask == 0) == ~sure).all()
    assert (pinned.mask[sure] == ids[1 + pinned.probabilities[1:].argmax(0)][sure]).all()
    np.testing.assert_allclose(pinned.probabilities[0], 1 - all_rows.probabilities[1:].max(0), atol=1e-6)
    assert [again["same"] for again in score_again(tmp_path / "run")] == [True, True, False]

    export_model(tmp_path / "run", tmp_path / "model.onnx")
    exported = load(tmp_path / "model.onnx")
    assert exported.decision == exported.facts["decision"] == "sigmoid"
    again = exported.predict(image, probabilities=True)
    assert (again.mask != pinned.mask).mean() < 1e-2
    np.testing.assert_allclose(again.probabilities, pinned.probabilities, atol=1e-4)


def test_an_unknown_decision_is_named(by_sigmoids, tmp_path):
    shutil.copytree(by_sigmoids, tmp_path / "run")
    meta = tmp_path / "run/steps/2/meta.json"
    meta.write_text(json.dumps(json.loads(meta.read_text()) | {"decision": "vote"}))
    with pytest.raises(SdrsegError, match=r"meta\.json: decision 'vote' is none of softmax, sigmoid, sigmoid_all"):
        load(tmp_path / "run")
