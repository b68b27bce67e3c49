"""Label remapping: a 256-entry table against one Python call for every pixel.

    python benchmarks/remap.py [--json]

A label of 512×512 pixels is mapped to the channels of the first step of VOC 15-5 (21 classes, 16 of them learned) and
of ADE20K 100-50 (151 classes, 101 of them learned). The Python function is the one of earlier code: it asks whether
the class is in the list of learned ones and, if so, looks up its channel. The results must be equal. The ratio is the
time of the faster way to call that function (np.vectorize, Tensor.apply_) over the time of ours, both on one core;
at least 50 is required, otherwise the exit code is 1.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from sdrseg.datasets.batches import relabel
from sdrseg.labels import VOID
from sdrseg.scenario import Step, build_scenario, parse_spec
from sdrseg.terminal import print_json, print_table

from timing import plain, ratio, rounds, spread, versions

REQUIRED = 50
SIDE = 512
Label = NDArray[np.uint8]


@dataclass(frozen=True)
class AnImage:
    """One image that holds every class."""

    ids: tuple[str, ...] = ("image",)

    @property
    def present(self) -> NDArray[np.bool_]:
        return np.ones((1, 256), bool)


class Classes(NamedTuple):
    """All that a scenario has to know of a data set."""

    name: str
    classes: tuple[str, ...]
    score_background: bool = True
    partition: Literal["latest", "balanced"] = "latest"


def first_step(spec: str, classes: int) -> Step:
    data = Classes(spec.partition(":")[0], tuple(f"class {c}" for c in range(classes)))
    return build_scenario(parse_spec(spec), data, AnImage(), AnImage()).steps[0]


def some_label(classes: int) -> Label:
    """Rectangles of all classes, and void."""
    draw = np.random.default_rng(0)
    blocks = draw.choice([*range(classes), VOID], size=(SIDE // 16, SIDE // 16))
    return blocks.astype(np.uint8).repeat(16, axis=0).repeat(16, axis=1)


def per_pixel(step: Step) -> Callable[[int], int]:
    """What earlier code does: membership in a list, then a dictionary."""
    known = [*step.channels, VOID]
    channel = {c: i for i, c in enumerate(step.channels)} | {VOID: VOID}
    return lambda x: channel[x] if x in known else 0


def compare(spec: str, classes: int, repetitions: int) -> dict[str, Any]:
    step, label = first_step(spec, classes), some_label(classes)
    function = per_pixel(step)
    vectorised = np.vectorize(function, otypes=[np.uint8])
    tensor, table = torch.from_numpy(label)[None], torch.tensor(step.train_table)
    inside = torch.zeros(tensor.shape, dtype=torch.bool)
    often = 20  # calls of ours in each round: one is too short for the clock
    sides: dict[str, tuple[int, Callable[[], Label]]] = {
        "np.vectorize": (1, lambda: vectorised(label)),
        "Tensor.apply_": (1, lambda: tensor.clone().apply_(function)[0].numpy()),
        "relabel": (often, lambda: relabel(tensor, inside, table)[0].numpy()),
        "np.take": (often, lambda: np.take(step.train_table, label)),
    }

    def repeat(calls: int, call: Callable[[], Label]) -> Callable[[int], Label]:
        return lambda _: [call() for _ in range(calls)][-1]

    seconds, results = rounds({name: repeat(*side) for name, side in sides.items()}, repetitions)
    expected = step.train_table[label]
    for name, labels in results.items():
        assert all(np.array_equal(expected, label) for label in labels), f"{spec}: {name} gives other labels"
    each = {name: [1000 * s / sides[name][0] for s in seconds[name]] for name in sides}
    faster_function = min("np.vectorize", "Tensor.apply_", key=lambda name: spread(each[name]).median)
    return {
        "scenario": spec,
        "classes": classes,
        "learned": len(step.channels),
        "milliseconds": {name: spread(values) for name, values in each.items()},
        "against": faster_function,
        "ratio": {ours: ratio(each[faster_function], each[ours]) for ours in ("relabel", "np.take")},
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=9)
    parser.add_argument("--json", action="store_true", help="machine-readable output")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    results = [
        compare("voc:15-5@overlapped", 21, arguments.repetitions),
        compare("ade20k:100-50@overlapped", 151, arguments.repetitions),
    ]
    met = all(value.median >= REQUIRED for result in results for value in result["ratio"].values())
    if arguments.json:
        print_json(plain({"versions": versions(), "required": REQUIRED, "met": met, "results": results}))
    else:
        for result in results:
            title = f"{result['scenario']}, first step: milliseconds per {SIDE}×{SIDE} label, median (quartiles)"
            faster = result["ratio"]
            rows = [
                (name, f"{time}", f"{faster[name]}" if name in faster else "")
                for name, time in result["milliseconds"].items()
            ]
            print_table(title, ("way", "ms", f"times faster than {result['against']}"), rows)
        print(f"Required: at least {REQUIRED} times faster. {'Met.' if met else 'NOT met.'}")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
