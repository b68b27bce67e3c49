"""Removed classes count as background everywhere, and can be added again."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

import sdrseg
from extend_data import NAMES, QUICK, SMALL, base_folder, base_run, coco_folder, masks_folder
from formats import save
from runs import Quiet
from sdrseg.engine.job import reopen_job
from sdrseg.engine.kept import agreement
from sdrseg.engine.rescore import score_again
from sdrseg.engine.run import train
from sdrseg.exporting import metadata
from sdrseg.extend.branches import branches
from sdrseg.extend.history import change_classes
from sdrseg.extend.parent import read_parent
from sdrseg.extend.run import extend
from sdrseg.extend.show import show_branches
from sdrseg.extend.verdict import Limits, verdict
from sdrseg.metrics import as_background
from sdrseg.reporting import write_report

GIVEN = {"settings": QUICK, "display": Quiet()}


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A run with the classes of `base` and black, with black removed in `without`."""
    root = base_run(tmp_path_factory.mktemp("classes"))
    masks_folder(root / "white", 7)
    coco_folder(root / "black", 8)
    extend(root / "run", root / "black", root / "with", min_new_iou=0.0, display=Quiet())
    change_classes(root / "with", root / "without", {}, ["black", "red"])
    return root


def old_masks(place: Path) -> list[Path]:
    """The masks of the test images of step 0."""
    ids = json.loads((place / "run/scenario.json").read_text())["steps"][0]["test_ids"]
    return [next((place / "base").rglob(f"masks/**/{Path(id).name}.png")) for id in ids]


def test_a_matrix_with_channels_as_background():
    matrix = np.arange(16).reshape(4, 4)
    to = np.array([0, 1, 0, 3])
    expected = np.zeros((4, 4), np.int64)
    for truth in range(4):
        for predicted in range(4):
            expected[to[truth], to[predicted]] += matrix[truth, predicted]
    assert (as_background(matrix, [2]) == expected).all() and (as_background(matrix, []) == matrix).all()
    expected[0] = 0  # background that is not scored: pixels of removed classes count no more than its own
    assert (as_background(matrix, [2], scored=False) == expected).all()


def test_removed_classes_where_background_is_not_scored(tmp_path):
    """Their pixels are no longer counted: the file equals a score of the model, background has no IoU, and it can be
    extended."""
    with (base_folder(tmp_path / "base", 24) / "dataset.toml").open("a") as file:
        file.write("score_background = false\n")
    given = {"data": tmp_path / "base", "settings": {**SMALL, "train.epochs": 1}, "bases": tmp_path / "bases"}
    train("folder:offline", "ft", tmp_path / "run", **given, display=Quiet())
    change_classes(tmp_path / "run", tmp_path / "without", {}, ["green"])
    before, after = (
        np.array(json.loads((tmp_path / run / "steps/0/metrics.json").read_text())["confusion"])
        for run in ("run", "without")
    )
    assert before[0].sum() == after[0].sum() == 0 and after.sum() == before.sum() - before[2].sum()
    assert before[2].sum() > 0
    assert [r["same"] for r in score_again(tmp_path / "without")] == [True]
    done = extend(tmp_path / "without", masks_folder(tmp_path / "white", 7), tmp_path / "more", **GIVEN)
    assert done.result["old"][0] == {"name": "background", "before": None, "after": None, "lost": None}
    assert all(r["same"] for r in score_again(tmp_path / "more"))


def test_a_background_that_is_lost_misses_the_limit_too():
    """The mean over old classes leaves background out."""
    rows = [{"name": "background", "before": 90.0, "after": 20.0, "lost": 70.0}]
    rows.append({"name": "red", "before": 50.0, "after": 51.0, "lost": -1.0})
    result = {"old": rows, "forgetting": -1.0, "new_iou": 40.0}
    found = verdict(result, Limits(max_forgetting=1.0))
    assert not found["met"] and found["missed"] == ["background lost 70.0 points, the limit is 1"]
    rows[0] |= {"after": None, "lost": None}  # it is not scored
    assert verdict(result, Limits(max_forgetting=1.0))["met"]


