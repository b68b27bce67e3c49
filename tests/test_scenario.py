"""Scenarios: image lists against the published ones, label tables against the protocols written out pixel by pixel."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sdrseg.datasets.shapes import Shapes
from sdrseg.datasets.voc import CLASSES
from sdrseg.errors import DataError, SdrsegError, UsageError
from sdrseg.scenario import Scenario, build_scenario, parse_spec, selection

from conftest import Presence

VOC = SimpleNamespace(name="voc", classes=CLASSES, score_background=True, partition="latest")
ADE = SimpleNamespace(
    name="ade20k", classes=tuple(f"c{i}" for i in range(151)), score_background=False, partition="balanced"
)


@pytest.fixture(scope="session")
def voc(voc_presence):
    def build(text: str, **policy) -> Scenario:
        return build_scenario(parse_spec(f"voc:{text}"), VOC, voc_presence["train"], voc_presence["val"], **policy)

    return build


def counts(scenario: Scenario, what: str) -> list[int]:
    return [len(getattr(step, f"{what}_ids")) for step in scenario.steps]


def rows(ids: tuple[str, ...]) -> list[int]:
    return [int(id) for id in ids]  # the fixture's ids are their row numbers


# --- docs/specification.md, section 1.6: the published sizes ----------------------------------------------------

DISJOINT = {
    "offline": [10582],
    "19-1": [10034, 548],
    "15-5": [8437, 2145],
    "15-1": [8437, 378, 299, 420, 500, 548],
    "10-10": [3706, 6876],
    "10-1": [3706, 188, 868, 227, 201, 3247, 378, 299, 420, 500, 548],
}
OVERLAPPED = {"19-1": [10410, 548], "15-5": [9568, 2145], "15-1": [9568, 487, 299, 491, 500, 548]}
VAL = {
    "19-1": [1421, 74],
    "15-5": [1240, 354],
    "15-1": [1240, 85, 57, 90, 84, 74],
    "10-10": [869, 897],
    "10-1": [869, 75, 128, 79, 76, 446, 85, 57, 90, 84, 74],
}
TEST = {
    "19-1": [1421, 1449],
    "15-5": [1240, 1449],
    "15-1": [1240, 1277, 1329, 1353, 1421, 1449],
    "10-10": [869, 1449],
    "10-1": [869, 893, 1005, 1081, 1140, 1240, 1277, 1329, 1353, 1421, 1449],
}


def test_a_scenario_is_a_sequence_of_steps(voc):
    scenario = voc("15-1@disjoint")
    assert list(scenario) == list(scenario.steps) and len(scenario) == 6
    assert scenario[0] is scenario.steps[0] and scenario[-1].number == 5


def test_a_scenario_from_its_specification():
    small = {"shapes.train": 40, "shapes.val": 10}
    scenario = Scenario.from_spec("shapes:8-1@overlapped", settings=small)
    assert [len(step.new) for step in scenario] == [9, 1, 1]  # with background
    source = Shapes(train=40, val=10)
    for step in scenario:
        held = {id for id in source.ids("train") if ({*step.new} - {0}) & {*source.mask(id).ravel().tolist()}}
        assert set(step.train_ids) == held
    part = Scenario.from_spec("shapes:8-1@overlapped", settings={**small, "train.holdout": 0.4})
    assert set(part[0].train_ids) < set(scenario[0].train_ids)
    with pytest.raises(UsageError, match="voc needs --data PATH"):
        Scenario.from_spec("voc:15-1@disjoint")


@pytest.mark.parametrize("task", DISJOINT)
def test_published_sizes_disjoint_and_sequential(voc, task):
    for text in [task] if task == "offline" else [f"{task}@disjoint", f"{task}@sequential"]:
        assert counts(voc(text), "train") == DISJOINT[task]


@pytest.mark.parametrize("task", OVERLAPPED)
def test_published_sizes_overlapped(voc, task):
    assert counts(voc(f"{task}@overlapped"), "train") == OVERLAPPED[task]


@pytest.mark.parametrize("task", VAL)
@pytest.mark.parametrize("protocol", ["sequential", "disjoint", "overlapped"])
def test_published_sizes_of_validation_and_test(voc, task, protocol):
    scenario = voc(f"{task}@{protocol}")
    assert counts(scenario, "val") == VAL[task]
    assert counts(scenario, "test") == TEST[task]


def test_how_the_published_lists_relate(voc):
    one, five, ten = voc("15-1@disjoint"), voc("15-5@disjoint"), voc("10-1@disjoint")
    assert sorted(id for s in one.steps[1:] for id in s.train_ids) == list(five.steps[1].train_ids)
    assert [s.train_ids for s in ten.steps[6:]] == [s.train_ids for s in one.steps[1:]]
    over = voc("15-1@overlapped")
    assert [over.steps[k].train_ids == one.steps[k].train_ids for k in range(6)] == [
        False,
        False,
        True,
        False,
        True,
        True,
    ]
    assert len({id for s in over.steps[1:] for id in s.train_ids}) == 2145
    assert len(set(over.steps[1].train_ids) - set(one.steps[1].train_ids)) == 109
    assert len(set(over.steps[3].train_ids) - set(one.steps[3].train_ids)) == 71
    both = voc("19-1@overlapped")
    assert len(set(both.steps[0].train_ids) & set(both.steps[1].train_ids)) == 376
    both = voc("15-5@overlapped")
    assert len(set(both.steps[0].train_ids) & set(both.steps[1].train_ids)) == 1131


def test_every_published_voc_list_index_by_index(voc, voc_lists):
    seen = set()
    for key, expected in voc_lists.items():
        task, part = key.split("/")
        kind, number = part.split("-")
        for text in ["offline"] if task.startswith("offline") else {task, task.replace("disjoint", "sequential")}:
            assert rows(getattr(voc(text).steps[int(number)], f"{kind}_ids")) == expected, f"{text} {part}"
            seen.add(text)
    overlapped = {f"{task}@overlapped" for task in OVERLAPPED}
    others = {f"{task}@{p}" for task in DISJOINT if task != "offline" for p in ("disjoint", "sequential")}
    assert seen == {"offline"} | overlapped | others


@pytest.mark.parametrize(
    ("key", "checksum"),
    [
        ("15-1@disjoint/train-1", "f8eb0e69ab6289ca"),
        ("15-5@disjoint/train-0", "5acb47c2e65b1903"),
        ("15-5@overlapped/train-0", "8314d0301ec833e1"),
    ],
)
def test_published_checksums(voc_lists, key, checksum):
    assert hashlib.sha1(",".join(map(str, voc_lists[key])).encode()).hexdigest()[:16] == checksum


def test_real_masks_match_the_fixture(voc_folder, voc_presence):
    """On the real masks: the class index equals the packed facts, so every list above is that of the real data."""
    from sdrseg.datasets.index import class_index
    from sdrseg.datasets.voc import Voc

    source = Voc(voc_folder)
    assert source.problems() == []
    for split in ("train", "val"):
        index = class_index(source, split)
        assert np.array_equal(index.present, voc_presence[split].present)
    assert source.ids("train")[0] == "2007_000032" and source.ids("train")[-1] == "2011_003276"
    assert source.ids("val")[0] == "2007_000033"
    assert class_index(source, "train").present[:, 255].sum() == 1464  # the VOC-native masks alone carry void


# --- ADE: published lists and the greedy pass --------------------------------------------------------------------

ADE_SIZES = {
    "100-50": [13452, 6744],
    "100-10": [13452, 1130, 1200, 1366, 1550, 1498],
    "50-50": [8219, 6384, 5593],
    "100-50b": [10375, 9821],
    "100-10b": [10375, 1362, 1346, 2084, 2609, 2420],
    "50-50b": [6659, 7483, 6054],
}
UNLABELLED = [5148, 5149, 5151, 5332, 5904, 6509, 13297, 14633, 14635, 14883, 15319, 15329, 15927, 19872]
ADE_IDS = tuple(f"ADE_train_{i + 1:08d}" for i in range(20210))


@pytest.mark.parametrize("task", ADE_SIZES)
def test_published_ade_lists(task):
    steps = selection.published("ade20k", task, ADE_IDS)
    assert [len(step) for step in steps] == ADE_SIZES[task]
    processes = np.sort(np.concatenate(steps))
    assert np.array_equal(processes, np.setdiff1d(np.arange(20210), UNLABELLED))
    assert all(np.array_equal(step, np.sort(step)) for step in steps)


def test_published_ade_checksum_and_nesting():
    ten, fifty = (selection.published("ade20k", task, ADE_IDS) for task in ("100-10", "100-50"))
    assert hashlib.sha1(",".join(map(str, ten[1])).encode()).hexdigest()[:16] == "602de1d5ae14366f"
    assert np.array_equal(np.sort(np.concatenate(ten[1:])), fifty[1])


def test_published_lists_need_the_whole_set():
    with pytest.raises(
        DataError, match=r"missing 1 training image of the published lists, the first is ADE_train_00000003"
    ):
        selection.published("ade20k", "100-50", ADE_IDS[:2] + ADE_IDS[3:])
    assert selection.published("ade20k", "100-5", ADE_IDS) is None
    assert selection.published("folder", "100-50", ADE_IDS) is None


def ade_like(seed: int, images: int = 400, classes: int = 150) -> Presence:
    rng = np.random.default_rng(seed)
    present = np.zeros((images, 256), bool)
    present[:, 1 : classes + 1] = rng.random((images, classes)) < 1.5 / np.arange(1, classes + 1) ** 0.7
    present[:, 0] = True
    return Presence(tuple(f"i{n:04d}" for n in range(images)), present)


def greedy_reference(present: np.ndarray, lists: list[list[int]]) -> list[list[int]]:
    """MiB's pass as docs/specification.md, section 1.3, describes it, with plain loops and dictionaries."""
    step_of = {c: k for k, new in enumerate(lists) for c in new if c != 0}
    classes = {i: [c for c in sorted(step_of) if present[i, c]] for i in range(len(present))}
    total = {c: sum(c in held for held in classes.values()) for c in step_of}
    given = dict.fromkeys(step_of, 0)
    steps: list[list[int]] = [[] for _ in lists]
    for smallest in sorted(step_of):
        for image in (i for i in classes if classes[i] and classes[i][0] == smallest):
            best, best_score = None, -1.0
            for c in classes[image]:
                score = 120 * (1 - given[c] / total[c]) + sum(total[d] for d in classes[image]) / total[c]
                if score > best_score:
                    best, best_score = c, score
            steps[step_of[best]].append(image)
            for c in classes[image]:
                given[c] += step_of[c] == step_of[best]
    return [sorted(step) for step in steps]


