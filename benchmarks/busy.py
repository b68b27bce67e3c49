"""Training on a busy CPU: images per second of each of several simultaneous runs.

`python busy.py` trains on generated data alone, beside one and beside three others, with what `sdrseg` chooses and with
a fixed thread for every core (which is what PyTorch does). A fair share is what one run does alone, divided by the
number of runs. Nothing else should run meanwhile. Each number is the median of the slowest run over several repeats.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

SPEC = "shapes:6-4@disjoint"
WAYS: dict[str, dict[str, str]] = {
    "sdrseg": {},
    "a thread for each core": {"OMP_NUM_THREADS": str(len(os.sched_getaffinity(0)))},
    "passive": {"OMP_WAIT_POLICY": "PASSIVE"},
    "one thread": {"OMP_NUM_THREADS": "1"},
}
CHOICES = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


def measure(way: dict[str, str], runs: int, seconds: float, settle: float) -> list[float]:
    """Images a second of each run, while all of them train."""
    environment = {name: value for name, value in os.environ.items() if name not in CHOICES} | way
    words = ["train", SPEC, "--method", "ft", "--set", "train.epochs=100000", "--set", "run.save_minutes=1e6"]
    words += ["--set", "run.log_every=2"]
    with tempfile.TemporaryDirectory() as scratch:
        folders = [Path(scratch, str(number)) for number in range(runs)]
        processes = [
            subprocess.Popen(
                [sys.executable, "-m", "sdrseg", *words, "--out", folder, "--bases", f"{folder}-bases"],
                env=environment | {"SDRSEG_CACHE": f"{folder}-cache"},
                stderr=subprocess.DEVNULL,
            )
            for folder in folders
        ]
        try:
            while not all(_lines(folder) for folder in folders):
                if any(process.poll() is not None for process in processes):
                    raise SystemExit("a run ended before it could be measured")
                time.sleep(0.2)
            time.sleep(settle)
            begin = time.time()
            time.sleep(seconds)
            end = time.time()
            return [_speed(_lines(folder), begin, end) for folder in folders]
        finally:
            for process in processes:
                process.send_signal(signal.SIGKILL)
                process.wait()


def _lines(folder: Path) -> list[dict[str, Any]]:
    log = folder / "log.jsonl"
    lines = log.read_text().splitlines(keepends=True) if log.exists() else []
    entries = [json.loads(line) for line in lines if line.endswith("\n")]
    return [entry for entry in entries if entry["event"] == "train"]


def _speed(entries: list[dict[str, Any]], begin: float, end: float) -> float:
    """From the last line before a stretch of time to the last line within it."""
    inside = [e for e in entries if begin <= e["time"] <= end]
    before = [e for e in entries if e["time"] < begin][-1]
    if not inside:
        return 0.0
    images = 16 * (inside[-1]["iteration"] - before["iteration"])
    return images / (inside[-1]["time"] - before["time"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=15.0, help="of each measurement")
    parser.add_argument("--settle", type=float, default=8.0, help="seconds before it, in which each sees the others")
    parser.add_argument("--beside", type=int, nargs="+", default=[0, 1, 3], help="how many other runs")
    parser.add_argument("--ways", nargs="+", choices=[*WAYS], default=list(WAYS)[:2])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--repeat", type=int, default=3, help="times, in turns, so that all ways see the same noise")
    given = parser.parse_args()
    speeds: dict[tuple[str, int], list[list[float]]] = {}
    for _ in range(given.repeat):
        for others in given.beside:
            for way in given.ways:
                taken = measure(WAYS[way], others + 1, given.seconds, given.settle)
                speeds.setdefault((way, others), []).append(taken)
                if not given.json:
                    shown = ", ".join(f"{speed:.0f}" for speed in taken)
                    print(f"{way}, beside {others}: {shown} images/s", flush=True)
    rows: list[dict[str, Any]] = []
    for (way, others), repeats in speeds.items():
        row = {"way": way, "beside": others, "images_per_second": repeats}
        if 0 in given.beside:
            alone = statistics.median(taken[0] for taken in speeds[way, 0])
            row["share_of_fair"] = statistics.median(map(min, repeats)) * (others + 1) / alone
        rows.append(row)
    if given.json:
        print(json.dumps({"cores": len(os.sched_getaffinity(0)), "spec": SPEC, "rows": rows}, indent=2))
    else:
        for row in rows:
            fair = f", {100 * row['share_of_fair']:.0f} % of a fair share" if "share_of_fair" in row else ""
            slowest = statistics.median(map(min, row["images_per_second"]))
            print(f"{row['way']}, beside {row['beside']}: the slowest {slowest:.0f} images/s{fair}")


if __name__ == "__main__":
    main()
