"""Files are written whole or not at all."""

from __future__ import annotations

import errno
import json
import os
import stat
import threading
from pathlib import Path

import pytest

from sdrseg.errors import SdrsegError, first_line, quantity
from sdrseg.files import atomic_writer, cache_folder, require_writable, write_json


def listing(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_content_appears_when_the_block_ends(tmp_path: Path):
    path = tmp_path / "new/folders/a.bin"
    with atomic_writer(path) as file:
        file.write(b"one")
        file.flush()
        assert not path.exists()
    assert path.read_bytes() == b"one"
    with atomic_writer(path) as file:
        file.write(b"two")
        assert path.read_bytes() == b"one"
    assert path.read_bytes() == b"two"
    assert listing(path.parent) == ["a.bin"]


FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("before", [None, b"old"])
@pytest.mark.parametrize(
    ("thrown", "seen", "message"),
    [
        (ValueError("mine"), ValueError, "mine"),
        (KeyboardInterrupt("now"), KeyboardInterrupt, "now"),
        (SdrsegError("ours"), SdrsegError, "ours"),
        (FULL, SdrsegError, r"No space left on device\); the earlier content is intact"),
        (OSError("in words"), SdrsegError, r"a\.bin: not written \(in words\)"),
    ],
)
def test_a_failure_leaves_what_was_there(tmp_path: Path, before, thrown, seen, message):
    path = tmp_path / "a.bin"
    if before is not None:
        path.write_bytes(before)
    with pytest.raises(seen, match=message), atomic_writer(path) as file:
        file.write(b"half")
        raise thrown
    assert listing(tmp_path) == ([] if before is None else ["a.bin"])
    assert before is None or path.read_bytes() == before


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_a_full_disk_is_noticed_when_the_buffer_is_flushed(tmp_path: Path):
    path = tmp_path / "a.bin"
    path.write_bytes(b"old")
    full = os.open("/dev/full", os.O_WRONLY)
    with pytest.raises(SdrsegError, match=r"a\.bin: not written \(No space left on device\)"), atomic_writer(path) as f:
        os.dup2(full, f.fileno())
        os.close(full)
        f.write(b"new")
    assert path.read_bytes() == b"old" and listing(tmp_path) == ["a.bin"]


@pytest.mark.parametrize("failing", ["fsync", "replace"])
def test_a_failure_after_the_block_leaves_what_was_there(tmp_path: Path, monkeypatch, failing):
    def fail(*_: object, **__: object) -> None:
        raise FULL

    path = tmp_path / "a.bin"
    path.write_bytes(b"old")
    monkeypatch.setattr(*((os, "fsync") if failing == "fsync" else (Path, "replace")), fail)
    with pytest.raises(SdrsegError, match="No space left"), atomic_writer(path) as file:
        file.write(b"new")
    assert path.read_bytes() == b"old" and listing(tmp_path) == ["a.bin"]


def test_a_folder_that_cannot_be_synced_is_not_an_error(tmp_path: Path, monkeypatch):
    """Some network file systems refuse to sync folders; the file is there all the same."""
    real = os.open
    monkeypatch.setattr(os, "open", lambda path, *a, **k: os_error() if Path(path).is_dir() else real(path, *a, **k))

    def os_error() -> int:
        raise OSError(errno.EINVAL, "Invalid argument")

    with atomic_writer(tmp_path / "a.bin") as file:
        file.write(b"new")
    assert (tmp_path / "a.bin").read_bytes() == b"new"


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path):
    (tmp_path / "file").write_text("I am no folder")
    with pytest.raises(SdrsegError, match=r"file/a\.bin: cannot be written .*Choose a folder"):
        write_json(tmp_path / "file/a.bin", 1)
    with pytest.raises(SdrsegError, match="not written"):  # the name is taken by a folder
        write_json(tmp_path, 1)
    with pytest.raises(SdrsegError, match="cannot be written"):
        write_json(tmp_path / ("x" * 300), 1)
    assert listing(tmp_path) == ["file"] and listing(tmp_path.parent).count(tmp_path.name) == 1


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission_is_named(tmp_path: Path):
    tmp_path.chmod(0o500)
    with pytest.raises(SdrsegError, match="Permission denied"):
        write_json(tmp_path / "a.json", 1)


@pytest.mark.skipif(os.name != "posix", reason="permissions of POSIX")
@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_permissions_follow_the_umask(tmp_path: Path, umask, mode):
    before = os.umask(umask)
    try:
        write_json(tmp_path / "a.json", 1)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "a.json").stat().st_mode) == mode


def test_writers_of_one_file_do_not_mix(tmp_path: Path):
    def write(number: int) -> None:
        for _ in range(5):
            write_json(tmp_path / "a.json", [number] * 2000)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(json.loads((tmp_path / "a.json").read_text()))) == 1
    assert listing(tmp_path) == ["a.json"]


def test_json_is_utf8_and_ends_with_a_line_end(tmp_path: Path):
    write_json(tmp_path / "a.json", {"größe": [1, 2.5, None]})
    raw = (tmp_path / "a.json").read_bytes()
    assert raw.endswith(b"}\n") and json.loads(raw.decode("utf-8")) == {"größe": [1, 2.5, None]}
    with pytest.raises(TypeError):
        write_json(tmp_path / "a.json", {1, 2})
    assert (tmp_path / "a.json").read_bytes() == raw and listing(tmp_path) == ["a.json"]


@pytest.mark.parametrize(
    ("variables", "folder"),
    [
        ({"SDRSEG_CACHE": "/x/own", "XDG_CACHE_HOME": "/x/xdg"}, "/x/own"),
        ({"XDG_CACHE_HOME": "/x/xdg"}, "/x/xdg/sdrseg"),
        ({"HOME": "/x/home"}, "/x/home/.cache/sdrseg"),
    ],
)
def test_where_the_cache_lies(monkeypatch, variables, folder):
    for name in ("SDRSEG_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert cache_folder() == Path(folder)


@pytest.mark.parametrize(
    ("message", "line"),
    [
        ("", "RuntimeError"),
        ("\n \n", "RuntimeError"),
        ("\nno kernel.\nlong trace", "no kernel"),
        ("x" * 300, "x" * 200 + "…"),
    ],
)
def test_the_first_line_of_an_error(message, line):
    assert first_line(RuntimeError(message)) == line


@pytest.mark.parametrize(
    ("number", "noun", "words"),
    [(1, "image", "1 image"), (0, "image", "0 images"), (1200, "image", "1,200 images"), (2, "class", "2 classes")],
)
def test_a_number_and_its_noun_agree(number, noun, words):
    assert quantity(number, noun) == words


def test_a_place_that_cannot_be_written_is_named_and_nothing_is_made(tmp_path: Path):
    require_writable(tmp_path / "a/b/c", "Choose another.")
    require_writable(tmp_path / "a/b/c", "Choose another.", folder=True)
    (tmp_path / "file").write_bytes(b"x")
    require_writable(tmp_path / "file", "Choose another.")  # it may be replaced
    assert [p.name for p in tmp_path.iterdir()] == ["file"]
    with pytest.raises(SdrsegError, match=r"file/deep/new: cannot be written \(Not a directory\)\. Choose another\."):
        require_writable(tmp_path / "file/deep/new", "Choose another.")
    with pytest.raises(SdrsegError, match=r"file: cannot be written \(Not a directory\)"):
        require_writable(tmp_path / "file", "Choose another.", folder=True)
