"""The audit: every disease of a data set is listed with its file, and none ends it."""

from __future__ import annotations

import json
import os
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from sdrseg.colours import class_colours
from sdrseg.datasets import picture
from sdrseg.datasets.audit import StepFacts, _image_problems, audit, better_order, protocol_summary, step_facts
from sdrseg.datasets.folder import open_folder
from sdrseg.datasets.index import class_index
from sdrseg.datasets.picture import check_may_write, save_grid
from sdrseg.datasets.shapes import Shapes
from sdrseg.datasets.source import Problem, Source
from sdrseg.errors import DataError, SdrsegError
from sdrseg.scenario import Scenario, build_scenario, parse_spec

MASK = np.array([[0, 1, 2], [1, 255, 0]], np.uint8)


def noise(height: int = 2, width: int = 3) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (height, width, 3)).astype(np.uint8)


@dataclass
class Tree:
    """A folder with images and masks for training and validation."""

    root: Path
    classes: tuple[str, ...] = ("background", "cat", "dog")
    ids: list[str] = field(default_factory=list)

    def add(
        self, id: str, image: object = None, mask: object = MASK, suffix: str = "png", split: str = "train"
    ) -> None:
        """Arrays are saved, bytes are written as they are, None stands for a healthy image."""
        for kind, content, end in (("images", noise() if image is None else image, "png"), ("masks", mask, suffix)):
            path = self.root / kind / split / f"{id}.{end}"
            path.parent.mkdir(parents=True, exist_ok=True)
            if isinstance(content, bytes):
                path.write_bytes(content)
            else:
                Image.fromarray(np.asarray(content)).save(path)

    def file(self, kind: str, name: str, split: str = "train") -> str:
        return str(self.root / kind / split / name)

    def open(self) -> Source:
        (self.root / "dataset.toml").write_text(f"classes = {json.dumps(self.classes)}\n")
        return open_folder(self.root)


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    tree = Tree(tmp_path / "set")
    tree.add("healthy")
    tree.add("other", split="val")
    return tree


def found(source: Source) -> list[tuple[str, str]]:
    return sorted((p.kind, p.file) for p in audit(source)[0].problems)


