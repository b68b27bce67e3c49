"""The one configuration: frozen dataclasses, read from TOML and `--set section.key=value`, written as JSON.

Values come in layers: the defaults below, the defaults of the data set, the TOML file, then the command line.
"""

from __future__ import annotations

import json
import math
import tomllib
import typing
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Literal

from sdrseg.config.engine import FREE, Optim, Run
from sdrseg.config.net import Net
from sdrseg.config.sections import Data, Eval, Shapes, Train
from sdrseg.config.switches import Ce, Cl, Enc, Importance, Kd, Latent, Pm, Proto, Sp
from sdrseg.errors import UsageError
from sdrseg.scenario.registry import find_source
from sdrseg.scenario.spec import nearest


@dataclass(frozen=True)
class Config:
    """Everything that a run depends on beside its specification, its method and its data."""

    data: Data = field(default_factory=Data)
    eval: Eval = field(default_factory=Eval)
    train: Train = field(default_factory=Train)
    shapes: Shapes = field(default_factory=Shapes)
    net: Net = field(default_factory=Net)
    optim: Optim = field(default_factory=Optim)
    run: Run = field(default_factory=Run)
    ce: Ce = field(default_factory=Ce)
    kd: Kd = field(default_factory=Kd)
    enc: Enc = field(default_factory=Enc)
    proto: Proto = field(default_factory=Proto)
    pm: Pm = field(default_factory=Pm)
    cl: Cl = field(default_factory=Cl)
    sp: Sp = field(default_factory=Sp)
    latent: Latent = field(default_factory=Latent)
    importance: Importance = field(default_factory=Importance)

    def of_step(self, number: int) -> Config:
        """The configuration with what is different in later steps put in its place."""
        train = self.train
        if number == 0:
            return self
        sizes = {"batch_size": train.batch_size_later, "epochs": train.epochs_later}
        return replace(self, train=replace(train, **{name: value for name, value in sizes.items() if value > 0}))

    def scenario_policy(self) -> dict[str, Any]:
        """What `build_scenario` has to know."""
        return {
            "void_train": self.data.void_train,
            "eval_future": self.eval.future,
            "holdout": self.train.holdout,
        }

    def differences(self, other: Config) -> list[str]:
        """What differs in a way that changes results, as "section.key: mine, other"."""
        mine, theirs = self.to_dict(), other.to_dict()
        return [
            f"{section}.{key}: {value!r}, {theirs[section][key]!r}"
            for section, keys in mine.items()
            for key, value in keys.items()
            if value != theirs[section][key] and f"{section}.{key}" not in FREE
        ]

    def to_dict(self) -> dict[str, Any]:
        """Nested plain values, ready for JSON; `config_from` reads them back."""
        plain: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return plain


Layer = tuple[str, Mapping[str, Mapping[str, Any]]]  # where it comes from, and its values


def load_config(
    data_set: str, file: Path | None = None, assignments: Sequence[str] = (), between: Sequence[Layer] = ()
) -> Config:
    """The resolved configuration for a data set, a TOML file and `section.key=value` assignments.

    `between`: layers that come after the defaults of the data set and before the file: a preset and a method.
    """
    layers: list[Layer] = [(data_set, find_source(data_set).defaults), *between]
    if file is not None:
        layers.append((str(file), _read_toml(file)))
    layers += [(f"--set {text}", _assignment(text)) for text in assignments]
    values: dict[str, dict[str, Any]] = {}
    for origin, layer in layers:
        config_from(layer, origin)  # each layer is checked by itself, so that a message names where a value stands
        for section, keys in layer.items():
            values.setdefault(section, {}).update(keys)
    net = values.get("net", {})
    if net.get("weights") == "none":  # statistics that start from nothing have to move
        net.setdefault("bn_momentum_encoder", 0.1)
    return config_from(values, data_set)


