"""Pre-trained weights: what is read, what it ends up as, and what is said of files that do not fit."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import segmentation_models_pytorch as smp
import timm
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import nn
from torchvision.models import resnet18

from sdrseg.compat import batch_norms
from sdrseg.config.net import Net
from sdrseg.datasets.augment import normalise
from sdrseg.datasets.voc import Voc
from sdrseg.errors import SdrsegError, UsageError
from sdrseg.network import Network, build_network
from sdrseg.weights import load_weights

TOY = Net("toy16", weights="none")


def fresh(net: Net = TOY, classes: int = 4, seed: int = 7) -> Network:
    torch.manual_seed(seed)
    return build_network(net, classes)


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    """All but the counters of batches, which files may lack."""
    names = [n for n in a if not n.endswith("num_batches_tracked")]
    return all(torch.equal(a[n].float(), b[n].float()) for n in names)


@pytest.fixture(scope="module")
def source() -> Network:
    """A trained-looking network: every tensor differs from a fresh one's."""
    network = fresh(seed=1)
    for tensor in network.state_dict().values():
        if tensor.is_floating_point():
            tensor.uniform_(0.5, 1)
    return network


@pytest.fixture(scope="module")
def whole(source) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in source.state_dict().items()}


@pytest.fixture(scope="module")
def encoder(whole) -> dict[str, torch.Tensor]:
    return {name.removeprefix("encoder."): tensor for name, tensor in whole.items() if name.startswith("encoder.")}


# --- what fits ------------------------------------------------------------------------------------------------------


def test_weights_none_is_reported_and_changes_nothing():
    network, same = fresh(), fresh()
    assert load_weights(network, "none", TOY) == "Random start: no pre-trained weights (net.weights=none)."
    assert equal(network.state_dict(), same.state_dict())


@pytest.mark.parametrize("suffix", ["safetensors", "pth", "pt"])
def test_encoder_with_torchvision_names(tmp_path, suffix):
    net = Net("resnet18", weights="none")
    torch.manual_seed(3)
    theirs = resnet18(weights=None).state_dict()
    theirs["bn1.running_var"] += 1e6  # beyond half precision: batch norm is stored in full
    stored = {name: t.half() if t.ndim == 4 else t for name, t in theirs.items() if "num_batches" not in name}
    file = tmp_path / f"resnet18.{suffix}"
    if suffix == "safetensors":
        save_file(stored, file)
    else:
        torch.save(stored, file, _use_new_zipfile_serialization=suffix == "pt")  # the old format too
    network, untouched = fresh(net), fresh(net)
    assert load_weights(network, str(file), net) == (
        f"Weights of the encoder from {file}; decoder and classifier start at random."
    )
    ours = network.encoder.state_dict()
    assert ours.keys() == {n for n in theirs if not n.startswith("fc.")} and ours["conv1.weight"].dtype == torch.float32
    assert equal(ours, {**theirs, **stored})
    assert equal(network.decoder.state_dict(), untouched.decoder.state_dict())
    assert all(norm.momentum == 0.01 for norm in batch_norms(network.encoder))


def test_encoder_of_timm(tmp_path):
    net = Net("tu-test_resnet", "fpn", weights="none")
    torch.manual_seed(3)
    theirs = timm.create_model("test_resnet").state_dict()
    assert any(name.startswith("fc.") for name in theirs)
    save_file(theirs, tmp_path / "encoder.safetensors")
    network = fresh(net)
    load_weights(network, str(tmp_path / "encoder.safetensors"), net)
    assert equal({n.removeprefix("model."): t for n, t in network.encoder.state_dict().items()}, theirs)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda t: t,
        lambda t: {f"module.{n}": v for n, v in t.items()},
        lambda t: {"state_dict": {f"module.model.{n}": v for n, v in t.items()}, "epoch": 3, "best": 0.5},
        lambda t: {"model_state": {f"_orig_mod.{n}": v for n, v in t.items()}},
        lambda t: {"model": {"state_dict": t}},
    ],
)
def test_whole_network_through_nesting_and_prefixes(tmp_path, whole, wrap):
    torch.save(wrap(whole), tmp_path / "net.pth")
    network = fresh()
    message = load_weights(network, str(tmp_path / "net.pth"), TOY)
    assert message == f"Weights of the whole network from {tmp_path / 'net.pth'}."
    assert equal(network.state_dict(), whole)


