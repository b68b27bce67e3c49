"""Specification strings: what they mean, and what is said about those that mean nothing."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sdrseg.datasets.voc import CLASSES as VOC
from sdrseg.errors import UsageError
from sdrseg.scenario import PROTOCOLS, Spec, class_lists, find_source, parse_spec
from sdrseg.scenario.lists import written
from sdrseg.scenario.spec import published_orders

ADE = ("background", *(f"class {i}" for i in range(1, 151)))


def lists(text: str, classes: tuple[str, ...] = VOC) -> tuple[tuple[int, ...], ...]:
    return class_lists(parse_spec(text), classes)


def span(*parts: tuple[int, int]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(range(a, b + 1)) for a, b in parts)


@pytest.mark.parametrize(
    ("task", "expected"),
    [
        ("19-1", span((0, 19), (20, 20))),
        ("15-5", span((0, 15), (16, 20))),
        ("15-1", span((0, 15), *((c, c) for c in range(16, 21)))),
        ("15-5s", span((0, 15), *((c, c) for c in range(16, 21)))),
        ("10-10", span((0, 10), (11, 20))),
        ("10-1", span((0, 10), *((c, c) for c in range(11, 21)))),
        ("10-10s", span((0, 10), *((c, c) for c in range(11, 21)))),
        ("10-5", span((0, 10), (11, 15), (16, 20))),
        ("10-5-5", span((0, 10), (11, 15), (16, 20))),
        ("19-1b", ((*range(5), *range(6, 21)), (5,))),
        ("15-2", span((0, 15), (16, 17), (18, 19), (20, 20))),  # the last step takes what is left
    ],
)
def test_voc_tasks(task, expected):
    assert lists(f"voc:{task}@disjoint") == expected


def test_explicit_lists_take_ids_ranges_and_names_in_any_case():
    assert lists("voc:1-15/TVmonitor,17/16, sofa ,train@overlapped") == (tuple(range(16)), (20, 17), (16, 18, 19))
    assert lists("voc:0-15/16-20@disjoint") == span((0, 15), (16, 20))  # background may be written in the first step


@pytest.mark.parametrize(
    ("task", "sizes"),
    [
        ("100-50", [101, 50]),
        ("100-10", [101, 10, 10, 10, 10, 10]),
        ("100-5", [101] + [5] * 10),
        ("50-50", [51, 50, 50]),
        ("50", [51, 50, 50]),
        *((f"100-50{o}", [101, 50]) for o in "bc"),
        *((f"100-10{o}", [101, 10, 10, 10, 10, 10]) for o in "bc"),
        *((f"50{o}", [51, 50, 50]) for o in "bc"),
        ("50-50c", [51, 50, 50]),
    ],
)
def test_ade_tasks_partition_the_classes(task, sizes):
    steps = lists(f"ade20k:{task}@disjoint", ADE)
    assert [len(step) for step in steps] == sizes
    assert sorted(c for step in steps for c in step) == list(range(151))
    assert steps[0][0] == 0


def test_orders_b_and_c_are_permutations_of_their_own():
    assert set(published_orders()["ade20k"]) == {f"{t}{o}" for t in ("100-50", "100-10", "50-50") for o in "bc"}
    assert lists("ade20k:100-50b@disjoint", ADE)[1][:4] == (2, 4, 7, 11)
    assert lists("ade20k:50c@disjoint", ADE)[0][:4] == (0, 5, 10, 11)


def test_offline_and_random_parts():
    assert lists("voc:offline") == span((0, 20))
    assert lists("voc:random-5") == (tuple(range(21)), (), (), (), ())
    assert parse_spec("voc:random-5~3") == Spec("voc", "random-5", 3, "sequential")


def test_a_random_order_is_a_permutation_drawn_by_its_seed_alone():
    first, again, other = lists("voc:15-1~7@disjoint"), lists("voc:15-1~7@overlapped"), lists("voc:15-1~8@disjoint")
    assert first == again != other
    assert [len(step) for step in first] == [16, 1, 1, 1, 1, 1]
    assert sorted(c for step in first for c in step) == list(range(21))
    # The same on every machine, for ever:
    assert first[1:] == ((8,), (16,), (14,), (12,), (7,))


@given(st.integers(2, 253), st.data())
def test_the_rule_a_b_partitions_any_number_of_classes(last, data):
    first = data.draw(st.integers(1, last - 1))
    each = data.draw(st.integers(1, last - first))
    seed = data.draw(st.none() | st.integers(0, 9))
    text = f"folder:{first}-{each}" + ("" if seed is None else f"~{seed}") + "@disjoint"
    steps = lists(text, tuple(f"c{i}" for i in range(last + 1)))
    assert sorted(c for step in steps for c in step) == list(range(last + 1))
    assert steps[0][0] == 0 and len(steps[0]) == first + 1
    assert all(len(step) == each for step in steps[1:-1]) and 1 <= len(steps[-1]) <= each


@given(
    st.sampled_from(["voc", "ade20k", "folder", "shapes"]), st.sampled_from(PROTOCOLS), st.none() | st.integers(0, 99)
)
def test_a_specification_is_printed_as_it_was_read(source, protocol, seed):
    text = f"{source}:15-1" + ("" if seed is None else f"~{seed}") + f"@{protocol}"
    assert str(parse_spec(text)) == text and parse_spec(str(parse_spec(text))) == parse_spec(text)


@given(st.text(max_size=30))
def test_any_text_is_read_or_refused_with_a_usage_error(text):
    try:
        spec = parse_spec(text)
        if spec.task is not None:
            class_lists(spec, VOC)
    except UsageError as error:
        assert str(error)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("voc:15-1@disjiont", "unknown protocol 'disjiont'; did you mean 'disjoint'?"),
        ("voc:15-1", "has no protocol. Add one of @sequential, @disjoint, @overlapped"),
        ("voc@disjoint", "names a protocol but no task"),
        ("voc:offline@disjoint", "takes no protocol @disjoint"),
        ("voc:random-5@overlapped", "takes no protocol @overlapped"),
        ("", "is not a specification"),
        ("voc:@disjoint", "is not a specification"),
        ("voc:15-1~x@disjoint", "is not a specification"),
        ("voc:19-1c@disjoint", "unknown task '19-1c'; did you mean '19-1b'?"),
        ("voc:20-1@disjoint", "does not fit the 20 classes"),
        ("voc:0-5@disjoint", "does not fit the 20 classes"),
        ("voc:15-9@disjoint", "does not fit the 20 classes"),
        ("voc:1-20@disjoint", ": 1 class, then 20 at a time, does not fit"),
        ("voc:random-1", "too few parts. Use 2 or more"),
        ("voc:19-1b~3@disjoint", "defines its own"),
        ("voc:1-15/16,zebra@disjoint", "step 1 has no class 'zebra'"),
        ("voc:1-15/shep@disjoint", "no class 'shep'; did you mean 'sheep'?"),
        ("voc:1-15/16-21@disjoint", "class 21 of step 1 does not exist; the last is 20"),
        ("voc:1-15/16/16-20@disjoint", "class 16 (pottedplant) of step 2: it is already in step 1"),
        ("voc:1-15/0,16-20@disjoint", "class 0 (background) of step 1: background belongs to the first step"),
        ("voc:1-15/16-19@disjoint", "no step contains 20 (tvmonitor). Add them to a step (`rest`"),
        ("voc:1-15//16-20@disjoint", "step 1 has no class ''"),
        ("voc:Cat@disjoint", "no step contains 1 (aeroplane)"),
        ("voc:rest/1-15/rest@disjoint", "rest is already in step 0"),
        ("voc:1-20/rest@disjoint", "step 1: no class is left for rest"),
        ('voc:"cat/1-15@disjoint', "is not a specification"),
        ('voc:"Cat"/rest@disjoint', "step 0 has no class 'Cat'; did you mean 'cat'?"),
        ("voc:0/1-20@disjoint", "step 0 has no classes"),
    ],
)
def test_what_is_wrong_is_named(text, said):
    with pytest.raises(UsageError) as error:
        lists(text)
    assert said in str(error.value)


@pytest.mark.parametrize("name", ["vox", "VOC"])
def test_an_unknown_data_set_is_named(name):
    with pytest.raises(UsageError, match=f"unknown data set '{name}'; did you mean 'voc'"):
        find_source(name)


def test_the_data_sets_that_a_message_lists_are_those_for_users():
    with pytest.raises(UsageError, match="known are voc, ade20k, folder, shapes"):
        find_source("qqq")
    with pytest.raises(UsageError) as error:
        find_source("extendet")
    assert "extended" not in str(error.value)


NAMES = ("background", "3", "Cat", "cat", "a,b", "x/y@z", "20", "rest of it", "1-2")


@pytest.mark.parametrize(
    ("task", "expected"),
    [
        ('"3"/rest', ((0, 1), (2, 3, 4, 5, 6, 7, 8))),
        ("cat/Cat,20/rest", ((0, 3), (2, 6), (1, 4, 5, 7, 8))),
        ('"a,b","x/y@z"/REST OF IT/rest', ((0, 4, 5), (7,), (1, 2, 3, 6, 8))),
        ("rest/cat", ((0, 1, 2, 4, 5, 6, 7, 8), (3,))),
    ],
)
def test_names_of_any_kind(task, expected):
    assert lists(f"folder:{task}@disjoint", NAMES) == expected


@pytest.mark.parametrize(
    ("task", "said"),
    [
        ("a,b/rest", "step 0 has no class 'a'; the name with a comma, / or @ needs double quotes: \"a,b\"."),
        ("x/y/rest", "step 0 has no class 'x'; the name with a comma, / or @ needs double quotes: \"x/y@z\"."),
        ("x/y@z/rest", "such as voc:15-1@disjoint, and a class name with @ in double quotes."),
        ("3/rest", 'may mean class 3 (cat), or class 1, which has this name. Write "3", in double quotes'),
        ("1-2/rest", 'may mean classes 1-2, or class 8, which has this name. Write "1-2", in double quotes'),
        ("CAT/rest", "'CAT' in step 0 may mean 'Cat' or 'cat'. Use the exact spelling."),
        ("19/rest", "class 19 of step 0 does not exist; the last is 8"),
    ],
)
def test_a_word_that_may_mean_two_classes_is_refused(task, said):
    with pytest.raises(UsageError) as error:
        lists(f"folder:{task}@disjoint", NAMES)
    assert said in str(error.value)


@given(st.data())
def test_written_lists_are_read_as_they_were(data):
    name = st.text(st.characters(exclude_categories=["C"], exclude_characters='"'), min_size=1, max_size=6)
    names = data.draw(st.lists(name.map(str.strip).filter(bool), min_size=2, max_size=8, unique=True))
    classes = ("background of all", *names)
    order = data.draw(st.permutations(range(1, len(classes))))
    cut = data.draw(st.integers(1, len(order)))
    steps = ((0, *order[:cut]), *((tuple(order[cut:]),) if cut < len(order) else ()))
    task = written(classes, steps)
    if "," in task or "/" in task:  # one class alone may look like a rule
        assert lists(f"folder:{task}@disjoint", classes) == steps


def test_classes_may_be_left_out():
    spec = parse_spec("voc:cat/dog@disjoint")
    assert class_lists(spec, VOC, "ignore") == ((0, 8), (12,))


def test_built_in_data_sets_are_known_in_any_process():
    code = "from sdrseg.scenario.registry import find_source; print(find_source('voc').__name__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "Voc\n", done.stderr
