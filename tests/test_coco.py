"""Own data as COCO JSON: label maps against pycocotools and by hand, splits, and what the messages say."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from pycocotools import mask as oracle

from sdrseg.datasets.folder import open_folder
from sdrseg.datasets.folder.coco import Coco
from sdrseg.datasets.folder.painting import paint, run_lengths
from sdrseg.errors import DataError

# pycocotools does not know NumPy 2's copy argument
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

CATEGORIES = [{"id": 7, "name": "dog"}, {"id": 3, "name": "cat"}]
SQUARE = [[1, 1, 4, 1, 4, 3, 1, 3]]  # x from 1 to 4 and y from 1 to 3: 3 x 2 pixels


def picture(id: object, file_name: str, height: int = 4, width: int = 6) -> dict[str, Any]:
    return {"id": id, "file_name": file_name, "height": height, "width": width}


def drawn(id: int, segmentation: object, category: object = 3, image: object = 1, **more: object) -> dict[str, Any]:
    return {"id": id, "image_id": image, "category_id": category, "segmentation": segmentation, **more}


def write(path: Path, images: object, annotations: object = (), categories: object = CATEGORIES) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"images": images, "annotations": annotations, "categories": categories}))
    return path


def save(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (6, 4)).save(path)


def with_one_image(root: Path, *annotations: object, image: dict[str, Any] | None = None) -> Coco:
    save(root / "images/a.png")
    write(root / "annotations.json", [image or picture(1, "a.png")], annotations)
    return Coco(root)


def found(source: Coco) -> list[tuple[str, str]]:
    return [(problem.kind, problem.detail) for problem in source.problems()]


@contextmanager
def fails(*words: object) -> Iterator[None]:
    """The block must raise a DataError whose message holds all the words."""
    with pytest.raises(DataError) as caught:
        yield
    assert [word for word in map(str, words) if word not in str(caught.value)] == [], str(caught.value)


# --- label maps -------------------------------------------------------------------------------------------------------


@st.composite
def masks(draw: st.DrawFn) -> np.ndarray[Any, Any]:
    """Noise, or stripes with long runs."""
    height, width = draw(st.integers(1, 70)), draw(st.integers(1, 40))
    noise = np.random.default_rng(draw(st.integers(0, 2**32))).random((height, width))
    stripes = np.add.outer(np.arange(height), np.arange(width)) % draw(st.integers(2, 40)) < draw(st.integers(0, 40))
    return np.asfortranarray(np.where(draw(st.booleans()), noise < draw(st.floats(0, 1)), stripes), np.uint8)


@settings(max_examples=100, deadline=None)
@given(masks())
def test_run_lengths_in_both_codings_are_those_of_pycocotools(mask: np.ndarray[Any, Any]) -> None:
    counts = oracle.encode(mask)["counts"]
    runs = run_lengths(counts)
    assert runs == run_lengths(counts.decode()) == run_lengths(runs)
    for coded in (counts.decode(), runs):
        content = json.dumps({"size": mask.shape, "annotations": [[9, {"counts": coded}]]}).encode()
        np.testing.assert_array_equal(paint(content), mask * 9)


def distance_to_outline(centres: np.ndarray[Any, Any], points: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """From each pixel centre to the nearest edge of the polygon."""
    start, edge = points, np.roll(points, -1, axis=0) - points
    along = ((centres[:, None] - start) * edge).sum(axis=2) / (edge**2).sum(axis=1)
    nearest = start + np.clip(along, 0, 1)[:, :, None] * edge
    return np.linalg.norm(centres[:, None] - nearest, axis=2).min(axis=1)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.integers(3, 12), st.floats(4, 60))
def test_polygons_differ_from_pycocotools_on_the_boundary_only(seed: int, corners: int, radius: float) -> None:
    random = np.random.default_rng(seed)
    angles = np.sort(random.random(corners)) * 2 * np.pi
    reach = radius * (0.5 + random.random(corners))
    centre = random.uniform(0, 100, 2)  # the polygon may lie partly outside
    points = centre + np.stack([reach * np.cos(angles), reach * np.sin(angles)], axis=1)
    polygon = points.ravel().tolist()
    content = json.dumps({"size": [100, 120], "annotations": [[1, [polygon]]]}).encode()
    ours = paint(content)
    theirs = oracle.decode(oracle.frPyObjects([polygon], 100, 120))[:, :, 0]
    differing = np.argwhere(ours != theirs)[:, ::-1] + 0.5
    assert (distance_to_outline(differing, points) < 0.5).all()
    if theirs.sum() > 1000:
        assert (ours & theirs).sum() / (ours | theirs).sum() > 0.93


def test_a_polygon_covers_the_pixels_whose_centre_it_contains(tmp_path: Path) -> None:
    source = with_one_image(tmp_path, drawn(1, SQUARE), drawn(2, [[4.4, 0, 6, 0, 6, 0.6, 4.4, 0.6]], 7))
    assert source.mask("a").tolist() == [
        [0, 0, 0, 0, 2, 2],  # 4.4 to 6 holds the centres 4.5 and 5.5
        [0, 1, 1, 1, 0, 0],
        [0, 1, 1, 1, 0, 0],
        [0, 0, 0, 0, 0, 0],
    ]
    narrow = with_one_image(tmp_path, drawn(1, [[1.62, 1.62, 3.38, 1.62, 3.38, 3.38, 1.62, 3.38]]))
    assert np.argwhere(narrow.mask("a")).tolist() == [[2, 2]]  # it misses the centres 1.5 and 3.5 on either side
    assert source.classes == ("background", "cat", "dog")
    assert source.class_of == {3: 1, 7: 2}
    assert source.image("a").shape == (4, 6, 3)


def test_a_large_polygon_is_drawn_without_the_finer_grid() -> None:
    square = [100.0, 200.0, 1400.0, 200.0, 1400.0, 1200.0, 100.0, 1200.0]
    label = paint(json.dumps({"size": [1500, 1500], "annotations": [[1, [square]]]}).encode())
    expected = np.zeros((1500, 1500), np.uint8)
    expected[200:1200, 100:1400] = 1
    assert (label & expected).sum() / (label | expected).sum() > 0.99


def test_several_polygons_and_small_over_large_over_crowd(tmp_path: Path) -> None:
    crowd = {"size": [4, 6], "counts": [0, 8, 16]}  # the first two columns
    source = with_one_image(
        tmp_path,
        drawn(1, [[3, 1, 4, 1, 4, 2, 3, 2], [5, 3, 6, 3, 6, 4, 5, 4]], 7),  # two pixels, listed before what it overlaps
        drawn(2, [[1, 0, 6, 0, 6, 2, 1, 2]], 3),
        drawn(3, crowd, 7, iscrowd=1),
    )
    assert source.mask("a").tolist() == [
        [2, 1, 1, 1, 1, 1],
        [2, 1, 1, 2, 1, 1],
        [2, 2, 0, 0, 0, 0],
        [2, 2, 0, 0, 0, 2],
    ]


def test_a_small_crowd_stays_below_a_large_object(tmp_path: Path) -> None:
    source = with_one_image(tmp_path, drawn(1, SQUARE, 3), drawn(2, [[1, 1, 2, 1, 2, 2, 1, 2]], 7, iscrowd=1))
    assert source.mask("a")[1].tolist() == [0, 1, 1, 1, 0, 0]


def test_an_image_without_annotations_is_background(tmp_path: Path) -> None:
    assert with_one_image(tmp_path).mask("a").tolist() == [[0] * 6] * 4


def test_a_category_named_background_is_class_0(tmp_path: Path) -> None:
    save(tmp_path / "images/a.png")
    categories = [{"id": 0, "name": "background"}, {"id": 1, "name": "cat"}]
    write(tmp_path / "annotations.json", [picture(1, "a.png")], [drawn(1, SQUARE, 1)], categories)
    source = Coco(tmp_path)
    assert (source.classes, source.class_of) == (("background", "cat"), {0: 0, 1: 1})


def test_mask_content_changes_with_the_label_map_alone(tmp_path: Path) -> None:
    content = with_one_image(tmp_path, drawn(1, SQUARE)).mask_content("a")
    assert with_one_image(tmp_path, drawn(9, SQUARE, bbox=[0, 0, 1, 1], area=3.5)).mask_content("a") == content
    assert with_one_image(tmp_path, drawn(1, SQUARE, 7)).mask_content("a") != content
    assert with_one_image(tmp_path, drawn(1, [[1, 1, 4, 1, 4, 3, 1, 3.5]])).mask_content("a") != content
    assert with_one_image(tmp_path, drawn(1, SQUARE), image=picture(1, "a.png", 5)).mask_content("a") != content


# --- what is broken is named and passed over --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("broken", "kind", "words"),
    [
        (drawn(5, [[1, 1, 2, 2]]), "broken annotation", ["id 5", "4 numbers"]),
        (drawn(5, [[1, 1, 2, 2, 3, 3, 4]]), "broken annotation", ["id 5", "7 numbers"]),
        (drawn(5, [[1, 1, 2, 2, 3, "x"]]), "broken annotation", ["id 5", "pixel coordinates"]),
        (drawn(5, [[1, 1, 2, 2, 3, 1e9]]), "broken annotation", ["id 5", "coordinates"]),
        (drawn(5, [[1, 1, 2, 2, 3, float("nan")]]), "broken annotation", ["id 5", "coordinates"]),
        (drawn(5, [[[1, 1], [2, 2], [3, 3], [4, 1], [5, 1], [6, 1]]]), "broken annotation", ["id 5", "coordinates"]),
        (drawn(5, [1, 1, 2, 2, 3, 3]), "broken annotation", ["id 5", "instead of a polygon"]),
        (drawn(5, [[6, 0, 9, 0, 9, 3]]), "broken annotation", ["id 5", "outside the image", "6×4"]),
        (drawn(5, [[0, -1, 5, -1, 5, 0], [1, 4, 2, 5, 3, 6]]), "broken annotation", ["id 5", "outside the image"]),
        (drawn(5, []), "broken annotation", ["id 5", "no segmentation"]),
        ({"id": 5, "image_id": 1, "category_id": 3}, "broken annotation", ["id 5", "no segmentation"]),
        (drawn(5, {"size": [4, 6], "counts": [20, 3]}), "broken annotation", ["id 5", "23 pixels", "6×4"]),
        (drawn(5, {"size": [6, 4], "counts": [24]}), "broken annotation", ["id 5", "[6, 4]", "[4, 6]"]),
        (drawn(5, {"size": [4, 6], "counts": [30, -6]}), "broken annotation", ["id 5", "whole numbers"]),
        (drawn(5, {"size": [4, 6], "counts": "8"}), "broken annotation", ["id 5", "8 pixels", "6×4"]),
        (drawn(5, {"size": [4, 6], "counts": "P"}), "broken annotation", ["id 5", "cut off"]),
        (drawn(5, {"size": [4, 6], "counts": "@"}), "broken annotation", ["id 5", "negative"]),
        (drawn(5, {"size": [4, 6], "counts": "é"}), "broken annotation", ["id 5", "byte 195"]),
        (drawn(5, {"size": [4, 6]}), "broken annotation", ["id 5", "counts"]),
        (drawn(5, SQUARE, 99), "unknown category", ["id 5", "category_id 99"]),
        (drawn(5, SQUARE, [3]), "unknown category", ["id 5", "category_id [3]"]),
        (drawn(5, SQUARE, 3, 42), "unknown image", ["id 5", "image_id 42"]),
        (drawn(5, SQUARE, 7, ignore=1), "ignored annotation", ["id 5"]),
        ("nonsense", "unknown image", ["annotations[0]"]),
    ],
)
def test_a_broken_annotation_is_a_problem(tmp_path: Path, broken: Any, kind: str, words: list[str]) -> None:
    source = with_one_image(tmp_path, broken, drawn(6, SQUARE))
    [problem] = source.problems()
    assert (problem.file, problem.kind) == (str(tmp_path / "annotations.json"), kind)
    assert [word for word in words if word not in problem.detail] == [], problem.detail
    assert source.mask("a").sum() == 6  # the sound annotation


def test_a_polygon_outside_next_to_one_inside_is_not_a_problem(tmp_path: Path) -> None:
    source = with_one_image(tmp_path, drawn(5, [*SQUARE, [6, 0, 9, 0, 9, 3]]))
    assert source.problems() == [] and source.mask("a").sum() == 6


def test_broken_image_entries_are_problems(tmp_path: Path) -> None:
    entries = [
        picture(1, "a.png"),
        picture(1, "b.png"),
        picture(2, "gone.png"),
        picture(3, "c.png", 0),
        {"id": 4, "height": 4, "width": 6},
        {"file_name": "d.png"},
        picture(5, "a.jpg"),
        picture(6, "long" * 100),
    ]
    save(tmp_path / "images/a.png")
    write(tmp_path / "annotations.json", entries, [drawn(1, SQUARE), drawn(2, SQUARE, 3, 3)])
    source = Coco(tmp_path)
    assert source.ids("train") == ("a",)
    assert found(source) == [
        ("broken image entry", "image id 3: height 0 and width 6 must be whole numbers from 1 to 65535"),
        ("broken image entry", "image id 4: file_name is None"),
        ("broken image entry", "images[5] has no id"),
        ("duplicate id", "image id 1 occurs again (images[1]); the first is used"),
        ("duplicate id", "image id 5: a.jpg differs from a.png only in its suffix"),
        ("no image", f"image id 2: gone.png not found in: {tmp_path / 'images'}, {tmp_path}"),
        ("no image", f"image id 6: {'long' * 100} not found in: {tmp_path / 'images'}, {tmp_path}"),
    ]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.sampled_from(["size", "counts", "id"]), inner),
    max_leaves=12,
)


@settings(max_examples=150, deadline=None)
@given(st.lists(JSON, min_size=9, max_size=9))
def test_nothing_in_an_entry_can_break_the_rest(values: list[Any]) -> None:
    odd_picture = {**picture(values[0], "b.png"), "file_name": values[1], "height": values[2], "width": values[3]}
    odd_drawing = {**drawn(2, values[4]), "category_id": values[5], "ignore": values[6], "iscrowd": values[7]}
    entries = [drawn(1, SQUARE), drawn(3, values[4]), odd_drawing, drawn(4, {"size": [4, 6], "counts": values[4]})]
    with tempfile.TemporaryDirectory() as name:
        save(Path(name) / "images/a.png")
        path = Path(name) / "annotations.json"
        write(path, [picture(1, "a.png"), odd_picture, values[8]], [*entries, values[8]])
        source = Coco(Path(name))
        assert source.ids("train") == ("a",)
        assert source.mask("a").shape == (4, 6)
        json.dumps([str(problem) for problem in source.problems()])


def test_files_that_cannot_be_used(tmp_path: Path) -> None:
    save(tmp_path / "images/a.png")
    path = tmp_path / "annotations.json"
    path.write_text('{"images": [\n}')
    with fails(path, "not valid JSON", "line 2"):
        Coco(tmp_path)
    texts = {"[]": "images", '{"images": {}}': "images", '{"images": [], "annotations": []}': "categories"}
    for text, missing in texts.items():
        path.write_text(text)
        with fails(path, f"no list '{missing}'"):
            Coco(tmp_path)
    one = [picture(1, "a.png")]
    for categories, words in (
        ([], ["no classes"]),
        ([{"id": 1}], ["categories[0]", "{'id': 1}"]),
        ([{"id": 1, "name": "cat"}, {"id": 1, "name": "dog"}], ["category id 1", "'cat'", "'dog'"]),
        ([{"id": 1, "name": "cat"}, {"id": 2, "name": "cat"}], ["'cat'", "both name the class"]),
        ([{"id": i, "name": str(i)} for i in range(254)], ["255 classes", "254"]),
    ):
        with fails(write(path, one, [], categories), *words):
            Coco(tmp_path)
    with fails(write(path, one, [drawn(5, [])]), "none of its annotations", "id 5"):
        Coco(tmp_path)
    with fails(write(path, [picture(1, "b.png")]), "none of its images", tmp_path / "images", "Accepted layouts"):
        Coco(tmp_path)


# --- layouts and splits -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["{}2017", "images/{}2017", "{}", "images/{}", "images", "."])
def test_the_standard_layout(tmp_path: Path, where: str) -> None:
    for split, names in (("train", ["2.png", "1.png"]), ("val", ["3.png"])):
        for name in names:
            save(tmp_path / where.format(split) / name)
        entries = [picture(position, name) for position, name in enumerate(names)]
        path = write(tmp_path / f"annotations/instances_{split}2017.json", entries, [drawn(1, SQUARE, image=0)])
        (path.parent / f"captions_{split}2017.json").write_text("{}")  # the download has these beside the instances
    source = open_folder(tmp_path)
    assert isinstance(source, Coco)
    assert source.name == "folder"
    assert (source.ids("train"), source.ids("val")) == (("train/1", "train/2"), ("val/3",))
    assert source.split_by == "files annotations/instances_train2017.json and annotations/instances_val2017.json"
    assert source.file("val/3", "image") == str(tmp_path / where.format("val") / "3.png")
    assert source.file("val/3", "mask") == f"{tmp_path / 'annotations/instances_val2017.json'}, image id 0"
    assert [int(source.mask(id).sum()) for id in ("train/1", "train/2", "val/3")] == [0, 6, 6]


def test_a_share_of_an_export_without_val_is_held_out(tmp_path: Path) -> None:
    """Roboflow's, with train/ only."""
    for number in range(10):
        save(tmp_path / f"train/{number}.png")
    pictures = [picture(number, f"{number}.png") for number in range(10)]
    write(tmp_path / "train/_annotations.coco.json", pictures, [drawn(1, SQUARE, image=n) for n in range(10)])
    source = open_folder(tmp_path)
    assert [len(source.ids(split)) for split in ("train", "val")] == [8, 2]
    assert source.split_by == "files train/_annotations.coco.json and a share of 20 % with seed 0"
    name = "{}/_annotations.coco.json"
    assert f"There is no {name.format('val')}, so a share of {name.format('train')} is held out." in source.notes


