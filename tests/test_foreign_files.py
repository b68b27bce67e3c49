"""What a foreign run or base says never becomes a path outside its own place, and nothing there is touched."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sdrseg.config import load_config
from sdrseg.engine.bases import BaseStore, write_base
from sdrseg.engine.folder import RunFolder
from sdrseg.errors import SdrsegError
from sdrseg.files import plain_name, sweep

CONFIG = load_config("shapes")
IDENTITY = {"spec": "shapes:8-1@disjoint", "method": "ft"}


def tree(folder: Path) -> dict[str, bytes | None]:
    return {str(p.relative_to(folder)): p.read_bytes() if p.is_file() else None for p in folder.rglob("*")}


@given(st.text())
def test_a_name_is_one_part_of_a_path(text):
    try:
        name = plain_name(text, Path("meta.json"))
    except SdrsegError:
        return
    assert name == text and Path("a", name).parent == Path("a") and name not in ("", ".", "..") and name.isascii()


@pytest.mark.parametrize("name", ["a.safetensors", "model-0.safetensors", "0f3a" * 6])
def test_our_names_are_names(name):
    assert plain_name(name, Path("meta.json")) == name


@pytest.mark.parametrize("name", ["../x", "a/b", "/etc", "..", ".hidden", "a..b", "a\n", "ä", "", None, 7, "x" * 101])
def test_other_names_are_refused_with_the_file(name):
    with pytest.raises(SdrsegError, match=r"^meta\.json: .* is not a name that sdrseg writes"):
        plain_name(name, Path("meta.json"))


@pytest.mark.parametrize("key", ["../../x", "{out}", "..", "", 3])
def test_a_base_is_imported_into_the_store_alone(tmp_path, key):
    foreign, out = tmp_path / "foreign", tmp_path / "deep/er/out"
    key = key.format(out=out) if isinstance(key, str) else key
    write_base(foreign, {"key": key}, {"w": torch.ones(2)}, {"m": torch.zeros(1)})
    before = tree(tmp_path)
    with pytest.raises(SdrsegError, match=r"meta\.json: .* is not a name"):
        BaseStore(tmp_path / "a/store").import_from(foreign)
    assert tree(tmp_path) == before


def test_the_files_of_a_base_are_in_its_folder(tmp_path):
    write_base(tmp_path / "other", {"key": "k"}, {"w": torch.ones(2)}, {"m": torch.zeros(1)})
    write_base(tmp_path / "foreign", {"key": "k"}, {"w": torch.ones(2)}, {"m": torch.zeros(1)})
    meta = json.loads((tmp_path / "foreign/meta.json").read_text())
    meta["files"]["model"][0]["file"] = "../other/model-0.safetensors"
    (tmp_path / "foreign/meta.json").write_text(json.dumps(meta))
    with pytest.raises(SdrsegError, match="is not a name that sdrseg writes"):
        BaseStore(tmp_path / "store").import_from(tmp_path / "foreign")
    assert not (tmp_path / "store").exists()


def test_a_stored_base_is_not_replaced(tmp_path):
    store = BaseStore(tmp_path / "store")
    for value in (1.0, 2.0):
        write_base(tmp_path / str(value), {"key": "k"}, {"w": torch.tensor([value])}, {"m": torch.zeros(1)})
        assert store.import_from(tmp_path / str(value)) == "k"
    assert store.load("k")[0]["w"].item() == 1.0


@pytest.mark.parametrize("text", ['{"name": "web page"}', "[]", '{"format": 1, "config": 3}'])
def test_a_folder_that_is_not_a_run_is_left_alone(tmp_path, text):
    project = tmp_path / "project"
    (project / ".cache").mkdir(parents=True)
    (project / "config.json").write_text(text)
    for name in (".draft.tmp", ".cache/.draft.0123abcd.tmp", ".x.0123abcd.tmp"):
        (project / name).write_text("precious")
    before = tree(project)
    with pytest.raises(SdrsegError, match="that sdrseg did not write"):
        RunFolder(project).open(IDENTITY, CONFIG)
    assert tree(project) == before


def test_only_our_own_left_overs_are_swept(tmp_path):
    folder = RunFolder(tmp_path / "run")
    folder.open(IDENTITY, CONFIG)
    folder.close()
    (tmp_path / "run/steps/0").mkdir(parents=True)
    ours = [
        tmp_path / "run" / name for name in (".config.json.0123abcd.tmp", "steps/0/.model.safetensors.89abcdef.tmp")
    ]
    others = [tmp_path / "run" / name for name in (".draft.tmp", "steps/.x.0123abcd.tmp")]
    for file in (*ours, *others):
        file.write_text("")
    assert folder.open(IDENTITY, CONFIG)
    folder.close()
    assert not any(file.exists() for file in ours) and all(file.exists() for file in others)


def test_a_link_is_not_swept_away(tmp_path):
    (tmp_path / ".x.0123abcd.tmp").symlink_to(tmp_path / "away")
    sweep(tmp_path)
    assert (tmp_path / ".x.0123abcd.tmp").is_symlink()


@pytest.mark.parametrize("file", ["../../precious.bin", "../config.json", None, 7])
def test_a_foreign_state_deletes_nothing(tmp_path, file):
    folder = RunFolder(tmp_path / "run")
    (tmp_path / "run/state").mkdir(parents=True)
    (tmp_path / "precious.bin").write_text("precious")
    (tmp_path / "run/config.json").write_text("{}")
    (tmp_path / "run/state/current.json").write_text(json.dumps({"file": file, "sha256": "", "step": 1}))
    before = tree(tmp_path)
    for use in (lambda: folder.load_state(1), lambda: folder.save_state({"w": torch.ones(1)}, {"step": 1})):
        with pytest.raises(SdrsegError, match=r"current\.json: not written by sdrseg"):
            use()
    assert tree(tmp_path) == before


def test_what_is_not_ours_stays_in_the_state(tmp_path):
    folder = RunFolder(tmp_path)
    folder.save_state({"w": torch.ones(1)}, {"step": 0})
    (tmp_path / "state/notes.txt").write_text("mine")
    folder.drop_state()
    assert [p.name for p in (tmp_path / "state").iterdir()] == ["notes.txt"]
    (tmp_path / "state/notes.txt").unlink()
    folder.drop_state()
    assert not (tmp_path / "state").exists()


@pytest.mark.parametrize("name", ["state", "steps", "steps/0", "tensorboard", "log.jsonl", ".lock"])
def test_links_in_a_run_are_not_written_through(tmp_path, name):
    folder = RunFolder(tmp_path / "run")
    folder.open(IDENTITY, CONFIG)
    folder.close()
    (tmp_path / "run/steps").mkdir()
    place = tmp_path / "run" / name
    place.rmdir() if place.is_dir() else place.unlink(missing_ok=True)
    place.symlink_to(tmp_path / "away")
    with pytest.raises(SdrsegError, match="is a link"):
        folder.open(IDENTITY, CONFIG)
    assert not (tmp_path / "away").exists()


def test_a_new_run_does_not_lock_through_a_link(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run/.lock").symlink_to(tmp_path / "away")
    with pytest.raises(SdrsegError, match="is a link"):
        RunFolder(tmp_path / "run").open(IDENTITY, CONFIG)
    assert not (tmp_path / "away").exists()
