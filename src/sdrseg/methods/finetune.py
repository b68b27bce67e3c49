"""FT: plain fine-tuning, the lower bound. And offline: all classes at once, the upper bound."""

from __future__ import annotations

from sdrseg.methods.base import Method


class FineTune(Method):
    name = "ft"
    summary = "Fine-tuning: cross-entropy on the new labels, nothing against forgetting"


class Offline(FineTune):
    name = "offline"
    summary = "All classes and all images in one step: the bound to compare with (use the task `offline`)"
