"""Data sets of a user's own: what registering and opening them demands, and how they are used by name."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest

import sdrseg
from sdrseg.config import Config, load_config, parse_settings
from sdrseg.datasets import open_source, read_spec, register_source
from sdrseg.datasets.index import class_index
from sdrseg.datasets.source import Source
from sdrseg.errors import DataError, UsageError
from sdrseg.methods import METHODS, limits_in, method_layers
from sdrseg.reporting.collect import collect, command_line
from sdrseg.scenario import SOURCES, find_source, parse_spec

from conftest import forget_own_sources, own_sources


@pytest.fixture(autouse=True)
def own_sources_are_forgotten():
    yield
    forget_own_sources()


class Bars(Source):
    """Class 1 in the upper half, class 2 in the lower half of some; nothing on disk."""

    name = "bars"
    classes = ("background", "upper", "lower")
    needs_folder = False
    defaults: ClassVar = {
        "data": {"crop": 32, "workers": 0},
        "eval": {"transform": "full_image"},
        "net": {"encoder": "toy16", "output_stride": 8, "weights": "none", "decoder": "deeplabv3"},
        "train": {"epochs": 1, "batch_size": 4},
    }

    def ids(self, split):
        return tuple(f"{split}-{n}" for n in range(16 if split == "train" else 4))

    def image(self, id):
        return np.repeat(self.mask(id)[:, :, None] * np.uint8(90), 3, axis=2)

    def mask(self, id):
        mask = np.zeros((32, 40), np.uint8)
        mask[:16, : 10 + int(id.split("-")[1])] = 1
        mask[16:, :20] = 2 * (int(id[-1]) % 2)
        return mask


def test_a_data_set_is_known_by_its_name(tmp_path):
    assert register_source(Bars) is Bars and register_source(Bars) is Bars
    assert str(parse_spec("bars:1-1@overlapped")) == "bars:1-1@overlapped"
    assert isinstance(open_source("bars", None, Config()), Bars)
    config = load_config("bars", settings=parse_settings(["train.epochs=2"]))
    assert (config.data.crop, config.train.epochs, config.optim.lr) == (32, 2, Config().optim.lr)
    summary = sdrseg.train("bars:1-1@overlapped", "mib", tmp_path / "run", bases=tmp_path / "bases")
    assert summary["steps"] == 2 and summary["classes"] == ["background", "upper", "lower"]
    assert [c.name for c in sdrseg.load(tmp_path / "run").classes] == ["background", "upper", "lower"]


def test_the_folder_is_passed_on_or_an_error(tmp_path):
    class InFolder(Bars):
        name = "in_folder"
        needs_folder = True

        def __init__(self, path):
            self.path = path

    register_source(Bars)
    register_source(InFolder)
    assert open_source("in_folder", tmp_path, Config()).path == tmp_path
    with pytest.raises(UsageError, match="in_folder needs --data PATH"):
        open_source("in_folder", None, Config())
    with pytest.raises(DataError, match="no such folder"):
        open_source("in_folder", tmp_path / "nothing", Config())
    with pytest.raises(UsageError, match="bars needs no folder"):
        open_source("bars", tmp_path, Config())


def test_content_is_the_label_map_and_its_shape():
    register_source(Bars)
    source = open_source("bars", None, Config())
    assert source.mask_content("val-0") == source.mask_content("train-0") != source.mask_content("train-1")

    class Turned(Bars):
        def mask(self, id):
            return np.ascontiguousarray(super().mask(id).reshape(40, 32))

    first, second = class_index(Bars(), "val"), class_index(Turned(), "val")  # the same bytes in another shape
    assert first.sizes[0].tolist() == [32, 40] and second.sizes[0].tolist() == [40, 32]


LACKING = """
from sdrseg import Source
class Mine(Source):
    {body}
