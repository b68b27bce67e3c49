"""ONNX files: the same answers as PyTorch at every size, what they say about themselves, and what is refused."""

from __future__ import annotations

import builtins
import json
import sys

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from PIL import Image
from torch import nn

import sdrseg.exporting as export
from runs import run
from sdrseg.cli import main
from sdrseg.config.net import Net
from sdrseg.datasets.augment import normalise
from sdrseg.datasets.shapes import Shapes
from sdrseg.errors import SdrsegError, UsageError
from sdrseg.exporting import AveragePool, export_model, show_export
from sdrseg.network import build_network
from sdrseg.predict import ClassInfo, Model, load


def framed_logits(network, images):
    """The logits of images that are padded as in prediction, with the colour of ImageNet's mean."""
    (height, width), multiple = images.shape[-2:], network.multiple
    rows, columns = (-(-length // multiple) * multiple for length in (height, width))
    padded = torch.tensor((124, 116, 104), dtype=torch.uint8)[:, None, None].repeat(len(images), 1, rows, columns)
    padded[..., :height, :width] = images
    return network(normalise(padded)).logits[..., :height, :width].numpy()


@pytest.mark.parametrize("size", [(32, 32), (33, 47), (64, 64), (65, 129), (200, 150), (512, 512)])
def test_the_file_gives_the_logits_of_pytorch_at_every_size(size, trained, exported):
    network, batch = load(trained, device="cpu").network, 1 + size[0] % 2
    images = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (batch, 3, *size), dtype=np.uint8))
    with torch.no_grad():
        expected = framed_logits(network, images)
    session = onnxruntime.InferenceSession(exported, providers=["CPUExecutionProvider"])
    logits, mask = session.run(None, {"images": images.numpy()})
    assert logits.dtype == np.float32 and mask.dtype == np.uint8 and mask.shape == (batch, *size)
    np.testing.assert_allclose(logits, expected, atol=1e-4)
    ids = np.array([c["id"] for c in json.loads((trained / "steps/2/meta.json").read_text())["classes"]], np.uint8)
    top = np.sort(expected, axis=1)
    sure = top[:, -1] - top[:, -2] > 1e-3
    np.testing.assert_array_equal(mask[sure], ids[expected.argmax(1)][sure])


def test_the_metadata_of_the_file(trained, exported):
    model = onnx.load(exported)
    onnx.checker.check_model(model, full_check=True)
    shapes = {v.name: [d.dim_param or d.dim_value for d in v.type.tensor_type.shape.dim] for v in model.graph.input}
    shapes |= {v.name: [d.dim_param or d.dim_value for d in v.type.tensor_type.shape.dim] for v in model.graph.output}
    assert shapes == {
        "images": ["batch", 3, "height", "width"],
        "logits": ["batch", 11, "height", "width"],
        "mask": ["batch", "height", "width"],
    }
    said = {entry.key: json.loads(entry.value) for entry in model.metadata_props if entry.key.startswith("sdrseg.")}
    meta = json.loads((trained / "steps/2/meta.json").read_text())
    assert said["sdrseg.spec"] == "shapes:8-1@disjoint" and said["sdrseg.step"] == 2 and said["sdrseg.method"] == "mib"
    assert said["sdrseg.model_sha256"] == meta["files"]["model"]["sha256"] and said["sdrseg.net"] == meta["net"]
    assert [c["name"] for c in said["sdrseg.classes"]] == [c["name"] for c in meta["classes"]]
    assert said["sdrseg.classes"][1]["colour"] == [230, 159, 0]
    assert "uint8" in said["sdrseg.input"] and "0 to 255" in said["sdrseg.input"] and "logits" in said["sdrseg.output"]


def test_the_file_alone_predicts_what_predict_does(trained, exported):
    """Also for sides that are padded."""
    image = np.random.default_rng(1).integers(0, 256, (45, 61, 3), dtype=np.uint8)
    prediction = load(trained, device="cpu").predict(image)
    session = onnxruntime.InferenceSession(exported, providers=["CPUExecutionProvider"])
    logits, mask = session.run(None, {"images": image.transpose(2, 0, 1)[None]})
    shares = np.exp(logits[0] - logits[0].max(0))
    np.testing.assert_allclose(shares / shares.sum(0), prediction.probabilities, atol=1e-5)
    assert (mask[0] == prediction.mask).all()


