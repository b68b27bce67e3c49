"""Specification strings, SOURCE:TASK@PROTOCOL, and their class lists. TASK is one of

15-1            the first 15 classes, then one at a time (the last step takes the remaining ones)
15-1~7          the same, with a random class order (seed 7)
19-1b           a published order that follows no rule (see resources/orders.json)
1-15/16,17/rest explicit class lists, ids or names, steps separated by "/"; rest: all classes that no step names
offline         all classes in one step
random-5        the random-split study: 5 equal random parts, all classes in each (random-5~1: another seed)
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Literal, get_args

from sdrseg.errors import UsageError, nearest, quantity
from sdrseg.scenario.lists import ClassLists, explicit

LabelProtocol = Literal["sequential", "disjoint", "overlapped"]
PROTOCOLS: tuple[str, ...] = get_args(LabelProtocol)

# Names of some tasks in earlier code.
ALIASES = {
    "voc": {"15-5s": "15-1", "10-10s": "10-1", "10-5-5": "10-5"},
    "ade20k": {"50": "50-50", "50b": "50-50b", "50c": "50-50c"},
}

GRAMMAR = re.compile(
    r"""(?P<source>[^:@~]+) (: (?P<task>(?:"[^"]*"|[^@~"])+) (~(?P<seed>\d{1,18}))? )? (@(?P<protocol>[^@]*))?""",
    re.VERBOSE,
)


TASKS = re.compile(r"\d+-\d+[a-z]?|random-\d+|offline|.*[/,].*", re.DOTALL)


def is_task(text: str) -> bool:
    """Whether a text has the form of a task. Whether its classes exist depends on the data set."""
    return TASKS.fullmatch(text) is not None


@dataclass(frozen=True)
class Spec:
    """A parsed specification. `task` and `protocol` are None if it only names a data set."""

    source: str
    task: str | None = None
    seed: int | None = None
    protocol: LabelProtocol | None = None

    def __str__(self) -> str:
        task = "" if self.task is None else f":{self.task}"
        seed = "" if self.seed is None else f"~{self.seed}"
        return f"{self.source}{task}{seed}" + ("" if self.protocol is None else f"@{self.protocol}")


def parse_spec(text: str) -> Spec:
    """Parse a specification; an error names the unknown value and the nearest valid one.

    Does not check the data set; see `find_source`.
    """
    match = GRAMMAR.fullmatch(text.strip())
    if match is None:
        form = "Write SOURCE:TASK@PROTOCOL, such as voc:15-1@disjoint, and a class name with @ in double quotes."
        raise UsageError(f"{text!r} is not a specification. {form}")
    source, task, protocol = match["source"], match["task"], match["protocol"]
    if protocol is not None and protocol not in PROTOCOLS:
        raise UsageError(f"{text!r}: unknown protocol {protocol!r}{nearest(protocol, PROTOCOLS)}")
    if task is None:
        if protocol is not None:
            raise UsageError(f"{text!r} names a protocol but no task. Write {source}:TASK@{protocol}.")
        return Spec(source)
    task = ALIASES.get(source, {}).get(task, task)
    if task == "offline" or task.startswith("random-"):
        if protocol not in (None, "sequential"):
            raise UsageError(f"{text!r}: {task} labels every class in every step, so it takes no protocol @{protocol}.")
        protocol = "sequential"
    elif protocol is None:
        raise UsageError(f"{text!r} has no protocol. Add one of {', '.join('@' + p for p in PROTOCOLS)}.")
    seed = None if match["seed"] is None else int(match["seed"])
    return Spec(source, task, seed, protocol)  # type: ignore[arg-type]


def class_lists(spec: Spec, classes: tuple[str, ...], left_out: str = "refuse") -> ClassLists:
    """The raw ids of the new classes of each step; background (0) is the first class of step 0.

    left_out: with "refuse", every class must be in a step.
    """
    task, last = spec.task, len(classes) - 1
    published = published_orders().get(spec.source, {})
    if task is None:
        raise UsageError(f"{spec} names a data set but no task. Write {spec.source}:TASK@PROTOCOL.")
    rule = re.fullmatch(r"(\d{1,9})-(\d{1,9})", task)
    if spec.seed is not None and not rule and not task.startswith("random-"):
        raise UsageError(f"{spec}: ~{spec.seed} draws a class order, but {task} defines its own. Leave it out.")
    if task in published:
        return published[task]
    if task == "offline":
        return (tuple(range(last + 1)),)
    if parts := re.fullmatch(r"random-(\d{1,4})", task):  # with more parts, most would be empty
        if int(parts[1]) < 2:
            raise UsageError(f"{spec}: too few parts. Use 2 or more, or {spec.source}:offline.")
        return (tuple(range(last + 1)), *((),) * (int(parts[1]) - 1))
    if rule:
        first, each = int(rule[1]), int(rule[2])
        if first < 1 or each < 1 or first + each > last:
            raise UsageError(
                f"{spec}: {quantity(first, 'class')}, then {each} at a time, does not fit the "
                f"{quantity(last, 'class')} of {spec.source} (background not counted)."
            )
        order = list(range(1, last + 1))
        if spec.seed is not None:
            order.sort(key=lambda c: draw(spec.seed, c))
        later = [tuple(order[i : i + each]) for i in range(first, last, each)]
        return ((0, *order[:first]), *later)
    if "/" in task or "," in task or task[0] == '"' or task.strip().lower() in map(str.lower, classes):
        lists = explicit(spec, task, classes)
        missing = [f"{c} ({classes[c]})" for c in range(last + 1) if all(c not in step for step in lists)]
        if missing and left_out == "refuse":
            raise UsageError(
                f"{spec}: no step contains {', '.join(missing)}. Add them to a step (`rest` stands for all of them) or "
                f"leave them out with --set data.left_out=background or --set data.left_out=ignore."
            )
        return lists
    known = [*published, "offline", "random-5", "15-1"]
    raise UsageError(
        f"{spec}: unknown task {task!r}{nearest(task, known)} The general forms are A-B (A classes, then B each) "
        f"and class lists by step, such as 1,2/3 or cat/dog."
    )


@cache
def published_orders() -> dict[str, dict[str, ClassLists]]:
    """Class lists that follow no rule, by data set and task."""
    text = resources.files("sdrseg").joinpath("resources/orders.json").read_text()
    return {
        data_set: {task: tuple(tuple(step) for step in steps) for task, steps in tasks.items()}
        for data_set, tasks in json.loads(text).items()
    }


def draw(seed: int | None, item: object) -> bytes:
    """A sort key that gives the same random order on every machine."""
    return hashlib.blake2b(f"{seed}:{item}".encode(), digest_size=8).digest()
