"""Which part of a map a program has, where channels are last: some rows, one for each pixel or position."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl


def _block(rows, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The rows of a program, and which of them there are."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    return row.to(tl.int64), row < rows


def _places(start, known, channel, last):  # type: ignore[no-untyped-def]
    """Where channels lie of rows that start there, and which of them there are."""
    return start[:, None] + channel[None, :], known[:, None] & (channel < last)[None, :]


block: Any = triton.jit(_block)
places: Any = triton.jit(_places)
