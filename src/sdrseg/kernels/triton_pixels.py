"""Cross-entropy and unbiased distillation of each pixel, and their gradients, from logits that are channels last.

A program takes ROWS pixels, and goes over their channels in steps of LANES. What is summed up over a block of pixels is
added up afterwards, always in the same order.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sdrseg.kernels.triton_blocks import block, places

VOID: tl.constexpr = tl.constexpr(255)
LOW: tl.constexpr = tl.constexpr(-1e38)
"""Below all logits; not −∞, of which differences are no numbers."""


def _add_up(  # type: ignore[no-untyped-def]
    logits, start, known, first, last, factor, ROWS: tl.constexpr, LANES: tl.constexpr
):
    """Of each pixel's channels from `first` to before `last`: top = max factor · z, and Σ exp(factor · z − top)."""
    top = tl.full((ROWS, LANES), LOW, tl.float32)
    total = tl.zeros((ROWS, LANES), tl.float32)
    for begin in range(first, last, LANES):
        place, there = places(start, known, begin + tl.arange(0, LANES), last)
        z = factor * tl.load(logits + place, mask=there, other=LOW)
        higher = tl.maximum(top, z)
        total = total * tl.exp(top - higher) + tl.exp(z - higher)
        top = higher
    highest = tl.max(top, 1)
    return highest, tl.sum(total * tl.exp(top - highest[:, None]), 1)


def _together(top, total, other_top, other_total):  # type: ignore[no-untyped-def]
    """The same of both of two groups."""
    highest = tl.maximum(top, other_top)
    return highest, total * tl.exp(top - highest) + other_total * tl.exp(other_top - highest)


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
    LANES: tl.constexpr,
):
    """The sum of a block or, on the way BACK, the gradient of its logits."""
    pixel, known = block(pixels, ROWS)
    start = pixel * channels
    label = tl.load(labels + pixel, mask=known, other=VOID).to(tl.int32)
    counted, background = known & (label != VOID), label < n_old
    old_top, old = add_up(logits, start, known, 0, n_old, 1.0, ROWS, LANES)
    new_top, new = add_up(logits, start, known, n_old, channels, 1.0, ROWS, LANES)
    top, total = together(old_top, old, new_top, new)
    if BACK:
        up = tl.where(counted, tl.load(upstream), 0.0)
        of_old = up * (tl.exp(old_top - top) / total - tl.where(background, 1 / old, 0.0))
        of_new = up * tl.exp(new_top - top) / total
        for begin in range(0, n_old, LANES):
            place, there = places(start, known, begin + tl.arange(0, LANES), n_old)
            e = tl.exp(tl.load(logits + place, mask=there, other=LOW) - old_top[:, None])
            tl.store(result + place, of_old[:, None] * e, mask=there)
        for begin in range(n_old, channels, LANES):
            channel = begin + tl.arange(0, LANES)
            place, there = places(start, known, channel, channels)
            e = tl.exp(tl.load(logits + place, mask=there, other=LOW) - new_top[:, None])
            own = tl.where(channel[None, :] == label[:, None], up[:, None], 0.0)
            tl.store(result + place, of_new[:, None] * e - own, mask=there)
    else:
        own = tl.load(logits + start + label, mask=counted & ~background & (label < channels), other=0.0)
        loss = top - tl.where(background, old_top, own) + tl.log(total / tl.where(background, old, 1.0))
        tl.store(result + tl.program_id(0), tl.sum(tl.where(counted, loss, 0.0), 0))


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
    LANES: tl.constexpr,
):
    """The sum of a block or, on the way BACK, the gradient of the student's logits."""
    pixel, known = block(pixels, ROWS)
    start, start_t = pixel * channels, pixel * n_old
    counted = known & (tl.load(keep + pixel, mask=known, other=0) != 0)
    t_top, t_total = add_up(teacher, start_t, known, 0, n_old, alpha, ROWS, LANES)
    p0 = tl.exp(alpha * tl.load(teacher + start_t, mask=known, other=0.0) - t_top) / t_total
    z0 = tl.load(logits + start, mask=known, other=0.0)
    new_top, new = add_up(logits, start, known, n_old, channels, 1.0, ROWS, LANES)
    behind_top, behind = together(z0, 1.0, new_top, new)  # what the teacher may have called background
    kept_top, kept = add_up(logits, start, known, 1, n_old, 1.0, ROWS, LANES)
    top, total = together(behind_top, behind, kept_top, kept)
    if BACK:
        up = tl.where(counted, tl.load(upstream), 0.0)
        of_behind = up * (tl.exp(behind_top - top) / total - p0 / behind)
        of_kept, of_t = up * tl.exp(kept_top - top) / total, up / t_total
        tl.store(result + start, of_behind * tl.exp(z0 - behind_top), mask=known)
        for begin in range(n_old, channels, LANES):
            place, there = places(start, known, begin + tl.arange(0, LANES), channels)
            e = tl.exp(tl.load(logits + place, mask=there, other=LOW) - behind_top[:, None])
            tl.store(result + place, of_behind[:, None] * e, mask=there)
    agreement = tl.zeros((ROWS, LANES), tl.float32)
    for begin in range(1, n_old, LANES):
        channel = begin + tl.arange(0, LANES)
        place, there = places(start, known, channel, n_old)
        place_t, there = places(start_t, known, channel, n_old)
        z = tl.load(logits + place, mask=there, other=0.0)
        p = tl.exp(alpha * tl.load(teacher + place_t, mask=there, other=LOW) - t_top[:, None])
        if BACK:
            gradient = of_kept[:, None] * tl.exp(z - kept_top[:, None]) - of_t[:, None] * p
            tl.store(result + place, gradient, mask=there)
        else:
            agreement += p * z
    if not BACK:
        said = tl.sum(agreement, 1) / t_total + p0 * (behind_top + tl.log(behind))
        loss = tl.where(counted, top + tl.log(total) - said, 0.0)
        tl.store(result + tl.program_id(0), tl.sum(loss, 0))


add_up: Any = triton.jit(_add_up)
together: Any = triton.jit(_together)
cross_entropy: Any = triton.jit(_cross_entropy)
distillation: Any = triton.jit(_distillation)


def share_out(channels: int) -> dict[str, int]:
    """ROWS and LANES: up to 32 channels, every thread has a pixel of its own and goes through its channels one by one.
    Beyond that neighbours in memory would be too far from each other; there a warp has some pixels, a thread every 32nd
    channel."""
    return {"ROWS": 128, "LANES": 1} if channels <= 32 else {"ROWS": 16, "LANES": 32}


WARPS = 4


def launch(kernel: Any, logits: Tensor, inputs: tuple[Tensor, ...], upstream: Tensor | None, *numbers: float) -> Tensor:
    """The sum over all pixels or, where there is a gradient of it, that of the logits."""
    images, channels, height, width = logits.shape
    pixels = images * height * width
    shares = share_out(channels)
    programs = triton.cdiv(pixels, shares["ROWS"])
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
            **shares,
            num_warps=WARPS,
            enable_fp_fusion=True,
        )
    return result if back else result.sum()
