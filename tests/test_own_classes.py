"""Own data: which class is the background, and what values and colours of masks mean."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import sdrseg
from runs import Quiet
from sdrseg.datasets.folder import open_folder
from sdrseg.datasets.folder.coding import Coding
from sdrseg.datasets.index import class_index
from sdrseg.errors import DataError
from sdrseg.scenario import build_scenario, parse_spec
from test_folder import one_mask, save, write

STREET = 'classes = ["sky", "building", "road"]\n'

# --- the background ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("said", ["", 'background = "none"\n'])
def test_without_background_class_0_is_ours(tmp_path: Path, said: str) -> None:
    folder = one_mask(tmp_path, STREET + said, [[0, 1, 2, 255]])
    assert folder.classes == ("other", "sky", "building", "road") and not folder.score_background
    assert folder.mask("a").tolist() == [[1, 2, 3, 255]]
    (note,) = folder.notes
    assert "class 0, 'other', is for pixels that are not labelled yet and is not scored" in note
    assert ("'sky', is not called background" in note) == (said == "")
    with pytest.raises(DataError, match=r"the value 3 \(1 pixel\) is neither one of the classes \(0 \(sky\)"):
        one_mask(tmp_path, STREET + said, [[3]]).mask("a")


def test_the_advice_for_an_unknown_value_can_be_followed(tmp_path: Path) -> None:
    table = '[values]\n0 = "background"\n255 = "sheep"\n'
    with pytest.raises(DataError) as wrong:
        one_mask(tmp_path, table, [[0, 77, 255]]).mask("a")
    said = str(wrong.value)
    line = re.search(r'add it to the table `values` of .*dataset\.toml: (77 = "…"), with a class', said)
    assert line and "nor ignored. Correct" in said
    with pytest.raises(DataError, match=r'save masks as PNG files, because JPEG changes values.* "0-127"'):
        Coding(one_mask(tmp_path, table, [[0]]).settings).decode(np.array([[1]], np.uint8), Path("a.jpg"))
    mended = one_mask(tmp_path, table + line[1].replace("…", "ignore"), [[0, 77, 255]])
    assert mended.mask("a").tolist() == [[0, 255, 1]]


def test_the_background_by_name_and_by_value(tmp_path: Path) -> None:
    for said in ('"road"', "2"):
        folder = one_mask(tmp_path, STREET + f"background = {said}", [[0, 1, 2]])
        assert folder.classes == ("road", "sky", "building") and folder.score_background
        assert folder.mask("a").tolist() == [[1, 2, 0]] and "becomes class 0" in folder.notes[0]
    folder = one_mask(tmp_path, STREET + "background = 9", [[0, 1, 2, 9]])
    assert folder.classes == ("background", "sky", "building", "road")
    assert folder.mask("a").tolist() == [[1, 2, 3, 0]]
    folder = one_mask(tmp_path, 'classes = ["sky", "Background"]', [[0, 1]])
    assert folder.classes == ("Background", "sky") and folder.mask("a").tolist() == [[1, 0]]
    assert one_mask(tmp_path, STREET + 'background = "sky"', [[0, 1, 2]]).notes == ()
    assert one_mask(tmp_path, 'classes = ["other", "x"]\nbackground = "none"', [[0]]).classes[0] == "not labelled yet"


@pytest.mark.parametrize("name", ["background", "_background_", "BG", "Unlabelled", "back-ground"])
def test_usual_names_of_the_background(tmp_path: Path, name: str) -> None:
    folder = one_mask(tmp_path, f'classes = ["{name}", "sky"]', [[0, 1]])
    assert folder.classes == (name, "sky") and folder.score_background and folder.notes == ()


@pytest.mark.parametrize("protocol", ["sequential", "disjoint", "overlapped"])
def test_what_is_ours_is_never_scored(tmp_path: Path, protocol: str) -> None:
    write(tmp_path, STREET + 'background = "none"\nval = 0.5')
    for number, mask in enumerate([[0, 255], [0, 0], [0, 1], [1, 1], [0, 2], [2, 255]] * 2):
        save(tmp_path / f"images/{number}.png", np.zeros((1, 2, 3)))
        save(tmp_path / f"masks/{number}.png", [mask])
    source = open_folder(tmp_path)
    index = {split: class_index(source, split) for split in ("train", "val")}
    steps = build_scenario(parse_spec(f"folder:1-1@{protocol}"), source, index["train"], index["val"]).steps
    assert [step.channels for step in steps] == [(0, 1), (0, 1, 2), (0, 1, 2, 3)]
    for step in steps:
        assert 0 not in step.test_table  # ours is a prediction that is always wrong
        assert [step.test_table[c] for c in step.channels[1:]] == list(range(1, len(step.channels)))
        assert step.train_table[0] == 0 and step.train_table[255] == 255
    last = steps[-1].train_table
    assert last[1] == (1 if protocol == "sequential" else 0)  # sky has gone into "not labelled"


@pytest.mark.parametrize(("left_out", "trained", "scored"), [("background", 0, 0), ("ignore", 255, 255)])
def test_classes_that_no_step_names(left_out: str, trained: int, scored: int) -> None:
    data = SimpleNamespace(name="folder", classes=tuple("bcde"), score_background=True, partition="latest")
    present = np.zeros((4, 256), bool)
    for row, classes in enumerate([(1,), (2,), (1, 3), (3,)]):
        present[row, list(classes)] = True
    images = SimpleNamespace(ids=tuple("wxyz"), present=present)
    spec = parse_spec("folder:c/d@disjoint")
    first, last = build_scenario(spec, data, images, images, left_out=left_out).steps
    assert (first.train_ids, last.train_ids, last.test_ids) == (("w", "y"), ("x",), ("w", "x", "y"))
    assert first.channels == (0, 1) and last.channels == (0, 1, 2) and 3 not in last.old + last.new + first.future
    assert {int(step.train_table[3]) for step in (first, last)} == {trained}
    assert {int(table[3]) for step in (first, last) for table in (step.test_table, step.val_table)} == {scored}
    data.score_background = False
    assert build_scenario(spec, data, images, images, left_out=left_out).steps[1].test_table[3] == 255


# --- values -----------------------------------------------------------------------------------------------------------

FIRE = 'values = {127 = "fire", 254 = "smoke"}\n'


def test_a_table_of_values(tmp_path: Path) -> None:
    folder = one_mask(tmp_path, FIRE, [[0, 127, 254, 255]])
    assert folder.classes == ("background", "fire", "smoke") and folder.score_background and folder.notes == ()
    assert folder.mask("a").tolist() == [[0, 1, 2, 255]]
    with pytest.raises(
        DataError,
        match=r'value 128 \(2 pixels\).*0 \(background\), 127 \(fire\), 254 \(smoke\).*`values` of .*128 = "…"',
    ):
        one_mask(tmp_path, FIRE, [[0, 128, 128]]).mask("a")


@pytest.mark.parametrize(
    ("toml", "stored", "expected"),
    [
        ('values = {1-3 = "tree", 7 = "tree", 8 = "car"}', [0, 1, 3, 7, 8], [0, 1, 1, 1, 2]),
        ('values = {1 = "tree", 8 = "car", 9 = "ignore", 10 = "background"}', [0, 1, 8, 9, 10], [0, 1, 2, 255, 0]),
        ('classes = ["background", "car", "tree"]\nvalues = {5 = "tree", 255 = "car"}', [0, 5, 255], [0, 2, 1]),
        ('values = {1 = "tree", rest = "ignore"}\nbackground = 0', [0, 1, 77], [0, 1, 255]),
        ('values = {1 = "tree", rest = "background"}', [0, 1, 77, 255], [0, 1, 0, 255]),
        ('values = {0 = "sky", 1 = "tree"}\nbackground = "none"', [0, 1, 255], [1, 2, 255]),
        ('values = {1 = "a", 2 = "b"}\nignore = 0\nbackground = "none"', [0, 1, 2], [255, 1, 2]),
    ],
)  # fmt: skip
def test_tables_of_values(tmp_path: Path, toml: str, stored: list[int], expected: list[int]) -> None:
    assert one_mask(tmp_path, toml, [stored]).mask("a").tolist() == [expected]


def test_wide_values_and_grey_saved_as_colour(tmp_path: Path) -> None:
    table = 'values = {300 = "a", 600 = "b"}'
    assert one_mask(tmp_path, table, [[0, 300, 600]], np.uint16).mask("a").tolist() == [[0, 1, 2]]
    assert one_mask(tmp_path, FIRE, [[[127, 127, 127], [0, 0, 0]]]).mask("a").tolist() == [[1, 0]]


def test_a_table_of_colours(tmp_path: Path) -> None:
    toml = 'values = {"#000000" = "background", "#FF0000" = "car", "#ff8000" = "car", "#ffffff" = "ignore"}'
    pixels = [[[0, 0, 0], [255, 0, 0], [255, 128, 0], [255, 255, 255]]]
    folder = one_mask(tmp_path, toml, pixels)
    assert folder.classes == ("background", "car") and folder.mask("a").tolist() == [[0, 1, 1, 255]]


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_a_table_maps_values_to_classes(data: st.DataObject) -> None:
    names = ["background", "ignore", "a", "b", "c"]
    values = data.draw(st.dictionaries(st.integers(1, 65535), st.sampled_from(names), min_size=1, max_size=12))
    if not {"a", "b", "c"} & set(values.values()):
        values[1] = "a"
    stored = np.array([[0, *values]], np.uint16)
    with tempfile.TemporaryDirectory() as name:
        table = ", ".join(f'{value} = "{meant}"' for value, meant in values.items())
        folder = one_mask(Path(name), f"values = {{{table}}}", stored, np.uint16)
        said = [{255: "ignore", 0: "background"}.get(label) or folder.classes[label] for label in folder.mask("a")[0]]
        assert said == ["background", *values.values()]


def test_what_a_mask_means_is_part_of_its_digest(tmp_path: Path) -> None:
    """So a run does not go on, and a stored base is not taken, after fire and smoke have changed places."""
    tables = (FIRE, 'values = {127 = "smoke", 254 = "fire"}\nclasses = ["background", "fire", "smoke"]\n')
    found = [class_index(one_mask(tmp_path, table, [[0, 127, 254]]), "train") for table in tables]
    assert found[0].pixels[0, :3].tolist() == found[1].pixels[0, :3].tolist() == [1, 1, 1]
    assert found[0].digests.tolist() != found[1].digests.tolist()


# --- through training -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def street(tmp_path_factory) -> Path:
    """Photographs of four classes that fill them: none is the background."""
    root = write(tmp_path_factory.mktemp("street"), 'classes = ["sky", "wall", "road", "grass"]\nbackground = "none"\n')
    colours = np.array([[80, 120, 250], [150, 70, 60], [90, 90, 90], [40, 160, 50]])
    for number in range(24):
        mask = np.zeros((32, 32), int)
        mask[16:] = 1 + number % 3
        mask[0, 0] = 255
        noise = np.random.default_rng(number).integers(-9, 9, (32, 32, 3))
        save(root / f"images/{number}.png", (colours[mask % 4] + noise).clip(0, 255))
        save(root / f"masks/{number}.png", mask)
    return root


TINY = {
    "data.crop": 32,
    "data.workers": 0,
    "train.batch_size": 4,
    "train.epochs": 2,
    "net.encoder": "toy16",
    "net.weights": "none",
    "net.output_stride": 8,
    "net.decoder": "deeplabv3",
    "eval.transform": "full_image",
    "optim.lr": 0.02,
    "kd.weight": 1.0,
}


@pytest.mark.parametrize(
    ("spec", "method"), [("2-1@disjoint", "sdr"), ("2-1@sequential", "mib"), ("2-2@overlapped", "lwf-mc")]
)
def test_data_without_background_trains(street: Path, tmp_path: Path, spec: str, method: str) -> None:
    display = Quiet()
    summary = sdrseg.train(
        f"folder:{spec}", method, tmp_path / "run", data=street, settings=TINY, bases=tmp_path, display=display
    )
    assert summary["classes"] == ["other", "sky", "wall", "road", "grass"]
    assert all(value is None for value in summary["class_by_step"][0])  # ours
    assert summary["class_by_step"][1][0] is not None  # the sky
    assert summary["forgetting"]["by_class"][1][-1] is not None
    assert any("There is no background" in str(said) for said in display.said)
    model = sdrseg.load(tmp_path / "run")
    assert [c.name for c in model.classes] == ["other", "sky", "wall", "road", "grass"]
    assert set(np.unique(model.predict(street / "images/0.png").mask)) <= set(range(5))