@pytest.mark.parametrize("seed", [0, 1])
def test_the_greedy_pass_equals_plain_loops(seed):
    images = ade_like(seed)
    lists = [list(range(101)), *([c, c + 1, c + 2, c + 3, c + 4] for c in range(101, 151, 5))]
    chosen, _ = selection.balanced(images.present, lists, ADE.classes)
    assert [c.tolist() for c in chosen] == greedy_reference(images.present, lists)


def test_new_ade_orders_partition_and_warn():
    images = ade_like(3)
    scenario = build_scenario(parse_spec("ade20k:100-10~5@disjoint"), ADE, images, images)
    used = [id for step in scenario.steps for id in step.train_ids]
    labelled = [id for id, row in zip(images.ids, images.present, strict=True) if row[1:151].any()]
    assert sorted(used) == sorted(labelled)
    assert len(used) == len(set(used))
    for step in scenario.steps:
        inside = images.present[[images.ids.index(id) for id in step.train_ids]]
        for c in step.new:
            if c != 0:
                has, got = int(images.present[:, c].sum()), int(inside[:, c].sum())
                text = f"class {c} (c{c}) gets {got} of its {has} images"
                assert any(text in w for w in scenario.warnings) == (got < min(50, has))


# --- Labels, against docs/specification.md, sections 1.4 and 1.5, written out for one pixel ---------------------


