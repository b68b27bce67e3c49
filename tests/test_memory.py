"""What LAPS remembers: uniform samples, Gaussians of features, points drawn from them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sdrseg.distributed import Processes
from sdrseg.losses.one_vs_rest import against_old_rows, one_vs_rest_sums, rejection
from sdrseg.methods import memory as m
from sdrseg.methods import sample as samples
from sdrseg.methods.adjust import share_of_new

CPU = torch.device("cpu")


def images(n: int, classes: int = 3, side: int = 8) -> tuple[torch.Tensor, torch.Tensor, list[str]]:
    """Embeddings whose first two channels say image and place; labels in 0..classes-1 and 255."""
    torch.manual_seed(n)
    x = torch.rand(n, 4, side, side)
    x[:, 0] = torch.arange(n)[:, None, None]
    x[:, 1] = torch.arange(side * side).view(side, side)
    labels = torch.randint(classes + 1, (n, side, side))
    return x, torch.where(labels == classes, 255, labels).to(torch.uint8), [f"image {i}" for i in range(n)]


def sample(n: int, sizes: list[int], order: list[int] | None = None) -> samples.Sample:
    x, y, ids = images(n)
    order = order or list(range(n))
    made, first = samples.Sample(3, 4, CPU), 0
    for size in sizes:
        rows = order[first : first + size]
        made.add(x[rows], y[rows], [ids[row] for row in rows])
        first += size
    return made


def test_a_sample_holds_vectors_of_the_class_and_counts_all_of_them():
    x, y, _ = images(20)
    made = sample(20, [20])
    for c in range(3):
        assert made.counts[c] == (y == c).sum()
        kept = made.of(c)
        assert 0 < len(kept) <= made.counts[c]
        for image, place, *rest in kept.tolist():
            at = divmod(int(place), 8)
            assert y[int(image), *at] == c
            assert rest == x[int(image), 2:, *at].tolist()


def test_neither_batches_nor_their_order_change_a_sample():
    whole, parts = sample(20, [20]), sample(20, [3, 7, 10], list(reversed(range(20))))
    assert torch.equal(whole.vectors, parts.vectors) and torch.equal(whole.keys, parts.keys)
    assert torch.equal(whole.counts, parts.counts)


def test_views_of_an_image_are_sampled_apart_and_count_as_one_image():
    x, y, ids = images(20)
    made = samples.Sample(3, 4, CPU)
    for view in range(3):
        made.add(x + 100 * view, y, ids, view=view)
    once = sample(20, [20])
    made.average(3)
    assert torch.equal(made.counts, once.counts)
    for c in range(3):
        views = (made.of(c)[:, 0] // 100).unique()
        assert views.tolist() == [0, 1, 2]
        assert len(made.of(c)) > len(once.of(c))


def test_a_class_in_one_of_several_views_still_counts():
    x, y, ids = images(1)
    made = samples.Sample(3, 4, CPU)
    made.add(x[..., :1, :1], torch.ones_like(y[..., :1, :1]), ids)
    made.average(4)
    assert made.counts.tolist() == [0, 1, 0]


def test_a_full_sample_is_uniform(monkeypatch):
    """Each of 40 images with as many pixels is drawn about equally often."""
    monkeypatch.setattr(samples, "CLASS", 2000)
    x, _, ids = images(40, side=16)
    made = samples.Sample(2, 4, CPU)
    made.add(x, torch.ones(40, 16, 16, dtype=torch.uint8), ids)
    drawn = torch.bincount(made.of(1)[:, 0].long(), minlength=40)
    assert len(made.of(1)) > 1900 and drawn.sum() == len(made.of(1))
    assert drawn.min() > 20 and drawn.max() < 90  # 50 each on average


class TwoProcesses(Processes):
    """Both halves of what two processes would exchange, one after the other."""

    def __init__(self, other: samples.Sample):
        super().__init__(alone=True)
        self.world, self.other, self.asked = 2, other, 0

    def max(self, x):
        return torch.maximum(x, -self.other.keys)

    def sum(self, x):
        if x.shape == self.other.counts.shape:
            return x + self.other.counts
        mine = self.other.keys == torch.minimum(self.other.keys, self.seen)
        return x + torch.where(mine[:, None] & (self.other.keys < samples.EMPTY)[:, None], self.other.vectors, 0)


def test_two_processes_draw_what_one_draws():
    whole = sample(20, [20])
    one, two = sample(20, [10]), sample(20, [10], list(range(10, 20)) + list(range(10)))
    both = TwoProcesses(two)
    both.seen = one.keys.clone()
    one.gather(both)
    assert torch.equal(one.keys, whole.keys) and torch.equal(one.counts, whole.counts)
    assert torch.equal(one.vectors, whole.vectors)


def test_a_coarse_map_is_sampled_as_if_it_were_upsampled():
    torch.manual_seed(0)
    maps = torch.rand(2, 3, 5, 7)
    whole = torch.nn.functional.interpolate(maps, size=(20, 28), mode="bilinear", align_corners=False)
    rows, columns = torch.arange(2, 20, 4), torch.tensor([0, 3, 27])
    torch.testing.assert_close(samples.upsampled_at(maps, (20, 28), rows, columns), whole[:, :, rows][..., columns])
    x, y, ids = torch.rand(2, 4, 20, 28), torch.zeros(2, 20, 28, dtype=torch.uint8), ["a", "b"]
    made = samples.Sample(1, 4 + 3, CPU)
    made.add(x, y, ids, maps)
    pairs = torch.cat([x, whole], 1).permute(0, 2, 3, 1).flatten(0, 2)
    for vector in made.of(0)[:50]:
        assert (pairs - vector).abs().amax(1).min() < 1e-6


def test_principal_directions_are_those_of_the_weighted_covariance():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(300, 6)) * [5, 4, 3, 0.3, 0.2, 0.1] @ np.linalg.qr(rng.normal(size=(6, 6)))[0]
    weights = rng.integers(1, 4, 300)
    found = m.principal(torch.tensor(x).float(), torch.tensor(weights).float(), 3).double().numpy()
    _, _, expected = np.linalg.svd((y := np.repeat(x, weights, 0)) - y.mean(0), full_matrices=False)
    np.testing.assert_allclose(np.abs((found * expected[:3]).sum(1)), 1, atol=1e-5)
    assert all(row[np.abs(row).argmax()] > 0 for row in found)
    torch.testing.assert_close(torch.tensor(found @ found.T), torch.eye(3).double(), atol=1e-5, rtol=0)


def test_the_channels_of_a_sample_are_projected():
    made = sample(20, [20])
    before, directions = made.vectors.clone(), torch.tensor([[1.0, 2.0], [0.0, 1.0], [3.0, 0.0]])
    made.project(2, directions)
    assert torch.equal(made.vectors[:, :2], before[:, :2])
    torch.testing.assert_close(made.vectors[:, 2:], before[:, 2:] @ directions.T)
    vectors, points = made.weighted()
    assert len(vectors) == len(points) == sum(len(made.of(c)) for c in range(3))
    assert points.sum().item() == pytest.approx(made.counts.sum().item())


def test_gaussians_have_the_covariance_of_the_vectors():
    torch.manual_seed(0)
    x = torch.randn(500, 6) @ torch.randn(6, 6) + 3
    made = m.gaussians(x, 2, 1234.0, rank=6)
    cov = np.cov(x.double().numpy().T, bias=True)
    assert made.owner.tolist() == [2] and made.points.tolist() == [1234.0]
    np.testing.assert_allclose(made.mean[0], x.mean(0), atol=1e-5)
    np.testing.assert_allclose(made.factor[0] @ made.factor[0].T + torch.diag(made.variance[0]), cov, atol=1e-4)
    columns = made.factor[0].T  # an eigenvector has two signs: its largest entry is positive
    assert all(column[column.abs().argmax()] > 0 for column in columns)
    low = m.gaussians(x, 2, 1.0, rank=2)
    total = (low.factor[0] @ low.factor[0].T).diagonal() + low.variance[0]
    np.testing.assert_allclose(total, cov.diagonal(), atol=1e-4)
    best = np.linalg.svd(cov)[1][2:]  # what two directions leave over at best
    np.testing.assert_allclose(
        np.linalg.norm(cov - (low.factor[0] @ low.factor[0].T).numpy()), np.linalg.norm(best), 1e-4
    )


def test_clusters_of_background_share_the_count():
    x = torch.cat([torch.zeros(30, 3) + torch.rand(30, 3) / 10, torch.ones(10, 3)])
    made = m.gaussians(x, 0, 400.0, rank=0, clusters=2)
    assert sorted(made.points.tolist()) == pytest.approx([100, 300])
    assert made.factor.shape == (2, 3, 0)


def test_points_are_drawn_from_the_memory_and_repeat_with_the_seed():
    torch.manual_seed(0)
    x = (torch.randn(2000, 5) @ torch.randn(5, 5) / 3 + 4).clamp_min(0)
    replay = m.Replay(m.joined([m.gaussians(x, 1, 50.0, 5), m.gaussians(x + 2, 2, 10.0, 5)]), 4000)
    replay.draw(7)
    first = replay.points.clone()
    replay.draw(8)
    assert not torch.equal(first, replay.points)
    replay.draw(7)
    assert torch.equal(first, replay.points) and (first >= 0).all()
    own = first[replay.owner == 1]
    np.testing.assert_allclose(own.mean(0), x.mean(0), atol=0.1)
    np.testing.assert_allclose(np.cov(own.T.numpy()), np.cov(x.T.numpy()), atol=0.15)
    assert replay.represents[replay.owner == 1].sum() == pytest.approx(50)
    assert replay.represents[replay.owner == 2].sum() == pytest.approx(10)


def test_vectors_are_replayed_as_they_are():
    kept = m.Vectors(torch.tensor([0, 1, 1]), torch.tensor([5.0, 2.0, 2.0]), torch.rand(3, 4))
    replay = m.Replay(kept, 100)
    replay.draw(3)
    assert torch.equal(replay.points, kept.mean) and replay.represents.tolist() == [5, 2, 2]


@pytest.mark.parametrize("form", ["gaussian", "prototype", "features"])
def test_a_memory_of_two_steps(form):
    """Counts add up, old classes stay as they are, and everything comes back from the state."""
    memory = m.LatentMemory(form, rank=2, clusters=4)
    first, second = sample(20, [20]), sample(12, [12])
    memory.learn(first, range(1, 2), 0)
    kept = memory.classes
    memory.learn(second, range(2, 3), 1)
    assert torch.equal(memory.classes.mean[: len(kept.mean)], kept.mean)
    assert set(memory.classes.owner.tolist()) == {1, 2} and set(memory.background.owner.tolist()) == {0}
    assert memory.background.points.sum().item() == pytest.approx(first.counts[0].item() + second.counts[0].item())
    own = memory.classes.points[memory.classes.owner == 2].sum().item()
    assert own == pytest.approx(second.counts[2].item(), rel=1e-6)
    assert memory.nbytes == sum(t.nbytes for t in memory.state_dict().values())
    back = m.LatentMemory(form, rank=2, clusters=4)
    back.load_state_dict(memory.state_dict() | {"other.x": torch.zeros(1)})
    for name, part in memory.parts().items():
        assert all(torch.equal(a, b) for a, b in zip(part, back.parts()[name], strict=True))
    memory.drift(torch.eye(3, 4))
    assert torch.equal(memory.classes.mean, back.classes.mean + torch.eye(3, 4)[back.classes.owner])


@pytest.mark.parametrize("form", ["gaussian", "prototype", "features"])
def test_the_size_of_a_full_memory_is_known_before(form):
    memory = m.LatentMemory(form, rank=2, clusters=3)
    sample = samples.Sample(3, 4, CPU)
    sample.vectors, sample.keys, sample.counts = torch.rand_like(sample.vectors), sample.keys * 0, sample.counts + 1
    memory.learn(sample, range(1, 3), 0)
    assert memory.filled(2, 4).nbytes == memory.nbytes


@pytest.mark.parametrize(
    ("form", "numbers", "parts"),
    [
        ("gaussian", 15 * (1 + 256 + 16 * 256 + 256) + 64 * (1 + 256 + 256), 15 + 64),
        ("prototype", 16 * (1 + 256 + 256), 16),
        ("features", (15 * 512 + 8192) * (1 + 256), 15 * 512 + 8192),
    ],
)
def test_the_size_of_a_memory_of_voc(form, numbers, parts):
    assert m.LatentMemory(form, 16, 64).filled(15, 256).nbytes == 4 * numbers + 8 * parts


def test_the_share_of_new_labels_among_points_like_a_part_of_the_background():
    """Near (0, 0): 4 points of background and 2 of a new class; near (9, 9): 1 and 3; near (50, 50): none."""
    centres = torch.tensor([[0.0, 0.0], [9.0, 9.0], [50.0, 50.0]])
    background = m.Vectors(torch.zeros(3, dtype=torch.long), torch.tensor([60.0, 40.0, 10.0]), centres)
    near = torch.tensor([[0, 0, 0, 0, 1], [0, 0, 1, 1, 1]])  # two images: background, and the new class 2
    made = samples.Sample(3, 2, CPU)
    x = (centres[near] + 0.1).permute(0, 2, 1)[:, :, None]
    made.add(x, torch.tensor([[[0] * 5], [[2] * 5]]), ["a", "b"])
    assert share_of_new(background, made, range(2, 3)).tolist() == pytest.approx([2 / 6, 3 / 4, 0])
    made.counts[0] *= 12  # of 60 points, 5 were kept
    assert share_of_new(background, made, range(2, 3)).tolist() == pytest.approx([2 / 50, 3 / 15, 0])


def test_equal_parts_of_the_background_share_their_points():
    """An image that comes back leaves the same vector twice; whether rounding changes its last bits does not matter."""
    centres = torch.tensor([[1.0, 2.0], [1.0, 2.0 + 4e-7], [9.0, 9.0]])
    background = m.Vectors(torch.zeros(3, dtype=torch.long), torch.ones(3), centres)
    made = samples.Sample(3, 2, CPU)
    cells = torch.tensor([[1.0, 2.0], [1.0, 2.0], [1.01, 2.01], [9.0, 9.0]])
    made.add(cells.T[None, :, None], torch.tensor([[[2, 2, 0, 0]]]), ["a"])
    assert share_of_new(background, made, range(2, 3)).tolist() == pytest.approx([2 / 3, 2 / 3, 0])


def test_draws_are_clipped_only_where_features_follow_a_relu():
    torch.manual_seed(0)
    x = torch.randn(4000, 3)
    for shift, lowest in ((0.0, None), (0.5, 0.0)):
        own = x + shift if lowest is None else (x + shift).clamp_min(lowest)
        replay = m.Replay(m.gaussians(own, 1, 1.0, 2), 4000)
        replay.draw(0)
        assert (replay.points.min() >= 0) == (lowest is not None)
        if lowest is None:
            np.testing.assert_allclose(replay.points.mean(0), own.mean(0), atol=0.06)
    moved = m.LatentMemory("gaussian", 2, 1)
    moved.classes = m.gaussians(x.clamp_min(0), 1, 1.0, 2)
    moved.drift(torch.tensor([[0.0] * 3, [-9.0, 0.0, 1.0]]))
    assert moved.classes.mean[0, 0] == 0 and moved.classes.mean[0, 2] == pytest.approx(x[:, 2].clamp_min(0).mean() + 1)


def test_vectors_are_drawn_in_proportion():
    of = m.Vectors(torch.zeros(3, dtype=torch.long), torch.tensor([1.0, 2.0, 1.0]), torch.arange(3.0)[:, None])
    assert m.draw_vectors(of, 8, 0)[:, 0].tolist() == [0, 0, 1, 1, 1, 1, 2, 2]


@pytest.mark.parametrize("old", ["gaussian", "prototype", "features"])
@pytest.mark.parametrize("new", ["gaussian", "prototype", "features"])
def test_a_memory_of_another_form_is_taken_over(old, new):
    """A model that is extended with other settings keeps what it remembers, and learns on."""
    first, second = m.LatentMemory(old, 2, 3), m.LatentMemory(new, 1, 2)
    torch.manual_seed(0)
    centre = torch.tensor([[5.0, 1, 1, 1], [1, 5, 1, 1]])
    first.classes = m.joined([m.fit(centre[c] + torch.rand(300, 4), c + 1, 70.0 + c, old, 2, 3) for c in (0, 1)])
    first.background = m.fit(torch.rand(600, 4), 0, 900.0, old, 2, 3)
    second.load_state_dict(first.state_dict())
    for c in (0, 1):
        own = second.classes.owner == c + 1
        assert second.classes.points[own].sum().item() == pytest.approx(70 + c, rel=1e-5)
        mean = second.classes.points[own] @ second.classes.mean[own] / (70 + c)
        torch.testing.assert_close(mean, centre[c] + 0.5, atol=0.1, rtol=0)
    assert second.background.points.sum().item() == pytest.approx(900, rel=1e-5)
    second.learn(sample(20, [20]), range(2, 3), 0)
    assert second.classes.owner.unique().tolist() == [1, 2]
    assert isinstance(second.classes, m.Vectors) == (new == "features")


def test_one_vs_rest_equals_a_loop():
    rng = np.random.default_rng(0)
    s, y = rng.normal(size=(2, 3, 4, 5)) * 3, rng.choice([0, 1, 2, 3, 4, 255], size=(2, 4, 5))
    total = count = 0.0
    for b, i, j in np.ndindex(y.shape):
        if y[b, i, j] == 255:
            continue
        count += 1
        for row in range(3):
            p = 1 / (1 + np.exp(-s[b, row, i, j]))
            total += -3 * np.log(p) if y[b, i, j] == row + 2 else -np.log(1 - p)
    sums = one_vs_rest_sums(torch.tensor(s), torch.tensor(y, dtype=torch.uint8), 2, 3.0)
    np.testing.assert_allclose(sums, [total, count], rtol=1e-10)


def test_rejection_and_the_softmax_against_old_rows():
    rng = np.random.default_rng(1)
    new, old, w = rng.normal(size=(6, 2)), rng.normal(size=(6, 4)), rng.random(6)
    owner = np.array([0, 1, 2, 3, 1, 0])
    expected = sum(w[i] * np.log1p(np.exp(new[i])).sum() for i in range(6))
    np.testing.assert_allclose(rejection(torch.tensor(new), torch.tensor(w)), expected, rtol=1e-10)
    whole = np.concatenate([old, new], 1)
    ce = sum(w[i] * (np.log(np.exp(whole[i]).sum()) - whole[i, owner[i]]) for i in range(6))
    z, o = torch.tensor(new, requires_grad=True), torch.tensor(old, requires_grad=True)
    value = against_old_rows(z, o, torch.tensor(owner), torch.tensor(w))
    np.testing.assert_allclose(value.detach(), ce, rtol=1e-10)
    value.backward()
    assert o.grad is None and z.grad is not None


@pytest.mark.parametrize("form", ["features", "gaussian"])
@pytest.mark.parametrize(("first", "second"), [(640, 640), (900, 60), (30, 5000), (6000, 6000)])
def test_the_background_of_two_steps_keeps_their_proportion(form, first, second):
    """With few vectors, with many, and with more than are kept: the first step is at 0.2, the second at 0.8."""
    memory = m.LatentMemory(form, 0, 4)
    for value, cells in ((0.2, first), (0.8, second)):
        made = samples.Sample(2, 2, CPU)
        side = torch.full((1, 2, 1, cells), value) + torch.rand(1, 2, 1, cells) * 0.01
        for part in torch.split(side, 1000, 3):
            made.add(part, torch.zeros(1, 1, part.shape[3], dtype=torch.uint8), [f"{value} {len(made.of(0))}"])
        made.counts[0] = cells
        memory.learn(made, range(1, 2), 0)
    background = memory.background
    assert len(background.mean) <= 8192 and background.points.sum().item() == pytest.approx(first + second)
    late = background.points[background.mean[:, 0] > 0.5].sum().item()
    assert late == pytest.approx(second, rel=0.02)
    if form == "features" and first + second < 2000:
        assert len(background.mean.unique(dim=0)) == len(background.mean)


def test_a_memory_of_no_class_is_none():
    empty = {"owner": torch.zeros(0, dtype=torch.long), "points": torch.zeros(0), "mean": torch.zeros(0, 4)}
    for form in ("gaussian", "features"):
        memory = m.LatentMemory(form, 2, 2)
        memory.load_state_dict({f"memory.classes.{name}": tensor for name, tensor in empty.items()})
        assert memory.classes is None
