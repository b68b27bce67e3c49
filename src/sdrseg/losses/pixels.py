"""Shared by all losses: void, padding, the feature grid, and means from sums."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def widest(x: Tensor) -> Tensor:
    """float64 where the device supports it."""
    return x if x.device.type == "mps" else x.double()


def mean(sums: Tensor) -> Tensor:
    """From (2,) [total, count] to the mean; 0 if the count is 0, still attached to the graph."""
    return sums[0] / sums[1].clamp_min(1)


def masked_sums(values: Tensor, keep: Tensor) -> Tensor:
    """(2,) [Σ values where keep, number kept]."""
    return torch.stack([torch.where(keep, values, 0).sum(), keep.sum().to(values.dtype)])


def to_grid(x: Tensor, size: tuple[int, int], stride: int, outside: float) -> Tensor:
    """(…, H, W) at the cells (…, h, w) of the features: cell (i, j) begins at pixel (stride·i, stride·j).

    The network pads images at the bottom and right; cells that begin outside the image are `outside`.
    """
    cells = x[..., ::stride, ::stride]
    missing = (0, size[1] - cells.shape[-1], 0, size[0] - cells.shape[-2])
    return F.pad(cells, missing, value=outside) if any(missing) else cells
