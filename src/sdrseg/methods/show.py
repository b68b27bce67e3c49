"""`sdrseg methods`: the methods, and where each of their numbers comes from."""

from __future__ import annotations

from typing import Any

from sdrseg.config import load_config
from sdrseg.errors import UsageError
from sdrseg.methods import (
    PRESETS,
    Method,
    StepInfo,
    find_method,
    list_methods,
    method_layers,
    own_sections,
    resolve_method,
)
from sdrseg.methods.studies import STUDIES
from sdrseg.scenario.spec import ALIASES, is_task
from sdrseg.terminal import console, print_json, print_table

MEMORY = (15, 256)  # classes and channels for which the size of a memory is shown


def show_methods(pattern: str, json: bool) -> None:
    """One line for each method whose name fits the pattern."""
    found = list_methods(pattern)
    if not found:
        raise UsageError(f"{pattern!r} fits the name of no method. Run `sdrseg methods` to list all.")
    if json:
        print_json([_brief(method) for method in found])
        return
    headers = ["name", "summary", "objective of later steps", "step 0"]
    for title, chosen in (
        ("Methods", [m for m in found if m not in STUDIES]),
        ("Studies", [m for m in found if m in STUDIES]),
    ):
        rows = [[m.name, m.summary, _build(m).objective(), _whose_step0(m)] for m in chosen]
        if rows:
            print_table(title, headers, rows)


def show_method(name: str, preset: str, task: str | None, json: bool) -> None:
    """The terms, weights and settings of a method, and the source of each value."""
    method = find_method(resolve_method(name))
    task = next((names[task] for names in ALIASES.values() if task in names), task)
    built = _build(method, preset, task)
    weights = {"ce": 1.0} | {n: w for n, w in built.weights().items() if w > 0} if built.iterates(1) else {}
    values = [("preset " + preset, k, v) for k, v in PRESETS[preset].items()]
    if task is not None and not is_task(task):
        raise UsageError(f"--task {task}: no such task. Tasks look like 15-1, offline, random-5 or cat,dog/bird.")
    values += [("method " + method.name, k, v) for k, v in method.values(preset, task).items()]
    own_values = {
        s.key: {"value": s.value, "help": s.declared.metadata["help"]}
        for s in built.config.settings()
        if s.key.partition(".")[0] in built.config.own
    }
    if json:
        switches = {key: {"value": v.value, "source": v.source, "set_by": by} for by, key, v in values}
        print_json(
            _brief(method, preset, task)
            | {"preset": preset, "weights": weights, "switches": switches, "settings": own_values}
            | {"memory_bytes": built.memory_size(*MEMORY)}
        )
        return
    out = console()
    out.print(f"{method.name}: {method.summary}", markup=False)
    out.print(f"objective of later steps: {built.objective()}", markup=False)
    out.print(f"step 0: {_step0(method)}", markup=False)
    if task is not None and task not in method.by_task:
        out.print(f"{task}: no value depends on this task", markup=False)
    if size := built.memory_size(*MEMORY):
        of = f"{MEMORY[0]} classes and background, {MEMORY[1]} channels (VOC 15-1 after step 0)"
        out.print(f"memory: {size:,} bytes for {of}", markup=False)
    out.print()
    meanings = {term.name: term.summary for term in built.known_terms}
    terms = [[term, f"{weight:g}", meanings.get(term, "")] for term, weight in weights.items()]
    if terms:
        print_table("Terms", ["term", "weight", "meaning"], terms)
    if own_values:
        rows = [[key, _short(value["value"]), value["help"]] for key, value in own_values.items()]
        print_table("Own settings", ["setting", "value", "meaning"], rows)
    if values:
        rows = [[key, _short(v.value), v.source, by] for by, key, v in values]
        print_table("Settings", ["setting", "value", "source", "set by"], rows)


def _whose_step0(method: type[Method]) -> str:
    return "own" if method.own_step0 and method.trainer_of_step0() is method else "shared"


def _step0(method: type[Method]) -> str:
    """How step 0 is trained."""
    if not method.own_step0:
        return "plain cross-entropy, shared with other methods"
    trainer = method.trainer_of_step0()
    return "trained with this method" if trainer is method else f"{trainer.summary}; shared with other methods"


def _short(value: Any) -> Any:
    return f"{value:g}" if isinstance(value, float) else value


def _build(method: type[Method], preset: str = "default", task: str | None = None) -> Method:
    """The method in a later step, with the classes of VOC 15-1: weights may depend on the step."""
    layers = method_layers(method.name, preset, task)
    built = method(load_config("voc", between=layers, own=own_sections(method.name)))
    built.step = StepInfo(1, n_old=MEMORY[0] + 1, n_new=1, protocol="disjoint")
    return built


def _brief(method: type[Method], preset: str = "default", task: str | None = None) -> dict[str, Any]:
    facts = {name: getattr(method, name) for name in ("name", "summary", "own_step0")}
    return facts | {"objective": _build(method, preset, task).objective()}
