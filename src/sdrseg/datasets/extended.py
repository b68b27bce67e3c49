"""The data of an extended run: several data sets as one, with one list of classes.

RUN/chain.json lists them as parts. The ids of a part begin with its prefix; its classes are mapped to the common list.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from sdrseg.config import Config, config_from
from sdrseg.datasets.source import Array, Problem, Source, Split
from sdrseg.errors import DataError, SdrsegError, UsageError
from sdrseg.files import write_json
from sdrseg.labels import VOID

CHAIN = "chain.json"
MOVED = "If a folder has moved, move it back or put a link in its place."


@dataclass(frozen=True)
class Part:
    """A data set within an extended run, and which of its images are used."""

    step: int  # the first step that uses it
    source: str
    data: str | None  # its folder
    shapes: dict[str, Any]  # settings of generated data
    prefix: str  # of its ids
    names: tuple[str, ...]  # its classes
    classes: tuple[int, ...]  # the common id of each of them; 255: neither learned nor scored
    labelled: tuple[int, ...] | None = None  # the common ids that its masks label; None: all
    train: tuple[Split, ...] = ()  # its splits for training
    val: tuple[Split, ...] = ()  # its splits for evaluation
    available: bool = True  # whether its data could be opened when the run was started
    left_out: tuple[str, ...] = ()  # ids that are not used, because they have changed

    def open(self) -> Source:
        """Open the data set; an error if its classes have changed."""
        from sdrseg.datasets import open_source

        config = config_from({"shapes": self.shapes}, CHAIN)
        source = open_source(self.source, None if self.data is None else Path(self.data), config)
        if source.classes != self.names:
            raise DataError(
                f"{self.data or self.source}: its classes are {', '.join(source.classes)}; when the model was trained "
                f"they were {', '.join(self.names)}."
            )
        return source

    @property
    def table(self) -> Array:
        """(256,): raw label to common class id."""
        table = np.full(256, VOID, np.uint8)
        table[: len(self.classes)] = self.classes
        return table

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def read_part(saved: Any, origin: Path) -> Part:
    """A part, from chain.json."""
    try:
        part = Part(
            step=int(saved["step"]),
            source=str(saved["source"]),
            data=None if saved["data"] is None else str(saved["data"]),
            shapes=dict(saved["shapes"]),
            prefix=str(saved["prefix"]),
            names=tuple(map(str, saved["names"])),
            classes=tuple(map(int, saved["classes"])),
            labelled=None if saved["labelled"] is None else tuple(map(int, saved["labelled"])),
            train=tuple(saved["train"]),
            val=tuple(saved["val"]),
            available=bool(saved.get("available", True)),
            left_out=tuple(map(str, saved.get("left_out", ()))),
        )
        if not {*part.train, *part.val} <= set(get_args(Split)) or len(part.names) != len(part.classes):
            raise ValueError("a damaged part")
        return part
    except (KeyError, TypeError, ValueError) as error:
        raise SdrsegError(f"{origin}: damaged ({error}). Restore it from a backup.") from error


def require_own_data(run: Path, data: Path | None) -> None:
    """Raise an error if another folder is given for an extended run, which would not be used."""
    if data is not None:
        raise UsageError(f"--data {data}: {run} is an extended run and knows its folders. Leave out --data. {MOVED}")


def read_chain(run: Path) -> dict[str, Any]:
    """The contents of chain.json of an extended run."""
    file = run / CHAIN
    try:
        saved = json.loads(file.read_text())
        parts = [read_part(part, file) for part in saved["parts"]]
        return {**saved, "classes": tuple(map(str, saved["classes"])), "parts": parts}
    except OSError as error:
        raise SdrsegError(f"{file}: cannot be read ({error.strerror}). Is {run} an extended run?") from error
    except (ValueError, KeyError, TypeError) as error:
        raise SdrsegError(f"{file}: damaged ({error}). Restore it from a backup.") from error


def write_chain(
    run: Path, classes: Sequence[str], score_background: bool, parts: Sequence[Part], changes: Sequence[Any]
) -> None:
    """Write chain.json: the data of an extended run, and the changes to its classes."""
    facts = {"format": 1, "classes": list(classes), "score_background": score_background}
    write_json(run / CHAIN, {**facts, "parts": [part.to_dict() for part in parts], "changes": list(changes)})


class Extended(Source):
    """Several data sets as one, those that are available. `Extended.open(RUN)` opens those of an extended run."""

    name = "extended"
    internal = True

    def __init__(self, classes: Sequence[str], parts: Sequence[Part], score_background: bool = True):
        self.classes, self.parts = tuple(classes), tuple(parts)
        self.score_background = score_background
        self._opened = [(part, part.open()) for part in self.parts if part.available]
        self._origin: dict[str, tuple[int, str]] = {}
        self._ids: dict[Split, tuple[str, ...]] = {}
        for split in get_args(Split):
            found = {
                part.prefix + id: (number, id)
                for number, (part, source) in enumerate(self._opened)
                for own_split in (part.train if split == "train" else part.val)
                for id in source.ids(own_split)
                if part.prefix + id not in part.left_out
            }
            self._origin |= found
            self._ids[split] = tuple(sorted(found))

    @classmethod
    def open(cls, path: Path | None, config: Config) -> Source:
        """`path`: the folder of an extended run."""
        assert path is not None
        chain = read_chain(path)
        try:
            return cls(chain["classes"], chain["parts"], bool(chain["score_background"]))
        except DataError as error:
            raise DataError(f"{error} {MOVED}") from error

    @classmethod
    def open_available(cls, run: Path) -> Extended:
        """Those data sets of an extended run that can be opened now; `notes` says what is wrong with the others."""
        chain = read_chain(run)
        parts, notes = [], []
        for part in chain["parts"]:
            try:
                if part.available:
                    part.open()
                parts.append(part)
            except SdrsegError as error:
                parts.append(replace(part, available=False))
                notes.append(f"{error} {MOVED}" if isinstance(error, DataError) else str(error))
        source = cls(chain["classes"], parts, bool(chain["score_background"]))
        source.notes = tuple(notes)
        return source

    def ids(self, split: Split) -> tuple[str, ...]:
        return self._ids[split]

    def image(self, id: str) -> Array:
        number, own_id = self._origin[id]
        return self._opened[number][1].image(own_id)

    def mask(self, id: str) -> Array:
        number, own_id = self._origin[id]
        part, source = self._opened[number]
        mask: Array = part.table[source.mask(own_id)]
        return mask

    def mask_content(self, id: str) -> bytes:
        number, own_id = self._origin[id]
        part, source = self._opened[number]
        return source.mask_content(own_id) + source.coding.encode() + part.table.tobytes()

    def part_of(self, id: str) -> int:
        """The number of the part that an image belongs to, among those that are available."""
        return self._origin[id][0]

    def labelled(self, id: str) -> frozenset[int] | None:
        labelled = self._opened[self._origin[id][0]][0].labelled
        return None if labelled is None else frozenset(labelled)

    def file(self, id: str, kind: Literal["image", "mask"]) -> str:
        if id not in self._origin:
            return f"{self.name}:{id}"
        number, own_id = self._origin[id]
        return self._opened[number][1].file(own_id, kind)

    def problems(self) -> list[Problem]:
        return [problem for _, source in self._opened for problem in source.problems()]
