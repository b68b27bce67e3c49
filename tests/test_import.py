"""Models from elsewhere: as step 0 they say what their library says."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import replace

import numpy as np
import pytest
import segmentation_models_pytorch as smp
import torch
from safetensors.torch import save_file
from torchvision.models import segmentation

import sdrseg
from extend_data import masks_folder
from sdrseg.datasets.augment import normalise
from sdrseg.engine.rescore import score_again
from sdrseg.errors import SdrsegError, UsageError
from sdrseg.extend import imported
from sdrseg.extend.history import history
from sdrseg.extend.imported import import_model
from sdrseg.extend.run import extend


def saved(model: torch.nn.Module, file) -> torch.nn.Module:
    """With batch norms that have seen something, in a file."""
    torch.manual_seed(0)
    for module in model.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.running_mean.normal_(0, 0.1)
            module.running_var.uniform_(0.5, 1.5)
    state = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    save_file(state, file) if file.suffix == ".safetensors" else torch.save({"state_dict": state}, file)
    return model.eval()


@torch.inference_mode()
def test_torchvisions_deeplab_gives_the_same_logits(tmp_path):
    """A checkpoint as torchvision's reference scripts save it, with their options."""
    file = tmp_path / "tv.pth"
    model = saved(segmentation.deeplabv3_resnet50(weights=None, weights_backbone=None, num_classes=3), file)
    options = Namespace(model="deeplabv3_resnet50", lr=0.01, device="cuda")
    torch.save({"model": model.state_dict(), "optimizer": {"state": {}}, "epoch": 3, "args": options}, file)
    assert import_model(file, tmp_path / "run", "deeplabv3_resnet50", ["background", "cat", "dog"]) == []
    ours = sdrseg.load(tmp_path / "run", device="cpu")
    assert [c.name for c in ours.classes] == ["background", "cat", "dog"]
    image = torch.from_numpy(np.random.default_rng(0).integers(0, 255, (1, 3, 96, 64)).astype(np.uint8))
    theirs = model(normalise(image))["out"]
    assert torch.allclose(ours.network(normalise(image)).logits, theirs, atol=1e-4)


@pytest.mark.parametrize("arch", ["unet", "deeplabv3", "deeplabv3plus"])
def test_smps_models_say_the_same_and_can_be_extended(tmp_path, arch, capsys):
    """smp's DeepLabs enlarge their logits with align_corners=True, and so does what is imported."""
    file = tmp_path / "smp.safetensors"
    model = saved(smp.create_model(arch, "resnet18", encoder_weights=None, classes=1), file)
    notes = import_model(file, tmp_path / "run", arch, ["background", "crack"], encoder="resnet18", crop=64)
    assert notes == []  # one channel is a sigmoid: a softmax over [0, z]
    ours = sdrseg.load(tmp_path / "run", device="cpu")
    image = np.random.default_rng(0).integers(0, 255, (64, 96, 3)).astype(np.uint8)
    with torch.inference_mode():
        theirs = model(normalise(torch.from_numpy(image).permute(2, 0, 1)[None])).sigmoid()[0, 0].numpy()
    assert np.abs(ours.predict(image).probabilities[1] - theirs).max() < 1e-4
    if arch == "unet":
        with pytest.raises(UsageError, match="--classes background,crack"):
            import_model(file, tmp_path / "no", arch, ["crack"], encoder="resnet18")
        with pytest.raises(UsageError, match="has 1 channel, and --classes names 3: a, b, c"):
            import_model(file, tmp_path / "no", arch, ["a", "b", "c"], encoder="resnet18")
        (step,) = history(tmp_path / "run")["steps"]
        assert step["method"] == "imported" and step["data"] == "–"
        with pytest.raises(SdrsegError, match="imported model is scored when it is extended"):
            score_again(tmp_path / "run")
        masks_folder(tmp_path / "white", 7, 4)
        quick = {"train.epochs": 1, "train.best_every": 0, "train.patience": 0, "run.loggers": []}
        done = extend(tmp_path / "run", tmp_path / "white", tmp_path / "two", settings=quick)
        assert "step 0: not scored: no images" in capsys.readouterr().err
        assert done.method == "sdr" and any("works without" in note for note in done.notes)
        (why,) = [note for note in done.notes if "not the default laps-softmax" in note]
        assert "--images FOLDER" in why and "--old-data" not in why  # old test images only
        assert [score["step"] for score in score_again(tmp_path / "two")] == [0, 1]
        assert [c.name for c in sdrseg.load(tmp_path / "two").classes] == ["background", "crack", "white"]


