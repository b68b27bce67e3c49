"""The tables of docs/settings.md, made from the configuration itself.

    python scripts/settings_tables.py            # print them
    python scripts/settings_tables.py --write    # put them into docs/settings.md, between the two marks there

What a setting means is written where it is defined, in src/sdrseg/config.
"""

from __future__ import annotations

import dataclasses
import inspect
import typing
from typing import Any

from pages import print_or_write

from sdrseg.config import Config
from sdrseg.datasets.ade20k import Ade20k
from sdrseg.datasets.shapes import Shapes
from sdrseg.methods import METHODS

BUILT_IN = (Ade20k, Shapes)  # the data sets with defaults of their own
KINDS = {bool: "true, false", int: "whole number", float: "number", str: "text"}


def tables() -> str:
    """One table for each section, as Markdown."""
    own = {name: kind() for method in METHODS.values() for name, kind in method.own_sections().items()}
    return "\n".join(_section(name, values) for name, values in {**Config().sections(), **own}.items())


def _section(name: str, values: Any) -> str:
    hints = typing.get_type_hints(type(values))
    rows = []
    for field in dataclasses.fields(values):
        others = {data_set.name: data_set.defaults.get(name, {}) for data_set in BUILT_IN}
        changed = [f"{data_set}: {_toml(keys[field.name])}" for data_set, keys in others.items() if field.name in keys]
        default = "; ".join([_toml(field.default), *changed])
        facts = field.metadata
        possible = _possible(hints[field.name], facts)
        rows.append(f"| `{name}.{field.name}` | {default} | {possible} | {facts['affects']} | {facts['help']} |\n")
    heads = "| setting | default | possible | affects | meaning |\n|---|---|---|---|---|\n"
    return f"### {name}\n\n{inspect.getdoc(values)}\n\n{heads}{''.join(rows)}"


def _possible(kind: Any, bounds: Any) -> str:
    """The choices, or the type with its bounds."""
    if typing.get_origin(kind) is typing.Literal:
        return ", ".join(typing.get_args(kind))
    if typing.get_origin(kind) is tuple:
        items = typing.get_args(kind)
        if items[1:] == (...,):
            return f"a list of: {_possible(items[0], bounds)}"
        return f"[{', '.join(_possible(item, bounds) for item in items)}]"
    low, high = bounds["minimum"], bounds["maximum"]
    span = "" if low is None else f", at least {low}" if high is None else f", {low} to {high}"
    return KINDS[kind] + span + "".join(f", or {name}" for name in bounds["keywords"])


def _toml(value: object) -> str:
    """A value as it is written in TOML and after `--set`."""
    if isinstance(value, bool):
        return str(value).lower()
    return str(list(value)) if isinstance(value, tuple) else str(value)


if __name__ == "__main__":
    print_or_write("settings.md", "settings_tables.py", tables())
