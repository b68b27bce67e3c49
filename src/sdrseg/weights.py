"""Pre-trained weights by name, from a file, or explicitly none. Weights that do not fit are an error."""

from __future__ import annotations

import pickle
import re
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path

import segmentation_models_pytorch as smp
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from sdrseg.compat import ENCODERS
from sdrseg.config.net import Net
from sdrseg.datasets.augment import MEAN, STD
from sdrseg.errors import SdrsegError, UsageError, first_line, quantity
from sdrseg.network import Network
from sdrseg.network_parts import has_bottlenecks

NESTED = ("state_dict", "model_state_dict", "model_state", "model")
PREFIXES = ("module.", "_orig_mod.", "model.")
"""Keys and prefixes that training scripts add to the tensors of a network."""

SMP_CLASSIFIER = r"^segmentation_head\.0\."
"""The name of the classifier in segmentation_models_pytorch; encoder and decoder have the same names as here."""

IMAGE_CLASSIFIERS = ("fc.", "classifier.", "head.fc.")
"""The last layer of a network for ImageNet's classes, which an encoder does not have."""

STRIDES = {"v1": "conv1", "v1.5": "conv2"}
"""Values of "stride" in the metadata of a safetensors file, and the corresponding net.stride_on."""

COUNTER = "num_batches_tracked"
"""The name of a tensor that older files do not have, and that is not needed."""

ADVICE = (
    "Set net.weights to a file (.safetensors or .pth, with torchvision's names), or to none for a random start. "
    "`sdrseg weights` lists what is on this machine."
)


def load_weights(network: Network, weights: str, net: Net) -> str:
    """Fill a new network from `weights` (imagenet, none, or a file). Returns one sentence for the log."""
    if weights == "none":
        return "Random start: no pre-trained weights (net.weights=none)."
    if weights == "imagenet":
        return _by_name(network, net)
    return _from_file(network, Path(weights), net)


def _by_name(network: Network, net: Net) -> str:
    if net.stride_on == "conv1":
        raise UsageError(
            f"net.stride_on=conv1: the weights that net.weights=imagenet gives {net.encoder} have the stride on conv2. "
            "Set net.stride_on=conv2, or net.weights to a file of ResNet-v1 weights."
        )
    timm = net.encoder.startswith("tu-")
    if not timm and "imagenet" not in ENCODERS[net.encoder]["pretrained_settings"]:
        raise UsageError(f"net.weights=imagenet: there are none for net.encoder={net.encoder}. {ADVICE}")
    try:
        encoder = smp.encoders.get_encoder(net.encoder, depth=5, weights=True if timm else "imagenet")
        expects = smp.encoders.get_preprocessing_params(net.encoder)
    except Exception as error:  # downloads fail in many ways
        raise SdrsegError(
            f"net.weights=imagenet: the weights of {net.encoder} are not available "
            f"({type(error).__name__}: {first_line(error)}). {ADVICE}"
        ) from error
    _fill(network.encoder, encoder.state_dict(), f"ImageNet weights of {net.encoder}", net)
    message = f"ImageNet weights of {net.encoder}."
    if (tuple(expects["mean"]), tuple(expects["std"])) != (tuple(MEAN), tuple(STD)):
        message += (
            f" They were trained with mean {expects['mean']} and std {expects['std']}; ours are {MEAN} and {STD}."
        )
    return message


def _from_file(network: Network, file: Path, net: Net) -> str:
    tensors, facts = read_tensors(file)
    stride_on = STRIDES.get(facts.get("stride", ""))
    if stride_on not in (None, net.stride_on) and has_bottlenecks(network.encoder):
        raise SdrsegError(
            f"{file}: for a ResNet {facts['stride']}, with its stride on {stride_on}. Set net.stride_on={stride_on}."
        )
    parts = {name.split(".")[0] for name in tensors}
    if "encoder" in parts and parts <= {"encoder", "decoder", "classifier"}:
        if "decoder" in parts:
            return _fill_whole(network, tensors, file, net)
        tensors = {name.removeprefix("encoder."): t for name, t in tensors.items() if name.startswith("encoder.")}
    wanted = network.encoder.state_dict()
    inner = "model." if all(name.startswith("model.") for name in wanted) else ""  # smp wraps encoders of timm
    tensors = {
        inner + name: tensor
        for name, tensor in tensors.items()
        if inner + name in wanted or not name.startswith(IMAGE_CLASSIFIERS)
    }
    _fill(network.encoder, tensors, str(file), net)
    return f"Weights of the encoder from {file}; decoder and classifier start at random."


