"""Imports a model as step 0 of a run: a state dict of segmentation_models_pytorch or torchvision."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import segmentation_models_pytorch as smp
import torch
from torch import Tensor, nn
from torchvision.models import segmentation

from sdrseg.config import Config, config_from
from sdrseg.config.net import Net
from sdrseg.data.extended import Extended, write_chain
from sdrseg.data.source import MAX_CLASSES
from sdrseg.engine.bases import RECIPE
from sdrseg.engine.folder import FORMAT, RunFolder
from sdrseg.errors import SdrsegError, UsageError, first_line, nearest
from sdrseg.files import write_json
from sdrseg.labels import VOID
from sdrseg.network import DECODERS, build_network
from sdrseg.scenario import Scenario, Step, parse_spec
from sdrseg.weights import read_tensors

TOLERANCE = 1e-4
TORCHVISION = ("deeplabv3_resnet50", "deeplabv3_resnet101")
PREFIXES = {
    "classifier.0.": "decoder.aspp.",
    "classifier.1.": "decoder.conv.",
    "classifier.2.": "decoder.bn.",
    "backbone.": "encoder.",
}


def import_model(
    file: Path, out: Path, arch: str, classes: Sequence[str], *, encoder: str | None = None, crop: int = 512
) -> list[str]:
    """Write a new run whose step 0 is the model of a file; returns notes. `classes`: names by channel.

    `arch`: deeplabv3_resnet50 or deeplabv3_resnet101 of torchvision, or an architecture of
    segmentation_models_pytorch, which needs the name of its `encoder`.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise SdrsegError(f"{out} already exists. Choose a new folder with --out.")
    names = [name.strip() for name in classes]
    tensors = {n: t.float() if t.is_floating_point() else t for n, t in read_tensors(file)[0].items()}
    source, net, ours = _open(file, arch, encoder, tensors)
    notes: list[str] = []
    channels = len(ours["classifier.weight"])
    if "" in names or len(set(names)) < len(names) or channels not in (len(names), len(names) - 1):
        raise UsageError(
            f"{file}: its classifier has {channels} channels, and --classes names {len(names)}: {', '.join(names)}. "
            f"Name each channel once, background first."
        )
    network = build_network(net, channels)
    try:
        missing, unexpected = network.load_state_dict(ours, strict=False)
    except RuntimeError as error:  # other shapes
        raise SdrsegError(f"{file}: does not fit {arch} ({first_line(error)}). Name another --arch.") from error
    if wrong := [*(n for n in missing if not n.endswith("num_batches_tracked")), *unexpected]:
        raise SdrsegError(f"{file}: does not fit {arch}: {', '.join(wrong[:3])}. Name another --arch or --encoder.")
    _require_same(file, network.eval(), source.eval(), crop)
    if channels == len(names) - 1:
        _add_background(network)
        if channels > 1:
            notes.append(
                "the model has no channel for background, so one is added that is always 0: pixels where no class is "
                "above 0 are background. Check some predictions."
            )
    if len(names) > MAX_CLASSES or len(names) < 2:
        raise UsageError(f"{len(names)} classes: a model must have 2 to {MAX_CLASSES}, including background.")
    config = config_from({"net": asdict(net), "data": {"crop": crop}, "eval": {"transform": "full_image"}}, str(file))
    _write(out, names, config, network, file)
    return notes


