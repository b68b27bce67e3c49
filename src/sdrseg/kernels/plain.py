"""What the plain versions of kernels share with the losses: precision, and the layout of features."""

from __future__ import annotations

import torch
from torch import Tensor


def at_least_float32(x: Tensor) -> Tensor:
    """Half precision becomes float32; float32 and float64 stay unchanged."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def rows_of(features: Tensor) -> Tensor:
    """Features (B, C, h, w) as one vector per position, (B, h·w, C), without copying."""
    return features.flatten(2).transpose(1, 2)
