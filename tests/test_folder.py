"""Own data as image and mask files: what is read, how it is split, and what the messages say."""

from __future__ import annotations

import hashlib
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from formats import save_heic
from sdrseg.datasets.folder import Folder, open_folder
from sdrseg.errors import DataError

MASK = [[0, 1, 2], [2, 255, 1]]
CLASSES = 'classes = ["background", "cat", "dog"]\n'
COLOURS = 'colours = ["#000000", "#800000", "#008000"]\n'


def save(path: Path, pixels: object, dtype: type = np.uint8, mode: str | None = None) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    picture = Image.fromarray(np.array(pixels, dtype))
    if mode == "P":
        picture.putpalette([0] * 768)  # all entries alike: only the indices can tell the classes apart
    picture.save(path)
    return path


def add(root: Path, *ids: str, images: str = "images", masks: str = "masks", mask: object = MASK) -> None:
    for id in ids:
        save(root / images / f"{id}.jpg", np.zeros((2, 3, 3)))
        save(root / masks / f"{id}.png", mask)


def write(root: Path, toml: str = CLASSES, **lists: str) -> Path:
    root.mkdir(exist_ok=True)
    (root / "dataset.toml").write_text(toml)
    for name, text in lists.items():
        (root / f"{name}.txt").write_bytes(text.encode())
    return root


def one_mask(root: Path, toml: str, pixels: object, dtype: type = np.uint8, mode: str | None = None) -> Folder:
    """A data set of one image whose mask is given."""
    write(root, toml)
    save(root / "images/a.png", np.zeros((*np.shape(pixels)[:2], 3)))
    save(root / "masks/a.png", pixels, dtype, mode)
    return Folder(root)


def problems(folder: Folder) -> list[tuple[str, str]]:
    return [(Path(p.file).name, p.kind) for p in folder.problems()]


@contextmanager
def fails(*words: object) -> Iterator[None]:
    """The block must raise a DataError whose message holds all the words."""
    with pytest.raises(DataError) as caught:
        yield
    assert [word for word in map(str, words) if word not in str(caught.value)] == [], str(caught.value)


# --- masks ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [None, "P"])
def test_grey_and_palette_masks_contain_class_ids(tmp_path: Path, mode: str | None) -> None:
    folder = one_mask(tmp_path, CLASSES, [[0, 1, 2], [7, 254, 255]], mode=mode)
    label = folder.mask("a")
    assert label.dtype == np.uint8
    assert label.tolist() == [[0, 1, 2], [7, 254, 255]]  # foreign values pass: the audit names them
    assert folder.image("a").shape == (2, 3, 3)
    assert (folder.name, folder.classes, folder.score_background) == ("folder", ("background", "cat", "dog"), True)


def test_the_ignore_value_becomes_void(tmp_path: Path) -> None:
    assert one_mask(tmp_path / "8", CLASSES + "ignore = 9", [[0, 9, 2]]).mask("a").tolist() == [[0, 255, 2]]
    wide = one_mask(tmp_path / "16", CLASSES + "ignore = 65535", [[0, 65535, 2]], np.uint16)
    assert wide.mask("a").tolist() == [[0, 255, 2]]
    assert wide.mask("a").dtype == np.uint8


def test_a_foreign_16_bit_value_is_named(tmp_path: Path) -> None:
    folder = one_mask(tmp_path, CLASSES, [[0, 258, 258, 255]], np.uint16)  # 258 would be 2 in eight bits
    with fails(
        tmp_path / "masks/a.png",
        "value 258 (2 pixels)",
        "0 (background), 1 (cat), 2 (dog)",
        "255",
        tmp_path / "dataset.toml",
    ):
        folder.mask("a")
    with fails(tmp_path / "masks/a.png", "value 3 (1 pixel)"):
        one_mask(tmp_path, CLASSES, [[0, 1, 2, 3]], np.uint16).mask("a")


