"""Data sets: what they hold, and how batches are made of them. A new one is a class and `register_source` anywhere."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import TypeVar

from sdrseg.config import BY_DATA_SET, Config, config_from
from sdrseg.data.source import MAX_CLASSES, Source, Split
from sdrseg.errors import DataError, UsageError
from sdrseg.scenario.spec import SOURCES

OWN: dict[str, type[Source]] = {}
"""The data sets that `register_source` has added, by name."""

S = TypeVar("S", bound=type[Source])


def register_source(source: S) -> S:
    """Make a data set known by its name; usable as a decorator of a subclass of `Source`."""
    if not (isinstance(source, type) and issubclass(source, Source)):
        raise UsageError(f"register_source: {source!r} is no subclass of sdrseg.Source.")
    who, name = source.__qualname__, getattr(source, "name", None)
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z][\w-]*", name):
        raise UsageError(f'{who}: give the class a line `name = "…"`: a letter, then letters, digits, _ and -.')
    if OWN.get(name) is source:
        return source
    if name in SOURCES:
        raise UsageError(f"{who}: there is a data set {name!r} already.")
    if missing := sorted(source.__abstractmethods__):
        raise UsageError(f"{who}: give the class the methods it lacks: {', '.join(missing)}.")
    config_from(source.defaults, f"{who}.defaults")
    OWN[name] = source
    SOURCES.append(name)
    BY_DATA_SET[name] = {section: dict(keys) for section, keys in source.defaults.items()}
    return source


def open_source(name: str, path: Path | None, config: Config) -> Source:
    """Open a data set by name; `path` is the folder that holds it (a generated one needs none)."""
    if name == "shapes":
        from sdrseg.data.shapes import Shapes

        if path is not None:
            raise UsageError(f"shapes is generated and takes no --data {path}. Its settings are shapes.size and so on.")
        return Shapes(config.shapes.size, config.shapes.train, config.shapes.val, config.shapes.seed)
    if name in OWN and not OWN[name].needs_folder:
        if path is not None:
            raise UsageError(f"{name} takes no --data {path}.")
        return _checked(OWN[name]())
    if path is None:
        raise UsageError(f"{name} needs --data PATH, the folder that holds it.")
    if not path.is_dir():
        raise DataError(f"{path}: no such folder.")
    if name in OWN:
        return _checked(OWN[name](path))  # type: ignore[call-arg]
    if name == "voc":
        from sdrseg.data.voc import Voc

        return Voc(path)
    if name == "ade20k":
        from sdrseg.data.ade20k import Ade20k

        return Ade20k(path)
    from sdrseg.data.folder import open_folder

    return open_folder(path)


def _checked(source: Source) -> Source:
    """A user's own data set, if it keeps the promises of `Source`; of the pictures only the first two are looked at."""
    classes = getattr(source, "classes", ())
    named = isinstance(classes, tuple) and all(isinstance(name, str) for name in classes)
    if not named or not 2 <= len(set(classes)) == len(classes) <= MAX_CLASSES:
        raise DataError(
            f"{source.name}: classes = {classes!r} is no tuple of 2 to {MAX_CLASSES} different names, background first."
        )
    splits: tuple[Split, ...] = ("train", "val")
    times = Counter(id for split in splits for id in source.ids(split))
    if twice := [id for id, count in times.items() if count > 1]:
        raise DataError(f"{source.name}: id {twice[0]!r} is there twice, in train and val together.")
    for id in [id for split in splits for id in source.ids(split)[:1]]:
        try:
            image, mask = source.image(id), source.mask(id)
        except (OSError, DataError):
            continue  # whoever reads all files says which ones are broken
        for kind, array, channels in (("mask", mask, ()), ("image", image, (3,))):
            if array.dtype != "uint8" or array.ndim != 2 + len(channels) or array.shape[2:] != channels:
                wanted = "(H, W, 3)" if channels else "(H, W)"
                raise DataError(
                    f"{source.name}: {kind}({id!r}) is {array.dtype} {array.shape}; it has to be uint8 {wanted}."
                )
    return source
