"""Kernels for GPUs where libraries choose slow ones. Everything here has a plain version, which is used elsewhere.

`layers.py`: two layers of the network; `upsampling.py`: bilinear; `pixels.py`: two losses over all pixels; `rows.py`:
sums over the features; `views.py`: batches of a cache's images. All add in a fixed order, so the same run gives the
same bits. The kernels themselves are in the files triton_*.py, which are imported only where Triton is there.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch

from sdrseg.errors import first_line

_found: dict[tuple[str, torch.device], bool] = {}


def runs(what: str, device: torch.device, attempt: Callable[[torch.device], object]) -> bool:
    """Whether kernels run on a device. Code that is being compiled cannot try: it knows what was found before."""
    if (what, device) not in _found:
        if torch.compiler.is_compiling():
            return False
        _found[what, device] = device.type == "cuda" and _succeeds(what, device, attempt)
    return _found[what, device]


def _succeeds(what: str, device: torch.device, attempt: Callable[[torch.device], object]) -> bool:
    """Seen by running them: Triton may be missing, or its compiler, or the GPU be too old."""
    try:
        with torch.inference_mode(False), torch.enable_grad():
            attempt(device)
        return True
    except ImportError:
        return False
    except Exception as error:  # of whatever kind
        warnings.warn(f"{what} without a kernel of their own, which is slower: {first_line(error)}", stacklevel=3)
        return False
