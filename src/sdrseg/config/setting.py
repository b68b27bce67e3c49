"""A setting is a field of a frozen dataclass that declares its meaning, its bounds and what it affects."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import Field, field, fields, make_dataclass
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from sdrseg.errors import UsageError

Affects = Literal["data", "base", "losses", "teacher", "later", "score", "nothing"]
"""What a setting changes:

data      which images and labels are used; the key of a base contains these themselves
base      the model of step 0, and therefore all later steps
losses    the later steps, and step 0 only if the method trains its own
teacher   the later steps only, with any method: it needs the model of the previous step
later     the later steps only: X_later replaces X there
score     how a trained model is scored
nothing   how a run is executed; it may change when a run is resumed
"""


class Setting(NamedTuple):
    """One value of a configuration and its declaration."""

    key: str  # "section.name"
    declared: Field[Any]
    value: Any

    @property
    def affects(self) -> Affects:
        chosen: Affects = self.declared.metadata["affects"]
        return chosen

    @property
    def iterating(self) -> bool:
        """Whether it is used in the iterations of a step only."""
        return bool(self.declared.metadata["iterating"])

    @property
    def same(self) -> Any:
        """Of an X_later: the value that means "as X"."""
        return self.declared.metadata["same"]

    @property
    def plain(self) -> Any:
        """The value as in JSON and TOML."""
        return list(self.value) if isinstance(self.value, tuple) else self.value

    @property
    def is_default(self) -> bool:
        return bool(self.value == self.declared.default)


def setting(
    default: Any,
    help: str,
    minimum: float | None = None,
    maximum: float | None = None,
    *,
    affects: Affects = "base",
    same: Any = None,
    increasing: bool = False,
    iterating: bool = False,
    keywords: Mapping[str, Any] = MappingProxyType({}),
) -> Any:
    """Declare a configuration value with its meaning, its bounds and what it affects.

    `same`, for an X_later: the value that means "as X". `increasing`, for a range: the smaller value comes first.
    `iterating`: it is used in the iterations of a step only. `keywords`: names for special values, such as "auto".
    """
    facts = {
        "help": help,
        "minimum": minimum,
        "maximum": maximum,
        "affects": affects,
        "same": same,
        "increasing": increasing,
        "iterating": iterating,
        "keywords": keywords,
    }
    return field(default=default, metadata=facts)


def may_differ_by_step(declared: Field[Any]) -> bool:
    """Whether step.N.X may replace this setting X in step N."""
    facts = declared.metadata
    chosen = facts["iterating"] or facts["affects"] in ("losses", "teacher")
    return not declared.name.endswith("_later") and bool(chosen)


def section(name: str, settings: Mapping[str, Any] | type, more_than: type | None = None) -> type:
    """The section of a custom method: a dataclass, or made from settings by name, with the type of each default.
    `more_than`: the section of the method that it extends, whose settings it has, too."""
    inherited = {} if more_than is None else {one.name: one.default for one in fields(more_than)}

    def taken(key: str) -> UsageError:
        return UsageError(
            f"{name}.{key}: the method that this one extends has this setting. Choose another name or, for another "
            f'value of the same setting, switches = {{"{name}.{key}": sdrseg.From(VALUE, "why")}}.'
        )

    if isinstance(settings, type):
        if more_than is not None and not issubclass(settings, more_than):
            raise UsageError(
                f"{name}: the method that this one extends has settings, too. Give further ones as a dict, or derive "
                f"their dataclass from {more_than.__qualname__}."
            )
        if changed := [f.name for f in fields(settings) if inherited.get(f.name, f.default) != f.default]:
            raise taken(changed[0])
        return settings
    made = []
    for key, declared in settings.items():
        if key in inherited:
            raise taken(key)
        if not (isinstance(declared, Field) and "help" in declared.metadata):
            raise UsageError(f'{name}.{key}: write it as sdrseg.setting(DEFAULT, "what it means").')
        if type(declared.default) not in (bool, int, float, str):
            raise UsageError(f"{name}.{key} = {declared.default!r}: a setting is a number, a text, true or false.")
        if not key.isidentifier() or key.removesuffix("_later") not in {*settings, *inherited}:
            raise UsageError(f"{name}.{key}: not a name for a setting (NAME_later needs a setting NAME).")
        made.append((key, type(declared.default), declared))
    return make_dataclass(name, made, bases=() if more_than is None else (more_than,), frozen=True)
