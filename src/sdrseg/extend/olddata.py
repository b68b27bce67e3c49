"""The test images of a model that is extended: which of them still exist, unchanged, and where."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path

from sdrseg.config import Config
from sdrseg.datasets import open_source
from sdrseg.datasets.extended import Extended, Part
from sdrseg.datasets.index import class_index
from sdrseg.datasets.source import Source
from sdrseg.errors import SdrsegError, quantity
from sdrseg.labels import VOID
from sdrseg.scenario import SOURCES, Scenario

ADD_OLD_DATA = "If they have moved, add --old-data PATH."


@dataclass(frozen=True)
class OldData:
    """The data sets of a model, and the images in them on which its classes can be scored."""

    parts: tuple[Part, ...]  # those that are gone are marked
    test_ids: tuple[str, ...]
    notes: tuple[str, ...]


def find_old_data(
    parts: Sequence[Part],
    scenario: Scenario,
    digests: dict[str, str],
    old_data: Path | None = None,
    missing: Collection[str] = (),
) -> OldData:
    """Open the data sets and compare their masks with the digests of those that were scored.

    `missing`: the prefixes of data sets that are not used because they were gone when the extension was begun.
    `old_data`: where the data of step 0 are now, or those of a later step that are gone. An imported model has none,
    so these become its test images.
    """
    scored = {id for step in scenario for id in step.test_ids}
    if old_data is not None and any(part.step == 0 for part in parts):
        parts = _relocated(parts, old_data)
    elif old_data is not None:
        parts = [_adopted(old_data, scenario), *parts]
        index = class_index(_open(parts[0], scenario.classes), "val")
        scored, digests = scored.union(index.ids), digests | index.digest_by_id
    examined: list[Part] = []
    test_ids: set[str] = set()
    notes: list[str] = []
    for part in parts:
        others = tuple(p.prefix for p in parts if p.prefix and p is not part)
        wanted = {id for id in scored if id.startswith(part.prefix) and (part.prefix or not id.startswith(others))}
        if part.prefix in missing and old_data is None:
            examined.append(replace(part, available=False))
            notes.append(f"the test images of step {part.step} are not used, as when this extension was begun.")
            continue
        try:
            source = _open(part, scenario.classes)
            changed = _changed(source, wanted, digests)
            found = wanted.intersection(source.ids("val")) - changed
            if not found:
                raise SdrsegError(f"{part.data or part.source}: none of the images that were scored is as it was.")
        except SdrsegError as error:
            if old_data is not None and part.data == str(old_data.resolve()):
                raise SdrsegError(f"--old-data {old_data}: {error}") from error
            examined.append(replace(part, available=False))
            notes.append(f"the test images of step {part.step} are not available: {error} {ADD_OLD_DATA}")
            continue
        examined.append(replace(part, available=True, left_out=tuple(sorted(changed))))
        test_ids |= found
        gone = len(wanted) - len(found) - len(changed)
        for count, what in ((len(changed), ("has changed", "have changed")), (gone, ("is gone", "are gone"))):
            if count:
                all_images, left_out = quantity(len(wanted), "old test image"), "is" if count == 1 else "are"
                notes.append(f"{count} of {all_images} {what[count > 1]} and {left_out} left out")
    return OldData(tuple(examined), tuple(sorted(test_ids)), tuple(notes))


def _adopted(folder: Path, scenario: Scenario) -> Part:
    """A folder of labelled images as the test data of a model that came without any, by the names of its classes."""
    source, classes = open_source("folder", folder, Config()), scenario.classes
    common = [name for name in source.classes[1:] if name in classes[1:]]
    if not common:
        raise SdrsegError(
            f"--old-data {folder}: none of its classes ({', '.join(source.classes[1:])}) is a class of the model "
            f"({', '.join(classes[1:])}). Rename them in one of the two (`sdrseg classes MODEL --rename OLD=NEW`)."
        )
    ids = tuple(classes.index(n) if n in common else 0 if k == 0 else VOID for k, n in enumerate(source.classes))
    return Part(
        step=0,
        source="folder",
        data=str(folder.resolve()),
        shapes={},
        prefix="old/",
        names=source.classes,
        classes=ids,
        labelled=None if {*scenario[0].channels} <= {0, *ids} else tuple(id for id in ids if id not in (0, VOID)),
        val=("val",) if source.ids("val") else ("train",),
    )


def _relocated(parts: Sequence[Part], folder: Path) -> list[Part]:
    """The parts, with the folder for the data of step 0 or, if they do not fit, for the first that are gone and fit."""
    reasons = []
    for part in (p for p in parts if p.step == 0 or not _opens(p)):
        moved = replace(part, data=str(folder.resolve()))
        try:
            moved.open()
        except SdrsegError as error:
            reasons.append(str(error))
            continue
        return [moved if p is part else p for p in parts]
    raise SdrsegError(f"--old-data {folder}: {reasons[0]}")


def _opens(part: Part) -> bool:
    try:
        part.open()
    except SdrsegError:
        return False
    return True


def _open(part: Part, classes: Sequence[str]) -> Extended:
    if part.source not in SOURCES:
        raise SdrsegError(f"the data set {part.source} is defined in a custom file.")
    return Extended(classes, [replace(part, available=True, left_out=())])


def _changed(source: Extended, wanted: Set[str], digests: dict[str, str]) -> set[str]:
    """The images whose masks are not as they were. A run that was not extended has digests of the masks themselves,
    not of the masks with common classes."""
    now = class_index(source, "val").digest_by_id
    changed = {id for id in wanted & now.keys() if now[id] != digests.get(id)}
    if changed:
        (part,) = source.parts
        plain = part.open()
        for split in part.val:
            now = {part.prefix + id: digest for id, digest in class_index(plain, split).digest_by_id.items()}
            changed -= {id for id in changed & now.keys() if now[id] == digests.get(id)}
    return changed


def same_images(source: Source, ids: Iterable[str]) -> list[list[str]]:
    """Images whose files have the same content, under any name; generated images have no files."""
    by_size: dict[int, list[str]] = defaultdict(list)
    for id in ids:
        if (file := Path(source.file(id, "image"))).is_file():
            by_size[file.stat().st_size].append(id)
    by_content: dict[bytes, list[str]] = defaultdict(list)
    for id in (id for some in by_size.values() if len(some) > 1 for id in some):
        by_content[hashlib.sha256(Path(source.file(id, "image")).read_bytes()).digest()].append(id)
    return [same for same in by_content.values() if len(same) > 1]


def in_later_folders(source: Extended, ids: Iterable[str]) -> dict[str, str]:
    """The images that a folder of a later step contains as well: the id there, by id."""
    found: dict[str, str] = {}
    for same in same_images(source, ids):
        last = max(same, key=source.part_of)
        found |= {id: last for id in same if source.part_of(id) < source.part_of(last)}
    return found
