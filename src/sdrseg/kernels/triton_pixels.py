"""Cross-entropy and unbiased distillation of each pixel, and their gradients, from logits that are channels last.

A program takes some pixels with all their channels, so every logit is read once. What is summed up over a block of
pixels is added up afterwards, always in the same order.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

VOID: tl.constexpr = tl.constexpr(255)
NEVER: tl.constexpr = tl.constexpr(float("-inf"))


def _block(pixels, ROWS: tl.constexpr, WIDE: tl.constexpr):  # type: ignore[no-untyped-def]
    """The pixels of a program, which of them there are, and channels."""
    pixel = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    return pixel, pixel < pixels, tl.arange(0, WIDE)


def _tile(source, pixel, known, channel, channels):  # type: ignore[no-untyped-def]
    """Logits (pixels, channels) in float32; −∞ where there is none."""
    place = source + pixel[:, None].to(tl.int64) * channels + channel[None, :]
    return tl.load(place, mask=known[:, None] & (channel < channels)[None, :], other=NEVER)


def _put(result, pixel, known, channel, channels, values):  # type: ignore[no-untyped-def]
    """The other way round."""
    place = result + pixel[:, None].to(tl.int64) * channels + channel[None, :]
    tl.store(place, values, mask=known[:, None] & (channel < channels)[None, :])


def _logsumexp(logits):  # type: ignore[no-untyped-def]
    top = tl.max(logits, 1)
    return top + tl.log(tl.sum(tl.exp(logits - top[:, None]), 1))


def _cross_entropy(  # type: ignore[no-untyped-def]
    logits,
    labels,
    upstream,
    result,
    pixels,
    channels,
    n_old,
    BACK: tl.constexpr,
    ROWS: tl.constexpr,
    WIDE: tl.constexpr,
):
    """The sum of a block or, on the way BACK, the gradient of its logits."""
    pixel, known, channel = block(pixels, ROWS, WIDE)
    z = tile(logits, pixel, known, channel, channels)
    label = tl.load(labels + pixel, mask=known, other=VOID).to(tl.int32)
    counted = known & (label != VOID)
    old = (channel < n_old)[None, :]
    all_of_them = logsumexp(z)
    background = logsumexp(tl.where(old, z, NEVER))
    mine = channel[None, :] == label[:, None]
    if BACK:
        target = tl.where(
            (label < n_old)[:, None], tl.where(old, tl.exp(z - background[:, None]), 0.0), mine.to(tl.float32)
        )
        gradient = tl.load(upstream) * (tl.exp(z - all_of_them[:, None]) - target)
        put(result, pixel, known, channel, channels, tl.where(counted[:, None], gradient, 0.0))
    else:
        own = tl.where(label < n_old, background, tl.sum(tl.where(mine, z, 0.0), 1))
        tl.store(result + tl.program_id(0), tl.sum(tl.where(counted, all_of_them - own, 0.0), 0))


def _distillation(  # type: ignore[no-untyped-def]
    logits,
    teacher,
    keep,
    upstream,
    result,
    pixels,
    channels,
    n_old,
    alpha,
    BACK: tl.constexpr,
    ROWS: tl.constexpr,
    WIDE: tl.constexpr,
):
    """The sum of a block or, on the way BACK, the gradient of the student's logits."""
    pixel, known, channel = block(pixels, ROWS, WIDE)
    z = tile(logits, pixel, known, channel, channels)
    t = tile(teacher, pixel, known, channel, n_old)
    t = tl.where((channel < n_old)[None, :], alpha * t, NEVER)
    counted = known & (tl.load(keep + pixel, mask=known, other=0) != 0)
    p = tl.exp(t - logsumexp(t)[:, None])
    first = (channel == 0)[None, :]
    behind = first | (channel >= n_old)[None, :]  # what the teacher may have called background
    p0 = tl.sum(tl.where(first, p, 0.0), 1)
    all_of_them = logsumexp(z)
    background = logsumexp(tl.where(behind, z, NEVER))
    if BACK:
        share = p0[:, None] * tl.exp(z - background[:, None])
        gradient = tl.load(upstream) * (tl.exp(z - all_of_them[:, None]) - tl.where(behind, share, p))
        put(result, pixel, known, channel, channels, tl.where(counted[:, None], gradient, 0.0))
    else:
        agreement = p0 * background + tl.sum(tl.where(behind, 0.0, p * z), 1)
        tl.store(result + tl.program_id(0), tl.sum(tl.where(counted, all_of_them - agreement, 0.0), 0))


block: Any = triton.jit(_block)
tile: Any = triton.jit(_tile)
put: Any = triton.jit(_put)
logsumexp: Any = triton.jit(_logsumexp)
cross_entropy: Any = triton.jit(_cross_entropy)
distillation: Any = triton.jit(_distillation)


def launch(kernel: Any, logits: Tensor, inputs: tuple[Tensor, ...], upstream: Tensor | None, *numbers: float) -> Tensor:
    """The sum over all pixels or, where there is a gradient of it, that of the logits."""
    images, channels, height, width = logits.shape
    pixels = images * height * width
    wide = triton.next_power_of_2(channels)
    rows = max(1, 4096 // wide)
    programs = triton.cdiv(pixels, rows)
    back = upstream is not None
    result = torch.empty_like(logits) if back else logits.new_empty(programs)
    with torch.cuda.device(logits.get_device()):  # not always the current one
        kernel[(programs,)](
            logits,
            *inputs,
            result if upstream is None else upstream,
            result,
            pixels,
            channels,
            *numbers,
            BACK=back,
            ROWS=rows,
            WIDE=wide,
            num_warps=8,
            enable_fp_fusion=True,
        )
    return result if back else result.sum()