def test_whole_network_with_the_names_of_smp(tmp_path, whole):
    theirs = {"encoder.": "encoder.", "decoder.": "decoder.", "classifier.": "segmentation_head.0."}
    named = {theirs[n.split(".")[0] + "."] + n.split(".", 1)[1]: t for n, t in whole.items()}
    options = {"encoder_weights": None, "classes": 4, "decoder_channels": 64, "decoder_atrous_rates": (6, 12, 18)}
    model = smp.DeepLabV3Plus("toy16", **options)
    model.load_state_dict(named)
    save_file(model.state_dict(), tmp_path / "smp.safetensors")
    network = fresh()
    load_weights(network, str(tmp_path / "smp.safetensors"), TOY)
    assert equal(network.state_dict(), whole)


def test_encoder_alone_by_our_names(tmp_path, whole, encoder):
    save_file({n: t for n, t in whole.items() if n.startswith("encoder.")}, tmp_path / "encoder.safetensors")
    network = fresh()
    load_weights(network, str(tmp_path / "encoder.safetensors"), TOY)
    assert equal(network.encoder.state_dict(), encoder)


def test_whole_network_without_its_classifier(tmp_path, whole):
    save_file({n: t for n, t in whole.items() if "classifier" not in n}, tmp_path / "net.safetensors")
    network, untouched = fresh(classes=9), fresh(classes=9)
    message = load_weights(network, str(tmp_path / "net.safetensors"), TOY)
    assert message.endswith("which has no classifier: that starts at random.")
    assert equal(network.classifier.state_dict(), untouched.classifier.state_dict())
    assert equal(network.decoder.state_dict(), {n[8:]: t for n, t in whole.items() if n.startswith("decoder.")})


# --- what does not --------------------------------------------------------------------------------------------------


def refused(network: Network, file: Path, said: str, net: Net = TOY) -> None:
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    with pytest.raises(SdrsegError, match=said):
        load_weights(network, str(file), net)
    assert equal(network.state_dict(), before), "a file that does not fit changes nothing"


def test_missing_unexpected_and_misshapen_tensors_are_named(tmp_path, encoder):
    broken = dict(encoder)
    for name in list(broken)[-6:]:
        del broken[name]
    broken |= {"extra.weight": torch.zeros(2), "stages.0.0.weight": torch.zeros(16, 4, 3, 3)}
    save_file(broken, tmp_path / "encoder.safetensors")
    refused(
        fresh(),
        tmp_path / "encoder.safetensors",
        r"encoder\.safetensors: does not fit net\.encoder=toy16 with net\.decoder=deeplabv3plus\. Tensors: "
        r"5 missing \(stages\.4\.3\.weight, stages\.4\.4\.weight, stages\.4\.4\.bias, …\); "
        r"1 unexpected \(extra\.weight\); 1 of another shape \(stages\.0\.0\.weight 16×4×3×3 instead of 16×3×3×3\)\. "
        r"Set these two .* or net\.weights=none",
    )


def test_values_that_are_not_finite(tmp_path, encoder):
    save_file({**encoder, "stages.0.1.running_var": torch.full((16,), torch.inf)}, tmp_path / "encoder.safetensors")
    refused(fresh(), tmp_path / "encoder.safetensors", r"1 not finite \(stages\.0\.1\.running_var\)")