"""


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("classes = ('a', 'b')", "Mine: give the class a `name"),
        ("name = 'a:b'", "give the class a `name"),
        ("name = 'mine'", "Mine: add the missing methods: ids, image, mask"),
        ("name = 'voc'", "a data set 'voc' already exists"),
    ],
)
def test_what_cannot_be_registered(body, message):
    scope: dict = {}
    exec(LACKING.format(body=body), scope)
    with pytest.raises(UsageError, match=message):
        register_source(scope["Mine"])
    assert not own_sources()


def test_other_things_that_cannot_be_registered():
    with pytest.raises(UsageError, match="is not a subclass of"):
        register_source(int)
    with pytest.raises(UsageError, match=r"Wrong\.defaults: unknown key train\.epoch"):

        @register_source
        class Wrong(Bars):
            defaults: ClassVar = {"train": {"epoch": 3}}

    assert not own_sources()
    register_source(Bars)
    with pytest.raises(UsageError, match="a data set 'bars' already exists"):

        @register_source
        class Again(Bars):
            pass

    with pytest.raises(UsageError, match=r"Wrong\.limits: unknown key kd\.wait"):

        @register_source
        class Wrong(Bars):
            name = "wrong"
            limits: ClassVar = {"*": {"kd.wait": 3}}

    assert own_sources() == ["bars"] and SOURCES["bars"] is Bars
    with pytest.raises(UsageError, match="unknown data set 'barz'; did you mean 'bars'"):
        find_source("barz")


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ({"classes": ("background",)}, r"bars: classes = .* is not a tuple of 2 to 254 distinct names"),
        ({"classes": ("background", "a", "a")}, "distinct names"),
        ({"classes": ["background", "a"]}, "is not a tuple"),
        ({"ids": lambda self, split: ("a-1", "a-2", "a-1")}, "id 'a-1' occurs twice"),
        ({"ids": lambda self, split: ("a-1",)}, "id 'a-1' occurs twice; ids must be unique"),
        ({"mask": lambda self, id: np.zeros((4, 4))}, r"mask\('train-0'\) is float64 \(4, 4\); .* uint8 \(H, W\)"),
        ({"mask": lambda self, id: np.zeros((4, 4, 1), np.uint8)}, r"must be uint8 \(H, W\)"),
        ({"image": lambda self, id: np.zeros((4, 4, 4), np.uint8)}, r"image\('train-0'\) .* uint8 \(H, W, 3\)"),
    ],
)
def test_violations_of_the_interface_are_reported_when_it_is_opened(members, message):
    register_source(type("Broken", (Bars,), members))
    with pytest.raises(DataError, match=message):
        open_source("bars", None, Config())


def test_a_first_picture_that_cannot_be_read_is_left_to_the_audit():
    class Unreadable(Bars):
        def image(self, id):
            raise DataError(f"{id}: cannot be read.")

    register_source(Unreadable)
    assert open_source("bars", None, Config()).ids("val")


# --- a file in place of a name ----------------------------------------------------------------------------------------

FILE = """
import numpy as np
from sdrseg import Source, register_source

@register_source
class Bars(Source):
    name = "{name}"
    classes = ("background", "upper", "lower")
    needs_folder = False
    defaults = {{
        "data": {{"crop": 32, "workers": 0}},
        "eval": {{"transform": "full_image"}},
        "net": {{"encoder": "toy16", "output_stride": 8, "weights": "none", "decoder": "deeplabv3"}},
        "train": {{"epochs": 1, "batch_size": 4}},
    }}
    limits = {{"*": {{"kd.weight": 2.0}}, "lwf": {{"kd.weight": 1.0}}}}

    def ids(self, split):
        return tuple(f"{{split}}-{{n}}" for n in range(8 if split == "train" else 4))

    def image(self, id):
        return np.repeat(self.mask(id)[:, :, None] * np.uint8(90), 3, axis=2)

    def mask(self, id):
        mask = np.zeros((32, 40), np.uint8)
        mask[:16] = 1
        mask[16:, :20] = 2 * (int(id[-1]) % 2)
        return mask
"""


def test_a_file_in_place_of_a_name(sdrseg):
    Path("mine.py").write_text(FILE.format(name="own-bars"))
    code, out, _ = sdrseg("data", "mine.py:1-1@disjoint", "--json")
    assert code == 0 and json.loads(out)["spec"] == "own-bars:1-1@disjoint"
    assert [step["train"] for step in json.loads(out)["steps"]] == [4, 4]
    assert list(Path().iterdir()) == [Path("mine.py")]  # no picture unasked
    code, _, said = sdrseg("train", "mine.py:1-1@disjoint", "--method", "mib", "--out", "run", "--bases", "bases")
    assert code == 0 and "kd.weight is capped at 2 for the data set own-bars" in " ".join(said.split())
    saved = json.loads(Path("run/config.json").read_text())
    assert saved["spec"] == "own-bars:1-1@disjoint" and saved["config"]["kd"]["weight"] == 2.0
    forget_own_sources()  # another process
    code, _, err = sdrseg("evaluate", "run")
    assert code == 2 and "unknown data set 'own-bars'" in err and "--source FILE.py" in err
    assert not own_sources()  # a run names no code to be run
    assert sdrseg("evaluate", "run", "--source", "mine.py")[0] == 0
    forget_own_sources()
    assert sdrseg("report", "run", "--out", "page.html", "--images", "0")[0] == 0
    page = Path("page.html").read_text()
    assert "sdrseg train run/dataset.py:1-1@disjoint" in page and "FILE.py" not in page
    assert "--set kd.weight" not in page  # the cap of the data set, not a change
    assert Path("run/dataset.py").read_text() == Path("mine.py").read_text()
    code, out, err = sdrseg("result", "run")
    assert code == 0 and "kd.weight" not in json.loads(out)[0]["settings"], err
    assert sdrseg("compare", "run")[0] == 0
    assert sdrseg("figures", "steps", "run", "--dpi", "50")[0] == 0
    assert sdrseg("figures", "qualitative", "run", "--dpi", "50")[0] == 2
    assert sdrseg("figures", "qualitative", "run", "--dpi", "50", "--source", "mine.py")[0] == 0


METHOD = """
import sdrseg

