"""Whole runs on a GPU: scoring again, resuming, and two processes against one."""

from __future__ import annotations

import gc
import json
import os
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from runs import SPEC, TINY, Quiet, content, end_well, run, script, start, two_machines
from sdrseg.config import load_config, parse_settings
from sdrseg.engine import batch_size
from sdrseg.engine.job import prepare_job
from sdrseg.engine.launch import InterruptedRunError
from sdrseg.engine.rescore import score_again
from sdrseg.engine.run import train
from sdrseg.scenario import parse_spec

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def test_a_run_is_replayed_and_logs_it(finished):
    lines = [json.loads(line) for line in (finished / "log.jsonl").read_text().splitlines()]
    assert {line["how"] for line in lines if line["event"] == "passes"} == {"plain, replayed as a CUDA graph"}


def test_scoring_again_gives_exactly_the_same(finished):
    assert [step["same"] for step in score_again(finished)] == [True] * 3


def test_a_run_again_ends_the_same(finished, tmp_path):
    """Bit for bit, with torch as it is."""
    run(tmp_path / "run")
    assert content(tmp_path / "run") == content(finished)


@pytest.mark.parametrize("stop", [(0, 2), (0, 8), (1, 1)])
def test_an_interrupted_run_ends_the_same(finished, tmp_path, stop):
    """Before the recording, after it, and in a later step."""

    class Impatient(Quiet):
        def update(self, entry):
            if (entry["step"], entry["iteration"]) == stop:
                os.kill(os.getpid(), signal.SIGINT)

    settings = [*TINY[:-1], "run.save_minutes=60"]
    with pytest.raises(InterruptedRunError):
        train(
            SPEC,
            "sdr",
            tmp_path / "run",
            settings=parse_settings(settings),
            bases=tmp_path / "bases",
            display=Impatient(),
        )
    assert json.loads((tmp_path / "run/state/current.json").read_text())["iteration"] == stop[1]
    run(tmp_path / "run")
    assert content(tmp_path / "run") == content(finished)


def learned(folder: Path, *words: str) -> torch.Tensor:
    """All floating numbers of a step whose names have one of some words in them, one after the other."""
    tensors = load_file(folder / "model.safetensors") | load_file(folder / "memory.safetensors")
    chosen = [tensors[name] for name in sorted(tensors) if any(word in name for word in words)]
    return torch.cat([tensor.flatten().double() for tensor in chosen if tensor.is_floating_point()])


def test_two_processes_train_like_one(tmp_path):
    """Both on one GPU, with NCCL and synchronised batch norm, as on two machines with a GPU each.

    At small rates, where roundings stay small: all they may do is to turn over a ReLU, so that some gradients jump. A
    mean of the processes' means, or statistics of their own, would change the weights by far more than is allowed here.
    """
    exact = {"NVIDIA_TF32_OVERRIDE": "0"}
    rates = {"one": "1e-4", "still": "1e-15"}
    settings = {n: ["run.precision=fp32", f"optim.lr={lr}", f"optim.lr_later={lr}"] for n, lr in rates.items()}
    end_well([start(script(tmp_path / name, settings[name]), **exact) for name in rates])
    end_well(two_machines(tmp_path / "two", settings["one"], **exact))
    log = (tmp_path / "two/log.jsonl").read_text()
    assert json.loads(log.splitlines()[0])["processes"] == 2
    for step in range(3):
        one, two, still = (tmp_path / name / f"steps/{step}" for name in ("one", "two", "still"))
        weights, others, first = (learned(folder, "weight", "bias") for folder in (one, two, still))
        assert float((weights - others).norm() / (weights - first).norm()) < 0.05
        for word in ("running", "prototypes"):
            ours, theirs = learned(one, word), learned(two, word)
            assert float((ours - theirs).norm() / ours.norm()) < 1e-3
        pixels = [sum(map(sum, json.loads((run / "metrics.json").read_text())["confusion"])) for run in (one, two)]
        assert pixels[0] == pixels[1]


@pytest.mark.parametrize(("free", "size"), [(80 * 2**30, 16), (1, 2)])
def test_an_automatic_batch_fits_in_the_memory(tmp_path, monkeypatch, free, size):
    monkeypatch.setattr(batch_size, "free_memory", lambda _: free)
    settings = parse_settings([*TINY, "train.batch_size=auto", "shapes.train=400", "data.crop=128"])
    config = load_config("shapes", None, settings)
    job = prepare_job(parse_spec("shapes:offline"), "ft", config, None, tmp_path, None, Quiet())
    gc.collect()  # of earlier tests
    before = torch.cuda.memory_allocated()
    batch_size.choose_batch_size(job)
    assert job.config.train.batch_size == size
    gc.collect()
    assert torch.cuda.memory_allocated() <= before
