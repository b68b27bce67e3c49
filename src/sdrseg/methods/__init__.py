"""All methods by name. A new one is a class in one file and one line in `_ALL`, or `register_method` anywhere."""

from __future__ import annotations

import re
from collections.abc import Mapping
from fnmatch import fnmatch
from typing import Any, TypeVar

from sdrseg.config import Config, load_config, nested
from sdrseg.errors import UsageError, nearest
from sdrseg.methods.base import From, Method, StepInfo
from sdrseg.methods.cil import CIL
from sdrseg.methods.finetune import FineTune, Offline
from sdrseg.methods.ilt import ILT
from sdrseg.methods.importance import EWC, PI, RW
from sdrseg.methods.laps import LAPS
from sdrseg.methods.laps_softmax import LAPSSoftmax
from sdrseg.methods.lwf import LwF
from sdrseg.methods.lwf_mc import LwFMC
from sdrseg.methods.mib import MiB
from sdrseg.methods.own import load_method_file, source_digest
from sdrseg.methods.presets import OWN_DATA, PRESETS
from sdrseg.methods.sdr import SDR, SDRMiB
from sdrseg.methods.studies import STUDIES
from sdrseg.methods.terms import TERMS, require_sound, sections_of
from sdrseg.own_files import built_in
from sdrseg.scenario.registry import DataSetClass, known_source

__all__ = [
    "PRESETS",
    "From",
    "Method",
    "StepInfo",
    "find_method",
    "limits_in",
    "list_methods",
    "method_layers",
    "method_values",
    "own_sections",
    "register_method",
    "resolve_method",
]

METHODS: dict[str, type[Method]] = {}


M = TypeVar("M", bound=type[Method])


def register_method(method: M) -> M:
    """Register a method by its name; use it as a decorator of a subclass of `Method`."""
    if not (isinstance(method, type) and issubclass(method, Method)):
        raise UsageError(f"register_method: {method!r} is not a subclass of sdrseg.Method.")
    for needed in ("name", "summary"):
        if not isinstance(getattr(method, needed, None), str) or not getattr(method, needed):
            raise UsageError(f'{method.__qualname__}: give the class a line `{needed} = "…"`.')
    if METHODS.get(method.name, method) is not method:
        raise UsageError(
            f"The method {method.name!r} exists already ({METHODS[method.name].__qualname__}). Choose another name."
        )
    if method.name.endswith(".py") or not re.fullmatch(r"\w[\w.+-]*", method.name) or len(method.name) > 60:
        raise UsageError(
            f"{method.name!r}: the name of a method consists of at most 60 letters, digits, +, -, _ and dots, and does "
            f"not end in .py. It becomes part of the names of results."
        )
    for values in (method.switches, *method.by_preset.values(), *method.by_task.values()):
        for key, value in values.items():
            if key.count(".") != 1:
                raise UsageError(
                    f'{method.__qualname__}: {key!r} is not a switch. Write "section.key", as in "kd.weight".'
                )
            if not isinstance(value, From):
                raise UsageError(f'{method.__qualname__}: write {key!r}: From({value!r}, "where it comes from").')
    if method.settings:
        section = method.own_section()
        if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_-]*", section) or section in (*Config().sections(), "step"):
            raise UsageError(f"{section!r} cannot name a section of settings. Choose another name for the method.")
    trainer = method.trainer_of_step0()
    if lacking := trainer.own_sections().keys() - method.own_sections().keys():
        raise UsageError(
            f"{method.__qualname__}: trains_step0_like names a method with settings of its own, "
            f"{', '.join(sorted(lacking))}, which this one does not have. Name that of the class that it extends."
        )
    own = sections_of(TERMS.values()) | method.own_sections()
    for term in method.own_terms:
        require_sound(term, own)
    _require_distinct(method)
    METHODS[method.name] = method
    source_digest(method)
    return method


