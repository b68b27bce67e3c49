"""The run directory: one folder that says everything about a run. docs/run-directory.md describes it."""

from __future__ import annotations

import fcntl
import json
import os
import platform
import shutil
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import IO, Any

from torch import Tensor

from sdrseg import __version__
from sdrseg.config import Config, config_from
from sdrseg.engine.checkpoint import load_tensors, save_tensors
from sdrseg.errors import SdrsegError
from sdrseg.files import write_json

PACKAGES = (
    "torch",
    "torchvision",
    "segmentation-models-pytorch",
    "timm",
    "lightning",
    "torchmetrics",
    "numpy",
    "pillow",
)
FORMAT = 1
_HELD: set[Path] = set()  # run folders that this process has taken: record locks do not work within one process


class RunFolder:
    """Files of a run by name, written atomically and read with checks."""

    def __init__(self, path: Path):
        self.path = Path(path)
        self._lock: IO[bytes] | None = None

    # --- the run as a whole -----------------------------------------------------------------------------------------

    def open(self, identity: dict[str, Any], config: Config) -> bool:
        """Take the folder for this run: new, or one of the same specification, method and configuration.

        Returns whether it is a run that goes on. Two processes cannot have it at once.
        """
        if self.path.exists() and not self.path.is_dir():
            raise SdrsegError(f"{self.path} is a file. Choose another folder with --out.")
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise self._unwritable(error) from error
        others = [p.name for p in self.path.iterdir() if not p.name.startswith(".")]
        if others and not (self.path / "config.json").exists():
            raise SdrsegError(
                f"{self.path} holds {sorted(others)[0]} and is no run of ours. Choose an empty folder with --out."
            )
        self._take_lock()
        for left_over in self.path.rglob(".*.tmp"):  # a process was killed while it wrote
            left_over.unlink()
        if not (self.path / "config.json").exists():
            write_json(self.path / "config.json", {**identity, "format": FORMAT, "config": config.to_dict()})
            return False
        saved = self.read_json("config.json")
        changed = [
            f"{key}: {value!r}, {saved.get(key)!r}" for key, value in identity.items() if saved.get(key) != value
        ]
        changed += config.differences(config_from(saved["config"], str(self.path / "config.json")))
        if changed:
            raise SdrsegError(
                f"{self.path} is a run of another configuration (now, there): {'; '.join(changed)}. "
                f"Choose another folder with --out, or give the same options to go on."
            )
        return True

    def close(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None
            _HELD.discard(self.path.resolve())

    def _unwritable(self, error: OSError) -> SdrsegError:
        return SdrsegError(f"{self.path}: cannot be written ({error.strerror}). Choose another folder with --out.")

    def _take_lock(self) -> None:
        """A record lock: unlike flock it is not inherited by worker processes, which outlive a killed run a little."""
        here = self.path.resolve()
        try:
            lock = (self.path / ".lock").open("ab")
        except OSError as error:
            raise self._unwritable(error) from error
        try:
            if here in _HELD:
                raise BlockingIOError
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if here not in _HELD:  # closing any handle of the file would give up this process's own lock
                lock.close()
            raise SdrsegError(
                f"{self.path} is in use by another process. Wait for it, or choose another --out."
            ) from error
        self._lock = lock
        _HELD.add(here)

    def note_environment(self, device: str, world: int) -> None:
        """Add this start to environment.json: a resumed run may have seen several machines."""
        versions = {}
        for package in PACKAGES:
            try:
                versions[package] = version(package)
            except PackageNotFoundError:
                versions[package] = "absent"
        here = {
            "sdrseg": __version__,
            "python": platform.python_version(),
            "system": f"{platform.system()} {platform.machine()}",
            "device": device,
            "processes": world,
            "cores": os.cpu_count(),
            "packages": versions,
        }
        known = self.read_json("environment.json") if (self.path / "environment.json").exists() else []
        if not known or known[-1] != here:
            write_json(self.path / "environment.json", [*known, here])

    def read_json(self, name: str) -> Any:
        file = self.path / name
        try:
            return json.loads(file.read_text())
        except OSError as error:
            raise SdrsegError(f"{file}: cannot be read ({error.strerror}). Is {self.path} a run?") from error
        except ValueError as error:
            raise SdrsegError(f"{file}: not valid JSON ({error}). Restore it from a copy.") from error

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
        """The model, the method's memory (prototypes), and, last, what they are: with meta.json the step is done."""
        folder = self.step(number)
        files = {
            "model": {"file": "model.safetensors", "sha256": save_tensors(folder / "model.safetensors", model)},
            "memory": {"file": "memory.safetensors", "sha256": save_tensors(folder / "memory.safetensors", memory)},
        }
        write_json(folder / "meta.json", {**meta, "files": files})
        self.drop_state()

    def load_step(self, number: int) -> tuple[dict[str, Any], dict[str, Tensor], dict[str, Tensor]]:
        """(meta, model, memory) of a step, checked by hash."""
        meta = self.read_json(f"steps/{number}/meta.json")
        remedy = f"Restore it from a copy, or remove {self.step(number)} and all later steps to train them again."
        model, memory = (
            load_tensors(self.step(number) / meta["files"][part]["file"], meta["files"][part]["sha256"], remedy)
            for part in ("model", "memory")
        )
        return meta, model, memory

    # --- the state within a step ------------------------------------------------------------------------------------

    def save_state(self, tensors: Mapping[str, Tensor], facts: dict[str, Any]) -> None:
        """A new file first, then the pointer to it, then the old file goes: at any moment one whole state is there."""
        folder = self.path / "state"
        before = self.read_json("state/current.json")["file"] if (folder / "current.json").exists() else None
        name = "a.safetensors" if before != "a.safetensors" else "b.safetensors"
        digest = save_tensors(folder / name, tensors)
        write_json(folder / "current.json", {"file": name, "sha256": digest, **facts})
        if before is not None:
            (folder / before).unlink(missing_ok=True)

    def load_state(self, step: int) -> tuple[dict[str, Any], dict[str, Tensor]] | None:
        """The saved state of a step, or None if there is none for it."""
        if not (self.path / "state" / "current.json").exists():
            return None
        facts = self.read_json("state/current.json")
        if facts["step"] != step:
            return None
        remedy = f"Remove {self.path / 'state'} to train step {step} from its beginning."
        return facts, load_tensors(self.path / "state" / facts["file"], facts["sha256"], remedy)

    def state_of(self, step: int) -> bool:
        """Whether a state within this step is saved."""
        return (self.path / "state" / "current.json").exists() and self.read_json("state/current.json")["step"] == step

    def drop_state(self) -> None:
        shutil.rmtree(self.path / "state", ignore_errors=True)
