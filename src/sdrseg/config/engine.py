"""How the engine trains: the optimiser and everything about a run that does not change its result."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from sdrseg.config.setting import setting


@dataclass(frozen=True)
class Optim:
    """The optimiser and its schedule, started afresh in every step."""

    optimiser: Literal["sgd", "adamw"] = setting("sgd", "sgd, or adamw (which needs learning rates of its own)")
    lr: float = setting(1e-3, "learning rate of step 0", 0)
    lr_later: float = setting(1e-4, "learning rate of the later steps", 0, affects="later")
    decoder_lr_factor: float = setting(10.0, "learning-rate multiplier of decoder and classifier in step 0", 0)
    decoder_lr_factor_later: float = setting(10.0, "that multiplier in later steps", 0, affects="later")
    momentum: float = setting(0.9, "of SGD; 0: none", 0, 1)
    nesterov: bool = setting(True, "Nesterov momentum, where there is momentum")
    betas: tuple[float, float] = setting((0.9, 0.999), "of AdamW", 0, 0.999999)
    weight_decay: float = setting(1e-4, "on every parameter", 0)
    schedule: Literal["poly", "cosine", "constant"] = setting(
        "poly", "how the learning rate falls over the iterations of a step"
    )
    power: float = setting(0.9, "poly: the learning rate falls as (1 − iteration / iterations)^power", 0)
    warmup: int = setting(0, "iterations over which the learning rate rises linearly at the beginning of a step", 0)
    lr_rule: Literal["fixed", "linear"] = setting(
        "fixed", "linear: scale the learning rates by train.batch_size / reference_batch"
    )
    reference_batch: int = setting(8, "the batch the learning rates belong to, for lr_rule = linear", 1)
    clip: float = setting(0.0, "largest norm of the gradient; 0: no clipping", 0)


@dataclass(frozen=True)
class Run:
    """How a run is carried out. What is learned changes by rounding at most, but for `accumulate` (the terms on the
    features, and batch norm in step 0, see each part by itself) and for images that are skipped."""

    accumulate: int = setting(1, "cut each batch into so many parts that are computed one after the other", 1)
    precision: Literal["auto", "fp32", "bf16"] = setting("auto", "of the network: bf16 on GPUs that have it, or fp32")
    speed: Literal["auto", "plain", "graph", "compile"] = setting(
        "auto",
        "plain; graph: forward and backward replayed as a CUDA graph, the same bit for bit; compile: compiled, and "
        "replayed where there is a GPU, the same but for rounding; auto: on one GPU graph, and compile in runs "
        "so long that it pays (docs/performance.md)",
        affects="nothing",
    )
    save_minutes: float = setting(5.0, "minutes between two saved states within a step", 0, affects="nothing")
    loggers: tuple[Literal["tensorboard", "wandb", "mlflow"], ...] = setting(
        ("tensorboard",),
        "what follows the run beside log.jsonl, any of tensorboard, wandb, mlflow, or []; the latter two are extras",
        affects="nothing",
    )
    log_every: int = setting(20, "iterations between two lines of the log", 1, affects="nothing")
    on_divergence: Literal["stop", "lower"] = setting(
        "stop",
        "a loss that is not finite: stop, or go back to the last good state (the second time to the beginning of the "
        "step) and go on with a third of the learning rate, four times at most",
        affects="nothing",
    )
    on_bad_image: Literal["stop", "skip"] = setting(
        "stop",
        "a training image that cannot be read; what is scored (held-out images too) is never skipped",
        affects="nothing",
    )