def train_label(raw: int, lists, k: int, protocol: str, classes: int, void_train: str) -> int:
    order = [c for step in lists[: k + 1] for c in step]
    new, old = lists[k] or order, [c for step in lists[:k] for c in step]
    if raw == 255:
        return 0 if void_train == "background" and protocol != "sequential" else 255
    if raw >= classes:
        return 255
    if raw == 0:
        return 0
    if raw in new:
        return order.index(raw)
    if raw in old:
        return order.index(raw) if protocol == "sequential" else 0
    return 0  # a class of a later step


def scored_label(raw: int, lists, k: int, classes: int, scored: bool, future: str) -> int:
    order = [c for step in lists[: k + 1] for c in step]
    if raw == 0:
        return 0 if scored else 255
    if raw in order:
        return order.index(raw)
    if raw < classes and future == "background" and scored:
        return 0
    return 255


def val_label(raw: int, lists, k: int, scored: bool) -> int:
    order = [c for step in lists[: k + 1] for c in step]
    if raw == 0:
        return 0 if scored else 255
    return order.index(raw) if raw in (lists[k] or order) else 255


TASKS = ["15-1", "19-1b", "15-5~4", "1-15/20,17/16,18,19"]


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("protocol", ["sequential", "disjoint", "overlapped"])
@pytest.mark.parametrize("void_train", ["ignore", "background"])
@pytest.mark.parametrize("future", ["ignore", "background"])
@pytest.mark.parametrize("scored", [True, False])
def test_tables_follow_the_protocol(voc_presence, task, protocol, void_train, future, scored):
    data = SimpleNamespace(**vars(VOC) | {"score_background": scored})
    scenario = build_scenario(
        parse_spec(f"voc:{task}@{protocol}"),
        data,
        voc_presence["train"],
        voc_presence["val"],
        void_train=void_train,
        eval_future=future,
    )
    lists = [step.new for step in scenario.steps]
    for k, step in enumerate(scenario.steps):
        assert step.channels == tuple(c for new in lists[: k + 1] for c in new)
        assert step.future == tuple(c for new in lists[k + 1 :] for c in new)
        for raw in range(256):
            assert step.train_table[raw] == train_label(raw, lists, k, protocol, 21, void_train)
            assert step.test_table[raw] == scored_label(raw, lists, k, 21, scored, future)
            assert step.val_table[raw] == val_label(raw, lists, k, scored)


