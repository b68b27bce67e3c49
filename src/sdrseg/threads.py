"""How many threads compute on a CPU, and how they wait for each other.

PyTorch takes every core, and its threads (OpenMP) wait for each other in busy loops. Next to other programs this
is slow: a thread waits, at full load, for one that has no core. So threads wait in such loops only briefly, and
there are as many of them as there are free cores. Only the commands do this, and only if the user has not set these
variables: rounding depends on the number of threads, and a fixed OMP_NUM_THREADS gives the same bits every time.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from pathlib import Path

CHOICES = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "OMP_PROC_BIND", "GOMP_CPU_AFFINITY")
"""Variables that a user may have set; if any is set, nothing is changed."""
SPIN = "10000"  # turns of a busy loop before a thread sleeps, about 0.2 ms; measured by benchmarks/busy.py
CHECK_SECONDS = 3.0  # between two measurements of the load

_load: Load | None = None


def prepare() -> None:
    """Call this before torch is imported, which reads the environment once."""
    global _load
    if "torch" in sys.modules or any(name in os.environ for name in CHOICES):
        return
    os.environ["GOMP_SPINCOUNT"] = SPIN
    _load = Load()


def adapt(at_once: bool = False) -> None:
    """Use as many threads as there are free cores now. Call it often: it measures the load every few seconds."""
    if _load is None or not (at_once or time.monotonic() - _load.since > CHECK_SECONDS):
        return
    import torch

    threads = free_cores(cores(), len(_allowed()), _load.of_others())
    if threads != torch.get_num_threads():
        torch.set_num_threads(threads)


def free_cores(ours: float, available: int, used: float) -> int:
    """How many whole cores we use, of `available` cores of which others use `used` and we may use `ours`."""
    return max(1, int(min(ours, available - used) + 0.5))


class Load:
    """The load of other programs on the cores that this process may use, since the last measurement."""

    def __init__(self) -> None:
        self.since, self._used = time.monotonic(), _seconds_of_others()

    def of_others(self) -> float:
        """The load in cores; 0 if unknown."""
        now, used = time.monotonic(), _seconds_of_others()
        load = (used - self._used) / max(now - self.since, 1e-3)
        self.since, self._used = now, used
        return max(0.0, load)


def _seconds_of_others() -> float:
    return _busy_seconds() - _own_seconds()


def cores() -> float:
    """The cores that this process may use: those it is bound to, limited by the quota of its control group."""
    return min([float(len(_allowed())), *_quotas()])


def _allowed() -> set[int]:
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


def _quotas(root: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")) -> list[float]:
    """Cores granted by the control groups this process is in, in versions 2 and 1 of Linux's interface."""
    found = []
    for line in _read(membership).splitlines():
        _, controllers, path = line.split(":", 2)
        top = root if not controllers else root / "cpu" if "cpu" in controllers.split(",") else None
        group = None if top is None else top / path.lstrip("/")
        while top is not None and group is not None and group.is_relative_to(top):
            fields = _read(group / "cpu.max").split()
            if not fields:
                fields = [*_read(group / "cpu.cfs_quota_us").split(), *_read(group / "cpu.cfs_period_us").split()]
            if len(fields) == 2 and all(field.isdigit() for field in fields) and int(fields[1]) > 0:
                found.append(int(fields[0]) / int(fields[1]))
            group = group.parent
    return [quota for quota in found if quota > 0]


def _busy_seconds() -> float:
    """CPU time that all programs have used on the cores that this process may run on."""
    names = {f"cpu{number}" for number in _allowed()}
    ticks = 0
    for line in _read(Path("/proc/stat")).splitlines():
        name, *counts = line.split()
        if name in names:
            user, nice, system, _idle, _iowait, irq, softirq, *_ = map(int, counts)
            ticks += user + nice + system + irq + softirq
    return ticks / _ticks_per_second()


def _own_seconds() -> float:
    """CPU time of this process and of the worker processes that it has started."""
    total = time.process_time()
    for child in multiprocessing.active_children():
        fields = _read(Path(f"/proc/{child.pid}/stat")).rpartition(")")[2].split()
        total += (int(fields[11]) + int(fields[12])) / _ticks_per_second() if len(fields) > 12 else 0.0
    return total


def _ticks_per_second() -> int:
    return os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""
