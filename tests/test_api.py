"""What `import sdrseg` offers: light, lazy and typed; models in Python; a user's own methods."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import sdrseg
from sdrseg.cli import main
from sdrseg.config import parse_settings
from sdrseg.datasets.shapes import Shapes
from sdrseg.engine.rescore import score_again
from sdrseg.errors import DataError, SdrsegError, UsageError
from sdrseg.methods import METHODS, find_method, register_method, resolve_method
from sdrseg.methods.own import source_digest
from sdrseg.reporting import write_report
from sdrseg.reporting.collect import collect, command_line

TINY = ["shapes.size=32", "shapes.train=40", "shapes.val=8", "data.crop=32", "train.batch_size=4", "train.epochs=1"]
TINY += ["net.decoder=deeplabv3"]
SCENE = Shapes(size=64, train=1, val=1).image("val-00000")

OWN = """
import sdrseg

@sdrseg.register_method
class Mine(sdrseg.Method):
    name = "{name}"
    summary = "a method of mine"
    switches = {{"kd.kind": sdrseg.From("standard", "mine"), "kd.weight": sdrseg.From(1.0, "mine")}}
    own_step0 = {own}

    def more_terms(self, batch, student, teacher):
        return {{"energy": student.features.square().mean()}}

    def weights(self):
        return super().weights() | {{"energy": 0.01}}
