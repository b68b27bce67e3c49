"""The output of the commands that extend models."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from sdrseg.distributed import Processes
from sdrseg.extend.run import Extension
from sdrseg.terminal import console, print_json, print_table


def show_extension(done: Extension, json: bool) -> None:
    """Print what was kept and lost, and the verdict; only the first of several processes prints."""
    if Processes().rank > 0:
        return
    if json:
        print_json({**asdict(done), "run": str(done.run)})
        return
    result, out = done.result, console()
    rows = [[c["name"], *(_number(c[key]) for key in ("before", "after", "lost"))] for c in result["old"]]
    rows += [[c["name"], "new", _number(c["iou"]), "–"] for c in result["new"]]
    print_table(f"IoU before and after step {done.step}, in per cent", ["class", "before", "after", "lost"], rows)
    if result["forgetting"] is not None:
        out.print(f"old classes lost {result['forgetting']:.1f} points on average ({result['old_images']} test images)")
    elif result["kept_elsewhere"] is not None:
        out.print(
            f"old test images are not available; on the new images, {100 * result['kept_elsewhere']:.1f} % of the "
            f"pixels outside the new classes are predicted as before"
        )
    if result["new_iou"] is not None:
        out.print(f"new classes reach {result['new_iou']:.1f} ({result['held_out_images']} held-out images)")
    verdict = result["verdict"]
    if verdict["asked"]:
        out.print("verdict: PASSED" if verdict["met"] else f"verdict: MISSED: {'; '.join(verdict['missed'])}")
    out.print(f"run folder: {done.run}", soft_wrap=True)


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
            ", ".join(s["classes"]),
            s["data"],
            s["model"][:12],
            *(
                _number(None if s["miou"] is None or s["miou"][g] is None else 100 * s["miou"][g])
                for g in ("old", "new")
            ),
        ]
        for s in found["steps"]
    ]
    heads = ["step", "made", "method", "new classes", "data", "model", "mIoU old", "new"]
    print_table(found["run"], heads, rows)
    for change in found["changes"]:
        console().print(f"{change['date']}: {change['what']}", soft_wrap=True)
    for step in found["broken"]:
        console().print(f"step {step} was not trained from the model of the step before it")


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:z.1f}"
