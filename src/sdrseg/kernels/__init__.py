"""Kernels for GPUs where libraries choose slow ones.

Each module is a function or layer that anyone may call with any tensors on any device: it has a plain version inside
and decides which one runs. `layers.py`: two layers of the network; `upsampling.py`: bilinear; `pixels.py`: two losses
over all pixels; `rows.py`: sums over the features; `views.py`: batches of a cache's images. All sum in a fixed order,
so the same run gives the same bits. The kernels themselves are in the files triton_*.py, which are imported only where
Triton is installed.

`SDRSEG_KERNELS=0` in the environment switches all of them off; within `disabled()` all or some are off.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from sdrseg.errors import first_line

KERNELS = {
    "norm": "Frozen batch norm",
    "depthwise": "Depthwise convolutions",
    "upsampling": "Upsampling",
    "pixels": "Losses over pixels",
    "rows": "Sums over features",
    "views": "Views of cached images",
}
DEVICES = {"cuda"}
"""The types of devices on which kernels may run."""

_enabled = dict.fromkeys(KERNELS, os.environ.get("SDRSEG_KERNELS") != "0")
_found: dict[tuple[str, torch.device], bool] = {}


@contextmanager
def disabled(*names: str) -> Iterator[None]:
    """Disable these kernels, or all."""
    if unknown := set(names) - set(KERNELS):
        raise ValueError(f"no such kernels: {', '.join(sorted(unknown))}; there are {', '.join(KERNELS)}")
    before = dict(_enabled)
    _enabled.update(dict.fromkeys(names or KERNELS, False))
    try:
        yield
    finally:
        _enabled.update(before)


def enabled(name: str) -> bool:
    return _enabled[name]


def on_gpu(x: Tensor) -> bool:
    """Whether kernels may run on a device at all."""
    return x.device.type in DEVICES


def runs(name: str, device: torch.device, attempt: Callable[[torch.device], object]) -> bool:
    """Whether a kernel runs on a device. Code that is being compiled cannot try it and uses earlier results."""
    if not _enabled[name]:
        return False
    if (name, device) not in _found:
        if torch.compiler.is_compiling():
            return False
        _found[name, device] = device.type in DEVICES and _succeeds(name, device, attempt)
    return _found[name, device]


def prepare(device: torch.device) -> None:
    """Find out which kernels run on a device, before compiling code that calls them.

    That takes a launch, which is impossible while a compiler traces the code; compiled without an answer, depthwise
    convolutions and losses over pixels would be the plain ones.
    """
    from sdrseg.kernels import layers, pixels

    layers.runs_on(device)
    pixels.runs_on(device)


def _succeeds(name: str, device: torch.device, attempt: Callable[[torch.device], object]) -> bool:
    """Try the kernel: Triton or its compiler may be missing, or the GPU may be too old."""
    try:
        with torch.inference_mode(False), torch.enable_grad():
            attempt(device)
        return True
    except ImportError:
        return False
    except Exception as error:
        warnings.warn(f"{KERNELS[name]} run without our kernel, which is slower: {first_line(error)}", stacklevel=3)
        return False
