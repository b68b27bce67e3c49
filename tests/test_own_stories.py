"""The examples of docs/own-data.md: their commands run as they are printed, on small generated pictures."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import numpy as np
import pytest

from formats import FORMATS, save
from test_docs import DOCS

TINY = "--encoder toy16 --weights none --set net.stride_on=conv2 --set net.output_stride=8"
TINY += " --set net.decoder=deeplabv3 --set data.crop=32 --set data.workers=0 --set train.epochs=2"


def sections() -> list[str]:
    return re.split(r"^## ", (DOCS / "own-data.md").read_text(), flags=re.MULTILINE)


def blocks(text: str, kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def story(number: int) -> tuple[list[str], list[str]]:
    """The TOML and the commands of a story."""
    text = sections()[number]
    assert text.startswith(f"Example {number}")
    return blocks(text, "toml"), [line for block in blocks(text, "sh") for line in block.splitlines()]


@pytest.fixture
def told(sdrseg):
    (small_toml,) = blocks(sections()[0], "toml")

    def run(commands: list[str]) -> list[str]:
        Path("small.toml").write_text(small_toml)
        said = []
        for command in commands:
            program, verb, *words = shlex.split(command)
            small = shlex.split(TINY) if verb == "train" else []
            code, out, err = sdrseg(verb, *words, *small)
            assert (program, code) == ("sdrseg", 0), (command, out, err)
            said.append(" ".join(out.split()))
        return said

    return run


def test_traffic_without_background(told):
    (toml,), commands = story(1)
    for number in range(20):
        mask = np.full((32, 32), 255)
        mask[4:20, 4:14], mask[4:20, 18:28] = 0, 1
        if number % 2:
            mask[22:30, 5:15] = 2
        colours = np.array([[90, 90, 250], [150, 60, 60], [250, 250, 0], [80, 80, 80]])
        save(Path(f"traffic/images/{number}.jpg"), colours[np.minimum(mask, 3)])
        save(Path(f"traffic/masks/{number}.png"), mask)
    Path("traffic/dataset.toml").write_text(toml.splitlines()[0])
    (asked,) = told(commands[:1])
    assert "'bus', is not called background, so we assume that there is none" in asked
    Path("traffic/dataset.toml").write_text(toml)
    shown, steps, trained, *_ = told(commands)
    assert "forgetting at the end" in trained and "background" not in trained
    assert "is not called background" not in shown
    assert "class 0, 'other', is for pixels that are not labelled yet" in shown
    assert "contain old classes, which are labelled as other" in steps
    summary = json.loads(Path("runs/traffic/summary.json").read_text())
    assert summary["classes"] == ["other", "bus", "car", "person"]
    assert summary["class_by_step"][0] == [None, None] and None not in summary["class_by_step"][1]
    assert "bus" in Path("traffic.html").read_text()
    assert ",1,bus," in Path("labelled/areas.csv").read_text()
    (proposed,) = told(["sdrseg data folder:person,car/bus@disjoint --data traffic"])
    assert "In this order every step has images: folder:" in proposed


def test_a_roboflow_export(told):
    _, commands = story(2)
    FORMATS["roboflow_coco"][0](Path("export"))
    shown, trained, *_ = told(commands)
    assert "forgetting at the end, without background" in trained and "all, no background" in trained
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
        save(Path(f"sheep/images/{number:02}.jpg"), np.repeat((200 - mask // 2)[:, :, None], 3, axis=2))
        save(Path(f"sheep/masks/{number:02}.png"), mask)
    code, _, err = sdrseg("data", "sheep")
    assert code == 1 and err.strip().endswith(toml.replace("sheep", "class 1").strip())
    Path("sheep/dataset.toml").write_text(toml)
    told(commands)
    assert Path("sheep.png").is_file()
    summary = json.loads(Path("runs/sheep/summary.json").read_text())
    assert summary["classes"] == ["background", "sheep"]
    assert len(list(Path("masks").rglob("*.png"))) == 80
