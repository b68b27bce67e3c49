"""The store of bases: models of step 0, shared by all methods that start from plain training.

The key of a base covers everything it depends on (masks and their labels, network, optimiser, augmentation, seed) and
nothing else, so a comparison of methods trains it once; sequential and disjoint share a base. A base can be exported in
float16 shards and imported on another machine.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from sdrseg.config import Config
from sdrseg.datasets.index import ClassIndex
from sdrseg.datasets.source import Source
from sdrseg.engine.checkpoint import load_entry, save_tensors
from sdrseg.engine.folder import RunFolder, read_meta
from sdrseg.errors import SdrsegError, UsageError, quantity
from sdrseg.files import cache_folder, plain_name, require_writable, write_json
from sdrseg.methods import Method, find_method
from sdrseg.methods.latent import updates_background_prototype
from sdrseg.methods.own import source_digest
from sdrseg.methods.terms import only_later, registered_in_step0
from sdrseg.scenario import Step

PARTS = ("model", "memory")
LARGEST_HALF = 65504.0
RECIPE = 3
"""Version of how a base is trained; changes that no setting records, or changed defaults, increment it: 2, labels are
resized by pixel centres; 3, exactly as Pillow resizes them, and aligned with the cells of the padded feature grid."""
KEY_VERSION = 2
"""Version of the key's contents: 2, settings at their default are omitted."""


def base_of(method: type[Method], config: Config) -> tuple[type[Method], Config]:
    """The method and configuration that train step 0: the method's own if it needs one, else plain training."""
    if method.own_step0 or config.latent.step0:
        absent = set() if source_digest(method) else only_later(config)  # code of its own may use any setting
        return method.trainer_of_step0(), config.without("later", "teacher", sections=absent)
    return find_method("ft"), replace(config.without("later", "losses", "teacher"), own={})


def base_key(method: type[Method], config: Config, step: Step, train: ClassIndex, protocol: str) -> str:
    """The key of the base that this method and configuration, found by `base_of`, train on the images of step 0.

    Settings at their default are not part of it, so that a new setting does not change the keys of stored bases.
    """
    matters = [s for s in config.settings() if s.affects in ("base", "losses") and not s.is_default]
    values = {s.key: s.value for s in matters}
    # of the protocol, only this matters for a base
    values["proto.background"] = updates_background_prototype(config, protocol, 0)
    if (file := Path(config.net.weights)).is_file():
        values["net.weights"] = _content_digest(file, file.stat().st_mtime_ns)
    facts: list[Any] = [KEY_VERSION, RECIPE, method.name, source_digest(method), values]
    terms = registered_in_step0(config)
    facts += [[t.name, t.weight and t.weight_in(config), t.compute and source_digest(t.compute)] for t in terms]
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode())
    images = [(step.train_ids, step.train_table)]
    if config.train.best_every and step.test_split == "train":  # held-out images choose the model
        digest.update(config.eval.transform.encode())
        images.append((step.test_ids, step.test_table))
    row_of = {id: row for row, id in enumerate(train.ids)}
    for ids, table in images:
        digest.update("\0".join(ids).encode())
        digest.update(train.digests[[row_of[id] for id in ids]].tobytes())
        digest.update(table.tobytes())
    return digest.hexdigest()[:24]


@cache
def _content_digest(file: Path, changed: int) -> str:
    """The SHA-256 of a file, computed once as long as its time of change is the same."""
    return hashlib.sha256(file.read_bytes()).hexdigest()


def files_digest(source: Source, ids: Sequence[str]) -> str:
    """A hash of the sizes of some image files: if it differs, images have changed."""
    digest = hashlib.sha256()
    for id in ids:
        try:
            size = Path(source.file(id, "image")).stat().st_size
        except (OSError, ValueError):  # generated, or not in a file of its own
            size = -1
        digest.update(f"{id} {size}\0".encode())
    return digest.hexdigest()[:24]


