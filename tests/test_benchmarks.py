"""Benchmarks run tiny on any machine, and print the figures of which docs/performance.md is made."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture
def printed(monkeypatch, capfd):
    """What a benchmark prints as JSON. It runs in this process, which saves importing torch each time."""
    monkeypatch.syspath_prepend(BENCHMARKS)

    def run(name: str, *words: str):
        monkeypatch.setattr(sys, "argv", [name, *words, "--json"])
        runpy.run_path(str(BENCHMARKS / name), run_name="__main__")
        return json.loads(capfd.readouterr().out)

    return run


def test_a_tiny_step_is_timed_and_profiled(printed):
    rows = ["ft", "kd only", "sdr", "step 0"]
    words = ["--encoder", "toy16", "--size", "32", "--batch", "2", "--warm", "1", "--repeat", "1", "--speed", "plain"]
    said = printed("step.py", *words, "--profile", "--methods", *rows)
    assert [row["method"] for row in said["rows"]] == rows
    first = said["rows"][0]
    for row in said["rows"]:
        assert row["ms"] > 0 and row["images_per_second"] == 2000 / row["ms"]
        assert row["time_ratio"] == row["ms"] / first["ms"]
        kinds, longest = row["kernels"]["kinds"], row["kernels"]["longest"]
        assert kinds["convolutions and products"] > 0
        assert sum(kinds.values()) >= sum(longest.values()) * (1 - 1e-9) > 0


def test_tiny_losses_are_compared_with_loops(printed):
    """The program itself stops if values or gradients differ."""
    said = printed("losses.py", "--tiny", "--repeat", "1", "--classes", "2", "12")
    assert said["speedup_12"] == said["rows"][1]["loops_ms"] / said["rows"][1]["ours_ms"]
    assert said["growth"] > 0


def test_tiny_kernels_and_sizes(printed):
    rows = printed("kernels.py", "--size", "32", "--batch", "1", "--repeat", "1", "--classes", "3+1")["rows"]
    assert len(rows) == 8 and all(row["without_ms"] > row["least_ms"] > 0 for row in rows)
    said = printed("sizes.py", "--encoder", "toy16", "--sizes", "2", "--batch", "1")
    assert "convolution, 3×3" in said["kinds"] and 0 < sum(said["kinds"].values()) <= said["new_ms"]


def test_short_runs_on_own_data_do_not_diverge(printed):
    """ILT from random weights with two old classes: at VOC's values `enc` is not finite from iteration 4 on."""
    words = ["--methods", "ilt", "--old", "2", "--crop", "64", "--batch", "4", "--iterations", "28"]
    (row,) = printed("stability.py", *words)["rows"]
    assert row["problem"] == "" and row["largest"] < 2 * row["first"]


def test_runs_side_by_side_are_measured(printed):
    words = ["--seconds", "3", "--settle", "0", "--beside", "0", "--ways", "one thread", "--repeat", "1"]
    (row,) = printed("busy.py", *words)["rows"]
    assert row["beside"] == 0 and row["images_per_second"][0][0] > 0 and row["share_of_fair"] == 1
