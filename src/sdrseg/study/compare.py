"""Compares runs: means over seeds, and differences between methods with confidence intervals."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from sdrseg.errors import UsageError, quantity
from sdrseg.scenario import parse_spec
from sdrseg.study.cell import Cell, scores_of
from sdrseg.study.statistics import Difference, difference, spread
from sdrseg.study.tables import Block, Line, Table, Value, ranked

VALUES = ("old", "new", "all", "forgetting")
Group = dict[str, list[Cell]]  # cells of one setup by its label; they differ in the seed


def compare(cells: Sequence[Cell], transform: str | None = None, reference: str | None = None) -> Table:
    """A block per scenario with a line per setup; notes state the differences to the reference."""
    if not cells:
        raise UsageError("No results to compare. Name runs, results or folders of results.")
    if transform is not None and all(scores_of(cell, transform) is None for cell in cells):
        raise UsageError(f"No result was scored with {transform}. Leave out --eval.")
    blocks, notes, compared = [], [], 0
    specs = dict.fromkeys(spec_of(cell) for cell in cells)
    by_spec = {spec: grouped([cell for cell in cells if spec_of(cell) == spec], cells) for spec in specs}
    if reference is not None and not any(_named(reference, groups) for groups in by_spec.values()):
        known = dict.fromkeys(label for groups in by_spec.values() for label in groups)
        raise UsageError(f"--reference {reference}: not among {', '.join(known)}.")
    for spec, groups in by_spec.items():
        _require_comparable(groups)
        with_scores = {label: [c for c in some if scores_of(c, transform)] for label, some in groups.items()}
        lines, most = [], max(map(len, with_scores.values()))
        seeds = {label: {cell["seed"] for cell in some} for label, some in with_scores.items()}
        usual = next(found for found in seeds.values() if len(found) == most)
        for label, some in groups.items():
            found = [_values(cell, transform) for cell in with_scores[label]]
            values = (Value(spread([f[name] for f in found if f[name] is not None])) for name in VALUES)
            lines.append(Line(label, tuple(values), some[0]["scenario"] != "offline"))
            if not with_scores[label]:
                notes.append(f"{spec}: {label} was not scored with {transform}.")
            elif len(with_scores[label]) < most:
                notes.append(f"{spec}: {label} has {len(with_scores[label])} of {quantity(most, 'seed')}.")
            if seeds[label] - usual:
                own, others = (", ".join(map(str, sorted(some))) for some in (seeds[label], usual))
                notes.append(f"{spec}: {label} has other seeds ({own}) than the others ({others}), which adds noise.")
        rows = ranked(lines)  # forgetting is not ranked, because lower is better
        rows = tuple(Line(r.name, (*r.values[:3], Value(r.values[3].ours)), r.ranked) for r in rows)
        blocks.append(Block(spec, VALUES, rows))
        if reference is not None and not _named(reference, groups):
            notes.append(f"{spec}: no {reference}, so nothing is compared with it here.")
        found_here = differences(groups, "all", transform, reference)
        compared += len(found_here)
        notes += [f"{spec}: {d.sentence()}" for d in found_here]
    if compared > 1:
        notes.append(f"{compared} comparisons without correction: with many, some intervals exclude 0 by chance.")
    transforms = sorted({transform or cell["eval"] for cell in cells})
    images = " and ".join(sorted({cell["scored_on"] for cell in cells}))
    scored = f"mIoU in per cent on {images}, scored with {' and '.join(transforms)}"
    notes.append(f"{scored}; ± is the standard deviation over seeds.")
    return Table("compare", "", tuple(blocks), tuple(notes))


def spec_of(cell: Cell) -> str:
    return str(parse_spec(f"{cell['dataset']}:{cell['scenario']}@{cell['protocol']}"))


def grouped(cells: Sequence[Cell], among: Sequence[Cell] = ()) -> Group:
    """Cells of one scenario by setup; a label is the method, with preset and settings where these differ, `among` all
    cells that are compared."""
    setups: dict[str, list[Cell]] = {}
    for cell in cells:
        setups.setdefault(cell["setup"], []).append(cell)
    firsts = among or cells
    common = {
        key: value
        for key, value in firsts[0]["settings"].items()
        if all(cell["settings"].get(key) == value for cell in firsts)
    }
    several = len({cell["preset"] for cell in firsts}) > 1
    groups: Group = {}
    for setup, some in setups.items():
        first = some[0]
        own = {k: v for k, v in first["settings"].items() if k not in common and k != "train.seed"}
        parts = [first["method"], *([first["preset"]] if several else []), *(f"{k}={v}" for k, v in own.items())]
        label = " ".join(parts)
        groups[label if label not in groups else f"{label} {setup[:6]}"] = sorted(some, key=lambda cell: cell["seed"])
    return groups


def abbreviated(table: Table) -> Table:
    """The same table to be read by people: [A] in place of a list of several settings that several lines share, and a
    note on what each letter means."""
    short = short_labels(table)
    blocks = tuple(
        replace(block, lines=tuple(replace(line, name=short[line.name]) for line in block.lines))
        for block in table.blocks
    )
    anywhere = re.compile("|".join(re.escape(label) for label in sorted(short, key=len, reverse=True)))
    notes = [anywhere.sub(lambda found: short[found[0]], note) for note in table.notes]
    legend = {new.partition(" ")[2]: label.partition(" ")[2] for label, new in short.items() if new != label}
    return replace(table, blocks=blocks, notes=(*(f"{letter}: {rest}" for letter, rest in legend.items()), *notes))


def short_labels(table: Table) -> dict[str, str]:
    """Each label of a table with [A] in place of a list of several settings that several lines share."""
    labels = [line.name for block in table.blocks for line in block.lines]
    counts = Counter(rest for label in labels if (rest := label.partition(" ")[2]).count("=") > 1)
    recurring = [rest for rest, count in counts.items() if count > 1]
    letters = {rest: f"[{_letters(number)}]" for number, rest in enumerate(recurring)}
    split = {label: label.partition(" ")[::2] for label in labels}
    return {label: f"{method} {letters[rest]}" if rest in letters else label for label, (method, rest) in split.items()}


def _letters(number: int) -> str:
    """0 is A, 25 is Z, 26 is AA."""
    return (_letters(number // 26 - 1) if number > 25 else "") + chr(ord("A") + number % 26)


def differences(
    groups: Group, value: str, transform: str | None = None, reference: str | None = None
) -> list[Difference]:
    """The differences of every setup to the reference, by default the first of those with scores for most seeds."""
    by_seed = {
        label: {c["seed"]: v for c in some if (v := _values(c, transform)[value]) is not None}
        for label, some in groups.items()
    }
    base = max(groups, key=lambda label: len(by_seed[label])) if reference is None else _named(reference, groups)
    if base is None:
        return []
    found = [difference(label, base, value, by_seed[label], by_seed[base]) for label in groups if label != base]
    return [one for one in found if one is not None]


def _named(reference: str, groups: Group) -> str | None:
    """The label that is named, or that of the only setup of the method that is named; None if there is none."""
    if reference in groups:
        return reference
    of_method = [label for label in groups if label.partition(" ")[0] == reference]
    if len(of_method) > 1:
        raise UsageError(f"--reference {reference}: could be {' or '.join(of_method)}. Name one of them.")
    return of_method[0] if of_method else None


def _values(cell: Cell, transform: str | None) -> Mapping[str, Any]:
    scores = scores_of(cell, transform)
    if scores is None:
        return dict.fromkeys(VALUES)
    return {"forgetting": None, **scores}


def _require_comparable(groups: Group) -> None:
    """Raise an error if a setup has two results with one seed, or if runs were scored on different images."""
    for label, some in groups.items():
        seeds = Counter(cell["seed"] for cell in some)
        if twice := [seed for seed, count in seeds.items() if count > 1]:
            raise UsageError(f"{label}: two results with seed {twice[0]}. Leave one out.")
    scored = {cell["scored_on"] for some in groups.values() for cell in some}
    if len(scored) > 1:
        raise UsageError(f"These runs were scored on {' and '.join(sorted(scored))}; compare one kind at a time.")
    by_images = {
        cell["scored_images"]: label for label, some in groups.items() for cell in some if cell["scored_images"]
    }
    if len(by_images) > 1:
        one, other = [*by_images.values()][:2]
        raise UsageError(f"{one} and {other} have other test images or masks. Compare runs on the same data.")
