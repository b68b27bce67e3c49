"""`sdrseg demo`: continual segmentation on generated data in a few minutes, with a report."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from sdrseg.config import load_config
from sdrseg.distributed import Processes
from sdrseg.engine.launch import Interruption, make_fabric
from sdrseg.engine.run import train
from sdrseg.errors import UsageError
from sdrseg.reporting import write_report
from sdrseg.terminal import console, print_json, print_table

SPEC = "shapes:8-2@disjoint"
METHODS = {"ft": "fine-tuning", "mib": "MiB", "sdr": "SDR"}


class Outcome(NamedTuple):
    """mIoU in per cent: old classes before and after the new ones were added, new classes, all classes."""

    before: float
    old: float
    new: float
    all: float

    @property
    def lost(self) -> float:
        return self.before - self.old


def run_demo(out: Path, json: bool) -> None:
    """Train a base, add classes to it with three methods, print the results and write a report."""
    require_free(out)
    make_fabric(load_config("shapes"))  # sets up the processes, so that each knows its rank
    stderr = console(stderr=True)
    stderr.quiet = Processes().rank > 0
    stderr.print(f"{SPEC}: a network learns 8 classes of generated shapes, then 2 more without labels for the first 8.")
    outcomes = {}
    with Interruption() as interruption:
        for method, name in METHODS.items():
            interruption.check_signals()
            stderr.print(f"\n{name} ({method})")
            summary = train(SPEC, method, out / method, bases=out / "bases")
            outcomes[method] = _outcome(summary)
    if stderr.quiet:
        return
    page, notes = write_report([out / method for method in METHODS], out / "report.html", None)
    sentence = verdict(outcomes)
    if json:
        figures = {method: outcome._asdict() for method, outcome in outcomes.items()}
        print_json({"spec": SPEC, "miou": figures, "verdict": sentence, "report": str(page), "notes": notes})
        return
    headers = ["method", "old classes before", "old classes after", "new classes", "all classes"]
    rows = [[METHODS[m], *(f"{v:.1f}" for v in outcome)] for m, outcome in outcomes.items()]
    print_table("mIoU on test images, in per cent", headers, rows)
    lines = [sentence, f"Report with pictures: {page}", *(f"note: {note}" for note in notes)]
    for line in lines:
        console().print(line, soft_wrap=True)


def require_free(out: Path) -> None:
    """Raise an error unless `out` is a new or empty folder, or that of an earlier demo, which is resumed."""
    if out.exists() and not out.is_dir():
        raise UsageError(f"--out {out} is a file. Choose an empty or a new folder.")
    ours = {*METHODS, "bases", "report.html"}
    if out.is_dir() and (foreign := sorted(file.name for file in out.iterdir() if file.name not in ours)):
        raise UsageError(
            f"--out {out} contains {foreign[0]} and is not the folder of a demo. Choose an empty or a new folder."
        )


def _outcome(summary: Mapping[str, Any]) -> Outcome:
    first, last = summary["miou_by_step"][0], summary["miou_by_step"][-1]
    return Outcome(*(100 * value for value in (first["all"], last["old"], last["new"], last["all"])))


def verdict(outcomes: Mapping[str, Outcome]) -> str:
    """One sentence that summarises any numbers."""
    ft, sdr, mib = outcomes["ft"], outcomes["sdr"], outcomes["mib"]
    if ft.lost > ft.before / 2:
        start = "Fine-tuning forgets"
    elif ft.lost > 1:
        start = "Fine-tuning forgets a little"
    else:
        start = "Here even fine-tuning does not forget"
    start += f" (old classes {ft.before:.1f} → {ft.old:.1f})"
    less = ft.lost - sdr.lost
    if less > 1:
        kept, joint = "far more" if less > ft.before / 4 else "more", "; " if ft.lost > 1 else ", and "
    elif less < -1:
        kept, joint = "less", ", but "
    else:
        kept, joint = "no more", ", and "
    middle = f"SDR keeps {kept} (→ {sdr.old:.1f}, MiB → {mib.old:.1f})"
    costs = ft.new - sdr.new
    how = "less well" if costs > 1 else "better" if costs < -1 else "equally well"
    end = f"learns the new classes {how} ({sdr.new:.1f} against {ft.new:.1f}, MiB {mib.new:.1f})"
    linked = " and " if (less > 1) == (costs <= 1) else ", but "
    return f"{start}{joint}{middle}{linked}{end}."