def test_weights_of_another_encoder(tmp_path):
    save_file(resnet18(weights=None).state_dict(), tmp_path / "resnet18.safetensors")
    refused(
        fresh(), tmp_path / "resnet18.safetensors", r"50 missing \(stages\.0\.0\.weight.*120 unexpected \(bn1\.bias"
    )


def test_whole_network_of_another_decoder(tmp_path, whole):
    save_file(whole, tmp_path / "net.safetensors")
    net = Net("toy16", "deeplabv3", weights="none")
    refused(fresh(net), tmp_path / "net.safetensors", "with net.decoder=deeplabv3.*missing.*unexpected", net)


def test_classifier_of_another_size(tmp_path, whole):
    save_file(whole, tmp_path / "net.safetensors")
    said = (
        r"its classifier has 4 classes and this network 6.*remove the tensors classifier\.weight and classifier\.bias"
    )
    refused(fresh(classes=6), tmp_path / "net.safetensors", said)
    refused(fresh(classes=1), tmp_path / "net.safetensors", r"Use a file for 1 class \(background included\)")


@pytest.mark.parametrize(("stored", "wrong", "right"), [("v1", "conv2", "conv1"), ("v1.5", "conv1", "conv2")])
def test_placement_of_strides(tmp_path, stored, wrong, right):
    nets = {s: Net("resnet50", "official", stride_on=s, weights="none") for s in (wrong, right)}
    network = fresh(nets[wrong])
    file = tmp_path / "resnet50.safetensors"
    save_file(network.encoder.state_dict(), file, metadata={"stride": stored})
    said = f"for a ResNet {stored}, with its stride on {right}. Set net.stride_on={right}"
    refused(network, file, said, nets[wrong])
    load_weights(fresh(nets[right]), str(file), nets[right])


def test_placement_of_strides_means_nothing_without_bottlenecks(tmp_path):
    net = Net("resnet18", weights="none")
    network = fresh(net)
    save_file(network.encoder.state_dict(), tmp_path / "resnet18.safetensors", metadata={"stride": "v1"})
    load_weights(network, str(tmp_path / "resnet18.safetensors"), net)


class Trap:
    """What a pickle can do: run code of its author's choosing."""

    def __reduce__(self):
        return os.mkdir, ("trapped",)


def test_files_that_are_not_tensors(tmp_path, monkeypatch, whole):
    monkeypatch.chdir(tmp_path)
    refused(fresh(), Path("nowhere.pth"), r"net\.weights=nowhere\.pth: no such file\. It can be imagenet, none, or")
    refused(fresh(), tmp_path, "no such file")
    Path("weights.h5").write_bytes(b"x")
    refused(fresh(), Path("weights.h5"), r"weights\.h5: not a \.safetensors, \.pth or \.pt file")
    torch.save({"model": Trap()}, "trap.pth")
    refused(fresh(), Path("trap.pth"), "not a file of tensors.*Files that execute code when opened are not read")
    assert not Path("trapped").exists()
    torch.save(whole, "net.pth")
    Path("cut.pth").write_bytes(Path("net.pth").read_bytes()[:-5000])
    refused(fresh(), Path("cut.pth"), r"cut\.pth: not a file of tensors")
    Path("text.pth").write_bytes(b"hello world")  # torch: KeyError: 101
    refused(fresh(), Path("text.pth"), r"text\.pth: not a file of tensors, or damaged\. Files that execute code")
    save_file(whole, "net.safetensors")
    Path("cut.safetensors").write_bytes(Path("net.safetensors").read_bytes()[:-5000])
    refused(
        fresh(),
        Path("cut.safetensors"),
        r"cut\.safetensors: not a safetensors file, or incomplete .* Download it again",
    )
    for content in ({"epoch": 3}, [torch.zeros(2)], {}):
        torch.save(content, "other.pth")
        refused(fresh(), Path("other.pth"), r"other\.pth: contains no named tensors")


# --- by name --------------------------------------------------------------------------------------------------------


