"""What the user requires of an extension, and whether it is met. Works on extension.json, so a report can ask again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from sdrseg.errors import UsageError, quantity


@dataclass(frozen=True)
class Limits:
    """The requirements of the user, in points of IoU."""

    max_forgetting: float | None = None
    min_new_iou: float | None = None

    def __post_init__(self) -> None:
        for name, value, least in (("max-forgetting", self.max_forgetting, -100), ("min-new-iou", self.min_new_iou, 0)):
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int | float):  # Python does not check types
                raise UsageError(f"--{name} {value!r}: not a number. Use points of IoU, from {least} to 100.")
            if not least <= value <= 100:
                raise UsageError(f"--{name} {value:g}: points of IoU, from {least} to 100.")


def unmeasured(result: Mapping[str, Any]) -> list[str]:
    """The old classes, without background, that no old test image shows: what they lost is not known."""
    return [str(one["name"]) for one in result["old"][1:] if one["lost"] is None]


def why_unmeasured(result: Mapping[str, Any]) -> str:
    """Why forgetting was not measured; empty if it was."""
    if result["forgetting"] is not None:
        return ""
    if len(result["old"]) == 1:
        return "no old class is left besides background"
    if not result["old_images"]:
        return "old test images are not available"
    return f"no old class is labelled in the {quantity(result['old_images'], 'old test image')}"


@dataclass(frozen=True)
class Check:
    """A requirement, and whether it is met; a value of None could not be measured, which is not met."""

    text: str
    value: float | None
    met: bool
    missed: str
    """What to say if it is not met."""


def checks(result: Mapping[str, Any], limits: Limits) -> list[Check]:
    """The requirements, one by one. Background has to meet the limit of forgetting, too, where it is scored."""
    found = []
    lost, without = result["forgetting"], unmeasured(result)
    if (most := limits.max_forgetting) is not None:
        points = f"{most:g} {'point' if most == 1 else 'points'}"
        also = f" was not measured for {', '.join(without)}" if lost is not None and without else ""
        text = f"old classes lose at most {points} on average" + (f", but{also}" if also else "")
        outcome = "could not be measured" if lost is None else f"is {lost:.1f} points"
        outcome += f" and{also}" if also else ""
        missed = f"forgetting {outcome}, the limit is {most:g}"
        found.append(Check(text, lost, lost is not None and not without and lost <= most, missed))
        if (background := result["old"][0]["lost"]) is not None:
            missed = f"background lost {background:.1f} points, the limit is {most:g}"
            found.append(Check(f"background loses at most {points}", background, background <= most, missed))
    if (least := limits.min_new_iou) is not None:
        reached = result["new_iou"]
        outcome = "could not be measured" if reached is None else f"is {reached:.1f}"
        text = f"new classes reach an IoU of at least {least:g} % on average"
        missed = f"IoU of the new classes {outcome}, the minimum is {least:g}"
        found.append(Check(text, reached, reached is not None and reached >= least, missed))
    return found


def verdict(result: Mapping[str, Any], limits: Limits) -> dict[str, Any]:
    """Whether each requirement is met, as saved in extension.json."""
    asked = checks(result, limits)
    missed = [check.missed for check in asked if not check.met]
    return {"asked": bool(asked), "met": not missed, "missed": missed, **asdict(limits)}
