"""CIL, Class-Incremental Learning for semantic segmentation (Klingner et al. 2020).

The official SDR code computes something else under this name: the student's softmax in place of its logarithm, without
the minus sign, and its switch is never on. The published CIL rows are close to those of FT; do not use them as a
baseline. The preset `official` has that formula.
"""

from __future__ import annotations

from sdrseg.methods.base import From, Method


class CIL(Method):
    name = "cil"
    summary = "CIL: distil pixels without a new class, with more weight where the teacher is uncertain"
    switches = {
        "kd.kind": From("cil", "the method's own paper; its λ_GS and temperature are 1"),
        "kd.weight": From(1.0, "the method's own paper"),
    }
    by_preset = {
        "official": {"kd.kind": From("cil_official", "official code: as computed there, sign and logarithm missing")}
    }
