"""Settings of the engine: the optimiser, and options that do not change the result of a run."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Literal

from sdrseg.config.setting import setting

descent = partial(setting, iterating=True)


@dataclass(frozen=True)
class Optim:
    """The optimiser and its schedule, restarted in every step."""

    optimiser: Literal["sgd", "adamw"] = descent("sgd", "sgd, or adamw (which needs other learning rates)")
    lr: float = descent(1e-3, "learning rate of step 0", 0)
    lr_later: float = descent(1e-4, "learning rate of the later steps", 0, affects="later")
    decoder_lr_factor: float = descent(10.0, "learning-rate multiplier of decoder and classifier in step 0", 0)
    decoder_lr_factor_later: float = descent(10.0, "the same in later steps", 0, affects="later")
    encoder_lr_factor: float = descent(1.0, "learning-rate multiplier of the encoder in step 0; 0: it is frozen", 0)
    encoder_lr_factor_later: float = descent(1.0, "the same in later steps", 0, affects="later")
    momentum: float = descent(0.9, "momentum of SGD; 0: none", 0, 1)
    nesterov: bool = descent(True, "use Nesterov momentum")
    betas: tuple[float, float] = descent((0.9, 0.999), "betas of AdamW", 0, 0.999999)
    weight_decay: float = descent(1e-4, "weight decay of every parameter", 0)
    schedule: Literal["poly", "cosine", "constant"] = descent(
        "poly", "how the learning rate falls over the iterations of a step"
    )
    power: float = descent(0.9, "poly: the learning rate falls as (1 − iteration / iterations)^power", 0)
    warmup: int = descent(0, "iterations over which the learning rate rises linearly at the beginning of a step", 0)
    lr_rule: Literal["fixed", "linear"] = descent(
        "fixed", "linear: scale the learning rates by train.batch_size / reference_batch"
    )
    reference_batch: int = descent(8, "batch size for which the learning rates are given, for lr_rule = linear", 1)
    clip: float = descent(0.0, "maximum norm of the gradient; 0: no clipping", 0)
    clip_later: float = descent(-1.0, "the same in later steps; -1: as optim.clip", -1, affects="later", same=-1.0)


@dataclass(frozen=True)
class Run:
    """How a run is executed. These settings change the result by rounding at most, except `accumulate` (the terms on
    the features, and batch norm in step 0, are computed on each part) and skipped images."""

    accumulate: int = setting(1, "gradient accumulation: number of parts into which each batch is split", 1)
    precision: Literal["auto", "fp32", "bf16"] = setting("auto", "auto: bf16 on GPUs that support it, otherwise fp32")
    speed: Literal["auto", "plain", "graph", "compile", "trunk"] = setting(
        "auto",
        "plain; graph: forward and backward replayed as a CUDA graph, bit-identical to plain; compile: compiled, and "
        "replayed on a GPU, equal up to rounding; trunk: the same, but only encoder and decoder are compiled, once for "
        "all steps; auto: on one GPU graph, or compile in runs long enough to save time (docs/performance.md)",
        affects="nothing",
    )
    save_minutes: float = setting(5.0, "minutes between two saved states within a step", 0, affects="nothing")
    loggers: tuple[Literal["tensorboard", "wandb", "mlflow"], ...] = setting(
        ("tensorboard",),
        "experiment trackers besides log.jsonl: any of tensorboard, wandb, mlflow, or []; the latter two are extras",
        affects="nothing",
    )
    log_every: int = setting(20, "iterations between two lines of the log", 1, affects="nothing")
    on_divergence: Literal["stop", "lower"] = setting(
        "stop",
        "if a loss is not finite: stop, or return to the last good state (the second time to the beginning of the "
        "step) and continue with a third of the learning rate, at most four times",
        affects="nothing",
    )
    on_bad_image: Literal["stop", "skip"] = setting(
        "stop",
        "if a training image cannot be read: stop, or skip it; scored images, held-out ones too, are never skipped",
        affects="nothing",
    )