def test_train_and_val_must_fit_together(tmp_path: Path) -> None:
    save(tmp_path / "images/a.png")
    train = write(tmp_path / "annotations/train.json", [picture(1, "a.png")])
    (tmp_path / "dataset.toml").write_text("val = 0\nscore_background = false")
    source = Coco(tmp_path)
    assert (source.ids("train"), source.ids("val"), source.score_background) == (("train/a",), (), False)
    val = write(tmp_path / "annotations/val.json", [picture(1, "a.png")], [], [CATEGORIES[0], {"id": 3, "name": "cow"}])
    with fails(train, val, f"3 'cat' is only in {train}", f"3 'cow' is only in {val}"):
        Coco(tmp_path)
    other = write(tmp_path / "annotations/val_new.json", [])
    with fails(tmp_path / "annotations", val.name, other.name, "Keep one"):
        Coco(tmp_path)


def test_one_file_is_split_by_lists_or_by_a_share(tmp_path: Path) -> None:
    entries = [picture(i, f"{i}.png") for i in range(10)]
    for i in range(10):
        save(tmp_path / f"images/{i}.png")
    write(tmp_path / "annotations.json", entries)
    source = open_folder(tmp_path)
    assert isinstance(source, Coco)
    assert (len(source.ids("train")), len(source.ids("val"))) == (8, 2)
    assert source.split_by == "a share of 20 % with seed 0"
    (tmp_path / "dataset.toml").write_text("val = 0.5\nseed = 4")
    assert Coco(tmp_path).split_by == "a share of 50 % with seed 4"
    (tmp_path / "train.txt").write_text("4.png\n2\nnone\n")
    (tmp_path / "val.txt").write_text("3\n")
    source = Coco(tmp_path)
    assert (source.ids("train"), source.ids("val")) == (("2", "4"), ("3",))
    assert found(source) == [("no image", "line 3: no image has the id 'none'")]


def test_classes_and_masks_next_to_the_json_are_errors(tmp_path: Path) -> None:
    with_one_image(tmp_path)
    toml = tmp_path / "dataset.toml"
    for line in ('classes = ["a", "b"]', "ignore = 255", 'colours = ["#000000"]'):
        toml.write_text(line)
        with fails(toml, line.split()[0], "COCO JSON"):
            Coco(tmp_path)
    toml.unlink()
    (tmp_path / "classes.txt").write_text("a\nb\n")
    with fails(tmp_path / "classes.txt", "COCO JSON"):
        Coco(tmp_path)
    (tmp_path / "classes.txt").unlink()
    (tmp_path / "masks").mkdir()
    with fails(tmp_path, "annotations.json", "masks/"):
        open_folder(tmp_path)
    (tmp_path / "masks").rmdir()
    train = write(tmp_path / "annotations/train.json", [])
    with fails(tmp_path, "annotations.json", train, "Keep one"):
        open_folder(tmp_path)
    with fails(tmp_path / "empty", "annotations.json", "Accepted layouts"):
        Coco(tmp_path / "empty")