def test_parts_of_a_random_split(voc, voc_presence):
    scenario = voc("random-5")
    sizes = counts(scenario, "train")
    assert sum(sizes) == 10582 and max(sizes) - min(sizes) <= 1
    assert len({id for s in scenario.steps for id in s.train_ids}) == 10582
    identity = [*range(21), *[255] * 235]
    for step in scenario.steps:
        assert step.channels == tuple(range(21))
        for table in (step.train_table, step.val_table, step.test_table):
            assert table.tolist() == identity
        assert len(step.test_ids) == len(step.val_ids) == 1449
    assert voc("random-5~1").steps[0].train_ids != scenario.steps[0].train_ids
    assert voc("random-5~0").steps[0].train_ids == scenario.steps[0].train_ids


def test_a_step_that_fills_no_batch_is_reported_before_training(voc):
    voc("15-1@disjoint").require_images([8437, 378, 299, 420, 500, 548])
    with pytest.raises(SdrsegError, match=r"step 2 \(sheep\) has 299 training images, fewer than the batch of 300"):
        voc("15-1@disjoint").require_images([16, 300, 300, 300, 300, 300])
    empty = replace(voc("15-1@disjoint").steps[1], train_ids=())
    with pytest.raises(
        SdrsegError, match=r"step 1 \(potted ?plant\) has no training image\. `sdrseg data voc:15-1@dis"
    ):
        replace(voc("15-1@disjoint"), steps=(empty,)).require_images([8])


def test_an_empty_step_is_a_warning():
    nothing = Presence(("a", "b"), np.zeros((2, 256), bool))
    nothing.present[:, [0, 1, 3]] = True
    data = SimpleNamespace(name="folder", classes=tuple("bcde"), score_background=True, partition="latest")
    scenario = build_scenario(parse_spec("folder:1-1@disjoint"), data, nothing, nothing)
    assert counts(scenario, "train") == [0, 0, 2]
    assert scenario.warnings == (
        "step 0 has no training image under @disjoint",
        "step 1 has no training image under @disjoint",
    )


def test_a_scenario_is_plain_data(voc):
    scenario = voc("15-1@disjoint")
    again = json.loads(json.dumps(scenario.to_dict()))
    assert again["spec"] == "voc:15-1@disjoint"
    assert again["steps"][5]["train_table"][20] == 20 and again["steps"][1]["new"] == [16]
    with pytest.raises(ValueError, match="read-only"):
        scenario.steps[0].train_table[0] = 1


# --- Properties ---------------------------------------------------------------------------------------------------