def test_predict_takes_the_file(trained, exported):
    image = Shapes(size=90, train=1, val=1).image("val-00000")[:70]
    a, b = load(trained, device="cpu"), load(exported)
    assert a.classes == b.classes and (a.crop, a.multiple) == (b.crop, b.multiple)
    one, two = a.predict(image), b.predict(image)
    np.testing.assert_allclose(one.probabilities, two.probabilities, atol=1e-4)
    assert (one.mask != two.mask).mean() < 1e-3
    with pytest.raises(SdrsegError, match="contains one step"):
        load(exported, step=1)


def test_the_command_checks_own_images_too(trained, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    Image.fromarray(Shapes(size=64, train=1, val=1).image("val-00000")[:20]).save("low.png")
    words = ["export", str(trained), "--out", "m.onnx", "--step", "0", "--check", "low.png", "--json"]
    monkeypatch.setattr(sys, "argv", ["sdrseg", *words])
    with pytest.raises(SystemExit) as end:
        main()
    out, err = capfd.readouterr()
    assert (end.value.code or 0, err) == (0, "")
    report = json.loads(out)
    assert report["step"] == 0 and len(load("m.onnx").classes) == 9
    assert report["checked"][-1]["image"] == "low.png, 64×32" and len(report["checked"]) == 7
    assert 0 < report["largest_difference"] < 1e-4
    show_export(report, False)
    assert "low.png, 64×32" in capfd.readouterr().out


@pytest.mark.parametrize("cells", [(1, 1), (2, 2), (3, 3), (6, 6), (2, 5)])
@pytest.mark.parametrize("size", [(2, 3), (7, 6), (12, 17), (6, 6)])
def test_pooling_by_matrices_is_adaptive_pooling(cells, size):
    maps = torch.randn(2, 3, *size, dtype=torch.float64)
    assert torch.allclose(AveragePool(cells)(maps), nn.AdaptiveAvgPool2d(cells)(maps), atol=1e-12)


def model_of(network, **net) -> Model:
    facts = {"net": net, **dict.fromkeys(("spec", "step", "method", "protocol", "model_sha256"))}
    classes = tuple(ClassInfo(i, str(i), (0, 0, 0), 0) for i in range(4))
    return Model(classes, network, multiple=network.multiple, crop=64, batch_size=2, facts=facts, network=network)


def test_a_decoder_that_pytorch_alone_exports_wrongly():
    torch.manual_seed(0)
    network = build_network(Net(encoder="toy16", decoder="pspnet", output_stride=8, weights="none"), 4).eval()
    model = model_of(network, encoder="toy16", decoder="pspnet")
    content = export._with_metadata(export._onnx(network, model), export.metadata(model))
    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    for size in ((32, 32), (33, 47), (65, 129)):
        images = torch.randint(0, 256, (2, 3, *size), dtype=torch.uint8)
        with torch.no_grad():
            expected = framed_logits(network, images)
        found = session.run(["logits"], {"images": images.numpy()})[0]
        assert abs(found - expected).max() <= 1e-3 * abs(expected).max()


@pytest.mark.parametrize("decoder", ["deeplabv3", "deeplabv3plus"])  # features as large as the embedding, and smaller
def test_rows_that_see_the_features_of_the_encoder_are_exported(tmp_path, decoder):
    run(tmp_path / "run", "laps", "laps.encoder=4", f"net.decoder={decoder}", spec="shapes:6-2@disjoint")
    export_model(tmp_path / "run", tmp_path / "m.onnx")
    network = load(tmp_path / "run", device="cpu").network
    session = onnxruntime.InferenceSession(tmp_path / "m.onnx", providers=["CPUExecutionProvider"])
    for size in ((32, 32), (33, 47), (65, 129)):
        images = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (2, 3, *size), dtype=np.uint8))
        with torch.no_grad():
            expected = framed_logits(network, images)
            expected[:, 0] = 0  # with sigmoids, background is where no class is positive
            weight = network.shortcut.weight.clone()
            network.shortcut.weight.zero_()
            without = framed_logits(network, images)
            network.shortcut.weight.copy_(weight)
        allowed = 1e-4 * abs(expected).max()
        logits, mask = session.run(None, {"images": images.numpy()})
        np.testing.assert_allclose(logits, expected, atol=allowed, rtol=0)
        assert (abs(without - expected)[:, 7:].max((0, 2, 3)) > 100 * allowed).all()  # every new class needs them
        top = np.sort(expected, axis=1)
        sure = top[:, -1] - top[:, -2] > 2 * allowed
        np.testing.assert_array_equal(mask[sure], expected.argmax(1)[sure])


