"""The three presets: what they set for every method. What they change in one method stands with that method.

default   the paper's equations, the release's bugs fixed, scales such that the published λ keep their meaning
paper     the equations exactly as printed, for study
official  what the released code really computes, bugs included
"""

from __future__ import annotations

from sdrseg.methods.base import From

RELEASED_NORM = {
    "net.bn_momentum_body": From(3e-4, "release: batch norm of the body"),
    "net.bn_later": From("train", "release: never frozen"),
    "optim.head_lr_factor": From(1.0, "release: one learning rate for all"),
    "optim.head_lr_factor_later": From(1.0, "release: one learning rate for all"),
}

PRESETS: dict[str, dict[str, From]] = {
    "default": {},
    "paper": {
        **RELEASED_NORM,
        "optim.lr": From(1e-2, "paper: section 5"),
        "optim.lr_later": From(1e-3, "paper: section 5"),
        "optim.nesterov": From(False, "paper: SGD with momentum, no word of Nesterov"),
    },
    "official": {
        **RELEASED_NORM,
        "net.decoder": From("official", "release: DeepLab v3 head, which the authors call the one to use"),
        "net.head_activation": From("none", "release: no non-linearity in the head"),
        "data.augment": From("rrc", "release: RandomResizedCrop by area"),
        "data.void_train": From("background", "release: void becomes background in the masked protocols"),
        "ce.reduction": From("all", "release: mean over all pixels"),
        "kd.padding": From("include", "release: its crops never pad"),
        "proto.average": From("pixel", "release: cumulative mean over pixels"),
        "cl.normaliser": From("pairs", "release: mean over ordered pairs"),
        "cl.background": From("include", "release: every class in y*, with or without a prototype"),
        "sp.scope": From("batch", "release: class maximum over the batch"),
        "latent.official": From(True, "release: prototypes and terms on the features with its bugs"),
        "train.seed": From(42, "release"),
    },
}
