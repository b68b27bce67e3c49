"""The command line as a user meets it: what is printed where, exit codes, and files that are not overwritten."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from sdrseg import __version__
from sdrseg.errors import quantity

SMALL = ["--set", "shapes.train=30", "--set", "shapes.val=8", "--set", "shapes.size=32"]


def command(*words: object, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run it as a program of its own."""
    return subprocess.run(
        [sys.executable, "-m", "sdrseg", *map(str, words)],
        cwd=cwd,
        env=os.environ | variables,
        capture_output=True,
        encoding="utf-8",
        timeout=60,
    )


def make_folder(root: Path, *names: str, value: int = 1) -> Path:
    """Own data: one image and mask by name for training, and one for validation."""
    for split, ids in (("train", names), ("val", ("v",))):
        for id in ids:
            for kind, pixels in (("images", np.zeros((4, 5, 3))), ("masks", np.tile([0, 1, 2, value, 1], (4, 1)))):
                path = root / kind / split / f"{id}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(pixels.astype(np.uint8)).save(path)
    (root / "dataset.toml").write_text('classes = ["background", "cat", "dog"]\n')
    return root


# --- help -------------------------------------------------------------------------------------------------------------


def test_help_lists_the_verbs_and_does_not_import_torch(tmp_path: Path):
    code = (
        "import sys, sdrseg.cli\n"
        "assert 'torch' not in sys.modules, 'the import'\n"
        "sys.argv = ['sdrseg', '--help']\n"
        "try:\n    sdrseg.cli.main()\nexcept SystemExit as end:\n    assert not end.code, end.code\n"
        "heavy = {'torch', 'torchvision', 'matplotlib', 'scipy', 'numpy', 'PIL'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, encoding="utf-8", timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert re.search(r"\bdata\b +Show the contents of a data set", done.stdout)
    assert "Continual semantic segmentation" in done.stdout


def test_version(sdrseg):
    assert sdrseg("--version") == (0, f"{__version__}\n", "")


def test_help_of_a_verb(sdrseg):
    code, out, _ = sdrseg("data", "-h")
    assert code == 0 and all(
        option in out for option in ("--data", "--picture", "--strict", "--config", "--set", "--json")
    )


@pytest.mark.parametrize("name", ["a\\new\\table.pth", "a\tb.pth", "it's.pth", '"quoted".pth', "12", "#1.pth"])
def test_a_path_reaches_the_configuration_as_it_was_typed(name, monkeypatch, tmp_path):
    from sdrseg.cli import training

    given: dict[str, Any] = {}
    monkeypatch.setattr("sdrseg.engine.run.train", lambda *_, settings, **more: given.update(settings))
    monkeypatch.setattr("sdrseg.engine.show.show_summary", lambda *_: None)
    training.train("shapes:8-1@disjoint", "ft", tmp_path / "run", weights=name, holdout=True, set=["train.epochs=3"])
    assert given == {"net.weights": name, "train.holdout": 0.2, "train.epochs": 3}


# --- output -----------------------------------------------------------------------------------------------------------


def rows(text: str, title: str) -> list[list[str]]:
    """The cells of the printed table that has this title."""
    lines = text[text.index(title) :].splitlines()[1:]
    table = []
    for line in lines:
        if line.startswith("└"):
            break
        if line.startswith("│"):
            table.append([cell.strip() for cell in line.strip("│").split("│")])
    return table


def test_a_scenario_without_any_data_as_a_program(tmp_path: Path):
    done = command("data", "shapes:6-1@disjoint", "--picture", "grid.png", *SMALL, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert [row[0] for row in rows(done.stdout, "images of each step")] == ["0", "1", "2", "3", "4"]
    assert "Picture grid: grid.png" in done.stdout
    with Image.open(tmp_path / "grid.png") as picture:
        assert picture.format == "PNG" and picture.info["Software"] == "sdrseg"
    assert [path.name for path in tmp_path.iterdir()] == ["grid.png"]


def test_json_alone_on_standard_output_as_a_program(tmp_path: Path):
    done = command("data", "shapes:6-1@overlapped", "--json", *SMALL, cwd=tmp_path, PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["spec"] == "shapes:6-1@overlapped"
    assert not list(tmp_path.iterdir())  # no picture, unless one is asked for


def test_json_and_tables_tell_the_same(sdrseg):
    code, text, _ = sdrseg("data", "shapes:6-1@overlapped", *SMALL)
    assert code == 0
    code, out, err = sdrseg("data", "shapes:6-1@overlapped", "--json", *SMALL)
    assert (code, err) == (0, "")
    told: dict[str, Any] = json.loads(out)

    assert told["images"] == {"train": 30, "val": 8} and "30 train images, 8 val images" in text
    for row, c in zip(rows(text, "shapes: "), told["classes"], strict=True):
        shares = [
            f"{100 * c['pixels'][s] / sum(d['pixels'][s] for d in told['classes']):.2f} %" for s in ("train", "val")
        ]
        assert row == [
            str(c["id"]),
            c["name"],
            *(f"{c['images']['train']:,}", f"{c['pixels']['train']:,}", shares[0]),
            *(f"{c['images']['val']:,}", f"{c['pixels']['val']:,}", shares[1]),
        ]
    for row, s in zip(rows(text, "images of each step"), told["steps"], strict=True):
        order = ("train", "with_old", "with_future", "seen_before", "val", "test")
        assert row == [str(s["step"]), ", ".join(s["new"]), *(str(s[key]) for key in order)]
    assert told["protocol_summary"].split(".")[0] in " ".join(text.split())
    assert f"{100 * told['void_share']['train']:.2f} % of the pixels are void" in text
    assert sorted([p["kind"], p["file"], p["detail"]] for p in told["problems"]) == rows(
        text, quantity(len(told["problems"]), "problem")
    )
    assert told["config"]["shapes"] == {"size": 32, "train": 30, "val": 8, "seed": 0}
    assert told["steps"][0]["new_ids"] == list(range(7))


def test_a_data_set_without_a_scenario(sdrseg, tmp_path: Path):
    root = make_folder(tmp_path / "set", "a")
    code, out, _ = sdrseg("data", "folder", "--data", root, "--json", "--picture", "x/y.png")
    told = json.loads(out)
    assert code == 0 and "steps" not in told and told["problems"] == []
    assert [c["pixels"]["train"] for c in told["classes"]] == [4, 12, 4]
    assert Path("x/y.png").is_file() and told["picture"] == "x/y.png"


def test_settings_reach_the_command(sdrseg, tmp_path: Path):
    (tmp_path / "own.toml").write_text("[shapes]\ntrain = 12\nval = 3\nsize = 32\n")
    code, out, _ = sdrseg("data", "shapes", "--config", tmp_path / "own.toml", "--set", "shapes.val=4", "--json")
    assert code == 0 and json.loads(out)["images"] == {"train": 12, "val": 4}


ODD = "a[b] [bold]c[/] :cat: 100% {x}"


def test_odd_names_are_printed_as_they_are(sdrseg, tmp_path: Path):
    make_folder(Path("set"), ODD, value=7)
    (Path("set/images/train") / f"{ODD}.png").write_bytes(b"broken")
    Path("set/dataset.toml").write_text('classes = ["background", "[red]cat[/red]", ":dog:"]\n')
    code, out, err = sdrseg("data", "folder:1-1@overlapped", "--data", "set")
    assert (code, err) == (0, "")
    assert f"set/images/train/{ODD}.png" in out and f"set/masks/train/{ODD}.png" in out
    assert "[red]cat[/red]" in out and ":dog:" in out
    code, out, _ = sdrseg("data", "folder:1-1@overlapped", "--data", "set", "--json")
    assert code == 0 and f"set/images/train/{ODD}.png" in {p["file"] for p in json.loads(out)["problems"]}


@pytest.mark.skipif(sys.platform != "linux", reason="names of bytes")
def test_names_that_are_not_utf8(tmp_path: Path):
    root = os.fsencode(tmp_path) + b"/caf\xe9"
    make_folder(tmp_path / "plain", "a")
    (tmp_path / "plain").rename(os.fsdecode(root))
    os.link(root + b"/images/train/a.png", root + b"/images/train/\xff.png")
    for json_too in ([], ["--json"]):
        words = [sys.executable, "-m", "sdrseg", "data", "folder", "--data", root, "--picture", "a.png", *json_too]
        done = subprocess.run(words, cwd=tmp_path, capture_output=True, timeout=60)
        assert (done.returncode, done.stderr) == (0, b"")
        assert b"name is not UTF-8" in done.stdout
    assert len(json.loads(done.stdout)["problems"]) == 1


# --- exit codes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "Usage"),
        (["data"], "Missing argument"),
        (["dat"], "No such command"),
        (["data", "shapes", "--nonsense"], "No such option"),
        (["data", "shapes:6-1"], "has no protocol. Add one of @sequential"),
        (["data", "shape"], "did you mean 'shapes'"),
        (["data", "shapes:6-1@disjiont"], "did you mean 'disjoint'"),
        (["data", "shapes:20-1@disjoint"], "does not fit the 10 classes"),
        (["data", "shapes:random-99999999999"], "unknown task"),
        (["methods", "mib", "--task", "15_1"], "no such task"),
        (["methods", "mob*"], "'mob*' fits the name of no method"),
        (["data", "shapes:disk@disjoint"], "and class lists by step, such as 1,2/3 or cat/dog"),
        (["data", "shapes:disc@disjoint"], "no step contains 2 (square)"),
        (["data", "shapes:1-999999999/2@disjoint"], "class 999999999 of step 0 does not exist"),
        (["data", f"shapes:6-1~{'9' * 5000}@disjoint"], "is not a specification"),
        (["data", "shapes", "--set", "shapes.trian=3"], "did you mean 'shapes.train'"),
        (["data", "shapes", "--set", "shapes.train=few"], "is not a whole number"),
        (["data", "shapes", "--set", "shapes.train"], "write section.key=value"),
        (["data", "shapes", "--config", "none.toml"], "none.toml: cannot be read"),
        (["data", "shapes", "--data", "."], "needs no folder"),
        (["data", "voc"], "voc needs --data PATH"),
    ],
)
def test_wrong_usage_ends_with_2(sdrseg, words, message):
    code, out, err = sdrseg(*words)
    assert code == 2
    assert message in " ".join((err + out).replace("│", " ").split()) and "Traceback" not in err
    assert list(Path().iterdir()) == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["data", "voc", "--data", "nowhere"], "nowhere: no such folder"),
        (["data", "./nowhere"], "./nowhere: no such folder"),
        (["data", "nowhere/"], "nowhere/: no such folder"),
        (["data", "./x.pyth/y"], "./x.pyth/y: no such folder"),
        (["data", "voc:15-1@disjoint", "--data", "."], "no JPEGImages folder"),
        (["data", "ade20k", "--data", "."], "images/training"),
        (["data", "folder", "--data", "."], "images"),
        (["data", "shapes", "--picture", "x" * 300, *SMALL], "name too long"),
    ],
)
def test_our_own_errors_end_with_1_and_leave_standard_output_empty(sdrseg, words, message):
    code, out, err = sdrseg(*words)
    assert (code, out) == (1, "")
    assert err.startswith("error: ") and message in err and "Traceback" not in err
    assert list(Path().iterdir()) == []


