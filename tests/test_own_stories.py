"""The examples of docs/own-data.md: their commands run as they are printed, on small generated photographs."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import numpy as np
import pytest

from formats import FORMATS, save
from test_docs import DOCS

TINY = "--weights none --set data.crop=32 --set data.workers=0 --set train.epochs=2 --set net.output_stride=8"
TINY += " --set net.decoder=deeplabv3"


def story(number: int) -> tuple[list[str], list[str]]:
    """The TOML and the commands of a story."""
    page = (DOCS / "own-data.md").read_text()
    text = re.split(r"^## ", page, flags=re.MULTILINE)[number]
    assert text.startswith(f"Example {number}")
    toml, commands = (re.findall(rf"^```{kind}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL) for kind in ("toml", "sh"))
    return toml, [line for block in commands for line in block.splitlines()]


@pytest.fixture
def told(sdrseg):
    def run(commands: list[str]) -> list[str]:
        said = []
        for command in commands:
            program, verb, *words = shlex.split(command.replace("resnet18", "toy16"))
            small = shlex.split(TINY) if verb == "train" else []
            if verb == "train" and "train.batch_size=4" not in words:
                small += ["--set", "train.batch_size=2"]
            code, out, err = sdrseg(verb, *words, *small)
            assert (program, code) == ("sdrseg", 0), (command, out, err)
            said.append(" ".join(out.split()))
        return said

    return run


def test_streets_without_background(told):
    (toml,), commands = story(1)
    for number in range(20):
        mask = np.repeat([0, 1, 2], [12, 10, 10])[:, None] * np.ones((1, 32), int)
        if number % 2:
            mask[20:26, 5:15] = 3
        save(
            Path(f"street/images/{number}.jpg"),
            np.array([[90, 90, 250], [150, 60, 60], [80, 80, 80], [250, 250, 0]])[mask],
        )
        save(Path(f"street/labels/{number}.png"), mask)
    Path("street/dataset.toml").write_text('classes = ["sky", "building", "road", "car"]\n')
    (asked,) = told(commands[:1])
    assert "'sky', is not called background, so we assume that there is none" in asked
    Path("street/dataset.toml").write_text(toml)
    shown, steps, *_ = told(commands)
    assert (
        "is not called background" not in shown and "class 0, 'other', is for pixels that are not labelled yet" in shown
    )
    assert "No image is used twice" in steps
    summary = json.loads(Path("runs/street/summary.json").read_text())
    assert summary["classes"] == ["other", "sky", "building", "road", "car"]
    assert summary["class_by_step"][0] == [None, None] and None not in summary["class_by_step"][1]
    assert "sky" in Path("street.html").read_text()
    (proposed,) = told(["sdrseg data folder:car,building,road/sky@disjoint --data street"])
    assert "In this order every step has images: folder:sky,building,road/car@disjoint" in proposed


def test_a_roboflow_export(told):
    _, commands = story(2)
    FORMATS["roboflow_coco"][0](Path("export"))
    shown, *_ = told(commands)
    assert "Scored on val; test is not used" in shown and "Category 'animals' is only a parent" in shown
    assert len(list(Path("predictions").rglob("*.png"))) == 6  # three masks, three overlays
    assert sorted(path.name for path in Path("plain").iterdir()) == ["dataset.toml", "images", "masks"]
    left = ["sdrseg data folder:dog/bird,cat@overlapped --data export"]
    left += ["sdrseg data folder:dog/bird@overlapped --data export --set data.left_out=background"]
    assert all(words.split("--")[0].split()[2] in (DOCS / "own-data.md").read_text() for words in left)
    told(left)


def test_forty_photographs_of_one_thing(told, sdrseg):
    (toml,), commands = story(3)
    for number in range(40):
        mask = np.zeros((32, 32), int)
        mask[:, 5 + number % 20 : 9 + number % 20] = 255
        save(Path(f"photos/images/{number:02}.jpg"), np.repeat((200 - mask // 2)[:, :, None], 3, axis=2))
        save(Path(f"photos/masks/{number:02}.png"), mask)
    code, _, err = sdrseg("data", "photos")
    assert code == 1 and err.strip().endswith(toml.replace("crack", "class 1").strip())
    Path("photos/dataset.toml").write_text(toml)
    told(commands)
    assert Path("photos.png").is_file() and Path("crack.onnx").is_file()
    summary = json.loads(Path("runs/photos/summary.json").read_text())
    assert summary["classes"] == ["background", "crack"]
    assert len(list(Path("masks").rglob("*.png"))) == 80
