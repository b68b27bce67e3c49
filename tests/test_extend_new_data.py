"""The folder of new classes: what is added, what is left out, and what counts for the settings."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from safetensors.torch import load_file
from torch import equal

from extend_data import NAMES, QUICK, SIDE, base_folder, base_run, coco_folder, mask_of, masks_folder, new_scenes
from formats import save, write
from runs import Quiet
from sdrseg.errors import SdrsegError
from sdrseg.extend.newdata import read_new_data
from sdrseg.extend.notes import repeated_notes
from sdrseg.extend.parent import read_parent
from sdrseg.extend.plan import make_plan
from sdrseg.extend.run import extend


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    root = base_run(tmp_path_factory.mktemp("new"))
    masks_folder(root / "white", 7)
    return root


def test_a_category_that_no_image_shows_is_left_out_with_a_note(place, tmp_path):
    coco_folder(tmp_path / "black", 8)
    file = tmp_path / "black/annotations.json"
    content = json.loads(file.read_text())
    content["categories"].append({"id": 2, "name": "zebra"})
    file.write_text(json.dumps(content))
    parent = read_parent(place / "run")
    new = read_new_data(parent, tmp_path / "black", None)
    assert new.names == ["black"] and list(new.images) == ["black"]
    assert any(note.endswith("also names zebra, which no training image shows: left out.") for note in new.notes)
    with pytest.raises(SdrsegError, match=r"no training image shows zebra\. Leave the class out of --classes"):
        read_new_data(parent, tmp_path / "black", ["black", "zebra"])


def test_images_without_a_new_class_are_counted(place, tmp_path):
    masks_folder(tmp_path / "white", 7, 12)
    parent = read_parent(place / "run")
    assert not any("without a new class" in note for note in read_new_data(parent, tmp_path / "white", None).notes)
    trained = [Path(id).name for id in read_new_data(parent, tmp_path / "white", None).train_ids]
    for name in trained[:3]:
        save(tmp_path / f"white/masks/{name}.png", np.zeros((SIDE, SIDE)))
    notes = read_new_data(parent, tmp_path / "white", None).notes
    assert "3 images without a new class are left out; --negatives keeps them" in notes
    notes = read_new_data(parent, tmp_path / "white", None, unlabelled="ignore").notes
    assert "3 images without a new class are left out" in notes
    assert not any("without" in note for note in read_new_data(parent, tmp_path / "white", None, negatives=True).notes)


def test_old_test_images_in_the_new_folder_are_named(place, tmp_path):
    """Copies, whatever their names; another image of the same size in bytes is none."""
    masks_folder(tmp_path / "white", 7, 12)
    parent = read_parent(place / "run")

    def notes() -> list[str]:
        return repeated_notes(make_plan(parent, read_new_data(parent, tmp_path / "white", None), None))

    assert notes() == []
    trained = [Path(id).name for id in read_new_data(parent, tmp_path / "white", None).train_ids]
    old = [place / f"base/images/{id}.png" for id in parent.test_ids[:3]]
    for name, file in zip(trained, old[:2], strict=False):
        shutil.copy(file, tmp_path / f"white/images/{name}.png")
    save(tmp_path / f"white/images/{trained[2]}.png", np.full((SIDE, SIDE, 3), 9, np.uint8))
    same_size = old[2].read_bytes()[:-1] + b"?"
    (tmp_path / f"white/images/{trained[3]}.png").write_bytes(same_size)
    (found,) = notes()
    assert found.startswith(
        f"2 old test images are also among the new training images, such as {old[0]} ({trained[0]}.png)"
    )


@pytest.mark.parametrize("protocol", ["overlapped", "sequential"])
def test_old_images_with_one_more_class_still_measure_forgetting(place, tmp_path, protocol):
    """The same photographs are held out again, because their names are the same."""
    shutil.copytree(place / "base", tmp_path / "more")
    for file in sorted((tmp_path / "more/masks").iterdir())[::2]:
        mask = np.array(Image.open(file))
        mask[:6, -6:] = 7
        save(file, mask)
    write(tmp_path / "more/dataset.toml", f"classes = {list(NAMES[:8])}\n")
    given = {"classes": ["white"], "method": "ft", "protocol": protocol, "settings": QUICK, "display": Quiet()}
    done = extend(place / "run", tmp_path / "more", tmp_path / "out", max_forgetting=100.0, **given)
    assert done.result["old_images"] == 12 and done.result["forgetting"] is not None and done.met


def test_images_without_a_mask_are_counted(place, tmp_path):
    masks_folder(tmp_path / "white", 7)
    (tmp_path / "white/masks/n003.png").unlink()
    notes = read_new_data(read_parent(place / "run"), tmp_path / "white", None).notes
    assert f"1 image has no mask and is left out: {tmp_path / 'white/images/n003.png'}" in notes


def test_bad_images_can_be_skipped(place, tmp_path):
    """Those to train on; held-out ones are never skipped."""
    masks_folder(tmp_path / "white", 7, 12)
    new = read_new_data(read_parent(place / "run"), tmp_path / "white", None)
    (tmp_path / f"white/images/{Path(new.train_ids[0]).name}.png").write_bytes(b"broken")
    with pytest.raises(SdrsegError, match="cannot be read"):
        extend(place / "run", tmp_path / "white", tmp_path / "out", display=Quiet())
    settings = QUICK | {"run.on_bad_image": "skip"}
    for method in ("ft", "laps-softmax"):  # which iterates, and which only surveys the images
        display = Quiet()
        given = {"settings": settings, "method": method, "display": display}
        done = extend(place / "run", tmp_path / "white", tmp_path / method, **given)
        assert done.forecast["images"] == {"white": len(new.train_ids)} and done.result["new_iou"] is not None
        (said,) = [str(text) for text in display.said if "skipped" in str(text)]
        assert f"step 1: skipped 1 image that cannot be read: {new.train_ids[0]} (" in said
        log = [json.loads(line) for line in (tmp_path / method / "log.jsonl").read_text().splitlines()]
        (passes,) = [entry for entry in log if entry["event"] == "passes" and entry["step"] == 1]
        assert [*passes["bad_images"]] == [new.train_ids[0]]


def test_pictures_that_cannot_be_remembered_are_named(place, tmp_path):
    shutil.copytree(place / "base/images", tmp_path / "pictures")
    broken = sorted((tmp_path / "pictures").iterdir())[0]
    broken.write_bytes(b"broken")
    given = {"images": tmp_path / "pictures", "method": "laps-softmax"}
    with pytest.raises(SdrsegError, match=f"{broken.name}: cannot be read"):
        extend(place / "run", place / "white", tmp_path / "out", settings=QUICK, display=Quiet(), **given)
    display, settings = Quiet(), QUICK | {"run.on_bad_image": "skip"}
    extend(place / "run", place / "white", tmp_path / "out", settings=settings, display=display, **given)
    assert any(f"skipped 1 image that cannot be read: {broken.stem} (" in str(text) for text in display.said)


def test_a_finished_extension_with_other_options_is_another_one(place, tmp_path):
    extend(place / "run", place / "white", tmp_path / "out", settings=QUICK, display=Quiet())
    given = {"settings": QUICK, "unlabelled": "ignore", "display": Quiet()}
    with pytest.raises(SdrsegError, match="Use the original data and the same options, or choose another folder"):
        extend(place / "run", place / "white", tmp_path / "out", **given)


def test_the_forecast_is_saved_if_a_run_is_killed_before_its_review(place, tmp_path):
    whole = extend(place / "run", place / "white", tmp_path / "out", settings=QUICK, display=Quiet())
    (tmp_path / "out/steps/1/extension.json").unlink()
    again = extend(place / "run", place / "white", tmp_path / "out", settings=QUICK, display=Quiet())
    timed = {"seconds": None, "gibibytes": None}
    assert again.result["forecast"] | timed == whole.result["forecast"] | timed


def test_replayed_images_do_not_count_for_the_settings_by_size(place, tmp_path):
    """70 images of which 10 are new are few: LAPS fits the new rows only, and others keep their iterations."""
    done = extend(place / "run", place / "white", tmp_path / "laps", replay=place / "base", display=Quiet())
    assert done.method == "laps-softmax" and done.forecast["trained"] > 63 and done.forecast["iterations"] == 0
    given = {"method": "ft", "settings": {"run.save_minutes": 60}, "display": Quiet()}
    alone, both = (
        extend(place / "run", place / "white", tmp_path / name, replay=replay, **given).forecast["iterations"]
        for name, replay in (("alone", None), ("both", place / "base"))
    )
    assert alone <= both <= alone * 1.05


def test_replayed_images_make_the_memory_if_there_are_no_others(place, tmp_path):
    base_folder(tmp_path / "some", 12)
    shutil.copytree(place / "run", tmp_path / "run")
    (tmp_path / "run/environment.json").write_text("[]")  # the folder of the old data is not known
    given = {"replay": tmp_path / "some", "settings": QUICK, "display": Quiet()}
    done = extend(tmp_path / "run", place / "white", tmp_path / "out", **given)
    assert done.method == "laps-softmax" and not any("no memory" in note for note in done.notes)
    assert any(name.startswith("memory.") for name in load_file(tmp_path / "out/steps/0/memory.safetensors"))


@pytest.fixture
def alone(place, tmp_path) -> Path:
    """The run without its data."""
    shutil.copytree(place / "run", tmp_path / "run")
    (tmp_path / "run/environment.json").write_text("[]")
    return tmp_path / "run"


def void_elsewhere(root: Path, names: set[str] | None = None) -> Path:
    """A folder in which pixels outside the new class are void, in the masks with these names."""
    masks_folder(root, 7)
    write(root / "dataset.toml", 'classes = ["background", "white"]\n')
    for name, boxes in new_scenes(7, 12):
        mask = (mask_of(boxes, [7]) > 0).astype(np.uint8)
        save(root / f"masks/{name}.png", np.where(mask > 0, 1, 255 if names is None or name in names else 0))
    return root


def test_void_outside_the_new_classes_is_no_background(place, alone, tmp_path):
    """A model that predicts the new class everywhere would pass, because nothing counts against it."""
    folder = void_elsewhere(tmp_path / "white")
    given = {"method": "ft", "settings": {"train.epochs": 3}, "min_new_iou": 10.0, "display": Quiet()}
    done = extend(alone, folder, tmp_path / "out", **given)
    assert done.result["new_iou"] is None and done.result["unlabelled"] == "ignore" and not done.met
    words = "no mask labels a pixel outside the new classes. If unlabelled pixels (255) are background, save them as 0."
    assert f"{folder}: {words}" in done.notes
    assert any(note.startswith("unlabelled pixels are ignored, so false alarms") for note in done.notes)
    assert any(note.startswith("warning: ft has nothing that keeps") for note in done.notes)
    with pytest.raises(SdrsegError, match=r"--negatives: .*white: no mask labels a pixel outside the new classes"):
        extend(alone, folder, tmp_path / "out2", negatives=True, **given)
    parent = read_parent(place / "run")
    assert not any("save them" in n for n in read_new_data(parent, folder, None, unlabelled="ignore").notes)


def test_void_in_the_held_out_masks_only(place, tmp_path):
    parent = read_parent(place / "run")
    held_out = {Path(id).name for id in read_new_data(parent, void_elsewhere(tmp_path / "a"), None).val_ids}
    folder = void_elsewhere(tmp_path / "b", held_out)
    new = read_new_data(parent, folder, None)
    assert (new.unlabelled, new.counts_false_alarms) == ("background", False)
    assert read_new_data(parent, place / "white", None).counts_false_alarms
    done = extend(place / "run", folder, tmp_path / "out", settings=QUICK, display=Quiet())
    assert any(note.startswith("no held-out mask labels background, so false") for note in done.notes)


def split_folder(root: Path, unseen: str) -> Path:
    """White and black in `train`; in `val`, images without the classes named in `unseen`."""
    for label, name in ((7, "white"), (8, "black")):
        for part in ("train", "val"):
            for n, (stem, boxes) in enumerate(new_scenes(label, 4)):
                mask = mask_of(boxes, [] if part == "val" and name in unseen else [label])
                save(root / f"images/{part}/{name}{stem}.png", np.full((SIDE, SIDE, 3), n))
                save(root / f"masks/{part}/{name}{stem}.png", mask)
    write(root / "dataset.toml", 'values = {0 = "background", 7 = "white", 8 = "black"}\n')
    return root


def test_held_out_images_without_a_new_class(place, tmp_path):
    parent = read_parent(place / "run")
    one = read_new_data(parent, split_folder(tmp_path / "one", "black"), None)
    assert one.held_out == 8
    assert f"{tmp_path / 'one'}: no held-out image shows black, so its IoU cannot be measured" in " ".join(one.notes)
    none = read_new_data(parent, split_folder(tmp_path / "none", "white, black"), None)
    assert none.held_out == 0 and len(none.val_ids) == 8 and all("again/" in id for id in none.val_ids)
    words = " ".join(none.notes)
    assert "none: no held-out image shows white, black, so the new classes are scored on the training images" in words
    assert not any("held" in note for note in read_new_data(parent, split_folder(tmp_path / "all", ""), None).notes)


@pytest.mark.parametrize("broken", ["unreadable", "other size"])
@pytest.mark.parametrize("split", ["train_ids", "val_ids"])
def test_every_new_image_is_read_before_the_run_begins(place, tmp_path, broken, split):
    folder = masks_folder(tmp_path / "white", 7)
    name = Path(getattr(read_new_data(read_parent(place / "run"), folder, None), split)[0]).name
    file = folder / f"images/{name}.png"
    if broken == "unreadable":
        file.write_bytes(file.read_bytes()[:60])
    else:
        save(file, np.zeros((SIDE, SIDE // 2, 3)))
    for method in ("laps-softmax", "ft"):
        with pytest.raises(SdrsegError, match=rf"{name}\.png: (cannot be read|image 16×32, mask 32×32)"):
            extend(place / "run", folder, tmp_path / "out", method=method, settings=QUICK, display=Quiet())
        assert not (tmp_path / "out").exists()


def test_what_is_said_of_images_and_labels_without_effect(place, tmp_path):
    base_folder(tmp_path / "some", 6)
    given = {"settings": QUICK, "display": Quiet()}
    done = extend(place / "run", place / "white", tmp_path / "ft", method="ft", images=tmp_path / "some", **given)
    assert f"--images {tmp_path / 'some'} is not used: ft uses no memory." in done.notes
    done = extend(place / "run", place / "white", tmp_path / "laps", images=tmp_path / "some", **given)
    assert not any("is not used" in note for note in done.notes)
    again = {"images": tmp_path / "some", "classes": "black", **given}
    done = extend(tmp_path / "laps", masks_folder(tmp_path / "black", 8), tmp_path / "laps2", **again)
    assert (
        f"--images {tmp_path / 'some'} is not used: the model already has the memory that laps-softmax uses."
        in done.notes
    )
    every = masks_folder(tmp_path / "all", 7, all_labelled=True)
    for method, kept in (("laps-softmax", True), ("sdr", False)):
        done = extend(place / "run", every, tmp_path / f"seq-{method}", method=method, protocol="sequential", **given)
        before, after = (load_file(run / "model.safetensors") for run in (place / "run/steps/0", done.run / "steps/1"))
        same = all(equal(after[name], old) for name, old in before.items() if name.startswith("encoder."))
        assert same == kept == any("leaves the old classes as they are" in note for note in done.notes)
