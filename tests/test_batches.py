"""Batches: the same pixels whoever makes them, the right labels, every image as often as it should be."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from sdrseg.config import Config, load_config, parse_settings
from sdrseg.datasets.augment import MEAN, STD, normalise, rrc, scale_crop, show
from sdrseg.datasets.batches import Batch, Batches, eval_batches, relabel, train_batches, workers
from sdrseg.datasets.cache import PixelCache, build_cache
from sdrseg.datasets.order import Share
from sdrseg.datasets.samples import Evaluated
from sdrseg.datasets.source import PictureFiles, find_by_id
from sdrseg.errors import DataError
from sdrseg.scenario import build_scenario, parse_spec
from test_cache import Memory, Pictures, pictures

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")  # more workers than cores

SIZES = [(20, 30), (41, 17), (32, 32), (5, 60), (33, 33), (48, 40), (32, 64)]
TABLE = np.full(256, 255, np.uint8)
TABLE[[0, 1, 2]] = [0, 0, 1]  # 1 is an old class, 2 the new one


def config(*assignments: str) -> Config:
    small = ["data.crop=32", "train.batch_size=2", "train.epochs=2", "data.workers=0", "eval.batch_size=3"]
    return load_config("voc", None, parse_settings([*small, *assignments]))


@pytest.fixture(scope="module")
def held() -> Pictures:
    return pictures(SIZES)


@pytest.fixture(scope="module")
def source(held: Pictures) -> Memory:
    return Memory(held)


def sizes_of(source: Memory) -> dict[str, tuple[int, int]]:
    return {id: mask.shape for id, (_, mask) in source.held.items()}


def train(source: Memory, *assignments: str, **more) -> Batches:
    return train_batches(source, source.ids("train"), TABLE, config(*assignments), **more)


def evaluation(source: Memory, *assignments: str, **more) -> Batches:
    return eval_batches(source, source.ids("val"), sizes_of(source), TABLE, config(*assignments), **more)


def cache_of(source: Memory) -> PixelCache:
    return build_cache(source, sizes_of(source), "cpu", 0)


def assert_equal(one: list[Batch], other: list[Batch]) -> None:
    assert len(one) == len(other) > 0
    for a, b in zip(one, other, strict=True):
        assert (a.ids, a.epoch) == (b.ids, b.epoch)
        for name in ("images", "labels", "padding"):
            assert torch.equal(getattr(a, name), getattr(b, name)), name


# --- the same pixels --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("augment", ["scale_crop", "rrc"])
def test_pixels_do_not_depend_on_who_makes_them(source, augment):
    alone = list(train(source, f"data.augment={augment}"))
    for number in (1, 3):
        assert_equal(list(train(source, f"data.augment={augment}", f"data.workers={number}")), alone)
    assert_equal(list(train(source, f"data.augment={augment}", cache=cache_of(source))), alone)


@pytest.mark.parametrize("transform", ["full_image", "crop512"])
def test_evaluation_does_not_depend_on_who_makes_it(source, transform):
    alone = list(evaluation(source, f"eval.transform={transform}"))
    if transform == "full_image":
        assert_equal(list(evaluation(source, f"eval.transform={transform}", "data.workers=2")), alone)
    assert_equal(list(evaluation(source, f"eval.transform={transform}", cache=cache_of(source))), alone)


@pytest.mark.parametrize(("multiple", "expected"), [(1, 1), (8, 8), (16, 16), (32, 16)])
def test_full_images_are_padded_as_little_as_the_network_allows(source, multiple, expected):
    """As in prediction, whatever the batch; networks that need more than multiples of 16 pad by themselves."""
    sizes = {"a": (17, 30), "b": (40, 33)}
    for id, (height, width) in sizes.items():
        view = Evaluated(config("eval.transform=full_image"), multiple)((height, width), 0, id)
        assert [axis.out for axis in (view.rows, view.columns)] == [-(-n // expected) * expected for n in sizes[id]]


def test_epochs_and_seeds_differ(source):
    def pictures_by_id(*assignments: str) -> dict[tuple[int, str], torch.Tensor]:
        made = list(train(source, "train.batch_size=7", *assignments))
        return {(b.epoch, id): b.images[n] for b in made for n, id in enumerate(b.ids)}

    first, second = pictures_by_id(), pictures_by_id("train.seed=1")
    assert set(first) == set(second) == {(epoch, id) for epoch in (0, 1) for id in source.ids("train")}
    for id in source.ids("train"):
        assert not torch.equal(first[0, id], first[1, id])
        assert not torch.equal(first[0, id], second[0, id])


def test_a_view_follows_from_seed_epoch_and_id_alone(source):
    """Whatever else is in the list or the batch: a held-out image more or less changes no other pixel."""
    ids = source.ids("train")
    whole = train_batches(source, ids, TABLE, config("train.batch_size=7"))
    part = train_batches(source, ids[3:5], TABLE, config("train.batch_size=1"))
    made = {(b.epoch, id): b.images[n] for b in whole for n, id in enumerate(b.ids)}
    for batch in part:
        assert torch.equal(batch.images[0], made[batch.epoch, batch.ids[0]])


def test_making_batches_leaves_the_random_numbers_of_the_training_alone(source):
    torch.manual_seed(3)
    random.seed(3)
    before = torch.get_rng_state(), random.getstate()
    for number in (0, 2):
        list(train(source, "train.epochs=1", f"data.workers={number}"))
    assert torch.equal(torch.get_rng_state(), before[0]) and random.getstate() == before[1]


# --- labels and layout ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("augment", ["scale_crop", "rrc"])
@pytest.mark.parametrize("void", ["ignore", "background"])
def test_labels_are_the_table_on_the_raw_mask_and_padding_is_void(source, held, cached, augment, void):
    """By hand: relabel the whole mask first, show it, and compare (relabelling commutes with nearest resampling)."""
    table = TABLE.copy()
    table[255] = {"ignore": 255, "background": 0}[void]
    settings = config(f"data.augment={augment}", "train.seed=4")
    made = train_batches(source, source.ids("train"), table, settings, cache=cache_of(source) if cached else None)
    choose = {"scale_crop": scale_crop, "rrc": rrc}[augment]
    voids = paddings = 0
    for batch in made:
        assert len(batch.ids) == 2
        for n, id in enumerate(batch.ids):
            image, mask = (torch.from_numpy(array) for array in held[id])
            view = choose(tuple(mask.shape), 32, (0.5, 2.0), random.Random(f"view 4 {batch.epoch} {id}"))
            inner = torch.ones_like(mask)
            picture, label = show(
                view, image.permute(2, 0, 1), torch.tensor([[table[v] for v in row] for row in mask.tolist()])
            )
            outside = show(view, image.permute(2, 0, 1), inner)[1] == 255
            assert torch.equal(batch.images[n], picture)
            assert torch.equal(batch.labels[n], label)
            assert torch.equal(batch.padding[n], outside)
            assert (batch.labels[n][outside] == 255).all()
            voids += int((batch.labels[n][~outside] == 255).sum())
            paddings += int(outside.sum())
    assert (voids > 0) == (void == "ignore")
    assert (paddings > 0) == (augment == "scale_crop")


def test_void_becomes_background_and_padding_does_not_by_a_scenario(source):
    settings = config("data.void_train=background")
    masks = source.held.values()
    index = type(
        "Index",
        (),
        {
            "ids": source.ids("train"),
            "present": np.array([np.bincount(m.ravel(), minlength=256) > 0 for _, m in masks]),
        },
    )
    scenario = build_scenario(
        parse_spec("folder:1-1@overlapped"), source, index, index, void_train=settings.data.void_train
    )
    step = scenario.steps[1]
    for batch in train_batches(source, step.train_ids, step.train_table, settings):
        assert set(batch.labels.unique().tolist()) <= {0, 2, 255}
        assert torch.equal(batch.labels == 255, batch.padding)


def test_relabel_pixel_by_pixel():
    rng = np.random.default_rng(0)
    masks, table = rng.integers(0, 256, (2, 5, 6)).astype(np.uint8), rng.integers(0, 256, 256).astype(np.uint8)
    outside = rng.random((2, 5, 6)) < 0.3
    found = relabel(*(torch.from_numpy(array) for array in (masks, outside, table)))
    assert found.dtype == torch.uint8 and found.shape == (2, 5, 6)
    for place in np.ndindex(masks.shape):
        assert found[place] == (255 if outside[place] else table[masks[place]])


@pytest.mark.parametrize("made_by", ["0", "2", "cache"])
def test_layout_of_a_batch(source, made_by):
    more = {"cache": cache_of(source)} if made_by == "cache" else {}
    number = "0" if made_by == "cache" else made_by
    for batch in [
        *train(source, f"data.workers={number}", **more),
        *evaluation(source, "eval.transform=full_image", **more),
    ]:
        images, labels, padding = batch.images, batch.labels, batch.padding
        assert images.dtype == labels.dtype == torch.uint8 and padding.dtype == torch.bool
        assert images.shape[1] == 3 and images.shape[2:] == labels.shape[1:] == padding.shape[1:]
        assert len(batch.ids) == len(images) == len(labels) == len(padding)
        assert images.is_contiguous(memory_format=torch.channels_last) or len(images) == 1
        assert labels.is_contiguous() and padding.is_contiguous()
        before = images.clone()
        floats = normalise(images)
        assert torch.equal(images, before)  # the bytes are not changed
        assert floats.is_contiguous(memory_format=torch.channels_last) or len(images) == 1
        grey = images[0, :, 1, 2].double() / 255
        assert torch.allclose(floats[0, :, 1, 2].double(), (grey - torch.tensor(MEAN)) / torch.tensor(STD), atol=1e-5)


def test_a_batch_can_be_moved_and_pinned():
    batch = Batch(torch.zeros(1, 3, 2, 2), torch.zeros(1, 2, 2), torch.zeros(1, 2, 2, dtype=torch.bool), ("a",), 3)
    moved = batch.to("meta")
    assert (moved.ids, moved.epoch) == (("a",), 3) and {
        t.device.type for t in (moved.images, moved.labels, moved.padding)
    } == {"meta"}
    assert batch.images.device.type == "cpu"


# --- every image as often as it should be -----------------------------------------------------------------------------


@pytest.mark.parametrize("number", [0, 2])
def test_training_drops_the_rest_of_an_epoch(source, number):
    made = train(source, "train.batch_size=3", f"data.workers={number}")
    assert len(made) == 4
    batches = list(made)
    assert [b.epoch for b in batches] == [0, 0, 1, 1] and all(len(b.ids) == 3 for b in batches)
    for epoch in (0, 1):
        assert len({id for b in batches if b.epoch == epoch for id in b.ids}) == 6
    assert len(made) == 0 and list(made) == []  # all done


@pytest.mark.parametrize("number", [0, 1, 3])
def test_resuming_in_the_middle_of_an_epoch(source, number):
    everything = list(train(source, "train.epochs=3"))
    for done in (1, 4, 8):
        first = train(source, "train.epochs=3", f"data.workers={number}")
        seen = []
        for batch in first:
            seen.append(batch)
            if len(seen) == done:
                state = first.order.state_dict()  # batches made ahead do not count
                break
        rest = train(source, "train.epochs=3", f"data.workers={number}")
        rest.order.load_state_dict(state)
        assert len(rest) == len(everything) - done
        assert_equal(seen + list(rest), everything)
        assert_equal(seen + list(first), everything)  # also with the same object


def test_two_processes_see_together_what_one_sees(source):
    alone = list(train(source, "train.batch_size=4"))
    shares = [list(train(source, "train.batch_size=4", share=Share(rank, 2))) for rank in (0, 1)]
    for whole, one, other in zip(alone, *shares, strict=True):
        assert whole.ids == one.ids + other.ids
        for name in ("images", "labels", "padding"):
            assert torch.equal(getattr(whole, name), torch.cat([getattr(one, name), getattr(other, name)]))


@pytest.mark.parametrize("world", [1, 2, 5])
@pytest.mark.parametrize("transform", ["crop512", "full_image"])
def test_evaluation_covers_every_image_once(source, held, transform, world):
    used = []
    for rank in range(world):
        made = evaluation(source, f"eval.transform={transform}", share=Share(rank, world), cache=cache_of(source))
        batches = list(made)
        assert len(made) == len(batches)
        for batch in batches:
            used += batch.ids
            assert 1 <= len(batch.ids) <= 3
            if transform == "full_image":
                for n, id in enumerate(batch.ids):
                    height, width = held[id][1].shape
                    assert torch.equal(batch.labels[n, :height, :width], torch.from_numpy(TABLE[held[id][1]]))
                    assert torch.equal(
                        batch.images[n, :, :height, :width].permute(1, 2, 0), torch.from_numpy(held[id][0])
                    )
                    assert int((~batch.padding[n]).sum()) == height * width
            else:
                assert batch.images.shape[2:] == (512, 512) and not batch.padding.any()
    assert sorted(used) == sorted(held)


@pytest.mark.parametrize("number", [0, 2])
def test_an_evaluation_can_be_repeated(source, number):
    made = evaluation(source, "eval.transform=full_image", f"data.workers={number}")
    assert_equal(list(made), list(made))


@pytest.mark.parametrize("number", [0, 2])
def test_evaluation_of_no_images(source, number):
    made = eval_batches(source, (), {}, TABLE, config(f"data.workers={number}"))
    assert len(made) == 0 and list(made) == []


# --- what is wrong ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [0, 1, 3])
@pytest.mark.parametrize("kind", ["training", "evaluation"])
def test_an_unreadable_image_is_named_in_the_main_process(held, number, kind):
    broken = Memory(held, ("i3",))
    settings = ["train.epochs=1", "train.batch_size=1", "eval.transform=full_image", f"data.workers={number}"]
    made = (train if kind == "training" else evaluation)(broken, *settings)
    seen = []
    advice = r" To resume this run, repair the file or add --on-bad-image skip\." if kind == "training" else ""
    with pytest.raises(DataError, match=rf"^/some/where/i3\.jpg: cannot be read as a picture\.{advice}$"):
        seen.extend(batch.ids for batch in made)
    assert ("i3",) not in seen


@pytest.mark.parametrize("number", [0, 2])
@pytest.mark.parametrize(
    ("file", "kept", "words"),
    [
        ("images/b.png", 20, "cannot be read as a picture"),
        ("masks/b.png", 60, "cannot be read as a picture"),
        ("masks/c.png", None, "no such file"),
    ],
)
def test_broken_files_are_named(tmp_path: Path, number, file, kept, words):
    class Files(PictureFiles):
        name = "files"
        classes = ("background", "cat", "dog")

        def __init__(self) -> None:
            super().__init__()
            self._images, self._masks = (find_by_id(tmp_path / kind)[0] for kind in ("images", "masks"))

    for kind, mode in (("images", "RGB"), ("masks", "L")):
        (tmp_path / kind).mkdir()
        for id in "abc":
            pixels = np.random.default_rng(0).integers(0, 3, (7, 9) if mode == "L" else (7, 9, 3))
            Image.fromarray(pixels.astype(np.uint8)).save(tmp_path / kind / f"{id}.png")
    path, files = tmp_path / file, Files()
    if kept is None:
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(DataError) as caught:
        list(train_batches(files, "abc", TABLE, config("train.batch_size=1", f"data.workers={number}")))
    assert str(path) in str(caught.value) and words in str(caught.value)


def test_the_number_of_workers(monkeypatch):
    settings = config()
    for cores, wish, expected in ((4, -1, 4), (64, -1, 16), (1, -1, 1), (4, 0, 0), (4, 40, 40)):
        monkeypatch.setattr("os.sched_getaffinity", lambda process, cores=cores: set(range(cores)))
        assert workers(replace(settings, data=replace(settings.data, workers=wish))) == expected