def test_by_name(monkeypatch):
    """Without a network: a library that answers as if it had downloaded."""
    real = smp.encoders.get_encoder
    asked = []

    def pretend(name, depth, weights):
        asked.append((name, weights))
        return real(name, depth=depth, weights=None)

    usual = {"mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225]}
    monkeypatch.setattr(smp.encoders, "get_encoder", pretend)
    monkeypatch.setattr(smp.encoders, "get_preprocessing_params", lambda name: usual)
    for encoder in "resnet18", "tu-test_resnet":
        net = Net(encoder, "fpn")
        network = build_network(net, 3)
        torch.manual_seed(11)
        assert load_weights(network, "imagenet", net) == f"ImageNet weights of {encoder}."
        torch.manual_seed(11)
        assert equal(network.encoder.state_dict(), real(encoder, depth=5, weights=None).state_dict())
    assert asked == [("resnet18", "imagenet"), ("tu-test_resnet", True)]
    half = {"mean": [0.5, 0.5, 0.5], "std": [0.5, 0.5, 0.5]}
    monkeypatch.setattr(smp.encoders, "get_preprocessing_params", lambda name: half)
    assert "were trained with mean [0.5, 0.5, 0.5]" in load_weights(network, "imagenet", net)


def test_a_failed_download_explains_what_to_do(monkeypatch):
    def fail(*_, **__):
        raise ConnectionError("no route to host\nand more")

    net = Net("resnet18", "fpn")
    network = build_network(net, 3)
    monkeypatch.setattr(smp.encoders, "get_encoder", fail)
    refused(
        network,
        Path("imagenet"),
        r"the weights of resnet18 are not available \(ConnectionError: no route to host\)\. Set net\.weights to a file "
        r"\(\.safetensors or \.pth, with torchvision's names\), or to none for a random start\.",
        net,
    )


def test_no_weights_by_that_name():
    with pytest.raises(UsageError, match=r"net\.weights=imagenet: there are none for net\.encoder=toy16\. Set net"):
        load_weights(fresh(), "imagenet", TOY)
    net = Net("resnet50", "official", stride_on="conv1")
    with pytest.raises(
        UsageError, match=r"net\.stride_on=conv1: the weights that net\.weights=imagenet gives resnet50"
    ):
        load_weights(build_network(net, 3), "imagenet", net)


# --- the real thing -------------------------------------------------------------------------------------------------


def test_real_resnet50_on_real_images(voc_folder):
    """The activations have the statistics that the weights carry."""
    if not (file := os.environ.get("SDRSEG_RESNET50")):
        pytest.skip("SDRSEG_RESNET50 names no safetensors file of a ResNet-50 v1")
    net = Net("resnet50", "official", stride_on="conv1", weights=file)
    network = build_network(net, 3).eval()
    load_weights(network, file, net)
    voc = Voc(voc_folder)
    pictures = [np.array(Image.fromarray(voc.image(id)).resize((224, 224))) for id in voc.ids("val")[::100]]
    spread = []

    def look(norm: nn.Module, inputs: tuple[torch.Tensor], _: object) -> None:
        x = inputs[0].transpose(0, 1).flatten(1)
        x = (x - norm.running_mean[:, None]) / (norm.running_var[:, None] + norm.eps).sqrt()
        spread.append((x.mean(1).abs().median().item(), x.std(1).median().item()))

    for norm in batch_norms(network.encoder):
        norm.register_forward_hook(look)
    with torch.no_grad():
        features = network(normalise(torch.from_numpy(np.stack(pictures)).permute(0, 3, 1, 2))).features
    # measured: 0.14, 0.87..1.08; with the strides on conv2 0.22, 0.59..1.01; without normalisation 0.48, 0.22..1.19
    assert max(mean for mean, _ in spread) < 0.2 and all(0.8 < std < 1.2 for _, std in spread)
    assert 0.05 < (features > 0).float().mean() < 0.4