def test_colour_masks(tmp_path: Path) -> None:
    pixels = [[[0, 0, 0], [128, 0, 0], [0, 128, 0], [255, 255, 255]]]
    folder = one_mask(tmp_path, CLASSES + COLOURS + 'ignore_colour = "#FFFFFF"', pixels)
    assert folder.mask("a").tolist() == [[0, 1, 2, 255]]


def test_an_unknown_colour_is_named_with_its_nearest(tmp_path: Path) -> None:
    pixels = [[[0, 0, 0], [130, 2, 1], [130, 2, 1], [9, 9, 9]]]
    folder = one_mask(tmp_path, CLASSES + COLOURS, pixels)
    with fails(
        tmp_path / "masks/a.png", "2 pixels", "#820201", "#800000", "'cat'", "1 more", "3 pixels", "dataset.toml"
    ):
        folder.mask("a")


def test_colours_without_table_and_table_without_colours(tmp_path: Path) -> None:
    with fails(tmp_path / "1/masks/a.png", "#800000", "no colour table", tmp_path / "1/dataset.toml"):
        one_mask(tmp_path / "1", CLASSES, [[[128, 0, 0]]]).mask("a")
    with fails(tmp_path / "2/masks/a.png", "contains values", tmp_path / "2/dataset.toml", "Save this mask as RGB"):
        one_mask(tmp_path / "2", CLASSES + COLOURS, [[0, 1]], mode="P").mask("a")


def test_masks_of_any_picture_format(tmp_path: Path) -> None:
    write(tmp_path)
    add(tmp_path, "a")
    (tmp_path / "masks/a.png").unlink()
    save(tmp_path / "masks/a.jpg", np.ones((2, 3)))
    folder = Folder(tmp_path)
    assert folder.mask("a").tolist() == [[1, 1, 1], [1, 1, 1]]
    assert folder.file("a", "mask") == str(tmp_path / "masks/a.jpg")
    assert folder.file("a", "image") == str(tmp_path / "images/a.jpg")
    assert folder.mask_content("a") == (tmp_path / "masks/a.jpg").read_bytes()


def test_heic_photographs_are_read_or_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pixels = np.arange(64 * 64 * 3).reshape(64, 64, 3) // 97
    save_heic(write(tmp_path) / "images/IMG_1.HEIC", pixels)
    save(tmp_path / "masks/IMG_1.png", np.ones((64, 64)))
    folder = Folder(tmp_path)
    assert folder.ids("train") == ("IMG_1",) and not problems(folder)
    assert abs(folder.image("IMG_1").astype(int) - pixels).max() <= 3  # YUV rounds
    monkeypatch.setitem(sys.modules, "pillow_heif", None)  # not installed
    with pytest.raises(DataError, match=r"IMG_1.HEIC: a HEIC photograph.* pip install 'sdrseg\[heif\]'"):
        folder.image("IMG_1")


