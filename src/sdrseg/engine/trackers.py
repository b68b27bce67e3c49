"""Experiment trackers: TensorBoard, Weights & Biases, MLflow, through Lightning's loggers."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sdrseg.errors import UsageError

PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb", "mlflow": "mlflow"}


def require_trackers(names: Sequence[str]) -> None:
    """Raise before any work is done if a package is missing."""
    for name in names:
        if find_spec(PACKAGES[name]) is None:
            raise UsageError(f"run.loggers names {name}, which is not installed: pip install 'sdrseg[{name}]'.")


class Trackers:
    """Some of Lightning's loggers for one run. They only keep copies of the log and the metrics."""

    def __init__(
        self, names: Sequence[str], folder: Path, identity: Mapping[str, Any], config: Mapping[str, Any], oracle: bool
    ):
        self._loggers = [_make(name, folder, str(identity["spec"])) for name in names]
        self._mark = "oracle " if oracle else ""
        facts = {**identity, **{f"{s}.{k}": v for s, keys in config.items() for k, v in keys.items()}}
        for name, logger in zip(names, self._loggers, strict=True):
            if name != "tensorboard":  # its table of parameters is of no use for one run
                logger.log_hyperparams({key: str(value) for key, value in facts.items()})

    def __bool__(self) -> bool:
        """Whether there is any."""
        return bool(self._loggers)

    def event(self, event: str, values: Mapping[str, Any]) -> None:
        """Record a line of the log."""
        if event == "train":
            scalars = {f"step{values['step']}/{name}": value for name, value in values["losses"].items()}
            rates = dict(zip(("encoder", "decoder"), values.get("lr", ()), strict=False))
            scalars |= {f"step{values['step']}/lr {part}": rate for part, rate in rates.items()}
            self._scalars(scalars, values["iteration"])
        elif event == "validate":
            scalars = {f"step{values['step']}/{self._mark}mIoU {k}": v for k, v in values["miou"].items()}
            self._scalars(scalars, values["epoch"])
        elif event == "score":
            scalars = {f"{self._mark}mIoU/{name}": values["miou"].get(name) for name in ("old", "new", "all")}
            scalars |= {f"{self._mark}IoU/{name}": iou for name, iou in values.get("classes", {}).items()}
            self._scalars(scalars, values["step"])

    def _scalars(self, scalars: Mapping[str, float | None], step: int) -> None:
        known = {_name(name): float(value) for name, value in scalars.items() if value is not None}
        for logger in self._loggers:
            logger.log_metrics(known, step)

    def pictures(self, name: str, pictures: Sequence[NDArray[np.uint8]], step: int) -> None:
        """Record pictures (H, W, 3) in loggers that support them."""
        for logger in self._loggers:
            if hasattr(logger, "log_image"):
                logger.log_image(key=name, images=list(pictures), step=step)
            elif hasattr(logger.experiment, "add_image"):
                for number, picture in enumerate(pictures):
                    logger.experiment.add_image(f"{name}/{number}", picture, step, dataformats="HWC")

    def close(self) -> None:
        for logger in self._loggers:
            logger.finalize("success")
            if hasattr(logger.experiment, "finish"):
                logger.experiment.finish()  # Weights & Biases: the next run of this process needs a new one


def _make(name: str, folder: Path, spec: str) -> Any:
    from lightning.fabric.loggers.tensorboard import TensorBoardLogger
    from lightning.pytorch.loggers import MLFlowLogger, WandbLogger

    if name == "tensorboard":
        return TensorBoardLogger(root_dir=folder, name="tensorboard", version="")
    label = folder.resolve().name
    if name == "wandb":
        offline = os.environ.get("WANDB_MODE") == "offline"
        run_id = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:16]  # a resumed run continues its page
        return WandbLogger(name=label, save_dir=folder, project="sdrseg", id=run_id, offline=offline, resume="allow")
    uri = os.environ.get("MLFLOW_TRACKING_URI")
    if uri is None:  # files in the run folder, which newer versions write only on request
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        uri = (folder.resolve() / "mlflow").as_uri()
    return MLFlowLogger(experiment_name=spec, run_name=label, tracking_uri=uri)


def _name(name: str) -> str:
    """A name that every tracker accepts; MLflow allows few characters."""
    return re.sub(r"[^\w\-. :/]", "_", name)
