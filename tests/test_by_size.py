"""Settings of an extension by the number of its images."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sdrseg.extend.by_size import EPOCHS, settings_by_size


def by_size(images: int, method: str = "sdr", *rates: float) -> dict:
    return settings_by_size(images, True, method, *(rates or [1e-3]))


def test_few_images_get_small_batches_and_rows_of_laps_an_average_frequency():
    few, many = by_size(40, "mib"), by_size(400, "mib")
    assert few["train"] == {"batch_size": 4, "epochs": 40, "best_every": 4, "patience": 4}
    assert many["train"]["batch_size"] == 8 and many["train"]["epochs"] == 8
    assert few.keys() == many.keys() == {"train", "optim"} and few["optim"].keys() == {"lr_later"}
    for images, views in ((1, 16), (63, 16), (64, 1), (400, 1)):
        assert by_size(images, "laps-softmax")["laps"] == {"prior": "average", "positive": 1.0, "views": views}


@given(st.integers(1, 5000), st.booleans())
def test_every_number_of_images_can_be_trained_on(images, held_out):
    train = settings_by_size(images, held_out, "sdr", 1e-3)["train"]
    assert 1 <= train["batch_size"] <= images and train["epochs"] >= EPOCHS
    assert (images // train["batch_size"]) * train["epochs"] >= 400
    assert ("best_every" in train) == held_out and train.get("best_every", 1) <= train["epochs"]


@pytest.mark.parametrize(("images", "share"), [(40, 25), (400, 10)])
def test_the_rate_is_a_share_of_step_0s_and_never_above_the_one_that_was_set(images, share):
    assert by_size(images, "sdr", 1e-3, 1.0)["optim"]["lr_later"] == pytest.approx(1e-3 / share)
    assert by_size(images, "sdr", 1e-3, 1e-7)["optim"]["lr_later"] == 1e-7
    assert by_size(images, "sdr", 0.05)["optim"]["lr_later"] == pytest.approx(0.05 / share)  # none was set
