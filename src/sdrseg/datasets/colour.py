"""Colour augmentation: random factors for the brightness, contrast and saturation of each image."""

from __future__ import annotations

import random

import torch
from torch import Tensor

GREY = (0.299, 0.587, 0.114)  # weights of red, green and blue in Pillow's grey


def colour_factors(seed: int, epoch: int, id: str, strength: float) -> tuple[float, float, float]:
    """Factors for brightness, contrast and saturation; they depend only on seed, epoch and id."""
    draw = random.Random(f"colour {seed} {epoch} {id}")
    return tuple(1 + strength * (2 * draw.random() - 1) for _ in range(3))  # type: ignore[return-value]


def recolour(images: Tensor, outside: Tensor, factors: Tensor) -> Tensor:
    """Apply factors (B, 3) of brightness, contrast and saturation to images (B, 3, H, W) uint8; padding stays.

    Saturation scales the distance from the grey of each pixel, contrast that from the mean grey of the image.
    """
    brightness, contrast, saturation = factors.to(images.device, torch.float32).T[..., None, None, None]
    x = images.float()
    grey = sum(weight * x[:, channel : channel + 1] for channel, weight in enumerate(GREY))
    inside = ~outside[:, None]
    mean = (grey * inside).sum((2, 3), keepdim=True) / inside.sum((2, 3), keepdim=True).clamp_min(1)
    x = grey + saturation * (x - grey)
    x = brightness * (mean + contrast * (x - mean))
    return torch.where(inside, x.round_().clamp_(0, 255).to(torch.uint8), images)
