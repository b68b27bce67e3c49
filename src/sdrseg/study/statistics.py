"""Statistics over seeds: means, standard deviations, and paired differences with confidence intervals."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

T95 = [12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131]
T95 += [2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042]
"""Student's t, two-sided 95 %, for 1 to 30 degrees of freedom."""
NORMAL95 = 1.959964
FEWEST = 3
"""With fewer seeds no difference is claimed: the interval of two seeds is far too wide."""


@dataclass(frozen=True)
class Spread:
    """Mean and sample standard deviation (None for a single value) over seeds."""

    mean: float
    std: float | None
    count: int

    def text(self, sign: bool = False) -> str:
        mean = f"{round(self.mean, 1) + 0.0:{'+' if sign else ''}.1f}"  # + 0.0: never -0.0
        return mean if self.std is None else f"{mean} ± {self.std:.1f}"


def spread(values: Sequence[float]) -> Spread | None:
    if not values:
        return None
    return Spread(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None, len(values))


@dataclass(frozen=True)
class Difference:
    """A minus B, paired by seed. `half`: half the width of the 95 % interval, None with fewer than FEWEST seeds."""

    a: str
    b: str
    value: str
    mean: float
    error: float | None
    half: float | None
    seeds: tuple[int, ...]

    @property
    def shown(self) -> bool:
        """Whether the interval excludes 0."""
        return self.half is not None and abs(self.mean) > self.half

    def sentence(self) -> str:
        """What the seeds show, in a sentence."""
        what = f"{self.a} − {self.b}: {round(self.mean, 1) + 0.0:+.1f} points of {self.value}"  # + 0.0: never -0.0
        count = len(self.seeds)
        if count == 1:
            return f"{what} with one seed; other seeds may differ."
        if self.half is None:
            return f"{what} with {count} seeds (standard error {self.error:.1f}); too few to claim a difference."
        interval = f"95 % interval {self.mean - self.half:+.1f} to {self.mean + self.half:+.1f}, {count} seeds"
        if self.shown:
            better, worse = (self.a, self.b) if self.mean > 0 else (self.b, self.a)
            return f"{what} ({interval}): {better} is above {worse} in this setting."
        return f"{what} ({interval}): no difference shown."


def t95(freedom: int) -> float:
    """Student's t, two-sided 95 %; beyond the table the first terms of its expansion around the normal quantile."""
    if freedom <= len(T95):
        return T95[freedom - 1]
    z = NORMAL95
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)


def difference(a: str, b: str, value: str, of_a: Mapping[int, float], of_b: Mapping[int, float]) -> Difference | None:
    """The difference over the seeds that both have; None if they share none."""
    seeds = tuple(sorted(of_a.keys() & of_b.keys()))
    if not seeds:
        return None
    each = [of_a[seed] - of_b[seed] for seed in seeds]
    error = statistics.stdev(each) / math.sqrt(len(each)) if len(each) > 1 else None
    half = None
    if error is not None and len(each) >= FEWEST:
        half = error * t95(len(each) - 1)
    return Difference(a, b, value, statistics.fmean(each), error, half, seeds)