def half(path: Path) -> bytes:
    return path.read_bytes()[: path.stat().st_size // 2]


# --- what a data set holds ------------------------------------------------------------------------------------------


def test_a_healthy_folder_has_no_problems(tree: Tree):
    contents, indexes = audit(tree.open())
    assert contents.problems == ()
    assert contents.images == {"train": 1, "val": 1}
    assert [(c.id, c.name, c.images["train"], c.pixels["val"]) for c in contents.classes] == [
        (0, "background", 1, 2),
        (1, "cat", 1, 2),
        (2, "dog", 1, 1),
    ]
    assert contents.void_share == {"train": 1 / 6, "val": 1 / 6}
    assert contents.sizes["train"] == {"smallest": "3×2", "median": "3×2", "largest": "3×2", "different": "1"}
    assert indexes["train"].ids == tree.open().ids("train")
    json.dumps(contents.to_dict())


def test_sizes_are_width_by_height_and_ordered_by_area(tree: Tree):
    for n, (height, width) in enumerate([(4, 1), (10, 10), (3, 3)]):
        tree.add(f"x{n}", noise(height, width), np.ones((height, width), np.uint8))
    sizes = audit(tree.open())[0].sizes["train"]
    assert sizes == {"smallest": "1×4", "median": "3×3", "largest": "10×10", "different": "4"}


def test_the_generated_set_has_no_problems():
    contents, _ = audit(Shapes(size=32, train=60, val=40))
    assert contents.problems == () and contents.images == {"train": 60, "val": 40}


def test_an_empty_validation_split(tmp_path: Path):
    tree = Tree(tmp_path / "set")
    tree.add("healthy")
    (tree.root / "dataset.toml").write_text('classes = ["background", "cat", "dog"]\nval = 0\n')
    source = open_folder(tree.root)
    contents, indexes = audit(source)
    assert contents.problems == () and contents.images == {"train": 1, "val": 0}
    assert contents.sizes["val"] == {} and contents.void_share["val"] == 0
    scenario = build_scenario(parse_spec("folder:1-1@overlapped"), source, indexes["train"], indexes["val"])
    assert [s.test_ids for s in scenario.steps] == [(), ()]
    save_grid(source, None, tmp_path / "a.png")


# --- diseases ---------------------------------------------------------------------------------------------------------


def test_one_of_each_disease(tree: Tree, tmp_path: Path):
    tree.add("range", mask=np.array([[0, 3, 3], [9, 1, 255]], np.uint8))
    tree.add("size", mask=MASK.T.copy())
    tree.add("text", mask=b"a note named .png")
    tree.add("nothing", mask=b"")
    tree.add("empty", mask=np.zeros((2, 3), np.uint8))
    tree.add("void", mask=np.full((2, 3), 255, np.uint8))
    tree.add("jpeg", mask=np.ones((2, 3), np.uint8), suffix="jpg")
    tree.add("disguised", mask=np.ones((2, 3), np.uint8))
    Image.fromarray(np.ones((2, 3), np.uint8)).save(tree.root / "masks/train/disguised.png", format="JPEG")
    tree.add("cut", noise(40, 40), np.random.default_rng(1).integers(0, 3, (40, 40)).astype(np.uint8))
    (tree.root / "masks/train/cut.png").write_bytes(half(tree.root / "masks/train/cut.png"))
    tree.add("cutimage", noise(40, 40), np.ones((40, 40), np.uint8))
    (tree.root / "images/train/cutimage.png").write_bytes(half(tree.root / "images/train/cutimage.png"))
    tree.add("cutjpeg", noise(40, 40), np.ones((40, 40), np.uint8))
    (tree.root / "images/train/cutjpeg.png").unlink()
    Image.fromarray(noise(40, 40)).save(tree.root / "images/train/cutjpeg.jpg")
    (tree.root / "images/train/cutjpeg.jpg").write_bytes(half(tree.root / "images/train/cutjpeg.jpg"))
    tree.add("textimage", image=b"no picture")
    tree.add("both", image=b"no picture", mask=b"no picture")
    tree.add("twice")
    Image.fromarray(noise()).save(tree.root / "images/train/twice.webp")
    tree.add("lonely")
    (tree.root / "masks/train/lonely.png").unlink()
    tree.add("orphan")
    (tree.root / "images/train/orphan.png").unlink()
    tree.add("valrange", mask=np.array([[0, 200, 1], [2, 0, 0]], np.uint8), split="val")

    source = tree.open()
    contents, indexes = audit(source)
    problems = sorted((p.kind, p.file) for p in contents.problems)
    assert problems == sorted(
        [
            ("value out of range", tree.file("masks", "range.png")),
            ("value out of range", tree.file("masks", "valrange.png", "val")),
            ("size mismatch", tree.file("images", "size.png")),
            ("unreadable", tree.file("masks", "text.png")),
            ("unreadable", tree.file("masks", "nothing.png")),
            ("unreadable", tree.file("masks", "cut.png")),
            ("unreadable", tree.file("masks", "both.png")),
            ("unreadable", tree.file("images", "both.png")),
            ("unreadable", tree.file("images", "textimage.png")),
            ("unreadable", tree.file("images", "cutimage.png")),
            ("unreadable", tree.file("images", "cutjpeg.jpg")),
            ("empty mask", tree.file("masks", "empty.png")),
            ("empty mask", tree.file("masks", "void.png")),
            ("saved as JPEG", tree.file("masks", "jpeg.jpg")),
            ("saved as JPEG", tree.file("masks", "disguised.png")),
            ("duplicate id", tree.file("images", "twice.webp")),
            ("no mask", tree.file("images", "lonely.png")),
            ("no image", tree.file("masks", "orphan.png")),
        ]
    )
    details = {(p.kind, Path(p.file).stem): p.detail for p in contents.problems}
    assert "3 (2 pixels), 9 (1 pixel)" in details["value out of range", "range"]
    assert "0..2" in details["value out of range", "range"]
    assert details["size mismatch", "size"].startswith("image 3×2, mask 2×3")
    assert tree.file("masks", "size.png") in details["size mismatch", "size"]
    assert "truncated" in details["unreadable", "cutimage"]
    assert details["empty mask", "empty"] == "contains no class; no step will use it"
    assert "If 255 is a class, add to dataset.toml: values = {255" in details["empty mask", "void"]
    assert not any(p.detail.startswith(p.file) for p in contents.problems)  # the path is not said again

    # A scenario and its picture on what is left, and the same again from the cache.
    scenario = build_scenario(parse_spec("folder:1-1@overlapped"), source, indexes["train"], indexes["val"])
    save_grid(source, scenario, tmp_path / "grid.png")
    save_grid(source, None, tmp_path / "grid2.png")
    assert Image.open(tmp_path / "grid.png").info["Software"] == "sdrseg"
    assert sorted((p.kind, p.file) for p in audit(tree.open())[0].problems) == problems


def test_many_stray_values_are_counted(tree: Tree):
    """As in a mask saved as JPEG."""
    tree.add("blurred", image=noise(8, 10), mask=np.arange(80, dtype=np.uint8).reshape(8, 10))
    (problem,) = audit(tree.open())[0].problems
    found = ", ".join(f"{value} (1 pixel)" for value in range(3, 13))
    assert problem.detail == f"{found}, … (77 in all); the classes are 0..2 and 255 is void"
    with pytest.raises(DataError, match=r"value 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, … \(77 in all\) is neither a class"):
        class_index(tree.open(), "train").require_sound(tree.open())


def test_a_class_without_images(tree: Tree):
    tree.classes = ("background", "cat", "dog", "yeti")
    tree.add("yeti", mask=np.full((2, 3), 3, np.uint8), split="val")
    (problem,) = audit(tree.open())[0].problems
    assert str(problem) == "folder: class without images: class 3 (yeti) occurs in no train image"


def test_every_file_broken(tmp_path: Path):
    tree = Tree(tmp_path / "set")
    for n in range(3):
        tree.add(f"{n}", image=b"x", mask=b"y", split="val" if n == 2 else "train")
    source = tree.open()
    contents, _ = audit(source)
    assert Counter(p.kind for p in contents.problems) == {"unreadable": 6, "class without images": 4}
    save_grid(source, None, tmp_path / "grid.png")


# --- pictures of all kinds --------------------------------------------------------------------------------------------


def test_images_are_rotated_by_their_exif_orientation(tree: Tree):
    """A camera's portrait: stored lying, shown upright; its mask was drawn upright."""
    upright = np.random.default_rng(0).integers(0, 256, (16, 8, 3)).astype(np.uint8)
    exif = Image.Exif()
    exif[0x0112] = 6  # turn by 90° clockwise to see it
    tree.add("portrait", mask=np.ones((16, 8), np.uint8))
    path = tree.root / "images/train/portrait.png"
    Image.fromarray(np.rot90(upright).copy()).save(path, exif=exif)
    source = tree.open()
    (id,) = (id for id in source.ids("train") if "portrait" in id)
    assert np.array_equal(source.image(id), upright)
    assert audit(source)[0].problems == ()
    Image.fromarray(np.ones((8, 16), np.uint8)).save(tree.root / "masks/train/portrait.png")  # not turned
    (problem,) = audit(tree.open())[0].problems
    assert problem.kind == "size mismatch" and "turned as their EXIF data say, masks are not" in problem.detail
    with pytest.raises(DataError, match="turn the mask like the image"):
        tree.open().pair(id)


def test_a_folder_that_may_not_be_read_is_named(tree: Tree, monkeypatch):
    real = os.scandir

    def scandir(path: object) -> object:
        if Path(str(path)).name == "masks":
            raise PermissionError(13, "Permission denied")
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(DataError, match=r"masks: cannot be read \(Permission denied\)\. Check its permissions"):
        tree.open()


@pytest.mark.filterwarnings("ignore::UserWarning:PIL")
def test_broken_exif_is_one_unreadable_file_at_most(tree: Tree):
    """Pillow may fail in ways of its own while it turns an image with bad EXIF data."""
    exif = Image.Exif()
    exif[0x0112], exif[0x010F], exif[0x011A] = 6, "maker", 72.0
    tree.add("camera", mask=np.ones((8, 8), np.uint8))
    (tree.root / "images/train/camera.png").unlink()
    path = tree.root / "images/train/camera.jpg"
    Image.fromarray(noise(8, 8)).save(path, exif=exif)
    source, whole = tree.open(), path.read_bytes()
    index = class_index(source, "train")
    start = whole.index(b"Exif") + 6
    kinds = set()
    for place in range(start, start + 60):
        for value in (0, 2, 5, 12, 255):
            path.write_bytes(whole[:place] + bytes([value]) + whole[place + 1 :])
            kinds |= {(p.kind, p.file) for p in _image_problems(source, index, None)}
    assert kinds == {("unreadable", str(path))}


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGBA", "CMYK", "I;16", "I", "F"])
def test_images_of_every_colour_mode_become_rgb(tree: Tree, mode):
    tree.add("x")
    (tree.root / "images/train/x.png").unlink()
    Image.new(mode, (3, 2)).save(tree.root / "images/train/x.tif")
    source = tree.open()
    (id,) = (id for id in source.ids("train") if id.endswith("x"))
    image = source.image(id)
    assert image.shape == (2, 3, 3) and image.dtype == np.uint8
    assert found(source) == []


def test_16_bit_images_keep_their_brightness(tree: Tree):
    tree.add("x", np.array([[0, 256, 65535], [32768, 255, 1]], np.uint16))
    source = tree.open()
    (id,) = (id for id in source.ids("train") if id.endswith("x"))
    assert source.image(id)[:, :, 1].tolist() == [[0, 1, 255], [128, 0, 0]]


# --- which protocol it obeys ------------------------------------------------------------------------------------------


def told(text: str, masks: dict[str, set[int]]) -> tuple[Scenario, list[StepFacts], str | None]:
    """A scenario on images that hold these classes, its facts and a better order."""
    present = np.zeros((len(masks), 256), bool)
    for row, values in enumerate(masks.values()):
        present[row, list(values)] = True
    index = SimpleNamespace(ids=tuple(masks), present=present)
    data = SimpleNamespace(name="folder", classes=("other", *"cde"), score_background=True, partition="latest")
    if text.endswith("+balanced"):
        text, data.partition = text.removesuffix("+balanced"), "balanced"
    scenario = build_scenario(parse_spec(f"folder:{text}"), data, index, index)
    return scenario, step_facts(scenario, index), better_order(scenario, index)


def facts(text: str, masks: dict[str, set[int]]) -> list[StepFacts]:
    return told(text, masks)[1]


MIXED = {"a": {0, 1}, "b": {0, 1, 2}, "c": {0, 2, 3, 255}, "d": {0, 1, 3}, "e": {0}}


def test_facts_are_counted_by_the_raw_labels():
    assert facts("1-1@overlapped", MIXED) == [
        StepFacts(0, train=3, with_old=0, with_future=2, seen_before=0),
        StepFacts(1, train=2, with_old=1, with_future=1, seen_before=1),
        StepFacts(2, train=2, with_old=2, with_future=0, seen_before=2),
    ]
    assert facts("1-1@disjoint", MIXED) == [
        StepFacts(0, train=1, with_old=0, with_future=0, seen_before=0),
        StepFacts(1, train=1, with_old=1, with_future=0, seen_before=0),
        StepFacts(2, train=2, with_old=2, with_future=0, seen_before=0),
    ]
    assert facts("1-1@disjoint", {"a": {1}})[1:] == [StepFacts(1, 0, 0, 0, 0), StepFacts(2, 0, 0, 0, 0)]


FOUR_TIMES = {"x": {1, 2, 3}, "y": {1}, "z": {2, 3}}


@pytest.mark.parametrize(
    ("task", "masks", "sentence"),
    [
        ("offline", MIXED, "There is only one step, so all protocols are the same."),
        (
            "1-1@disjoint",
            MIXED,
            "No image is used twice, and none contains a class of a later step. In the later steps, 3 of 3 images "
            "contain old classes, which are labelled as other.",
        ),
        (
            "1-1@sequential",
            MIXED,
            "No image is used twice, and none contains a class of a later step. In the later steps, 3 of 3 images "
            "contain old classes, whose labels sequential training keeps.",
        ),
        (
            "1-1@overlapped",
            FOUR_TIMES,  # x is used three times, z twice
            "2 of the 3 training images are used in more than one step; in 3 cases an image contains a class of a "
            "later step, which is labelled as other there. In the later steps, 3 of 4 images contain old classes, "
            "which are labelled as other.",
        ),
        (
            "1-1@overlapped",
            {"a": {1}, "b": {2}, "c": {3}},
            "No image is used twice, and none contains a class of a later step. No image of a later step contains an "
            "old class, so all protocols give the same labels.",
        ),
        (
            "2-1@disjoint+balanced",
            {"a": {1, 3}, "b": {1, 3}, "c": {3}},
            "No image is used twice, but in 1 case an image contains a class of a later step, which is labelled as "
            "other. In the later steps, 1 of 2 images contains old classes, which are labelled as other.",
        ),
    ],
)
def test_which_protocol_the_images_obey(task, masks, sentence):
    scenario, found, _ = told(task, masks)
    assert protocol_summary(scenario, found) == sentence


def test_an_order_in_which_every_step_has_images():
    masks = {"a": {1, 2, 3}, "b": {1, 2}, "c": {1}, "d": {1, 3}}  # 1 is everywhere, so it has to come first
    assert told("1,2/3@disjoint", masks)[2] is None
    _, found, order = told("2/3/1@sequential", masks)
    assert [step.train for step in found] == [0, 0, 4] and order == "folder:c/d/e@sequential"
    assert [step.train for step in told("c/d/e@sequential", masks)[1]] == [1, 1, 2]
    assert told("2/3/1@overlapped", masks)[2] is None
    assert told("1-1@disjoint", {"a": {1, 2, 3}})[2] is None  # there is none


# --- the picture ------------------------------------------------------------------------------------------------------


def test_a_class_has_one_colour_everywhere(tree: Tree, tmp_path: Path):
    tree.add("flat", image=np.full((40, 60, 3), 128, np.uint8), mask=np.full((40, 60), 2, np.uint8))
    save_grid(tree.open(), None, tmp_path / "a.png")
    drawn = {tuple(pixel) for pixel in np.asarray(Image.open(tmp_path / "a.png").convert("RGB")).reshape(-1, 3)}
    assert class_colours([2])[0] in drawn and (0, 128, 0) not in drawn  # not VOC's, which predict and report do not use


def test_names_that_look_like_formulas_or_private_ones(tree: Tree, tmp_path: Path):
    tree.classes = ("_background_", "$cat^$", r"\dog{$")
    tree.add("$x^$", image=b"broken")
    source = tree.open()
    _, indexes = audit(source)
    scenario = build_scenario(parse_spec("folder:1-1@overlapped"), source, indexes["train"], indexes["val"])
    save_grid(source, scenario, tmp_path / "a.png")
    assert Image.open(tmp_path / "a.png").size[0] > 1000


def test_more_steps_than_a_picture_can_show(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(picture, "MAX_ROWS", 4)
    source = Shapes(size=32, train=40, val=2)
    index = SimpleNamespace(ids=source.ids("train"), present=np.ones((40, 256), bool))
    scenario = build_scenario(parse_spec("shapes:random-600"), source, index, index)
    assert len(scenario.steps) == 600
    save_grid(source, scenario, tmp_path / "a.png")
    assert Image.open(tmp_path / "a.png").size[1] < 4 * 200


@pytest.mark.parametrize("size", [(1, 3000), (3000, 1), (1, 1)])
def test_a_picture_of_thin_images(tree: Tree, tmp_path: Path, size):
    tree.add("thin", noise(*size), np.ones(size, np.uint8))
    save_grid(tree.open(), None, tmp_path / "a.png")


def test_only_our_own_picture_may_be_replaced(tmp_path: Path):
    ours = tmp_path / "ours.png"
    check_may_write(ours)
    save_grid(Shapes(size=32, train=2, val=1), None, ours)
    check_may_write(ours)
    Image.new("L", (2, 2)).save(tmp_path / "theirs.png")
    (tmp_path / "text.png").write_text("notes")
    (tmp_path / "folder.png").mkdir()
    for name in ("theirs.png", "text.png", "folder.png"):
        with pytest.raises(SdrsegError, match=r"exists and was not made by sdrseg\. Choose another"):
            check_may_write(tmp_path / name)
    with pytest.raises(SdrsegError, match="name too long"):
        check_may_write(tmp_path / ("x" * 300))
    with pytest.raises(SdrsegError, match=r"text\.png/a\.png: .*Choose another"):
        check_may_write(tmp_path / "text.png/a.png")


def test_a_problem_reads_as_one_line():
    assert str(Problem("a.png", "unreadable", "why")) == "a.png: unreadable: why"