def config_from(values: Mapping[str, Any], origin: str) -> Config:
    """A configuration from nested values; unknown keys, wrong types and impossible values are errors."""
    known = {f"{s.name}.{f.name}" for s in fields(Config) for f in fields(_section(s.name))}
    sections = {}
    for name, keys in values.items():
        if name not in {s.name for s in fields(Config)}:
            raise UsageError(f"{origin}: unknown section [{name}]{nearest(name, [s.name for s in fields(Config)])}")
        if not isinstance(keys, Mapping):
            raise UsageError(f"{origin}: {name} is a section; write its keys as {name}.KEY = VALUE.")
        kind = _section(name)
        hints = typing.get_type_hints(kind)
        checked = {}
        for key, value in keys.items():
            if f"{name}.{key}" not in known:
                raise UsageError(f"{origin}: unknown key {name}.{key}{_nearest_key(name, key, sorted(known))}")
            metadata = kind.__dataclass_fields__[key].metadata
            checked[key] = _value(f"{origin}: {name}.{key}", value, hints[key], metadata)
        sections[name] = kind(**checked)
    return Config(**sections)


def _section(name: str) -> Any:
    kind = typing.get_type_hints(Config)[name]
    assert is_dataclass(kind)
    return kind


def _nearest_key(section: str, key: str, known: list[str]) -> str:
    """The same key in another section, or the closest spelling."""
    same = [k for k in known if k.endswith(f".{key}")]
    return f"; did you mean {same[0]!r}?" if same else nearest(f"{section}.{key}", known)


def _value(where: str, value: Any, kind: Any, bounds: Mapping[str, Any]) -> Any:
    """`value` as the type `kind` says, within bounds."""
    if typing.get_origin(kind) is Literal:
        choices = typing.get_args(kind)
        if value not in choices or not isinstance(value, str):
            raise UsageError(f"{where} = {value!r} is not possible{nearest(str(value), choices)}")
        return value
    if typing.get_origin(kind) is tuple:
        items = typing.get_args(kind)
        if not isinstance(value, list | tuple) or len(value) != len(items):
            raise UsageError(f"{where} = {value!r} is not a list of {len(items)} values such as [0.5, 2.0].")
        checked = tuple(_value(where, v, k, bounds) for v, k in zip(value, items, strict=True))
        if list(checked) != sorted(checked):
            raise UsageError(f"{where} = {value!r}: the smaller value comes first.")
        return checked
    low, high = bounds["minimum"], bounds["maximum"]
    if not (type(value) is kind or (kind is float and type(value) is int)):
        raise UsageError(f"{where} = {value!r} is not {_TYPES[kind]}.")
    if value in (math.inf, -math.inf):
        raise UsageError(f"{where} = {value!r} is not finite.")
    if (low is not None and not value >= low) or (high is not None and not value <= high):
        span = f"at least {low}" if high is None else f"between {low} and {high}"
        raise UsageError(f"{where} = {value!r} must be {span}.")
    try:
        return kind(value)
    except OverflowError as error:
        raise UsageError(f"{where}: {error}.") from error


_TYPES = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}


def _read_toml(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{file}: cannot be read ({error.strerror}).") from error
    except (ValueError, RecursionError) as error:  # of the decoding, or of numbers and nesting beyond all measure
        raise UsageError(f"{file}: not valid TOML: {error}") from error


def _assignment(text: str) -> dict[str, dict[str, Any]]:
    """`section.key=value`; the value is TOML, or a bare word."""
    name, equals, raw = text.partition("=")
    section, dot, key = name.strip().partition(".")
    if not (equals and dot and section and key):
        raise UsageError(f"--set {text}: write section.key=value, such as train.epochs=30.")
    try:
        parsed = tomllib.loads(f"value = {raw}")
    except (ValueError, RecursionError):
        parsed = {}
    value = parsed["value"] if list(parsed) == ["value"] else raw.strip()  # one value, not lines of more
    return {section: {key: value}}
