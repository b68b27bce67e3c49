"""Imports a model as step 0 of a run: a state dict of segmentation_models_pytorch or torchvision."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import segmentation_models_pytorch as smp
import torch
from torch import Tensor, nn
from torchvision.models import segmentation

from sdrseg.config import Config, config_from
from sdrseg.config.net import Net
from sdrseg.datasets.extended import Extended, write_chain
from sdrseg.datasets.folder.classes import looks_like_background
from sdrseg.datasets.source import MAX_CLASSES
from sdrseg.engine.bases import RECIPE
from sdrseg.engine.folder import FORMAT, RunFolder
from sdrseg.errors import SdrsegError, UsageError, first_line, quantity
from sdrseg.extend.parent import IMPORTED
from sdrseg.files import write_json
from sdrseg.labels import VOID
from sdrseg.network import DECODERS, Network, build_network
from sdrseg.scenario import Scenario, Step, parse_spec
from sdrseg.weights import COUNTER, read_tensors, some

TOLERANCE = 1e-4
TEST_SIZE = (128, 256)
"""Of the image on which logits are compared: a multiple of every stride."""
TORCHVISION = ("deeplabv3_resnet50", "deeplabv3_resnet101")
SMP = tuple(name for name in DECODERS if name != "official")
"""Architectures that can be imported, by library."""
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
    if not file.is_file():
        raise SdrsegError(f"{file}: no such file.")
    names = [name.strip() for name in classes]
    tensors = {n: t.float() if t.is_floating_point() else t for n, t in read_tensors(file)[0].items()}
    source, net, ours = _open(file, arch, encoder, tensors)
    notes: list[str] = []
    channels = len(ours["classifier.weight"])
    if "" in names or len(set(names)) < len(names) or channels not in (len(names), len(names) - 1):
        raise UsageError(
            f"{file}: its classifier has {quantity(channels, 'channel')}, and --classes names {len(names)}: "
            f"{', '.join(names)}. Name each channel once, background first."
        )
    network = build_network(net, channels)
    _require_fit(file, arch, network, ours)
    network.load_state_dict(ours, strict=False)
    _require_same(file, network, source)
    if channels == len(names) - 1:
        _add_background(network)
        if channels > 1:
            notes.append(
                "the model has no channel for background, so one is added that is always 0: pixels where no class is "
                "above 0 are background. Check some predictions."
            )
    if not looks_like_background(names[0]):
        none = (
            f"; if the model has none, write --classes background,{','.join(names)}" if channels == len(names) else ""
        )
        notes.append(f"{names[0]!r} is taken as the background{none}")
    if len(names) == 1:
        raise UsageError(f"--classes {names[0]}: also name the background: --classes background,{names[0]}.")
    if len(names) > MAX_CLASSES:
        raise UsageError(f"{len(names)} classes: a model can have {MAX_CLASSES}, including background.")
    config = config_from({"net": asdict(net), "data": {"crop": crop}, "eval": {"transform": "full_image"}}, str(file))
    _write(out, names, config, network, file)
    return notes


def _open(
    file: Path, arch: str, encoder: str | None, tensors: dict[str, Tensor]
) -> tuple[nn.Module, Net, dict[str, Tensor]]:
    """The model as built by its own library, the settings of our network, and the tensors by our names."""
    if arch in TORCHVISION:
        own = arch.rpartition("_")[2]
        if encoder not in (None, own):
            raise UsageError(f"--encoder {encoder}: {arch} of torchvision has {own}. Leave --encoder out.")
        ours = {n: t for n, t in tensors.items() if not n.startswith("aux_classifier.")}
        count = len(ours.get("classifier.4.weight", ()))
        source = getattr(segmentation, arch)(weights=None, weights_backbone=None, num_classes=max(1, count))
        net = Net(
            encoder=own,
            decoder="deeplabv3",
            output_stride=8,
            atrous="12,24,36",
            dilate_first_block=False,
            weights="none",
        )
        renamed = {_renamed(n): t for n, t in ours.items()}
    else:
        if arch not in SMP:
            raise UsageError(
                f"--arch {arch}: not supported. Supported are {', '.join(TORCHVISION)} of torchvision, and "
                f"{', '.join(SMP)} of segmentation_models_pytorch."
            )
        if encoder is None:
            raise UsageError(f"--arch {arch} is from segmentation_models_pytorch and needs an --encoder.")
        count = len(tensors.get("classifier.weight", ()))
        try:
            source = smp.create_model(arch, encoder, encoder_weights=None, classes=max(1, count))
        except Exception as error:  # encoders and decoders raise many kinds of errors
            raise UsageError(f"--arch {arch} --encoder {encoder}: {first_line(error)}") from error
        stride = 8 if arch == "deeplabv3" else 16
        net = Net(encoder, arch, output_stride=stride, atrous="12,24,36", align_corners=True, weights="none")
        ours, renamed = {re.sub(r"^classifier\.", "segmentation_head.0.", n): t for n, t in tensors.items()}, tensors
    if "classifier.weight" not in renamed:
        raise SdrsegError(f"{file}: has no classifier of {arch}. Name the --arch of the model.")
    _require_fit(file, arch, source, ours)
    source.load_state_dict(ours, strict=False)
    return source, net, renamed


def _require_fit(file: Path, arch: str, module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Raise an error that names the first tensors that do not fit a module."""
    known = {name: tensor.shape for name, tensor in module.state_dict().items()}
    problems = {
        "missing": [n for n in known if n not in tensors and not n.endswith(COUNTER)],
        "unexpected": [n for n in tensors if n not in known],
        "of another shape": [n for n, tensor in tensors.items() if n in known and tensor.shape != known[n]],
    }
    if any(problems.values()):
        details = "; ".join(f"{kind}: {some(names)}" for kind, names in problems.items() if names)
        raise SdrsegError(
            f"{file}: does not fit {arch} ({details}). Name another --arch or --encoder; or it was built with other "
            f"options, and such a model cannot be imported."
        )


def _renamed(name: str) -> str:
    for theirs, ours in PREFIXES.items():
        if name.startswith(theirs):
            return ours + name.removeprefix(theirs)
    return re.sub(r"^classifier\.4\.", "classifier.", name)


@torch.inference_mode()
def _require_same(file: Path, network: Network, source: nn.Module) -> None:
    """Raise an error unless both give the same logits for a test image, in float64, where rounding does not matter."""
    image = torch.randn(1, 3, *TEST_SIZE, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    theirs = source.double().eval()(image)
    theirs = theirs["out"] if isinstance(theirs, dict) else theirs
    ours = network.double().eval()(image).logits
    network.float()
    difference = float((ours - theirs).abs().max()) if ours.shape == theirs.shape else float("inf")
    if not difference <= TOLERANCE:
        raise SdrsegError(
            f"{file}: on a test image, the logits of our network and of the library differ by {difference:.2g}, more "
            f"than {TOLERANCE:g}; the model was not imported."
        )


@torch.no_grad()
def _add_background(network: Network) -> None:
    """Add a first channel that is always 0."""
    network.grow(1)
    for rows in network.classifier.parameters():
        rows.copy_(rows.roll(1, 0))
        rows[0] = 0


def _write(out: Path, names: list[str], config: Config, network: Network, file: Path) -> None:
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
        "method": IMPORTED,
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
    identity = {"spec": str(spec), "method": IMPORTED, "preset": "default", "recipe": RECIPE}
    write_json(out / "config.json", {**identity, "format": FORMAT, "config": config.to_dict()})
