"""Every format is recognised, read as it was written, and trained from, without a file being moved."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image

from formats import FORMATS, NAMES, Scene, coco, save, scenes, write, yolo_lines
from runs import Quiet
from sdrseg.datasets.folder import open_folder
from sdrseg.datasets.index import class_index
from sdrseg.engine.run import train
from sdrseg.errors import DataError
from sdrseg.scenario import PROTOCOLS, build_scenario, parse_spec

SHARED = ("cvat_coco", "yolo_whole", "labelme", "labels_folder")  # in which nothing says what is held out


@pytest.fixture(scope="module")
def roots(tmp_path_factory) -> dict[str, Path]:
    found = {}
    for name, (make, _) in FORMATS.items():
        found[name] = tmp_path_factory.mktemp(name)
        make(found[name])
    return found


def scene_of(id: str) -> Scene:
    return next(scene for scene in scenes() if id.rpartition("/")[2] == scene.name)


@pytest.mark.parametrize("name", FORMATS)
def test_a_format_is_read_as_it_was_written(roots, name):
    source = open_folder(roots[name])
    assert source.format.startswith(FORMATS[name][1]) and source.problems() == []
    assert source.classes == NAMES and source.score_background
    for split in ("train", "val"):
        for id in source.ids(split):
            assert np.array_equal(source.mask(id), scene_of(id).mask), id
            assert source.image(id).shape == (32, 32, 3)
    held = {"train": 12, "val": 3}
    if name in SHARED:
        held = {"train": 14, "val": 4}
    assert {split: len(source.ids(split)) for split in held} == held
    if name not in SHARED:
        scored = "test" if name == "no_val" else "val"
        assert {scene_of(id).part for id in source.ids("train")} == {"train"}
        assert {scene_of(id).part for id in source.ids("val")} == {scored}
        said = "so test is scored" if name == "no_val" else "Scored on val; test is not used"
        assert any(said in note for note in source.notes)


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("name", FORMATS)
def test_every_protocol_finds_the_images_of_a_format(roots, name, protocol):
    source = open_folder(roots[name])
    index = {split: class_index(source, split) for split in ("train", "val")}
    scenario = build_scenario(parse_spec(f"folder:1-1@{protocol}"), source, index["train"], index["val"])
    for number, step in enumerate(scenario.steps, 1):
        held = {id: set(np.unique(scene_of(id).mask)) for id in source.ids("train")}
        later = set(range(number + 1, 4)) if protocol != "overlapped" else set()
        assert step.train_ids == tuple(id for id, found in held.items() if number in found and not found & later)
        assert step.train_ids


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("name", FORMATS)
def test_a_format_is_trained_from(roots, name, protocol, tmp_path):
    before = sorted(roots[name].rglob("*"))
    tiny = {
        "data.crop": 32,
        "data.workers": 0,
        "train.batch_size": 2,
        "train.epochs": 1,
        "eval.transform": "full_image",
    }
    tiny |= {"net.encoder": "toy16", "net.weights": "none", "net.output_stride": 8, "net.decoder": "deeplabv3"}
    spec = f"folder:1-1@{protocol}"
    summary = train(spec, "ft", tmp_path / "run", data=roots[name], settings=tiny, display=Quiet(), bases=tmp_path)
    assert summary["classes"] == list(NAMES) and summary["miou"]["all"] is not None
    assert sorted(roots[name].rglob("*")) == before


@pytest.mark.parametrize("name", FORMATS)
def test_a_format_is_converted(roots, name, sdrseg):
    code, out, _ = sdrseg("convert", roots[name], "plain", "--json")
    told = json.loads(out)
    assert code == 0 and told["problems"] == [] and told["classes"] == list(NAMES)
    before, after = open_folder(roots[name]), open_folder(Path("plain"))
    assert (after.format, after.split_by) == ("images and masks", "folders images/train and images/val")
    assert after.classes == NAMES and after.notes == () and after.problems() == []
    for split in ("train", "val"):
        assert [scene_of(id) for id in after.ids(split)] == [scene_of(id) for id in before.ids(split)]
        for id in after.ids(split):
            assert np.array_equal(after.mask(id), scene_of(id).mask)
    assert sorted(path.name for path in Path("plain").iterdir()) == ["dataset.toml", "images", "masks"]
    code, _, err = sdrseg("convert", roots[name], "plain")
    assert code == 1 and "plain already exists. Choose a new folder." in err
    assert sorted(path.name for path in Path().iterdir()) == ["plain"]


def test_data_without_background_is_converted_with_what_cannot_be_read_left_out(tmp_path, sdrseg):
    FORMATS["labels_folder"][0](tmp_path)
    (tmp_path / "classes.txt").unlink()
    (tmp_path / "dataset.toml").write_text(
        'classes = ["sky", "b\u00efrd \\"x\\"", "cat", "dog"]\nbackground = "none"\n'
    )
    (tmp_path / "Images/photo00.jpg").write_bytes(b"broken")
    Image.new("RGB", (32, 30)).save(tmp_path / "Images/photo01.jpg")
    code, out, _ = sdrseg("convert", "..", "plain", "--json")
    problems = {p.pop("kind"): p for p in json.loads(out)["problems"]}
    assert code == 0 and problems["size mismatch"] == {
        "file": "../Images/photo01.jpg",
        "detail": "image 32×30, mask 32×32 (../labels/photo01.png). Make them the same size.",
    }
    assert problems["unreadable"]["file"] == "../Images/photo00.jpg" not in problems["unreadable"]["detail"]
    data = json.loads(sdrseg("data", "..", "--json")[1])["problems"]
    assert all({"kind": kind, **problem} in data for kind, problem in problems.items())
    shutil.rmtree("plain")
    code, out, _ = sdrseg("convert", "..", "plain")  # a short path: names in the table are not folded
    assert code == 0 and "photo00.jpg" in out and "class 0, 'other'" in out
    assert "photo00.png" not in out  # the mask is all right
    before, after = open_folder(tmp_path), open_folder(Path("plain"))
    assert after.classes == before.classes == ("other", "sky", 'b\u00efrd "x"', "cat", "dog")
    assert len(after.ids("train")) + len(after.ids("val")) == 16
    for id in (*after.ids("train"), *after.ids("val")):
        assert np.array_equal(after.mask(id), before.mask(scene_of(id).name))


def test_a_folder_in_place_of_a_data_set(roots, sdrseg):
    code, out, _ = sdrseg("data", roots["roboflow_coco"])
    words = " ".join(out.split())
    assert (
        code == 0 and "Recognised: COCO JSON (train/_annotations.coco.json and valid/_annotations.coco.json)" in words
    )
    assert "Scored on val; test is not used" in words and "Category 'animals' is only a parent" in words
    code, out, _ = sdrseg("data", roots["yolo"], "--json")
    assert json.loads(out)["format"] == "YOLO polygons (data.yaml)" and json.loads(out)["split_by"] == "data.yaml"


def test_test_is_scored_if_asked(roots, tmp_path):
    for name in ("roboflow_coco", "yolo", "side_by_side", "panoptic", "pascal", "pairs"):
        copy = shutil.copytree(roots[name], tmp_path / name)
        with (copy / "dataset.toml").open("a") as toml:
            toml.write('score = "test"\n')
        source = open_folder(copy)
        assert {scene_of(id).part for id in source.ids("val")} == {"test"}
        assert "Scored on test; val is not used" in source.notes[0]


def test_a_second_annotation_of_a_panoptic_image_is_named(roots, tmp_path):
    copy = shutil.copytree(roots["panoptic"], tmp_path / "panoptic")
    file = next((copy / "annotations").glob("*train*.json"))
    content = json.loads(file.read_text())
    content["annotations"].append(content["annotations"][0])
    file.write_text(json.dumps(content))
    source, before = open_folder(copy), open_folder(roots["panoptic"])
    assert source.notes == before.notes and source.ids("train") == before.ids("train")  # nothing is left out
    (problem,) = source.problems()
    assert problem.kind == "duplicate id" and "has another annotation, which is used" in problem.detail


@pytest.mark.parametrize("name", ["roboflow_coco", "panoptic", "yolo", "labelme"])
def test_classes_that_annotations_name_are_merged(roots, name, tmp_path):
    copy = shutil.copytree(roots[name], tmp_path / name)
    toml = copy / "dataset.toml"
    toml.write_text('values = {bird = "animal", cat = "animal", dog = "ignore"}\n')
    source = open_folder(copy)
    assert source.classes == ("background", "animal")
    id = next(id for id in source.ids("train") if 3 in scene_of(id).mask and 2 in scene_of(id).mask)
    assert np.array_equal(source.mask(id), np.array([0, 1, 1, 255])[scene_of(id).mask])
    toml.write_text('values = {brid = "animal"}\n')
    with pytest.raises(DataError, match=r"values: 'brid' is not a class of .*; did you mean 'bird'"):
        open_folder(copy)
    toml.write_text('values = {dog = "background"}\n')
    source = open_folder(copy)
    assert source.classes == ("background", "bird", "cat")
    assert np.array_equal(source.mask(id), np.array([0, 1, 2, 0])[scene_of(id).mask])


def test_a_dummy_category_is_left_out_and_named(roots):
    assert "Category 'animals' is only a parent of others" in " ".join(open_folder(roots["roboflow_coco"]).notes)


def test_two_formats_in_one_folder_are_distinguished_by_name(tmp_path):
    FORMATS["yolo"][0](tmp_path)
    write(tmp_path / "annotations.json", coco(scenes(), folder="train/"))
    with pytest.raises(
        DataError, match=r'both annotations\.json \(format = "coco"\) and data\.yaml \(format = "yolo"\)'
    ):
        open_folder(tmp_path)
    (tmp_path / "dataset.toml").write_text('format = "yolo"\n')
    assert open_folder(tmp_path).format == "YOLO polygons (data.yaml)"


# --- what is broken is named, and the rest is used --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("0 0.5 0.5 0.2 0.2", "line 2: a box, CLASS X Y WIDTH HEIGHT; segmentation needs polygons"),
        ("7 0 0 1 0 1 1", "line 2: '7' is not a class of data.yaml"),
        ("x 0 0 1 0 1 1", "line 2: 'x' is not a class of data.yaml"),
        ("0 0 0 1 zero 1 1", "line 2: values that are not numbers"),
        ("0 0 0 1 0 1", "line 2: a polygon of 5 numbers"),
        ("0 nan 0 1 0 1 1", "line 2: a polygon with values that cannot be"),
        ("0 2 2 3 2 3 3", "line 2: all polygons are outside the image"),
    ],
)
def test_broken_lines_of_yolo(tmp_path, line, said):
    FORMATS["yolo"][0](tmp_path)
    file = tmp_path / "labels/train/photo00.txt"
    file.write_text(file.read_text() + line + "\n")
    source = open_folder(tmp_path)
    (problem,) = source.problems()
    assert (problem.file, problem.kind) == (str(file), "broken annotation") and said in problem.detail
    assert np.array_equal(source.mask("train/photo00"), scene_of("photo00").mask)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 99) | st.floats(allow_nan=True) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(["label", "points", "x"]), inner),
    max_leaves=8,
)


@settings(max_examples=40, deadline=None)
@given(lines=st.lists(st.text("0123456789.e- xn", max_size=30), max_size=4), shapes=st.lists(JSON, max_size=4))
@example(lines=[], shapes=[{"label": "0"}])  # another class, which comes first
def test_nothing_in_a_file_can_break_the_rest(lines, shapes):
    with tempfile.TemporaryDirectory() as name:
        for format in ("yolo", "labelme"):
            FORMATS[format][0](Path(name, format))
        file = Path(name, "yolo/labels/train/photo00.txt")
        file.write_text("\n".join([file.read_text(), *lines]))
        write(Path(name, "labelme/photo00.json"), {"shapes": shapes})
        for format, id in (("yolo", "train/photo01"), ("labelme", "photo01")):
            source = open_folder(Path(name, format))
            for number, name_of_class in enumerate(NAMES[1:], 1):
                drawn = source.mask(id) == source.classes.index(name_of_class)
                assert np.array_equal(drawn, scene_of(id).mask == number)
            assert {source.mask(id).shape for split in ("train", "val") for id in source.ids(split)} == {(32, 32)}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("names: [a", "not valid YAML"),
        ("- a", "no keys such as"),
        ("train: images/train", "names = None is neither a list of class names"),
        ("names: [a]\ntrain: /etc\nval: ../../..", "no images found"),
    ],
)
def test_broken_yaml(tmp_path, text, said):
    (tmp_path / "data.yaml").write_text(text)
    with pytest.raises(DataError, match=said):
        open_folder(tmp_path)


@pytest.mark.parametrize(
    ("shape", "said"),
    [
        ({"label": "lane", "shape_type": "line", "points": [[0, 0], [5, 5]]}, "a line; only polygons"),
        ({"label": "ghost", "points": []}, "a polygon with 0 points; it needs at least 3"),
        ({"label": "cat", "points": [[0, 0], [5, 5]]}, "a polygon with 2 points; it needs at least 3"),
        ({"label": "cat", "points": "abc"}, "points are not pairs of numbers"),
        ({"label": None, "points": []}, "None is not a class"),
        ("nothing", "'nothing' is not a class"),
        ({"label": "cat", "shape_type": "circle", "points": [[0, 0]]}, "a circle with 1 point; it needs 2"),
    ],
)
def test_broken_shapes_of_labelme(tmp_path, shape, said):
    FORMATS["labelme"][0](tmp_path)
    scene = scene_of("photo01")
    polygon = {"label": "cat", "points": np.reshape(scene.polygon(scene.boxes[0]), (4, 2)).tolist()}
    write(tmp_path / "photo01.json", {"imagePath": "photo01.jpg", "shapes": [shape, polygon]})
    source = open_folder(tmp_path)
    (problem,) = source.problems()
    assert problem.kind == "broken annotation" and f"shapes[0]: {said}" in problem.detail
    assert source.classes == NAMES  # the label of a shape without an area is not a class


def test_circles_and_ignored_shapes_of_labelme(tmp_path):
    FORMATS["labelme"][0](tmp_path)
    shapes = [{"label": " dog ", "shape_type": "circle", "points": [[16, 16], [16, 26]]}]
    shapes.append({"label": "__ignore__", "shape_type": "rectangle", "points": [[0, 0], [4, 2]]})
    write(tmp_path / "photo00.json", {"shapes": shapes})
    mask = open_folder(tmp_path).mask("photo00")
    assert abs((mask == 3).sum() - np.pi * 100) < 8 and (mask == 255).sum() == 8


def test_a_photograph_with_exif_rotation(tmp_path):
    """Polygons are drawn on the picture as it is shown, whatever way its pixels are stored."""
    from PIL import Image

    FORMATS["yolo"][0](tmp_path)
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.fromarray(np.zeros((20, 32, 3), np.uint8)).save(tmp_path / "images/train/photo00.jpg", exif=exif)
    source = open_folder(tmp_path)
    assert source.image("train/photo00").shape == (32, 20, 3) and source.mask("train/photo00").shape == (32, 20)


def test_names_in_files_do_not_lead_out_of_the_folder(tmp_path):
    told = coco(scenes())
    told["images"][0]["file_name"] = "../secret.jpg"
    told["images"][1]["file_name"] = "/etc/passwd"
    FORMATS["cvat_coco"][0](tmp_path)
    write(tmp_path / "annotations/instances_default.json", told)
    source = open_folder(tmp_path)
    assert [p.kind for p in source.problems()] == ["broken image entry"] * 2
    assert all("points outside the folder" in p.detail for p in source.problems())


@pytest.mark.parametrize("line", ["cat:1,2", "cat:1,2,300::", "cat", "cat:a,b,c::"])
def test_broken_labelmaps(tmp_path, line):
    FORMATS["pascal"][0](tmp_path)
    file = tmp_path / "labelmap.txt"
    file.write_text(file.read_text() + line)
    with pytest.raises(DataError, match=r"labelmap\.txt, line 6: .* is not NAME:RED,GREEN,BLUE::"):
        open_folder(tmp_path)


@pytest.mark.parametrize("name", ["yolo", "coco", "pairs"])
def test_an_image_in_both_splits_is_held_out_only(tmp_path, name, sdrseg):
    """Its ids differ, but its file is the same."""
    of = scenes()[:6]
    for scene in of:
        scene.save_image(tmp_path / f"images/{scene.name}.jpg")
    if name == "yolo":
        for scene in of:
            write(tmp_path / f"labels/{scene.name}.txt", yolo_lines(scene))
        (tmp_path / "val.txt").write_text("".join(f"images/{scene.name}.jpg\n" for scene in of[:2]))
        write(tmp_path / "data.yaml", f"train: images\nval: val.txt\nnames: {list(NAMES[1:])}\n")
    elif name == "coco":
        write(tmp_path / "annotations/instances_train.json", coco(of, folder="images/"))
        write(tmp_path / "annotations/instances_val.json", coco(of[:2], folder="images/"))
    else:
        for scene in of:
            save(tmp_path / f"truth/{scene.name}.png", scene.mask)
        for part, some in (("train", of), ("val", of[:2])):
            lines = [f"images/{scene.name}.jpg truth/{scene.name}.png\n" for scene in some]
            write(tmp_path / f"{part}.txt", "".join(lines))
        write(tmp_path / "dataset.toml", f"classes = {list(NAMES)}\n")
    source = open_folder(tmp_path)
    held = {split: {scene_of(id).name for id in source.ids(split)} for split in ("train", "val")}
    assert held == {"train": {scene.name for scene in of[2:]}, "val": {scene.name for scene in of[:2]}}
    found = [problem for problem in source.problems() if problem.kind == "in train and val"]
    assert {Path(problem.file).name for problem in found} == {f"{scene.name}.jpg" for scene in of[:2]}
    if name == "yolo":
        (tmp_path / "val.txt").write_text("".join(f"images/{scene.name}.jpg\n" for scene in of))
        with pytest.raises(DataError, match=r"every training image is also held out .* Name different images"):
            open_folder(tmp_path)


def test_annotations_that_cannot_be_used_are_noted(tmp_path):
    """Their objects would be trained as background without a word."""
    FORMATS["cvat_coco"][0](tmp_path / "coco")
    file = tmp_path / "coco/annotations/instances_default.json"
    content = json.loads(file.read_text())
    content["annotations"][0]["segmentation"] = []
    file.write_text(json.dumps(content))
    (note,) = open_folder(tmp_path / "coco").notes
    assert note.startswith("1 annotation cannot be used, so its pixels may count as background: ") and "id 0" in note
    content["annotations"][1]["category_id"] = 77
    file.write_text(json.dumps(content))
    (note,) = open_folder(tmp_path / "coco").notes
    assert note.startswith("2 annotations cannot be used, so their pixels may count as background (`sdrseg data` lists")
    FORMATS["labelme"][0](tmp_path / "labelme")
    (tmp_path / "labelme/photo03.json").write_text('{"shapes": [')
    source = open_folder(tmp_path / "labelme")
    assert [(Path(p.file).name, p.kind) for p in source.problems()] == [("photo03.json", "unreadable")]
    (note,) = source.notes
    assert note.startswith(f"1 file cannot be read and is left out: {tmp_path / 'labelme/photo03.json'}, ")


def test_a_split_of_yolo_that_is_not_found_is_an_error(tmp_path):
    """It is not replaced by another split. Files with the same id are problems."""
    FORMATS["yolo_whole"][0](tmp_path)
    save(tmp_path / "images/photo00.png", np.zeros((32, 32, 3)))
    assert [problem.kind for problem in open_folder(tmp_path).problems()] == ["duplicate id"]
    for named in ("train: images/trian\nval: images/vla", "train: autosplit_train.txt", "test: images/test"):
        write(tmp_path / "data.yaml", f"{named}\nnames: {list(NAMES[1:])}\n")
        with pytest.raises(DataError, match=r"data\.yaml: no images found in the folders of train, val and test"):
            open_folder(tmp_path)
