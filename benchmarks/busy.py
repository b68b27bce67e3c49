"""Training on a busy CPU: images a second of each of several runs side by side.

`python busy.py` trains on generated data alone, beside one and beside three others, with what `sdrseg` chooses and with
a fixed thread for every core (which is what PyTorch does). A fair share is what one run does alone, divided by the
number of runs. Nothing else should run meanwhile: the load before each measurement is printed.
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
    given = parser.parse_args()
    rows = []
    for way in given.ways:
        alone = None
        for others in given.beside:
            load = os.getloadavg()[0]
            speeds = measure(WAYS[way], others + 1, given.seconds, given.settle)
            row = {"way": way, "beside": others, "images_per_second": speeds, "load_before": load}
            alone = statistics.mean(speeds) if others == 0 else alone
            if alone:
                row["share_of_fair"] = min(speeds) / (alone / (others + 1))
            rows.append(row)
            if not given.json:
                shown = ", ".join(f"{speed:.0f}" for speed in speeds)
                fair = f", the slowest at {100 * row['share_of_fair']:.0f} % of a fair share" if alone else ""
                print(f"{way}, beside {others}: {shown} images/s{fair} (load before: {load:.1f})", flush=True)
    if given.json:
        print(json.dumps({"cores": len(os.sched_getaffinity(0)), "spec": SPEC, "rows": rows}, indent=2))


if __name__ == "__main__":
    main()