def test_exit_codes_of_a_program(tmp_path: Path):
    for words, code in ((["data", "voc", "--data", "nowhere"], 1), (["data", "nothing"], 2)):
        done = command(*words, "--json", cwd=tmp_path)
        assert (done.returncode, done.stdout) == (code, "")
        assert done.stderr.startswith("error: ")


def test_strict_ends_with_1_if_there_are_problems(sdrseg, tmp_path: Path):
    sick, healthy = make_folder(tmp_path / "sick", "a", value=9), make_folder(tmp_path / "healthy", "a")
    assert sdrseg("data", "folder", "--data", sick)[0] == 0
    code, out, _ = sdrseg("data", "folder", "--data", sick, "--strict", "--json")
    assert code == 1 and [p["kind"] for p in json.loads(out)["problems"]] == ["value out of range"] * 2
    assert sdrseg("data", "folder", "--data", healthy, "--strict")[0] == 0


# --- the picture ------------------------------------------------------------------------------------------------------


def test_our_own_picture_is_replaced(sdrseg):
    words = ["data", "shapes", "--picture", "shapes.png", *SMALL]
    assert sdrseg(*words)[0] == 0
    first = Path("shapes.png").read_bytes()
    assert sdrseg(*words, "--set", "shapes.seed=1")[0] == 0
    assert Path("shapes.png").read_bytes() != first
    assert [path.name for path in Path().iterdir()] == ["shapes.png"]


