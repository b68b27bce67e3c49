"""The three presets: what they set for every method. Changes for a single method are declared in that method.

default   the paper's equations, the official code's bugs fixed, scales such that the published λ keep their meaning
paper     the equations exactly as printed, to study them
official  what the official code computes, including its bugs
"""

from __future__ import annotations

from sdrseg.methods.base import From

OFFICIAL_NORM = {
    "net.bn_momentum_encoder": From(3e-4, "official code: batch norm of the encoder"),
    "net.bn_later": From("train", "official code: never frozen"),
    "optim.decoder_lr_factor": From(1.0, "official code: one learning rate for all"),
    "optim.decoder_lr_factor_later": From(1.0, "official code: one learning rate for all"),
}

OWN_DATA = {
    "kd.normaliser": From("at_least_16", "stability with few old classes (benchmarks/stability.py)"),
    "optim.clip": From(25.0, "stability from random weights (benchmarks/stability.py)"),
}
"""What the preset `default` adds for data other than VOC, ADE20K and generated scenes, because weights and learning
rates are not tuned for them."""

PRESETS: dict[str, dict[str, From]] = {
    "default": {},
    "paper": {
        **OFFICIAL_NORM,
        "optim.lr": From(1e-2, "paper: section 5"),
        "optim.lr_later": From(1e-3, "paper: section 5"),
        "optim.nesterov": From(False, "paper: SGD with momentum; Nesterov is not mentioned"),
    },
    "official": {
        **OFFICIAL_NORM,
        "net.decoder": From("official", "official code: DeepLab v3 decoder, which the authors call the one to use"),
        "net.decoder_activation": From("none", "official code: no non-linearity in the decoder"),
        "data.augment": From("rrc", "official code: RandomResizedCrop by area"),
        "data.void_train": From("background", "official code: void becomes background in the masked protocols"),
        "ce.reduction": From("all", "official code: mean over all pixels"),
        "kd.padding": From("include", "official code: its crops never pad"),
        "proto.average": From("pixel", "official code: cumulative mean over pixels"),
        "cl.normaliser": From("pairs", "official code: mean over ordered pairs"),
        "cl.background": From("include", "official code: every class in y*, with or without a prototype"),
        "sp.scope": From("batch", "official code: class maximum over the batch"),
        "latent.official": From(True, "official code: prototypes and terms on the features with its bugs"),
        "train.seed": From(42, "official code"),
    },
}
