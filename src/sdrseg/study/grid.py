"""Experiments in a TOML file, in which every list is one dimension of a grid.

    spec = "voc:15-1@disjoint"
    method = ["mib", "sdr"]
    seed = [1, 2, 3]
    data = "VOC"               # or `path` in [data]; paths are relative to this file
    [train]
    epochs = 8

A file may contain several grids, each a [[grid]], which share the keys above them.
"""

from __future__ import annotations

import itertools
import json
import re
import tomllib
import typing
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from sdrseg.config import Config, load_config, nested
from sdrseg.config.read import flat
from sdrseg.config.sections import AUTO
from sdrseg.datasets import read_spec
from sdrseg.engine.best import require_held_out_scores
from sdrseg.engine.requirements import require_possible
from sdrseg.errors import UsageError, nearest, quantity
from sdrseg.methods import METHODS, find_method, method_layers, own_sections, resolve_method
from sdrseg.methods.own import file_digest
from sdrseg.scenario import Spec, class_lists, find_source
from sdrseg.study.cell import cell_name, config_hash

KEYS = ("spec", "method", "preset", "seed")
PATHS = ("data", "bases")
LARGEST = 10_000


@dataclass(frozen=True)
class Experiment:
    """One cell of a grid: a run that may not exist yet."""

    spec: Spec
    method: str
    preset: str
    config: Config
    settings: Mapping[str, Any]
    varied: Mapping[str, Any]
    """Those of the settings that vary within the file."""

    @property
    def hash(self) -> str:
        return config_hash(str(self.spec), self.method, self.preset, file_digest(find_method(self.method)), self.config)

    @property
    def label(self) -> str:
        """A readable name, with the settings that vary."""
        parts = [str(self.spec), self.method, *([self.preset] if self.preset != "default" else [])]
        varied = [f"{key}={value}" for key, value in self.varied.items() if key != "train.seed"]
        return " ".join([*parts, *varied, f"seed={self.config.train.seed}"])

    @property
    def folder(self) -> str:
        """The name of its run and of its result on disk."""
        scenario = self.spec.task if self.spec.seed is None else f"{self.spec.task}~{self.spec.seed}"
        facts = {"dataset": self.spec.source, "scenario": scenario, "protocol": self.spec.protocol}
        facts |= {"method": self.method, "preset": self.preset, "seed": str(self.config.train.seed)}
        return cell_name({**facts, "config": self.hash})


@dataclass(frozen=True)
class Study:
    """The contents of a file of experiments."""

    name: str
    experiments: tuple[Experiment, ...]
    data: Path | None = None
    bases: Path | None = None

    def chosen(self, cells: str | None = None, only: Sequence[str] = ()) -> list[Experiment]:
        """The experiments with these numbers ("1-5,8", from 1) whose labels or settings match one of `only`."""
        wanted = range(1, len(self.experiments) + 1) if cells is None else _numbers(cells, len(self.experiments))
        some = [self.experiments[number - 1] for number in wanted]
        for pattern in only:
            if not any(_matches(e, pattern) for e in some):
                raise UsageError(
                    f"--only {pattern}: matches none of {quantity(len(some), 'experiment')}, such as {some[0].label}."
                )
        return [e for e in some if not only or any(_matches(e, pattern) for pattern in only)]


def read_study(file: Path) -> Study:
    """Read a file of experiments; an error in any of them is reported before the first one starts."""
    try:
        values = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{file}: cannot be read ({error.strerror}).") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{file}: not valid TOML: {error}") from error
    return make_study(values, str(file), file.parent, file.stem)


def read_experiment(file: Path) -> tuple[Experiment, Path | None, Path | None]:
    """The one experiment of a file, its data and its store of bases."""
    study = read_study(file)
    if len(study.experiments) != 1:
        raise UsageError(
            f"{file} contains {quantity(len(study.experiments), 'experiment')}. Run them with `sdrseg run {file}`."
        )
    return study.experiments[0], study.data, study.bases


