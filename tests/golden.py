"""Section 6 of docs/specification.md: its table of values, and its inputs by plain integer arithmetic in float64."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from torch import Tensor

B, C, H, W, N_OLD, K = 2, 6, 16, 16, 3, 5


def _fill(shape: tuple[int, ...], value) -> Tensor:
    index = torch.meshgrid(*[torch.arange(n) for n in shape], indexing="ij")
    return value(*index)


FEATURES = _fill(
    (B, C, 4, 4),
    lambda b, c, i, j: (
        ((5 * b + 3 * c + 2 * i + 7 * j + c * i) % 13).double() / 13 * (1 + 0.07 * ((4 * i + j + 3 * b) % 7).double())
    ),
)
LOGITS = _fill((B, K, H, W), lambda b, c, y, x: ((3 * b + 2 * c + y + 2 * x + c * y * x) % 7).double() / 3 - 1)
TEACHER = _fill((B, N_OLD, H, W), lambda b, c, y, x: ((2 * b + 4 * c + 3 * y + x + c * y) % 10).double() / 4 - 1)
LABELS = _fill((B, H, W), lambda b, y, x: torch.tensor([0, 3, 4])[(y // 4 + x // 4 + b) % 3]).to(torch.uint8)
LABELS_VOID = LABELS.clone()
LABELS_VOID[0, 0, 0:2] = 255
PROTOTYPES = _fill((K, C), lambda k, c: ((4 * k + 3 * c) % 10).double() / 10)
GRID = LABELS[:, ::4, ::4]


def _values() -> dict[str, float]:
    page = (Path(__file__).parent.parent / "docs" / "specification.md").read_text(encoding="utf-8")
    table = page.split("<!-- begin: golden values -->")[1].split("<!-- end: golden values -->")[0]
    rows = re.findall(r"^\| (.+) \| ([\d.]+) \|$", table, re.MULTILINE)
    assert len(rows) == len(dict(rows)) == table.count("\n") - 3, "a row twice, or not `| quantity | value |`"
    return {quantity: float(value) for quantity, value in rows}


VALUES = _values()
