"""`sdrseg weights`: lists ImageNet weights on this machine, fetches others by name, and writes them to a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from huggingface_hub import constants, try_to_load_from_cache

from sdrseg.compat import ENCODERS
from sdrseg.config import config_from
from sdrseg.engine.checkpoint import save_tensors
from sdrseg.errors import SdrsegError, UsageError
from sdrseg.network import build_network
from sdrseg.terminal import console, print_json, print_table
from sdrseg.weights import load_weights

FILE = "model.safetensors"
ADVICE = (
    "Without internet access: run `sdrseg weights ENCODER --out FILE.safetensors` on a machine with access, copy the "
    "file here, and train with --weights FILE.safetensors, or with --weights none from random weights. Files of "
    "torchvision or timm work too (.pth or .safetensors)."
)


class Cached(NamedTuple):
    """Weights on this machine."""

    encoder: str
    megabytes: float
    file: str


def cached_weights(folder: Path | None = None) -> list[Cached]:
    """The encoders of segmentation_models_pytorch whose ImageNet weights were fetched before."""
    found = []
    for name, encoder in sorted(ENCODERS.items()):
        source = encoder["pretrained_settings"].get("imagenet", {})
        if "repo_id" not in source:
            continue
        cache = folder or constants.HF_HUB_CACHE
        file = try_to_load_from_cache(source["repo_id"], FILE, cache_dir=cache, revision=source.get("revision"))
        if isinstance(file, str):
            found.append(Cached(name, Path(file).stat().st_size / 1e6, file))
    return found


def fetch_weights(encoder: str, out: Path | None) -> str:
    """Get the ImageNet weights of an encoder, from the cache or the internet; write them to a file if one is named."""
    if out is not None:
        if out.suffix != ".safetensors":
            raise UsageError(f"--out {out}: use a name that ends in .safetensors.")
        if out.exists():
            raise SdrsegError(f"{out} exists. Choose another name.")
    net = config_from({"net": {"encoder": encoder}}, "sdrseg weights").net
    network = build_network(net, 2)
    try:
        sentence = load_weights(network, "imagenet", net)
    except SdrsegError as error:
        raise type(error)(f"{str(error).partition(' Set net.weights')[0]} {ADVICE}") from error
    if out is None:
        return f"{sentence} They are in {constants.HF_HUB_CACHE}, where `sdrseg train` finds them."
    save_tensors(out, network.encoder.state_dict(), {"encoder": encoder, "stride": "v1.5"})
    return f"{sentence} Written to {out}: train with --encoder {encoder} --weights {out}"


def show_weights(encoder: str | None, out: Path | None, json: bool) -> None:
    """Fetch the weights of an encoder, or list those on this machine and explain how to get others."""
    if encoder is not None:
        message = fetch_weights(encoder, out)
        if json:
            print_json({"encoder": encoder, "file": None if out is None else str(out), "message": message})
        else:
            console().print(message, soft_wrap=True)
        return
    if out is not None:
        raise UsageError(f"--out {out}: also name the encoder, as in `sdrseg weights resnet18 --out {out}`.")
    cached = cached_weights()
    facts: dict[str, Any] = {"folder": str(constants.HF_HUB_CACHE), "cached": [c._asdict() for c in cached]}
    if json:
        print_json(facts)
        return
    rows = [[c.encoder, f"{c.megabytes:.0f}", c.file] for c in cached]
    if rows:
        print_table(f"ImageNet weights in {constants.HF_HUB_CACHE}", ["encoder", "MB", "file"], rows)
    else:
        console().print(f"There are no ImageNet weights in {constants.HF_HUB_CACHE} yet.", soft_wrap=True)
    console().print(f"Fetch some with `sdrseg weights ENCODER`. {ADVICE}", soft_wrap=True)