class BaseStore:
    """Bases by key, in a folder."""

    def __init__(self, folder: Path | None = None):
        self.folder = folder or cache_folder() / "bases"

    def has(self, key: str) -> bool:
        return os.access(self.folder / key / "meta.json", os.R_OK)

    def require_writable(self) -> None:
        """Raise before a base is trained that could not be saved. Not needed if the store contains the base."""
        advice = "The model of step 0 is saved there: choose another folder with --bases."
        require_writable(self.folder, advice, folder=True)

    def load(self, key: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Model and memory of a stored base."""
        folder = self.folder / key
        _, parts = _read_base(folder, f"Remove {folder}; the base is then trained again.")
        return parts["model"], parts["memory"]

    def images(self, key: str) -> str | None:
        """The `files_digest` of the images with which a stored base was trained, if it is known."""
        found = self.facts(key).get("images")
        return found if isinstance(found, str) else None

    def rounded(self, key: str) -> bool:
        """Whether a stored base was imported from float16 weights."""
        return self.facts(key).get("rounded") is True

    def facts(self, key: str) -> dict[str, Any]:
        """What is known of a stored base, from its meta.json."""
        with suppress(OSError, ValueError):
            facts = json.loads((self.folder / key / "meta.json").read_text())
            return facts if isinstance(facts, dict) else {}
        return {}

    def save(self, key: str, model: Mapping[str, Tensor], memory: Mapping[str, Tensor], facts: dict[str, Any]) -> None:
        """Add a base, all at once, unless another process has added it by now."""
        if self.has(key):
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix=".new-", dir=self.folder) as new:
            made = Path(new) / key
            write_base(made, {**facts, "key": key}, model, memory)
            target = self.folder / key
            try:
                if target.is_dir() and not self.has(key) and all(map(_is_part, target.iterdir())):
                    target.rename(Path(new) / "remains")  # of a process that was killed
                made.rename(target)
            except OSError as error:
                if not self.has(key):
                    why = error.strerror
                    raise SdrsegError(f"{target}: cannot be written ({why}). Remove it if it exists.") from error

    def import_from(self, folder: Path) -> str:
        """Copy an exported base into the store unless it exists; returns its key."""
        meta, parts = _read_base(folder, "Give a complete folder written by `sdrseg base export`.")
        key = plain_name(meta.get("key"), folder / "meta.json")
        facts = _facts_alone(meta)
        facts["rounded"] = bool(meta.get("half") or meta.get("rounded"))
        self.save(key, parts["model"], parts["memory"], facts)
        return key


def _facts_alone(meta: Mapping[str, Any]) -> dict[str, Any]:
    """The meta.json of a base without what describes its files, which is written anew with them."""
    return {name: value for name, value in meta.items() if name not in ("files", "half")}


def _is_part(file: Path) -> bool:
    """Whether a file of a base has a name that is written there."""
    return bool(re.fullmatch(r"(model|memory)-\d+\.safetensors|score-\w+\.json|\..*\.tmp", file.name))


def write_base(
    folder: Path,
    facts: dict[str, Any],
    model: Mapping[str, Tensor],
    memory: Mapping[str, Tensor],
    *,
    half: bool = False,
    shard_bytes: int | None = None,
) -> None:
    """Write a base, in one file per part or in shards; `half` stores convolution weights in float16, but not the
    memory, whose values (such as those of EWC) may be too small for it.

    One-dimensional tensors (a batch norm's variance may exceed float16) and tensors that would overflow stay float32.
    """
    files = {}
    for part, tensors in (("model", model), ("memory", memory)):
        stored = {name: _halved(tensor) if half and part == "model" else tensor for name, tensor in tensors.items()}
        files[part] = [
            {"file": (name := f"{part}-{number}.safetensors"), "sha256": save_tensors(folder / name, shard)}
            for number, shard in enumerate(_shards(stored, shard_bytes))
        ]
    write_json(folder / "meta.json", {**facts, "half": half, "files": files})


def export_base(run: Path, out: Path, shard_size: str | None, bases: Path | None = None) -> str:
    """Write the base of a run's step 0 into a new folder, in float16 and in shards; returns a summary as a sentence.

    It is that of the store: the memory of a run's step 0 may also contain what the run's method remembers.
    """
    most = None if shard_size is None else parse_size(shard_size)
    if out.exists() and any(out.iterdir()):
        raise SdrsegError(f"{out} is not empty. Choose a new folder.")
    meta, store = read_meta(RunFolder(run).step(0)), BaseStore(bases)
    if "base" not in meta:
        why = "its learning rate was lowered" if "lowered_rate" in meta else "it is imported, or images were skipped"
        raise SdrsegError(f"{run}: step 0 is no base that other runs can share: {why}.")
    key = plain_name(meta["base"], run / "steps/0/meta.json")
    if not store.has(key):
        raise SdrsegError(f"{store.folder} does not contain {key}, the base of {run}. Name its store with --bases.")
    model, memory = store.load(key)
    write_base(out, _facts_alone(store.facts(key)), model, memory, half=True, shard_bytes=most)
    size = sum(file.stat().st_size for file in out.iterdir())
    return f"base {key}: {quantity(len(list(out.glob('*.safetensors'))), 'file')}, {size / 1e6:.1f} MB in {out}"


def parse_size(text: str) -> int:
    """Convert "16MB", "15.5 MiB" or "100000" to bytes."""
    match = re.fullmatch(r"\s*([\d.]+)\s*([kMG]i?)?B?\s*", text)
    units = {None: 1, "k": 10**3, "M": 10**6, "G": 10**9, "ki": 2**10, "Mi": 2**20, "Gi": 2**30}
    try:
        size = int(float(match[1]) * units[match[2]]) if match else 0
    except (ValueError, KeyError):
        size = 0
    if size < 1:
        raise UsageError(f"{text!r} is not a size. Write it like 15MB or 16MiB.")
    return size


def _halved(tensor: Tensor) -> Tensor:
    small = tensor.is_floating_point() and tensor.dim() > 1 and bool((tensor.abs() < LARGEST_HALF).all())
    return tensor.half() if small else tensor


def _shards(tensors: Mapping[str, Tensor], most: int | None) -> list[dict[str, Tensor]]:
    """Tensors in as few shards as their order allows; one larger than a shard is split by rows."""
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    available = None if most is None else most - 64 * 1024  # reserved for the header with names and shapes
    if available is not None and available < 64 * 1024:
        raise UsageError(f"--shard-size {most} is too small. Use at least 128kB.")
    for name, tensor in tensors.items():
        pieces = {name: tensor}
        if available is not None and tensor.nbytes > available:
            rows = max(1, len(tensor) * available // tensor.nbytes)
            cut = torch.split(tensor, rows)
            pieces = {f"{name}@{number}of{len(cut)}": piece for number, piece in enumerate(cut)}
        for label, piece in pieces.items():
            if available is not None and size + piece.nbytes > available and shards[-1]:
                shards.append({})
                size = 0
            shards[-1][label] = piece
            size += piece.nbytes
    return shards


def _read_base(folder: Path, remedy: str) -> tuple[dict[str, Any], dict[str, dict[str, Tensor]]]:
    """The meta.json of a base, and the tensors of its parts."""
    origin = folder / "meta.json"
    try:
        meta = json.loads(origin.read_text())
        files = {part: list(meta["files"][part]) for part in PARTS}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SdrsegError(f"{folder}: not a base ({error}). {remedy}") from error
    return meta, {part: _read_shards(origin, files[part], remedy) for part in PARTS}


def _read_shards(origin: Path, entries: list[Any], remedy: str) -> dict[str, Tensor]:
    """All tensors of some shards, with float16 widened to float32 and split tensors joined."""
    loose: dict[str, Tensor] = {}
    for entry in entries:
        loose |= load_entry(origin, entry, remedy)
    whole: dict[str, Tensor] = {}
    for label, tensor in loose.items():
        name, cut, numbers = label.partition("@")
        if cut:
            number, _, count = numbers.partition("of")
            if int(number) > 0:
                continue
            tensor = torch.cat([loose[f"{name}@{n}of{count}"] for n in range(int(count))])
        whole[name] = tensor.float() if tensor.dtype == torch.float16 else tensor
    return whole
