"""Cross-entropy and unbiased distillation of each pixel, and their gradient, from logits that are channels last.

A program computes ROWS pixels and reads their channels LANES at a time, in three groups: background (channel 0), the
other old classes (1 to n_old − 1) and the new ones. The sums of all blocks are added afterwards in a fixed order.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sdrseg.kernels.triton_blocks import block, offsets

VOID: tl.constexpr = tl.constexpr(255)
LOW: tl.constexpr = tl.constexpr(-1e38)
"""Below all logits; not −∞, because −∞ − (−∞) is not a number."""


def _raise(top, total, z):  # type: ignore[no-untyped-def]
    """Update top = max z and total = Σ exp(z − top) with z; also the factor that rescales earlier sums, and exp."""
    higher = tl.maximum(top, z)
    before, e = tl.exp(top - higher), tl.exp(z - higher)
    return higher, total * before + e, before, e


def _over_lanes(top, total):  # type: ignore[no-untyped-def]
    """The same over all lanes, and the factor that rescales the sums of each lane."""
    highest = tl.max(top, 1)
    share = tl.exp(top - highest[:, None])
    return highest, tl.sum(total * share, 1), share


def _together(top, total, other_top, other_total):  # type: ignore[no-untyped-def]
    """The same over two groups."""
    highest = tl.maximum(top, other_top)
    return highest, total * tl.exp(top - highest) + other_total * tl.exp(other_top - highest)


def _losses(  # type: ignore[no-untyped-def]
    logits,
    teacher,
    labels,
    keep,
    upstream,
    result,
    pixels,
    channels,
    n_old,
    hidden,
    BACKWARD: tl.constexpr,
    DISTIL: tl.constexpr,
    ROWS: tl.constexpr,
    LANES: tl.constexpr,
):
    """Both sums of a block or, if BACKWARD, the gradient of its logits. Without DISTIL it is cross-entropy only, and no
    teacher is read. `hidden`: the number of channels that background represents in the cross-entropy, 1 or n_old."""
    pixel, exists = block(pixels, ROWS)
    start, start_t = pixel * channels, pixel * n_old
    lanes = tl.arange(0, LANES)
    zero = tl.zeros((ROWS, LANES), tl.float32)
    low = zero + LOW
    label = tl.load(labels + pixel, mask=exists, other=VOID).to(tl.int32)
    counted, background = exists & (label != VOID), label < hidden

    kept_top, kept, t_top, t_total, agreement = low, zero, low, zero, zero
    for begin in range(1, n_old, LANES):
        offset, valid = offsets(start, exists, begin + lanes, n_old)
        z = tl.load(logits + offset, mask=valid, other=LOW)
        kept_top, kept, _, _ = raised(kept_top, kept, z)
        if DISTIL:
            offset_t, valid = offsets(start_t, exists, begin + lanes, n_old)
            t = tl.load(teacher + offset_t, mask=valid, other=LOW)
            t_top, t_total, before, e = raised(t_top, t_total, t)
            agreement = agreement * before + tl.where(valid, e * z, 0.0)
    new_top, new = low, zero
    for begin in range(n_old, channels, LANES):
        offset, valid = offsets(start, exists, begin + lanes, channels)
        new_top, new, _, _ = raised(new_top, new, tl.load(logits + offset, mask=valid, other=LOW))

    z0 = tl.load(logits + start, mask=exists, other=0.0)
    kept_top, kept, _ = over_lanes(kept_top, kept)
    new_top, new, _ = over_lanes(new_top, new)
    old_top, old = together(z0, 1.0, kept_top, kept)
    top, total = together(old_top, old, new_top, new)
    hidden_top, hidden_total = tl.where(hidden == 1, z0, old_top), tl.where(hidden == 1, 1.0, old)
    if DISTIL:
        in_keep = exists & (tl.load(keep + pixel, mask=exists, other=0) != 0)
        t_top, t_total, share = over_lanes(t_top, t_total)
        t0 = tl.load(teacher + start_t, mask=exists, other=0.0)
        highest = tl.maximum(t_top, t0)
        rescale = tl.exp(t_top - highest)
        t_total = t_total * rescale + tl.exp(t0 - highest)
        agreement, p0 = tl.sum(agreement * share, 1) * rescale / t_total, tl.exp(t0 - highest) / t_total
        bg_top, bg_total = together(z0, 1.0, new_top, new)  # the classes that the teacher may have called background
    if BACKWARD:
        up = tl.where(counted, tl.load(upstream), 0.0)
        both, grad_0, grad_new = up, 0.0, 0.0
        if DISTIL:
            up_t = tl.where(in_keep, tl.load(upstream + 1), 0.0)
            both = up + up_t
            grad_0 = -up_t * p0 * tl.exp(z0 - bg_top) / bg_total
            grad_new = -up_t * p0 * tl.exp(new_top - bg_top) / bg_total
            grad_t = up_t / t_total
        grad_bg = tl.where(background, up, 0.0) / hidden_total
        grad_0 += both * tl.exp(z0 - top) / total - grad_bg * tl.exp(z0 - hidden_top)
        grad_new += both * tl.exp(new_top - top) / total
        grad_bg = tl.where(hidden == 1, 0.0, grad_bg)
        grad_kept = both * tl.exp(kept_top - top) / total - grad_bg * tl.exp(kept_top - old_top)
        own = tl.where(background, -1, label)
        tl.store(result + start, grad_0, mask=exists)
        for begin in range(1, n_old, LANES):
            offset, valid = offsets(start, exists, begin + lanes, n_old)
            e = tl.exp(tl.load(logits + offset, mask=valid, other=LOW) - kept_top[:, None])
            is_own = (begin + lanes)[None, :] == own[:, None]
            gradient = grad_kept[:, None] * e - tl.where(is_own, up[:, None], 0.0)
            if DISTIL:
                offset_t, valid = offsets(start_t, exists, begin + lanes, n_old)
                p = tl.exp(tl.load(teacher + offset_t, mask=valid, other=LOW) - highest[:, None])
                gradient -= grad_t[:, None] * p
            tl.store(result + offset, gradient, mask=valid)
        for begin in range(n_old, channels, LANES):
            offset, valid = offsets(start, exists, begin + lanes, channels)
            e = tl.exp(tl.load(logits + offset, mask=valid, other=LOW) - new_top[:, None])
            is_own = (begin + lanes)[None, :] == own[:, None]
            gradient = grad_new[:, None] * e - tl.where(is_own, up[:, None], 0.0)
            tl.store(result + offset, gradient, mask=valid)
    else:
        own = tl.load(logits + start + label, mask=counted & ~background & (label < channels), other=0.0)
        loss = top - tl.where(background, hidden_top, own) + tl.log(total / tl.where(background, hidden_total, 1.0))
        tl.store(result + tl.program_id(0), tl.sum(tl.where(counted, loss, 0.0), 0))
        distilled = 0.0
        if DISTIL:
            expected = agreement + p0 * (bg_top + tl.log(bg_total))
            distilled = tl.sum(tl.where(in_keep, top + tl.log(total) - expected, 0.0), 0)
        tl.store(result + tl.num_programs(0) + tl.program_id(0), distilled)


raised: Any = triton.jit(_raise)
over_lanes: Any = triton.jit(_over_lanes)
together: Any = triton.jit(_together)
losses: Any = triton.jit(_losses)

WARPS = 4


def block_shape(channels: int) -> dict[str, int]:
    """ROWS and LANES, the fastest of those measured on an H200: with few lanes neighbouring threads read addresses that
    are far apart, with many they wait for each other."""
    if channels <= 32:
        return {"ROWS": 128, "LANES": 4}
    return {"ROWS": 32, "LANES": 8} if channels <= 96 else {"ROWS": 16, "LANES": 16}


def launch(
    logits: Tensor,
    labels: Tensor,
    hidden: int,
    teacher: Tensor | None,
    keep: Tensor,
    upstream: Tensor | None = None,
) -> Tensor:
    """Both sums over all pixels or, given their gradient `upstream`, the gradient of the logits."""
    images, channels, height, width = logits.shape
    pixels = images * height * width
    shape = block_shape(channels)
    programs = triton.cdiv(pixels, shape["ROWS"])
    backward = upstream is not None
    result = torch.empty_like(logits) if backward else logits.new_empty(2, programs)
    with torch.cuda.device(logits.get_device()):  # not always the current one
        losses[(programs,)](
            logits,
            logits if teacher is None else teacher,
            labels,
            keep.view(torch.uint8),
            result if upstream is None else upstream,
            result,
            pixels,
            channels,
            hidden if teacher is None else teacher.shape[1],
            hidden,
            BACKWARD=backward,
            DISTIL=teacher is not None,
            **shape,
            num_warps=WARPS,
            enable_fp_fusion=True,
        )
    return result if backward else result.sum(1)