def iou_of(model: sdrseg.Model, pictures: list[tuple[Path, Path]], label: int, known: list[int]) -> float:
    """The IoU of a class in per cent, counted over the pixels of some images whose masks have a known value."""
    hit = union = 0
    for image, mask in pictures:
        truth, predicted = np.array(Image.open(mask)), model.predict(image).mask
        counted = np.isin(truth, known)
        hit += int(((truth == label) & (predicted == label) & counted).sum())
        union += int((((truth == label) | (predicted == label)) & counted).sum())
    return 100 * hit / union


def test_other_classes_of_an_extension_where_background_is_not_scored(tmp_path):
    """Pixels of removed classes no longer count, which changes the IoU of the other classes, and the verdict."""
    with (base_folder(tmp_path / "base") / "dataset.toml").open("a") as file:
        file.write("score_background = false\n")
    settings = {**SMALL, "eval.transform": "full_image"}
    given = {"data": tmp_path / "base", "settings": settings, "bases": tmp_path / "bases", "display": Quiet()}
    train("folder:offline", "ft", tmp_path / "run", **given)
    new = masks_folder(tmp_path / "white", 7)
    extend(tmp_path / "run", new, tmp_path / "with", method="mib", max_forgetting=-100.0, **GIVEN)
    change_classes(tmp_path / "with", tmp_path / "without", {}, ["red", "blue"])
    before, after = (json.loads((tmp_path / run / "steps/1/extension.json").read_text()) for run in ("with", "without"))
    ids = json.loads((tmp_path / "run/scenario.json").read_text())["steps"][0]["test_ids"]
    old = [(tmp_path / f"base/images/{id}.png", tmp_path / f"base/masks/{id}.png") for id in ids]
    names = ["green", "yellow", "pink", "cyan"]
    assert [one["name"] for one in after["old"]] == ["background", *names]
    models = [sdrseg.load(tmp_path / "without", step=n, device="cpu") for n in (0, 1)]
    for one in after["old"][1:]:
        label = NAMES.index(one["name"])
        wanted = [iou_of(model, old, label, [NAMES.index(name) for name in names]) for model in models]
        assert [one["before"], one["after"]] == pytest.approx(wanted, abs=1e-6)
    assert any(one not in before["old"] for one in after["old"][1:])  # it does change
    lost = np.mean([one["lost"] for one in after["old"][1:]])
    assert after["forgetting"] == pytest.approx(lost) and after["verdict"]["missed"][0].startswith(
        f"forgetting is {lost:.1f} points"
    )
    scored = {
        one["name"]: one for one in json.loads((tmp_path / "without/steps/1/metrics.json").read_text())["classes"]
    }
    (white,) = after["new"]
    assert white["iou"] == pytest.approx(100 * scored["white"]["iou"]) == pytest.approx(after["new_iou"])
    assert white["found"] == pytest.approx(100 * scored["white"]["accuracy"])


@given(st.lists(st.tuples(st.sampled_from([0, 1, 2, 3, 255]), st.booleans(), *2 * [st.integers(0, 3)]), max_size=40))
def test_agreement_counts_pixels_of_the_image_outside_the_new_classes(pixels):
    """Classes 0 to 2 are old, 2 was removed and counts as background; the second value is padding."""
    merge = {0: 0, 1: 1, 2: 0, 3: 3}
    kept = [(a, b) for label, padded, a, b in pixels if not padded and label != 3]
    columns = [torch.tensor(column, dtype=torch.long) for column in zip(*pixels, strict=True)] or 4 * [
        torch.zeros(0).long()
    ]
    labels, padding, before, after = columns[0], columns[1].bool(), columns[2], columns[3]
    found = agreement(labels, padding, before, after, 3, torch.tensor([0, 1, 0, 3]))
    assert found.tolist() == [sum(merge[a] == merge[b] for a, b in kept), len(kept)]