def _require_distinct(method: type[Method]) -> None:
    """Raise an error if a name of the method's terms is taken: two terms, or two sections, would become one."""
    names, section = [term.name for term in method.own_terms], method.own_section()
    if taken := [name for name in names if name in TERMS or names.count(name) > 1]:
        raise UsageError(f"{method.__qualname__}: the term {taken[0]!r} exists already. Choose another name.")
    if method.settings and section in sections_of([*TERMS.values(), *method.own_terms]):
        raise UsageError(
            f"{method.__qualname__}: the term {section!r} and the method both declare settings [{section}]. Choose "
            f"another name for the term, or declare its settings in those of the method."
        )


_ALL: tuple[type[Method], ...] = (
    FineTune,
    Offline,
    LwF,
    LwFMC,
    ILT,
    CIL,
    MiB,
    EWC,
    PI,
    RW,
    SDR,
    SDRMiB,
    LAPS,
    LAPSSoftmax,
)
_ALL += STUDIES
for _method in _ALL:
    register_method(_method)
built_in(METHODS)


def resolve_method(text: str) -> str:
    """The name of a method, given by name or as a Python file that registers it: FILE.py or FILE.py:NAME."""
    if text.endswith(".py") or ".py:" in text:
        return load_method_file(text, METHODS)
    return find_method(text).name


def find_method(name: str) -> type[Method]:
    if name not in METHODS:
        raise UsageError(f"unknown method {name!r}{nearest(name, list(METHODS))}")
    return METHODS[name]


def list_methods(pattern: str = "*") -> list[type[Method]]:
    """The methods whose names match, such as "sdr*"."""
    return [method for name, method in METHODS.items() if fnmatch(name, pattern)]


def own_sections(name: str) -> dict[str, type]:
    """The sections of the configuration that a method and the terms declare, for `load_config`."""
    method = find_method(name)
    _require_distinct(method)  # a term may have been registered after the method
    return sections_of(TERMS.values()) | method.own_sections()


LIMITED = "limits of the data set"


def method_layers(
    name: str, preset: str, task: str | None, data_set: str | type[DataSetClass] = ""
) -> list[tuple[str, dict[str, dict[str, Any]]]]:
    """The configuration layers of a preset and a method, for `load_config`.

    A data set that is not known here counts as one's own data without limits.
    """
    if preset not in PRESETS:
        raise UsageError(f"unknown preset {preset!r}{nearest(preset, list(PRESETS))}")
    method = find_method(name)
    values = method.values(preset, task)
    layers = [_layer(f"preset {preset}", PRESETS[preset]), _layer(f"method {name}", values)]
    source = None
    if data_set and preset == "default":
        source = known_source(data_set) if isinstance(data_set, str) else data_set
        if source is None or source.own_data:
            layers.insert(1, _layer("preset default for one's own data", OWN_DATA))
    declared = source.limits if source is not None else {}
    limits = dict(declared.get("*", {}))
    for kind in reversed(method.__mro__):  # rows of an ablation have the limits of their method
        limits |= declared.get(vars(kind).get("name", ""), {})
    limited = {key: From(most, "") for key, most in limits.items() if key in values and values[key].value > most}
    return [*layers, _layer(LIMITED, limited)] if limited else layers


def method_values(name: str, preset: str, task: str | None, data_set: str) -> dict[str, Any]:
    """The settings that a preset and a method set for a data set, by key, as in JSON."""
    layers = method_layers(name, preset, task, data_set)
    before = {s.key: s.value for s in load_config(data_set).settings()}
    after = load_config(data_set, between=layers, own=own_sections(name)).settings()
    return {s.key: s.plain for s in after if s.key not in before or s.value != before[s.key]}


def limits_in(layers: list[tuple[str, dict[str, dict[str, Any]]]]) -> list[tuple[str, str, float]]:
    """(section, key, value) of what `method_layers` limited."""
    found = (values for origin, values in layers if origin == LIMITED)
    return [(section, key, most) for values in found for section, keys in values.items() for key, most in keys.items()]


def _layer(origin: str, values: Mapping[str, From]) -> tuple[str, dict[str, dict[str, Any]]]:
    return origin, nested({key: value.value for key, value in values.items()})
