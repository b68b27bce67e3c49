"""Images of a cache, cropped, resized, padded and flipped for a batch on a GPU: one kernel, or a few large operations.

Both apply the antialiased bilinear filter to the rows and the columns of each view, with exactly torchvision's weights.
The source pixels of labels are arguments: datasets/augment.py computes them for all implementations.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sdrseg.kernels import on_gpu, runs

Numbers = tuple[int, ...]
"""A view as numbers: the position of the image's first pixel and the image's width; for rows, then for columns, the
first source pixel, the one after the last, the size they are resized to, and the offset; 1 if flipped, else 0."""


def show(
    words: Tensor, views: Sequence[Numbers], rows: Tensor, columns: Tensor, fill: tuple[int, ...], void: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Images (B, 3, height, width) uint8 channels-last, masks (B, height, width) uint8 and padding, bool.

    `words`: red, green, blue and label of each pixel, as one number; padding is `fill` and `void`. `rows` (B, height)
    and `columns` (B, width): the source pixel of each label before flipping, undefined for padding.
    """
    device = words.device
    numbers, rows, columns = (x.to(device, non_blocking=True) for x in (torch.tensor(views), rows, columns))
    if on_gpu(words) and runs("views", device, _attempt):
        from sdrseg.kernels.triton_views import launch

        return launch(words, numbers, rows, columns, fill, void)
    frame = max(view[3] for view in views), max(view[7] for view in views)
    return _plain(words, numbers, rows, columns, frame, fill, void)


def _attempt(device: torch.device) -> None:
    from sdrseg.kernels.triton_views import launch

    words = torch.zeros(4, dtype=torch.int32, device=device)
    indices = torch.zeros(1, 4, dtype=torch.int32, device=device)
    numbers = torch.tensor([(0, 2, 0, 2, 3, 0, 0, 2, 3, 0, 1)], device=device)
    launch(words, numbers, indices, indices, (0, 0, 0), 255)


def _plain(
    words: Tensor,
    numbers: Tensor,
    rows: Tensor,
    columns: Tensor,
    frame: tuple[int, int],
    fill: tuple[int, ...],
    void: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Images are gathered into frames that hold the largest, and resized as two batched matrix products."""
    frames = _gather(words, numbers[:, 0], numbers[:, 1], frame)
    flip = numbers[:, 10:] != 0
    weights_y, inside_y = _filter(numbers[:, 2:6], torch.zeros_like(flip), rows.shape[1], frame[0])
    weights_x, inside_x = _filter(numbers[:, 6:10], flip, columns.shape[1], frame[1])
    outside = ~(inside_y[:, :, None] & inside_x[:, None, :])
    with torch.autocast(words.device.type, enabled=False):  # half precision would be grey levels off
        resized = torch.einsum("bjx,byxc->byjc", weights_x, frames[..., :3].float())
        images = torch.einsum("biy,byjc->bijc", weights_y, resized).round().clamp(0, 255).to(torch.uint8)
    images = torch.where(outside[..., None], torch.tensor(fill, dtype=torch.uint8).to(words.device), images)
    columns = torch.where(flip, columns.flip(1), columns)
    sample = torch.arange(len(numbers), device=words.device)[:, None, None]
    masks = frames[sample, rows.long()[:, :, None], columns.long()[:, None, :], 3]
    return images.permute(0, 3, 1, 2), masks.masked_fill(outside, void), outside


def _gather(words: Tensor, starts: Tensor, widths: Tensor, frame: tuple[int, int]) -> Tensor:
    """(B, frame height, frame width, 4): each image in the top left corner of a frame; the rest is never read."""
    y = torch.arange(frame[0], device=words.device)[:, None]
    x = torch.arange(frame[1], device=words.device)[None, :]
    index = starts[:, None, None] + y * widths[:, None, None] + x
    return words[index.clamp_max(len(words) - 1)].view(torch.uint8).view(len(starts), *frame, 4)


def _filter(axes: Tensor, flip: Tensor, out: int, length: int) -> tuple[Tensor, Tensor]:
    """Of the same axis of every view: (B, out, length) the antialiased triangle filter, zero for padding, and (B, out)
    what is not padding. `axes` (B, 4): low, high, size, offset."""
    low, high, size, offset = axes[:, :, None].unbind(1)
    position = torch.arange(out, device=axes.device)[None]
    position = torch.where(flip, out - 1 - position, position) + offset
    inside = (position >= 0) & (position < size)
    ratio = (high - low).float() / size.float()
    centre = low + (position + 0.5) * ratio
    reach = ratio.clamp_min(1)
    source = torch.arange(length, device=axes.device)[None, None]
    weights = (1 - (source + 0.5 - centre[:, :, None]).abs() / reach[:, :, None]).clamp_min(0)
    weights = weights * ((source >= low[:, :, None]) & (source < high[:, :, None])) * inside[:, :, None]
    return weights / weights.sum(2, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny), inside