def test_removed_classes_have_no_scores_and_count_as_background(place):
    before, after = (json.loads((place / run / "steps/1/metrics.json").read_text()) for run in ("with", "without"))
    names = [c["name"] for c in after["classes"]]
    removed = [names.index("red (removed)"), names.index("black (removed)")]
    assert after["removed"] == removed and all(after["classes"][c]["iou"] is None for c in removed)
    assert np.sum(after["confusion"]) == np.sum(before["confusion"]) and after["left_out"] == []
    kept = [c["iou"] for n, c in enumerate(after["classes"]) if n not in removed]
    assert after["miou"]["all"] == pytest.approx(np.mean(kept))
    assert after["classes"][0]["pixels"] > before["classes"][0]["pixels"]
    assert [r["same"] for r in score_again(place / "without")] == [True, True]  # the models, scored again
    total = json.loads((place / "without/summary.json").read_text())
    assert all(total["forgetting"]["by_class"][c] == [None, None] for c in removed)
    marked = {c["name"]: c["removed"] for c in metadata(sdrseg.load(place / "without", device="cpu"))["classes"]}
    assert [name for name, gone in marked.items() if gone] == ["red (removed)", "black (removed)"]
    page = write_report([place / "without"], place / "report.html", images=2)[0].read_text()
    tables = re.sub("<script.*?</script>", "", page[page.index('<section id="extension"') :], flags=re.S)
    assert "green" in tables and "(removed)" not in tables
    assert tables.count("<p>Not known: classes were removed after this step.</p>") == 2


def test_background_is_scored_on_images_that_label_all_classes(place):
    """The held-out images label black only, so that background is scored on the old images alone."""
    scored = json.loads((place / "with/steps/1/metrics.json").read_text())["classes"][0]
    on_old_images = json.loads((place / "with/steps/1/extension.json").read_text())["old"][0]
    pixels = sum(int((np.array(Image.open(file)) == 0).sum()) for file in old_masks(place))
    assert 100 * scored["iou"] == pytest.approx(on_old_images["after"]) and scored["pixels"] == pixels


def test_what_an_extension_kept_after_classes_were_removed(place):
    """As if they had been background: its row equals the score of the model itself, and the verdict is given anew."""
    before, after = (json.loads((place / run / "steps/1/extension.json").read_text()) for run in ("with", "without"))
    assert [c["name"] for c in after["old"]] == [c["name"] for c in before["old"] if c["name"] != "red"]
    assert after["new"] == []
    unknown = ("kept_elsewhere", "regressions", "false_alarms")
    assert all(before[key] is not None and after[key] is None for key in unknown)  # it takes both models to tell
    scored = json.loads((place / "without/steps/1/metrics.json").read_text())["classes"][0]
    assert after["old"][0]["after"] == pytest.approx(100 * scored["iou"]) != before["old"][0]["after"]
    assert before["verdict"]["met"] and "could not be measured" in after["verdict"]["missed"][0]


def test_false_alarms_on_background_after_an_old_class_was_removed(place, tmp_path):
    """Its pixels are background, too. A file without matrices, of an earlier version, cannot tell."""
    everywhere = masks_folder(tmp_path / "black", 8)
    for file in (everywhere / "masks").iterdir():
        save(file, np.full_like(np.array(Image.open(file)), 255))  # so that the model paints black over others
    extend(place / "run", everywhere, tmp_path / "with", method="ft", display=Quiet())
    change_classes(tmp_path / "with", tmp_path / "less", {}, ["red"])
    found = json.loads((tmp_path / "less/steps/1/extension.json").read_text())
    model, alarms, pixels = sdrseg.load(tmp_path / "less", device="cpu"), 0, 0
    for file in old_masks(place):
        truth = np.array(Image.open(file))
        outside = (truth == 0) | (truth == NAMES.index("red"))
        predicted = model.predict(file.parent.parent / "images" / file.name).mask
        alarms += int((outside & (predicted == 7)).sum())  # the channel of black
        pixels += int(outside.sum())
    assert alarms > 0 and found["false_alarms_on_background"] == pytest.approx(alarms / pixels)
    shutil.copytree(tmp_path / "with", tmp_path / "earlier")
    file = tmp_path / "earlier/steps/1/extension.json"
    saved = json.loads(file.read_text())
    saved.pop("confusion"), saved.pop("complete")
    file.write_text(json.dumps(saved))
    change_classes(tmp_path / "earlier", tmp_path / "from-earlier", {}, ["red"])
    earlier = json.loads((tmp_path / "from-earlier/steps/1/extension.json").read_text())
    assert earlier["false_alarms_on_background"] is earlier["old"][0]["after"] is None
    assert earlier["old"][1:] == found["old"][1:] and earlier["forgetting"] == found["forgetting"]


