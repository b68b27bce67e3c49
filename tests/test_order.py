"""Which image is used when, and by which process."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sdrseg.datasets.order import EvalOrder, Share, TrainOrder
from sdrseg.errors import SdrsegError

IDS = [f"id{n}" for n in range(11)]


def order(ids=IDS, batch_size=4, epochs=3, seed=0, share=None) -> TrainOrder:
    return TrainOrder(ids, batch_size, epochs, seed, share)


# --- training ---------------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 40), st.integers(1, 12), st.integers(1, 4), st.integers(0, 10**9))
def test_an_epoch_is_a_permutation_without_the_rest(images, batch_size, epochs, seed):
    batch_size = min(batch_size, images)
    batches = list(order([f"{n}" for n in range(images)], batch_size, epochs, seed))
    per_epoch = images // batch_size
    assert len(batches) == epochs * per_epoch == len(order([f"{n}" for n in range(images)], batch_size, epochs, seed))
    for epoch in range(epochs):
        part = batches[epoch * per_epoch : (epoch + 1) * per_epoch]
        keys = [key for batch in part for key in batch]
        assert all(len(batch) == batch_size for batch in part)
        assert {e for e, _ in keys} == {epoch}
        rows = [row for _, row in keys]
        assert len(rows) == len(set(rows)) == images - images % batch_size
        assert set(rows) <= set(range(images))


def test_epochs_and_seeds_have_orders_of_their_own():
    rows = [
        [row for batch in list(order(seed=seed))[2 * e : 2 * e + 2] for _, row in batch]
        for seed in (0, 1)
        for e in range(3)
    ]
    assert len({tuple(r) for r in rows}) == 6
    assert list(order()) == list(order())


def test_the_dropped_rest_differs_between_epochs():
    """Over many epochs every image is used about equally often."""
    used = Counter(row for batch in order(epochs=400) for _, row in batch)
    assert set(used) == set(range(11))
    assert all(abs(n - 400 * 8 / 11) < 45 for n in used.values())  # σ is 8.9


def test_every_place_of_an_epoch_is_equally_likely():
    first = Counter(order(seed=seed)._permutation(0)[0] for seed in range(2200))
    assert all(abs(first[row] - 200) < 4.5 * 14 for row in range(11))


@pytest.mark.parametrize("world", [1, 2, 4])
def test_a_position_is_restored_exactly_at_every_batch(world):
    everything = [list(order(share=Share(rank, world))) for rank in range(world)]
    for rank in range(world):
        running = order(share=Share(rank, world))
        for done in range(len(everything[rank]) + 1):
            state = json.loads(json.dumps(running.state_dict()))
            restored = order(share=Share(rank, world))
            restored.load_state_dict(state)
            assert list(restored) == everything[rank][done:]
            assert len(restored) == len(everything[rank]) - done
            if done < len(everything[rank]):
                running.advance()


def test_the_position_moves_only_with_advance():
    running = order()
    first = list(running)
    assert list(running) == first and running.state_dict()["batch"] == 0
    seen = []
    for batch in running:  # the position may move while batches are made ahead
        seen.append(batch)
        running.advance()
    assert seen == first and len(running) == 0 and list(running) == []


def test_a_state_may_go_to_a_run_with_another_number_of_epochs_or_processes():
    running = order(epochs=3)
    for _ in range(3):
        running.advance()
    longer = order(epochs=5)
    longer.load_state_dict(running.state_dict())
    assert list(longer)[:3] == list(running) and len(longer) == 7
    shared = [order(share=Share(rank, 2)) for rank in (0, 1)]
    for part in shared:
        part.load_state_dict(running.state_dict())
    assert [a + b for a, b in zip(*shared, strict=True)] == list(running)
    shorter = order(epochs=1)
    shorter.load_state_dict(running.state_dict())
    assert len(shorter) == 0 and list(shorter) == []  # nothing is left


@pytest.mark.parametrize(
    "other",
    [
        {"ids": IDS[:-1]},
        {"ids": [*IDS[:-1], "new"]},
        {"ids": IDS[::-1]},
        {"batch_size": 2},
        {"seed": 1},
    ],
)
def test_a_position_of_something_else_is_refused(other):
    state = order().state_dict()
    with pytest.raises(SdrsegError, match="other training images, another batch size or seed"):
        order(**other).load_state_dict(state)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 60), st.integers(1, 4), st.sampled_from([1, 2, 4]), st.integers(0, 5))
def test_processes_share_the_batches_of_one(images, each, world, seed):
    batch_size = each * world
    ids = [f"{n}" for n in range(max(images, batch_size))]
    alone = list(order(ids, batch_size, 2, seed))
    shares = [list(order(ids, batch_size, 2, seed, Share(rank, world))) for rank in range(world)]
    assert all(len(share) == len(alone) for share in shares)
    for whole, parts in zip(alone, zip(*shares, strict=True), strict=True):
        assert [key for part in parts for key in part] == whole
        assert {len(part) for part in parts} == {each}


def test_what_cannot_be_shared_or_filled_is_named():
    with pytest.raises(SdrsegError, match=r"train\.batch_size = 6 cannot be divided among 4 processes"):
        order(batch_size=6, share=Share(0, 4))
    with pytest.raises(SdrsegError, match=r"train\.batch_size = 12 is too large for 11 images\."):
        order(batch_size=12)
    assert len(list(order(batch_size=11))) == 3


# --- evaluation -------------------------------------------------------------------------------------------------------


@settings(max_examples=80, deadline=None)
@given(st.lists(st.sampled_from([(16, 16), (32, 16), (16, 32)]), max_size=40), st.integers(1, 9), st.integers(1, 5))
def test_every_image_once_over_all_processes(shapes, batch_size, world):
    used = []
    for rank in range(world):
        part = EvalOrder(shapes, batch_size, Share(rank, world))
        batches = list(part)
        assert len(part) == len(batches) and list(part) == batches  # as often as one likes
        for batch in batches:
            assert 1 <= len(batch) <= batch_size
            assert len({shapes[row] for _, row in batch}) == 1  # one shape in a batch
            assert {epoch for epoch, _ in batch} == {0}
            used += [row for _, row in batch]
        for shape in set(shapes):  # only the last batch of a shape may be smaller
            sizes = [len(batch) for batch in batches if shapes[batch[0][1]] == shape]
            assert all(size == batch_size for size in sizes[:-1])
    assert sorted(used) == list(range(len(shapes)))  # none twice, none left out, none made up


def test_the_work_is_shared_fairly():
    sizes = [sum(map(len, EvalOrder([(16, 16)] * 11, 4, Share(rank, 4)))) for rank in range(4)]
    assert sizes == [3, 3, 3, 2]


def test_more_processes_than_images():
    parts = [list(EvalOrder([(1, 1)], 4, Share(rank, 3))) for rank in range(3)]
    assert parts == [[[(0, 0)]], [], []]


def test_several_epochs_show_every_image_in_each():
    batches = list(EvalOrder([None] * 5, 2, epochs=3))
    assert all(len({epoch for epoch, _ in batch}) == 1 for batch in batches)  # a batch belongs to one epoch
    assert [key for batch in batches for key in batch] == [(epoch, row) for epoch in range(3) for row in range(5)]
