"""ILT, Incremental Learning Techniques for semantic segmentation (Michieli and Zanuttigh 2019)."""

from __future__ import annotations

from sdrseg.methods.base import From, Method


class ILT(Method):
    name = "ilt"
    summary = "ILT: distil the output and the encoder's features"
    switches = {
        "kd.kind": From("standard", "official code"),
        "kd.weight": From(100.0, "official code: method preset"),
        "enc.weight": From(100.0, "official code: method preset; the encoder is not frozen"),
    }
    by_preset = {
        "default": {"optim.clip_later": From(25.0, "stability: without it, step 1 of VOC 15-1 diverges in iteration 5")}
    }
