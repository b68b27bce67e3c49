"""`sdrseg convert`: converts own data of any format to images/, masks/ and dataset.toml."""

from __future__ import annotations

import json
import os
import secrets
import shutil
from pathlib import Path
from typing import Any

from PIL import Image

from sdrseg.config import Config
from sdrseg.datasets import open_source
from sdrseg.datasets.folder.splits import SPLITS
from sdrseg.datasets.pictures import mask_picture
from sdrseg.datasets.source import Problem, Progress, Source
from sdrseg.errors import DataError, SdrsegError, quantity
from sdrseg.files import require_writable
from sdrseg.labels import VOID
from sdrseg.terminal import console, print_json, print_table, progress


def convert_data(path: Path, out: Path, json: bool) -> int:
    """Convert a folder and print a summary; return the number of problems."""
    if os.path.lexists(out):
        raise SdrsegError(f"{out} already exists. Choose a new folder.")
    require_writable(out, "Choose another folder.", folder=True)
    source = open_source("folder", path, Config())
    with progress(f"converting {path}") as report:
        facts, problems = convert(source, out, report)
    if json:
        print_json(facts | {"problems": [vars(problem) for problem in problems]})
        return len(problems)
    out_console = console()
    out_console.print(f"Recognised: {source.format}. Split by: {source.split_by}.", soft_wrap=True)
    for note in source.notes:
        out_console.print(note, soft_wrap=True)
    if problems:
        print_table(
            quantity(len(problems), "problem"),
            ["kind", "file", "detail"],
            [[p.kind, p.file, p.detail] for p in problems],
        )
    written = " and ".join(quantity(facts[split], f"{split} image") for split in SPLITS)
    out_console.print(f"{out}: {written}.", soft_wrap=True)
    return len(problems)


def convert(source: Source, out: Path, report: Progress | None = None) -> tuple[dict[str, Any], list[Problem]]:
    """Write a data set to a new folder, under a temporary name until it is complete. Unreadable images are left out."""
    partial = out.with_name(f".{out.name}.{secrets.token_hex(4)}.tmp")
    problems = list(source.problems())
    counts: dict[str, int] = dict.fromkeys(SPLITS, 0)
    total = sum(len(source.ids(split)) for split in SPLITS)
    try:
        for split in SPLITS:
            for id in source.ids(split):
                problem = _write_pair(source, id, partial, split)
                if problem is None:
                    counts[split] += 1
                else:
                    problems.append(problem)
                if report is not None:
                    report(sum(counts.values()), total)
        if not counts["train"]:
            raise DataError(f"{out}: no training image could be converted. First problem: {problems[0]}")
        (partial / "dataset.toml").write_text(_settings(source, counts["val"]), encoding="utf-8")
        partial.rename(out)
    except OSError as error:
        raise SdrsegError(f"{out}: cannot be written ({error.strerror}).") from error
    finally:
        if partial.is_dir():
            shutil.rmtree(partial)
    return {"out": str(out), "format": source.format, "classes": source.classes, **counts}, problems


def _write_pair(source: Source, id: str, root: Path, split: str) -> Problem | None:
    """Copy an image and write its mask, whose values are the positions of the classes in dataset.toml; returns what is
    wrong with them if they cannot be used."""
    try:
        image, mask = source.image(id), source.mask(id)
    except DataError as error:
        files = (source.file(id, "image"), source.file(id, "mask"))
        bad = next((file for file in files if str(error).startswith(file)), files[1])
        return Problem(bad, "unreadable", str(error).removeprefix(f"{bad}: "))
    if problem := source.size_problem(id, image.shape[:2], mask.shape):
        return problem
    name = id.split("/", 1)[-1] if id.split("/", 1)[0] in ("train", "val", "test") else id
    if not source.has_background:  # class 0 was added by us and occurs in no mask
        mask = mask.copy()
        mask[mask != VOID] -= 1
    targets = [root / kind / split / name for kind in ("images", "masks")]
    for target in targets:
        if not target.resolve().is_relative_to(root.resolve()):
            return Problem(source.file(id, "image"), "name", f"{id!r} points outside the folder; rename it.")
        target.parent.mkdir(parents=True, exist_ok=True)
    file = Path(source.file(id, "image"))
    if file.is_file():
        shutil.copyfile(file, targets[0].with_name(targets[0].name + file.suffix))
    else:
        Image.fromarray(image).save(targets[0].with_name(f"{targets[0].name}.png"))
    mask_picture(mask).save(targets[1].with_name(f"{targets[1].name}.png"))
    return None


def _settings(source: Source, held_out: int) -> str:
    """The contents of dataset.toml in the new folder."""
    names = source.classes if source.has_background else source.classes[1:]
    background = source.classes[0] if source.has_background else "none"
    lines = [f"classes = {_toml(list(names))}", f"background = {_toml(background)}"]
    lines += ["score_background = false"] if source.has_background and not source.score_background else []
    lines += [] if held_out else ["val = 0"]
    return "\n".join([*lines, ""])


def _toml(value: object) -> str:
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
