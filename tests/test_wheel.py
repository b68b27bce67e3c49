"""The wheel: all that belongs into it and nothing else, installed into an empty environment and used there."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TINY = ["shapes.size=32", "shapes.train=60", "shapes.val=20", "data.crop=32", "data.workers=0", "train.epochs=1"]
TINY += ["train.batch_size=4", "net.decoder=deeplabv3"]


def tracked(*places: str) -> list[str]:
    """The files below some places that belong to the repository."""
    git = ["git", "-C", str(ROOT), "ls-files", "-z", "--", *places]
    try:
        done = subprocess.run(git, capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a git repository")
    return [name for name in done.stdout.decode().split("\0") if name and (ROOT / name).is_file()]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Built from a copy of the tracked files: building leaves things behind."""
    pytest.importorskip("pip")
    copy = tmp_path_factory.mktemp("copy")
    for name in tracked("src", "tests", "pyproject.toml", "README.md", "LICENSE"):
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, copy / name)
    out = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-index", "--no-build-isolation"]
    subprocess.run([*pip, "--wheel-dir", str(out), str(copy)], check=True)
    (file,) = out.iterdir()
    return file


@pytest.fixture(scope="module")
def bin(wheel, tmp_path_factory) -> Path:
    """The programs of an environment that holds the wheel; what it depends on is borrowed from here."""
    home = tmp_path_factory.mktemp("environment") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(home)], check=True)
    (packages,) = home.glob("lib/python*/site-packages")
    borrowed = [place for place in sys.path if Path(place).name in ("site-packages", "dist-packages")]
    (packages / "borrowed.pth").write_text("\n".join(borrowed))  # the .pth files in there are not followed
    pip = [sys.executable, "-m", "pip", "--python", str(home / "bin/python"), "install", "--quiet"]
    subprocess.run([*pip, "--no-deps", "--no-index", "--ignore-installed", str(wheel)], check=True)
    return home / "bin"


def run(folder: Path, *words: str | Path) -> str:
    """What a program prints, in an environment where nothing points to our source."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    env = kept | {"SDRSEG_CACHE": str(folder / "cache"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, cwd=folder, env=env, capture_output=True, encoding="utf-8", timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_what_is_in_the_wheel(wheel):
    with zipfile.ZipFile(wheel) as archive:
        inside = {name for name in archive.namelist() if not name.endswith("/")}
    ours = {name for name in inside if name.startswith("sdrseg/")}
    wanted = {name.removeprefix("src/") for name in tracked("src/sdrseg")}
    assert {name for name in wanted if not name.endswith(".py")} >= {"sdrseg/py.typed", "sdrseg/resources/orders.json"}
    assert ours == wanted
    information = {name.split("/", 1)[1] for name in inside - ours}
    assert information >= {"METADATA", "entry_points.txt", "licenses/LICENSE"}
    assert {name.split("/")[0] for name in inside - ours} == {"-".join(wheel.name.split("-")[:2]) + ".dist-info"}


def test_it_is_the_wheel_that_is_imported(bin, tmp_path):
    code = "import sdrseg, sdrseg.datasets.shapes; print(sdrseg.__file__); print(sdrseg.__version__)"
    place, version = run(tmp_path, bin / "python", "-c", code).split()
    assert Path(place).is_relative_to(bin.parent) and not Path(place).is_relative_to(ROOT)
    assert run(tmp_path, bin / "sdrseg", "--version").strip() == version


def test_data_and_methods_work_there(bin, tmp_path):
    words = ["--json", "--picture", "grid.png", "--set", TINY[1]]
    shown = json.loads(run(tmp_path, bin / "sdrseg", "data", "shapes:6-1@disjoint", *words))
    assert [step["step"] for step in shown["steps"]] == [0, 1, 2, 3, 4] and shown["problems"] == []
    assert (tmp_path / shown["picture"]).is_file()
    listed = run(tmp_path, bin / "sdrseg", "methods")
    assert "sdr+mib" in listed and "UNCE" in listed


def test_a_run_works_there(bin, tmp_path):
    settings = [word for value in TINY for word in ("--set", value)]
    words = ["train", "shapes:6-1@disjoint", "--method", "ft", "--out", "run", "--json", *settings]
    summary = json.loads(run(tmp_path, bin / "sdrseg", *words))
    assert summary["steps"] == 5 and len(summary["classes"]) == 11
    assert (tmp_path / "run/steps/4/model.safetensors").is_file()
