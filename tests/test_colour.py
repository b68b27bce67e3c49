"""Colour augmentation against plain loops over pixels."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sdrseg.config import load_config
from sdrseg.datasets.augment import FILL
from sdrseg.datasets.batches import train_batches
from sdrseg.datasets.cache import build_cache
from sdrseg.datasets.colour import colour_factors, recolour
from sdrseg.datasets.shapes import Shapes


def slowly(image: np.ndarray, outside: np.ndarray, factors: tuple[float, ...]) -> np.ndarray:
    """One image (H, W, 3), one pixel at a time."""
    brightness, contrast, saturation = factors
    grey = 0.299 * image[..., 0] + 0.587 * image[..., 1] + 0.114 * image[..., 2]
    mean = np.mean([grey[place] for place in np.ndindex(grey.shape) if not outside[place]])
    result = image.copy()
    for place in np.ndindex(grey.shape):
        if not outside[place]:
            for channel in range(3):
                value = grey[place] + saturation * (float(image[place][channel]) - grey[place])
                value = brightness * (mean + contrast * (value - mean))
                result[place][channel] = min(255, max(0, round(value)))
    return result


def test_each_image_by_its_own_factors_and_padding_not_at_all():
    random = np.random.default_rng(0)
    images = random.integers(0, 256, (2, 5, 7, 3), dtype=np.uint8)
    outside = random.random((2, 5, 7)) < 0.3
    factors = [(1.3, 0.8, 0.5), (0.7, 1.2, 1.4)]
    given = torch.from_numpy(images).permute(0, 3, 1, 2)
    found = recolour(given, torch.from_numpy(outside), torch.tensor(factors))
    assert found.is_contiguous(memory_format=torch.channels_last) and found.dtype == torch.uint8
    for number in range(2):
        expected = slowly(images[number], outside[number], factors[number])
        assert abs(found[number].permute(1, 2, 0).numpy().astype(int) - expected).max() <= 1  # float32
    assert torch.equal(recolour(given, torch.from_numpy(outside), torch.ones(2, 3)), given)


def test_factors_are_around_one_and_depend_on_seed_epoch_and_id():
    drawn = [colour_factors(0, epoch, "a", 0.3) for epoch in range(500)]
    assert 0.7 <= np.min(drawn) < 0.72 and 1.28 < np.max(drawn) <= 1.3
    assert np.mean(drawn, axis=0) == pytest.approx([1, 1, 1], abs=0.03)
    assert colour_factors(0, 1, "a", 0.3) == drawn[1] != colour_factors(1, 1, "a", 0.3)
    assert abs(np.corrcoef(np.array(drawn).T) - np.eye(3)).max() < 0.15


def test_cached_and_decoded_images_have_the_same_colours():
    source = Shapes(size=32, train=6)
    table, ids = np.arange(256, dtype=np.uint8), source.ids("train")
    settings = {"data.crop": 48, "train.batch_size": 3, "train.epochs": 2, "data.workers": 0}
    plain = load_config("shapes", None, settings)
    config = load_config("shapes", None, {**settings, "data.colour": 0.5})
    cache = build_cache(source, dict.fromkeys(ids, (32, 32)), torch.device("cpu"), 1)
    before, decoded, cached = (
        list(train_batches(source, ids, table, chosen, cache=held))
        for chosen, held in ((plain, None), (config, None), (config, cache))
    )
    for a, b, c in zip(before, decoded, cached, strict=True):
        assert torch.equal(a.labels, b.labels) and torch.equal(b.labels, c.labels)
        assert not torch.equal(a.images, b.images)
        assert (b.images.int() - c.images.int()).abs().max() <= 2
        fill = torch.tensor(FILL, dtype=torch.uint8)
        assert (b.images.permute(0, 2, 3, 1)[b.padding] == fill).all()
