"""The old test images of an extended model: moved, changed, gone, or never there."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import segmentation_models_pytorch as smp
import torch
from typer.testing import CliRunner

from extend_data import NAMES, QUICK, SIDE, base_folder, base_run, coco_folder, masks_folder
from formats import save
from runs import Quiet
from sdrseg.cli import app
from sdrseg.datasets.extended import read_chain
from sdrseg.engine.rescore import score_again
from sdrseg.engine.show import evaluate_run
from sdrseg.errors import SdrsegError, UsageError
from sdrseg.extend.branches import branches
from sdrseg.extend.history import change_classes, history
from sdrseg.extend.imported import import_model
from sdrseg.extend.parent import read_parent
from sdrseg.extend.remember import views_of
from sdrseg.extend.run import Extension, extend
from sdrseg.extend.show import show_extension
from sdrseg.reporting import write_report

GIVEN = {"settings": QUICK, "method": "ft", "display": Quiet()}


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    root = base_run(tmp_path_factory.mktemp("old"))
    masks_folder(root / "white", 7)
    coco_folder(root / "black", 8)
    return root


@pytest.fixture
def moved(place, tmp_path) -> Path:
    """A run whose data have moved from `base` to `moved`, and its extension by white without them in `7`."""
    shutil.copytree(place / "run", tmp_path / "run")
    shutil.copytree(place / "base", tmp_path / "moved")
    started = json.loads((tmp_path / "run/environment.json").read_text())
    started[-1]["data"] = str(tmp_path / "base")
    (tmp_path / "run/environment.json").write_text(json.dumps(started))
    extend(tmp_path / "run", place / "white", tmp_path / "7", **GIVEN)
    return tmp_path


def test_forgetting_is_missed_if_some_old_classes_have_no_score(place, moved, capsys):
    done = extend(moved / "7", place / "black", moved / "8", max_forgetting=100.0, **GIVEN)
    assert not done.met and done.result["old_images"] > 0
    (missed,) = done.result["verdict"]["missed"]
    assert "was not measured for red, green, blue, yellow, pink, cyan, the limit is 100" in missed
    assert [c["after"] is None for c in done.result["old"]] == [True] * 7 + [False]  # background, too
    assert any("the test images of step 0 are not available" in note for note in done.notes)
    show_extension(done, json=False)
    shown = capsys.readouterr().out
    assert "(over 1 of 7 old classes; " in shown and "verdict: MISSED: forgetting is" in shown


def outcome(old: list[dict], **result) -> Extension:
    """An extension whose result has these old classes."""
    usual = {"new": [], "new_iou": None, "held_out_images": 2, "forgetting": None, "kept_elsewhere": None}
    return Extension(Path("run"), 1, "ft", (), None, {**usual, "old": old, "verdict": {"asked": False}, **result}, {})


@pytest.mark.parametrize(
    ("images", "others", "why"),
    [
        (0, ["red"], "old test images are not available"),
        (3, ["red"], "no old class is labelled in the 3 old test images"),
        (19, [], "no old class is left besides background"),
    ],
)
def test_why_forgetting_is_not_measured(images, others, why, capsys):
    old = [{"name": name, "before": None, "after": None, "lost": None} for name in ("background", *others)]
    show_extension(outcome(old, old_images=images, kept_elsewhere=0.98), json=False)
    assert f"{why}; on the new images, 98.0 % of the pixels outside the new classes" in capsys.readouterr().out
    show_extension(outcome(old, old_images=images), json=False)
    assert f"{why}\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("lost", "said"),
    [(3.0, "lost 3.0"), (0.04, "lost 0.0"), (0.0, "lost 0.0"), (-0.018, "lost 0.0"), (-0.06, "gained 0.1")],
)
def test_a_gain_that_rounds_to_nothing_is_no_gain(lost, said, capsys):
    old = [{"name": name, "before": 50.0, "after": 50.0 - lost, "lost": lost} for name in ("background", "red")]
    show_extension(outcome(old, old_images=12, forgetting=lost), json=False)
    assert f"old classes {said} points on average (12 test images)" in capsys.readouterr().out


def test_what_was_not_measured_is_not_reported(place, moved):
    """Only white is labelled in the scored images of step 1: nothing is known about the six old classes."""
    page = write_report([moved / "7"], moved / "7.html", images=0)[0].read_text()
    assert "mIoU over 1 of 7 classes after step 1. The others were not measured." in page
    assert "the means are over 1 of 7 classes" in page and "step-averaged" not in page
    assert "after step 1 some of the known classes were not measured" in page
    assert "Forgetting was not measured: old test images are not available." in page
    assert "<p>Not measured: old test images are not available.</p>" in page and "No test image has fewer" not in page
    assert "<p>Not measured, as Kept and lost says.</p>" in page and "known for more than one step" not in page
    shown = CliRunner().invoke(app, ["history", str(moved / "7")]).output
    assert "step 1: the means are over 1 of 7 classes" in shown and "step 0: the means" not in shown
    shown = CliRunner().invoke(app, ["evaluate", str(moved / "7")]).output
    assert "step 1: the means are over 1 of 7 classes" in shown
    extend(place / "run", place / "white", moved / "both", **GIVEN)
    page = write_report([moved / "both"], moved / "both.html", images=0)[0].read_text()
    assert (
        "mIoU over all classes after step 1 (" in page
        and "step-averaged" in page
        and "not measured" not in page.lower()
    )


def test_old_data_restores_what_an_earlier_extension_did_without(place, moved):
    assert [part.available for part in read_chain(moved / "7")["parts"]] == [False, True]
    done = extend(moved / "7", place / "black", moved / "8", old_data=moved / "moved", max_forgetting=100.0, **GIVEN)
    assert done.met and all(c["lost"] is not None for c in done.result["old"]) and not done.notes
    assert [r["same"] for r in score_again(moved / "8")][1:] == [True, True]


def test_false_alarms_count_only_in_images_with_a_background(place, moved):
    """The held-out images of white label white alone: black everywhere else is no false alarm in them."""
    given = {**GIVEN, "unlabelled": "ignore", "min_new_iou": 1.0, "settings": {**QUICK, "train.epochs": 8}}
    done = extend(moved / "7", place / "black", moved / "8", **given)
    assert done.result["new"] == [{"name": "black", "iou": None, "found": 100.0}] and not done.met


def test_branches_with_different_old_images_are_told_apart(place, moved):
    extend(moved / "7", place / "black", moved / "without", **GIVEN)
    extend(moved / "7", place / "black", moved / "with", old_data=moved / "moved", **GIVEN)
    found = branches(moved / "without", moved / "with")
    assert not found["same_images"]
    white = next(c for c in found["classes"] if c["name"] == "white")
    assert found["mean"] == {key: white[key] for key in ("fork", "first", "second")}  # scored in all of them


def test_the_same_command_resumes_when_moved_data_are_back(place, moved):
    """Without a memory or old images the method was sdr; now the default would be another one."""
    given = {"settings": QUICK, "display": Quiet()}
    first = extend(moved / "run", place / "white", moved / "again", **given)
    assert first.method == "sdr"
    shutil.copytree(moved / "moved", moved / "base")
    assert extend(moved / "run", place / "white", moved / "new", **given).method == "laps-softmax"
    second = extend(moved / "run", place / "white", moved / "again", **given)
    assert second.method == "sdr" and second.result == first.result
    assert "the test images of step 0 are not used, as when this extension was begun." in second.notes
    assert "the method is sdr, as when this extension was begun." in second.notes
    with pytest.raises(SdrsegError, match="method: 'ft', 'sdr'"):
        extend(moved / "run", place / "white", moved / "again", **given, method="ft")


def test_old_data_can_be_those_of_a_later_step(place, moved):
    shutil.copytree(place / "white", moved / "snow")
    extend(place / "run", moved / "snow", moved / "two", **GIVEN)
    (moved / "snow").rename(moved / "elsewhere")
    done = extend(moved / "two", place / "black", moved / "three", old_data=moved / "elsewhere", **GIVEN)
    assert all(c["lost"] is not None for c in done.result["old"])


def test_old_data_that_do_not_fit_are_an_error(place, moved):
    base_folder(moved / "others", 12)
    for image in (moved / "others/masks").iterdir():
        save(image, np.full((SIDE, SIDE), 1))
    for folder, match in (
        (place / "white", "its classes are"),
        (moved / "others", "none of the images that were scored"),
    ):
        with pytest.raises(SdrsegError, match=f"--old-data .*: .*{match}"):
            extend(moved / "7", place / "black", moved / "out", old_data=folder, **GIVEN)
    assert not (moved / "out").exists()


@pytest.mark.parametrize("gone", ["images", "masks"])
def test_a_changed_and_a_missing_test_image_are_left_out_alone(place, moved, gone):
    done = extend(moved / "run", place / "white", moved / "all", old_data=moved / "moved", **GIVEN)
    images = json.loads((moved / "run/scenario.json").read_text())["steps"][0]["test_ids"]
    assert done.result["old_images"] == len(images) == 12
    save(moved / f"moved/masks/{images[0]}.png", np.ones((SIDE, SIDE)))
    (moved / f"moved/{gone}/{images[1]}.png").unlink()
    done = extend(moved / "run", place / "white", moved / "rest", old_data=moved / "moved", **GIVEN)
    assert done.result["old_images"] == 10
    assert "1 of 12 old test images has changed and is left out" in done.notes
    assert "1 of 12 old test images is gone and is left out" in done.notes
    first, second = score_again(moved / "rest")
    assert first["same"] is None and "gone or have changed" in first["difference"] and second["same"]
    later = extend(moved / "rest", place / "black", moved / "later", **GIVEN)
    assert later.result["old_images"] == 10 + done.result["held_out_images"]
    assert sorted(note for note in later.notes if "old test images" in note) == sorted(done.notes)


def test_steps_whose_folder_is_gone_are_not_scored_again_and_the_others_are(place, tmp_path, capsys):
    shutil.copytree(place / "white", tmp_path / "snow")
    extend(place / "run", tmp_path / "snow", tmp_path / "7", **GIVEN)
    extend(tmp_path / "7", place / "black", tmp_path / "8", **GIVEN)
    (tmp_path / "snow").rename(tmp_path / "elsewhere")
    assert evaluate_run(tmp_path / "8", None, json=True)
    first, *later = json.loads(capsys.readouterr().out)
    assert first["same"] is True and [r["same"] for r in later] == [None, None]  # black is also scored on snow's images
    for result in later:
        kept = json.loads((tmp_path / f"8/steps/{result['step']}/metrics.json").read_text())
        assert result["miou"] == kept["miou"]
        assert f"{tmp_path / 'snow'}: no such folder." in result["difference"]
    report, _ = write_report([tmp_path / "8"], tmp_path / "report.html")
    page = report.read_text()
    ids = json.loads((tmp_path / "8/scenario.json").read_text())["steps"][-1]["test_ids"]
    kept = [id for id in ids if not id.startswith("step1/")]
    assert f"{len(ids) - len(kept)} of {len(ids)} test images cannot be shown: gone or changed." in page
    assert f"{tmp_path / 'snow'}: no such folder." in page
    shown = re.findall(r'aria-label="Test image ([^"]+)"', page)
    assert shown and set(shown) <= set(kept)
    change_classes(tmp_path / "8", tmp_path / "renamed", {"black": "coal"}, [])
    (tmp_path / "snow").symlink_to(tmp_path / "elsewhere")  # as the message proposes
    assert [r["same"] for r in score_again(tmp_path / "renamed")] == [True, True, True]  # the copy did not forget snow
    assert [r["same"] for r in score_again(tmp_path / "8")] == [True, True, True]


def test_a_run_without_any_of_its_data_is_not_compared(place, tmp_path, capsys):
    for name in ("white", "base"):
        shutil.copytree(place / name, tmp_path / name)
    extend(place / "run", tmp_path / "white", tmp_path / "7", old_data=tmp_path / "base", **GIVEN)
    for name in ("white", "base"):
        shutil.rmtree(tmp_path / name)
    first, second = score_again(tmp_path / "7")
    assert first["same"] is None and second["same"] is None
    assert f"{tmp_path / 'base'}: no such folder." in first["difference"]
    assert evaluate_run(tmp_path / "7", None, json=False)
    assert ", not scored again, in" in " ".join(capsys.readouterr().out.split())


def test_an_extended_run_takes_no_folder_to_score_again(place, moved):
    for folder in (moved / "nowhere", place / "white"):
        with pytest.raises(UsageError, match=rf"--data {folder}: .*7 is an extended run .* Leave out --data"):
            score_again(moved / "7", folder)
    with pytest.raises(UsageError, match=r"--data .*white: .*7 is an extended run .* Leave out --data"):
        write_report([moved / "7"], moved / "never.html", place / "white")
    assert not (moved / "never.html").exists()


def test_an_imported_model_is_scored_on_the_old_data_that_are_named(place, tmp_path):
    torch.manual_seed(0)
    state = smp.create_model("unet", "resnet18", encoder_weights=None, classes=7).state_dict()
    torch.save(state, tmp_path / "model.pth")
    import_model(tmp_path / "model.pth", tmp_path / "run", "unet", NAMES[:7], encoder="resnet18", crop=32)
    more = {**GIVEN, "settings": {**QUICK, "run.loggers": []}}
    done = extend(tmp_path / "run", place / "white", tmp_path / "none", **more)
    assert any("imported without test images" in note for note in done.notes)
    done = extend(tmp_path / "run", place / "white", tmp_path / "two", old_data=place / "base", **more)
    assert done.result["old_images"] == 12 and all(c["lost"] is not None for c in done.result["old"]) and not done.notes
    assert [r["same"] for r in score_again(tmp_path / "two")] == [True, True]
    assert [step["data"] for step in history(tmp_path / "two")["steps"]] == ["–", str(place / "white")]
    assert views_of(read_parent(tmp_path / "two"), None) is None  # no image of step 0 to learn from
    later = extend(tmp_path / "none", place / "black", tmp_path / "three", old_data=place / "base", **more)
    assert all(c["lost"] is not None for c in later.result["old"])
    with pytest.raises(SdrsegError, match=r"--old-data .*: none of its classes \(white\) is a class of the model"):
        extend(tmp_path / "run", place / "black", tmp_path / "four", old_data=place / "white", **more)
