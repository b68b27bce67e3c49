"""Timing of several ways to do one thing: interleaved, so that all of them see the same noise of the machine."""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torchvision


@dataclass(frozen=True)
class Spread:
    """A median and the quartiles on either side of it."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        digits = max(0, 2 - len(str(int(abs(self.median)))) + 1)
        return f"{self.median:.{digits}f} ({self.low:.{digits}f} to {self.high:.{digits}f})"


def spread(values: Sequence[float]) -> Spread:
    if len(values) == 1:
        return Spread(values[0], values[0], values[0])
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return Spread(median, low, high)


def ratio(slow: Sequence[float], fast: Sequence[float]) -> Spread:
    """How many times longer `slow` took, round by round: noise that lasts for a whole round cancels."""
    return spread([s / f for s, f in zip(slow, fast, strict=True)])


def rounds(
    sides: Mapping[str, Callable[[int], Any]], repetitions: int, clock: Callable[[], float] = time.process_time
) -> tuple[dict[str, list[float]], dict[str, list[Any]]]:
    """Seconds and results of each side, one after the other in every round; every second round goes backwards.

    A side is called with the number of the round; round 0 warms up and is not counted. The default clock is the CPU
    time of this process: seconds of one core, whatever else the machine is doing.
    """
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    results: dict[str, list[Any]] = {name: [] for name in sides}
    for number in range(repetitions + 1):
        names = list(sides)
        for name in names if number % 2 else reversed(names):
            start = clock()
            result = sides[name](number)
            took = clock() - start
            if number:
                seconds[name].append(took)
                results[name].append(result)
    return seconds, results


def kernel_times(once: Callable[[int], Any], iterations: int) -> dict[str, float]:
    """Milliseconds an iteration by the name of the kernel; on a CPU, of the operation."""
    gpu = torch.cuda.is_available()
    activity = torch.profiler.ProfilerActivity.CUDA if gpu else torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[activity]) as seen:
        for number in range(iterations):
            once(number)
        if gpu:
            torch.cuda.synchronize()
    took = {e.key: e.self_device_time_total if gpu else e.self_cpu_time_total for e in seen.key_averages()}
    return {name: microseconds / 1000 / iterations for name, microseconds in took.items()}


def device_name() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"


def versions() -> dict[str, str]:
    return {"python": platform.python_version(), "torch": torch.__version__, "torchvision": torchvision.__version__}


def plain(value: Any) -> Any:
    """`value` ready for JSON."""
    if isinstance(value, Spread):
        return asdict(value)
    if isinstance(value, Mapping):
        return {key: plain(v) for key, v in value.items()}
    return [plain(v) for v in value] if isinstance(value, list) else value
