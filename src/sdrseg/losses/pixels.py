"""What all losses share: precision, void, padding, the feature grid, and means from sums."""

from __future__ import annotations

import torch
from torch import Tensor

VOID = 255


def at_least_float32(x: Tensor) -> Tensor:
    """Half precision becomes float32; float32 and float64 stay what they are."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def widest(x: Tensor) -> Tensor:
    """float64, where the device has it."""
    return x if x.device.type == "mps" else x.double()


def mean(sums: Tensor) -> Tensor:
    """From (2,) [total, count] to the mean; nothing counted gives 0, still attached to the graph."""
    return sums[0] / sums[1].clamp_min(1)


def masked_sums(values: Tensor, keep: Tensor) -> Tensor:
    """(2,) [Σ values where keep, number kept]."""
    return torch.stack([torch.where(keep, values, 0).sum(), keep.sum().to(values.dtype)])


def to_grid(x: Tensor, size: tuple[int, int]) -> Tensor:
    """(…, H, W) brought to (…, h, w) by floor-nearest, x[floor(i·H/h), floor(j·W/w)]: the paper's y*."""
    (height, width), (h, w) = x.shape[-2:], size
    if height % h == 0 and width % w == 0:
        return x[..., :: height // h, :: width // w]
    rows = torch.arange(h, device=x.device) * height // h
    columns = torch.arange(w, device=x.device) * width // w
    return x[..., rows[:, None], columns]


def rows_of(features: Tensor) -> Tensor:
    """Features (B, C, h, w) as one vector per position, (B, h·w, C), without copying."""
    return features.flatten(2).transpose(1, 2)