def make_study(values: Mapping[str, Any], origin: str, folder: Path, name: str) -> Study:
    """A study from the nested values of a file; `folder`: the folder for its relative paths."""
    shared = {key: value for key, value in values.items() if key not in ("grid", *PATHS)}
    paths = {key: values[key] for key in PATHS if key in values}
    if isinstance(paths.get("data"), Mapping):  # the section, with the folder in it
        shared["data"] = {key: value for key, value in paths["data"].items() if key != "path"}
        paths["data"] = paths["data"].get("path")
    grids = values.get("grid", [{}])
    if not (isinstance(grids, list) and grids and all(isinstance(grid, Mapping) for grid in grids)):
        raise UsageError(f"{origin}: write several grids as [[grid]], each with its own keys below.")
    for grid in grids:
        if wrong := [key for key in PATHS if isinstance(grid.get(key), str)]:
            raise UsageError(f"{origin}: {wrong[0]} applies to the whole file; write it above the first [[grid]].")
    dimensions = [_dimensions({**shared, **_merged(shared, grid)}, origin) for grid in grids]
    if (size := sum(_size(dimension) for dimension in dimensions)) > LARGEST:
        raise UsageError(f"{origin}: {size:,} experiments, more than {LARGEST:,}. Shorten its lists.")
    points = [dict(point) for dimension in dimensions for point in _points(dimension)]
    keys = sorted({key for point in points for key in point})
    varied = [key for key in keys if "." in key and len({json.dumps(p.get(key)) for p in points}) > 1]
    experiments = [make_experiment(point, varied, origin, folder) for point in points]
    unique = {e.hash: e for e in experiments}  # a file may contain an experiment twice
    found_paths = {key: _path(paths.get(key), key, origin, folder) for key in PATHS}
    return Study(name, tuple(unique.values()), **found_paths)


