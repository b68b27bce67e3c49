"""Views: what they show, against references written out in NumPy, PIL's rules and torchvision's own transforms."""

from __future__ import annotations

import math
import random
from statistics import mean, median

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image
from torchvision import tv_tensors
from torchvision.transforms import v2

from sdrseg.datasets.augment import (
    FILL,
    MEAN,
    STD,
    Axis,
    View,
    crop512,
    full_image,
    normalise,
    padding,
    rrc,
    scale_crop,
    show,
)

VOC_SIZE = (375, 500)


def pair(height: int, width: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Laid out as sources and caches do: one pixel's colours side by side."""
    rng = np.random.default_rng(seed)
    image = rng.integers(0, 256, (height, width, 3)).astype(np.uint8)
    return torch.from_numpy(image).permute(2, 0, 1), torch.from_numpy(
        rng.integers(0, 256, (height, width)).astype(np.uint8)
    )


# --- references -----------------------------------------------------------------------------------------------------


def nearest_rows(length: int, size: int) -> list[int]:
    """The source pixel of each resized pixel, by Pillow."""
    column = Image.fromarray(np.arange(length, dtype=np.int32)[:, None])
    return np.array(column.resize((1, size), Image.Resampling.NEAREST))[:, 0].tolist()


def filter_rows(length: int, size: int) -> np.ndarray:
    """(size, length) weights of the antialiased triangle filter, from its definition."""
    ratio = length / size
    reach = max(1.0, ratio)
    weights = np.zeros((size, length))
    for i in range(size):
        centre = (i + 0.5) * ratio
        for j in range(length):
            weights[i, j] = max(0.0, 1 - abs(j + 0.5 - centre) / reach)
        weights[i] /= weights[i].sum()
    return weights


def shown_by_hand(view: View, image: np.ndarray, mask: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The output pixel by pixel: image as float64 before rounding, mask, padding."""
    rows, columns = view.rows, view.columns
    box = np.s_[rows.low : rows.high, columns.low : columns.high]
    part = image[(slice(None), *box)].astype(float)
    resized = (
        filter_rows(rows.high - rows.low, rows.size) @ part @ filter_rows(columns.high - columns.low, columns.size).T
    )
    label = mask[box][nearest_rows(rows.high - rows.low, rows.size)][
        :, nearest_rows(columns.high - columns.low, columns.size)
    ]
    picture = np.empty((3, rows.out, columns.out))
    picture[:] = np.array(FILL)[:, None, None]
    labels = np.full((rows.out, columns.out), 255)
    outside = np.ones((rows.out, columns.out), bool)
    for i in range(rows.out):
        for j in range(columns.out):
            y, x = i + rows.offset, (columns.out - 1 - j if view.flip else j) + columns.offset
            if 0 <= y < rows.size and 0 <= x < columns.size:
                picture[:, i, j] = resized[:, y, x]
                labels[i, j] = label[y, x]
                outside[i, j] = False
    return picture, labels, outside


@settings(max_examples=300, deadline=None)
@given(st.integers(1, 2000), st.integers(1, 2000), st.integers(0, 50))
@example(60, 43, 0)
def test_the_labels_source_pixels_are_pillows(length, size, low):
    """Ties included: of 60 pixels resized to 43, the centre of pixel 21 lies between 29 and 30."""
    whole = Axis(low, low + length, size, 0, size)
    assert (whole.nearest - low).tolist() == nearest_rows(length, size)
    column = Image.fromarray(np.arange(length, dtype=np.int32)[None])
    assert (whole.nearest - low).tolist() == np.array(column.resize((size, 1), Image.Resampling.NEAREST))[0].tolist()


def assert_shows(view: View, image: torch.Tensor, mask: torch.Tensor) -> None:
    picture, label = show(view, image, mask)
    expected_picture, expected_label, expected_padding = shown_by_hand(view, image.numpy(), mask.numpy())
    assert picture.dtype == label.dtype == torch.uint8 and type(picture) is type(label) is torch.Tensor
    assert np.array_equal(padding(view).numpy(), expected_padding)
    assert np.array_equal(label.numpy(), expected_label)
    assert np.abs(picture.numpy() - expected_picture).max() <= 1.01  # torchvision rounds once for each axis
    unscaled = all(a.high - a.low == a.size for a in (view.rows, view.columns))
    assert not unscaled or np.array_equal(picture.numpy(), expected_picture)


# --- carrying out a view --------------------------------------------------------------------------------------------

AXES = st.builds(
    lambda length, part, size, place, out: axis(length, part, size, place, out),
    st.integers(1, 14),
    st.tuples(st.floats(0, 1), st.floats(0, 1)),
    st.integers(1, 30),
    st.floats(0, 1),
    st.integers(1, 20),
)


def axis(length: int, part: tuple[float, float], size: int, place: float, out: int) -> tuple[int, Axis]:
    """Any part of `length` pixels resized to `size`, so that at least one of `out` pixels shows it."""
    low = int(part[0] * (length - 1))
    high = low + 1 + int(part[1] * (length - low - 1))
    first, last = -(out - 1), size - 1
    return length, Axis(low, high, size, first + int(place * (last - first)), out)


@settings(max_examples=120, deadline=None)
@given(AXES, AXES, st.booleans(), st.integers(0, 99))
def test_any_view_equals_the_reference(rows, columns, flip, seed):
    assert_shows(View(rows[1], columns[1], flip), *pair(rows[0], columns[0], seed))


CHOOSERS = {
    "scale_crop": lambda size, draw: scale_crop(size, 16, (0.5, 2.0), draw),
    "rrc": lambda size, draw: rrc(size, 16, (0.5, 2.0), draw),
    "crop512": lambda size, draw: crop512(size, 16),
    "full_image": lambda size, draw: full_image(size),
}


@pytest.mark.parametrize("kind", CHOOSERS)
@pytest.mark.parametrize("size", [(1, 1), (1, 9), (9, 1), (16, 16), (15, 17), (7, 40), (40, 33)])
def test_every_kind_of_view_on_every_kind_of_size(kind, size):
    for seed in range(3):
        view = CHOOSERS[kind](size, random.Random(seed))
        for part, length in ((view.rows, size[0]), (view.columns, size[1])):
            assert 0 <= part.low < part.high <= length
            first, last = part.shown
            assert 0 <= first < last <= part.out
        assert_shows(view, *pair(*size, seed))


@settings(max_examples=80, deadline=None)
@given(st.sampled_from(sorted(CHOOSERS)), st.integers(1, 70), st.integers(1, 70), st.integers(0, 2**32))
def test_sizes_and_padding_of_any_view(kind, height, width, seed):
    image, mask = (
        torch.full((height, width, 3), 7, dtype=torch.uint8).permute(2, 0, 1),
        torch.full((height, width), 3, dtype=torch.uint8),
    )
    view = CHOOSERS[kind]((height, width), random.Random(seed))
    picture, label = show(view, image, mask)
    outside = padding(view)
    assert picture.shape[1:] == label.shape == outside.shape
    if kind != "full_image":
        assert label.shape == (16, 16)
    fill = torch.tensor(FILL, dtype=torch.uint8)[:, None, None]
    assert torch.equal(outside, (picture == fill).all(0))  # where a constant image turned into the fill colour
    assert torch.equal(outside, label == 255)
    assert ((picture == 7).all(0) | outside).all() and not outside.all()


def test_labels_are_those_that_pillow_finds():
    """Also where a centre lies on the border of two pixels, and Pillow's sum of steps falls short of it."""
    for length in range(1, 61):
        row = np.arange(length, dtype=np.uint8)[None]
        for size in range(1, 61):
            view = View(Axis(0, 1, 1, 0, 1), Axis(0, length, size, 0, size))
            label = show(view, torch.zeros(3, 1, length, dtype=torch.uint8), torch.from_numpy(row))[1][0].tolist()
            theirs = np.asarray(Image.fromarray(row).resize((size, 1), Image.Resampling.NEAREST))[0].tolist()
            assert label == theirs


def test_a_mask_stays_where_its_image_is():
    """An image whose grey says where a pixel is, and a mask that says the same: resized, they agree in the mean."""
    ramp = torch.arange(0, 200, dtype=torch.uint8)
    for size in (77, 131, 273, 391):
        view = View(Axis(0, 1, 1, 0, 1), Axis(0, 200, size, 0, size))
        image, mask = show(view, ramp.expand(3, 1, -1), ramp[None])
        assert abs(float((image[0].float() - mask.float()).mean())) < 0.02


def test_flip_swaps_left_and_right_of_everything():
    image, mask = pair(5, 9)
    straight, flipped = (View(Axis(0, 5, 7, -2, 10), Axis(0, 9, 6, -1, 12), flip) for flip in (False, True))
    for one, other in zip(show(straight, image, mask), show(flipped, image, mask), strict=True):
        assert torch.equal(one.flip(-1), other) and not torch.equal(one, other)
    assert torch.equal(padding(straight).flip(-1), padding(flipped))


def test_a_view_does_not_touch_the_original():
    image, mask = pair(16, 16)
    before = image.clone(), mask.clone()
    picture, label = show(full_image((16, 16)), image, mask)
    assert torch.equal(picture, image) and torch.equal(label, mask)
    show(scale_crop((16, 16), 32, (1, 1), random.Random(0)), image, mask)
    assert torch.equal(image, before[0]) and torch.equal(mask, before[1])


# --- scale_crop -------------------------------------------------------------------------------------------------------


def drawn(chooser, size=VOC_SIZE, crop=512, number=4000, scale=(0.5, 2.0)) -> list[View]:
    return [chooser(size, crop, scale, random.Random(f"test {n}")) for n in range(number)]


def test_scale_crop_draws_scales_offsets_and_flips_evenly():
    views = drawn(scale_crop)
    scales = [v.columns.size / 500 for v in views]
    assert min(scales) >= 0.5 and max(scales) <= 2.0
    deciles = np.histogram(scales, bins=np.linspace(0.5, 2, 11))[0]
    assert all(abs(n - 400) < 4.5 * math.sqrt(400 * 0.9) for n in deciles)
    assert abs(sum(v.flip for v in views) - 2000) < 4.5 * math.sqrt(1000)
    for rows, columns in ((v.rows, v.columns) for v in views):
        assert (rows.low, rows.high, columns.low, columns.high) == (0, 375, 0, 500)
        factor = columns.size / 500
        assert abs(rows.size - 375 * factor) <= 0.9  # one scale for both axes, each rounded
        for part in (rows, columns):
            room = part.size - 512
            assert min(0, room) <= part.offset <= max(0, room)
    for part in ([v.rows for v in views], [v.columns for v in views]):
        places = [a.offset / (a.size - 512) for a in part if abs(a.size - 512) > 50]
        assert abs(mean(places) - 0.5) < 4.5 * math.sqrt(1 / 12 / len(places)) + 0.001
        assert min(places) < 0.02 and max(places) > 0.98  # both ends occur
    rows, columns = (
        np.array([a.offset / (a.size - 512 or 1) for a in part])
        for part in ([v.rows for v in views], [v.columns for v in views])
    )
    assert abs(np.corrcoef(rows, columns)[0, 1]) < 0.08  # rows and columns are drawn apart


@pytest.mark.parametrize(("length", "scale", "scaled"), [(10, 0.56, 6), (10, 0.54, 5), (3, 1.9, 6), (1, 0.1, 1)])
def test_scaled_sizes_are_rounded_and_never_zero(length, scale, scaled):
    view = scale_crop((length, 2 * length), 32, (scale, scale), random.Random(0))
    assert view.rows.size == scaled
    assert abs(view.columns.size - 2 * length * scale) <= 0.9


def test_offsets_reach_every_place_equally_often():
    views = drawn(scale_crop, size=(10, 10), crop=7, number=4000, scale=(1, 1))
    counts = np.bincount([v.rows.offset for v in views], minlength=4)
    assert len(counts) == 4 and all(abs(n - 1000) < 4.5 * math.sqrt(750) for n in counts)
    views = drawn(scale_crop, size=(7, 7), crop=10, number=4000, scale=(1, 1))
    counts = np.bincount([-v.columns.offset for v in views], minlength=4)
    assert len(counts) == 4 and all(abs(n - 1000) < 4.5 * math.sqrt(750) for n in counts)


def test_the_share_of_padding_is_that_of_the_specification():
    """docs/specification.md, D-33: 23 % of a 500×375 image on average. Also by the integral over the scale."""

    def covered(view: View) -> float:
        shares = [(last - first) / 512 for first, last in (view.rows.shown, view.columns.shown)]
        return shares[0] * shares[1]

    found = 1 - mean(covered(v) for v in drawn(scale_crop))
    grid = np.linspace(0.5, 2, 100_001)
    expected = 1 - np.mean(np.minimum(1, 500 * grid / 512) * np.minimum(1, 375 * grid / 512))
    assert abs(expected - 0.23) < 0.005
    assert abs(found - expected) < 0.015


# --- rrc --------------------------------------------------------------------------------------------------------------


def test_rrc_covers_the_areas_of_the_specification():
    """docs/specification.md, 3.1: crops of 500×375 cover 67 % (median), 14 % the whole image; always 50 to 100 %."""
    views = drawn(rrc, number=10_000)
    areas = [(v.rows.high - v.rows.low) * (v.columns.high - v.columns.low) / (375 * 500) for v in views]
    assert min(areas) > 0.495 and max(areas) <= 1
    assert abs(median(areas) - 0.67) < 0.01
    whole = mean((v.rows.high - v.rows.low, v.columns.high - v.columns.low) == (375, 500) for v in views)
    assert abs(whole - 0.145) < 0.012
    assert all((v.rows.size, v.rows.offset, v.rows.out) == (512, 0, 512) and not padding(v).any() for v in views[:20])


@pytest.mark.parametrize("size", [VOC_SIZE, (500, 375), (200, 900), (64, 64), (3, 2)])
@pytest.mark.parametrize("scale", [(0.5, 2.0), (0.08, 1.0)])
def test_rrc_draws_like_torchvision(size, scale):
    number = 1500
    transform = v2.RandomResizedCrop(16, scale=scale, antialias=True)
    picture = tv_tensors.Image(torch.zeros(3, *size, dtype=torch.uint8))
    torch.manual_seed(5)
    theirs = [transform.make_params([picture]) for _ in range(number)]
    views = drawn(rrc, size=size, number=number, scale=scale)
    ours = [
        {
            "top": v.rows.low,
            "left": v.columns.low,
            "height": v.rows.high - v.rows.low,
            "width": v.columns.high - v.columns.low,
        }
        for v in views
    ]
    for what in ("top", "left", "height", "width"):
        a, b = (np.sort([params[what] for params in some]) for some in (ours, theirs))
        assert abs(a.mean() - b.mean()) <= 4.5 * math.sqrt((a.var() + b.var()) / number)
        shares = [np.searchsorted(some, np.union1d(a, b), side="right") / number for some in (a, b)]
        assert np.abs(shares[0] - shares[1]).max() < 2.3 * math.sqrt(2 / number)  # Kolmogorov and Smirnov, p < 1e-4


@pytest.mark.parametrize(
    "size",
    [(1, 1), (1, 50), (50, 1), (375, 500), (500, 375), (300, 400), (400, 300), (10, 95), (95, 10), (11, 95), (95, 11)],
)
def test_rrc_falls_back_like_torchvision(size):
    """Areas that never fit: after ten attempts both take the middle, cut to an aspect between 3:4 and 4:3."""
    transform = v2.RandomResizedCrop(16, scale=(50, 60), antialias=True)
    theirs = transform.make_params([tv_tensors.Image(torch.zeros(3, *size, dtype=torch.uint8))])
    view = rrc(size, 16, (50, 60), random.Random(0))
    assert (view.rows.low, view.columns.low) == (theirs["top"], theirs["left"])
    assert (view.rows.high - view.rows.low, view.columns.high - view.columns.low) == (theirs["height"], theirs["width"])


# --- evaluation -------------------------------------------------------------------------------------------------------


def resized_and_cropped(image: torch.Tensor, mask: torch.Tensor, crop: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The image by torchvision, and the mask by hand between torchvision's sizes."""
    picture = v2.Resize(crop, antialias=True)(image)
    height, width = picture.shape[-2:]
    rows, columns = nearest_rows(mask.shape[0], height), nearest_rows(mask.shape[1], width)
    centre = v2.CenterCrop(crop)
    return centre(picture), centre(tv_tensors.Mask(mask[rows][:, columns])).as_subclass(torch.Tensor)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 90), st.integers(1, 90), st.sampled_from([16, 17, 32]))
def test_crop512_equals_resize_and_centre_crop(height, width, crop):
    image, mask = pair(height, width)
    expected_image, expected_mask = resized_and_cropped(image, mask, crop)
    picture, label = show(crop512((height, width), crop), image, mask)
    assert torch.equal(picture, expected_image) and torch.equal(label, expected_mask)
    assert not padding(crop512((height, width), crop)).any()


@pytest.mark.parametrize("size", [(375, 500), (500, 375), (333, 500), (500, 334), (281, 500), (512, 512), (513, 1023)])
def test_crop512_at_its_real_size(size):
    image, mask = pair(*size)
    expected_image, expected_mask = resized_and_cropped(image, mask, 512)
    picture, label = show(crop512(size), image, mask)
    assert picture.shape == (3, 512, 512)
    assert torch.equal(picture, expected_image) and torch.equal(label, expected_mask)


@pytest.mark.parametrize(
    ("size", "out"), [((1, 1), (16, 16)), ((16, 32), (16, 32)), ((17, 31), (32, 32)), ((375, 500), (384, 512))]
)
def test_full_image_keeps_every_pixel_and_pads_bottom_and_right(size, out):
    image, mask = pair(*size)
    view = full_image(size)
    picture, label = show(view, image, mask)
    assert tuple(picture.shape[1:]) == out
    height, width = size
    assert torch.equal(picture[:, :height, :width], image) and torch.equal(label[:height, :width], mask)
    outside = padding(view)
    assert not outside[:height, :width].any() and outside[height:].all() and outside[:, width:].all()
    assert outside.sum() == out[0] * out[1] - height * width


# --- normalisation --------------------------------------------------------------------------------------------------


def test_normalise_by_hand():
    image, _ = pair(4, 5)
    batch = image[None].contiguous(memory_format=torch.channels_last)
    result = normalise(batch)
    assert result.dtype == torch.float32 and result.is_contiguous(memory_format=torch.channels_last)
    expected = (image.double() / 255 - torch.tensor(MEAN).double()[:, None, None]) / torch.tensor(STD).double()[
        :, None, None
    ]
    assert (result[0] - expected).abs().max() < 1e-5


def test_padding_is_close_to_zero_after_normalisation():
    fill = torch.tensor(FILL, dtype=torch.uint8)[None, :, None, None]
    assert normalise(fill).abs().max() < 0.5 / 255 / min(STD) + 1e-6
