"""LwF, Learning without Forgetting (Li and Hoiem 2016), for segmentation."""

from __future__ import annotations

from sdrseg.methods.base import From, Method


class LwF(Method):
    name = "lwf"
    summary = "Learning without Forgetting: distil the old classes' softmax"
    switches = {
        "kd.kind": From("standard", "paper: L'_kd"),
        "kd.weight": From(100.0, "official code: method preset"),
    }