def test_removed_classes_are_not_part_of_an_extension(place, tmp_path):
    done = extend(place / "without", place / "white", tmp_path / "more", max_forgetting=100.0, **GIVEN)
    assert [c["name"] for c in done.result["old"]] == ["background", "green", "blue", "yellow", "pink", "cyan"]
    assert done.met and not any("removed" in name for old in done.forecast["similar"].values() for name in old)
    scored = json.loads((tmp_path / "more/steps/1/metrics.json").read_text())["classes"]
    before = [c["iou"] for c in scored if c["iou"] is not None]
    assert [c["before"] for c in done.result["old"]] == pytest.approx([100 * v for v in before])
    assert [r["same"] for r in score_again(tmp_path / "more")] == [True] * 3


def test_several_classes_are_removed_with_commas_between_their_names(place, tmp_path):
    """A name that contains a comma is one class."""
    change_classes(place / "run", tmp_path / "named", {"green": "leaf, grass"}, ["red, blue", "cyan"])
    assert [c.name for c in sdrseg.load(tmp_path / "named").classes if c.removed] == [
        f"{name} (removed)" for name in ("red", "blue", "cyan")
    ]
    change_classes(tmp_path / "named", tmp_path / "less", {}, ["leaf, grass", "pink,yellow"])
    assert [c.name for c in sdrseg.load(tmp_path / "less").classes if not c.removed] == ["background"]


@pytest.fixture(scope="module")
def removed(place, tmp_path_factory) -> Path:
    """The run with white, and without pink: `gone`, or added `again`."""
    root = tmp_path_factory.mktemp("removed")
    masks_folder(root / "pink", 5)
    change_classes(place / "run", root / "gone", {}, ["pink"])
    extend(root / "gone", root / "pink", root / "again", method="ft", **GIVEN)
    extend(place / "run", place / "white", root / "white", method="ft", **GIVEN)
    return root


def test_branches_say_what_each_run_removed(removed, capsys):
    told = {"white": (["white"], []), "gone": ([], ["pink"]), "again": (["pink"], ["pink"])}
    for run in ("gone", "again"):
        found = branches(removed / "white", removed / run)
        show_branches(found, json=False)
        assert f"{removed / run} removed pink (left out)" in capsys.readouterr().out
        assert [*zip(found["new"], found["removed"], strict=True)] == [told["white"], told[run]]


def test_branches_count_the_same_pixels_if_one_removed_a_class(removed, tmp_path):
    """10 pixels of every class are right, 2 of red are predicted as pink, 1 of background and 5 of pink as red: these 5
    count in all models or, if pink was added again, in none. 100 of a class that one run adds never count."""
    right, (red, pink, new) = 10 * np.eye(8, dtype=int), (NAMES.index(name) for name in ("red", "pink", "white"))
    right[new, red], right[0, red] = 100, 1
    known, again = right.copy(), right.copy()
    known[red, pink], known[pink, red] = 2, 5
    again[red, new], again[new, red], again[pink, pink] = 2, 5, 0
    merged = as_background(known, [pink])
    for run, matrices in (
        ("white", (known[:7, :7], known)),
        ("gone", (merged[:7, :7],)),
        ("again", (merged[:7, :7], again)),
    ):
        shutil.copytree(removed / run, tmp_path / run)
        for step, matrix in enumerate(matrices):
            file = tmp_path / run / f"steps/{step}/metrics.json"
            saved = {**json.loads(file.read_text()), "confusion": matrix.tolist()}
            saved.pop("complete", None)
            file.write_text(json.dumps(saved))
    for run, wanted in (("gone", 10 / (12 + 16 - 10)), ("again", 10 / (12 + 11 - 10))):
        for first, second in ((run, "white"), ("white", run)):
            rows = branches(tmp_path / first, tmp_path / second)["classes"]
            assert [row["name"] for row in rows] == ["red", "green", "blue", "yellow", "cyan"]
            assert [[row[key] for row in rows] for key in ("fork", "first", "second")] == [
                pytest.approx([wanted, 1, 1, 1, 1])
            ] * 3


