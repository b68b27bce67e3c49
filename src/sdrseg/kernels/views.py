"""Images of a cache, cut, resized, padded and flipped for a batch: one kernel."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sdrseg.kernels import runs

Numbers = tuple[int, ...]
"""Of a view: the first word of its image and the length of the image's rows; of the view's rows and of its columns the
source's first pixel and the one after the last, the size they are resized to, and the offset; 1 if flipped, else 0."""


def runs_on(device: torch.device) -> bool:
    return runs("Views", device, _attempt)


def _attempt(device: torch.device) -> None:
    words = torch.zeros(4, dtype=torch.int32, device=device)
    show(words, [(0, 2, 0, 2, 3, 0, 0, 2, 3, 0, 1)], 4, 4, (0, 0, 0), 255)


def show(
    words: Tensor, numbers: Sequence[Numbers], height: int, width: int, fill: tuple[int, ...], void: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Images (B, 3, height, width) uint8 channels-last, masks (B, height, width) uint8 and padding, bool. `words`: red,
    green, blue and label of each pixel, as one number; padding is `fill` and `void`."""
    from sdrseg.kernels.triton_views import launch

    on_device = torch.tensor(numbers).to(words.device, non_blocking=True)
    return launch(words, on_device, height, width, fill, void)