def test_coding_changes_with_what_decides_the_values(tmp_path: Path) -> None:
    add(tmp_path, "a")
    swapped = COLOURS.replace("#000000", "#0000ff")
    settings = [
        CLASSES,
        CLASSES + "ignore = 7",
        CLASSES + COLOURS,
        CLASSES + swapped,
        'classes = ["background", "cat"]',
    ]
    assert len({Folder(write(tmp_path, toml)).coding for toml in settings}) == len(settings)
    assert Folder(write(tmp_path, CLASSES + "seed = 1")).coding == Folder(write(tmp_path, CLASSES)).coding


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_masks_come_back_as_they_were_written(data: st.DataObject) -> None:
    colours = data.draw(st.lists(st.integers(0, 0xFFFFFF), min_size=3, max_size=40, unique=True))
    count = len(colours) - 1  # the last is the ignore colour
    height, width = data.draw(st.tuples(st.integers(1, 6), st.integers(1, 6)))
    drawn = data.draw(st.lists(st.integers(0, count), min_size=height * width, max_size=height * width))
    ignore = data.draw(st.integers(count, 65535))
    rgb = [(colours[v] // 65536, colours[v] // 256 % 256, colours[v] % 256) for v in drawn]
    expected = np.reshape([255 if v == count else v for v in drawn], (height, width)).tolist()
    wide = np.reshape([ignore if v == count else v for v in drawn], (height, width))
    names = f"classes = {['background', *(f'c{i}' for i in range(1, count))]}\n"
    table = [f"#{colour:06x}" for colour in colours]
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        toml = f"{names}colours = {table[:-1]}\nignore_colour = {table[-1]!r}"
        assert one_mask(root / "rgb", toml, np.reshape(rgb, (height, width, 3))).mask("a").tolist() == expected
        assert one_mask(root / "16", f"{names}ignore = {ignore}", wide, np.uint16).mask("a").tolist() == expected
        if ignore < 256:
            assert one_mask(root / "8", f"{names}ignore = {ignore}", wide).mask("a").tolist() == expected


# --- the class list ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("toml", "words"),
    [
        ("classes = ]", ["TOML", "line 1"]),
        ('clases = ["a", "b"]', ["'clases'", "'classes'"]),
        (CLASSES + 'colors = ["#000000"]', ["'colors'", "'colours'"]),
        ('classes = "cat"', ["classes", "'cat'", "list of names"]),
        ("classes = [1, 2]", ["classes", "[1, 2]"]),
        (CLASSES + 'val = "much"', ["val", "'much'", "0 to below 1"]),
        (CLASSES + "val = true", ["val", "True"]),
        (CLASSES + "val = 1.0", ["val", "1.0"]),
        (CLASSES + "seed = 0.5", ["seed", "0.5"]),
        (CLASSES + "score_background = 0", ["score_background", "true or false"]),
        (CLASSES + "ignore = 65536", ["ignore", "65536", "65535"]),
        (CLASSES + "ignore = 2", ["ignore = 2", "'dog'"]),
        ('classes = ["a", "b", "a "]', ["entry 1 and entry 3 both name the class 'a'"]),
        ('classes = ["a", " "]', ["entry 2", "empty"]),
        ("classes = []", ["no classes"]),
        ('classes = ["background"]', ["the background is the only class"]),
        (CLASSES + 'background = "catt"', ["background = 'catt' is not a class", "'cat'"]),
        (CLASSES + "background = 1.5", ["background", "1.5", "none"]),
        (CLASSES + 'values = ["cat"]', ["values", "a table like"]),
        (CLASSES + "values = {1 = 2}", ["values", "a table like"]),
        (CLASSES + 'values = {a = "cat"}', ["'a' is not a value", "10-19"]),
        (CLASSES + 'values = {9-3 = "cat"}', ["'9-3' is not a value"]),
        (CLASSES + 'values = {70000 = "cat"}', ["'70000' is not a value"]),
        (CLASSES + 'values = {1 = "cta"}', ["'cta' is not a class", "'cat'"]),
        (CLASSES + 'values = {1-5 = "cat", 5 = "dog"}', ["value 5 occurs twice"]),
        (CLASSES + COLOURS + 'values = {1 = "cat"}', ["values and colours are both set"]),
        ('values = {0 = "ignore", 1 = "a"}\nbackground = "b"', ["background = 'b' is not a class"]),
        (CLASSES + 'format = "cocoa"', ["format", "coco"]),
        (CLASSES + 'score = "train"', ["score", '"val" or "test"']),
        (f"classes = {[str(i) for i in range(255)]}", ["255 classes", "254"]),
        (CLASSES + 'colours = ["#000000", "#800000"]', ["2 colours for 3 classes"]),
        (CLASSES + 'colours = ["#000000", "#80000", "#008000"]', ["'#80000'", "#rrggbb"]),
        (CLASSES + 'colours = ["#00000f", "#800000", "#00000F"]', ["'#00000f'", "twice"]),
        (CLASSES + COLOURS + 'ignore_colour = "#800000"', ["'#800000'", "twice"]),
        (CLASSES + 'ignore_colour = "#800000"', ["'#800000'", "without colours"]),
    ],
)
def test_mistakes_in_dataset_toml_are_named(tmp_path: Path, toml: str, words: list[str]) -> None:
    add(tmp_path, "a")
    with fails(tmp_path / "dataset.toml", *words):
        Folder(write(tmp_path, toml))


def test_the_settings_in_the_documentation_are_true(tmp_path: Path) -> None:
    page = (Path(__file__).parent.parent / "docs/own-data.md").read_text()
    blocks = [part.split("```")[0] for part in page.split("```toml\n")[1:]]
    _, traffic, sheep, ids, values, merged, _, colours = (
        blocks  # small.toml: test_own_stories.py; names: test_formats.py
    )
    assert one_mask(tmp_path / "traffic", traffic, [[0, 2]]).classes == ("other", "bus", "car", "person")
    assert one_mask(tmp_path / "sheep", sheep, [[0, 255]]).mask("a").tolist() == [[0, 1]]
    assert one_mask(tmp_path / "ids", ids, MASK).mask("a").tolist() == MASK
    fire = one_mask(tmp_path / "values", values, [[0, 127, 254, 12, 200, 77, 255]])
    assert fire.classes == ("background", "fire", "smoke") and fire.mask("a").tolist() == [[0, 1, 2, 2, 255, 0, 255]]
    pixels = [[[0, 0, 0], [128, 0, 0], [192, 0, 0], [255, 255, 255]]]
    assert one_mask(tmp_path / "merged", merged, pixels).mask("a").tolist() == [[0, 1, 1, 255]]
    pixels = [[[0, 0, 0], [128, 0, 0], [0, 128, 0], [255, 255, 255]]]
    assert one_mask(tmp_path / "colours", colours, pixels).mask("a").tolist() == [[0, 1, 2, 255]]


def test_254_classes_fit(tmp_path: Path) -> None:
    folder = one_mask(tmp_path, f"classes = {['background', *map(str, range(1, 254))]}", [[253, 254, 255]], np.uint8)
    assert folder.mask("a").tolist() == [[253, 254, 255]]


def test_classes_txt(tmp_path: Path) -> None:
    add(tmp_path, "a")
    names = tmp_path / "classes.txt"
    names.write_bytes("\ufeffbackground\r\ncat\r\nnaïve dog\r\n\r\n\n".encode())
    assert open_folder(tmp_path).classes == ("background", "cat", "naïve dog")
    names.write_text("background\n\ncat\n")
    with fails(names, "line 2"):
        Folder(tmp_path)
    names.write_bytes(b"background\ncaf\xe9\n")
    with fails(names, "UTF-8"):
        Folder(tmp_path)
    write(tmp_path)
    with fails(tmp_path, "dataset.toml", "classes.txt", "Keep one"):
        Folder(tmp_path)


def template_of(root: Path, *words: str) -> dict[str, object]:
    """The suggestion in the message, which must be usable as it stands."""
    with pytest.raises(DataError) as caught:
        Folder(root)
    assert all(word in str(caught.value) for word in (*words, str(root / "dataset.toml")))
    toml = str(caught.value).split("\n\n", 1)[1]
    Folder(write(root, toml))
    return tomllib.loads(toml)


def test_without_class_list_a_template_is_offered(tmp_path: Path) -> None:
    add(tmp_path / "8", "a")
    template = template_of(tmp_path / "8", "the masks contain the values 0, 1, 2, 255")
    assert template == {"classes": ["background", "class 1", "class 2"], "ignore": 255}
    add(tmp_path / "binary", "a", mask=[[0, 255]])
    assert template_of(tmp_path / "binary", "0, 255") == {"values": {"0": "background", "255": "class 1"}}
    add(tmp_path / "sparse", "a", mask=[[0, 127, 254]])
    expected = {"0": "background", "127": "class 1", "254": "class 2"}
    assert template_of(tmp_path / "sparse", "0, 127, 254") == {"values": expected}
    save(tmp_path / "wide/masks/a.png", [[0, 300, 600]], np.uint16)
    save(tmp_path / "wide/images/a.png", [[0, 1, 2]])
    expected = {"0": "background", "300": "class 1", "600": "class 2"}
    assert template_of(tmp_path / "wide", "0, 300, 600") == {"values": expected}
    assert Folder(tmp_path / "wide").mask("a").tolist() == [[0, 1, 2]]
    scene = np.repeat(np.repeat([[0, 127], [254, 0]], 20, axis=0), 20, axis=1)
    save(tmp_path / "jpeg/masks/a.jpg", scene)
    save(tmp_path / "jpeg/images/a.jpg", scene)
    expected = {"0-63": "background", "64-190": "class 1", "191-255": "class 2"}
    assert template_of(tmp_path / "jpeg", "JPEG changes values") == {"values": expected}
    assert np.array_equal(Folder(tmp_path / "jpeg").mask("a"), scene // 127)
    for name, lost in (("ids", scene // 127), ("coloured", np.stack([scene, scene // 2, scene // 3], axis=2))):
        save(tmp_path / name / "masks/a.jpg", lost)
        save(tmp_path / name / "images/a.jpg", scene)
        with fails(tmp_path / name, "JPEG", "PNG"):
            Folder(tmp_path / name)
    add(tmp_path / "rgb", "a", mask=[[[0, 0, 0], [255, 128, 0]]])
    template = template_of(tmp_path / "rgb", "the masks contain the colours #000000, #ff8000")
    assert template == {"values": {"#000000": "background", "#ff8000": "class 1"}}
    save(tmp_path / "16/masks/a.png", [[0, 1, 65535]], np.uint16)
    save(tmp_path / "16/images/a.png", [[0, 1, 2]])
    assert template_of(tmp_path / "16", "0, 1, 65535")["values"]["65535"] == "ignore"


# --- splits -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["{kind}/{split}", "{split}/{kind}"])
def test_folders_make_the_split(tmp_path: Path, layout: str) -> None:
    write(tmp_path, train="1\n", val="2\n")  # lists come second
    for split, ids in (("train", ["1", "2"]), ("val", ["1", "deep/3"])):
        add(tmp_path, *ids, **{kind: layout.format(kind=kind, split=split) for kind in ("images", "masks")})
    folder = open_folder(tmp_path)
    assert folder.ids("train") == ("train/1", "train/2")
    assert folder.ids("val") == ("val/1", "val/deep/3")
    assert folder.mask("val/deep/3").tolist() == MASK
    first, second = (layout.format(kind="images", split=split) for split in ("train", "val"))
    assert folder.split_by == f"folders {first} and {second}"
    assert folder.problems() == []


@pytest.mark.parametrize("masks", ["stuffthingmaps/{}2017", "annotations/stuff_{}2017_pixelmaps", "masks/{}"])
def test_masks_of_the_parts_in_one_folder(tmp_path: Path, masks: str) -> None:
    write(tmp_path)
    for part, ids in (("train", "ab"), ("val", "c")):
        add(tmp_path, *ids, images=f"{part}2017", masks=masks.format(part))
    folder = open_folder(tmp_path)
    assert (folder.ids("train"), folder.ids("val")) == (("train/a", "train/b"), ("val/c",))
    assert folder.mask("val/c").tolist() == MASK and folder.problems() == []


def test_lists_make_the_split(tmp_path: Path) -> None:
    add(tmp_path, "c", "a", "b", "site.1", "scan.png", "sub/x", "unused")
    write(tmp_path, train="c\r\n\r\na.jpg\r\nscan.png\r\nsite.1", val="sub/x.PNG\nb\n\n")
    folder = Folder(tmp_path)
    assert folder.ids("train") == ("a", "c", "scan.png", "site.1")
    assert folder.ids("val") == ("b", "sub/x")
    assert folder.split_by == "lists train.txt and val.txt"
    assert folder.problems() == []


def test_mistakes_in_lists_are_problems(tmp_path: Path) -> None:
    add(tmp_path, "a", "b", "c", "bare")
    (tmp_path / "masks/bare.png").unlink()
    folder = Folder(write(tmp_path, train="a\nb\na\ngone\nbare\n", val="c\n\nb\n"))
    assert folder.ids("train") == ("a",)
    assert folder.ids("val") == ("b", "c")
    found = {p.kind: p.detail for p in folder.problems()}
    assert {p.file for p in folder.problems()} == {str(tmp_path / "train.txt")}
    expected = {
        "duplicate id": ["line 3", "'a'", "line 1"],
        "no image": ["line 4", "'gone'"],
        "no mask": ["line 5", "'bare'"],
        "in train and val": ["line 2", "'b'", "line 3"],
    }
    assert found.keys() == expected.keys()
    for kind, words in expected.items():
        assert all(word in found[kind] for word in words), found[kind]


def test_files_that_do_not_pair_are_problems(tmp_path: Path) -> None:
    write(tmp_path)
    add(tmp_path, "a", "b", "image only", "mask only")
    (tmp_path / "masks/image only.png").unlink()
    (tmp_path / "images/mask only.jpg").unlink()
    save(tmp_path / "images/a.png", np.ones((2, 3, 3)))
    folder = Folder(tmp_path)
    assert sorted(folder.ids("train") + folder.ids("val")) == ["a", "b"]
    assert problems(folder) == [("a.png", "duplicate id"), ("image only.jpg", "no mask"), ("mask only.png", "no image")]


def test_images_without_a_mask_are_counted_in_a_note(tmp_path: Path) -> None:
    write(tmp_path)
    add(tmp_path, "a", "b", "c", "d")
    assert open_folder(tmp_path).notes == ()
    (tmp_path / "masks/c.png").unlink()
    file = tmp_path / "images/c.jpg"
    assert open_folder(tmp_path).notes == (f"1 image has no mask and is left out: {file}",)
    (tmp_path / "masks/d.png").unlink()
    assert open_folder(tmp_path).notes == (f"2 images have no mask and are left out, such as {file}",)
    write(tmp_path, train="a\nd\n", val="b\n")
    place = f"{tmp_path / 'train.txt'}, line 2: no mask has the id 'd'"
    assert open_folder(tmp_path).notes == (f"1 image has no mask and is left out: {place}",)


def test_pictures_next_to_the_split_folders_are_problems(tmp_path: Path) -> None:
    write(tmp_path)
    for split in ("train", "val"):
        add(tmp_path, "a", images=f"images/{split}", masks=f"masks/{split}")
    save(tmp_path / "images/stray.png", [[0]])
    assert problems(Folder(tmp_path)) == [("stray.png", "in no split")]


@pytest.mark.parametrize(
    ("val", "count", "held"), [(0.2, 12, 2), (0.3, 12, 4), (0.01, 3, 1), (0.9, 3, 2), (0.5, 1, 0), (0, 4, 0)]
)
def test_a_share_is_held_out(tmp_path: Path, val: float, count: int, held: int) -> None:
    ids = [f"{i:02d}" for i in range(count)]
    add(tmp_path, *ids)
    folder = Folder(write(tmp_path, CLASSES + f"val = {val}\nseed = 3"))
    ranked = sorted(ids, key=lambda id: hashlib.blake2b(f"3:{id}".encode(), digest_size=8).hexdigest())
    assert folder.ids("val") == tuple(sorted(ranked[:held]))
    assert folder.ids("train") == tuple(sorted(ranked[held:]))
    assert folder.split_by == f"a share of {round(val * 100)} % with seed 3"


def test_new_images_hardly_change_the_share(tmp_path: Path) -> None:
    write(tmp_path)
    add(tmp_path, *(f"{i:02d}" for i in range(20)))
    before = set(Folder(tmp_path).ids("val"))
    add(tmp_path, "99")
    after = Folder(tmp_path).ids("val")
    assert len(before) == len(after) == 4
    assert len(before - set(after)) <= 1
    assert set(Folder(write(tmp_path, CLASSES + "seed = 1")).ids("val")) != set(after)


@pytest.mark.parametrize("layout", ["{kind}/{split}", "{split}/{kind}"])
def test_half_a_split_by_folders(tmp_path: Path, layout: str) -> None:
    for split, other in (("train", "val"), ("val", "train")):
        root = write(tmp_path / split)
        add(root, "a", **{kind: layout.format(kind=kind, split=split) for kind in ("images", "masks")})
        missing = layout.format(kind="images", split=other)
        if split == "val":
            with fails(root, layout.format(kind="images", split=split), f"{missing} is missing"):
                Folder(root)
    folder = Folder(write(tmp_path / "train", CLASSES + "val = 0"))
    assert (folder.ids("train"), folder.ids("val")) == (("train/a",), ())
    missing = layout.format(kind="images", split="val")
    with fails(f'{missing} is missing. Add it, or remove `score = "val"` from'):
        Folder(write(tmp_path / "train", CLASSES + 'score = "val"'))
    with fails("is missing"):
        Folder(write(tmp_path / "val", CLASSES + "val = 0"))


@pytest.mark.parametrize("layout", ["{kind}/train", "train/{kind}"])
def test_without_val_a_share_of_train_is_held_out(tmp_path: Path, layout: str) -> None:
    folders = {kind: layout.format(kind=kind) for kind in ("images", "masks")}
    add(write(tmp_path), *(f"{i:02d}" for i in range(10)), **folders)
    folder, name = Folder(tmp_path), folders["images"]
    assert (len(folder.ids("train")), len(folder.ids("val"))) == (8, 2)
    assert folder.split_by == f"folders {name} and a share of 20 % with seed 0"
    assert folder.notes[0] == f"There is no {name.replace('train', 'val')}, so a share of {name} is held out."


def test_half_a_split_by_lists(tmp_path: Path) -> None:
    add(tmp_path, "a", "b", "c")
    folder = Folder(write(tmp_path, train="a\nb\n"))
    assert len(folder.ids("train")) == len(folder.ids("val")) == 1
    assert {*folder.ids("train"), *folder.ids("val")} == {"a", "b"}  # images that are not listed are not used
    assert folder.split_by == "lists train.txt and a share of 20 % with seed 0"
    folder = Folder(write(tmp_path, train="a\n"))
    assert (folder.ids("train"), folder.ids("val")) == (("a",), ())
    folder = Folder(write(tmp_path, CLASSES + "val = 0"))
    assert (folder.ids("train"), folder.ids("val"), folder.split_by) == (("a",), (), "lists train.txt")
    with fails(tmp_path, "no usable image in val", "'z'", "line 1"):
        Folder(write(tmp_path, val="z\n"))


def test_layouts_that_cannot_be_used(tmp_path: Path) -> None:
    with fails(tmp_path / "gone", "no such folder"):
        open_folder(tmp_path / "gone")
    root = write(tmp_path / "a")
    with fails(root / "images", "dataset.toml", "Accepted layouts", "masks/train"):
        open_folder(root)
    save(root / "images/a.png", [[0]])
    with fails(root / "masks", "no such folder", "Accepted layouts"):
        open_folder(root)
    (root / "masks").mkdir()
    with fails(root / "masks", "no picture", ".png"):
        open_folder(root)
    save(root / "masks/b.png", [[0]])
    with fails(root, "no usable image", "a.png: no mask", "b.png: no image"):
        open_folder(root)
    save(root / "images/train/a.png", [[0]])
    save(root / "val/images/a.png", [[0]])
    with fails(root, "images/train", "val/images", "Keep one"):
        open_folder(root)
