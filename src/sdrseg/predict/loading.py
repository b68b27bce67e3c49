"""A model from a run, a step of it, or an ONNX file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from sdrseg.config import saved_config
from sdrseg.datasets.augment import normalise
from sdrseg.engine.folder import read_meta
from sdrseg.engine.launch import best_device
from sdrseg.engine.saved import find_step, open_step, step_config, unfinished_note
from sdrseg.errors import SdrsegError, first_line
from sdrseg.network import Network
from sdrseg.predict.model import Model
from sdrseg.predict.prediction import class_infos
from sdrseg.threads import adapt


def load(path: str | Path, step: int | None = None, device: str | torch.device | None = None) -> Model:
    """A model from a run (its last finished step, or `step`), from a step of it (RUN/steps/2), or from an ONNX file.

    `device`: such as "cpu" or "cuda:0"; by default a GPU if there is one.
    """
    path = Path(path)
    adapt(at_once=True)
    if path.is_file():
        from sdrseg.predict.onnx_file import load_onnx

        if path.suffix.lower() != ".onnx":
            raise SdrsegError(f"{path}: not a model. Name the folder of a run, a step of it, or an .onnx file.")
        if step is not None:
            raise SdrsegError(f"{path}: an exported file contains one step. Leave out step {step}.")
        return load_onnx(path, device)
    folder, run = find_step(path, step)
    meta = read_meta(folder)
    # a step without its run only has the settings of the network, and defaults
    config = saved_config({"net": meta["net"]}, str(folder / "meta.json")) if run is None else step_config(folder, run)
    target = find_device(device)
    network, decision = open_step(folder, config.net)
    network.eval().requires_grad_(False).place_on(target)
    return Model(
        class_infos(meta["classes"]),
        _forward(network, target, config.run.precision),
        multiple=network.multiple,
        crop=config.data.crop,
        batch_size=config.eval.batch_size,
        facts={key: meta.get(key) for key in ("spec", "step", "method", "protocol", "net")}
        | {"model_sha256": meta["files"]["model"]["sha256"], "path": str(folder)}
        | {"note": unfinished_note(path, step)},
        decision=decision,
        device=target,
        network=network,
    )


def find_device(name: str | torch.device | None) -> torch.device:
    """The device with this name, by default the best available one."""
    if name is None:
        return best_device()
    try:
        device = torch.device(name)
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise SdrsegError(f"device {name}: cannot be used ({first_line(error)}). Try cpu, cuda or cuda:0.") from error
    return device


def _forward(network: Network, device: torch.device, precision: str) -> Callable[[Tensor], Tensor]:
    """uint8 tiles to float32 logits, computed in the precision of the evaluation."""
    low = precision == "bf16" or (precision == "auto" and device.type == "cuda" and torch.cuda.is_bf16_supported())

    def forward(tiles: Tensor) -> Tensor:
        adapt()
        images = tiles.to(device, memory_format=torch.channels_last)
        with torch.autocast(device.type, torch.bfloat16, enabled=low):
            logits: Tensor = network(normalise(images)).logits
        return logits.float()

    return forward
