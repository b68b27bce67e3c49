"""Decoded images in memory: the same pixels as one image at a time, and where they are kept."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from interpreted import NEEDS_TRITON, interpret
from sdrseg import kernels
from sdrseg.config import Config
from sdrseg.datasets.augment import View, crop512, full_image, padding, rrc, scale_crop, show
from sdrseg.datasets.cache import HEADROOM, PixelCache, build_cache, cache_device, free_memory
from sdrseg.datasets.index import class_index
from sdrseg.datasets.pool import ImagePool
from sdrseg.datasets.shapes import Shapes
from sdrseg.datasets.source import Array, Source, Split
from sdrseg.errors import DataError, SdrsegError

Pictures = dict[str, tuple[np.ndarray, np.ndarray]]
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


def pictures(sizes: list[tuple[int, int]], seed: int = 0) -> Pictures:
    """Random images and masks by id."""
    rng = np.random.default_rng(seed)
    return {
        f"i{n}": (
            rng.integers(0, 256, (*size, 3)).astype(np.uint8),
            rng.choice([0, 1, 2, 255], size).astype(np.uint8),
        )
        for n, size in enumerate(sizes)
    }


def cached(held: Pictures, device: str = "cpu") -> PixelCache:
    cache = PixelCache({id: mask.shape for id, (_, mask) in held.items()}, device)
    for id, pair in held.items():
        cache.store(id, *pair)
    return cache


class Memory(Source):
    """Images and masks held in memory; those in `broken` cannot be read."""

    name = "memory"
    classes = ("background", "cat", "dog")

    def __init__(self, held: Pictures, broken: tuple[str, ...] = ()):
        self.held, self.broken = held, broken

    def ids(self, split: Split) -> tuple[str, ...]:
        return tuple(self.held)

    def image(self, id: str) -> Array:
        if id in self.broken:
            raise DataError(f"/some/where/{id}.jpg: cannot be read as a picture.")
        return self.held[id][0]

    def mask(self, id: str) -> Array:
        return self.held[id][1]

    def mask_content(self, id: str) -> bytes:
        return self.held[id][1].tobytes()


# --- one image after the other, and all together ------------------------------------------------------------------

KINDS = {
    "scale_crop": lambda size, draw: scale_crop(size, 16, (0.5, 2.0), draw),
    "rrc": lambda size, draw: rrc(size, 16, (0.5, 2.0), draw),
    "crop512": lambda size, draw: crop512(size, 16),
    "full_image": lambda size, draw: full_image(size, 16),
}
SIZES = st.lists(st.tuples(st.integers(1, 16), st.integers(1, 16)), min_size=1, max_size=5)


def views(sizes: list[tuple[int, int]], seed: int) -> tuple[list[str], list[View]]:
    """Views of every kind of every image, all 16×16, in a random order."""
    draw = random.Random(seed)
    work = [(f"i{n}", choose(size, draw)) for n, size in enumerate(sizes) for choose in KINDS.values()]
    draw.shuffle(work)
    return [id for id, _ in work], [view for _, view in work]


@settings(max_examples=40, deadline=None)
@given(SIZES, st.integers(0, 2**32 - 1))
def test_each_equals_showing_the_original(sizes, seed):
    held = pictures(sizes, seed)
    ids, chosen = views(sizes, seed)
    images, masks, outside = cached(held).show_each(ids, chosen)
    assert images.is_contiguous(memory_format=torch.channels_last)
    for n, (id, view) in enumerate(zip(ids, chosen, strict=True)):
        image, mask = held[id]
        picture, label = show(view, torch.from_numpy(image).permute(2, 0, 1), torch.from_numpy(mask))
        assert torch.equal(images[n], picture)
        assert torch.equal(masks[n], label)
        assert torch.equal(outside[n], padding(view))


def assert_equals_each(
    held: Pictures, ids: list[str], chosen: list[View], device: str, use_kernel: bool = True
) -> None:
    one, other = cached(held), cached(held, device)
    images, masks, outside = one.show_each(ids, chosen)
    with nullcontext() if use_kernel else kernels.disabled("views"):
        images2, masks2, outside2 = other.show_together(ids, chosen)
    assert images2.dtype == masks2.dtype == torch.uint8 and outside2.dtype == torch.bool
    assert images2.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(masks, masks2.cpu())
    assert torch.equal(outside, outside2.cpu())
    assert (images.int() - images2.cpu().int()).abs().max() <= 1
    whole = outside.unsqueeze(1).expand_as(images)
    assert torch.equal(images[whole], images2.cpu()[whole])


WAYS = [(device, False) for device in DEVICES]
WAYS += [(device, True) for device in DEVICES if device != "cpu"]


@pytest.mark.parametrize(("device", "use_kernel"), WAYS)
@settings(max_examples=60, deadline=None)
@given(SIZES, st.integers(0, 2**32 - 1))
def test_together_equals_each(device, use_kernel, sizes, seed):
    assert_equals_each(pictures(sizes, seed), *views(sizes, seed), device, use_kernel)


@pytest.mark.parametrize(("device", "use_kernel"), WAYS)
@pytest.mark.parametrize("kind", ["scale_crop", "rrc", "crop512", "full_image"])
def test_together_equals_each_at_real_sizes(device, use_kernel, kind):
    """Long axes: single precision has to find the same source pixel of each of 512."""
    sizes = [(375, 500), (500, 333), (281, 500)]
    chosen = [
        {
            "scale_crop": lambda size, draw: scale_crop(size, 512, (0.5, 2.0), draw),
            "rrc": lambda size, draw: rrc(size, 512, (0.5, 2.0), draw),
            "crop512": lambda size, draw: crop512(size),
            "full_image": lambda size, draw: full_image(size, 512),
        }[kind](size, random.Random(n))
        for n, size in enumerate(sizes)
    ]
    assert_equals_each(pictures(sizes), ["i0", "i1", "i2"], chosen, device, use_kernel)


INTERPRETED = """
import random
from dataclasses import replace
import test_cache as tests
from sdrseg.datasets.augment import Axis

