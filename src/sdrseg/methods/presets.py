"""The three presets: what they set for every method. What they change in one method stands with that method.

default   the paper's equations, the release's bugs fixed, scales such that the published λ keep their meaning
paper     the equations exactly as printed, for study
official  what the released code really computes, bugs included
"""

from __future__ import annotations

from sdrseg.methods.base import From

PRESETS: dict[str, dict[str, From]] = {
    "default": {},
    "paper": {},
    "official": {
        "data.augment": From("rrc", "release: RandomResizedCrop by area"),
        "data.void_train": From("background", "release: void becomes background in the masked protocols"),
        "ce.reduction": From("all", "release: mean over all pixels"),
        "kd.padding": From("include", "release: its crops never pad"),
    },
}