def test_a_failed_import_is_explained(tmp_path):
    file = tmp_path / "smp.safetensors"
    saved(smp.create_model("unet", "resnet18", encoder_weights=None, classes=3), file)
    names, known = ["background", "a", "b"], {"encoder": "resnet18"}
    for arch, given, options, match in (
        ("unet", ["a", "b"], known, "3 channels, and --classes names 2"),
        ("unet", ["a"], known, "3 channels, and --classes names 1"),
        ("unet", ["a", "a", "b"], known, "Name each channel once"),
        ("unett", names, known, "--arch unett: not supported. Supported are deeplabv3_resnet50, .*, unet, "),
        (
            "deeplabv3_mobilenet_v3_large",
            names,
            {},
            "not supported. Supported are deeplabv3_resnet50, deeplabv3_resnet101",
        ),
        ("official", names, known, "--arch official: not supported"),
        ("unet", names, {}, "needs an --encoder"),
        ("unet", names, {"encoder": "resnet34"}, r"missing: encoder\.layer1\.2\.conv1\.weight, .*other options"),
        ("fpn", names, known, r"does not fit fpn \(missing: .*unexpected: .*of another shape: "),
        (
            "deeplabv3_resnet50",
            names,
            {"encoder": "resnet34"},
            "--encoder resnet34: deeplabv3_resnet50 of .* has resnet50",
        ),
        ("deeplabv3_resnet50", names, {}, r"does not fit deeplabv3_resnet50 \(missing: backbone\."),
    ):
        with pytest.raises(SdrsegError, match=match):
            import_model(file, tmp_path / "out", arch, given, **options)
    assert not (tmp_path / "out").exists()
    with pytest.raises(SdrsegError, match=r"nothing\.pth: no such file\.$"):
        import_model(tmp_path / "nothing.pth", tmp_path / "out", "unet", names, **known)
    state = segmentation.deeplabv3_resnet50(weights=None, weights_backbone=None, num_classes=3).state_dict()
    state["backbone.conv1.weight"] = torch.zeros(64, 1, 7, 7)
    torch.save(state, tmp_path / "grey.pth")
    with pytest.raises(SdrsegError, match=r"of another shape: backbone\.conv1\.weight\)\. Name another --arch"):
        import_model(tmp_path / "grey.pth", tmp_path / "out", "deeplabv3_resnet50", names)
    torch.save({"model": object}, tmp_path / "code.pth")
    with pytest.raises(SdrsegError, match=r"code\.pth: not a file of tensors\. Files that execute code"):
        import_model(tmp_path / "code.pth", tmp_path / "out", "unet", names, **known)
    (tmp_path / "full").mkdir()
    (tmp_path / "full/file").write_text("")
    with pytest.raises(SdrsegError, match="already exists"):
        import_model(file, tmp_path / "full", "unet", names, **known)


@pytest.mark.parametrize("library", ["torchvision", "smp"])
def test_a_network_that_computes_otherwise_is_refused(tmp_path, monkeypatch, library):
    """Torchvision dilates the first block of a stage as the stage before; smp aligns corners."""
    file, build = tmp_path / "model.pth", imported.build_network
    if library == "torchvision":
        arch, encoder, other = "deeplabv3_resnet50", None, {"dilate_first_block": True}
        saved(segmentation.deeplabv3_resnet50(weights=None, weights_backbone=None, num_classes=2), file)
    else:
        arch, encoder, other = "deeplabv3plus", "resnet18", {"align_corners": False}
        saved(smp.create_model(arch, encoder, encoder_weights=None, classes=2), file)
    monkeypatch.setattr(imported, "build_network", lambda net, classes: build(replace(net, **other), classes))
    with pytest.raises(SdrsegError, match=r"differ by .* more than 0\.0001"):
        import_model(file, tmp_path / "run", arch, ["background", "cat"], encoder=encoder)
    assert not (tmp_path / "run").exists()


def test_a_first_class_that_is_no_background_is_pointed_out(tmp_path):
    saved(smp.create_model("unet", "resnet18", encoder_weights=None, classes=3), tmp_path / "smp.pth")
    for names, expected in (
        (("red", "green", "blue"), ["--classes background,red,green,blue"]),
        (("Background", "red", "green"), []),
    ):
        notes = import_model(tmp_path / "smp.pth", tmp_path / names[0], "unet", names, encoder="resnet18")
        assert [note.partition("write ")[2] for note in notes] == expected
        assert all(note.startswith("'red' is taken as the background; if the model has none") for note in notes)


def test_a_model_without_background_gets_a_channel_of_zeros(tmp_path):
    file = tmp_path / "smp.safetensors"
    model = saved(smp.create_model("unet", "resnet18", encoder_weights=None, classes=2), file)
    (note,) = import_model(file, tmp_path / "run", "unet", ["background", "a", "b"], encoder="resnet18")
    assert "no channel for background" in note
    ours = sdrseg.load(tmp_path / "run", device="cpu")
    image = torch.randn(1, 3, 64, 64, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        theirs, said = model(image), ours.network(image).logits
    assert not said[:, 0].any() and torch.allclose(said[:, 1:], theirs, atol=1e-5)
