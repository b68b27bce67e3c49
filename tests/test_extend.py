"""Classes that are added to a trained model: what is kept, what is refused, and what a new run is."""

from __future__ import annotations

import html
import inspect
import json
import os
import re
import shlex
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

import sdrseg
from extend_data import NAMES, QUICK, SIDE, SMALL, base_folder, base_run, coco_folder, masks_folder, yolo_folder
from formats import save, write
from runs import Quiet, forked
from sdrseg.cli import app
from sdrseg.config import Config
from sdrseg.datasets.extended import Extended
from sdrseg.engine.rescore import score_again
from sdrseg.engine.run import train
from sdrseg.errors import SdrsegError, UsageError
from sdrseg.exporting import Graph, metadata
from sdrseg.extend.branches import branches
from sdrseg.extend.history import change_classes, history, rollback
from sdrseg.extend.newdata import read_new_data
from sdrseg.extend.parent import read_parent
from sdrseg.extend.plan import DEFAULTS
from sdrseg.extend.run import extend
from sdrseg.extend.show import show_extension
from sdrseg.methods import METHODS
from sdrseg.predict.model import Model
from sdrseg.reporting import write_report
from sdrseg.reporting.collect import collect, command_line


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A base of six classes in `run`, and folders of new classes in three formats."""
    root = base_run(tmp_path_factory.mktemp("extend"))
    masks_folder(root / "white", 7)
    coco_folder(root / "black", 8)
    yolo_folder(root / "orange", 9)
    return root


def files(folder: Path) -> dict[str, bytes]:
    return {str(f.relative_to(folder)): f.read_bytes() for f in sorted(folder.rglob("*")) if f.is_file()}


def test_a_class_is_added_and_the_old_run_stays_as_it_is(place, tmp_path):
    before = files(place / "run")
    done = extend(place / "run", place / "white", tmp_path / "two", settings=QUICK, display=Quiet())
    assert files(place / "run") == before
    assert done.step == 1 and [c["name"] for c in done.result["new"]] == ["white"]
    assert done.notes[-1] == "where only rows are fitted, these settings do not change the result: train.epochs"
    model = sdrseg.load(tmp_path / "two")
    assert [c.name for c in model.classes] == list(NAMES[:8])
    assert [c.step for c in model.classes] == [0] * 7 + [1]
    chained = json.loads((tmp_path / "two/steps/1/meta.json").read_text())["parent"]
    first = json.loads((place / "run/steps/0/meta.json").read_text())["files"]["model"]["sha256"]
    assert chained == first
    again = score_again(tmp_path / "two")
    assert [r["same"] for r in again] == [True, True]
    finished = extend(place / "run", place / "white", tmp_path / "two", settings=QUICK, display=Quiet())
    assert finished.forecast == done.forecast is not None and finished.result == done.result


def test_a_story_of_three_folders_in_three_formats_with_a_kill_in_between(place, tmp_path, monkeypatch):
    """Six classes, then one from black and white masks, one from COCO, one from YOLO; the second run is killed."""
    model = sdrseg.load(place / "run")
    first = model.extend(place / "white", classes="white", out=tmp_path / "7", settings=QUICK, display=Quiet())
    assert first.method == "laps-softmax" and first.result["old_images"] > 0
    given = {"settings": {**QUICK, "run.save_minutes": 0}, "method": "mib"}
    whole = extend(tmp_path / "7", place / "black", tmp_path / "whole", **given, display=Quiet())

    class Dying(Quiet):
        def update(self, entry):
            if entry["iteration"] == 2:
                os.kill(os.getpid(), signal.SIGKILL)

    given["settings"]["run.log_every"] = 1
    child = forked(lambda: extend(tmp_path / "7", place / "black", tmp_path / "8", **given, display=Dying()))
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    assert not (tmp_path / "8/steps/2/meta.json").exists() and (tmp_path / "8/state").exists()
    monkeypatch.chdir(tmp_path)
    note = "step 2 is not finished; step 1 is used"
    save(Path("picture.png"), np.zeros((32, 32, 3)))
    for words in (["predict", "8", "picture.png", "--out", "masks"], ["export", "8", "--out", "8.onnx"]):
        said = CliRunner().invoke(app, words)
        assert f"note: {note}" in said.output, said.output
    said = CliRunner().invoke(app, ["classes", "8", "--out", "renamed", "--rename", "white=snow"])
    assert f"note: {note}" in said.output and said.exit_code == 0, said.output
    page = write_report("renamed", "renamed.html", images=0)[0].read_text()
    assert "Trained with sdrseg" not in page  # the run of step 2 did not train step 1
    change_classes(tmp_path / "7", Path("7 renamed"), {"white": "snow"}, [])
    page = write_report("7 renamed", "7 renamed.html", images=0)[0].read_text()
    assert f"Trained with sdrseg {sdrseg.__version__}." in page
    assert read_parent(Path("8")).notes == (note,) and read_parent(Path("8"), 1).notes == ()
    assert sdrseg.load("8", 1).facts["note"] is None
    again = Quiet()
    done = extend(tmp_path / "7", place / "black", tmp_path / "8", **given, display=again)
    assert any("resuming at iteration" in str(text) for text in again.said)
    assert done.result["new"] == whole.result["new"]
    weights = [(tmp_path / run / "steps/2/model.safetensors").read_bytes() for run in ("8", "whole")]
    assert weights[0] == weights[1]

    scored = json.loads((tmp_path / "8/steps/1/metrics.json").read_text())["classes"]
    before = [c["before"] for c in done.result["old"]]  # the same images, model and rule for what is not labelled
    assert before == pytest.approx([100 * c["iou"] for c in scored])

    class Scored(Quiet):
        def scored(self, score, oracle):
            self.said.append(score.miou())

    last = Scored()
    extend(tmp_path / "8", place / "orange", tmp_path / "9", method="ft", settings=QUICK, display=last)
    model = sdrseg.load(tmp_path / "9")
    assert [c.name for c in model.classes] == list(NAMES) and [c.step for c in model.classes][-3:] == [1, 2, 3]
    assert set(np.unique(model.predict(np.zeros((40, 50, 3), np.uint8)).mask)) <= set(range(10))
    told = history(tmp_path / "9")
    assert json.loads(json.dumps(told)) == told | {"steps": [s | {"measured": [*s["measured"]]} for s in told["steps"]]}
    for step in told["steps"][1:]:  # new is what the step added, old all before it
        *old, own = json.loads((tmp_path / f"9/steps/{step['step']}/metrics.json").read_text())["classes"]
        assert step["classes"] == [own["name"]] and step["new_miou"] == own["iou"]
        assert step["old_miou"] == pytest.approx(np.mean([c["iou"] for c in old]))
    assert last.said[-1]["new"] == step["new_miou"] and last.said[-1]["old"] == step["old_miou"]
    assert history(place / "run")["steps"][0]["data"] == told["steps"][0]["data"]  # of `train`, too
    assert [s["classes"] for s in told["steps"]][1:] == [["white"], ["black"], ["orange"]] and not told["broken"]
    assert [Path(s["data"]).name for s in told["steps"]] == ["base", "white", "black", "orange"]
    assert [r["same"] for r in score_again(tmp_path / "9")] == [True] * 4


def test_going_back_and_in_another_direction(place, tmp_path):
    first = extend(place / "run", place / "white", tmp_path / "two", settings=QUICK, method="ft", display=Quiet())
    file = tmp_path / "two/environment.json"
    file.write_text(json.dumps([one | {"sdrseg": "9.9"} for one in json.loads(file.read_text())]))
    rollback(tmp_path / "two", 0, tmp_path / "back")
    page = write_report([tmp_path / "back"], tmp_path / "back.html", images=0)[0].read_text()
    assert "Trained with sdrseg" not in page  # that of step 1 is known, that of step 0 is not
    assert [c.name for c in sdrseg.load(tmp_path / "back").classes] == list(NAMES[:7])
    assert [r["same"] for r in score_again(tmp_path / "back")] == [True]
    done = extend(tmp_path / "back", place / "black", tmp_path / "other", settings=QUICK, method="ft", display=Quiet())
    assert done.result["forgetting"] is not None
    same = extend(
        tmp_path / "two", place / "black", tmp_path / "step", step=0, settings=QUICK, method="ft", display=Quiet()
    )
    assert same.result["new"] == done.result["new"]
    found = branches(tmp_path / "two", tmp_path / "other")
    assert found["shared_steps"] == 1 and found["new"] == [["white"], ["black"]] and found["same_images"]
    assert [c["name"] for c in found["classes"]] == list(NAMES[1:7])
    for key, result in (("first", first.result), ("second", done.result)):
        ious = [100 * c[key] for c in found["classes"]]
        assert ious == pytest.approx([c["after"] for c in result["old"][1:]])
        assert [100 * c["fork"] for c in found["classes"]] == pytest.approx([c["before"] for c in result["old"][1:]])
    with pytest.raises(SdrsegError, match="already exists"):
        rollback(tmp_path / "two", 0, tmp_path / "back")


def test_classes_are_renamed_and_removed(place, tmp_path):
    change_classes(place / "run", tmp_path / "new", {"red": "crimson"}, ["green"])
    model, old = sdrseg.load(tmp_path / "new"), sdrseg.load(place / "run")
    assert [c.name for c in model.classes][:3] == ["background", "crimson", "green (removed)"]
    image = np.random.default_rng(0).integers(0, 255, (32, 32, 3)).astype(np.uint8)
    for picture in (image, np.full((32, 32, 3), (30, 200, 30), np.uint8)):
        mask = old.predict(picture).mask
        assert (model.predict(picture).mask == np.where(mask == 2, 0, mask)).all()
    assert "red renamed to crimson" in history(tmp_path / "new")["changes"][0]["what"]
    (tmp_path / "file").touch()
    with pytest.raises(SdrsegError, match="below: cannot be written"):
        change_classes(tmp_path / "new", tmp_path / "file/below", {"blue": "navy"}, [])
    assert [r["same"] for r in score_again(tmp_path / "new")] == [True]
    extend(tmp_path / "new", place / "white", tmp_path / "more", settings=QUICK, method="ft", display=Quiet())
    change_classes(tmp_path / "more", tmp_path / "named", {"white": "snow"}, [])
    said = sdrseg.load(tmp_path / "named")
    assert said.facts["spec"] == "extended:6/snow@overlapped" and "green (removed)" not in said.predict(image).areas
    kept = [json.loads((tmp_path / name / "steps/1/extension.json").read_text()) for name in ("more", "named")]
    assert kept[1]["new"] == [{**kept[0]["new"][0], "name": "snow"}] and kept[1]["old"] == kept[0]["old"]
    assert kept[1]["forecast"]["images"] == {"snow": kept[0]["forecast"]["images"]["white"]}
    assert command_line(collect([tmp_path / "named"])[0]) == f"sdrseg history {tmp_path / 'named'}"
    assert command_line(collect([tmp_path / "more"])[0]).startswith(f"sdrseg extend {tmp_path / 'new'} --data ")
    grown = sdrseg.load(tmp_path / "more")
    assert [c.id for c in grown.classes] == [0, 1, 0, 3, 4, 5, 6, 7]
    for rename, remove, match in (
        ({"redd": "x"}, [], "no class 'redd'; did you mean 'red'"),
        ({"red": "blue"}, [], "the same name"),
        ({"red": " "}, [], "--rename red= : a class needs a name"),
        ({}, ["background"], "background: the class of all other pixels cannot be"),
        ({}, [], "nothing to change"),
        ({"red": "x"}, ["red"], "both renamed and removed"),
        ({}, ["red, blu"], "no class 'blu'; did you mean 'blue'"),
    ):
        with pytest.raises(UsageError, match=match):
            change_classes(place / "run", tmp_path / "never", rename, remove)
    for options, match in (
        (["red= "], "--rename red= : write OLD=NEW"),
        (["red"], "--rename red: write OLD=NEW"),
        (["red=x", "red=y"], "--rename red=y: red is also renamed to x"),
    ):
        words = [word for option in options for word in ("--rename", option)]
        said = CliRunner().invoke(app, ["classes", str(place / "run"), *words, "--out", str(tmp_path / "never")])
        assert isinstance(said.exception, UsageError) and match in str(said.exception)
    assert not (tmp_path / "never").exists()


def test_impossible_requests_are_reported_before_any_work(place, tmp_path):
    masks_folder(tmp_path / "labelled", 7, 4, all_labelled=True)
    masks_folder(tmp_path / "empty", 7, 4)
    for mask in (tmp_path / "empty/masks").iterdir():
        save(mask, np.zeros((SIDE, SIDE)))
    run, white = place / "run", place / "white"
    for model, data, options, match in (
        (run, white, {"classes": ["red"]}, "has had a class of this name since step 0"),
        (run, white, {"classes": ["background"]}, "class of all other pixels. Leave it out, or rename it in "),
        (run, white, {"classes": ["whitee"]}, "no such class; did you mean 'white'"),
        (run, white, {"classes": ["white", "white"]}, "name each new class once"),
        (run, place / "base", {}, "already knows all of its classes"),
        (run, tmp_path / "empty", {}, "no training image shows white"),
        (run, tmp_path / "labelled", {}, "--protocol sequential"),
        (run, white, {"method": "laps"}, "it trains a sigmoid model"),
        (run, white, {"settings": {"net.encoder": "resnet18"}}, "net.encoder cannot change"),
        (run, white, {"settings": {"net.atrous": "12,24,36"}}, "net.atrous cannot change"),
        (run, white, {"replay": white}, "--replay .*: none of its classes"),
        (run, white, {"unlabelled": "nothing"}, "background or ignore"),
        (run, white, {"unlabelled": "ignore", "negatives": True}, "no labelled pixel to learn from"),
        (run, white, {"max_forgetting": float("nan")}, "--max-forgetting nan: points of IoU"),
        (
            run,
            white,
            {"max_forgetting": "x"},
            "--max-forgetting 'x': not a number. Use points of IoU, from -100 to 100",
        ),
        (run, white, {"min_new_iou": True}, "--min-new-iou True: not a number"),
        (run, white, {"min_new_iou": 400}, "--min-new-iou 400: points of IoU, from 0 to 100"),
        (run, white, {"settings": {"ce.class_weights": "gold=2"}}, "gold"),
        (run, white, {"settings": {"step.2.train.epochs": 3}}, "step.2.train.epochs"),
        (run, white, {"step": 3}, "step 3 is not finished"),
        (run, tmp_path / "nowhere", {}, "no such folder"),
        (run, white, {"images": tmp_path / "nowhere"}, "no such folder"),
        (run, white, {"old_data": tmp_path}, "--old-data"),
        (tmp_path / "nothing", white, {}, "no such run"),
        (run / "config.json", white, {}, "a file cannot be extended"),
    ):
        with pytest.raises(SdrsegError, match=match):
            extend(model, data, tmp_path / "out", **options, display=Quiet())
    assert not (tmp_path / "out").exists()
    with pytest.raises(UsageError, match="must not be changed"):
        extend(run, white, run, display=Quiet())
    with pytest.raises(UsageError, match="must not be changed"):
        extend(run, white, run / "steps/1", display=Quiet())
    with pytest.raises(UsageError, match="must not be changed"):
        rollback(run, 0, run / "back")
    with pytest.raises(UsageError, match="must not be changed"):
        change_classes(run, run / "deep/renamed", {"red": "crimson"}, [])
    assert not (run / "back").exists() and not (run / "deep").exists()


def test_masks_of_old_classes_too_are_learned_or_hidden_as_asked(place, tmp_path):
    masks_folder(tmp_path / "labelled", 7, 6, all_labelled=True)
    seen = {}
    for protocol in ("sequential", "overlapped"):
        out = tmp_path / protocol
        extend(place / "run", tmp_path / "labelled", out, protocol=protocol, settings=QUICK, display=Quiet())
        source = Extended.open(out, Config())
        seen[protocol] = {int(v) for id in source.ids("train") for v in np.unique(source.mask(id))}
    assert seen["overlapped"] == {0, 7} and seen["sequential"] > {0, 7}


def test_one_image_is_enough_with_a_note(place, tmp_path):
    masks_folder(tmp_path / "one", 7, 1)
    said = Quiet()
    done = extend(place / "run", tmp_path / "one", tmp_path / "out", settings={"train.epochs": 2}, display=said)
    texts = [str(text) for text in said.said]
    assert "preset default, the network stays as it is; only the rows of new classes are fitted" in texts
    first, *_, last = (n for n, text in enumerate(texts) if "training image (" in text or "remembering" in text)
    assert "training image (" in texts[first] and "remembering" in texts[last]  # what to expect before any work
    assert any("scored on the training images" in note for note in done.notes)
    assert any("white is in 1 training image;" in note for note in done.notes)
    assert done.forecast["trained"] == 1 and done.forecast["held_out"] == 0 and done.result["new_iou"] is not None


def test_without_the_old_data_it_continues_with_a_note(place, tmp_path):
    base_folder(tmp_path / "base", 24)
    given = {"settings": {**SMALL, **QUICK}, "bases": tmp_path / "bases"}
    train("folder:offline", "ft", tmp_path / "run", data=tmp_path / "base", **given, display=Quiet())
    (tmp_path / "base").rename(tmp_path / "moved")
    done = extend(tmp_path / "run", place / "white", tmp_path / "gone", settings=QUICK, display=Quiet())
    assert done.method == "sdr" and done.result["forgetting"] is None and done.result["kept_elsewhere"] is not None
    assert any("forgetting cannot be measured" in note for note in done.notes)
    (why,) = [note for note in done.notes if "the method is sdr, not the default laps-softmax" in note]
    assert "no memory of the old classes" in why and "add --old-data PATH" in why and "--images FOLDER" in why
    assert done.summary["miou"]["old"] is None and done.summary["miou"]["new"] is not None
    file = tmp_path / "gone/steps/1/metrics.json"
    scored = json.loads(file.read_text())
    scored["confusion"][0][-1] += 50  # unlabelled pixels that are predicted as white
    file.write_text(json.dumps(scored))
    page = write_report([tmp_path / "gone"], tmp_path / "report.html", images=0)[0].read_text()
    (shown,) = re.findall(r"row = truth, column = prediction.*?</table>", page, flags=re.S)
    filled = [row for row in re.findall(r"<tr.*?</tr>", shown, flags=re.S) if "<data" in row]
    assert len(filled) == 1 and 'title="white"' in filled[0]  # no image labels the other classes
    there = {"old_data": tmp_path / "moved", "settings": QUICK, "max_forgetting": -100.0}
    done = extend(tmp_path / "run", place / "white", tmp_path / "there", **there, display=Quiet())
    assert done.method == "laps-softmax" and done.result["old_images"] > 0
    assert not any("the method is" in note for note in done.notes)
    assert not done.met and "the limit is -100" in done.result["verdict"]["missed"][0]
    images = {"images": tmp_path / "moved/images", "settings": QUICK}
    done = extend(tmp_path / "run", place / "white", tmp_path / "pseudo", **images, display=Quiet())
    assert done.method == "laps-softmax"
    memory = load_file(tmp_path / "pseudo/steps/0/memory.safetensors")
    assert any(name.startswith("memory.") for name in memory)


def test_replay_the_exit_code_and_the_report(place, tmp_path):
    words = ["extend", str(place / "run"), "--data", str(place / "white"), "--replay", str(place / "base")]
    words += ["--method", "mib", "--out", str(tmp_path / "two"), "--max-forgetting", "-100"]
    words += [word for key, value in QUICK.items() for word in ("--set", f"{key}={value}")]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 3 and "verdict: MISSED: forgetting is" in done.output, done.output
    assert "held-out images and 12 old test images)" in done.output
    assert "also contains the old test images" in " ".join(done.output.split())
    scenario = json.loads((tmp_path / "two/scenario.json").read_text())
    source = Extended.open(tmp_path / "two", Config())
    replayed = [id for id in scenario["steps"][1]["train_ids"] if id.startswith("replay1/")]
    assert len(replayed) == 60  # whatever split they were in
    seen = {
        int(v) for id in replayed for v in np.unique(np.array(scenario["steps"][1]["train_table"])[source.mask(id)])
    }
    assert seen == set(range(7))
    _check_page(tmp_path / "two", tmp_path / "report.html", words)


def options(words: list[str]) -> set[tuple[str, str]]:
    return set(zip(words[2::2], words[3::2], strict=True))


def _check_page(run: Path, out: Path, given: list[str]) -> None:
    """The page about what was kept and lost says what extension.json says, with pictures of the worst images."""
    saved = json.loads((run / "steps/1/extension.json").read_text())
    file, notes = write_report([run], out, images=2)
    page = file.read_text()
    assert notes == [] and "A requirement is missed." in page and "missed: old classes lose at most -100 points" in page
    (command,) = re.findall(r"<code>(sdrseg extend .*?)</code>", page)
    words = shlex.split(html.unescape(command))
    assert words[:3] == ["sdrseg", *given[:2]] and options(words[1:]) == {
        *options(given) - {("--out", str(run))},
        ("--classes", "white"),
        ("--out", "RUN"),
    }
    part = page[page.index('<section id="extension"') : page.index('<section id="steps"')]
    for c in saved["old"]:
        shown = f'<tr data-class="{c["name"]}">.*?"{c["before"]}".*?"{c["after"]}".*?"{c["after"] - c["before"]}"'
        assert re.search(shown, part, re.S)
    assert f'value="{saved["new"][0]["iou"]}"' in part
    assert f"New classes: {saved['held_out_images']} held-out images; false alarms in the old test images count" in part
    worst = [*saved["regressions"], *saved["false_alarms"]]
    assert len(worst) > 0 and part.count('<div class="row"') == len(worst)
    assert part.count('class="mask"') == 3 * len(worst)  # truth, before, after
    alike = {n: old for n, old in saved["forecast"]["similar"].items() if old}
    assert ("Similar old classes" in part) == bool(alike)
    _check_forgetting(run, page, saved)
    page = write_report([run], out, images=0, overwrite=True)[0].read_text()
    assert worst[0]["id"] in page and '<div class="row"' not in page
    (run / "steps/1/extension.json").unlink()
    (run / "steps/1/extension.json").write_text(json.dumps({**saved, "verdict": {"max_forgetting": "much"}}))
    with pytest.raises(SdrsegError, match=r"extension\.json: not as `sdrseg extend` writes it"):
        write_report([run], out, images=0)


def _check_forgetting(run: Path, page: str, saved: dict) -> None:
    """Everywhere on the page it is what the old test images say; the steps were scored on different images."""
    lost = saved["forgetting"]
    assert json.loads((run / "summary.json").read_text())["forgetting"]["final"] != pytest.approx(lost / 100, abs=0.002)
    (shown,) = re.findall(r'data-key="forgetting"><data value="(.*?)">(.*?)</data>', page)
    assert float(shown[0]) == pytest.approx(lost / 100) and shown[1] == f"{lost:z.1f}"
    assert "minus that after it, on the old test images, in points, as in Kept and lost</dd>" in page
    lead = page[page.index('<p class="lead">') : page.index("<nav")].replace("\xa0", " ")
    assert f"An old class loses {lost:z.1f} points of its IoU on the old test images on average." in lead
    most = max(saved["old"][1:], key=lambda c: c["lost"])
    assert f"{most['name']} loses the most ({most['lost']:z.1f} points)" in lead
    assert f"Mean over foreground classes: mib {lost:z.1f}." in page
    table = page[page.index('<table class="plain" id="forgetting-table">') :]
    by_class = re.findall(r'<tr data-class="(.*?)">.*?<data value="(.*?)">', table[: table.index("</table>")])
    assert [name for name, _ in by_class] == [c["name"] for c in saved["old"]]
    assert [100 * float(value) for _, value in by_class] == pytest.approx([c["lost"] for c in saved["old"]])


def test_what_is_not_labelled_can_be_ignored_and_negatives_be_trained_on(place, tmp_path):
    masks_folder(tmp_path / "half", 7, 12)
    for mask in sorted((tmp_path / "half/masks").iterdir())[::2]:
        save(mask, np.zeros((SIDE, SIDE)))
    parent = read_parent(place / "run")
    plain, more = (read_new_data(parent, tmp_path / "half", None, negatives=n) for n in (False, True))
    assert plain.images == more.images and plain.val_ids == more.val_ids
    assert len(plain.train_ids) == plain.images["white"] and len(more.train_ids) + len(more.val_ids) == 12
    assert set(plain.train_ids) < set(more.train_ids)
    given = {"unlabelled": "ignore", "settings": QUICK, "display": Quiet()}
    done = extend(place / "run", place / "white", tmp_path / "out", **given)
    source = Extended.open(tmp_path / "out", Config())
    assert {int(v) for id in source.ids("train") for v in np.unique(source.mask(id))} == {7, 255}
    step = json.loads((tmp_path / "out/steps/1/metrics.json").read_text())
    old = sum(source.mask(id).size for id in source.ids("val") if not id.startswith("step1/"))
    white = sum(int((source.mask(id) == 7).sum()) for id in source.ids("val"))
    assert np.sum(step["confusion"]) == old + white and done.result["kept_elsewhere"] is not None


def test_a_class_that_is_predicted_everywhere_does_not_pass_if_false_alarms_are_ignored(place, tmp_path, capsys):
    """Without a labelled pixel outside the new class, its IoU would be the share of its pixels that are found."""
    shutil.copytree(place / "run", tmp_path / "run")
    (tmp_path / "run/environment.json").write_text("[]")  # the folder of the old data is not known
    given = {"unlabelled": "ignore", "method": "ft", "settings": {**QUICK, "train.epochs": 8}, "display": Quiet()}
    alone = extend(tmp_path / "run", place / "white", tmp_path / "alone", min_new_iou=10.0, **given)
    assert alone.result["new"] == [{"name": "white", "iou": None, "found": 100.0}] and not alone.met
    assert alone.result["verdict"]["missed"] == ["IoU of the new classes could not be measured, the minimum is 10"]
    assert any("--min-new-iou cannot be measured" in note for note in alone.notes)
    assert any("warning: ft has nothing that keeps" in note for note in alone.notes)
    show_extension(alone, json=False)
    assert "100.0 % of white is found" in capsys.readouterr().out
    show_extension(alone, json=True)
    printed = json.loads(capsys.readouterr().out)["result"]  # without the matrices, which have a number per two classes
    assert alone.result == printed | {key: alone.result[key] for key in ("confusion", "complete")}
    assert not {"confusion", "complete"} & printed.keys()
    page = write_report([tmp_path / "alone"], tmp_path / "report.html")[0].read_text()
    assert "unlabelled pixels of the new images are ignored" in page
    both = extend(place / "run", place / "white", tmp_path / "both", min_new_iou=50.0, **given)
    assert both.result["new_iou"] < 50 and not both.met  # false alarms in old test images
    show_extension(both, json=False)
    assert "; false alarms in the new images are not counted)" in capsys.readouterr().out
    given |= {"method": "mib", "settings": QUICK}
    assert not any(
        "warning" in note for note in extend(place / "run", place / "white", tmp_path / "mib", **given).notes
    )


def test_the_best_epoch_also_keeps_what_is_predicted_elsewhere(place, tmp_path):
    """If unlabelled pixels are ignored, white spreads: all of it is found, and everything else is lost."""
    given = {"unlabelled": "ignore", "method": "ft", "settings": {"train.epochs": 12, "train.best_every": 1}}
    extend(place / "run", place / "white", tmp_path / "two", **given, display=Quiet())
    log = [json.loads(line) for line in (tmp_path / "two/log.jsonl").read_text().splitlines()]
    scored = {entry["epoch"]: entry for entry in log if entry["event"] == "validate"}
    scores = {epoch: entry["miou"]["all"] * entry["kept"] for epoch, entry in scored.items()}
    (best,) = (entry for entry in log if entry["event"] == "best")
    assert best["score"] == max(scores.values()) == scores[best["epoch"]]
    result = json.loads((tmp_path / "two/steps/1/extension.json").read_text())
    assert result["kept_elsewhere"] == pytest.approx(scored[best["epoch"]]["kept"])


def test_a_sigmoid_model_is_extended_by_laps_and_exported_with_its_names(place, tmp_path):
    given = {"settings": {**SMALL, "train.epochs": 2}, "bases": tmp_path / "bases", "display": Quiet()}
    train("folder:offline", "laps", tmp_path / "run", data=place / "base", **given)
    done = extend(tmp_path / "run", place / "white", tmp_path / "two", settings=QUICK, display=Quiet())
    old, new = (json.loads((tmp_path / "two/steps" / s / "meta.json").read_text()) for s in "01")
    assert done.method == "laps" and old["decision"] == new["decision"] == "sigmoid"
    weights = [load_file(tmp_path / "two/steps" / s / "model.safetensors")["classifier.weight"] for s in "01"]
    inputs = weights[0].shape[1]
    assert (weights[1][:7, :inputs] == weights[0]).all() and not weights[1][:7, inputs:].any()
    change_classes(tmp_path / "two", tmp_path / "named", {"white": "snow"}, ["red"])
    model = sdrseg.load(tmp_path / "named", device="cpu")
    exported = metadata(model)  # of an ONNX file; test_export.py compares such a file with its module
    assert exported["classes"][-1]["name"] == "snow" and [c["id"] for c in exported["classes"]][:3] == [0, 0, 2]
    image = np.random.default_rng(0).integers(0, 255, (40, 56, 3)).astype(np.uint8)
    graph = Graph(model.network, [c.id for c in model.classes], exported["decision"]).eval()
    with torch.inference_mode():
        mask = graph(torch.from_numpy(image).permute(2, 0, 1)[None])[1][0].numpy()
    assert (mask == model.predict(image).mask).all()


def test_images_much_larger_or_smaller_than_the_crops_are_pointed_out(place, tmp_path):
    parent = read_parent(place / "run")  # crops of 32
    for side, said in ((12, True), (20, False), (120, False), (140, True)):
        folder = tmp_path / str(side)
        for n in range(2):
            save(folder / f"images/{n}.png", np.zeros((side, side + 5, 3)))
            save(folder / f"masks/{n}.png", np.eye(side, side + 5) * 255)
        write(folder / "dataset.toml", 'values = {0 = "background", 255 = "white"}\n')
        notes = read_new_data(parent, folder, None).notes
        assert any(f"shorter side of its images is {side} pixels" in note for note in notes) == said


def test_a_model_has_the_options_of_the_function():
    ours, theirs = (dict(inspect.signature(f).parameters) for f in (Model.extend, extend))
    del ours["self"], theirs["model"], theirs["step"]  # the step that was loaded
    assert ours == theirs


def test_the_default_of_every_kind_of_model_is_a_method():
    assert set(DEFAULTS.values()) <= set(METHODS)


def test_a_method_whose_statistics_the_model_lacks_is_refused_before_anything_is_written(place, tmp_path):
    with pytest.raises(SdrsegError, match=r"ewc needs statistics of the steps before \(fisher\), which this model"):
        extend(place / "run", place / "white", tmp_path / "out", method="ewc", display=Quiet())
    assert not (tmp_path / "out").exists()


def test_prototypes_that_laps_did_not_update_are_made_again(place, tmp_path):
    """SDR compares features with the prototype of every old class, also of one that LAPS added."""
    extend(place / "run", place / "white", tmp_path / "two", method="laps-softmax", settings=QUICK, display=Quiet())
    kept = load_file(tmp_path / "two/steps/1/memory.safetensors")
    assert kept["prototypes.image.seen"][-1] == 0
    display = Quiet()
    extend(tmp_path / "two", place / "black", tmp_path / "three", method="sdr", settings=QUICK, display=display)
    assert any("remembering old classes" in str(line) for line in display.said)
    assert (load_file(tmp_path / "three/steps/1/memory.safetensors")["prototypes.image.seen"][1:] > 0).all()
