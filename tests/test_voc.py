"""Pascal VOC: small trees like the real one, and what is said when something is missing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from scipy.io import savemat
from scipy.sparse import csc_array

from sdrseg.datasets.index import class_index
from sdrseg.datasets.source import Problem
from sdrseg.datasets.voc import CLASSES, SBD_HOME, VOC_HOME, Voc
from sdrseg.errors import DataError

MASK = np.array([[0, 1, 20], [255, 15, 0]], np.uint8)
OTHER = np.array([[3, 3, 3], [3, 0, 0]], np.uint8)


def image(root: Path, *names: str) -> None:
    for name in names:
        path = root / "JPEGImages" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((2, 3, 3), 90, np.uint8)).save(path)


def mask(folder: Path, *ids: str, pixels: np.ndarray = MASK) -> None:
    """Palette PNGs, as those of VOC are."""
    folder.mkdir(parents=True, exist_ok=True)
    for id in ids:
        picture = Image.fromarray(pixels)
        picture.putpalette(bytes(range(256)) * 3)  # the indices count
        picture.save(folder / f"{id}.png")


def sbd(folder: Path, *ids: str, pixels: np.ndarray = OTHER) -> None:
    """Structs with the three fields of the real files."""
    (folder / "cls").mkdir(parents=True, exist_ok=True)
    boundaries = np.empty((20, 1), object)
    boundaries[:, 0] = [csc_array(np.zeros((2, 3))) for _ in range(20)]
    for id in ids:
        fields = {"Boundaries": boundaries, "Segmentation": pixels, "CategoriesPresent": np.array([[3]], np.uint8)}
        savemat(folder / "cls" / f"{id}.mat", {"GTcls": fields}, do_compression=True)


def lists(root: Path, **texts: str) -> None:
    folder = root / "ImageSets/Segmentation"
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (folder / f"{name}.txt").write_bytes(text.encode())


def augmented(root: Path) -> Path:
    """A tree with SegmentationClassAug: t2 and t1 for training, v for validation."""
    image(root, "t1.jpg", "t2.png", "v.avif")
    mask(root / "SegmentationClassAug", "t1", "t2", "v")
    lists(root, val="v\n", trainaug="t2\nt1\n")
    return root


def separate(base: Path, place: str = "SBD") -> Path:
    """A tree without SegmentationClassAug: VOC's own masks of t1 (train) and v (val), SBD's of t1, s and v."""
    root = base / "VOC2012"
    image(root, "t1.jpg", "s.jpg", "v.jpg")
    mask(root / "SegmentationClass", "t1", "v")
    lists(root, val="v\n", train="t1\n")
    sbd(base / place, "s", "t1", "v")
    return root


def others(source: Voc) -> list[Problem]:
    """Problems but that these trees are not the published set."""
    return [p for p in source.problems() if p.kind != "not the published set"]


@contextmanager
def fails(*words: object) -> Iterator[None]:
    with pytest.raises(DataError) as caught:
        yield
    assert [word for word in map(str, words) if word not in str(caught.value)] == [], str(caught.value)


# --- where it is, and how it is listed --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("below", "given"),
    [("", ""), ("VOC2012", ""), ("VOC2012", "VOC2012"), ("VOCdevkit/VOC2012", ""), ("VOCdevkit/VOC2012", "VOCdevkit")],
)
def test_the_folder_itself_or_one_that_holds_it(tmp_path: Path, below, given):
    augmented(tmp_path / below)
    source = Voc(tmp_path / given)
    assert source.root == tmp_path / below
    assert (source.ids("train"), source.ids("val")) == (("t1", "t2"), ("v",))  # sorted, whatever the list's order
    assert others(source) == []
    assert source.classes == CLASSES and len(CLASSES) == 21 and CLASSES[20] == "tvmonitor"


def test_images_of_any_format_are_found_by_id(tmp_path: Path):
    source = Voc(augmented(tmp_path))
    for id, file in {"t1": "t1.jpg", "t2": "t2.png", "v": "v.avif"}.items():
        assert source.file(id, "image") == str(tmp_path / "JPEGImages" / file)
        assert source.image(id).shape == (2, 3, 3) and abs(int(source.image(id).mean()) - 90) < 3
        assert source.mask(id).tolist() == MASK.tolist()  # indices, not colours, and 255 survives


@pytest.mark.parametrize(
    "text",
    [
        "t2\nt1\n",
        "t1\nt2",
        "t1\r\n\r\nt2\r\n",
        "\ufefft1\nt2\n",
        "t1 1\nt2 -1\n",
        "t1\nt1\nt2\n",
        "/JPEGImages/t1.jpg /SegmentationClassAug/t1.png\n/JPEGImages/t2.jpg /SegmentationClassAug/t2.png",
    ],
)
@pytest.mark.parametrize("name", ["trainaug", "train_aug"])
def test_lists_of_every_style(tmp_path: Path, text, name):
    augmented(tmp_path)
    (tmp_path / "ImageSets/Segmentation/trainaug.txt").unlink()
    lists(tmp_path, **{name: text})
    source = Voc(tmp_path)
    assert source.ids("train") == ("t1", "t2") and others(source) == []


def test_without_a_list_all_augmented_masks_but_val_are_train(tmp_path: Path):
    augmented(tmp_path)
    (tmp_path / "ImageSets/Segmentation/trainaug.txt").unlink()
    folder = tmp_path / "SegmentationClassAug"
    for junk in ("._t1.png", ".DS_Store", "Thumbs.db", "README.txt"):
        (folder / junk).write_bytes(b"junk")
    source = Voc(tmp_path)
    assert source.ids("train") == ("t1", "t2") and others(source) == []


def test_a_set_that_is_not_the_published_one_is_noted(tmp_path: Path):
    details = [p.detail for p in Voc(augmented(tmp_path)).problems() if p.kind == "not the published set"]
    assert details == [
        "1 val image; the published tasks are defined on 1449",
        "2 train images; the published tasks are defined on 10582",
    ]


# --- VOC and SBD put together --------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["SBD", "sbd", "benchmark_RELEASE/dataset", "VOC2012/SBD"])
def test_train_aug_is_sbd_and_train_without_val(tmp_path: Path, place):
    source = Voc(separate(tmp_path, place))
    assert (source.ids("train"), source.ids("val")) == (("s", "t1"), ("v",))
    assert source.mask("t1").tolist() == MASK.tolist()  # VOC's own label comes first
    assert source.mask("v").tolist() == MASK.tolist()
    assert source.mask("s").tolist() == OTHER.tolist() and source.mask("s").dtype == np.uint8
    assert source.file("s", "mask") == str(tmp_path / place / "cls/s.mat")
    assert others(source) == []
    index = class_index(source, "train")
    assert index.problems == () and index.sizes.tolist() == [[2, 3], [2, 3]]
    assert index.pixels[0, [0, 3]].tolist() == [2, 4] and index.pixels[1, 255] == 1


def test_sbd_next_to_vocdevkit_and_its_hidden_files(tmp_path: Path):
    separate(tmp_path / "VOCdevkit", "../SBD")
    (tmp_path / "SBD/cls/._s.mat").write_bytes(b"junk")
    source = Voc(tmp_path)
    assert source.ids("train") == ("s", "t1") and others(source) == []


def test_a_list_of_train_aug_is_followed_with_sbd_masks(tmp_path: Path):
    root = separate(tmp_path)
    lists(root, trainaug="s\n")
    assert Voc(root).ids("train") == ("s",)


def test_augmented_masks_come_before_all_others(tmp_path: Path):
    root = separate(tmp_path)
    mask(root / "SegmentationClassAug", "s", "t1", "v", pixels=OTHER)
    source = Voc(root)
    assert {source.file(id, "mask") for id in ("s", "t1", "v")} == {
        str(root / f"SegmentationClassAug/{id}.png") for id in ("s", "t1", "v")
    }
    (root / "SegmentationClassAug/v.png").unlink()  # gaps are filled from VOC's own
    assert Voc(root).file("v", "mask") == str(root / "SegmentationClass/v.png")


@pytest.mark.parametrize("shape", [(1, 3), (3, 1), (1, 1)])
def test_thin_sbd_masks_keep_their_shape(tmp_path: Path, shape):
    root = separate(tmp_path)
    sbd(tmp_path / "SBD", "s", pixels=np.full(shape, 7, np.uint8))
    assert Voc(root).mask("s").tolist() == np.full(shape, 7).tolist()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"text",
        {"other": 1},
        {"GTcls": {"Boundaries": 1}},
        {"GTcls": 3},
        {"GTcls": {"Segmentation": "word"}},
        {"GTcls": {"Segmentation": np.zeros((2, 2, 2), np.uint8)}},
        {"GTcls": {"Segmentation": np.array([[300]], np.uint16)}},
    ],
)
def test_a_broken_sbd_file_is_a_problem_that_names_it(tmp_path: Path, content):
    root = separate(tmp_path)
    file = tmp_path / "SBD/cls/s.mat"
    if isinstance(content, bytes):
        file.write_bytes(content)
    else:
        savemat(file, content)
    with fails(file):
        Voc(root).mask("s")
    index = class_index(Voc(root), "train")
    assert [(p.file, p.kind) for p in index.problems] == [(str(file), "unreadable")]


def test_a_truncated_sbd_file(tmp_path: Path):
    root = separate(tmp_path)
    file = tmp_path / "SBD/cls/s.mat"
    whole = file.read_bytes()
    for length in range(0, len(whole) - 1, 97):
        file.write_bytes(whole[:length])
        with fails(file, "Replace it"):
            Voc(root).mask("s")


# --- what is missing --------------------------------------------------------------------------------------------------


def test_no_voc_at_all(tmp_path: Path):
    with fails(tmp_path, tmp_path / "VOC2012", tmp_path / "VOCdevkit/VOC2012", "JPEGImages", VOC_HOME, SBD_HOME):
        Voc(tmp_path)


def test_no_masks_at_all(tmp_path: Path):
    image(tmp_path, "t1.jpg")
    lists(tmp_path, val="v\n", train="t1\n")
    with fails(tmp_path, "SegmentationClassAug", "SegmentationClass found", VOC_HOME, SBD_HOME):
        Voc(tmp_path)


@pytest.mark.parametrize("listed", [{}, {"trainaug": "t1\ns\n"}])
def test_neither_augmented_masks_nor_sbd(tmp_path: Path, listed):
    root = separate(tmp_path)
    lists(root, **listed)
    for file in (tmp_path / "SBD/cls").iterdir():
        file.unlink()
    with fails(
        root, "neither SegmentationClassAug nor SBD found", tmp_path / "SBD", root / "SBD", tmp_path / "sbd", SBD_HOME
    ):
        Voc(root)


@pytest.mark.parametrize("name", ["val", "train"])
def test_a_missing_list_is_named(tmp_path: Path, name):
    root = separate(tmp_path)
    (root / f"ImageSets/Segmentation/{name}.txt").unlink()
    with fails(root / f"ImageSets/Segmentation/{name}.txt", "no such list", VOC_HOME):
        Voc(root)


def test_a_list_that_is_not_text(tmp_path: Path):
    augmented(tmp_path)
    (tmp_path / "ImageSets/Segmentation/val.txt").write_bytes(b"\xff\xfe\x00v")
    with fails(tmp_path / "ImageSets/Segmentation/val.txt", "UTF-8"):
        Voc(tmp_path)


def test_listed_but_not_there(tmp_path: Path):
    augmented(tmp_path)
    lists(tmp_path, trainaug="t1\nt2\nx\n")
    (tmp_path / "JPEGImages/t1.jpg").unlink()
    (tmp_path / "SegmentationClassAug/v.png").unlink()
    source = Voc(tmp_path)
    assert (source.ids("train"), source.ids("val")) == (("t2",), ())
    assert sorted((p.kind, p.file, "left out" in p.detail) for p in others(source)) == [
        ("no image", str(tmp_path / "JPEGImages/t1.*"), True),
        ("no image", str(tmp_path / "JPEGImages/x.*"), True),
        ("no mask", str(tmp_path / "SegmentationClassAug/v.*"), True),
        ("no mask", str(tmp_path / "SegmentationClassAug/x.*"), True),
    ]


def test_two_files_of_one_id(tmp_path: Path):
    augmented(tmp_path)
    image(tmp_path, "t1.png")
    (problem,) = others(Voc(tmp_path))
    assert (problem.kind, problem.file) == ("duplicate id", str(tmp_path / "JPEGImages/t1.png"))


def test_image_and_mask_of_different_size(tmp_path: Path):
    augmented(tmp_path)
    mask(tmp_path / "SegmentationClassAug", "t1", pixels=MASK.T.copy())
    with fails(tmp_path / "JPEGImages/t1.jpg", "3×2", tmp_path / "SegmentationClassAug/t1.png", "2×3"):
        Voc(tmp_path).pair("t1")


# --- the real data ----------------------------------------------------------------------------------------------------


def test_a_sample_of_the_real_data(voc_folder):
    source = Voc(voc_folder)
    assert (len(source.ids("train")), len(source.ids("val"))) == (10582, 1449)
    assert not set(source.ids("train")) & set(source.ids("val"))
    assert list(source.ids("train")) == sorted(source.ids("train"))
    void = 0
    for id in [*source.ids("train")[::1000], *source.ids("val")[::160]]:
        pixels, label = source.pair(id)  # of one size, or this is an error
        assert pixels.dtype == label.dtype == np.uint8 and pixels.shape == (*label.shape, 3)
        assert set(np.unique(label).tolist()) <= {*range(21), 255}
        void += int((label == 255).sum())
    assert void > 0
