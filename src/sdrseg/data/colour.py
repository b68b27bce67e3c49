"""Colour augmentation: brightness, contrast and saturation of each image by factors of its own."""

from __future__ import annotations

import random

import torch
from torch import Tensor

GREY = (0.299, 0.587, 0.114)  # of red, green and blue, as Pillow converts to grey


def colour_factors(seed: int, epoch: int, id: str, strength: float) -> tuple[float, float, float]:
    """Of brightness, contrast and saturation: they follow from seed, epoch and id alone."""
    draw = random.Random(f"colour {seed} {epoch} {id}")
    return tuple(1 + strength * (2 * draw.random() - 1) for _ in range(3))  # type: ignore[return-value]


def recolour(images: Tensor, outside: Tensor, factors: Tensor) -> Tensor:
    """Images (B, 3, H, W) uint8 by factors (B, 3) of brightness, contrast and saturation; padding stays as it is.

    Saturation goes away from the grey of each pixel, contrast away from the mean grey of the image.
    """
    brightness, contrast, saturation = factors.to(images.device, torch.float32).T[..., None, None, None]
    x = images.float()
    grey = sum(weight * x[:, channel : channel + 1] for channel, weight in enumerate(GREY))
    inside = ~outside[:, None]
    mean = (grey * inside).sum((2, 3), keepdim=True) / inside.sum((2, 3), keepdim=True).clamp_min(1)
    x = grey + saturation * (x - grey)
    x = brightness * (mean + contrast * (x - mean))
    return torch.where(inside, x.round_().clamp_(0, 255).to(torch.uint8), images)