@st.composite
def small_worlds(draw):
    """Up to 30 random masks of 4×4 pixels with up to 8 classes, and a task on them."""
    last = draw(st.integers(2, 8))
    seed = draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(seed)
    values = np.array([*range(last + 1), 255])
    masks = [rng.choice(rng.choice(values, 3), (4, 4)).astype(np.uint8) for _ in range(draw(st.integers(1, 30)))]
    present = np.array([np.bincount(m.ravel(), minlength=256) > 0 for m in masks])
    images = Presence(tuple(f"{i}" for i in range(len(masks))), present)
    first = draw(st.integers(1, last - 1))
    each = draw(st.integers(1, last - first))
    order = draw(st.sampled_from(["", "~1", "~2"]))
    data = SimpleNamespace(
        name="folder", classes=tuple(f"c{i}" for i in range(last + 1)), score_background=True, partition="latest"
    )
    return masks, images, data, f"folder:{first}-{each}{order}"


@settings(max_examples=60, deadline=None)
@given(small_worlds(), st.sampled_from(["sequential", "disjoint", "overlapped"]))
def test_steps_keep_their_protocol(world, protocol):
    masks, images, data, task = world
    scenario = build_scenario(parse_spec(f"{task}@{protocol}"), data, images, images)
    used = [id for step in scenario.steps for id in step.train_ids]
    labelled = {id for id, mask in zip(images.ids, masks, strict=True) if set(np.unique(mask)) - {0, 255}}
    assert set(used) == labelled
    if protocol != "overlapped":
        assert len(used) == len(set(used))  # the steps partition the images
    for step in scenario.steps:
        for id in step.train_ids:
            mask = masks[int(id)]
            raw = set(np.unique(mask).tolist())
            assert raw & set(step.new) - {0}  # each image holds a new class
            if protocol != "overlapped":
                assert not raw & set(step.future)
            label = step.train_table[mask]
            allowed = (
                set(range(len(step.channels)))
                if protocol == "sequential"
                else {0} | {step.channels.index(c) for c in step.new}
            )
            assert set(np.unique(label).tolist()) - {255} <= allowed
            assert np.array_equal(label == 255, mask == 255)  # void survives, and nothing becomes void


@settings(max_examples=60, deadline=None)
@given(small_worlds(), st.integers(1, 9), st.integers(1, 9))
def test_relabelling_commutes_with_nearest_resampling(world, height, width):
    masks, images, data, task = world
    scenario = build_scenario(parse_spec(f"{task}@disjoint"), data, images, images)
    rows_ = np.arange(height) * 4 // height
    columns = np.arange(width) * 4 // width
    for step in scenario.steps:
        for table in (step.train_table, step.val_table, step.test_table):
            for mask in masks:
                assert np.array_equal(table[mask[rows_][:, columns]], table[mask][rows_][:, columns])
                assert (table[mask] == 255)[mask == 255].all()


# --- held out for tuning ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["15-1@disjoint", "15-1@overlapped", "15-5@sequential", "offline"])
def test_held_out_images_are_scored_and_never_trained_on_and_no_test_image_is_reachable(voc, text, voc_presence):
    whole, tuned = voc(text), voc(text, holdout=0.2)
    present, place = voc_presence["train"].present, {id: i for i, id in enumerate(voc_presence["train"].ids)}
    held = {id for id in place if id not in {i for s in tuned.steps for i in s.train_ids}}
    assert 0.18 < len(held) / len(place) < 0.22
    so_far: set[str] = set()
    for before, step in zip(whole.steps, tuned.steps, strict=True):
        assert step.train_ids == tuple(id for id in before.train_ids if id not in held)
        so_far |= held & set(before.train_ids)
        assert set(step.test_ids) == {id for id in so_far if present[place[id]][list(step.channels[1:])].any()}
        assert set(step.val_ids) <= set(step.test_ids)
        assert (before.test_split, step.test_split) == ("val", "train")
        assert np.array_equal(step.test_table, before.test_table)
    smaller = voc(text, holdout=0.1).steps[-1].test_ids
    assert set(smaller) < set(tuned.steps[-1].test_ids)  # a smaller share is a part of a larger one


def test_a_step_without_held_out_images_is_refused(voc):
    with pytest.raises(SdrsegError, match=r"train.holdout=1e-07 holds out none of the 8,437 images of step 0"):
        voc("15-1@disjoint", holdout=1e-7)
