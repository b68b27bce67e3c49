"""Whole runs on a GPU: scoring again, resuming, and two processes against one."""

from __future__ import annotations

import json
import os
import signal

import pytest
import torch
from safetensors.torch import load_file

from runs import SPEC, TINY, Quiet, content, deterministic_algorithms, end_well, run, script, start, two_machines
from sdrseg.engine.evaluate import score_again
from sdrseg.engine.launch import InterruptedRunError
from sdrseg.engine.run import train

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture(scope="module", autouse=True)
def deterministic():
    with deterministic_algorithms():
        yield


def test_a_run_is_replayed_and_says_so(finished):
    lines = [json.loads(line) for line in (finished / "log.jsonl").read_text().splitlines()]
    assert {line["how"] for line in lines if line["event"] == "passes"} == {"plain, replayed as a CUDA graph"}


def test_scoring_again_gives_exactly_the_same(finished):
    assert [step["same"] for step in score_again(finished)] == [True] * 3


@pytest.mark.parametrize("stop", [(0, 2), (0, 8), (1, 1)])
def test_an_interrupted_run_ends_the_same(finished, tmp_path, stop):
    """Before the recording, after it, and in a later step."""

    class Impatient(Quiet):
        def update(self, entry):
            if (entry["step"], entry["iteration"]) == stop:
                os.kill(os.getpid(), signal.SIGINT)

    settings = [*TINY[:-1], "run.save_minutes=60"]
    with pytest.raises(InterruptedRunError):
        train(SPEC, "sdr", tmp_path / "run", assignments=settings, bases=tmp_path / "bases", display=Impatient())
    assert json.loads((tmp_path / "run/state/current.json").read_text())["iteration"] == stop[1]
    run(tmp_path / "run")
    assert content(tmp_path / "run") == content(finished)


def test_two_processes_train_like_one(tmp_path):
    """Both on one GPU, with NCCL and synchronised batch norm, as on two machines with a GPU each.

    At the rates of the other runs here, a relative change of 1e-7 in the first weights grows to 0.3 in the prototypes.
    """
    settings, exact = ["run.precision=fp32", "optim.lr=0.002", "optim.lr_later=2e-4"], {"NVIDIA_TF32_OVERRIDE": "0"}
    end_well([start(script(tmp_path / "one", settings), **exact)])
    end_well(two_machines(tmp_path / "two", settings, **exact))
    log = (tmp_path / "two/log.jsonl").read_text()
    assert json.loads(log.splitlines()[0])["processes"] == 2
    for step in range(3):
        one, two = (tmp_path / name / f"steps/{step}" for name in ("one", "two"))
        far = {}
        for file in ("model.safetensors", "memory.safetensors"):
            ours, theirs = load_file(one / file), load_file(two / file)
            assert ours.keys() == theirs.keys()
            far |= {name: float((ours[name] - theirs[name]).abs().max()) for name in ours}
        assert max(far.values()) < 1e-4, sorted(far.items(), key=lambda item: -item[1])[:5]
        pixels = [sum(map(sum, json.loads((run / "metrics.json").read_text())["confusion"])) for run in (one, two)]
        assert pixels[0] == pixels[1]