@pytest.mark.parametrize("kind", ["picture", "text", "empty", "folder"])
def test_a_foreign_file_is_refused_before_any_work(sdrseg, kind, monkeypatch):
    file = Path("mine.png")
    if kind == "folder":
        file.mkdir()
    elif kind == "picture":
        Image.new("L", (3, 3)).save(file)
    else:
        file.write_bytes(b"notes" if kind == "text" else b"")
    before = file.read_bytes() if file.is_file() else None
    monkeypatch.setattr("sdrseg.datasets.inspect.open_source", lambda *_: pytest.fail("it began to work"))
    code, out, err = sdrseg("data", "shapes", "--picture", file, *SMALL)
    assert (code, out) == (1, "") and "mine.png exists and was not made by sdrseg" in err
    assert (file.read_bytes() if file.is_file() else None) == before


def test_a_place_that_cannot_be_written_is_refused_before_any_work(sdrseg, monkeypatch):
    Path("file").write_text("no folder")
    monkeypatch.setattr("sdrseg.datasets.inspect.open_source", lambda *_: pytest.fail("it began to work"))
    code, _, err = sdrseg("data", "shapes", "--picture", "file/a.png", *SMALL)
    assert code == 1 and "file/a.png" in err and "Choose another" in err


def test_methods_in_a_process_of_their_own(tmp_path):
    shown = command("methods", "sdr", "--json", cwd=tmp_path)
    assert shown.returncode == 0, shown.stderr
    assert json.loads(shown.stdout)["weights"]["kd"] == 100
    listed = command("methods", "sdr*", "--json", cwd=tmp_path)
    assert [method["name"] for method in json.loads(listed.stdout)] == ["sdr", "sdr+mib"]
