"""The ranges of a search."""

from __future__ import annotations

import math
import typing
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sdrseg.config import Config, parse_settings
from sdrseg.errors import UsageError, nearest

STABILITY = ("kd.weight", "enc.weight", "importance.weight")
"""Weights of the terms that keep a model close to its old state."""
PUBLISHED = {
    "kd.weight": (1.0, 100.0),
    "pm.weight": (1e-3, 1e-1),
    "cl.attract": (1e-3, 1e-2),
    "cl.repel": (1e-3, 1e-2),
    "sp.weight": (1e-5, 1e-3),
}
"""The ranges in the README of the official code, searched on a logarithmic scale."""


@dataclass(frozen=True)
class Range:
    """The values of one setting: numbers from `low` to `high`, or some choices."""

    key: str
    low: float = 0.0
    high: float = 0.0
    log: bool = False
    whole: bool = False
    choices: tuple[Any, ...] = ()

    @property
    def ends(self) -> tuple[Any, ...]:
        """Its choices, or its smallest and largest value."""
        return self.choices or tuple(int(end) if self.whole else end for end in (self.low, self.high))

    def __str__(self) -> str:
        """As in `--range`."""
        if self.choices:
            return f"{self.key}={'|'.join(map(str, self.choices))}"
        return f"{self.key}={self.low:g}:{self.high:g}" + (":log" if self.log else "")

    def suggest(self, trial: Any) -> Any:
        if self.choices:
            return trial.suggest_categorical(self.key, self.choices)
        if self.whole:
            return trial.suggest_int(self.key, int(self.low), int(self.high), log=self.log)
        return trial.suggest_float(self.key, self.low, self.high, log=self.log)


def parse_range(text: str, config: Config) -> Range:
    """ "kd.weight=1:300:log", "train.epochs_later=4:30", "pm.distance=mse|cosine"; for the settings in `config`, which
    include a method's own."""
    key, equals, values = text.partition("=")
    hints = {name: typing.get_type_hints(type(section)) for name, section in config.sections().items()}
    kinds = {f"{section}.{name}": kind for section, names in hints.items() for name, kind in names.items()}
    if key not in kinds:
        raise UsageError(f"--range {text}: unknown setting {key}{nearest(key, list(kinds))}")
    if not equals or not values:
        raise UsageError(f"--range {text}: write {key}=LOW:HIGH, {key}=LOW:HIGH:log or {key}=VALUE|VALUE.")
    if "|" in values:
        choices: list[Any] = [parse_settings([f"{key}={choice}"])[key] for choice in values.split("|")]
        if kinds[key] in (int, float):
            numbers = [_number(choice, text) for choice in values.split("|")]
            choices = numbers if kinds[key] is float else choices
        return Range(key, choices=tuple(choices))
    parts = values.split(":")
    log = parts[2:] == ["log"]
    if len(parts) != 2 + log or kinds[key] not in (int, float):
        raise UsageError(f"--range {text}: write {key}=LOW:HIGH, {key}=LOW:HIGH:log or {key}=VALUE|VALUE.")
    low, high = (_number(part, text) for part in parts[:2])
    if not low < high or (log and low <= 0):
        raise UsageError(f"--range {text}: LOW must be below HIGH, and above 0 with log.")
    return Range(key, low, high, log, kinds[key] is int)


def default_ranges(config: Config) -> list[Range]:
    """The published ranges of the weights that a method uses, and a range around the learning rate of later steps."""
    used = {s.key: s.value for s in config.settings()}
    found = [Range(key, low, high, log=True) for key, (low, high) in PUBLISHED.items() if used[key] > 0]
    if used["importance.weight"] > 0:
        found.append(
            Range("importance.weight", used["importance.weight"] / 100, used["importance.weight"] * 10, log=True)
        )
    rate = config.of_step(1).optim.lr
    return [*found, Range("optim.lr_later", rate / 10, rate * 10, log=True)]


def stability_of(config: Config) -> dict[str, float]:
    """The stability weights that a method uses."""
    return {s.key: float(s.value) for s in config.settings() if s.key in STABILITY and s.value > 0}


def around(value: float, times: Sequence[float] = (0.1, 0.3, 1.0, 3.0, 10.0)) -> list[float]:
    return [float(f"{value * factor:.3g}") for factor in times]


def _number(text: str, whole: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise UsageError(f"--range {whole}: {text!r} is not a number.")
    return value
