"""An exported ONNX file as a model: onnxruntime runs it, and its metadata describes it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sdrseg.decision import read_decision
from sdrseg.errors import SdrsegError, first_line
from sdrseg.predict.model import Model
from sdrseg.predict.prediction import class_infos

PREFIX = "sdrseg."
"""Prefix of our metadata keys; every value is JSON."""
INSTALL = "pip install 'sdrseg[export]'"


def load_onnx(path: Path, device: str | torch.device | None = None) -> Model:
    """A model from a file that `sdrseg export` wrote."""
    session = open_session(path, device)
    stored = session.get_modelmeta().custom_metadata_map
    try:
        facts = {key.removeprefix(PREFIX): json.loads(v) for key, v in stored.items() if key.startswith(PREFIX)}
        return Model(
            class_infos(facts["classes"]),
            lambda tiles: run_session(session, tiles, path),
            multiple=facts["multiple"],
            crop=facts["crop"],
            batch_size=facts["batch_size"],
            facts={**facts, "path": str(path)},
            decision=read_decision(facts.get("decision", "softmax"), path),
        )
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise SdrsegError(
            f"{path}: an ONNX file without the metadata of `sdrseg export` ({error!r}). Export the model again."
        ) from error


def open_session(model: Path | bytes, device: str | torch.device | None = None) -> Any:
    """An onnxruntime session from a file or its content."""
    try:
        import onnxruntime
    except ImportError as error:
        raise SdrsegError(f"ONNX files need onnxruntime: {INSTALL}") from error
    name = "the exported network" if isinstance(model, bytes) else str(model)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4  # we raise errors with our own messages
    options.intra_op_num_threads = torch.get_num_threads()
    try:
        content = model if isinstance(model, bytes) else model.read_bytes()
        return onnxruntime.InferenceSession(content, options, providers=_providers(onnxruntime, device))
    except OSError as error:
        raise SdrsegError(f"{name}: cannot be read ({error.strerror}).") from error
    except SdrsegError:
        raise
    except Exception as error:  # onnxruntime has many error types without a common base
        raise SdrsegError(f"{name}: not a usable ONNX file ({first_line(error)}). Export it again.") from error


def run_session(session: Any, tiles: Tensor, name: Path | str) -> Tensor:
    """Logits of uint8 images (B, 3, H, W)."""
    try:
        (logits,) = session.run(["logits"], {"images": tiles.contiguous().numpy()})
    except Exception as error:
        shape = "×".join(map(str, tiles.shape))
        raise SdrsegError(f"{name}: fails on images of shape {shape} ({first_line(error)}).") from error
    return torch.from_numpy(logits)


def _providers(onnxruntime: Any, device: str | torch.device | None) -> list[Any]:
    available = onnxruntime.get_available_providers()
    chosen = None if device is None else torch.device(device)
    if chosen is not None and chosen.type == "cuda" and "CUDAExecutionProvider" not in available:
        raise SdrsegError(f"device {device}: this onnxruntime has no CUDA. Install onnxruntime-gpu, or use cpu.")
    if "CUDAExecutionProvider" in available and (chosen is None or chosen.type == "cuda"):
        number = 0 if chosen is None or chosen.index is None else chosen.index
        return [("CUDAExecutionProvider", {"device_id": number}), "CPUExecutionProvider"]
    return ["CPUExecutionProvider"]
