"""`sdrseg weights`: what is on this machine, what is fetched, and what is said where there is no network."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import segmentation_models_pytorch as smp
import torch
from huggingface_hub import constants

from sdrseg.config.net import Net
from sdrseg.datasets.augment import MEAN, STD
from sdrseg.network import build_network
from sdrseg.pretrained import cached_weights
from sdrseg.weights import load_weights


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    """An empty cache of downloads."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def test_weights_that_were_fetched_are_listed(cache, sdrseg):
    code, out, _ = sdrseg("weights", "--json")
    assert code == 0 and json.loads(out) == {"folder": str(cache), "cached": []}
    code, out, _ = sdrseg("weights")
    assert code == 0 and out.startswith(f"There are no ImageNet weights in {cache} yet.\nFetch some with")
    place = smp.encoders.encoders["resnet18"]["pretrained_settings"]["imagenet"]
    folder = cache / f"models--{place['repo_id'].replace('/', '--')}/snapshots/{place['revision']}"
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(bytes(3_000_000))
    assert [(c.encoder, c.megabytes, c.file) for c in cached_weights()] == [
        ("resnet18", 3.0, str(folder / "model.safetensors"))
    ]
    code, out, _ = sdrseg("weights")
    assert code == 0 and "resnet18" in out and "sdrseg weights ENCODER --out" in out


def test_a_file_to_take_along_gives_the_same_weights(sdrseg, monkeypatch):
    torch.manual_seed(0)
    real = smp.encoders.get_encoder
    fetched = real("resnet18", depth=5, weights=None)
    monkeypatch.setattr(
        smp.encoders, "get_encoder", lambda *a, **k: fetched if k.get("weights") == "imagenet" else real(*a, **k)
    )
    monkeypatch.setattr(smp.encoders, "get_preprocessing_params", lambda name: {"mean": MEAN, "std": STD})
    code, out, err = sdrseg("weights", "resnet18", "--out", "resnet18.safetensors")
    assert (code, err) == (0, "") and "--encoder resnet18 --weights resnet18.safetensors" in out
    net = Net(encoder="resnet18")
    network = build_network(net, 3)
    assert "Weights of the encoder from" in load_weights(network, "resnet18.safetensors", net)
    for name, tensor in fetched.state_dict().items():
        assert torch.equal(network.encoder.state_dict()[name], tensor)
    code, _, err = sdrseg("weights", "resnet18", "--out", "resnet18.safetensors")
    assert code == 1 and "exists" in err


def test_without_a_network_the_message_explains_how_to_copy_a_file(sdrseg, monkeypatch):
    real = smp.encoders.get_encoder

    def no_network(*args, **options):
        if options.get("weights") == "imagenet":
            raise OSError("no route to host")
        return real(*args, **options)

    monkeypatch.setattr(smp.encoders, "get_encoder", no_network)
    code, _, err = sdrseg("weights", "resnet18")
    assert code == 1 and "no route to host" in err and "sdrseg weights ENCODER --out FILE.safetensors" in err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["resnet18", "--out", "a.pth"], "ends in .safetensors"),
        (["--out", "a.safetensors"], "also name the encoder"),
        (["toy16"], "there are none for net.encoder=toy16"),
        (["resnet19"], "resnet18"),
    ],
)
def test_wrong_words_are_explained(sdrseg, words, message):
    code, _, err = sdrseg("weights", *words)
    assert code == 2 and message in err and not list(Path().iterdir())
