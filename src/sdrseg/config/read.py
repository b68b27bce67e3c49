"""Read a configuration. Later layers override earlier ones: the defaults, those of the data set, a preset and a method,
the TOML file, then the command line."""

from __future__ import annotations

import json
import math
import re
import tomllib
import typing
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal

from sdrseg.config.config import Config
from sdrseg.config.setting import Affects, may_differ_by_step, section, setting
from sdrseg.errors import UsageError, nearest
from sdrseg.scenario.registry import DataSetClass, find_source

Sections = Mapping[str, type]

Layer = tuple[str, Mapping[str, Mapping[str, Any]]]  # its origin, and its values


def load_config(
    data_set: str | type[DataSetClass],
    file: Path | None = None,
    settings: Mapping[str, Any] | None = None,
    between: Sequence[Layer] = (),
    own: Sections | None = None,
) -> Config:
    """The resolved configuration for a data set, a TOML file and settings by "section.key".

    `between`: layers that come after the defaults of the data set and before the file: a preset and a method.
    `own`: sections that the method declares, by name.
    """
    source = find_source(data_set)
    layers: list[Layer] = [(source.name, source.defaults), *between]
    if file is not None:
        layers.append((str(file), _read_toml(file)))
    layers.append(("settings", nested(settings or {})))
    values: dict[str, dict[str, Any]] = {}
    for origin, layer in layers:
        config_from(layer, origin, own)  # check each layer by itself, so that messages name the origin of a value
        for name, keys in layer.items():
            values.setdefault(name, {}).update(keys)
    net = values.get("net", {})
    if net.get("weights") == "none":  # without pre-trained statistics the usual momentum is too small
        net.setdefault("bn_momentum_encoder", 0.1)
    return config_from(values, source.name, own)


def config_from(values: Mapping[str, Any], origin: str, own: Sections | None = None) -> Config:
    """A configuration from nested values; unknown keys, wrong types and impossible values are errors."""
    kinds = _BUILT_IN | dict(own or {})
    known = [f"{name}.{f.name}" for name, kind in kinds.items() for f in fields(kind)]
    sections = {name: kind() for name, kind in kinds.items()}
    of_steps: dict[str, Any] = {}
    for name, keys in values.items():
        if name == "step" and isinstance(keys, Mapping):
            of_steps = {key: _of_step(key, value, origin, kinds) for key, value in flat(keys)}
            continue
        if name not in kinds:
            raise UsageError(f"{origin}: unknown section [{name}]{nearest(name, list(kinds))}")
        if not isinstance(keys, Mapping):
            raise UsageError(f"{origin}: {name} is a section; write its keys as {name}.KEY = VALUE.")
        hints = typing.get_type_hints(kinds[name])
        checked = {}
        for key, value in keys.items():
            if f"{name}.{key}" not in known:
                raise UsageError(f"{origin}: unknown key {name}.{key}{_nearest_key(name, key, sorted(known))}")
            metadata = kinds[name].__dataclass_fields__[key].metadata
            checked[key] = _value(f"{origin}: {name}.{key}", value, hints[key], metadata)
        sections[name] = kinds[name](**checked)
    return Config(**{name: sections.pop(name) for name in _BUILT_IN}, own=sections, step=of_steps)


def flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Nested tables as pairs of a dotted key and a value."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _of_step(key: str, value: Any, origin: str, kinds: Mapping[str, Any]) -> Any:
    """The value for one step, set as step.NUMBER.SECTION.KEY."""
    number, _, name = key.partition(".")
    section, _, field = name.partition(".")
    if not (re.fullmatch("[1-9][0-9]{0,3}", number) and section and field):
        raise UsageError(
            f"{origin}: step.{key}: write step.NUMBER.SECTION.KEY with a step from 1, such as step.2.kd.weight."
        )
    declared = {f.name: f for f in fields(kinds[section])} if section in kinds else {}
    possible = [f"{name}.{f.name}" for name, kind in kinds.items() for f in fields(kind) if may_differ_by_step(f)]
    if name not in possible:
        what = "is not a setting of single steps" if field in declared else "is unknown"
        if field in declared and section not in _BUILT_IN:  # of a custom method
            raise UsageError(
                f'{origin}: step.{key}: {name} {what}. Its method allows that with setting(…, affects="losses").'
            )
        raise UsageError(f"{origin}: step.{key}: {name} {what}{nearest(name, possible)}")
    hint = typing.get_type_hints(kinds[section])[field]
    return _value(f"{origin}: step.{key}", value, hint, declared[field].metadata)


