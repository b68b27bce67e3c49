"""The class index: what it counts, and when it counts again."""

from __future__ import annotations

import os
import shutil
import warnings
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from sdrseg.datasets.index import ClassIndex, class_index, map_with_threads
from sdrseg.datasets.source import Array, PictureFiles, Source, Split, find_by_id
from sdrseg.errors import DataError
from sdrseg.files import cache_folder


class Masks(PictureFiles):
    """The masks of a folder, all in "train"; remembers which were decoded."""

    name = "masks"
    classes = ("background", "cat", "dog")
    how = ""

    def __init__(self, root: Path):
        super().__init__()
        self.root = root
        self._masks, self._problems = find_by_id(root)
        self._ids = {"train": tuple(sorted(self._masks)), "val": ()}
        self.decoded: list[str] = []

    @property
    def coding(self) -> str:
        return self.how

    def mask(self, id: str) -> Array:
        self.decoded.append(id)
        return super().mask(id)


class Held(Source):
    """Masks held in memory."""

    name = "held"
    classes = ("background", "cat", "dog")

    def __init__(self, masks: dict[str, np.ndarray]):
        self.masks = masks

    def ids(self, split: Split) -> tuple[str, ...]:
        return tuple(self.masks) if split == "train" else ()

    def image(self, id: str) -> Array:
        raise NotImplementedError

    def mask(self, id: str) -> Array:
        return self.masks[id]

    def mask_content(self, id: str) -> bytes:
        return repr(self.masks[id].shape).encode() + self.masks[id].tobytes()


def save(path: Path, pixels: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.array(pixels, np.uint8)).save(path)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "masks"
    save(root / "a.png", [[0, 1, 1], [255, 2, 0]])
    save(root / "b.png", [[0]])
    save(root / "sub/c.png", [[2, 2], [2, 1]])
    return root


def counts(index: ClassIndex) -> list[dict[int, int]]:
    return [{value: int(n) for value, n in enumerate(row) if n} for row in index.pixels]


# --- counting -------------------------------------------------------------------------------------------------------

EXPECTED = [{0: 2, 1: 2, 2: 1, 255: 1}, {0: 1}, {1: 1, 2: 3}]


def test_a_small_index(folder: Path):
    index = class_index(Masks(folder), "train")
    assert index.ids == ("a", "b", "sub/c")
    assert counts(index) == EXPECTED
    assert index.sizes.tolist() == [[2, 3], [1, 1], [2, 2]]
    assert index.size_by_id == {"a": (2, 3), "b": (1, 1), "sub/c": (2, 2)}
    assert np.array_equal(index.present, index.pixels > 0)
    assert index.problems == () and index.out_of_range(3) == []
    index.require_sound(Masks(folder))


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(0, 6))
def test_counts_equal_those_of_plain_loops(seed, images):
    rng = np.random.default_rng(seed)
    masks = {f"{n}": rng.choice(rng.integers(0, 256, 5), rng.integers(1, 9, 2)).astype(np.uint8) for n in range(images)}
    source = Held(masks)
    for _ in range(2):  # counted, then from the cache
        index = class_index(source, "train")
        for row, mask in enumerate(masks.values()):
            plain: Counter[int] = Counter()
            for line in mask.tolist():
                plain.update(line)
            assert counts(index)[row] == dict(plain)
            assert index.sizes[row].tolist() == list(mask.shape)
        assert index.out_of_range(3) == [
            (id, {v: n for v, n in sorted(Counter(mask.ravel().tolist()).items()) if 3 <= v < 255})
            for id, mask in masks.items()
            if any(3 <= v < 255 for v in mask.ravel().tolist())
        ]


def test_an_empty_split(folder: Path):
    source = Masks(folder)
    for _ in range(2):
        index = class_index(source, "val")
        assert index.ids == () and index.pixels.shape == (0, 256) and index.sizes.shape == (0, 2)
        assert index.size_by_id == {} and index.out_of_range(3) == [] and index.problems == ()


def test_progress_goes_up_to_the_number_of_masks(folder: Path):
    seen: list[tuple[int, int]] = []
    class_index(Masks(folder), "train", lambda done, total: seen.append((done, total)))
    assert seen == [(1, 3), (2, 3), (3, 3)]


