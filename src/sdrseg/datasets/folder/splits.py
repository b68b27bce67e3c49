"""Which images are for training and which are held out: by folders, by list files, or by a random share."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import NamedTuple, TypeVar, get_args

from sdrseg.datasets.folder.settings import Settings, read_text
from sdrseg.datasets.pictures import PICTURE_SUFFIXES
from sdrseg.datasets.source import Problem, Split, subfolders
from sdrseg.errors import DataError
from sdrseg.scenario.spec import draw

SPLITS: tuple[Split, ...] = get_args(Split)
NAMES = {"train": ("train", "training"), "val": ("val", "valid", "validation"), "test": ("test", "testing")}
"""The usual names of the three splits."""

LAYOUTS = """Accepted layouts (docs/own-data.md shows them):
  images/ and masks/ (or labels/, annotations/, …), a mask named like its image, with or without _mask
  images/train, images/val, masks/train, masks/val; or train/images, train/masks, val/images, val/masks
  train/ and val/ with images and NAME_mask.png side by side
  train.txt and val.txt with an image and its mask on each line
  JPEGImages/, SegmentationClass/ and labelmap.txt (Pascal VOC, CVAT)
  COCO JSON: annotations.json, annotations/*train*.json, train/_annotations.coco.json (Roboflow), panoptic_*.json
  data.yaml with labels/*.txt of polygons (YOLO); images with a .json next to each (LabelMe)"""

T = TypeVar("T")


class Splits(NamedTuple):
    train: tuple[str, ...]
    val: tuple[str, ...]
    by: str
    """How the images were split."""
    problems: list[Problem]


def part_of(file_name: str) -> str | None:
    """train, val or test, if the name of a file or folder contains one: "train2017", "valid", "panoptic_val2017"."""
    lower = file_name.lower()
    found = [part for part, names in NAMES.items() if any(name in lower for name in names)]
    return found[0] if len(found) == 1 else None


def split_folders(folder: Path) -> dict[str, Path]:
    """The folders in `folder` that are named after splits."""
    if not folder.is_dir():
        return {}
    folders = subfolders(folder)
    found = {
        part: [path for path in folders if path.name.lower().rstrip("0123456789") in names]  # train, train2017
        for part, names in NAMES.items()
    }
    for paths in found.values():
        if len(paths) > 1:
            raise DataError(f"{folder}: found both {paths[0].name} and {paths[1].name}. Keep one of them.")
    return {part: paths[0] for part, paths in found.items() if paths}


def choose_parts(settings: Settings, root: Path, found: Mapping[str, T], missing: str) -> tuple[dict[Split, T], str]:
    """Which of train, val and test is used for training and for evaluation; with a note if that needs an explanation.

    Without val and test, `check_splits` holds out a share of train. `missing`: the name of a missing split in messages,
    such as "images/{}".
    """
    wanted = settings.score or ("test" if "test" in found and "val" not in found else "val")
    if "train" not in found:
        present = " and ".join(missing.format(part) for part in found)
        raise DataError(f"{root}: found {present}, but {missing.format('train')} is missing. Add it.")
    if wanted not in found and settings.score:
        remedy = f'Add it, or remove `score = "{wanted}"` from {settings.file}.'
        raise DataError(f"{root}: found {missing.format('train')}, but {missing.format(wanted)} is missing. {remedy}")
    if wanted not in found:
        held = f"There is no {missing.format('val')}, so a share of {missing.format('train')} is held out."
        return {"train": found["train"]}, held if settings.val > 0 else ""
    note = ""
    if "test" in found and "val" in found:
        other = "val" if wanted == "test" else "test"
        note = f'Scored on {wanted}; {other} is not used (`score = "{other}"` in dataset.toml scores that instead).'
    elif wanted == "test":
        note = "There is no val, so test is scored."
    return {"train": found["train"], "val": found[wanted]}, note


def check_splits(
    settings: Settings, root: Path, splits: Splits, found: Container[object], files: Mapping[str, Path] | None = None
) -> Splits:
    """Return the splits, or raise an error if one that was found is empty.

    `found`: the splits that exist; without val, a share of train is held out. `files`: the images by id; one that both
    splits have under different ids is held out only.
    """
    if "val" not in found and (settings.val > 0 or not splits.by):
        splits = _by_share(settings, splits)
    if files is not None:
        splits = _without_held_out(root, splits, files)
    for split, ids in (("train", splits.train), ("val", splits.val)):
        if not ids and (split == "train" or (split in found and settings.val > 0)):
            one_of_each = {problem.kind: str(problem) for problem in sorted(splits.problems, reverse=True)}
            found = f" Found: {'; '.join(one_of_each.values())}." if one_of_each else ""
            raise DataError(f"{root}: no usable image in {split} (split by {splits.by}).{found}\n{LAYOUTS}")
    return splits


def _without_held_out(root: Path, splits: Splits, files: Mapping[str, Path]) -> Splits:
    """The splits without training images that are held out as well, each of which is a problem."""
    shared = {files[id].name for id in splits.train} & {files[id].name for id in splits.val}
    held = {files[id].resolve() for id in splits.val if files[id].name in shared}
    twice = [id for id in splits.train if files[id].name in shared and files[id].resolve() in held]
    if twice and len(twice) == len(splits.train):
        raise DataError(
            f"{root}: every training image is also held out (split by {splits.by}), such as {files[twice[0]]}. Name "
            f"different images for train and val."
        )
    problems = [Problem(str(files[id]), "in train and val", "it is kept in val only") for id in twice]
    left_out = set(twice)
    train = tuple(id for id in splits.train if id not in left_out)
    return splits._replace(train=train, problems=[*splits.problems, *problems])


def unpaired(images: Mapping[str, Path], masks: Mapping[str, Path]) -> list[Problem]:
    """The images without mask and the masks without image."""
    return [
        *(Problem(str(images[id]), "no mask", f"no mask has its id {id!r}") for id in images.keys() - masks.keys()),
        *(Problem(str(masks[id]), "no image", f"no image has its id {id!r}") for id in masks.keys() - images.keys()),
    ]


def held_out(ids: Sequence[str], share: float, seed: int) -> set[str]:
    """A share of the ids: those with the smallest hash, so that adding images hardly changes the choice."""
    count = min(round(share * len(ids)), len(ids) - 1)  # at least one remains for training
    if share > 0 and len(ids) > 1:
        count = max(count, 1)
    return set(sorted(ids, key=lambda id: draw(seed, id))[: max(count, 0)])


def list_files(folder: Path) -> dict[str, Path]:
    """The lists train.txt, val.txt and test.txt of a folder, by split."""
    return {
        part: path for part, names in NAMES.items() for name in names[:1] if (path := folder / f"{name}.txt").is_file()
    }


def _by_share(settings: Settings, splits: Splits) -> Splits:
    """The splits with a share of train as val."""
    ids = sorted(splits.train)
    val = held_out(ids, settings.val, settings.seed)
    share = f"a share of {settings.val * 100:g} % with seed {settings.seed}"
    return splits._replace(
        train=tuple(id for id in ids if id not in val),
        val=tuple(sorted(val)),
        by=f"{splits.by} and {share}" if splits.by else share,
    )


def lists_or_share(
    settings: Settings, root: Path, images: Mapping[str, Path], masks: Mapping[str, Path], lists: Path | None = None
) -> tuple[Splits, str]:
    """Split by train.txt and val.txt if they exist (in `lists`, or the root), otherwise hold out a share."""
    found = list_files(lists or root)
    if not found:
        whole = Splits(tuple(images.keys() & masks.keys()), (), "", unpaired(images, masks))
        return check_splits(settings, root, whole, ()), ""
    paths, note = choose_parts(settings, root, found, "{}.txt")
    by = "lists " + " and ".join(path.name for path in paths.values())
    lines: dict[Split, dict[str, int]] = {"train": {}, "val": {}}
    problems: list[Problem] = []
    for split, path in paths.items():
        lines[split], more = _read_list(path, images, masks)
        problems += more
    for id in lines["train"].keys() & lines["val"].keys():
        detail = (
            f"line {lines['train'].pop(id)}: {id!r} is also in {paths['val'].name}, line {lines['val'][id]}; "
            f"it is kept in {paths['val'].stem} only"
        )
        problems.append(Problem(str(paths["train"]), "in train and val", detail))
    splits = Splits(tuple(sorted(lines["train"])), tuple(sorted(lines["val"])), by, problems)
    return check_splits(settings, root, splits, paths), note


def _read_list(
    path: Path, images: Mapping[str, Path], masks: Mapping[str, Path]
) -> tuple[dict[str, int], list[Problem]]:
    """The usable ids of a list file with their line numbers."""
    line_of: dict[str, int] = {}
    problems = []
    for number, line in enumerate(read_text(path).splitlines(), 1):
        entry = line.strip()
        if not entry:
            continue
        # An id may contain a dot ("site.1"), so only the suffix of a picture is removed, and only if necessary.
        bare = PurePosixPath(entry)
        shorten = entry not in images and bare.suffix.lower() in PICTURE_SUFFIXES
        id = bare.with_suffix("").as_posix() if shorten else entry
        if id in line_of:
            problems.append(
                Problem(str(path), "duplicate id", f"line {number}: {id!r} is already in line {line_of[id]}")
            )
        elif id not in images:
            problems.append(Problem(str(path), "no image", f"line {number}: no image has the id {id!r}"))
        elif id not in masks:
            problems.append(Problem(str(path), "no mask", f"line {number}: no mask has the id {id!r}"))
        else:
            line_of[id] = number
    return line_of, problems
