"""Images and their mask files: in two folders, side by side in one, or in lists of pairs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from sdrseg.datasets.folder.settings import read_text
from sdrseg.datasets.folder.splits import LAYOUTS, list_files, part_of, split_folders
from sdrseg.datasets.pictures import PICTURE_SUFFIXES
from sdrseg.datasets.source import Problem, find_by_id, find_files, subfolders
from sdrseg.errors import DataError

IMAGES = ("images", "image", "imgs", "img", "jpegimages", "photos", "pictures", "rgb")
MASKS = (
    "masks", "mask", "labels", "label", "annotations", "annotation", "segmentationclass", "segmentation",
    "segmentations", "gt", "groundtruth", "ground_truth", "labelmaps", "stuffthingmaps",
)  # fmt: skip
MASK_SUFFIXES = ("annot", "_annot", "_labels", "_label", "_masks", "_mask", "masks", "labels")
"""Suffixes for the folder of the masks of "train", if it is next to it."""
MASK_ENDINGS = (
    "_mask", "-mask", " mask", "_masks", "_label", "_labels", "_seg", "_segmentation", "_gt", "_annotation", "_l",
)  # fmt: skip
MASK_BEGINNINGS = ("mask_", "label_", "gt_")


@dataclass
class Pairs:
    """Images and masks by id, and problems."""

    images: dict[str, Path] = field(default_factory=dict)
    masks: dict[str, Path] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)


Folders = tuple[Path, Path]  # folders of images and of masks; the same if they are side by side


@dataclass(frozen=True)
class Layout:
    """The folders of images and masks by split ("" for all of them)."""

    parts: dict[str, Folders]
    name: str = ""  # the folder of images in messages, with {} for the split
    parent: Path | None = None  # the folder above the images of the splits


def find_layout(root: Path) -> Layout:
    """The layout of images and masks in a folder."""
    found = [layout for layout in (_by_kind(root), _by_part(root)) if layout is not None]
    if len(found) > 1:
        names = [next(iter(layout.parts.values()))[0].relative_to(root).as_posix() for layout in found]
        raise DataError(f"{root}: found both {' and '.join(names)}. Keep one of these layouts.")
    if not found and side_by_side(root):
        return Layout({"": (root, root)})
    if not found:
        missing = root / ("masks" if named(root, IMAGES) else "images")
        raise DataError(f"{missing}: no such folder; {_listing(root)}.\n{LAYOUTS}")
    return found[0]


def _by_kind(root: Path) -> Layout | None:
    """images/ and masks/, each with or without folders for the splits."""
    images, masks = named(root, IMAGES), named(root, MASKS, pictures=True)
    if images is None or masks is None:
        return None
    image_parts, mask_parts = split_folders(images), split_folders(masks)
    if not image_parts and not mask_parts:
        return Layout({"": (images, masks)})
    parts = {
        part: (image_parts.get(part, images / part), mask_parts.get(part, masks / part))
        for part in sorted(image_parts.keys() | mask_parts.keys())
    }
    return Layout(parts, f"{images.name}/{{}}", images)


def _by_part(root: Path) -> Layout | None:
    """train/ and so on, with subfolders for images and masks, masks next to images, or masks in a folder next to it or
    in masks/."""
    parts: dict[str, Folders] = {}
    name = "{}"
    masks_folder = named(root, MASKS, pictures=True)
    mask_parts = {part_of(path.name): path for path in ([] if masks_folder is None else subfolders(masks_folder))}
    for part, folder in split_folders(root).items():
        images, masks = named(folder, IMAGES), named(folder, MASKS, pictures=True)
        neighbours = (root / f"{folder.name}{end}" for end in MASK_SUFFIXES)
        if images or masks:
            parts[part] = images or folder / "images", masks or folder / "masks"
            name = f"{{}}/{parts[part][0].name}"
        elif neighbour := next((path for path in neighbours if path.is_dir()), None):
            parts[part] = folder, neighbour
        elif part in mask_parts:
            parts[part] = folder, mask_parts[part]
        elif side_by_side(folder):
            parts[part] = folder, folder
    return Layout(parts, name) if parts else None


def _listing(root: Path) -> str:
    return f"{root} contains: {', '.join(sorted(path.name for path in root.iterdir())[:10]) or 'nothing'}"


def named(root: Path, names: Iterable[str], pictures: bool = False) -> Path | None:
    """The folder in `root` with one of these names, ignoring case; with `pictures`, one that contains some."""
    folders = {path.name.lower(): path for path in reversed(subfolders(root))}
    found = (folders[name] for name in names if name in folders)
    return next((folder for folder in found if not pictures or has_pictures(folder)), None)


def has_pictures(folder: Path) -> bool:
    """Whether there is a picture below the folder, or no file at all."""
    empty = True
    for name in find_files(folder):
        if PurePosixPath(name).suffix.lower() in PICTURE_SUFFIXES:
            return True
        empty = False
    return empty


def side_by_side(folder: Path) -> bool:
    """Whether pictures and their masks are in one folder and differ by the ends of their names."""
    stems = {path.stem for path in folder.iterdir() if path.suffix.lower() in PICTURE_SUFFIXES}
    return any(base in stems for stem in stems if (base := image_of(stem)) is not None)


def image_of(id: str) -> str | None:
    """The id of the image of a mask named "a_mask" or "mask_a"."""
    folder, slash, name = id.rpartition("/")
    for end in MASK_ENDINGS:
        if name.lower().endswith(end) and len(name) > len(end):
            return folder + slash + name[: -len(end)]
    for start in MASK_BEGINNINGS:
        if name.lower().startswith(start) and len(name) > len(start):
            return folder + slash + name[len(start) :]
    return None


def find_pairs(folders: Folders, root: Path, prefix: str) -> Pairs:
    """The images and masks in two folders; ids begin with `prefix`."""
    listed = []
    for folder in folders:
        if not folder.is_dir():
            raise DataError(f"{folder}: no such folder; {_listing(root)}.\n{LAYOUTS}")
        found, problems = find_by_id(folder, PICTURE_SUFFIXES)
        if not found:
            raise DataError(f"{folder}: no picture found ({' '.join(sorted(PICTURE_SUFFIXES))}).\n{LAYOUTS}")
        listed.append((found, problems))
    (images, problems), (masks, more) = listed
    if folders[0] == folders[1]:
        masks = {id: path for id, path in masks.items() if image_of(id) in images}
        images = {id: path for id, path in images.items() if id not in masks}
        more = []
    pairs = Pairs(problems=[*problems, *more])
    pairs.images = {prefix + id: path for id, path in images.items()}
    for id, path in masks.items():
        base = id if id in images else image_of(id)
        own = base if base in images else id
        if prefix + own in pairs.masks:
            kept = pairs.masks[prefix + own].name
            pairs.problems.append(Problem(str(path), "duplicate id", f"{kept} is also a mask of {own!r} and is used"))
        else:
            pairs.masks[prefix + own] = path
    return pairs


def pair_lists(root: Path) -> dict[str, Pairs]:
    """The lists in the root by split, if every line of every list names an image and its mask."""
    found: dict[str, Pairs] = {}
    for part, path in list_files(root).items():
        pairs = Pairs()
        for number, line in enumerate(read_text(path).splitlines(), 1):
            entries = line.replace(",", " ").split()
            if not entries:
                continue
            if len(entries) != 2 or any(PurePosixPath(e).suffix.lower() not in PICTURE_SUFFIXES for e in entries):
                return {}
            id = f"{part}/{PurePosixPath(entries[0].lstrip('/')).with_suffix('')}"
            files = [_below(root, entry) for entry in entries]
            if id in pairs.images:
                pairs.problems.append(Problem(str(path), "duplicate id", f"line {number}: {entries[0]} occurs again"))
            elif missing := [entry for entry, file in zip(entries, files, strict=True) if file is None]:
                kind = "no image" if missing[0] == entries[0] else "no mask"
                pairs.problems.append(Problem(str(path), kind, f"line {number}: {missing[0]} does not exist"))
            else:
                pairs.images[id], pairs.masks[id] = (file for file in files if file is not None)
        found[part] = pairs
    return found


def _below(root: Path, name: str) -> Path | None:
    """A file that a list names, if it exists and is below the root."""
    path = root / name.lstrip("/")
    try:
        return path if path.is_file() and path.resolve().is_relative_to(root.resolve()) else None
    except OSError:
        return None
