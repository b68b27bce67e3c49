"""Runs that are killed, stopped or spread over processes: they end as an uninterrupted one does."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from runs import (
    SPEC,
    TINY,
    Quiet,
    all_end_well,
    content,
    end_well,
    forked,
    run,
    script,
    start,
    torchrun,
    torchrun_forked,
    two_forked,
    two_machines,
)
from sdrseg.config import load_config, parse_settings
from sdrseg.engine.launch import InterruptedRunError, _devices_and_nodes
from sdrseg.engine.run import train
from sdrseg.errors import DataError

# --- going on after a kill -------------------------------------------------------------------------------------------


def test_killed_at_random_moments_a_run_ends_bit_for_bit_the_same(finished, tmp_path):
    draw = random.Random(4)
    started = time.monotonic()
    reference = forked(lambda: run(tmp_path / "timing/run"))
    os.waitpid(reference, 0)
    whole = time.monotonic() - started
    folder, kills = tmp_path / "killed/run", 0
    while True:
        child = forked(lambda: run(folder))
        time.sleep(draw.uniform(0.05, 0.35) * whole * (1 + kills / 10))  # longer and longer: the machine may be busy
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            assert status == 0
            break
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        kills += 1
        assert kills < 60
    assert kills >= 3
    assert content(folder) == content(finished)
    entries = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    steps = [(e["step"], e["iteration"]) for e in entries if e["event"] == "train"]
    assert steps == sorted(set(steps))  # nothing twice, nothing lost
    assert not list(folder.rglob("*.tmp"))


@pytest.mark.parametrize("write", [1, 3, 7, 12, 20, 31, 48])
def test_killed_in_the_middle_of_a_write_a_run_ends_the_same(finished, tmp_path, write):
    """The process dies at the n-th sync of a file: the new file is there, but has not got its name yet."""

    def dying() -> None:
        import sdrseg.files

        real, count = os.fsync, 0

        def fsync(handle):
            nonlocal count
            count += 1
            if count == write:
                os.kill(os.getpid(), signal.SIGKILL)
            real(handle)

        sdrseg.files.os.fsync = fsync
        run(tmp_path / "killed")

    _, status = os.waitpid(forked(dying), 0)
    assert os.WIFSIGNALED(status)
    run(tmp_path / "killed")
    assert content(tmp_path / "killed") == content(finished)


def test_worker_processes_end_with_a_killed_run(tmp_path):
    """Otherwise they would wait for work for ever, and keep open whatever their parent had open."""
    from multiprocessing import active_children

    from sdrseg.datasets.batches import train_batches
    from sdrseg.datasets.shapes import Shapes

    def busy() -> None:
        source = Shapes(size=32, train=64)
        config = load_config("shapes", None, parse_settings(["data.workers=2", "data.crop=32"]))
        batches = iter(train_batches(source, source.ids("train"), np.arange(256, dtype=np.uint8), config))
        inherited = {child.pid for child in active_children()}  # what the test process has started before
        next(batches)
        started = {child.pid for child in active_children()} - inherited
        (tmp_path / "workers.part").write_text(" ".join(map(str, started)))
        (tmp_path / "workers.part").rename(tmp_path / "workers")
        time.sleep(60)

    child = forked(busy)
    while not (tmp_path / "workers").exists():
        time.sleep(0.02)
    workers = [int(pid) for pid in (tmp_path / "workers").read_text().split()]
    assert len(workers) == 2
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    deadline = time.monotonic() + 3  # PyTorch's own watchdog looks every five seconds, and not always
    while time.monotonic() < deadline and any(Path(f"/proc/{pid}").exists() for pid in workers):
        time.sleep(0.05)
    left = [pid for pid in workers if Path(f"/proc/{pid}/stat").exists()]
    assert all(Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z" for pid in left)


@pytest.fixture
def broken(monkeypatch):
    """Call it with the ids of generated images that shall not be readable any more."""
    from sdrseg.datasets.shapes import Shapes

    real, bad = Shapes.image, set()

    def image(self, id):
        if id in bad:
            raise DataError(f"shapes:{id}: cannot be read as a picture.")
        return real(self, id)

    monkeypatch.setattr(Shapes, "image", image)
    return bad.update


@pytest.mark.parametrize("cache", ["off", "ram"])
def test_a_bad_image_stops_training_or_is_skipped_and_counted(tmp_path, broken, cache):
    broken(["train-00007"])
    settings = ["data.workers=0", f"data.cache={cache}", "train.epochs=2"]
    advice = "To resume this run, repair the file or add --on-bad-image skip"
    with pytest.raises(DataError, match=rf"train-00007: cannot be read as a picture\. {advice}\.$"):
        run(tmp_path / "run", "ft", *settings)
    display = Quiet()
    skip = [*TINY, *settings, "run.on_bad_image=skip"]
    train(SPEC, "ft", tmp_path / "run", settings=parse_settings(skip), bases=tmp_path / "bases", display=display)
    said = [text for text in display.said if "skipped" in text]
    assert len(said) == 1 and "skipped 1 image that cannot be read: train-00007 (" in said[0]
    lines = (tmp_path / "run/log.jsonl").read_text().splitlines()
    assert any(json.loads(line).get("bad_images", {}).get("train-00007", 0) > 0 for line in lines)


def test_a_base_without_some_images_is_not_shared(finished, tmp_path, broken):
    first = json.loads((finished / "scenario.json").read_text())["steps"][0]["train_ids"][0]
    broken([first])
    run(tmp_path / "run", "ft", "run.on_bad_image=skip", "train.epochs=2")
    assert not (tmp_path / "bases").exists()


def test_what_is_scored_is_never_skipped(finished, tmp_path, broken):
    scored = json.loads((finished / "scenario.json").read_text())["steps"][-1]["test_ids"]
    broken(scored[:1])
    with pytest.raises(DataError, match=rf"^shapes:{scored[0]}: cannot be read as a picture\.$"):
        run(tmp_path / "test", "ft", "run.on_bad_image=skip", bases=finished.parent / "bases")
    tune = ["run.on_bad_image=skip", "train.holdout=0.3"]
    run(tmp_path / "tuned", "ft", *tune)  # test images have no part in it
    held = json.loads((tmp_path / "tuned/scenario.json").read_text())["steps"][-1]["test_ids"]
    broken(held[1:3])
    message = rf"^shapes:{held[1]}: .* This image is held out \(and 1 more\) .* never skipped.* Repair or remove"
    with pytest.raises(DataError, match=message):
        run(tmp_path / "other", "mib", *tune)
    assert not (tmp_path / "other").exists()
    run(tmp_path / "tuned", "ft", *tune)  # nothing has to be scored any more
    with pytest.raises(DataError, match=r"cannot be read as a picture\.$"):  # and skipping would not help
        run(tmp_path / "other", "mib", tune[1])


ADAMW = ("optim.optimiser=adamw", "optim.schedule=cosine", "optim.warmup=3", "optim.lr=1e-3")


@pytest.mark.parametrize(("method", "settings"), [("pi", ()), ("rw", ()), ("ft", ADAMW)])
def test_importances_and_the_state_of_adamw_survive_a_kill_too(tmp_path, method, settings):
    run(tmp_path / "whole", method, *settings, bases=tmp_path / "b1")
    child = forked(lambda: run(tmp_path / "killed", method, *settings, bases=tmp_path / "b2"))
    for _ in range(200):
        time.sleep(0.02)
        if (tmp_path / "killed/state/current.json").exists():
            break
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    run(tmp_path / "killed", method, *settings, bases=tmp_path / "b2")
    assert '"resume"' in (tmp_path / "killed/log.jsonl").read_text()
    assert content(tmp_path / "killed") == content(tmp_path / "whole")


def test_ctrl_c_saves_and_the_run_is_resumed(finished, tmp_path):
    folder = tmp_path / "stopped"

    class Impatient(Quiet):
        def update(self, entry):
            if entry["step"] == 1 and entry["iteration"] == 1:
                os.kill(os.getpid(), signal.SIGINT)

    settings = [*TINY[:-1], "run.save_minutes=60"]
    with pytest.raises(InterruptedRunError, match="the same command again") as stopped:
        train(SPEC, "sdr", folder, settings=parse_settings(settings), bases=tmp_path / "bases", display=Impatient())
    assert stopped.value.exit_code == 130
    assert json.loads((folder / "state/current.json").read_text())["iteration"] == 1
    run(folder)
    assert content(folder) == content(finished)


def test_where_the_time_of_a_run_went(finished):
    """The parts of all steps make up the time from the start to the last score."""
    program = Path(__file__).parent.parent / "scripts/run_times.py"
    done = subprocess.run([sys.executable, program, finished], capture_output=True, check=True)
    (said,) = json.loads(done.stdout)
    log = [json.loads(line) for line in (finished / "log.jsonl").read_text().splitlines()]
    last = max(entry["time"] for entry in log if entry["event"] == "score")
    assert said["method"] == "sdr" and [step["step"] for step in said["steps"]] == [0, 1, 2]
    parts = [step[part] for step in said["steps"] for part in ("before", "training", "scoring")]
    assert min(parts) >= 0
    assert sum(parts) == pytest.approx(said["seconds"]) == pytest.approx(last - log[0]["time"])


def test_sigterm_to_a_run_and_its_workers_saves_too(tmp_path):
    """As `timeout` and SLURM send it: the workers go on until the run has saved."""
    folder = tmp_path / "stopped"
    more = ["data.cache=off", "data.workers=2", "train.epochs=500", "run.save_minutes=60"]
    settings = [word for assignment in [*TINY, *more] for word in ("--set", assignment)]
    words = ["train", SPEC, "--method", "sdr", "--out", folder, "--bases", tmp_path / "bases", *settings]
    child = start("-m", "sdrseg", *words, stdout=subprocess.DEVNULL)
    for _ in range(2000):
        time.sleep(0.05)
        if (log := folder / "log.jsonl").exists() and '"iteration": 20,' in log.read_text():
            break
    os.killpg(child.pid, signal.SIGTERM)
    _, said = child.communicate(timeout=60)
    assert child.returncode == 143 and said.endswith(b"\nStopped and saved. Run the same command again to resume.\n"), (
        said
    )
    assert json.loads((folder / "state/current.json").read_text())["iteration"] >= 20
    assert not (folder / "steps/0/meta.json").exists()


@pytest.fixture(scope="module")
def by_two(tmp_path_factory) -> Path:
    """The same run by two processes under torchrun."""
    folder = tmp_path_factory.mktemp("two") / "whole"
    end_well([torchrun(folder)])
    return folder


def test_two_processes_killed_and_resumed_end_the_same(by_two, tmp_path):
    children = torchrun_forked(tmp_path / "killed")
    for _ in range(2000):
        time.sleep(0.05)
        if (tmp_path / "killed/steps/0/meta.json").exists() and (tmp_path / "killed/state/current.json").exists():
            break
    for child in children:
        os.kill(child, signal.SIGKILL)
    for child in children:
        os.waitpid(child, 0)
    assert not (tmp_path / "killed/summary.json").exists()
    all_end_well(torchrun_forked(tmp_path / "killed"))
    assert content(tmp_path / "killed") == content(by_two)


def test_two_machines_and_slurm_train_the_same(by_two, tmp_path):
    """Two agents of torchrun with a process each; and two processes with the variables that srun gives them."""
    end_well(two_machines(tmp_path / "nodes"))
    job = {"SLURM_NTASKS": "2", "SLURM_NNODES": "1", "SLURM_NTASKS_PER_NODE": "2", "SLURM_JOB_NAME": "train"}
    job |= {"SLURM_JOB_ID": "7", "SLURM_NODEID": "0", "SLURM_NODELIST": "localhost"}
    all_end_well(two_forked(tmp_path / "slurm", job, ("SLURM_PROCID", "SLURM_LOCALID")))
    assert content(tmp_path / "nodes") == content(by_two)
    assert content(tmp_path / "slurm") == content(by_two)


def test_the_first_process_decides_whether_there_is_a_base(by_two, tmp_path):
    """Each with a store of its own, and only that of the first filled."""
    for name in ("fills", "finds"):
        all_end_well(torchrun_forked(tmp_path / name, own_bases=True))
    assert (tmp_path / "store0").exists() and not (tmp_path / "store1").exists()
    assert content(tmp_path / "finds") == content(by_two)


def test_where_there_are_two_devices_a_second_process_is_started(by_two, tmp_path):
    """As `sdrseg train` does on a machine with several GPUs."""
    two = "import sdrseg.engine.launch as launch\nlaunch._devices_and_nodes = lambda here: (2, 1)"
    end_well([start(script(tmp_path / "alone", before=two))])
    assert content(tmp_path / "alone") == content(by_two)


def test_at_a_prompt_one_device_is_used(monkeypatch):
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    assert _devices_and_nodes(4) == (1, 1)
    monkeypatch.delattr(sys, "ps1")
    assert _devices_and_nodes(4) == (4, 1)
