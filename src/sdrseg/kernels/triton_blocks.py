"""Blocks of channels-last maps for Triton programs: a row holds the channels of one pixel or position."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl


def _block(rows, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The rows of this program, and a mask of those that exist."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    return row.to(tl.int64), row < rows


def _offsets(start, exists, channel, last):  # type: ignore[no-untyped-def]
    """The offsets of channels in rows that begin at `start`, and a mask of those that exist."""
    return start[:, None] + channel[None, :], exists[:, None] & (channel < last)[None, :]


block: Any = triton.jit(_block)
offsets: Any = triton.jit(_offsets)