@sdrseg.register_method
class Same(sdrseg.Method):
    name = "same"
    summary = "fine-tuning"
"""


def test_one_file_may_have_a_method_and_a_data_set(sdrseg):
    file = Path("both.py")
    file.write_text(FILE.format(name="own-bars") + METHOD)
    try:
        for run in ("first", "edited"):
            command = ("train", "both.py:1-1@disjoint", "--method", "both.py", "--out", run, "--bases", "bases")
            code, _, said = sdrseg(*command)
            assert code == 0, said
            saved = json.loads(Path(run, "config.json").read_text())
            assert (saved["spec"], saved["method"]) == ("own-bars:1-1@disjoint", "same")
            command = f"sdrseg train {run}/method.py:1-1@disjoint --method {run}/method.py:same "
            assert command_line(collect([Path(run)])[0]).startswith(command)
            file.write_text(FILE.format(name="own-bars") + METHOD + "# edited")
    finally:
        METHODS.pop("same", None)


def test_a_file_may_be_the_first_to_import_the_registries(tmp_path):
    """What is built in is not taken for something of the file."""
    (tmp_path / "both.py").write_text(FILE.format(name="bars") + METHOD)
    code = (
        "import sys; from pathlib import Path; from sdrseg.own_files import run_file\n"
        "from sdrseg.scenario import SOURCES; assert 'sdrseg.methods' not in sys.modules\n"
        "print(run_file(Path('both.py'), SOURCES), *SOURCES)\n"
        "Path('both.py').write_text('')\n"
        "print(run_file(Path('both.py'), SOURCES), *SOURCES)\n"
        "from sdrseg.methods import METHODS; print('same' in METHODS, 'mib' in METHODS)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    built_in = "voc ade20k folder shapes extended"
    assert done.stdout.splitlines() == [f"['bars'] {built_in} bars", f"[] {built_in}", "False True"]


def test_a_data_set_from_a_file_reaches_spawned_processes(tmp_path):
    (tmp_path / "mine.py").write_text(FILE.format(name="travelling"))
    source = open_source(read_spec(str(tmp_path / "mine.py")).source, None, Config())
    source.extra = 7
    code = (
        "import pickle, sys\n"
        "source = pickle.load(sys.stdin.buffer)\n"
        "print(source.name, source.extra, source.mask('train-1').sum())"
    )
    done = subprocess.run([sys.executable, "-c", code], input=pickle.dumps(source), capture_output=True, check=True)
    assert done.stdout.decode().split() == ["travelling", "7", str(source.mask("train-1").sum())]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1", "mine.py: registers no data set"),
        (FILE.format(name="a") + FILE.format(name="b"), "mine.py: registers 2 data sets \\(a, b\\)"),
        (FILE.format(name="voc"), "mine.py: Bars: a data set 'voc' already exists"),
        (FILE.format(name="a") + "1 / 0", "ZeroDivisionError"),
        (None, "mine.py: cannot be read"),
    ],
)
def test_files_that_are_not_a_data_set(tmp_path, text, message):
    file = tmp_path / "mine.py"
    if text is not None:
        file.write_text(text)
    with pytest.raises(UsageError, match=message):
        read_spec(f"{file}:1-1@disjoint")


def test_a_path_may_contain_the_separators_of_a_specification(tmp_path):
    file = tmp_path / "a@b:c" / "mine.py"
    file.parent.mkdir()
    file.write_text(FILE.format(name="deep"))
    assert str(read_spec(f"{file}:1-1@disjoint")) == "deep:1-1@disjoint" and str(read_spec(str(file))) == "deep"


def test_limits_of_a_data_set_apply_in_the_default_preset(tmp_path):
    (tmp_path / "mine.py").write_text(FILE.format(name="limited"))
    read_spec(str(tmp_path / "mine.py"))
    found = {name: limits_in(method_layers(name, "default", None, "limited")) for name in ("mib", "lwf", "ft")}
    assert found == {"mib": [("kd", "weight", 2.0)], "lwf": [("kd", "weight", 1.0)], "ft": []}
    assert limits_in(method_layers("mib", "paper", None, "limited")) == []
