"""What the commands print about a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sdrseg.distributed import Processes
from sdrseg.metrics import StepScore
from sdrseg.terminal import console, print_json, print_table


def show_summary(folder: Path, summary: dict[str, Any], json: bool) -> None:
    """Print the means after each step and the paths of all outputs, in the first process only."""
    if Processes().rank > 0:
        return
    if json:
        print_json({"run": str(folder), **summary})
        return
    columns = {"old": "old", "new": "new", "all": "all", "harmonic": "harmonic mean"}
    has_background = any(value is not None for value in summary["class_by_step"][0])  # as a class that is scored
    if has_background:
        columns |= {"old_without_background": "old, no background", "all_without_background": "all, no background"}
    rows = [[k, *(_percent(means[n]) for n in columns)] for k, means in enumerate(summary["miou_by_step"])]
    title = f"mIoU after each step on {summary['scored_on']}, in per cent"
    print_table(title, ["step", *columns.values()], rows)
    out = console()
    out.print(f"step-averaged mIoU {_percent(summary['step_averaged_miou'])}", markup=False)
    if summary["steps"] > 1:
        of = ", without background" if has_background else ""
        out.print(f"forgetting at the end{of} {_percent(summary['forgetting']['final'])}", markup=False)
    if "intransigence" in summary:
        out.print(f"intransigence against offline {_percent(summary['intransigence']['mean'])}", markup=False)
    out.print(f"run folder: {folder}", markup=False)


def evaluate_run(folder: Path, data: Path | None, json: bool, transform: str | None = None) -> bool:
    """Score all finished steps again; returns whether the scores equal those from training."""
    from sdrseg.engine.job import EXTENDED_IMAGES
    from sdrseg.engine.rescore import score_again

    results = score_again(folder, data, transform=transform)
    if json and Processes().rank == 0:
        print_json(results)
    elif Processes().rank == 0:
        rows = [[r["step"], *(_percent(r["miou"][n]) for n in ("old", "new", "all")), _same(r)] for r in results]
        again = transform or any(r["same"] is not None for r in results)
        how = (", scored again" if again else ", not scored again") + (f" with {transform}" if transform else "")
        images = {r["scored_on"] for r in results}  # of an extended run: step 0 was scored on a part of the others
        shown = EXTENDED_IMAGES if EXTENDED_IMAGES in images else " and ".join(sorted(images))
        print_table(
            f"mIoU on {shown}{how}, in per cent",
            ["step", "old", "new", "all", "same as in training"],
            rows,
        )
        if len(results) > 2 and EXTENDED_IMAGES in images:
            console().print("old: the classes of step 0; new: those of all later steps", markup=False)
        for one in map(StepScore.from_dict, results):
            over, of = one.measured()["all"]
            if 0 < over < of:
                console().print(f"step {one.step}: the means are over {over} of {of} classes", markup=False)
        for reason in sorted({r.get("difference") or "" for r in results} - {""}):
            console().print(reason, markup=False, soft_wrap=True)
    return all(r["same"] is not False for r in results)


def _same(result: dict[str, Any]) -> str:
    if result["same"] is None:
        return "not compared"
    return "yes" if result["same"] else f"NO, {_percent(result['miou_then']['all'])}"


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:z.1f}"
