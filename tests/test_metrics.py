"""Scores against plain loops over label pairs, and the paper's own arithmetic."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from sdrseg.metrics import (
    StepScore,
    class_by_step,
    forgetting,
    harmonic,
    intransigence,
    iou,
    partly_measured,
    pixel_accuracy,
    summary,
)
from sdrseg.terminal import TrainingDisplay


def confusion_by_loops(truth: list[int], predicted: list[int], classes: int) -> np.ndarray:
    matrix = np.zeros((classes, classes), np.int64)
    for t, p in zip(truth, predicted, strict=True):
        if t != 255:
            matrix[t, p] += 1
    return matrix


@given(st.lists(st.tuples(st.sampled_from([0, 1, 2, 3, 255]), st.integers(0, 3)), max_size=60))
def test_iou_and_accuracy_equal_sets_of_pixels(pairs):
    truth, predicted = [t for t, _ in pairs], [p for _, p in pairs]
    matrix = confusion_by_loops(truth, predicted, 4)
    for c in range(4):
        is_c = {i for i, t in enumerate(truth) if t == c}
        said_c = {i for i, (t, p) in enumerate(pairs) if p == c and t != 255}
        if not is_c:
            assert np.isnan(iou(matrix)[c]) and np.isnan(pixel_accuracy(matrix)[c])
        else:
            assert iou(matrix)[c] == pytest.approx(len(is_c & said_c) / len(is_c | said_c))
            assert pixel_accuracy(matrix)[c] == pytest.approx(len(is_c & said_c) / len(is_c))


def score(step: int, base: int, ious: list[float]) -> StepScore:
    """A score whose classes have exactly these IoUs: hits and misses that nobody else claims."""
    k = len(ious)
    matrix = np.zeros((k + 1, k + 1), np.int64)
    for c, value in enumerate(ious):
        if not np.isnan(value):
            matrix[c, c] = round(1000 * value)
            matrix[c, k] = 1000 - matrix[c, c]
    names = tuple(f"c{c}" for c in range(k)) + ("nobody",)
    return StepScore(step, names, base, matrix)


def test_the_papers_arithmetic_background_counts_in_old_and_all():
    """15-5 disjoint FT: (8.4·16 + 33.5·5)/21 = 14.4 as printed; without background it would be 14.7 of 20."""
    made = score(1, 16, [0.084] * 16 + [0.335] * 5)
    means = made.miou()
    assert means["old"] == pytest.approx(0.084)
    assert 100 * np.mean([0.084] * 16 + [0.335] * 5) == pytest.approx(14.4, abs=0.05)
    assert means["all"] == pytest.approx((0.084 * 16 + 0.335 * 5) / 21)
    assert means["all_without_background"] == pytest.approx((0.084 * 15 + 0.335 * 5) / 20)


def test_a_class_without_ground_truth_is_left_out_and_named():
    made = score(0, 3, [0.5, np.nan, 0.7])
    assert made.miou()["all"] == pytest.approx(0.6)
    assert made.to_dict()["left_out"] == ["c1", "nobody"]
    assert made.miou()["new"] is None  # "nobody" has no ground truth


def test_a_mean_says_over_how_many_classes_it_is(capsys):
    made = replace(score(1, 3, [0.5, np.nan, 0.7, 0.2]), removed=(4,))  # 4: "nobody"
    assert made.measured()["old"] == (2, 3) and made.measured()["new"] == (1, 1) and made.measured()["all"] == (3, 4)
    none = replace(score(1, 3, [np.nan, 0.5, 0.7, 0.2]), removed=(4,))  # a background that is not part of the data
    assert none.measured()["old"] == none.measured()["old_without_background"] == (2, 2)
    only_new = replace(score(1, 3, [np.nan, np.nan, np.nan, 0.2]), removed=(4,))
    display = TrainingDisplay(2)
    for one in (made, none, only_new):
        display.scored(one, oracle=False)
    assert capsys.readouterr().err.splitlines() == [
        "step 1: mIoU old 60.0 (over 2 of 3 classes), new 20.0, all 46.7 (over 3 of 4 classes)",
        "step 1: mIoU old 60.0, new 20.0, all 46.7",
        "step 1: mIoU new 20.0",
    ]


def test_scores_survive_json():
    made = score(2, 2, [0.25, 0.5, 0.75])
    again = StepScore.from_dict(json.loads(json.dumps(made.to_dict())))
    assert again.to_dict() == made.to_dict()


def test_harmonic_mean():
    assert harmonic(0.6, 0.3) == pytest.approx(0.4)
    assert harmonic(0.0, 0.0) == 0.0
    assert harmonic(None, 0.5) is None


STEPS = [
    StepScore(0, ("bg", "a"), 2, np.array([[90, 10], [20, 80]])),
    StepScore(1, ("bg", "a", "b"), 2, np.array([[95, 3, 2], [60, 40, 0], [10, 0, 90]])),
    StepScore(2, ("bg", "a", "b", "c"), 2, np.array([[99, 1, 0, 0], [30, 70, 0, 0], [50, 0, 50, 0], [0, 0, 0, 10]])),
]


def test_forgetting_is_the_best_there_was_minus_now():
    table = class_by_step(STEPS)
    assert np.isnan(table[2, 0]) and np.isnan(table[3, :2]).all()
    a = [80 / 110, 40 / 103, 70 / 101]
    b = [90 / 102, 50 / 100]
    assert table[1] == pytest.approx(a)
    lost = forgetting(table)
    assert lost[1, 1] == pytest.approx(a[0] - a[1])
    assert lost[1, 2] == pytest.approx(max(a[0], a[1]) - a[2])
    assert lost[2, 2] == pytest.approx(b[0] - b[1])
    assert np.isnan(lost[2, 1]) and np.isnan(lost[3]).all()
    assert summary(STEPS)["forgetting"]["final"] == pytest.approx((lost[1, 2] + lost[2, 2]) / 2)  # background left out


def test_intransigence_is_offline_minus_the_step_that_brought_the_class():
    table = class_by_step(STEPS)
    values = intransigence(table, {"bg": 0.9, "a": 0.9, "b": 0.95, "c": None}, STEPS[-1].names)
    assert values[1] == pytest.approx(0.9 - 80 / 110)
    assert values[2] == pytest.approx(0.95 - 90 / 102)
    assert np.isnan(values[3])
    result = summary(STEPS, {"a": 0.9, "b": 0.95})
    assert result["intransigence"]["mean"] == pytest.approx((0.9 - 80 / 110 + 0.95 - 90 / 102) / 2)


def test_step_averaged_miou_is_the_mean_over_steps_of_all():
    assert summary(STEPS)["step_averaged_miou"] == pytest.approx(np.mean([s.miou()["all"] for s in STEPS]))


@given(arrays(np.int64, (4, 4), elements=st.integers(0, 1000)))
def test_means_are_between_0_and_1(matrix):
    made = StepScore(0, ("bg", "a", "b", "c"), 2, matrix)
    for value in made.miou().values():
        assert value is None or 0 <= value <= 1


def test_the_sentence_about_forgetting_counts_the_classes_of_its_mean():
    """The background is not in the mean, so it is not what "loses the most" either; and nothing is -0.0."""
    from sdrseg.config import Config
    from sdrseg.engine.folder import RunFolder
    from sdrseg.engine.show import _percent
    from sdrseg.reporting.collect import RunRecord
    from sdrseg.reporting.findings import _loses, _points, sentence

    steps = [
        StepScore(0, ("background", "a"), 2, np.array([[90, 10], [0, 100]])),
        StepScore(1, ("background", "a", "b"), 2, np.array([[10, 10, 80], [2, 98, 0], [0, 0, 100]])),
    ]
    scenario = {"steps": [{}, {}]}
    run = RunRecord("ft", RunFolder(Path("none")), {}, Config(), scenario, tuple(steps), (), (), ())
    said = sentence([run])
    lost = 100 * (100 / 110 - 98 / 110)
    assert f"loses {lost:.1f}\u00a0points of its best IoU on average" in said
    assert f"a loses the most ({lost:.1f}\u00a0points)" in said
    assert _percent(-0.0001) == "0.0" and _points(-0.0001).startswith("0.0")
    steps[0] = StepScore(0, ("background", "a"), 2, np.array([[90, 10], [50, 50]]))
    gained = 100 * (98 / 110 - 50 / 110)
    said = sentence([RunRecord("ft", RunFolder(Path("none")), {}, Config(), scenario, tuple(steps), (), (), ())])
    assert f"An old class gains {gained:.1f}\u00a0points of its best IoU on average." in said
    assert _loses(-0.0001) == "loses 0.0\u00a0points"


def test_background_is_scored_where_its_hits_are_known():
    """Ten images label everything; ten label b only, where 30 pixels of b are predicted as background, and b is
    predicted for 20 unlabelled ones."""
    whole = np.array([[80, 10, 10], [5, 95, 0], [5, 0, 45]])
    only_b = np.array([[0, 0, 20], [0, 0, 0], [30, 5, 15]])
    made = StepScore(1, ("background", "a", "b"), 2, whole + only_b, complete=whole)
    assert made.iou == pytest.approx([80 / (100 + 10), 95 / (100 + 10 + 5), 60 / (100 + 10 + 20)])
    assert made.accuracy == pytest.approx([0.8, 0.95, 0.6])
    saved = json.loads(json.dumps(made.to_dict()))
    assert [c["pixels"] for c in saved["classes"]] == [100, 100, 100]
    assert StepScore.from_dict(saved).iou == pytest.approx(made.iou)
    assert made.iou_over(range(2)) == pytest.approx([80 / 105, 95 / 110, np.nan], nan_ok=True)
    partly = replace(made, unknown=(1,))
    assert partly.by_truth.tolist() == [[80, 10, 10], [0, 0, 0], [35, 5, 60]]
    assert np.isnan(partly.accuracy[1]) and np.isnan(partly.iou[1]) and partly.iou[2] == made.iou[2]


def test_steps_that_measure_different_classes_have_no_average():
    """A step that labels only its new class, as an extension without old test images."""
    alone = replace(STEPS[1], unknown=(0, 1))
    assert partly_measured([STEPS[0], alone]) == [1] and summary([STEPS[0], alone])["step_averaged_miou"] is None
    assert partly_measured([STEPS[0], alone, STEPS[2]]) == [1]
    unscored = replace(STEPS[0], unknown=(0, 1))
    assert summary([unscored, alone])["step_averaged_miou"] is None  # a step without any score
    without = [replace(one, unknown=(1,)) for one in STEPS]  # a class that has no test image at all
    assert partly_measured(without) == []
    assert summary(without)["step_averaged_miou"] == pytest.approx(np.mean([s.miou()["all"] for s in without]))