def _fill_whole(network: Network, tensors: Mapping[str, Tensor], file: Path, net: Net) -> str:
    """A whole segmentation network, with or without its classifier."""
    if all(not name.startswith("classifier.") for name in tensors):
        start = {f"classifier.{name}": tensor for name, tensor in network.classifier.state_dict().items()}
        _fill(network, {**tensors, **start}, str(file), net)
        return f"Weights of encoder and decoder from {file}, which has no classifier: that starts at random."
    weight = tensors.get("classifier.weight")
    if weight is not None and weight.ndim == 4 and len(weight) != network.classes:
        raise SdrsegError(
            f"{file}: its classifier has {quantity(len(weight), 'class')} and this network {network.classes}. "
            f"Use a file for {quantity(network.classes, 'class')} (background included), or remove the tensors "
            "classifier.weight and classifier.bias to start the classifier at random."
        )
    _fill(network, tensors, str(file), net)
    return f"Weights of the whole network from {file}."


def _fill(module: nn.Module, tensors: Mapping[str, Tensor], origin: str, net: Net) -> None:
    """Copy tensors by name, cast to the network's precision, after all of them have been checked."""
    wanted = module.state_dict()
    problems = {
        "missing": [name for name in wanted if name not in tensors and not name.endswith(COUNTER)],
        "unexpected": [name for name in tensors if name not in wanted],
        "of another shape": [
            f"{name} {_shape(tensor)} instead of {_shape(wanted[name])}"
            for name, tensor in tensors.items()
            if name in wanted and tensor.shape != wanted[name].shape
        ],
        "not finite": [name for name, tensor in tensors.items() if not tensor.isfinite().all()],
    }
    if any(problems.values()):
        details = "; ".join(f"{len(names)} {kind} ({some(names)})" for kind, names in problems.items() if names)
        raise SdrsegError(
            f"{origin}: does not fit net.encoder={net.encoder} with net.decoder={net.decoder}. Tensors: {details}. Set "
            "these two to what the weights were made for, or net.weights=none for a random start."
        )
    nn.Module.load_state_dict(module, dict(tensors), strict=False)


def read_tensors(file: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors of a file by name, and the metadata of a safetensors file. No code in the file is executed."""
    if not file.is_file():
        raise SdrsegError(
            f"net.weights={file}: no such file. It can be imagenet, none, or a .safetensors or .pth file."
        )
    if file.suffix not in (".safetensors", ".pth", ".pt"):
        raise SdrsegError(f"{file}: not a .safetensors, .pth or .pt file. Convert it, with torchvision's names.")
    try:
        if file.suffix == ".safetensors":
            with safe_open(file, "pt") as opened:
                return _plain({name: opened.get_tensor(name) for name in opened.keys()}), opened.metadata() or {}
        with torch.serialization.safe_globals([Namespace]):  # a plain container: torchvision saves its options in one
            loaded = torch.load(file, map_location="cpu", weights_only=True)
    except OSError as error:
        raise SdrsegError(f"{file}: cannot be read ({error.strerror or error}).") from error
    except SafetensorError as error:
        raise SdrsegError(f"{file}: not a safetensors file, or incomplete ({error}). Download it again.") from error
    except Exception as error:  # truncated, foreign, or a pickle that would have to be executed
        damaged = "" if isinstance(error, pickle.UnpicklingError) else ", or damaged"
        raise SdrsegError(
            f"{file}: not a file of tensors{damaged}. Files that execute code when opened are not read: "
            "save the state_dict alone, best with safetensors.torch.save_file."
        ) from error
    for _ in range(len(NESTED)):
        inside = [loaded[key] for key in NESTED if isinstance(loaded, Mapping) and isinstance(loaded.get(key), Mapping)]
        loaded = inside[0] if inside else loaded
    if not isinstance(loaded, Mapping) or not loaded or not all(isinstance(t, Tensor) for t in loaded.values()):
        raise SdrsegError(f"{file}: contains no named tensors. Save only the network's state_dict in it.")
    return _plain(loaded), {}


def _plain(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors without the prefixes of wrappers, with smp's names replaced by ours."""
    plain = dict(tensors)
    while plain and (found := [p for p in PREFIXES if all(name.startswith(p) for name in plain)]):
        plain = {name.removeprefix(found[0]): tensor for name, tensor in plain.items()}
    return {re.sub(SMP_CLASSIFIER, "classifier.", name): tensor for name, tensor in plain.items()}


def _shape(tensor: Tensor) -> str:
    return "×".join(map(str, tensor.shape)) or "one number"


def some(names: Sequence[str]) -> str:
    """The first names of a list."""
    return ", ".join(names[:3]) + (", …" if len(names) > 3 else "")
