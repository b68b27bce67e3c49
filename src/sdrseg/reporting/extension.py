"""What an extended run kept and lost in its last step, with pictures of the images that got worse."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from sdrseg.extend.verdict import Check, Limits, checks, why_unmeasured
from sdrseg.reporting.collect import RunRecord, damaged, number
from sdrseg.reporting.pictures import Row, TestData, apply_models, load_images, prediction_tile, start_row


@dataclass(frozen=True)
class ClassRow:
    """IoU of a class before and after, in per cent; before is None for a new class."""

    name: str
    before: float | None
    after: float | None
    new: bool

    @property
    def change(self) -> float | None:
        return None if self.before is None or self.after is None else self.after - self.before


@dataclass(frozen=True)
class Worst:
    """An image that got worse, and the share of its pixels that did."""

    id: str
    share: float


@dataclass(frozen=True, eq=False)
class Extension:
    """The contents of extension.json of the last step, and pictures by image."""

    label: str
    step: int
    classes: tuple[ClassRow, ...]
    forgetting: float | None
    new_iou: float | None
    kept_elsewhere: float | None
    unmeasured: str  # why forgetting was not measured; empty if it was
    old_images: int
    held_out_images: int
    ignored: bool  # unlabelled pixels of the new images are not scored
    checks: tuple[Check, ...]
    similar: tuple[tuple[str, str, float], ...]  # new class, old class, share of the new class's pixels
    regressions: tuple[Worst, ...] | None  # None: not known, because classes were removed afterwards
    false_alarms: tuple[Worst, ...] | None
    rows: dict[str, Row] = field(default_factory=dict)

    @property
    def old_measured(self) -> bool:
        """Whether some old test image labels an old class or background."""
        return any(c.before is not None for c in self.classes)

    @property
    def met(self) -> bool:
        return all(check.met for check in self.checks)


def read_extension(run: RunRecord) -> Extension | None:
    """The extension of the last finished step, if it was added by `sdrseg extend`."""
    if run.extension is None:
        return None
    try:
        return _read(run, run.extension)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise damaged(run, error) from error


def _read(run: RunRecord, saved: Any) -> Extension:
    old = [ClassRow(str(c["name"]), number(c["before"]), number(c["after"]), False) for c in saved["old"]]
    new = [ClassRow(str(c["name"]), None, number(c["iou"]), True) for c in saved["new"]]
    limits = Limits(*(number(saved["verdict"][key]) for key in ("max_forgetting", "min_new_iou")))
    similar = {} if saved["forecast"] is None else saved["forecast"]["similar"]
    return Extension(
        label=run.label,
        step=run.last,
        classes=(*old, *new),
        forgetting=number(saved["forgetting"]),
        new_iou=number(saved["new_iou"]),
        kept_elsewhere=number(saved["kept_elsewhere"]),
        unmeasured=why_unmeasured(saved),
        old_images=int(saved["old_images"]),
        held_out_images=int(saved["held_out_images"]),
        ignored=saved.get("unlabelled") == "ignore",
        checks=tuple(checks(saved, limits)),
        similar=tuple((str(n), str(o), float(share)) for n, old in similar.items() for o, share in old.items()),
        regressions=_worst(run, saved["regressions"]),
        false_alarms=_worst(run, saved["false_alarms"]),
    )


def _worst(run: RunRecord, saved: Any) -> tuple[Worst, ...] | None:
    if saved is None:
        return None
    tested = set(run.scenario["steps"][run.last]["test_ids"])
    return tuple(Worst(str(one["id"]), float(one["share"])) for one in saved if one["id"] in tested)


def picture(extension: Extension, run: RunRecord, tests: TestData) -> None:
    """Add predictions of the models before and after for the worst images that exist."""
    worst = dict.fromkeys(one.id for one in (*(extension.regressions or ()), *(extension.false_alarms or ())))
    images = load_images(run, tests.source, [id for id in worst if id in tests.ids])
    extension.rows.update({image.id: start_row(image, run.all_names, run.colours) for image in images})
    for output in apply_models(run, images, (extension.step - 1, extension.step)):
        tile = prediction_tile(output, run.label, run.all_names, run.colours)
        extension.rows[output.image.id].predictions.append([tile])


def photo_rows(rows: Sequence[Row], extensions: Sequence[Extension]) -> dict[str, Row]:
    """All photographs of the page by id, each once."""
    return {row.id: row for row in (*rows, *(row for one in extensions for row in one.rows.values()))}
