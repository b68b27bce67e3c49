"""Tensors on disk: safetensors, written atomically and checked by hash when they are read. No pickle."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load as unpack
from safetensors.torch import save as pack
from torch import Tensor, nn

from sdrseg.errors import SdrsegError
from sdrseg.files import atomic_writer, plain_name


class Memory(Protocol):
    """The state of a method."""

    def state_dict(self) -> dict[str, Tensor]: ...

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None: ...


def save_tensors(file: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> str:
    """Write tensors by name; returns the file's SHA-256."""
    plain = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    content = pack(plain, dict(metadata or {}) if plain else None)  # safetensors writes no metadata without tensors
    with atomic_writer(file) as out:
        out.write(content)
    return hashlib.sha256(content).hexdigest()


def load_tensors(file: Path, sha256: str | None = None, remedy: str = "Restore it from a copy.") -> dict[str, Tensor]:
    """Read tensors by name; the error for a missing, truncated or foreign file names it and a remedy."""
    try:
        content = file.read_bytes()
    except PermissionError as error:
        raise SdrsegError(f"{file}: cannot be read ({error.strerror}). Change its permissions.") from error
    except OSError as error:
        raise SdrsegError(f"{file}: cannot be read ({error.strerror}). {remedy}") from error
    if sha256 is not None and (found := hashlib.sha256(content).hexdigest()) != sha256:
        raise SdrsegError(
            f"{file}: not the file that was written (SHA-256 {found[:12]}…, {len(content)} bytes, not {sha256[:12]}…): "
            f"truncated, changed or of another run. {remedy}"
        )
    try:
        return unpack(content)
    except SafetensorError as error:
        raise SdrsegError(f"{file}: not a safetensors file ({error}). {remedy}") from error


def load_entry(origin: Path, entry: Any, remedy: str) -> dict[str, Tensor]:
    """Read the tensors of a file next to `origin`, a JSON file that names it: {"file": NAME, "sha256": DIGEST}."""
    if not (isinstance(entry, dict) and isinstance(entry.get("sha256"), str)):
        raise SdrsegError(f"{origin}: {entry!r} is not a file with its SHA-256. {remedy}")
    return load_tensors(origin.parent / plain_name(entry.get("file"), origin), entry["sha256"], remedy)


def optimiser_tensors(optimiser: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The state of an optimiser (momentum buffers), by parameter number and name."""
    state: dict[int, dict[str, Any]] = optimiser.state_dict()["state"]
    return {
        f"{number}.{name}": value
        for number, values in state.items()
        for name, value in values.items()
        if isinstance(value, Tensor)
    }


def load_optimiser(optimiser: torch.optim.Optimizer, tensors: Mapping[str, Tensor]) -> None:
    """Give each tensor the memory layout of its parameter, which fused optimisers require."""
    whole = optimiser.state_dict()
    parameters = [parameter for group in optimiser.param_groups for parameter in group["params"]]
    state: dict[int, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        number, name = key.split(".", 1)
        like = torch.empty_like(parameters[int(number)], dtype=tensor.dtype)
        state.setdefault(int(number), {})[name] = like.copy_(tensor) if like.shape == tensor.shape else tensor
    optimiser.load_state_dict({"state": state, "param_groups": whole["param_groups"]})


def training_tensors(network: nn.Module, optimiser: torch.optim.Optimizer, method: Memory) -> dict[str, Tensor]:
    """All tensors of the training state within a step, with a prefix for each part."""
    parts = {"model": network.state_dict(), "optimiser": optimiser_tensors(optimiser)}
    parts |= {"method": method.state_dict(), "random": random_state()}
    return {name: tensor for part, named in parts.items() for name, tensor in with_prefix(part, named).items()}


def load_models(tensors: Mapping[str, Tensor], network: nn.Module, method: Memory, device: torch.device) -> None:
    """Restore network and method from what `training_tensors` returned. Before the optimiser is made, because a method
    may have parameters of its own, and make them anew."""
    network.load_state_dict(under_prefix("model", tensors))
    method.load_state_dict({n: t.to(device) for n, t in under_prefix("method", tensors).items()})


def load_training(tensors: Mapping[str, Tensor], optimiser: torch.optim.Optimizer) -> None:
    """Restore the rest of what `training_tensors` returned, last of all."""
    load_optimiser(optimiser, under_prefix("optimiser", tensors))
    load_random_state(under_prefix("random", tensors))


def seed_all(seed: int) -> None:
    """Seed torch, and NumPy and Python for the code of custom methods; ours does not use their global generators."""
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002 - the global one is meant
    random.seed(seed)


def random_state() -> dict[str, Tensor]:
    """The random states of torch, on the CPU and the current GPU, of NumPy and of Python."""
    kind, keys, *rest = np.random.get_state()  # noqa: NPY002
    others = {"numpy": [kind, np.asarray(keys).tolist(), *rest], "python": random.getstate()}
    texts = {name: torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8) for name, state in others.items()}
    return {"cpu": torch.get_rng_state(), **{name: gpu.get_rng_state() for name, gpu in _gpus().items()}, **texts}


def load_random_state(states: Mapping[str, Tensor]) -> None:
    torch.set_rng_state(states["cpu"])
    for name, gpu in _gpus().items():
        if name in states:
            gpu.set_rng_state(states[name])
    if {"numpy", "python"} <= states.keys():
        kind, keys, *rest = json.loads(bytes(states["numpy"].tolist()))
        np.random.set_state((kind, np.array(keys, np.uint32), *rest))  # noqa: NPY002
        version, internal, gauss = json.loads(bytes(states["python"].tolist()))
        random.setstate((version, tuple(internal), gauss))


def _gpus() -> dict[str, Any]:
    backends = {"cuda": (torch.cuda, torch.cuda.is_available()), "mps": (torch.mps, torch.backends.mps.is_available())}
    return {name: module for name, (module, available) in backends.items() if available}


def with_prefix(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {f"{prefix}/{name}": tensor for name, tensor in tensors.items()}


def under_prefix(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    start = f"{prefix}/"
    return {name.removeprefix(start): tensor for name, tensor in tensors.items() if name.startswith(start)}