"""


@pytest.fixture(autouse=True)
def own_methods_are_forgotten():
    before = dict(METHODS)
    yield
    METHODS.clear()
    METHODS.update(before)


def test_importing_is_light_and_names_come_when_asked_for():
    code = (
        "import sys, sdrseg\n"
        "assert not {'torch', 'numpy', 'PIL'} & set(sys.modules)\n"
        "assert set(sdrseg.__all__) <= set(dir(sdrseg))\n"
        "for name in sdrseg.__all__: getattr(sdrseg, name)\n"
        "import sdrseg.cli, sdrseg.engine.run\n"
        "assert all(callable(getattr(sdrseg, name)) for name in ('data', 'evaluate', 'export', 'report'))\n"
        "assert sdrseg.train.__module__ == 'sdrseg.engine.run'\n"
        "try:\n    sdrseg.nothing\nexcept AttributeError as error:\n    assert 'nothing' in str(error)\n"
        "else:\n    raise SystemExit(3)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, encoding="utf-8", timeout=120)
    assert (done.returncode, done.stderr) == (0, "")


# --- models -----------------------------------------------------------------------------------------------------------


def test_one_image_in_every_form(trained, tmp_path):
    model = sdrseg.load(trained)
    Image.fromarray(SCENE).save(tmp_path / "a.png")
    path = tmp_path / "a.png"
    forms = [path, str(path), Image.open(path), SCENE, torch.from_numpy(SCENE.copy()).permute(2, 0, 1)]
    masks = [model.predict(form).mask for form in forms]
    for mask in masks:
        assert mask.dtype == np.uint8 and mask.shape == (64, 64)
        np.testing.assert_array_equal(mask, masks[0])
    grey = model.predict(SCENE[:, :, 0])
    np.testing.assert_array_equal(grey.mask, model.predict(np.repeat(SCENE[:, :, :1], 3, axis=2)).mask)
    np.testing.assert_array_equal(grey.mask, model.predict(torch.from_numpy(SCENE[:, :, 0].copy())[None]).mask)


def test_the_contents_of_a_prediction(trained, tmp_path):
    model = sdrseg.load(str(trained), step=1, device="cpu")
    assert repr(model) == "<Model of shapes:8-1@disjoint, step 1: 10 classes>"
    assert [c.id for c in model.classes] == list(range(10)) and model.classes[9].step == 1
    prediction = model.predict(SCENE)
    assert prediction.probabilities.shape == (10, 64, 64) and prediction.probabilities.dtype == np.float32
    np.testing.assert_allclose(prediction.probabilities.sum(0), 1, atol=1e-5)
    areas = prediction.areas
    assert list(areas) == [c.name for c in model.classes] and sum(a.pixels for a in areas.values()) == 64 * 64
    for c in model.classes:
        assert areas[c.name] == (c.id, (prediction.mask == c.id).sum(), (prediction.mask == c.id).mean())
    assert prediction.overlay().size == (64, 64)
    np.testing.assert_array_equal(np.asarray(prediction.overlay(0)), SCENE)
    with pytest.raises(SdrsegError, match="strength"):
        prediction.overlay(2)
    prediction.save(tmp_path / "m.png")
    np.testing.assert_array_equal(np.asarray(Image.open(tmp_path / "m.png")), prediction.mask)
    with pytest.raises(SdrsegError, match=r"m\.png exists"):
        prediction.save(tmp_path / "m.png")
    prediction.save(tmp_path / "m.png", overwrite=True)
    with pytest.raises(SdrsegError, match=r"\.png"):
        prediction.save(tmp_path / "m.jpg")


def test_predicting_leaves_gradients_alone_and_images_too(trained):
    model, before = sdrseg.load(trained), SCENE.copy()
    model.predict(SCENE)
    assert torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
    np.testing.assert_array_equal(SCENE, before)
    with pytest.raises(DataError, match=r"nowhere\.png: no such file"):
        model.predict("nowhere.png")


# --- methods ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("hook", "message"),
    [
        ("def weights(self):\n        return {'own': 2.0}", r"weights\(\) leaves out kd, .*super\(\).weights\(\)"),
        (
            "def weights(self):\n        return {**super().weights(), 'own': 2.0}\n\n    def mor_terms(self): pass",
            r"names own, but nothing computes that.*more_terms",
        ),
        ("def begin_step(self, step, student, teacher):\n        pass", r"begin_step has to call super\(\).begin_step"),
        ("def __init__(self, config, processes):\n        self.config = config", r"__init__ has to call super\(\)"),
    ],
)
def test_a_forgotten_super_or_a_misspelt_hook_is_named(tmp_path, hook, message):
    file = tmp_path / "mine.py"
    head = "import sdrseg\n\n@sdrseg.register_method\nclass Mine(sdrseg.Method):\n    name = summary = 'mine'\n"
    file.write_text(f"{head}\n    {hook}\n")
    with pytest.raises(UsageError, match=message):
        sdrseg.train(
            "shapes:9-1@disjoint", str(file), tmp_path / "run", settings=parse_settings(TINY), bases=tmp_path / "b"
        )


def test_a_changed_file_is_another_method(tmp_path):
    file, out = tmp_path / "mine.py", tmp_path / "run"
    code = "import sdrseg\n\n@sdrseg.register_method\nclass Mine(sdrseg.Method):\n    name = summary = 'mine'\n"
    file.write_text(code)
    for _ in range(2):
        sdrseg.train("shapes:9-1@disjoint", str(file), out, settings=parse_settings(TINY), bases=tmp_path / "b")
    file.write_text(code + "    wants_more = True\n")
    with pytest.raises(SdrsegError, match=r"run is a run of another configuration .*: method_code: '"):
        sdrseg.train("shapes:9-1@disjoint", str(file), out, settings=parse_settings(TINY), bases=tmp_path / "b")
    del METHODS["mine"]
    copy = f"{out}/method.py:mine"
    assert f" --method {copy} " in command_line(collect([out])[0])
    assert resolve_method(copy) == "mine"
    del METHODS["mine"]
    (out / "method.py").unlink()
    assert " --method FILE.py:mine " in command_line(collect([out])[0])
    page, _ = write_report([out], tmp_path / "page.html", images=0)
    assert "RUN is a new folder, FILE.py the file of the custom method or data set." in page.read_text()


def test_a_syntax_error_is_named_with_its_line(tmp_path):
    (tmp_path / "mine.py").write_text("import sdrseg\n\ndef f()\n    pass\n")
    with pytest.raises(UsageError, match=r"mine\.py, line 3: SyntaxError: expected ':'$"):
        sdrseg.train("shapes:9-1@disjoint", str(tmp_path / "mine.py"), tmp_path / "run")


def test_a_custom_method_trains(tmp_path):
    @sdrseg.register_method
    class Mine(sdrseg.Method):
        name = "mine"
        summary = "fine-tuning and a little more"

        def more_terms(self, batch, student, teacher):
            return {"energy": student.features.square().mean()}

    spec, out = "shapes:9-1@disjoint", tmp_path / "run"
    summary = sdrseg.train(
        spec, "mine", str(out), settings=parse_settings([*TINY, "run.log_every=1"]), bases=str(tmp_path / "b")
    )
    assert summary["steps"] == 2
    lines = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    named = [set(line["losses"]) for line in lines if "losses" in line and line["step"] == 1]
    assert named and all("energy" in names for names in named)
    assert find_method("mine") is Mine
    del METHODS["mine"]
    assert all(entry["same"] for entry in score_again(out))  # whoever evaluates need not have the method
    assert len(sdrseg.load(out).classes) == 11


def test_own_terms_are_shared_out_over_the_parts_of_a_batch():
    """With gradient accumulation a term is computed on each part, and the parts add up to its mean."""
    from methods_bench import begin

    @register_method
    class Mine(sdrseg.Method):
        name = "mine"
        summary = "one"

        def more_terms(self, batch, student, teacher):
            return {"one": student.features.new_ones(())}

    stage = begin("mine", "disjoint")
    stage.iterate(1)
    assert float(stage.terms[0]["one"]) == 1
    stage.method.expect(stage.batch, 4)
    stage.iterate(1)
    assert float(stage.terms[1]["one"]) == 0.25


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("name = 'sdr'; summary = 'x'", "The method 'sdr' exists already"),
        ("name = 'x'", "give the class a line `summary"),
        ("summary = 'x'", "give the class a line `name"),
        ("name = 'a.py'; summary = 'x'", "does not end in .py"),
    ],
)
def test_what_cannot_be_registered(body, message):
    before = dict(METHODS)
    scope: dict = {}
    exec(f"import sdrseg\nclass Mine(sdrseg.Method):\n    {body}", scope)
    with pytest.raises(UsageError, match=message):
        register_method(scope["Mine"])
    with pytest.raises(UsageError, match="not a subclass"):
        register_method(int)
    assert before == METHODS


def test_a_file_in_place_of_a_name(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(OWN.format(name="first", own=False))
    assert resolve_method(str(file)) == resolve_method(f"{file}:first") == "first"
    old = source_digest(find_method("first"))
    file.write_text(OWN.format(name="first", own=True))  # changed in one process: the newer one counts
    assert resolve_method(str(file)) == "first" and find_method("first").own_step0
    new = source_digest(find_method("first"))
    assert new not in (old, "") and source_digest(find_method("sdr")) == ""
    text = file.read_text()
    file.write_text(text + "# edited while it is used\n")
    assert source_digest(find_method("first")) == new  # of the code that runs
    file.write_text(text)
    file.write_text(OWN.format(name="first", own=False) + OWN.format(name="second", own=False))
    with pytest.raises(UsageError, match=r"registers first, second\. Choose one: .*mine\.py:first"):
        resolve_method(str(file))
    assert resolve_method(f"{file}:second") == "second"
    with pytest.raises(UsageError, match="registers no method 'third', but first, second"):
        resolve_method(f"{file}:third")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read"),
        ("x = 1", "registers no method. Put @sdrseg.register_method"),
        ("import sdrseg\n\n1 / 0", r"mine.py, line 3: ZeroDivisionError"),
        ("def f(:", r"mine.py, line .*SyntaxError"),
        (OWN.format(name="sdr", own=False), "mine.py: The method 'sdr' exists already"),
        (OWN.format(name="new", own=False) + "raise ValueError('no')", "ValueError: no"),
    ],
)
def test_files_that_are_not_methods(content, message, tmp_path):
    before = dict(METHODS)
    if content is not None:
        (tmp_path / "mine.py").write_text(content)
    with pytest.raises(UsageError, match=message):
        resolve_method(str(tmp_path / "mine.py"))
    assert before == METHODS


def test_the_command_takes_a_file(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(OWN.format(name="energetic", own=False))
    settings = [word for value in TINY for word in ("--set", value)]
    words = ["train", "shapes:9-1@disjoint", "--method", "mine.py", "--out", "run", "--bases", "bases", *settings]
    for _ in range(2):  # the second time there is nothing left to do
        monkeypatch.setattr(sys, "argv", ["sdrseg", *words, "--json"])
        with pytest.raises(SystemExit) as end:
            main()
        assert not end.value.code
        assert json.loads(capfd.readouterr().out)["steps"] == 2
    assert json.loads(Path("run/config.json").read_text())["method"] == "energetic"
    monkeypatch.setattr(sys, "argv", ["sdrseg", "methods", "mine.py", "--json"])
    with pytest.raises(SystemExit):
        main()
    assert json.loads(capfd.readouterr().out)["weights"]["energy"] == 0.01
