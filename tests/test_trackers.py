"""What follows a run beside its log: TensorBoard, Weights & Biases offline, MLflow in files."""

from __future__ import annotations

import json

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from runs import SPEC, TINY, run
from sdrseg.engine import trackers
from sdrseg.errors import UsageError


@pytest.fixture
def quiet_wandb(monkeypatch, tmp_path):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    for name in ("WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "wandb-home"))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


def test_tensorboard_has_scores_rates_and_pictures(tmp_path):
    run(tmp_path / "run", "ft")
    board = EventAccumulator(str(tmp_path / "run/tensorboard"))
    board.Reload()
    scalars, metrics = board.Tags()["scalars"], json.loads((tmp_path / "run/steps/2/metrics.json").read_text())
    assert {"mIoU/old", "mIoU/new", "mIoU/all", "step1/loss", "step1/lr encoder", "step1/lr decoder"} <= set(scalars)
    last = board.Scalars("mIoU/all")[-1]
    assert (last.step, last.value) == (2, pytest.approx(metrics["miou"]["all"], rel=1e-5))
    heart = next(c for c in metrics["classes"] if c["iou"] is not None)
    assert board.Scalars(f"IoU/{heart['name']}")[-1].value == pytest.approx(heart["iou"], rel=1e-5)
    rates = [entry.value for entry in board.Scalars("step0/lr encoder")]
    assert rates[0] == pytest.approx(0.02) and rates == sorted(rates, reverse=True)
    pictures = board.Tags()["images"]
    assert len(pictures) == 4
    assert (board.Images(pictures[0])[-1].width, board.Images(pictures[0])[-1].height) == (3 * 32, 32)


def test_an_oracle_is_called_so_wherever_its_scores_go(tmp_path, sdrseg):
    words = [word for text in (*TINY, "shapes.train=120", "train.epochs=2", "eval.every=1") for word in ("--set", text)]
    run = ["train", SPEC, "--method", "ft", "--out", tmp_path / "run", "--bases", tmp_path / "bases", "--holdout"]
    code, out, err = sdrseg(*run, *words)
    where = "held-out training images (20 %), all labels (oracle)"
    assert code == 0 and f"mIoU after each step on {where}" in " ".join(out.split())
    said = [line for line in err.splitlines() if "mIoU" in line]
    assert len(said) == 6 and all("all labels (oracle)" in line for line in said)
    assert json.loads((tmp_path / "run/summary.json").read_text())["scored_on"] == where
    board = EventAccumulator(str(tmp_path / "run/tensorboard"))
    board.Reload()
    names = [name for name in board.Tags()["scalars"] if "IoU" in name]
    assert {"oracle mIoU/all", "step1/oracle mIoU all"} < set(names) and all("oracle" in name for name in names)


def test_wandb_offline_and_mlflow_in_files(tmp_path, quiet_wandb):
    pytest.importorskip("mlflow")
    run(tmp_path / "run", "ft", 'run.loggers=["wandb", "mlflow"]')
    assert not (tmp_path / "run/tensorboard").exists()
    assert list(tmp_path.glob("run/wandb/offline-run-*/run-*.wandb"))
    final = json.loads((tmp_path / "run/summary.json").read_text())["miou"]["all"]
    (file,) = tmp_path.glob("run/mlflow/*/*/metrics/mIoU/all")
    assert [float(line.split()[1]) for line in file.read_text().splitlines()][-1] == pytest.approx(final)
    (param,) = tmp_path.glob("run/mlflow/*/*/params/train.batch_size")
    assert param.read_text() == "4"


def test_trackers_can_be_off_and_missing_ones_are_named_before_any_work(tmp_path, monkeypatch):
    run(tmp_path / "run", "ft", "run.loggers=[]")
    assert not (tmp_path / "run/tensorboard").exists()
    run(tmp_path / "run", "ft")  # which of them follow may change when a run is resumed
    monkeypatch.setattr(trackers, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"pip install 'sdrseg\[wandb\]'"):
        run(tmp_path / "new", "ft", 'run.loggers=["wandb"]')
    assert not (tmp_path / "new").exists()
    for wrong in ('run.loggers=["tensorbord"]', 'run.loggers="wandb"', 'run.loggers=["wandb", "wandb"]'):
        with pytest.raises(UsageError, match=r"run.loggers"):
            run(tmp_path / "new", "ft", wrong)
