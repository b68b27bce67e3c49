"""Data sets and batches. To add a data set, write a class and register it with `register_source`."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import TypeVar

from sdrseg.config import Config, config_from
from sdrseg.datasets.ade20k import Ade20k
from sdrseg.datasets.extended import Extended
from sdrseg.datasets.folder import AnyFolder
from sdrseg.datasets.shapes import Shapes
from sdrseg.datasets.source import MAX_CLASSES, Source, Split
from sdrseg.datasets.voc import Voc
from sdrseg.errors import DataError, UsageError
from sdrseg.own_files import built_in, run_file
from sdrseg.scenario import SOURCES, Spec, find_source, parse_spec

S = TypeVar("S", bound=type[Source])


def register_source(source: S) -> S:
    """Register a data set by its name; use it as a decorator of a subclass of `Source`."""
    if not (isinstance(source, type) and issubclass(source, Source)):
        raise UsageError(f"register_source: {source!r} is not a subclass of sdrseg.Source.")
    who, name = source.__qualname__, getattr(source, "name", None)
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z][\w-]*", name):
        raise UsageError(f'{who}: give the class a `name = "…"`: a letter, then letters, digits, _ or -.')
    if SOURCES.get(name, source) is not source:
        raise UsageError(f"{who}: a data set {name!r} already exists. Choose another name.")
    if missing := sorted(source.__abstractmethods__):
        raise UsageError(f"{who}: add the missing methods: {', '.join(missing)}.")
    config_from(source.defaults, f"{who}.defaults")
    for weights in source.limits.values():
        for key, most in weights.items():
            section, _, setting = key.partition(".")
            config_from({section: {setting: most}}, f"{who}.limits")
    SOURCES[name] = source
    return source


for _source in (Voc, Ade20k, AnyFolder, Shapes, Extended):
    register_source(_source)
built_in(SOURCES)


def read_spec(text: str) -> Spec:
    """Parse a specification from a user. FILE.py in place of a data set's name runs that file.

    For a specification that was read from a run use `parse_spec`, which runs nothing.
    """
    match = re.match(r"(.+?\.py)(?=[:@]|$)", text.strip(), re.DOTALL)
    if match is None:
        return parse_spec(text)
    return parse_spec(run_source_file(Path(match[1])) + text.strip()[match.end() :])


def run_source_file(file: Path) -> str:
    """Run a file that registers one data set, and return its name."""
    names = run_file(file, SOURCES)
    if len(names) != 1:
        what = f"{len(names)} data sets ({', '.join(names)}). Keep one" if names else "no data set. Register one"
        raise UsageError(f"{file}: registers {what}, with @sdrseg.register_source above its class.")
    return names[0]


def open_source(name: str, path: Path | None, config: Config) -> Source:
    """Open a data set by name; `path` is its folder (generated data need none)."""
    source = find_source(name)
    assert issubclass(source, Source)
    if not source.needs_folder and path is not None:
        raise UsageError(f"{name} needs no folder. Leave out --data {path}.")
    if source.needs_folder and path is None:
        raise UsageError(f"{name} needs --data PATH, the folder of the data set.")
    if path is not None and not path.is_dir():
        raise DataError(f"{path}: no such folder.")
    return _checked(source.open(path, config))


def _checked(source: Source) -> Source:
    """Check that a data set follows the contract of `Source`, reading only the first image of each split."""
    classes = getattr(source, "classes", ())
    named = isinstance(classes, tuple) and all(isinstance(name, str) for name in classes)
    if not named or not 2 <= len(set(classes)) == len(classes) <= MAX_CLASSES:
        raise DataError(
            f"{source.name}: classes = {classes!r} is not a tuple of 2 to {MAX_CLASSES} distinct names, "
            "background first."
        )
    splits: tuple[Split, ...] = ("train", "val")
    times = Counter(id for split in splits for id in source.ids(split))
    if twice := [id for id, count in times.items() if count > 1]:
        raise DataError(f"{source.name}: id {twice[0]!r} occurs twice; ids must be unique across train and val.")
    for id in [id for split in splits for id in source.ids(split)[:1]]:
        try:
            image, mask = source.image(id), source.mask(id)
        except (OSError, DataError):
            continue  # broken files are reported when all files are read
        for kind, array, channels in (("mask", mask, ()), ("image", image, (3,))):
            if array.dtype != "uint8" or array.ndim != 2 + len(channels) or array.shape[2:] != channels:
                wanted = "(H, W, 3)" if channels else "(H, W)"
                raise DataError(
                    f"{source.name}: {kind}({id!r}) is {array.dtype} {array.shape}; it must be uint8 {wanted}."
                )
    return source
