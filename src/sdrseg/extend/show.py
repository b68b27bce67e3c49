"""What the verbs of this room print."""

from __future__ import annotations

from dataclasses import asdict

from sdrseg.distributed import Processes
from sdrseg.extend.run import Extension
from sdrseg.terminal import console, print_json, print_table


def show_extension(done: Extension, json: bool) -> None:
    """What was kept and lost, and the verdict; of several processes the first says it."""
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
            f"old test images are not at hand; on the new images, {100 * result['kept_elsewhere']:.1f} % of the pixels "
            f"outside the new classes are what they were"
        )
    if result["new_iou"] is not None:
        out.print(f"new classes reach {result['new_iou']:.1f} ({result['held_out_images']} held-out images)")
    verdict = result["verdict"]
    if verdict["asked"]:
        out.print("verdict: as demanded" if verdict["met"] else f"verdict: MISSED: {'; '.join(verdict['missed'])}")
    out.print(f"run folder: {done.run}", soft_wrap=True)


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:z.1f}"