sizes = [(9, 13), (16, 7), (1, 1), (3, 16)]
ids, chosen = tests.views(sizes, 3)
tests.assert_equals_each(tests.pictures(sizes), ids, chosen, "cpu")
long = [(375, 500), (500, 333)]  # a row of each, wider than what a program shows
for choose in (tests.scale_crop, tests.rrc):
    chosen = [choose(size, 512, (0.5, 2.0), random.Random(n)) for n, size in enumerate(long)]
    one_row = [replace(view, rows=replace(view.rows, out=1, offset=view.rows.size // 2)) for view in chosen]
    tests.assert_equals_each(tests.pictures(long), ["i0", "i1"], one_row, "cpu")
end = Axis(0, 40000, 80000, 79936, 64)  # products beyond 2^31
view = tests.View(Axis(0, 1, 1, 0, 1), end)
tests.assert_equals_each(tests.pictures([(1, 40000)]), ["i0"], [view], "cpu")
"""


@NEEDS_TRITON
def test_the_kernel_equals_each_without_a_gpu():
    interpret(INTERPRETED)


@pytest.mark.parametrize(("device", "use_kernel"), WAYS)
def test_together_is_exact_under_mixed_precision(device, use_kernel):
    """Batches may be made inside a training loop's autocast, which must not coarsen the images."""
    held = pictures([(9, 13), (16, 7)])
    ids, chosen = views([(9, 13), (16, 7)], 3)
    with torch.autocast(device, dtype=torch.bfloat16):
        assert_equals_each(held, ids, chosen, device, use_kernel)


def test_extreme_values_survive():
    """Weights that sum to a little over 1 must not turn 255 into 0."""
    sizes = [(13, 11)]
    for value in (0, 255):
        held = {"i0": (np.full((13, 11, 3), value, np.uint8), np.zeros((13, 11), np.uint8))}
        ids, chosen = views(sizes, 1)
        images, _, outside = cached(held).show_together(ids, chosen)
        assert (images.permute(0, 2, 3, 1)[~outside] == value).all()


def test_which_way_is_taken(monkeypatch):
    cache = cached(pictures([(4, 4)]))
    for way in ("show_each", "show_together"):
        monkeypatch.setattr(PixelCache, way, lambda *_, way=way: way)
    assert cache.show(["i0"], [full_image((4, 4))]) == "show_each"
    cache.device = torch.device("cuda", 7)
    assert cache.show(["i0"], [full_image((4, 4))]) == "show_together"


# --- what a cache holds -----------------------------------------------------------------------------------------------


def test_words_are_red_green_blue_label():
    """Written out: one row of words for all images, in the order of the ids, whatever their sizes."""
    held = {
        "b": (np.array([[[1, 2, 3], [4, 5, 6]]], np.uint8), np.array([[7, 8]], np.uint8)),
        "a": (np.array([[[9, 10, 11]], [[12, 13, 14]]], np.uint8), np.array([[15], [255]], np.uint8)),
    }
    cache = cached(held)
    assert cache._pixels.tolist() == [[1, 2, 3, 7], [4, 5, 6, 8], [9, 10, 11, 15], [12, 13, 14, 255]]
    assert cache.nbytes == 16
    assert cache.sizes == {"b": (1, 2), "a": (2, 1)}


def test_a_cache_of_no_images():
    cache = PixelCache({})
    assert cache.nbytes == 0 and cache.sizes == {}
    assert build_cache(Memory({}), {}, "cpu", 0).nbytes == 0


@pytest.mark.parametrize(("image", "mask"), [((3, 4), (3, 4)), ((2, 4), (3, 4)), ((3, 4), (2, 4)), ((4, 2), (4, 2))])
def test_a_size_that_changed_since_indexing_is_an_error(image, mask):
    cache = PixelCache({"odd": (2, 4)})
    with pytest.raises(
        DataError, match=r"odd: \(\d, 4\) with a mask of \(\d, 4\), not \(2, 4\)|odd: \(4, 2\)"
    ) as caught:
        cache.store("odd", np.zeros((*image, 3), np.uint8), np.zeros(mask, np.uint8))
    assert "have changed since" in str(caught.value)


@pytest.mark.parametrize("stage", [1, 100, 2**28])
@pytest.mark.parametrize("threads", [0, 1, 2])
def test_building_from_a_source(threads, stage, monkeypatch):
    """One image at a time, two and one, and all at once."""
    monkeypatch.setattr("sdrseg.datasets.cache.STAGE", stage)
    held = pictures([(3, 5), (8, 2), (4, 4), (1, 1)])
    order = ["i2", "i0", "i3"]  # some of them, in an order of their own
    seen: list[tuple[int, int]] = []
    before = torch.get_rng_state()
    cache = build_cache(
        Memory(held), {id: held[id][1].shape for id in order}, "cpu", threads, lambda *a: seen.append(a)
    )
    assert torch.equal(torch.get_rng_state(), before)  # decoding draws no random numbers of the training
    assert seen == [(1, 3), (2, 3), (3, 3)]
    assert list(cache.sizes) == order
    for id in order:
        images, masks, _ = cache.show([id], [full_image(held[id][1].shape)])
        height, width = held[id][1].shape
        assert np.array_equal(images[0, :, :height, :width].permute(1, 2, 0).numpy(), held[id][0])
        assert np.array_equal(masks[0, :height, :width].numpy(), held[id][1])


@pytest.mark.parametrize("threads", [0, 1, 2])
def test_an_unreadable_image_is_named_while_building(threads):
    held = pictures([(3, 5), (8, 2), (4, 4)])
    with pytest.raises(DataError, match=r"/some/where/i1\.jpg: cannot be read"):
        build_cache(Memory(held, ("i1",)), {id: mask.shape for id, (_, mask) in held.items()}, "cpu", threads)


@pytest.mark.parametrize("threads", [0, 1, 2])
def test_image_and_mask_of_different_sizes_are_named_while_building(threads):
    held = pictures([(3, 5)])
    held["i0"] = (held["i0"][0][:2], held["i0"][1])
    with pytest.raises(DataError, match=r"memory:i0: image 5×2, mask 5×3 \(memory:i0\)\. Make them the same"):
        build_cache(Memory(held), {"i0": (3, 5)}, "cpu", threads)


def test_a_generated_data_set():
    source = Shapes(size=32, train=3, val=1)
    cache = build_cache(source, dict.fromkeys(source.ids("train"), (32, 32)), "cpu", 0)
    images, masks, _ = cache.show(source.ids("train"), [full_image((32, 32))] * 3)
    for n, id in enumerate(source.ids("train")):
        assert np.array_equal(images[n].permute(1, 2, 0).numpy(), source.image(id))
        assert np.array_equal(masks[n].numpy(), source.mask(id))


# --- where to keep it -------------------------------------------------------------------------------------------------

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
NEEDED = 4 * (10 * 20 + 5 * 5)  # bytes of the two images below
PLENTY = int(NEEDED / HEADROOM)


@pytest.mark.parametrize(
    ("wish", "device", "gpu", "ram", "expected"),
    [
        ("off", GPU, PLENTY, PLENTY, None),
        ("off", CPU, PLENTY, PLENTY, None),
        ("auto", GPU, PLENTY, PLENTY, GPU),
        ("auto", GPU, PLENTY - 8, PLENTY, CPU),
        ("auto", GPU, PLENTY - 8, PLENTY - 8, None),
        ("auto", CPU, PLENTY, PLENTY, CPU),
        ("auto", CPU, PLENTY, PLENTY - 8, None),
        ("ram", GPU, PLENTY, PLENTY, CPU),
        ("ram", CPU, PLENTY, PLENTY, CPU),
        ("gpu", GPU, PLENTY, 0, GPU),
    ],
)
def test_where_images_are_kept(wish, device, gpu, ram, expected):
    free = {CPU: ram, GPU: gpu}
    assert cache_device(wish, [(10, 20), (5, 5)], device, lambda place: free[place]) == expected


@pytest.mark.parametrize(
    ("setting", "device", "message"),
    [
        ("gpu", "cpu", r"data\.cache = 'gpu', but there is no GPU to train on\. Use 'ram' or 'auto'"),
        ("gpu", "cuda:0", r"data\.cache = 'gpu' needs 4\.0 GiB on cuda:0, which has 5\.0 GiB free \(the cache may"),
        (
            "ram",
            "cuda:0",
            r"data\.cache = 'ram' needs 4\.0 GiB on cpu, which has 5\.0 GiB free .*data\.cache=auto or off",
        ),
        ("ram", "cpu", r"data\.cache = 'ram' needs 4\.0 GiB on cpu"),
    ],
)
def test_a_place_that_does_not_fit_is_refused(setting, device, message):
    sizes: Iterator[tuple[int, int]] = iter([(2**15, 2**15)])  # 4 GiB; also from an iterator that can be read once
    with pytest.raises(SdrsegError, match=message):
        cache_device(setting, sizes, device, lambda _: 5 * 2**30)


def test_free_memory_of_this_machine(monkeypatch):
    if Path("/proc/meminfo").exists():
        assert 0 < free_memory(CPU) < 2**50
    monkeypatch.setattr(Path, "read_text", lambda _: (_ for _ in ()).throw(OSError("none here")))
    assert free_memory(CPU) == 0
    assert cache_device("auto", [(1, 1)], CPU) is None


# --- a pool of caches ------------------------------------------------------------------------------------------------


class CountingShapes(Shapes):
    """Generated data that counts how often a picture is decoded."""

    decoded = []

    def image(self, id):
        self.decoded.append(id)
        return super().image(id)


def generated(**values: int) -> Config:
    return replace(Config(), shapes=replace(Config().shapes, size=32, train=30, **values))


@pytest.mark.parametrize("whole", [False, True])
def test_a_pool_decodes_an_image_again_only_where_it_keeps_no_more(whole):
    config = generated()
    sources = [CountingShapes.open(None, config) for _ in range(2)]
    index = class_index(sources[0], "train")
    pool = ImagePool(whole=whole)
    CountingShapes.decoded.clear()
    some, more = index.ids[:10], index.ids[5:20]
    caches = [pool.cache("train", s, index, ids, config, "cpu") for s in sources for ids in (some, more)]
    assert len(CountingShapes.decoded) == (30 if whole else 10 + 15 + 10 + 15)
    for ids, cache in zip((some, more) * 2, caches, strict=True):
        assert set(ids) <= cache.sizes.keys()
        for id in ids:
            picture, mask = cache._picture(id)
            image, truth = sources[0].pair(id)
            assert (picture.permute(1, 2, 0).numpy() == image).all() and (mask.numpy() == truth).all()


def test_a_shared_pool_keeps_other_data_apart_and_passes_over_images_nobody_asked_for():
    config = generated()
    other = generated(seed=1)
    pool = ImagePool(whole=True)
    first, second = (Shapes.open(None, c) for c in (config, other))
    ids = first.ids("train")[:4]
    one = pool.cache("train", first, class_index(first, "train"), ids, config, "cpu")
    two = pool.cache("train", second, class_index(second, "train"), ids, other, "cpu")
    assert not torch.equal(one._picture(ids[0])[0], two._picture(ids[0])[0])

    class Broken(Shapes):
        def image(self, id):
            if id == self.ids("train")[-1]:
                raise DataError("cannot be read")
            return super().image(id)

    broken = Broken.open(None, config)
    kept = ImagePool(whole=True).cache("train", broken, class_index(first, "train"), ids, config, "cpu")
    assert kept.sizes.keys() == set(ids)
