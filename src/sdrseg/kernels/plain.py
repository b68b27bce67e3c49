"""What the plain versions of kernels share with the losses: precision, the layout of features, losses of pixels."""

from __future__ import annotations

import torch
from torch import Tensor

from sdrseg.labels import VOID


def at_least_float32(x: Tensor) -> Tensor:
    """Half precision becomes float32; float32 and float64 stay unchanged."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def rows_of(features: Tensor) -> Tensor:
    """Features (B, C, h, w) as one vector per position, (B, h·w, C), without copying."""
    return features.flatten(2).transpose(1, 2)


def cross_entropy(z: Tensor, labels: Tensor, hidden: int) -> Tensor:
    """(B, H, W): logsumexp z − z_y, where background stands for `hidden` channels; 0 for void."""
    valid = labels != VOID
    label = torch.where(valid, labels, 0).long()
    background = z[:, 0] if hidden == 1 else z[:, :hidden].logsumexp(1)
    own_logit = torch.where(label < hidden, background, logit_of(z, label))
    return torch.where(valid, z.logsumexp(1) - own_logit, 0)


def unbiased_distillation(z: Tensor, t: Tensor, alpha: float = 1.0) -> Tensor:
    """(B, H, W): the cross-entropy of softmax(α t), whose background stands for background and all new channels."""
    n_old = t.shape[1]
    p = (alpha * t).softmax(1)
    background = torch.logaddexp(z[:, 0], z[:, n_old:].logsumexp(1))
    agreement = p[:, 0] * background + (p[:, 1:] * z[:, 1:n_old]).sum(1)
    return z.logsumexp(1) - agreement


def logit_of(z: Tensor, label: Tensor) -> Tensor:
    """The logit of each pixel's own label. Compiled, the backward of a gather needs another buffer as large as z."""
    if torch.compiler.is_compiling():
        channel = torch.arange(z.shape[1], device=z.device)[:, None, None]
        return torch.where(channel == label[:, None], z, 0).sum(1)
    return z.gather(1, label[:, None])[:, 0]
