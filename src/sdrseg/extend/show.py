"""The output of the commands that extend models."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from sdrseg.distributed import Processes
from sdrseg.errors import quantity
from sdrseg.extend.review import MATRICES
from sdrseg.extend.run import Extension
from sdrseg.extend.verdict import unmeasured, why_unmeasured
from sdrseg.terminal import console, print_json, print_table


def show_extension(done: Extension, json: bool) -> None:
    """Print what was kept and lost, and the verdict; only the first of several processes prints."""
    if Processes().rank > 0:
        return
    if json:
        result = {key: value for key, value in done.result.items() if key not in MATRICES}
        print_json({**asdict(done), "run": str(done.run), "result": result})
        return
    result, out = done.result, console()
    rows = [[c["name"], *(_number(c[key]) for key in ("before", "after", "lost"))] for c in result["old"]]
    rows += [[f"{c['name']} (new)", "–", _number(c["iou"]), "–"] for c in result["new"]]
    print_table(f"IoU in % before and after step {done.step}", ["class", "before", "after", "lost"], rows)
    out.print(_old_classes(result), soft_wrap=True)
    if text := _new_classes(result):
        out.print(text, soft_wrap=True)
    verdict = result["verdict"]
    if verdict["asked"]:
        outcome = "PASSED" if verdict["met"] else f"MISSED: {'; '.join(verdict['missed'])}"
        out.print(f"verdict: {outcome}", soft_wrap=True)
    out.print(f"run folder: {done.run}", soft_wrap=True)


def _old_classes(result: dict[str, Any]) -> str:
    """What the old classes lost, and on which images, or why it is not known."""
    if (lost := result["forgetting"]) is not None:
        lost = round(lost, 1)
        verb = "gained" if lost < 0 else "lost"
        counted = quantity(result["old_images"], "test image")
        if without := unmeasured(result):
            old = len(result["old"]) - 1
            counted = f"over {old - len(without)} of {old} old classes; {counted}"
        return f"old classes {verb} {abs(lost):.1f} points on average ({counted})"
    if (kept := result["kept_elsewhere"]) is None:
        return why_unmeasured(result)
    same = f"{100 * kept:.1f} % of the pixels outside the new classes are predicted as before"
    return f"{why_unmeasured(result)}; on the new images, {same}"


def _new_classes(result: dict[str, Any]) -> str:
    """The score of the classes of this step, and on which images; empty if they have none."""
    several = len(result["new"]) > 1
    names = ", ".join(c["name"] for c in result["new"])
    held_out, ignored = result["held_out_images"], result.get("unlabelled") == "ignore"
    counted = quantity(held_out, "held-out image") if held_out else "the training images"
    counted += f" and {quantity(result['old_images'], 'old test image')}" if result["old_images"] else ""
    if result["new_iou"] is not None:
        mean = "reach an IoU of {:.1f} on average" if several else "reaches an IoU of {:.1f}"
        counted += "; false alarms in the new images are not counted" if ignored else ""
        return f"{names}, added in this step, {mean.format(result['new_iou'])} ({counted})"
    if not ignored:
        return ""
    found = ", ".join(f"{c['found']:.1f} % of {c['name']}" for c in result["new"] if c["found"] is not None)
    why = "with --unlabelled ignore, false alarms count only in old test images of step 0"
    return f"{found} is found ({counted}), but an IoU cannot be measured: {why}"


def show_history(found: dict[str, Any], json: bool) -> None:
    """Print one line per step."""
    if json:
        print_json(found)
        return
    rows = [
        [
            s["step"],
            s["made"] or "–",
            s["method"],
            s["data"],
            s["model"][:12],
            ", ".join(s["classes"]),
            _percent(s["new_miou"]),
            _percent(s["old_miou"]),
        ]
        for s in found["steps"]
    ]
    headers = ["step", "made", "method", "data", "model", "new classes", "their mIoU", "mIoU of earlier classes"]
    print_table(f"{found['run']} (mIoU in per cent, with background where it is scored)", headers, rows)
    for step in found["steps"]:
        over, of = step["measured"] or (0, 0)
        if 0 < over < of:
            console().print(f"step {step['step']}: the means are over {over} of {of} classes")
    for change in found["changes"]:
        console().print(f"{change['date']}: {change['what']}", soft_wrap=True)
    for step in found["broken"]:
        console().print(f"step {step} was not trained from the model of the step before it")


def show_branches(found: dict[str, Any], json: bool) -> None:
    """IoU of the classes that both runs know, side by side."""
    if json:
        print_json(found)
        return
    keys = ("fork", "first", "second")
    rows = [[c["name"], *(_percent(c[key]) for key in keys)] for c in found["classes"]]
    rows.append(["mean", *(_percent(found["mean"][key]) for key in keys)])
    fork = found["shared_steps"] - 1
    print_table(f"IoU in % of the classes up to step {fork}", ["class", f"step {fork}", *found["runs"]], rows)
    for run, new, removed in zip(found["runs"], found["new"], found["removed"], strict=True):
        console().print(f"{run} adds {', '.join(new) or 'no class'}", soft_wrap=True)
        if removed:
            console().print(f"{run} removed {', '.join(removed)} (left out)", soft_wrap=True)
    if not found["same_images"]:
        console().print("the runs were scored on different images of these classes: do not compare their numbers")


def _percent(value: float | None) -> str:
    return _number(None if value is None else 100 * value)


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:z.1f}"
