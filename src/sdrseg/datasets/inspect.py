"""`sdrseg data`: the contents of a data set, the images of each step of a scenario, and every problem."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sdrseg.config import Config, load_config
from sdrseg.datasets import open_source, read_spec
from sdrseg.datasets.audit import Contents, StepFacts, audit, better_order, protocol_summary, step_facts
from sdrseg.datasets.picture import check_may_write, save_grid
from sdrseg.datasets.source import Source
from sdrseg.errors import DataError, quantity
from sdrseg.scenario import SOURCES, Scenario, Spec, build_scenario, class_lists
from sdrseg.terminal import console, print_json, print_table, progress

COLUMNS = (
    "train: training images of the step; with old, with future: those with a class of an earlier or a later step; seen "
    "before: those that an earlier step also used; val: validation images with a new class; test: those with any class "
    "so far."
)


def inspect_data(
    spec_text: str,
    path: Path | None,
    picture: Path | None,
    config_file: Path | None,
    settings: Mapping[str, Any],
    json: bool,
) -> int:
    """Print the contents of a data set and the steps of a scenario, optionally save a picture; return the number of
    problems."""
    found = _inspect(spec_text, path, picture, config_file, settings)
    if json:
        print_json(found.to_dict())
    else:
        _print(found)
    return len(found.contents.problems)


def data_facts(
    spec: str,
    data: str | Path | None = None,
    *,
    picture: str | Path | None = None,
    config_file: str | Path | None = None,
    settings: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """What `sdrseg data --json` prints: the contents of a data set, the images of each step, and every problem."""
    folder, image, file = (None if path is None else Path(path) for path in (data, picture, config_file))
    return _inspect(spec, folder, image, file, settings or {}).to_dict()


@dataclass(frozen=True)
class _Found:
    spec: Spec
    config: Config
    contents: Contents
    source: Source
    scenario: Scenario | None
    facts: list[StepFacts]
    order: str | None
    picture: Path | None

    def to_dict(self) -> dict[str, Any]:
        """The values for JSON."""
        source, scenario, file = self.source, self.scenario, self.picture
        result: dict[str, Any] = {"spec": str(self.spec), "picture": None if file is None else str(file)}
        result |= self.contents.to_dict()
        result |= {"format": source.format, "split_by": source.split_by, "notes": source.notes}
        if scenario is not None:
            result["steps"] = [
                {"step": s.number, "new": _names(source, s.new), "new_ids": s.new, "train": len(s.train_ids)}
                | {"val": len(s.val_ids), "test": len(s.test_ids), "with_old": f.with_old, "with_future": f.with_future}
                | {"seen_before": f.seen_before}
                for s, f in zip(scenario.steps, self.facts, strict=True)
            ]
            result["protocol_summary"] = protocol_summary(scenario, self.facts)
            result["better_order"] = self.order
            result["warnings"] = scenario.warnings
        return result | {"config": self.config.to_dict()}


def _inspect(
    spec_text: str, path: Path | None, picture: Path | None, config_file: Path | None, settings: Mapping[str, Any]
) -> _Found:
    with suppress(OSError, ValueError):  # not a valid path: a specification
        if path is None and spec_text not in SOURCES and Path(spec_text).is_dir():
            spec_text, path = "folder", Path(spec_text)
    if path is None and re.match(r"[./~]|[^:]*/$", spec_text) and not re.search(r"\.py(:|$)", spec_text):
        raise DataError(f"{spec_text}: no such folder. Name the folder that contains your data.")
    spec = read_spec(spec_text)
    config = load_config(spec.source, config_file, settings)
    if picture is not None:
        check_may_write(picture)
    source = open_source(spec.source, path, config)
    if spec.task is not None:
        # Report a wrong task before reading thousands of files.
        class_lists(spec, source.classes, config.data.left_out)
    with progress(f"reading {spec.source}") as report:
        contents, indexes = audit(source, report)
    scenario, facts, order = None, [], None
    if spec.task is not None:
        scenario = build_scenario(spec, source, indexes["train"], indexes["val"], **config.scenario_policy())
        facts = step_facts(scenario, indexes["train"])
        order = better_order(scenario, indexes["train"])
    if picture is not None:
        save_grid(source, scenario, picture)
    return _Found(spec, config, contents, source, scenario, facts, order, picture)


def _print(found: _Found) -> None:
    contents, source, scenario, facts = found.contents, found.source, found.scenario, found.facts
    out = console()
    splits = list(contents.images)
    title = f"{contents.name}: " + ", ".join(quantity(contents.images[s], f"{s} image") for s in splits)
    columns = ["id", "class", *(f"{s} {what}" for s in splits for what in ("images", "pixels", "share"))]
    total = {s: max(1, sum(c.pixels[s] for c in contents.classes)) for s in splits}
    rows: list[list[Any]] = []
    for c in contents.classes:
        shares = {s: f"{100 * c.pixels[s] / total[s]:.2f} %" for s in splits}
        rows.append([c.id, c.name, *(v for s in splits for v in (c.images[s], c.pixels[s], shares[s]))])
    print_table(title, columns, rows)
    if source.format:
        out.print(f"Recognised: {source.format}. Split by: {source.split_by}.", soft_wrap=True)
    for note in source.notes:
        out.print(note, soft_wrap=True)
    for split, sizes in contents.sizes.items():
        if sizes:
            listed_sizes = ", ".join(f"{name} {size}" for name, size in sizes.items() if name != "different")
            void = f"{100 * contents.void_share[split]:.2f} % of the pixels are void"
            out.print(f"{split}: {listed_sizes} ({quantity(int(sizes['different']), 'size')}); {void}")
    if scenario is not None:
        columns = ["step", "new classes", "train", "with old", "with future", "seen before", "val", "test"]
        rows = [
            [s.number, ", ".join(_names(source, s.new)) or "(all, another part)", f.train]
            + [f.with_old, f.with_future, f.seen_before, len(s.val_ids), len(s.test_ids)]
            for s, f in zip(scenario.steps, facts, strict=True)
        ]
        out.print()
        print_table(f"{scenario.spec}: images of each step", columns, rows)
        out.print(COLUMNS)
        out.print(protocol_summary(scenario, facts))
        for warning in scenario.warnings:
            out.print(f"warning: {warning}")
        if found.order is not None:
            out.print(f"In this order every step has images: {found.order}", soft_wrap=True)
        elif any(not fact.train for fact in facts):
            out.print("No class order was found that gives every step images. @overlapped works with any order.")
    out.print()
    if contents.problems:
        print_table(
            quantity(len(contents.problems), "problem"),
            ["kind", "file", "detail"],
            [[p.kind, p.file, p.detail] for p in sorted(contents.problems, key=lambda p: (p.kind, p.file))],
        )
    else:
        out.print("No problems found.")
    if found.picture is not None:
        out.print(f"Picture grid: {found.picture}", soft_wrap=True)


def _names(source: Source, ids: Sequence[int]) -> list[str]:
    return [source.classes[c] for c in ids]