def test_a_network_that_cannot_be_exported_is_refused(trained, tmp_path, monkeypatch):
    class Fixed(nn.Module):
        def forward(self, scales):
            return scales if scales[-1].shape[-1] > 11 else None

    real = load(trained, device="cpu")
    real.network.decoder = Fixed()
    monkeypatch.setattr(export, "load", lambda *_: real)
    with pytest.raises(SdrsegError, match="toy16 with deeplabv3 cannot be exported for images of any size"):
        export_model(trained, tmp_path / "m.onnx")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("align_corners", [False, True])
def test_rows_of_removed_classes_neither_hide_nor_make_a_difference(align_corners):
    """Their logits are -10,000, by which the allowed difference must not be measured, and are resized with rounding."""
    torch.manual_seed(0)
    net = Net(encoder="toy16", output_stride=8, weights="none", align_corners=align_corners)
    network = build_network(net, 4).eval()
    with torch.no_grad():
        network.classifier.weight *= 0.01  # small logits
        network.silence([2])
    model = model_of(network, encoder="toy16", decoder="deeplabv3plus")
    content = export._with_metadata(export._onnx(network, model), export.metadata(model))
    same = export._compare(network, model, content, [])
    assert all(row["largest_logit"] < 100 for row in same["checked"])
    with torch.no_grad():
        network.classifier.bias[:2] += 0.5  # no other class is predicted
    with pytest.raises(SdrsegError, match=r"logits differ by 0\.5"):
        export._compare(network, model, content, [])
    with torch.no_grad():
        network.classifier.bias[:2] -= 0.5
        network.classifier.bias[2] = 0  # silent in the file only
    with pytest.raises(SdrsegError, match=r"logits differ by 1e\+04"):
        export._compare(network, model, content, [])


def test_a_file_with_other_outputs_is_not_written(trained, exported, tmp_path, monkeypatch):
    proto = onnx.load(exported)
    monkeypatch.setattr(export, "_onnx", lambda *_: proto)
    real = load(trained, device="cpu")
    with torch.no_grad():
        real.network.classifier.bias += torch.linspace(0, 1, 11)
    monkeypatch.setattr(export, "load", lambda *_: real)
    with pytest.raises(SdrsegError, match="differs from PyTorch on 1 generated, 32×32: logits differ by 1"):
        export_model(trained, tmp_path / "m.onnx")
    assert list(tmp_path.iterdir()) == []


def test_what_is_refused_before_any_work(trained, exported, tmp_path, monkeypatch):
    monkeypatch.setattr(export, "load", lambda *_: pytest.fail("it began to work"))
    (tmp_path / "there.onnx").write_bytes(b"mine")
    for options, message in (
        ({"run": trained, "out": tmp_path / "m.pt"}, "ends in .onnx"),
        ({"run": trained, "out": tmp_path / "m.onnx", "format": "torchscript"}, "use onnx"),
        ({"run": trained, "out": tmp_path / "there.onnx"}, "exists"),
        ({"run": exported, "out": tmp_path / "m.onnx"}, "is a file"),
        ({"run": trained, "out": tmp_path / "m.onnx", "check": ["nothing.png"]}, "no such file"),
    ):
        with pytest.raises((SdrsegError, UsageError), match=message):
            export_model(**options)
    assert (tmp_path / "there.onnx").read_bytes() == b"mine"


def test_foreign_damaged_and_missing(exported, tmp_path, monkeypatch):
    content = exported.read_bytes()
    (tmp_path / "cut.onnx").write_bytes(content[: len(content) // 2])
    foreign = onnx.load(exported)
    del foreign.metadata_props[:]
    onnx.save(foreign, tmp_path / "foreign.onnx")
    for name, message in (("cut", "not a usable ONNX file"), ("foreign", "without the metadata")):
        with pytest.raises(SdrsegError, match=message):
            load(tmp_path / f"{name}.onnx")
    real = builtins.__import__

    def without(name, *rest):
        if name in ("onnxruntime", "onnxscript"):
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(SdrsegError, match=r"pip install 'sdrseg\[export\]'"):
        load(exported)


def test_exporting_without_the_packages(trained, tmp_path, monkeypatch):
    real = builtins.__import__

    def without(name, *rest):
        if name == "onnxscript":
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(SdrsegError, match=r"pip install 'sdrseg\[export\]'"):
        export_model(trained, tmp_path / "m.onnx")