def test_old_images_of_a_class_that_is_added_again_are_images_of_the_new_one(place, tmp_path):
    """What the old images label is the class in its new channel: false alarms there count, and the pixels that the old
    channel claimed in background were never known to be right."""
    shutil.copytree(place / "black", tmp_path / "black")
    for file in (tmp_path / "black/images").iterdir():  # other files: the same photographs would count once
        Image.open(file).save(file, compress_level=0)
    done = extend(place / "without", tmp_path / "black", tmp_path / "again", **GIVEN)
    job = reopen_job(tmp_path / "again", read_parent(tmp_path / "again").config)
    step = job.scenario[-1]
    first = [id for id in step.test_ids if id.startswith("step1/")]
    assert first and {job.labelled_channels(step, id) for id in first} == {frozenset({8})}
    assert {job.labelled_channels(job.scenario[1], id) for id in first} == {frozenset({7})}
    assert step.channels[8] != step.channels[7] and [one["name"] for one in done.result["new"]] == ["black"]
    assert not {one["id"] for one in done.result["regressions"]} & set(first)
    assert all(r["same"] for r in score_again(tmp_path / "again"))


def test_a_photograph_counts_once_if_its_folder_is_added_again(place, tmp_path):
    """Copies in another folder, too, and also in later extensions."""
    shutil.copytree(place / "black", tmp_path / "copies")
    for run, folder in (("again", place / "black"), ("copied", tmp_path / "copies")):
        done = extend(place / "without", folder, tmp_path / run, method="ft", **GIVEN)
        (held_out,) = json.loads((tmp_path / run / "scenario.json").read_text())["steps"][2:]
        names = [Path(id).name for id in held_out["test_ids"] if id.startswith("step")]
        assert len(set(names)) == len(names) == done.result["held_out_images"] > 0
        assert done.result["old_images"] == len(old_masks(place))
        (note,) = [note for note in done.notes if "also held out in a later folder" in note]
        first = place / f"black/images/{min(names)}.png"
        assert f"{len(names)} old test images are also held out in a later folder, such as {first} (" in note
        listed = [Path(one["id"]).name for one in done.result["false_alarms"]]
        assert len(set(listed)) == len(listed)
    more = extend(tmp_path / "again", place / "white", tmp_path / "more", method="ft", **GIVEN)
    assert more.result["old_images"] == len(old_masks(place)) + len(names)
    assert all(r["same"] for r in score_again(tmp_path / "more"))


@pytest.mark.parametrize(("method", "least"), [("laps-softmax", 25), ("mib", 50)])
def test_a_removed_class_can_be_added_again(place, tmp_path, method, least):
    """The channel that learned pink first must neither win nor count as a class that is not pink."""
    masks_folder(tmp_path / "pink", 5, 24)
    change_classes(place / "run", tmp_path / "without", {}, ["pink"])
    done = extend(tmp_path / "without", tmp_path / "pink", tmp_path / "again", method=method, display=Quiet())
    assert "pink (removed)" not in done.forecast["similar"]["pink"] and done.result["new_iou"] > least
    model = sdrseg.load(tmp_path / "again")
    assert [c.name for c in model.classes][-3:] == ["pink (removed)", "cyan", "pink"]
    masks = {file: np.array(Image.open(file)) > 0 for file in (tmp_path / "pink/masks").iterdir()}
    found = [model.predict(tmp_path / "pink/images" / file.name).mask[mask] for file, mask in masks.items()]
    first, again = ((np.concatenate(found) == channel).mean() for channel in (5, 7))
    assert first == 0 and again > least / 100
    assert all(r["same"] for r in score_again(tmp_path / "again"))
    change_classes(tmp_path / "again", tmp_path / "gone", {}, ["pink"])
    assert [c.name for c in sdrseg.load(tmp_path / "gone").classes if c.removed] == [
        "pink (removed)",
        "pink (removed) (removed)",
    ]
