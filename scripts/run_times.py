"""Where the time of runs went, read from their logs, as JSON: results/speed/runs.json is what it printed.

    python scripts/run_times.py RUN ...

For each run: the seconds from its start to its last score, and for each step the images per second (median of the log),
the seconds before training (decoding, and whatever else comes first), of training, and of scoring.
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any


def times(run: Path) -> dict[str, Any]:
    """Of a run that was trained in one go (a pause would be counted, too)."""
    entries = [json.loads(line) for line in (run / "log.jsonl").read_text(encoding="utf-8").splitlines()]
    start = next(entry for entry in entries if entry["event"] == "start")
    scores = {entry["step"]: entry["time"] for entry in entries if entry["event"] == "score"}
    steps, before = [], start["time"]
    for number, scored in scores.items():
        said = [entry for entry in entries if entry["event"] == "train" and entry["step"] == number]
        step: dict[str, Any] = {"step": number}
        if said:  # otherwise its model was there already
            rates = [entry["images_per_second"] for entry in said]
            first, last = said[0], said[-1]
            pace = (last["time"] - first["time"]) / (last["iteration"] - first["iteration"])
            begun = max(before, first["time"] - pace * first["iteration"])  # about: the first ones may be slower
            step |= {"images_per_second": statistics.median(rates), "before": begun - before}
            step |= {"training": last["time"] - begun, "passes": _passes(entries, number)}
            before = last["time"]
        steps.append({**step, "scoring": scored - before})
        before = scored
    return {"method": start["method"], "seconds": before - start["time"], "steps": steps}


def _passes(entries: list[dict[str, Any]], number: int) -> str:
    return next(entry["how"] for entry in entries if entry["event"] == "passes" and entry["step"] == number)


if __name__ == "__main__":
    print(json.dumps([times(Path(run)) for run in sys.argv[1:]], indent=1))