def test_threads_keep_the_order_and_hand_on_errors():
    assert list(map_with_threads(lambda n: n * n, range(100))) == [n * n for n in range(100)]
    with pytest.raises(ZeroDivisionError):
        list(map_with_threads(lambda n: 1 // n, [1, 0, 1]))


# --- the cache --------------------------------------------------------------------------------------------------------


def again(folder: Path, split: Split = "train", how: str = "") -> tuple[ClassIndex, list[str]]:
    """The index of a folder opened anew, and which masks were decoded for it."""
    source = Masks(folder)
    source.how = how
    index = class_index(source, split)
    return index, sorted(source.decoded)


ALL = ["a", "b", "sub/c"]


def test_the_second_time_no_mask_is_decoded(folder: Path):
    first, decoded = again(folder)
    assert decoded == ALL
    second, decoded = again(folder)
    assert decoded == []
    for name in ("pixels", "sizes", "digests"):
        assert np.array_equal(getattr(first, name), getattr(second, name))
        assert getattr(first, name).dtype == getattr(second, name).dtype


def test_an_edited_mask_is_counted_though_size_and_time_are_the_same(folder: Path):
    again(folder)
    file = folder / "b.png"
    before, size = file.stat(), (folder / "b.png").stat().st_size
    save(file, [[2]])
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (file.stat().st_size, file.stat().st_mtime_ns) == (size, before.st_mtime_ns)
    index, decoded = again(folder)
    assert decoded == ALL and counts(index)[1] == {2: 1}


def test_a_moved_folder_is_not_counted_again(folder: Path):
    again(folder)
    moved = folder.parent / "elsewhere"
    shutil.move(folder, moved)
    index, decoded = again(moved)
    assert decoded == [] and counts(index) == EXPECTED


def test_what_else_makes_it_count_again(folder: Path):
    again(folder)
    assert again(folder, how="ignore=7")[1] == ALL  # another reading of the same bytes
    (folder / "b.png").rename(folder / "b2.png")  # the same masks under other ids
    assert again(folder)[1] == ["a", "b2", "sub/c"]
    (folder / "b2.png").unlink()
    index, decoded = again(folder)
    assert decoded == ["a", "sub/c"] and counts(index) == [EXPECTED[0], EXPECTED[2]]


def test_swapped_masks_are_noticed(folder: Path):
    again(folder)
    (folder / "a.png").rename(folder / "x.png")
    (folder / "b.png").rename(folder / "a.png")
    (folder / "x.png").rename(folder / "b.png")
    assert counts(again(folder)[0]) == [EXPECTED[1], EXPECTED[0], EXPECTED[2]]


def cache_file() -> Path:
    (file,) = (cache_folder() / "index").iterdir()
    return file


@pytest.mark.parametrize("damage", ["empty", "text", "half", "other arrays", "other shapes", "folder"])
def test_a_damaged_cache_file_is_counted_again_and_replaced(folder: Path, damage):
    again(folder)
    file = cache_file()
    whole = file.read_bytes()
    if damage == "other arrays":
        with file.open("wb") as out:
            np.savez(out, something=np.zeros(3))
    elif damage == "other shapes":
        with file.open("wb") as out:
            np.savez(out, values=np.array([1]), pixels=np.ones((1, 1), int), sizes=np.ones((1, 2), int))
    elif damage == "folder":
        file.unlink()
        file.mkdir()
    else:
        file.write_bytes({"empty": b"", "text": b"no zip", "half": whole[: len(whole) // 2]}[damage])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        index, decoded = again(folder)
    assert decoded == ALL and counts(index) == EXPECTED
    assert damage == "folder" or again(folder)[1] == []


def test_no_flipped_byte_of_a_cache_file_changes_the_counts(folder: Path, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda _: None)  # hundreds of times, and slow
    again(folder)
    file = cache_file()
    whole = bytearray(file.read_bytes())
    source = Masks(folder)
    for place in range(len(whole)):
        damaged = bytearray(whole)
        damaged[place] ^= 0xFF
        file.write_bytes(bytes(damaged))
        index = class_index(source, "train")
        assert counts(index) == EXPECTED, place
        assert index.sizes.tolist() == [[2, 3], [1, 1], [2, 2]]


def test_a_cache_that_cannot_be_written_is_a_warning(folder: Path, monkeypatch):
    (folder.parent / "file").write_text("no folder")
    monkeypatch.setenv("SDRSEG_CACHE", str(folder.parent / "file"))
    with pytest.warns(UserWarning, match="Set SDRSEG_CACHE to a writable folder"):
        index, _ = again(folder)
    assert counts(index) == EXPECTED


# --- what is wrong with masks ---------------------------------------------------------------------------------------


def test_an_unreadable_mask_is_a_problem_with_its_present_path(folder: Path):
    (folder / "b.png").write_bytes(b"no picture")
    Image.fromarray(np.zeros((2, 2, 3), np.uint8)).save(folder / "d.png")
    moved = folder.parent / "elsewhere"
    for place in (folder, folder, moved):
        if place is moved:
            shutil.move(folder, moved)
        index, _ = again(place)
        assert [(p.file, p.kind) for p in index.problems] == [
            (str(place / "b.png"), "unreadable"),
            (str(place / "d.png"), "unreadable"),
        ]
        assert "cannot be read as a picture" in index.problems[0].detail
        assert "not an 8-bit mask" in index.problems[1].detail
        assert counts(index) == [EXPECTED[0], {}, {}, EXPECTED[2]]
        assert index.sizes.tolist() == [[2, 3], [0, 0], [0, 0], [2, 2]]
    with pytest.raises(
        DataError, match=r"elsewhere/b\.png.* \(and 1 more\)\. `sdrseg data` lists every problem"
    ) as caught:
        index.require_sound(Masks(moved))
    assert ".." not in str(caught.value) and ". (" not in str(caught.value)


def test_a_mask_that_vanished_after_listing(folder: Path):
    source = Masks(folder)
    (folder / "b.png").unlink()
    index = class_index(source, "train")
    assert [(p.file, p.kind) for p in index.problems] == [(str(folder / "b.png"), "unreadable")]
    assert "no such file" in index.problems[0].detail
    assert counts(index) == [EXPECTED[0], {}, EXPECTED[2]]
    save(folder / "b.png", [[0]])
    index, _ = again(folder)
    assert counts(index) == EXPECTED and index.problems == ()


@pytest.mark.parametrize("pixels", [np.zeros((2, 2), np.uint16), np.zeros((2, 2, 4), np.uint8)])
def test_masks_that_are_not_8_bit_class_ids(folder: Path, pixels):
    Image.fromarray(pixels).save(folder / "b.png")
    assert "not an 8-bit mask of class ids" in again(folder)[0].problems[0].detail


def test_values_that_are_not_a_class_are_named(folder: Path):
    save(folder / "b.png", [[3, 254, 254]])
    index, _ = again(folder)
    assert index.out_of_range(3) == [("b", {3: 1, 254: 2})]
    assert index.out_of_range(4) == [("b", {254: 2})]
    with pytest.raises(DataError) as caught:
        index.require_sound(Masks(folder))
    message = str(caught.value)
    assert message.startswith(f"{folder / 'b.png'}: value 3, 254 is neither a class (0..2) nor void (255)")
    assert "more" not in message


def test_a_name_that_is_not_utf8_is_a_problem_not_a_crash(folder: Path):
    shutil.copy(folder / "b.png", os.fsencode(folder) + b"/caf\xe9.png")
    source = Masks(folder)
    assert source.ids("train") == ("a", "b", "sub/c")
    (problem,) = source.problems()
    assert (problem.file, problem.kind) == (str(folder / r"caf\udce9.png"), "name is not UTF-8")
    assert counts(class_index(source, "train")) == EXPECTED


def test_names_of_all_kinds_become_ids(folder: Path):
    save(folder / "with space [and] brackets.v2.png", [[1]])
    save(folder / "naïve.png", [[1]])
    save(folder / ".hidden.png", [[1]])
    save(folder / ".hidden/x.png", [[1]])
    (folder / "dangling.png").symlink_to(folder / "nowhere.png")
    (folder / "linked.png").symlink_to(folder / "b.png")
    (folder / "README").write_text("no suffix")
    found, problems = find_by_id(folder, [".PNG"])
    assert sorted(found) == ["a", "b", "linked", "naïve", "sub/c", "with space [and] brackets.v2"] and problems == []
    assert "README" in find_by_id(folder)[0]
    (folder / "b.gif").write_bytes(b"")
    found, (problem,) = find_by_id(folder)
    assert found["b"] == folder / "b.gif"  # the first in name order
    assert (problem.file, problem.kind) == (str(folder / "b.png"), "duplicate id") and "b.gif" in problem.detail
