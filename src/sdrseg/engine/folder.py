"""The run directory, which contains everything about a run; see docs/run-directory.md."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Collection, Mapping
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import IO, Any, Literal

from torch import Tensor

from sdrseg.config import Config, saved_config
from sdrseg.engine.checkpoint import load_entry, save_tensors
from sdrseg.errors import SdrsegError
from sdrseg.files import link_or_copy, sweep, write_json

FORMAT = 1
ENVIRONMENT = "environment.json"
STATES = ("a.safetensors", "b.safetensors")  # of the state within a step: one is kept while the other is written
_LOCKED: set[Path] = set()  # run folders locked by this process: record locks do not work within one process


def second_score(transform: str) -> str:
    """The file with the score of the last step for a transform other than eval.transform."""
    return f"metrics-{transform}.json"


class RunInUseError(SdrsegError):
    """Another process is writing to this run."""


class RunFolder:
    """Files of a run by name, written atomically and read with checks."""

    def __init__(self, path: Path):
        self.path = Path(path)
        self._lock: IO[bytes] | None = None

    # --- the run as a whole -----------------------------------------------------------------------------------------

    def open(self, identity: dict[str, Any], config: Config, facts: Mapping[str, Any] | None = None) -> bool:
        """Open the folder for this run: a new one, or one with the same specification, method and configuration.

        Returns whether it is an existing run to resume. Only one process can use it at a time. `facts`: what reading
        the run needs of custom code besides its identity, for config.json.
        """
        if self.path.exists() and not self.path.is_dir():
            raise SdrsegError(f"{self.path} is a file. Choose another folder with --out.")
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise self._unwritable(error) from error
        chosen = (facts or {}).get("set", ())
        self._is_existing(identity, config, chosen)
        self._take_lock()
        if not self._is_existing(identity, config, chosen):  # again: another process may have started the run
            saved = {**identity, "format": FORMAT, **(facts or {}), "config": config.to_dict()}
            write_json(self.path / "config.json", saved)
            return False
        for folder in (self.path, self.path / "state", *self.path.glob("steps/*")):
            sweep(folder)
        return True

    def _is_existing(self, identity: dict[str, Any], config: Config, chosen: Collection[str]) -> bool:
        """Whether this run exists; raises an error if the folder contains anything else. Nothing is written.

        `chosen`: the settings that the user set, if they are known.
        """
        own = [self.path / name for name in (".lock", "log.jsonl", "state", "steps", "tensorboard")]
        for path in (*own, *self.path.glob("steps/*")):
            if path.is_symlink():
                raise SdrsegError(
                    f"{path} is a link, and a run writes only into its own folder. "
                    f"Replace it by what it points to, or choose another folder with --out."
                )
        if not (self.path / "config.json").exists():
            if others := sorted(p.name for p in self.path.iterdir() if not p.name.startswith(".")):
                raise SdrsegError(
                    f"{self.path} contains {others[0]} and is not a run of sdrseg. Choose an empty folder with --out."
                )
            return False
        saved = self.read_json("config.json")
        if not (isinstance(saved, dict) and "format" in saved and isinstance(saved.get("config"), dict)):
            raise SdrsegError(
                f"{self.path} contains a config.json that sdrseg did not write. Choose an empty folder with --out."
            )
        changed = [
            f"{key}: {value!r}, {saved.get(key)!r}" for key, value in identity.items() if saved.get(key) != value
        ]
        others = config.differences(saved_config(saved["config"], str(self.path / "config.json")))
        if changed:  # other defaults follow from another method or scenario
            known = {*chosen, *saved.get("set", ())}
            others = [difference for difference in others if difference.partition(": ")[0] in known]
        changed += others
        if changed:
            raise SdrsegError(
                f"{self.path} is a run of another configuration (now, in the folder): {'; '.join(changed)}. "
                f"Choose another folder with --out, or use the same options to resume."
            )
        return True

    def close(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None
            _LOCKED.discard(self.path.resolve())

    def _unwritable(self, error: OSError) -> SdrsegError:
        return SdrsegError(f"{self.path}: cannot be written ({error.strerror}). Choose another folder with --out.")

    def _take_lock(self) -> None:
        """A record lock: unlike flock, it is not inherited by worker processes, which may outlive a killed run."""
        folder = self.path.resolve()
        in_use = f"{self.path} is in use by another process. Wait for it, or choose another --out."
        if folder in _LOCKED:  # closing any handle of the file would release this process's own lock
            raise RunInUseError(in_use)
        try:
            lock = (self.path / ".lock").open("ab")
        except OSError as error:
            raise self._unwritable(error) from error
        try:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            lock.close()
            raise RunInUseError(in_use) from error
        self._lock = lock
        _LOCKED.add(folder)

    def note_environment(self, current: dict[str, Any]) -> None:
        """Add the environment of this start to environment.json: a run may be resumed on other machines."""
        known = self.read_environments()
        if not known or known[-1] != current:
            write_json(self.path / ENVIRONMENT, [*known, current])

    def read_environments(self) -> list[dict[str, Any]]:
        """The environment of each start, as far as it is known."""
        saved = self.read_json(ENVIRONMENT) if (self.path / ENVIRONMENT).exists() else []
        return [one for one in saved if isinstance(one, dict)] if isinstance(saved, list) else []

    def read_json(self, name: str) -> Any:
        file = self.path / name
        try:
            return json.loads(file.read_text())
        except OSError as error:
            raise SdrsegError(f"{file}: cannot be read ({error.strerror}). Is {self.path} a run?") from error
        except ValueError as error:
            raise SdrsegError(f"{file}: not valid JSON ({error}). Restore it from a copy.") from error

    def read_log(self) -> list[dict[str, Any]]:
        """The entries of log.jsonl; incomplete lines of a killed run are skipped."""
        file = self.path / "log.jsonl"
        try:
            lines = file.read_text(encoding="utf-8", errors="replace").splitlines() if file.exists() else []
        except OSError as error:
            raise SdrsegError(f"{file}: cannot be read ({error.strerror}).") from error
        entries = []
        for line in lines:
            with suppress(ValueError):
                entries.append(json.loads(line))
        return [entry for entry in entries if isinstance(entry, dict) and {"event", "time"} <= entry.keys()]

    # --- steps ------------------------------------------------------------------------------------------------------

    def step(self, number: int) -> Path:
        return self.path / "steps" / str(number)

    def has_model(self, number: int) -> bool:
        return (self.step(number) / "meta.json").exists()

    def has_metrics(self, number: int) -> bool:
        return (self.step(number) / "metrics.json").exists()

    def save_step(
        self, number: int, model: Mapping[str, Tensor], memory: Mapping[str, Tensor], meta: dict[str, Any]
    ) -> None:
        """Write the model, the method's memory (prototypes) and, last, meta.json, which marks the step as finished."""
        folder = self.step(number)
        files = {
            "model": {"file": "model.safetensors", "sha256": save_tensors(folder / "model.safetensors", model)},
            "memory": {"file": "memory.safetensors", "sha256": save_tensors(folder / "memory.safetensors", memory)},
        }
        write_json(folder / "meta.json", {**meta, "files": files})
        self.drop_state()

    def load_step(self, number: int) -> tuple[dict[str, Any], dict[str, Tensor], dict[str, Tensor]]:
        """(meta, model, memory) of a step, checked by hash."""
        meta = read_meta(self.step(number))
        return meta, load_part(self.step(number), meta, "model"), self.load_memory(number)

    def load_memory(self, number: int) -> dict[str, Tensor]:
        """The memory of the method after a step."""
        return load_part(self.step(number), read_meta(self.step(number)), "memory")

    def take_steps(self, other: RunFolder) -> None:
        """Copy the finished steps of another run, as links to the same files where the file system supports them."""
        for number in count():
            if not (other.has_model(number) and other.has_metrics(number)):
                return
            if not self.has_model(number):
                self.step(number).mkdir(parents=True, exist_ok=True)
                # meta.json last: with it, the step counts as finished
                for file in sorted(other.step(number).iterdir(), key=lambda file: file.name == "meta.json"):
                    link_or_copy(file, self.step(number) / file.name)

    # --- the state within a step ------------------------------------------------------------------------------------

    def save_state(self, tensors: Mapping[str, Tensor], facts: dict[str, Any]) -> None:
        """Write a new file, then the pointer to it, then delete the old file: a complete state always exists."""
        folder = self.path / "state"
        current = self._current()
        name, before = STATES if current and current["file"] == STATES[1] else STATES[::-1]
        digest = save_tensors(folder / name, tensors)
        write_json(folder / "current.json", {"file": name, "sha256": digest, **facts})
        (folder / before).unlink(missing_ok=True)

    def load_state(self, step: int) -> tuple[dict[str, Any], dict[str, Tensor]] | None:
        """The saved state of a step, or None if there is none for it."""
        facts = self._current()
        if facts is None or facts["step"] != step:
            return None
        remedy = f"Remove {self.path / 'state'} to train step {step} from its beginning."
        return facts, load_entry(self.path / "state" / "current.json", facts, remedy)

    def state_of(self, step: int) -> bool:
        """Whether a state within this step is saved."""
        facts = self._current()
        return facts is not None and facts["step"] == step

    def retries(self, step: int) -> int:
        """How often the learning rate was lowered before the saved state within this step; 0 without a state."""
        facts = self._current()
        return facts["retries"] if facts is not None and facts["step"] == step else 0

    def _current(self) -> dict[str, Any] | None:
        """The contents of state/current.json, or None."""
        if not (self.path / "state" / "current.json").exists():
            return None
        facts: Any = self.read_json("state/current.json")
        counts = [facts.get("step"), facts.setdefault("retries", 0)] if isinstance(facts, dict) else [None]
        if not all(isinstance(count, int) and count >= 0 for count in counts) or facts.get("file") not in STATES:
            file = self.path / "state" / "current.json"
            raise SdrsegError(f"{file}: not written by sdrseg. Remove it to train this step from the beginning.")
        return dict(facts)

    def drop_state(self) -> None:
        folder = self.path / "state"
        for name in ("current.json", *STATES):
            (folder / name).unlink(missing_ok=True)
        with suppress(OSError):  # it does not exist, or contains other files
            folder.rmdir()


def read_meta(step: Path) -> dict[str, Any]:
    """The contents of a step's meta.json."""
    meta = RunFolder(step).read_json("meta.json")
    wanted = {"classes": list, "files": dict, "net": dict}
    if not (isinstance(meta, dict) and all(isinstance(meta.get(key), kind) for key, kind in wanted.items())):
        raise SdrsegError(f"{step / 'meta.json'}: does not describe a step of a run. Name RUN or RUN/steps/NUMBER.")
    return meta


def load_part(step: Path, meta: dict[str, Any], part: Literal["model", "memory"]) -> dict[str, Tensor]:
    """The tensors of a step, checked by hash."""
    file = meta["files"].get(part, {}).get("file")
    if (step / "metrics.json").exists() and file == f"{part}.safetensors" and not (step / file).exists():
        raise SdrsegError(
            f"{step / file} is missing. Restore it from a copy, or remove {step} and all later steps to train them "
            f"again. If --keep-models dropped it, its scores are complete; train into another folder for a model."
        )
    remedy = f"Restore it from a copy, or remove {step} and all later steps to train them again."
    return load_entry(step / "meta.json", meta["files"].get(part), remedy)
