"""A saved step of a run as a network: for the next step, scores, reports and predictions."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sdrseg.config import Config, load_config, saved_config
from sdrseg.config.net import Net
from sdrseg.decision import Decision, read_decision
from sdrseg.engine.folder import RunFolder, load_part, read_meta
from sdrseg.errors import SdrsegError, first_line
from sdrseg.methods import method_layers, own_sections
from sdrseg.network import Network, load_network
from sdrseg.scenario import parse_spec, saved_source

MADE_BY = "run.json"
"""In a step that was copied from another run: config.json of the run that made it."""


def find_step(path: Path, step: int | None) -> tuple[Path, Path | None]:
    """The folder of a step, and that of its run (None for the folder of a step without its run)."""
    if not path.exists():
        raise SdrsegError(f"{path}: no such run, step or .onnx file.")
    if (path / "config.json").exists():
        folder = RunFolder(path)
        done = sorted(int(p.name) for p in path.glob("steps/*") if p.name.isdigit() and folder.has_model(int(p.name)))
        if not done:
            raise SdrsegError(f"{path}: no step of this run is finished yet. Wait, or resume training.")
        if step is not None and step not in done:
            raise SdrsegError(f"{path}: step {step} is not finished. Finished steps: {', '.join(map(str, done))}.")
        return folder.step(done[-1] if step is None else step), path
    if (path / "meta.json").exists():
        if step is not None and path.name != str(step):
            raise SdrsegError(f"{path} is already a step. Leave out step {step}.")
        above = path.resolve().parent.parent
        return path, above if (above / "config.json").exists() else None
    if path.parent.name == "steps" and path.name.isdigit():
        raise SdrsegError(f"{path}: this step is not finished (there is no meta.json).")
    raise SdrsegError(
        f"{path}: not a run (there is no config.json). Name a folder that was the --out of `sdrseg train`."
    )


def unfinished_note(path: Path, step: int | None) -> str | None:
    """A note if `path` is a run, no step is named, and the last finished step is not the last one of the run."""
    if step is not None or not (path / "scenario.json").exists():
        return None
    used, last = int(find_step(path, None)[0].name), len(RunFolder(path).read_json("scenario.json")["steps"]) - 1
    return f"step {used + 1} is not finished; step {used} is used" if used < last else None


def made_by(step: Path, run: Path) -> dict[str, Any]:
    """The contents of config.json of the run that made a step: another one than `run` if the step was copied."""
    file = _config_file(step, run)
    saved: dict[str, Any] = RunFolder(file.parent).read_json(file.name)
    if not (isinstance(saved, dict) and isinstance(saved.get("config"), dict)):
        raise SdrsegError(f"{file}: not the configuration of a run. Restore it from a copy.")
    return saved


def usual_values(saved: Mapping[str, Any]) -> dict[str, Any]:
    """The values that data set, preset and method give the settings of a run, by key, as in JSON. `saved`: its
    config.json, which has those of a custom method that is not known here."""
    spec = parse_spec(saved["spec"])
    source = saved_source(spec.source, saved.get("data_set"))
    try:
        layers = method_layers(saved["method"], saved["preset"], spec.task, source)
        own = own_sections(saved["method"])
        more: dict[str, Any] = {}
    except SdrsegError:
        layers, own, more = [], {}, saved.get("method_values") or {}
    return {s.key: s.plain for s in load_config(source, between=layers, own=own).settings()} | more


def step_config(step: Path, run: Path) -> Config:
    """The configuration of the run that made a step, with the network of the step."""
    values = {**made_by(step, run)["config"], "net": read_meta(step)["net"]}
    return saved_config(values, str(_config_file(step, run)))


def scoring_config(run: RunFolder, step: int, config: Config) -> Config:
    """The configuration of a run, to score a step; one that was copied is scored with the settings of its own run."""
    if not (run.step(step) / MADE_BY).exists():
        return config
    own = step_config(run.step(step), run.path)
    return config.changed({s.key: s.value for s in own.settings() if s.affects == "score"})


def _config_file(step: Path, run: Path) -> Path:
    return step / MADE_BY if (step / MADE_BY).exists() else run / "config.json"


def open_step(step: Path, net: Net) -> tuple[Network, Decision]:
    """The network in the folder of a step, and how its logits become classes."""
    meta = read_meta(step)
    try:
        network = load_network(net, len(meta["classes"]), load_part(step, meta, "model"))
    except RuntimeError as error:
        raise SdrsegError(
            f"{step}: the weights do not fit the network of config.json and meta.json ({first_line(error)})."
        ) from error
    return network, read_decision(meta.get("decision", "softmax"), step / "meta.json")