def _open(
    file: Path, arch: str, encoder: str | None, tensors: dict[str, Tensor]
) -> tuple[nn.Module, Net, dict[str, Tensor]]:
    """The model as built by its own library, the settings of our network, and the tensors by our names."""
    if arch in TORCHVISION:
        ours = {n: t for n, t in tensors.items() if not n.startswith("aux_classifier.")}
        count = len(ours.get("classifier.4.weight", ()))
        source = getattr(segmentation, arch)(weights=None, weights_backbone=None, num_classes=max(1, count))
        net = Net(
            encoder=arch.rpartition("_")[2], decoder="deeplabv3", output_stride=8, atrous="12,24,36", weights="none"
        )
        net = Net(**{**asdict(net), "dilate_first_block": False})
        renamed = {_renamed(n): t for n, t in ours.items()}
    else:
        if arch not in DECODERS or arch == "official":
            raise UsageError(f"--arch {arch}: no such architecture{nearest(arch, [*TORCHVISION, *DECODERS])}")
        if encoder is None:
            raise UsageError(f"--arch {arch} is from segmentation_models_pytorch and needs an --encoder.")
        count = len(tensors.get("classifier.weight", ()))
        try:
            source = smp.create_model(arch, encoder, encoder_weights=None, classes=max(1, count))
        except Exception as error:  # encoders and decoders raise many kinds of errors
            raise UsageError(f"--arch {arch} --encoder {encoder}: {first_line(error)}") from error
        net = Net(encoder=encoder, decoder=arch, weights="none", atrous="12,24,36")
        if arch == "deeplabv3":
            net = Net(**{**asdict(net), "output_stride": 8})
        ours, renamed = {re.sub(r"^classifier\.", "segmentation_head.0.", n): t for n, t in tensors.items()}, tensors
    if "classifier.weight" not in renamed:
        raise SdrsegError(f"{file}: has no classifier of {arch}. Name the --arch of the model.")
    try:
        source.load_state_dict(ours, strict=False)
    except RuntimeError as error:
        raise SdrsegError(f"{file}: does not fit {arch} ({first_line(error)}).") from error
    return source, net, renamed


def _renamed(name: str) -> str:
    for theirs, ours in PREFIXES.items():
        if name.startswith(theirs):
            return ours + name.removeprefix(theirs)
    return re.sub(r"^classifier\.4\.", "classifier.", name)


@torch.inference_mode()
def _require_same(file: Path, network: Any, source: nn.Module, crop: int) -> None:
    """Raise an error unless both give the same logits for an image (before upsampling)."""
    image = torch.randn(1, 3, min(crop, 128), min(crop, 128), generator=torch.Generator().manual_seed(0))
    seen: list[Tensor] = []
    last = [m for m in source.modules() if isinstance(m, nn.Conv2d) and m.out_channels == network.classes][-1]
    if hasattr(source, "aux_classifier"):
        last = source.classifier[4]  # type: ignore[index, assignment]
    last.register_forward_hook(lambda module, given, answer: seen.append(answer))
    source(image)
    ours = network(image).coarse
    apart = float((ours - seen[-1]).abs().max()) if ours.shape == seen[-1].shape else float("inf")
    if not apart <= TOLERANCE * max(1.0, float(seen[-1].abs().max())):
        raise SdrsegError(
            f"{file}: the logits of our network and of the library differ by {apart:.2g}; the model was not imported."
        )


@torch.no_grad()
def _add_background(network: Any) -> None:
    """Add a first channel that is always 0."""
    old = network.classifier
    grown = nn.Conv2d(old.in_channels, old.out_channels + 1, old.kernel_size, padding=old.padding)
    assert grown.bias is not None
    grown.weight[0], grown.bias[0] = 0, 0
    grown.weight[1:], grown.bias[1:] = old.weight, old.bias
    network.classifier = grown


def _write(out: Path, names: list[str], config: Config, network: Any, file: Path) -> None:
    folder, count = RunFolder(out), len(names)
    table = np.full(256, VOID, np.uint8)
    table[:count] = range(count)
    step = Step(0, tuple(range(count)), (), (), (), (), (), table, table, table)
    spec = parse_spec(f"{Extended.name}:{count - 1}@sequential")
    scenario = Scenario(spec, tuple(names), (step,), ())
    meta = {
        "step": 0,
        "spec": str(spec),
        "protocol": "sequential",
        "method": "imported",
        "classes": [{"channel": c, "id": c, "name": name, "step": 0} for c, name in enumerate(names)],
        "decision": "softmax",
        "net": config.to_dict()["net"],
        "parent": None,
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    folder.save_step(0, network.state_dict(), {}, meta)
    write_json(out / "scenario.json", {**scenario.to_dict(), "mask_digests": {}})
    date = datetime.now(UTC).isoformat(timespec="seconds")
    write_chain(out, names, True, [], [{"date": date, "what": f"imported from {file.resolve()}"}])
    identity = {"spec": str(spec), "method": "imported", "preset": "default", "recipe": RECIPE}
    write_json(out / "config.json", {**identity, "format": FORMAT, "config": config.to_dict()})
