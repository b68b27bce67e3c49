"""Cross-entropy and unbiased distillation of each pixel, and their gradient, from logits that are channels last.

A program takes ROWS pixels, and goes over their channels in steps of LANES, in three groups: background, which is
channel 0; the other old classes, from 1 to before n_old; and the new ones. What is summed up over a block of pixels is
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


def _raise(top, total, z):  # type: ignore[no-untyped-def]
    """Take z into top = max z and total = Σ exp(z − top). Also what a sum from before has to be multiplied with."""
    higher = tl.maximum(top, z)
    before, e = tl.exp(top - higher), tl.exp(z - higher)
    return higher, total * before + e, before, e


def _over_lanes(top, total):  # type: ignore[no-untyped-def]
    """The same of all lanes together, and what each lane's sums have to be multiplied with for that."""
    highest = tl.max(top, 1)
    share = tl.exp(top - highest[:, None])
    return highest, tl.sum(total * share, 1), share


def _together(top, total, other_top, other_total):  # type: ignore[no-untyped-def]
    """The same of both of two groups."""
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
    BACK: tl.constexpr,
    DISTIL: tl.constexpr,
    ROWS: tl.constexpr,
    LANES: tl.constexpr,
):
    """Both sums of a block or, if BACK, the gradient of its logits. Without DISTIL it is cross-entropy only, and no
    teacher is read. `hidden`: the number of channels that background represents in the cross-entropy, 1 or n_old."""
    pixel, known = block(pixels, ROWS)
    start, start_t = pixel * channels, pixel * n_old
    lanes = tl.arange(0, LANES)
    nothing = tl.zeros((ROWS, LANES), tl.float32)
    low = nothing + LOW
    label = tl.load(labels + pixel, mask=known, other=VOID).to(tl.int32)
    counted, background = known & (label != VOID), label < hidden

    kept_top, kept, t_top, t_total, agreement = low, nothing, low, nothing, nothing
    for begin in range(1, n_old, LANES):
        place, there = places(start, known, begin + lanes, n_old)
        z = tl.load(logits + place, mask=there, other=LOW)
        kept_top, kept, _, _ = raised(kept_top, kept, z)
        if DISTIL:
            place_t, there = places(start_t, known, begin + lanes, n_old)
            t = tl.load(teacher + place_t, mask=there, other=LOW)
            t_top, t_total, before, e = raised(t_top, t_total, t)
            agreement = agreement * before + tl.where(there, e * z, 0.0)
    new_top, new = low, nothing
    for begin in range(n_old, channels, LANES):
        place, there = places(start, known, begin + lanes, channels)
        new_top, new, _, _ = raised(new_top, new, tl.load(logits + place, mask=there, other=LOW))

    z0 = tl.load(logits + start, mask=known, other=0.0)
    kept_top, kept, _ = over_lanes(kept_top, kept)
    new_top, new, _ = over_lanes(new_top, new)
    old_top, old = together(z0, 1.0, kept_top, kept)
    top, total = together(old_top, old, new_top, new)
    hidden_top, behind = tl.where(hidden == 1, z0, old_top), tl.where(hidden == 1, 1.0, old)
    if DISTIL:
        listened = known & (tl.load(keep + pixel, mask=known, other=0) != 0)
        t_top, t_total, share = over_lanes(t_top, t_total)
        t0 = tl.load(teacher + start_t, mask=known, other=0.0)
        highest = tl.maximum(t_top, t0)
        others = tl.exp(t_top - highest)
        t_total = t_total * others + tl.exp(t0 - highest)
        agreement, p0 = tl.sum(agreement * share, 1) * others / t_total, tl.exp(t0 - highest) / t_total
        maybe_top, maybe = together(z0, 1.0, new_top, new)  # what the teacher may have called background
    if BACK:
        up = tl.where(counted, tl.load(upstream), 0.0)
        both, of_0, of_new = up, 0.0, 0.0
        if DISTIL:
            up_t = tl.where(listened, tl.load(upstream + 1), 0.0)
            both = up + up_t
            of_0 = -up_t * p0 * tl.exp(z0 - maybe_top) / maybe
            of_new = -up_t * p0 * tl.exp(new_top - maybe_top) / maybe
            of_t = up_t / t_total
        guessed = tl.where(background, up, 0.0) / behind
        of_0 += both * tl.exp(z0 - top) / total - guessed * tl.exp(z0 - hidden_top)
        of_new += both * tl.exp(new_top - top) / total
        guessed = tl.where(hidden == 1, 0.0, guessed)
        of_kept = both * tl.exp(kept_top - top) / total - guessed * tl.exp(kept_top - old_top)
        own = tl.where(background, -1, label)
        tl.store(result + start, of_0, mask=known)
        for begin in range(1, n_old, LANES):
            place, there = places(start, known, begin + lanes, n_old)
            e = tl.exp(tl.load(logits + place, mask=there, other=LOW) - kept_top[:, None])
            is_own = (begin + lanes)[None, :] == own[:, None]
            gradient = of_kept[:, None] * e - tl.where(is_own, up[:, None], 0.0)
            if DISTIL:
                place_t, there = places(start_t, known, begin + lanes, n_old)
                p = tl.exp(tl.load(teacher + place_t, mask=there, other=LOW) - highest[:, None])
                gradient -= of_t[:, None] * p
            tl.store(result + place, gradient, mask=there)
        for begin in range(n_old, channels, LANES):
            place, there = places(start, known, begin + lanes, channels)
            e = tl.exp(tl.load(logits + place, mask=there, other=LOW) - new_top[:, None])
            is_own = (begin + lanes)[None, :] == own[:, None]
            gradient = of_new[:, None] * e - tl.where(is_own, up[:, None], 0.0)
            tl.store(result + place, gradient, mask=there)
    else:
        own = tl.load(logits + start + label, mask=counted & ~background & (label < channels), other=0.0)
        loss = top - tl.where(background, hidden_top, own) + tl.log(total / tl.where(background, behind, 1.0))
        tl.store(result + tl.program_id(0), tl.sum(tl.where(counted, loss, 0.0), 0))
        distilled = 0.0
        if DISTIL:
            said = agreement + p0 * (maybe_top + tl.log(maybe))
            distilled = tl.sum(tl.where(listened, top + tl.log(total) - said, 0.0), 0)
        tl.store(result + tl.num_programs(0) + tl.program_id(0), distilled)


raised: Any = triton.jit(_raise)
over_lanes: Any = triton.jit(_over_lanes)
together: Any = triton.jit(_together)
losses: Any = triton.jit(_losses)

WARPS = 4


def share_out(channels: int) -> dict[str, int]:
    """ROWS and LANES, the fastest of some on an H200: with few lanes neighbouring threads read what lies
    far apart in memory, with many they wait for each other."""
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
    """Both sums over all pixels or, where there is a gradient of them, that of the logits."""
    images, channels, height, width = logits.shape
    pixels = images * height * width
    shares = share_out(channels)
    programs = triton.cdiv(pixels, shares["ROWS"])
    back = upstream is not None
    result = torch.empty_like(logits) if back else logits.new_empty(2, programs)
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
            BACK=back,
            DISTIL=teacher is not None,
            **shares,
            num_warps=WARPS,
            enable_fp_fusion=True,
        )
    return result if back else result.sum(1)
