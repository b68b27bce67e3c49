"""The generated data set: the same bytes everywhere, and a task on which fine-tuning forgets."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import ndimage
from torch import nn
from torch.nn import functional as F

from sdrseg.datasets.shapes import Shapes
from sdrseg.datasets.shapes_appearance import KINDS, SILHOUETTES, TEXTURES
from sdrseg.errors import DataError, UsageError
from sdrseg.labels import VOID

BASE = 6  # classes 1..6 come first, then 7, 8, 9 and 10 one at a time
FOREGROUND = 10


class Scenes(NamedTuple):
    images: np.ndarray  # (N, H, W, 3) uint8
    masks: np.ndarray  # (N, H, W) uint8
    pixels: np.ndarray  # (N, 256): how many pixels of each value

    @property
    def present(self) -> np.ndarray:
        """(N, 11): whether the class occurs."""
        return self.pixels[:, : FOREGROUND + 1] > 0

    @property
    def latest(self) -> np.ndarray:
        """(N,): the highest class id of each image, which decides its step."""
        return (self.present * np.arange(FOREGROUND + 1)).max(axis=1)


def load(shapes: Shapes, split: str) -> Scenes:
    ids = shapes.ids(split)
    masks = np.stack([shapes.mask(id) for id in ids])
    pixels = np.stack([np.bincount(mask.ravel(), minlength=256) for mask in masks])
    return Scenes(np.stack([shapes.image(id) for id in ids]), masks, pixels)


@pytest.fixture(scope="module")
def train() -> Scenes:
    return load(Shapes(), "train")


@pytest.fixture(scope="module")
def val() -> Scenes:
    return load(Shapes(), "val")


def digest(shapes: Shapes, id: str) -> str:
    """The first 16 hex digits of the sha256 of image and mask."""
    return hashlib.sha256(shapes.image(id).tobytes() + shapes.mask(id).tobytes()).hexdigest()[:16]


# --- the same bytes everywhere -------------------------------------------------------------------------------------

GOLDEN = {
    (64, 0, "train-00000"): "464018d614c7a2ad",
    (64, 0, "train-00001"): "2b44540fc5a40c11",
    (64, 0, "train-01199"): "e2bd4e1e2a60dd0a",
    (64, 0, "val-00000"): "f8ea800e0a97b111",
    (64, 0, "val-00199"): "48503d27f86a94c2",
    (64, 1, "train-00000"): "1942f818ee6096b9",
    (64, 2**64 - 1, "train-00000"): "84a97001106cafa5",
    (96, 0, "train-00000"): "60cf99a2bffa0fd2",
    (75, 3, "val-00007"): "c0008472946e8d04",
}


@pytest.mark.parametrize(("size", "seed", "id"), GOLDEN)
def test_golden(size: int, seed: int, id: str) -> None:
    """A change here is a change of the data set: it needs a new VERSION, or it is a bug."""
    assert digest(Shapes(size=size, seed=seed), id) == GOLDEN[size, seed, id]


def test_golden_of_everything(train: Scenes, val: Scenes) -> None:
    content = hashlib.sha256()
    for scenes in (train, val):
        content.update(scenes.images.tobytes())
        content.update(scenes.masks.tobytes())
    assert content.hexdigest() == "25d5d63cebd1d5bc47d56b56bcd24a47131b71eb6658aad6bf4662ea1ca8b08e"


def test_order_of_access_does_not_matter() -> None:
    ids = Shapes().ids("train")[:40]
    forwards = {id: digest(Shapes(), id) for id in ids}
    again = Shapes()
    assert {id: digest(again, id) for id in reversed(ids)} == forwards
    assert len(set(forwards.values())) == len(ids)


def test_a_larger_set_only_appends() -> None:
    small, large = Shapes(train=5, val=3), Shapes(train=50, val=30)
    for split in ("train", "val"):
        ids = small.ids(split)
        assert large.ids(split)[: len(ids)] == ids
        assert [digest(small, id) for id in ids] == [digest(large, id) for id in ids]


def test_splits_and_seeds_share_no_image(train: Scenes, val: Scenes) -> None:
    other = load(Shapes(train=200, seed=1), "train")
    seen = [image.tobytes() for scenes in (train, val, other) for image in scenes.images]
    assert len(set(seen)) == len(seen) == 1200 + 200 + 200


def test_what_is_handed_out_belongs_to_the_caller() -> None:
    shapes = Shapes()
    before = digest(shapes, "train-00003")
    shapes.image("train-00003")[:] = 0
    shapes.mask("train-00003")[:] = 0
    assert digest(shapes, "train-00003") == before


def test_no_warning_and_no_torch() -> None:
    code = "import sys, sdrseg.datasets.shapes as s; s.Shapes().image('val-00000'); sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)


# --- the interface of a source -------------------------------------------------------------------------------------


def test_ids_and_names() -> None:
    shapes = Shapes(train=12, val=3)
    assert shapes.name == "shapes"
    assert shapes.classes[0] == "background" and len(set(shapes.classes)) == len(shapes.classes) == FOREGROUND + 1
    assert shapes.ids("val") == ("val-00000", "val-00001", "val-00002")
    assert shapes.ids("train")[-1] == "train-00011"
    assert list(shapes.ids("train")) == sorted(shapes.ids("train"))


def test_every_kind_has_a_silhouette_and_a_texture() -> None:
    assert {kind.name for kind in KINDS} == set(SILHOUETTES)
    assert {kind.texture for kind in KINDS} == set(TEXTURES)


def test_coding_and_content_decide_the_mask() -> None:
    shapes = Shapes()
    assert shapes.mask_content("val-00001") == shapes.mask("val-00001").tobytes()
    assert len({Shapes().coding, Shapes(size=65).coding, Shapes(seed=1).coding}) == 3
    assert Shapes(train=5).coding == shapes.coding


@pytest.mark.parametrize("id", ["train-01200", "val-00200", "train-0001", "test-00000", "", "train-00001.png"])
def test_unknown_id(id: str) -> None:
    for read in (Shapes().image, Shapes().mask, Shapes().mask_content):
        with pytest.raises(DataError, match=f"shapes:{id}: no such image"):
            read(id)


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("size", 31),
        ("size", 1025),
        ("size", 64.0),
        ("train", 0),
        ("val", 0),
        ("val", -3),
        ("seed", -1),
        ("seed", 2**64),
    ],
)
def test_bad_settings(setting: str, value: int) -> None:
    with pytest.raises(UsageError, match=rf"shapes\.{setting} = {value}"):
        Shapes(**{setting: value})


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**64 - 1), st.sampled_from(["train", "val"]), st.integers(0, 1999), st.integers(32, 130))
def test_any_scene_is_valid(seed: int, split: str, number: int, size: int) -> None:
    shapes = Shapes(size=size, train=2000, val=2000, seed=seed)
    image, mask = shapes.image(f"{split}-{number:05}"), shapes.mask(f"{split}-{number:05}")
    assert image.shape == (size, size, 3) and image.dtype == np.uint8
    assert mask.shape == (size, size) and mask.dtype == np.uint8
    values = set(np.unique(mask).tolist())
    assert values <= {*range(FOREGROUND + 1), VOID}
    assert {0, VOID} < values
    assert image.std() > 5


# --- what the scenes hold ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [32, 75, 96])
def test_a_scene_looks_the_same_at_any_size(size: int) -> None:
    shapes, finer = Shapes(size=size), Shapes(size=2 * size)
    for id in shapes.ids("train")[:20]:
        coarse, fine = shapes.mask(id), finer.mask(id)[::2, ::2]
        labelled = (coarse != VOID) & (fine != VOID)
        assert (coarse == fine)[labelled].mean() > 0.98


def test_void_lines_are_thin_and_closed(train: Scenes) -> None:
    assert 0.02 < train.pixels[:, VOID].sum() / train.masks.size < 0.10
    assert train.pixels[:, VOID].max() < 0.15 * 64 * 64
    thick = ndimage.binary_erosion(train.masks == VOID, np.ones((1, 3, 3), bool))
    assert thick.sum() < 0.001 * train.pixels[:, VOID].sum()
    for a, b in ((train.masks[:, 1:], train.masks[:, :-1]), (train.masks[:, :, 1:], train.masks[:, :, :-1])):
        assert not ((a != b) & (a != VOID) & (b != VOID)).any()  # no object touches anything but void


def test_objects_occlude_each_other(train: Scenes) -> None:
    """A whole disc fills π/4 of its square box; one with a bite, away from the frame, has another in front of it."""
    whole = bitten = 0
    for mask in train.masks:
        components, _ = ndimage.label(mask == 1)
        for rows, columns in ndimage.find_objects(components):
            if min(rows.start, columns.start) > 0 and max(rows.stop, columns.stop) < 64:
                height, width = rows.stop - rows.start, columns.stop - columns.start
                fill = (mask[rows, columns] == 1).sum() / (height * width)
                if abs(height - width) <= 1 and 0.7 < fill < 0.87:
                    whole += 1
                else:
                    bitten += 1
    assert whole > 100
    assert 0.1 < bitten / (whole + bitten) < 0.6


def test_each_class_is_seen_well(train: Scenes, val: Scenes) -> None:
    for scenes, images in ((train, 100), (val, 15)):
        assert (scenes.present.sum(axis=0) >= images).all()
        share = scenes.pixels[:, : FOREGROUND + 1].sum(axis=0) / scenes.present.sum(axis=0) / (64 * 64)
        assert (share > 0.04).all()
        assert (scenes.pixels[:, 0] > 0.25 * 64 * 64).all()  # background in every image
        assert (scenes.latest > 0).all()  # and an object
        assert np.where(scenes.present[:, 1:], scenes.pixels[:, 1 : FOREGROUND + 1], 4096).min() >= 10  # no crumbs


@pytest.mark.parametrize("seed", [0, 1])
def test_steps_get_their_images_and_contain_old_classes(seed: int) -> None:
    scenes = load(Shapes(train=800, seed=seed), "train")
    steps = np.maximum(scenes.latest - BASE, 0)
    shares = np.bincount(steps) / len(steps)
    assert shares[0] > 0.4
    assert (shares[1:] > 0.09).all() and len(shares) == 5
    for step in range(1, 5):
        assert scenes.present[steps == step, 1 : BASE + 1].any(axis=1).mean() > 0.7


def test_classes_have_their_company_and_their_ground(train: Scenes) -> None:
    """Partners are seen with a class far more often than others, and the ground tells something about the class."""
    present = train.present[:, 1:]
    for label, kind in enumerate(KINDS, start=1):
        together = present[present[:, label - 1]].mean(axis=0)
        partners = [partner - 1 for partner in kind.partners]
        others = [other for other in range(FOREGROUND) if other not in (*partners, label - 1)]
        assert together[partners].mean() > 1.5 * together[others].mean()
    grounds = np.stack([image[mask == 0].mean(axis=0) for image, mask in zip(train.images, train.masks, strict=True)])
    bluer = grounds[:, 2] - grounds[:, 0]
    crescents, arrows = (present[:, Shapes.classes.index(name) - 1] for name in ("crescent", "arrow"))
    assert bluer[crescents & ~arrows].mean() > 30 + bluer[arrows & ~crescents].mean()  # sky against deck


def test_colour_alone_does_not_tell_the_class(train: Scenes, val: Scenes) -> None:
    """The best class for each of 512 colours, found on train: bad on val."""
    counts = np.zeros((FOREGROUND + 1, 512), np.int64)
    known = train.masks != VOID
    np.add.at(counts, (train.masks[known], _colour_bin(train.images)[known]), 1)
    guess, truth = counts.argmax(axis=0)[_colour_bin(val.images)], val.masks
    ious = [
        ((guess == c) & (truth == c)).sum() / ((guess == c) & (truth != VOID) | (truth == c)).sum() for c in range(11)
    ]
    assert np.mean(ious[1:]) < 0.45


def _colour_bin(images: np.ndarray) -> np.ndarray:
    red, green, blue = np.moveaxis((images >> 5).astype(np.int64), -1, 0)
    return red * 64 + green * 8 + blue


# --- fine-tuning forgets -------------------------------------------------------------------------------------------


class TinyNet(nn.Sequential):
    """Four 3×3 convolutions at a quarter of the resolution; (N, 3, H, W) to (N, classes, H, W)."""

    def __init__(self, classes: int, width: int = 16) -> None:
        plan = ((3, width, 2), (width, 2 * width, 2), (2 * width, 2 * width, 1), (2 * width, 2 * width, 1))
        layers: list[nn.Module] = []
        for inputs, outputs, stride in plan:
            layers += [nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]
        super().__init__(*layers, nn.Conv2d(2 * width, classes, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.interpolate(super().forward(x), size=x.shape[-2:], mode="bilinear", align_corners=False)


def fit(net: nn.Module, images: np.ndarray, labels: np.ndarray, epochs: int, rate: float, batch: int = 16) -> None:
    x, y = _tensor(images), torch.from_numpy(labels).long()
    optimiser = torch.optim.Adam(net.parameters(), rate)
    batches = len(x) // batch
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, rate, total_steps=epochs * batches)
    net.train()
    for _ in range(epochs):
        for chosen in torch.randperm(len(x))[: batches * batch].view(batches, batch):
            optimiser.zero_grad()
            F.cross_entropy(net(x[chosen]), y[chosen], ignore_index=VOID).backward()
            optimiser.step()
            schedule.step()


@torch.no_grad()
def confusion(net: nn.Module, images: np.ndarray, labels: np.ndarray, classes: int) -> np.ndarray:
    """(classes, classes): rows are the truth."""
    guess = net.eval()(_tensor(images)).argmax(dim=1).numpy()
    pairs = (labels.astype(np.int64) * classes + guess)[labels != VOID]
    return np.bincount(pairs, minlength=classes**2).reshape(classes, classes)


def ious(counts: np.ndarray) -> np.ndarray:
    hits = counts.diagonal()
    return hits / np.maximum(counts.sum(axis=0) + counts.sum(axis=1) - hits, 1)


def _tensor(images: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(images).permute(0, 3, 1, 2).float() / 127.5 - 1


def forgetting(train: Scenes, val: Scenes, seed: int) -> dict[str, float]:
    """Learn classes 1..6, then fine-tune on class 7 where all else is labelled background."""
    new = BASE + 1
    first, second = train.latest <= BASE, train.latest == new
    disjoint = np.where(np.isin(train.masks[second], (new, VOID)), train.masks[second], 0).astype(np.uint8)
    seen = val.latest <= new
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        net = TinyNet(new + 1)
        fit(net, train.images[first], train.masks[first], epochs=10, rate=8e-3)
        before = confusion(net, val.images[seen], val.masks[seen], new + 1)
        fit(net, train.images[second], disjoint, epochs=10, rate=3e-3)
        after = confusion(net, val.images[seen], val.masks[seen], new + 1)
    return {
        "base": ious(before[:new, :new]).mean(),  # the new class left out: the network has not met it
        "old before": ious(before)[1:new].mean(),
        "old after": ious(after)[1:new].mean(),
        "new": ious(after)[new],
        "old called background": after[1:new, 0].sum() / after[1:new].sum(),
    }


@pytest.fixture
def one_thread():
    """The network is too small to gain from more, and on a busy machine threads wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("one_thread")
def test_fine_tuning_forgets(train: Scenes, val: Scenes) -> None:
    result = forgetting(train, val, seed=0)
    assert result["base"] > 0.6, result
    assert result["old before"] > 0.5, result
    assert result["new"] > 0.3, result
    assert result["old after"] < 0.2 * result["old before"], result
    assert result["old called background"] > 0.8, result