def _merged(shared: Mapping[str, Any], grid: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a grid, with its sections, at any depth, merged into the shared ones."""

    def merged(one: Any, other: Any) -> Any:
        if not (isinstance(one, Mapping) and isinstance(other, Mapping)):
            return other
        return {**one, **{key: merged(one.get(key), value) for key, value in other.items()}}

    return {key: merged(shared.get(key), value) for key, value in grid.items()}


def _dimensions(values: Mapping[str, Any], origin: str) -> dict[str, list[Any]]:
    """The list of values of each key ("method", "train.epochs")."""
    sections = {name: kind for name, kind in typing.get_type_hints(Config).items() if name not in ("own", "step")}
    dimensions: dict[str, list[Any]] = {}
    for key, value in values.items():
        if key in KEYS:
            dimensions[key] = value if isinstance(value, list) else [value]
        elif isinstance(value, Mapping):
            hints = typing.get_type_hints(sections[key]) if key in sections else {}
            known = {f.name for f in fields(sections[key])} if key in sections else set()
            for name, chosen in flat(value) if key == "step" else value.items():
                pair = name in known and typing.get_origin(hints[name]) is tuple
                one = not isinstance(chosen, list) or (pair and not any(isinstance(item, list) for item in chosen))
                dimensions[f"{key}.{name}"] = [chosen] if one else chosen
        else:
            if key in (*sections, "step"):
                raise UsageError(f"{origin}: {key} = {value!r}: {key} is a section. Write its settings below [{key}].")
            known_keys = dict.fromkeys((*KEYS, *PATHS, *sections, "step", "grid"))
            raise UsageError(f"{origin}: unknown key {key}{nearest(key, list(known_keys))}")
    for key in ("spec", "method"):
        if key not in dimensions:
            raise UsageError(f'{origin}: {key} is missing. Add {key} = "…" (or a list).')
    if empty := [key for key, chosen in dimensions.items() if not chosen]:
        raise UsageError(f"{origin}: {empty[0]} = [] leaves nothing to run.")
    return dimensions


def _size(dimensions: Mapping[str, Sequence[Any]]) -> int:
    size = 1
    for values in dimensions.values():
        size *= len(values)
    return size


def _points(dimensions: Mapping[str, Sequence[Any]]) -> Iterator[list[tuple[str, Any]]]:
    """All combinations. Seeds vary slowest, so that a whole comparison is finished early; then scenarios, settings,
    methods."""
    first = sorted(dimensions, key=lambda key: ["seed", "spec", "preset", key, "method"].index(key))
    for values in itertools.product(*(dimensions[key] for key in first)):
        yield list(zip(first, values, strict=True))


def make_experiment(point: Mapping[str, Any], varied: Sequence[str], origin: str, folder: Path) -> Experiment:
    """The experiment at one point of a grid: values by "spec", "method", "preset", "seed" and "section.key"."""
    for key in ("spec", "method", "preset"):
        if not isinstance(point.get(key, ""), str):
            raise UsageError(f"{origin}: {key} = {point[key]!r} is not a string.")
    settings = {key: value for key, value in point.items() if "." in key}
    if "seed" in point:
        if "train.seed" in settings:
            raise UsageError(
                f"{origin}: train.seed = {settings['train.seed']}, but its seed is {point['seed']}. Leave train.seed "
                f"out; seeds are named by `seed` in a file, and by --seeds for a table."
            )
        settings["train.seed"] = point["seed"]
    weights = settings.get("net.weights")
    if isinstance(weights, str) and (folder / weights).is_file():
        settings["net.weights"] = str(folder / weights)
    preset = point.get("preset", "default")
    try:
        spec = read_spec(_next_to(point["spec"], folder))
        method = resolve_method(_next_to(point["method"], folder))
        layers = method_layers(method, preset, spec.task, spec.source)
    except UsageError as error:
        raise UsageError(f"{origin}: {error}") from error
    own = own_sections(method)
    try:
        config = load_config(spec.source, between=[*layers, (origin, nested(settings))], own=own)
    except UsageError as error:
        known = {section for other in METHODS.values() for section in other.own_sections()}
        if others := sorted({key.partition(".")[0] for key in settings} & known - own.keys()):
            raise UsageError(
                f"{origin}: the method {method} has no section [{others[0]}]. Name settings of another method in a "
                f"[[grid]] with that method only."
            ) from error
        raise
    try:
        _require_possible(spec, method, config)
    except UsageError as error:
        raise UsageError(f"{origin}: {error}") from error
    if config.train.batch_size == AUTO:
        raise UsageError(f"{origin}: train.batch_size = auto depends on the machine. An experiment needs a number.")
    return Experiment(spec, method, preset, config, settings, {key: settings[key] for key in varied if key in settings})


def _require_possible(spec: Spec, method: str, config: Config) -> None:
    """What `train` would refuse, as far as it is known without the data: before the first experiment of a queue."""
    require_held_out_scores(config)
    classes = getattr(find_source(spec.source), "classes", None)  # some are only known from the data
    steps = len(class_lists(spec, classes, config.data.left_out)) if isinstance(classes, tuple) else None
    require_possible(find_method(method), config, classes=classes if steps else None, steps=steps)


def _next_to(text: str, folder: Path) -> str:
    """The path of a custom FILE.py next to the file of experiments, if it exists there."""
    name = text.partition(".py")[0] + ".py"
    return str(folder / text) if ".py" in text and (folder / name).is_file() else text


def _path(value: Any, key: str, origin: str, folder: Path) -> Path | None:
    if value is not None and not isinstance(value, str):
        raise UsageError(f"{origin}: {key} = {value!r} is not the path of a folder.")
    return None if value is None else folder / Path(value).expanduser()


def parse_numbers(text: str, option: str) -> list[int]:
    """ "1-3,8" as [1, 2, 3, 8]."""
    numbers: set[int] = set()
    for part in text.split(","):
        span = re.fullmatch(r"\s*(\d{1,9})(?:-(\d{1,9}))?\s*", part, re.ASCII)
        if span is None or not (some := range(int(span[1]), int(span[2] or span[1]) + 1)) or len(some) > LARGEST:
            raise UsageError(f"{option} {text}: write numbers such as 1-5,8.")
        numbers.update(some)
    return sorted(numbers)


def _numbers(text: str, last: int) -> list[int]:
    numbers = parse_numbers(text, "--cells")
    if numbers[0] < 1 or numbers[-1] > last:
        raise UsageError(f"--cells {text}: experiments are numbered 1 to {last}. --dry-run lists them.")
    return numbers


def _same_number(value: Any, text: str) -> bool:
    with suppress(ValueError):
        return isinstance(value, int | float) and not isinstance(value, bool) and float(text) == value
    return False


def _matches(experiment: Experiment, pattern: str) -> bool:
    """Whether a pattern is the label, a part of it, or a key of the file and its value, such as method=sdr. Lists are
    compared as they are written, without blanks, numbers by their value."""
    wanted, equals, number = pattern.partition("=")
    if equals and _same_number(experiment.settings.get(wanted), number):
        return True
    named = {"spec": experiment.spec, "method": experiment.method, "preset": experiment.preset, **experiment.settings}
    parts = [experiment.label, *experiment.label.split(), *(f"{key}={value}" for key, value in named.items())]
    literal = pattern.replace(" ", "")
    return any(fnmatchcase(part, pattern) or part.replace(" ", "") == literal for part in parts)