def saved_config(values: Any, origin: str, affect_nothing: Collection[str] = ()) -> Config:
    """The configuration of a run, read without its method: sections of the method are accepted unchecked.

    `affect_nothing`: the settings of the method that do, which the run saves beside its configuration.
    """
    if not isinstance(values, Mapping):
        raise UsageError(f"{origin}: not the configuration of a run.")
    known = {*_BUILT_IN, "step"}
    own: dict[str, type] = {}
    for name, keys in values.items():
        if name not in known and isinstance(keys, Mapping):
            affects: dict[str, Affects] = {k: "nothing" if f"{name}.{k}" in affect_nothing else "base" for k in keys}
            # iterating: which of them may differ by step was checked when the run began
            declared = {k: setting(v, "", affects=affects[k], iterating=True) for k, v in keys.items()}
            own[name] = section(name, declared)
    return config_from(values, origin, own)


_BUILT_IN: dict[str, Any] = {
    name: kind for name, kind in typing.get_type_hints(Config).items() if name not in ("own", "step")
}


def _nearest_key(section: str, key: str, known: list[str]) -> str:
    """The same key in another section, or the closest spelling."""
    same = [k for k in known if k.endswith(f".{key}")]
    return f"; did you mean {same[0]!r}?" if same else nearest(f"{section}.{key}", known)


def _value(where: str, value: Any, kind: Any, bounds: Mapping[str, Any]) -> Any:
    """`value` converted to the type `kind` and checked against its bounds."""
    if typing.get_origin(kind) is Literal:
        choices = typing.get_args(kind)
        if value not in choices or not isinstance(value, str):
            raise UsageError(f"{where} = {value!r} is not possible{nearest(str(value), choices)}")
        return value
    if typing.get_origin(kind) is tuple:
        items = typing.get_args(kind)
        if items[1:] == (...,):  # any number of them
            if not isinstance(value, list | tuple) or len(set(map(str, value))) != len(value):
                choices = typing.get_args(items[0]) if typing.get_origin(items[0]) is Literal else ()
                such_as = f" such as [{json.dumps(choices[0])}]; known are {', '.join(choices)}" if choices else ""
                raise UsageError(f"{where} = {value!r} is not a list of different values{such_as}.")
            return tuple(_value(where, v, items[0], bounds) for v in value)
        if not isinstance(value, list | tuple) or len(value) != len(items):
            raise UsageError(f"{where} = {value!r} is not a list of {len(items)} values such as [0.5, 2.0].")
        checked = tuple(_value(where, v, k, bounds) for v, k in zip(value, items, strict=True))
        if bounds["increasing"] and list(checked) != sorted(checked):
            raise UsageError(f"{where} = {value!r}: the smaller value comes first.")
        return checked
    low, high = bounds["minimum"], bounds["maximum"]
    if isinstance(value, str) and value in bounds["keywords"]:
        return bounds["keywords"][value]
    if not (type(value) is kind or (kind is float and type(value) is int)):
        alternatives = "".join(f' or "{name}"' for name in bounds["keywords"])
        raise UsageError(f"{where} = {value!r} is not {_TYPES[kind]}{alternatives}.")
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
    except (ValueError, RecursionError) as error:  # undecodable text, or numbers too long and nesting too deep
        raise UsageError(f"{file}: not valid TOML: {error}") from error


def parse_settings(texts: Iterable[str]) -> dict[str, Any]:
    """Parse the values of all `--set section.key=value`, by key. A value is TOML, or unquoted text."""
    values = {}
    for text in texts:
        key, equals, raw = text.partition("=")
        if not equals:
            raise UsageError(f"--set {text}: write section.key=value, such as train.epochs=30.")
        try:
            parsed = tomllib.loads(f"value = {raw}")
        except (ValueError, RecursionError):
            parsed = {}
        values[key.strip()] = parsed["value"] if list(parsed) == ["value"] else raw.strip()  # exactly one value
    return values


def write_setting(key: str, value: Any) -> str:
    """The inverse of `parse_settings`: section.key=value."""
    return f"{key}={_toml(value)}"


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_toml(v) for v in value) + "]"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)


def read_settings(file: Path | None, texts: Iterable[str]) -> dict[str, Any]:
    """The settings of a TOML file and of `--set`, by key."""
    values = {} if file is None else _read_toml(file)
    for name, keys in values.items():
        if not isinstance(keys, Mapping):
            raise UsageError(f"{file}: {name} is not in a section; write it below [SECTION].")
    return dict(flat(values)) | parse_settings(texts)


def nested(settings: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Settings by "section.key" as sections of keys."""
    sections: dict[str, dict[str, Any]] = {}
    for key, value in settings.items():
        part, dot, name = key.partition(".")
        if not (dot and part and name):
            raise UsageError(f"settings: {key!r} is not a setting. Write section.key, such as train.epochs.")
        sections.setdefault(part, {})[name] = value
    return sections
