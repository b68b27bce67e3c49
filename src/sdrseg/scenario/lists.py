"""Explicit class lists in a specification, such as 1-15/16,17/tvmonitor, and an order that gives every step images."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from sdrseg.errors import UsageError, nearest

ClassLists = tuple[tuple[int, ...], ...]
REST = "rest"
"""Every class that no step names."""

_ENTRY = re.compile(r'\s*(?:"(?P<quoted>[^"]*)"|(?P<plain>[^",/]*))\s*(?P<end>[,/]|$)')


def entries_of(task: str) -> list[list[tuple[str, bool]]] | None:
    """The entries of each step, and whether each is in double quotes; None if the text cannot be parsed."""
    steps: list[list[tuple[str, bool]]] = [[]]
    position = 0
    while True:
        match = _ENTRY.match(task, position)
        if match is None:
            return None
        quoted = match["quoted"] is not None
        steps[-1].append((match["quoted"] if quoted else match["plain"].strip(), quoted))
        position = match.end()
        if not match["end"]:
            return steps
        if match["end"] == "/":
            steps.append([])


def written(names: Sequence[str], lists: ClassLists) -> str:
    """The task of a specification that has these class lists, by name."""

    def entry(c: int) -> str:
        name = names[c]
        if '"' in name:
            return str(c)
        plain = re.fullmatch(r"[^\s\d,/@~\"][^,/@~\"]*", name) and name != REST and name == name.strip()
        same = [other for other in names if other.lower() == name.lower()]
        return name if plain and len(same) == 1 else f'"{name}"'

    return "/".join(",".join(entry(c) for c in step if c != 0) for step in lists)


def explicit(spec: object, task: str, classes: tuple[str, ...]) -> ClassLists:
    """The ids of the classes that each step names; background is the first class of step 0."""
    entries_by_step = entries_of(task)
    if entries_by_step is None:
        raise UsageError(f'{spec}: write a name with a comma or a slash in double quotes: "a, b"/c.')
    steps: list[tuple[int, ...]] = []
    step_of: dict[int, int] = {0: 0}
    rest: int | None = None
    for number, entries in enumerate(entries_by_step):
        ids: list[int] = []
        for entry, quoted in entries:
            if entry == REST and not quoted and REST not in classes:
                if rest is not None:
                    raise UsageError(f"{spec}: {REST} is already in step {rest}.")
                rest = number
            else:
                ids += _ids(spec, number, entry, quoted, classes)
        ids = [c for c in ids if c != 0 or number > 0]
        if not ids and rest != number:
            raise UsageError(f"{spec}: step {number} has no classes.")
        for c in ids:
            if c in step_of:
                why = "background belongs to the first step" if c == 0 else f"it is already in step {step_of[c]}"
                raise UsageError(f"{spec}: class {c} ({classes[c]}) of step {number}: {why}.")
            step_of[c] = number
        steps.append(tuple(ids))
    if rest is not None:
        left = tuple(c for c in range(len(classes)) if c not in step_of)
        if not left and not steps[rest]:
            raise UsageError(f"{spec}: step {rest}: no class is left for {REST}.")
        steps[rest] += left
    return ((0, *steps[0]), *steps[1:])


def _ids(spec: object, number: int, entry: str, quoted: bool, classes: tuple[str, ...]) -> list[int]:
    """The classes of an entry: an id, a range of ids, or a name."""
    named = classes.index(entry) if entry in classes else None
    span = None if quoted else re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", entry)
    if span and int(span[2] or span[1]) < len(classes):
        ids = list(range(int(span[1]), int(span[2] or span[1]) + 1))
        if named is not None and ids != [named]:
            by_id = f"class {ids[0]} ({classes[ids[0]]})" if len(ids) == 1 else f"classes {entry}"
            raise UsageError(
                f"{spec}: {entry} in step {number} may mean {by_id}, or class {named}, which has this name. Write "
                f'"{entry}", in double quotes, for the name, or use names for the other.'
            )
        return ids
    if named is not None:
        return [named]
    if span:
        limit = len(classes) - 1
        raise UsageError(f"{spec}: class {span[2] or span[1]} of step {number} does not exist; the last is {limit}.")
    matches = [c for c, name in enumerate(classes) if name.lower() == entry.lower()]
    if len(matches) > 1 and not quoted:
        names = " or ".join(repr(classes[c]) for c in matches)
        raise UsageError(f"{spec}: {entry!r} in step {number} may mean {names}. Use the exact spelling.")
    if quoted or not matches:
        full_names = [name for name in classes if entry in re.split(r"[,/@]", name) and name != entry]
        hint = (
            f'; the name with a comma, / or @ needs double quotes: "{full_names[0]}".'
            if full_names
            else nearest(entry, classes)
        )
        raise UsageError(f"{spec}: step {number} has no class {entry!r}{hint}")
    return matches


def workable_order(present: NDArray[np.bool_], lists: ClassLists, at_least: int = 1) -> ClassLists | None:
    """An order, with the same number of classes per step, in which every step has images without later classes.

    Works backwards from the last step and always chooses the class that occurs in the fewest remaining images, because
    earlier steps lose these images. None if a step still gets fewer than `at_least`.
    """
    classes = [c for step in lists for c in step if c != 0]
    left: NDArray[np.bool_] = np.asarray(present[:, classes].any(axis=1))
    chosen: list[tuple[int, ...]] = []
    for step in reversed(lists):
        new: list[int] = []
        taken: NDArray[np.bool_] = np.zeros(len(left), np.bool_)
        for _ in range(sum(c != 0 for c in step)):
            counts = {c: int((present[:, c] & (left | taken)).sum()) for c in classes if c not in new}
            possible = {c: count for c, count in counts.items() if count > 0}
            if not possible:
                return None
            best = min(possible, key=lambda c: (possible[c], -c))
            new.append(best)
            taken |= left & present[:, best]
        if taken.sum() < at_least:
            return None
        left &= ~taken
        classes = [c for c in classes if c not in new]
        chosen.append(tuple(sorted(new)))
    ordered = chosen[::-1]
    return ((0, *ordered[0]), *ordered[1:])
