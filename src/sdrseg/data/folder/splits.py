"""Which images are trained on and which are held out: by folders, by list files, or by a seeded share."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import NamedTuple, get_args

from sdrseg.data.folder.settings import Settings, read_text
from sdrseg.data.source import PICTURE_SUFFIXES, Problem, Split
from sdrseg.errors import DataError

SPLITS: tuple[Split, ...] = get_args(Split)

LAYOUTS = """Accepted layouts:
  images/ and masks/, a mask named like its image (train.txt and val.txt, or a share, make the split)
  images/train, images/val, masks/train, masks/val
  train/images, train/masks, val/images, val/masks
  images/ and annotations.json (COCO)
  annotations/*train*.json and annotations/*val*.json (COCO), images in train2017/, images/train/, images/ or so"""


class Splits(NamedTuple):
    train: tuple[str, ...]
    val: tuple[str, ...]
    by: str
    """What made the split, in words."""
    problems: list[Problem]


def present_splits(
    settings: Settings, root: Path, found: Mapping[Split, bool], names: Mapping[Split, str]
) -> tuple[Split, ...]:
    """The splits there are: both, or train alone where the settings ask for no held-out images."""
    if all(found.values()):
        return SPLITS
    there, missing = SPLITS if found["train"] else SPLITS[::-1]
    if missing == "val" and settings.val == 0:
        return ("train",)
    hint = f", or put `val = 0` into {root / 'dataset.toml'} to hold out no images" if missing == "val" else ""
    raise DataError(f"{root}: {names[there]} is there, but {names[missing]} is missing. Add it{hint}.")


def check_splits(root: Path, splits: Splits, need_val: bool) -> Splits:
    """Pass the splits on, unless one that is needed has come out empty."""
    for split, ids in (("train", splits.train), ("val", splits.val)):
        if not ids and (split == "train" or need_val):
            one_of_each = {problem.kind: str(problem) for problem in sorted(splits.problems, reverse=True)}
            found = f" Found: {'; '.join(one_of_each.values())}." if one_of_each else ""
            raise DataError(f"{root}: no usable image in {split} (split by {splits.by}).{found}\n{LAYOUTS}")
    return splits


def unpaired(images: Mapping[str, Path], masks: Mapping[str, Path]) -> list[Problem]:
    """The images without mask and the masks without image."""
    return [
        *(Problem(str(images[id]), "no mask", f"no mask has its id {id!r}") for id in images.keys() - masks.keys()),
        *(Problem(str(masks[id]), "no image", f"no image has its id {id!r}") for id in masks.keys() - images.keys()),
    ]


def held_out(ids: Sequence[str], share: float, seed: int) -> set[str]:
    """A share of the ids: those whose hash comes first, so that new images hardly change the choice."""
    count = min(round(share * len(ids)), len(ids) - 1)  # at least one is left to train on
    if share > 0 and len(ids) > 1:
        count = max(count, 1)
    return set(sorted(ids, key=lambda id: hashlib.sha256(f"{seed}:{id}".encode()).digest())[: max(count, 0)])


def lists_or_share(settings: Settings, root: Path, images: Mapping[str, Path], masks: Mapping[str, Path]) -> Splits:
    """Split by train.txt and val.txt where they exist, otherwise hold out a share."""
    lists: dict[Split, Path] = {split: root / f"{split}.txt" for split in SPLITS}
    found = {split: path.is_file() for split, path in lists.items()}
    if not any(found.values()):
        usable = sorted(images.keys() & masks.keys())
        val = held_out(usable, settings.val, settings.seed)
        by = f"a share of {settings.val * 100:g} % with seed {settings.seed}"
        train = tuple(id for id in usable if id not in val)
        return check_splits(root, Splits(train, tuple(sorted(val)), by, unpaired(images, masks)), need_val=False)
    present = present_splits(settings, root, found, {split: path.name for split, path in lists.items()})
    by = "lists " + " and ".join(lists[split].name for split in present)
    lines: dict[Split, dict[str, int]] = {"train": {}, "val": {}}
    problems: list[Problem] = []
    for split in present:
        lines[split], more = _read_list(lists[split], images, masks)
        problems += more
    for id in lines["train"].keys() & lines["val"].keys():
        detail = (
            f"line {lines['train'].pop(id)}: {id!r} is in val.txt, line {lines['val'][id]}, too; it is kept in val only"
        )
        problems.append(Problem(str(lists["train"]), "in train and val", detail))
    splits = Splits(tuple(sorted(lines["train"])), tuple(sorted(lines["val"])), by, problems)
    return check_splits(root, splits, need_val=settings.val > 0)


def _read_list(
    path: Path, images: Mapping[str, Path], masks: Mapping[str, Path]
) -> tuple[dict[str, int], list[Problem]]:
    """The usable ids of a list file with the line each stands in."""
    line_of: dict[str, int] = {}
    problems = []
    for number, line in enumerate(read_text(path).splitlines(), 1):
        entry = line.strip()
        if not entry:
            continue
        # An id may itself hold a dot ("site.1"), so only a picture's suffix is taken off, and only if need be.
        bare = PurePosixPath(entry)
        shorten = entry not in images and bare.suffix.lower() in PICTURE_SUFFIXES
        id = bare.with_suffix("").as_posix() if shorten else entry
        if id in line_of:
            problems.append(
                Problem(str(path), "duplicate id", f"line {number}: {id!r} is in line {line_of[id]} already")
            )
        elif id not in images:
            problems.append(Problem(str(path), "no image", f"line {number}: no image has the id {id!r}"))
        elif id not in masks:
            problems.append(Problem(str(path), "no mask", f"line {number}: no mask has the id {id!r}"))
        else:
            line_of[id] = number
    return line_of, problems
