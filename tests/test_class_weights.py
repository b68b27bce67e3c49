"""Weights of classes, against loops over pixels and numbers worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from runs import run
from sdrseg.config import load_config
from sdrseg.engine.class_weights import frequency_weights, require_class_weights, weights_by_name
from sdrseg.errors import UsageError
from sdrseg.losses.cross_entropy import unbiased_cross_entropy_sums, weighted_cross_entropy_sums

VOID = 255


@pytest.mark.parametrize("n_old", [1, 3])
@pytest.mark.parametrize("count_void", [False, True])
def test_each_pixel_counts_by_the_weight_of_its_class(n_old, count_void):
    torch.manual_seed(0)
    z = torch.randn(2, 5, 3, 4, dtype=torch.float64)
    labels = torch.tensor([0, 3, 4, VOID]).repeat(6).view(2, 3, 4).to(torch.uint8)
    weights = torch.tensor([0.5, 1.0, 1.0, 2.0, 7.0], dtype=torch.float64)
    total = count = 0.0
    for b, y, x in np.ndindex(2, 3, 4):
        label = int(labels[b, y, x])
        if label == VOID:
            continue
        e = [math.exp(v) for v in z[b, :, y, x].tolist()]
        p = sum(e[:n_old]) / sum(e) if label < n_old else e[label] / sum(e)
        total -= float(weights[label]) * math.log(p)
        count += float(weights[label])
    found = weighted_cross_entropy_sums(z, labels, n_old, weights, count_void=count_void)
    assert found.tolist() == pytest.approx([total, 24 if count_void else count])
    alike = weighted_cross_entropy_sums(z, labels, n_old, torch.ones(5, dtype=torch.float64), count_void=count_void)
    assert torch.allclose(alike, unbiased_cross_entropy_sums(z, labels, n_old, count_void=count_void))


def test_rare_classes_weigh_more_by_median_frequency():
    """Values 0, 1, 2 in two images of 100 labelled pixels; 7 is not a class of the step (void), 3 is in no image."""
    pixels = np.zeros((2, 256), np.int64)
    pixels[0, [0, 1, 7]] = 90, 10, 50
    pixels[1, [0, 2]] = 60, 40
    table = np.full(256, VOID, np.uint8)
    table[:4] = range(4)
    # frequencies: 150 / 200, 10 / 100, 40 / 100; their median is 0.4
    assert frequency_weights(pixels, table, 4) == pytest.approx((0.4 / 0.75, 4.0, 1.0, 1.0))
    pixels[0, [1, 2]] = 0, 1
    assert max(frequency_weights(pixels, table, 4)) <= 10
    assert frequency_weights(np.zeros((1, 256), np.int64), table, 2) == (1.0, 1.0)


def test_weights_are_read_by_name():
    classes = ("background", "cat", "a=b")
    assert weights_by_name("cat=2", classes) == {"cat": 2.0}
    assert weights_by_name(" cat = 0.5 ,a=b=3", classes) == {"cat": 0.5, "a=b": 3.0}
    for text, message in (
        ("cot=2", "'cot' is not a class.*cat"),
        ("cat=much", "'cat=much' is not valid"),
        ("cat=-1", "is not valid"),
        ("often", "'often' is not valid. Write none, frequency or NAME=WEIGHT"),
        ("cat=inf", "is not valid"),
    ):
        with pytest.raises(UsageError, match=message):
            weights_by_name(text, classes)


def test_sigmoids_have_no_class_weights():
    config = load_config("shapes", None, {"ce.class_weights": "frequency", "ce.kind": "binary"})
    with pytest.raises(UsageError, match=r"cannot be used with ce\.kind=binary"):
        require_class_weights(config, ("background", "disc"))


def test_runs_with_class_weights(tmp_path):
    """Weights of 1 change nothing but rounding, others do; accumulated parts make the whole mean."""
    spec, base = "shapes:9-1@disjoint", tmp_path / "bases"
    plain = run(tmp_path / "plain", "mib", spec=spec, bases=base)
    ones = run(tmp_path / "ones", "mib", "ce.class_weights=background=1", spec=spec, bases=base)
    rare = run(tmp_path / "rare", "mib", "ce.class_weights=frequency", "run.accumulate=2", spec=spec, bases=base)
    assert ones["miou"]["all"] == pytest.approx(plain["miou"]["all"], abs=0.02)
    assert rare["miou"]["all"] != plain["miou"]["all"]
    with pytest.raises(UsageError, match="is not a class"):
        run(tmp_path / "wrong", "mib", "ce.class_weights=cow=2", spec=spec, bases=base)
    assert not (tmp_path / "wrong").exists()
