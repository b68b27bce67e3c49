"""Shared by all tests: a private cache folder, the real VOC data where SDRSEG_VOC names it, facts about its masks."""

from __future__ import annotations

import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from sdrseg.config import parse_settings
from sdrseg.datasets import SOURCES

BUILT_IN = tuple(SOURCES)
torch.set_num_threads(1)  # tests are small: threads only get into each other's way, and into that of forked children

DATA = Path(__file__).parent / "data"


@pytest.fixture(autouse=True)
def private_cache(tmp_path_factory, monkeypatch, request):
    """No test reads or writes the user's cache; tests on the real VOC share one, so that it is counted once."""
    name = "voc-cache" if "voc_folder" in request.fixturenames else "cache"
    base = tmp_path_factory.getbasetemp() / name if name == "voc-cache" else tmp_path_factory.mktemp(name)
    monkeypatch.setenv("SDRSEG_CACHE", str(base))


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """A whole SDR run with three steps, trained without interruption."""
    from runs import run

    folder = tmp_path_factory.mktemp("finished") / "run"
    run(folder)
    return folder


@pytest.fixture
def sdrseg(tmp_path: Path, monkeypatch, capfd):
    """Run it in this process (which is faster), in a folder of its own: exit code, standard output, standard error."""
    from sdrseg.cli import main

    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")

    def run(*words: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["sdrseg", *map(str, words)])
        code = 0
        try:
            main()
        except SystemExit as end:
            code = int(end.code or 0)
        out, err = capfd.readouterr()
        return code, out, err

    return run


@pytest.fixture(scope="session")
def voc_folder() -> Path:
    if not (folder := os.environ.get("SDRSEG_VOC")):
        pytest.skip("SDRSEG_VOC names no folder with VOC2012")
    return Path(folder)


def forget_own_sources() -> None:
    """Undo every `register_source` of a test."""
    for name in own_sources():
        del SOURCES[name]


def own_sources() -> list[str]:
    return [name for name in SOURCES if name not in BUILT_IN]


@dataclass
class Presence:
    """A class index without masks: which label values are in which image."""

    ids: tuple[str, ...]
    present: np.ndarray


@pytest.fixture(scope="session")
def voc_presence() -> dict[str, Presence]:
    """Which classes are in which of the 10,582 + 1,449 VOC masks (packed by scripts/pack_published.py)."""
    packed = np.load(DATA / "voc_presence.npz")
    return {
        split: Presence(
            tuple(f"{i:05d}" for i in range(images)), np.unpackbits(packed[split], axis=0, count=images).astype(bool)
        )
        for split, images in (("train", 10582), ("val", 1449))
    }


@pytest.fixture(scope="session")
def voc_lists() -> dict[str, list[int]]:
    """The published VOC index lists, by "TASK@PROTOCOL/train-0" and so on."""
    packed = np.load(DATA / "voc_lists.npz")
    return {
        key: np.flatnonzero(np.unpackbits(packed[key], count=10582 if "/train-" in key else 1449)).tolist()
        for key in packed.files
    }


@pytest.fixture(scope="session")
def trained(tmp_path_factory) -> Path:
    """A run of three steps on small generated images, trained for a moment."""
    from sdrseg.engine.run import train

    folder = tmp_path_factory.mktemp("trained")
    settings = ["shapes.size=32", "shapes.train=60", "shapes.val=12", "data.crop=32", "train.batch_size=4"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SDRSEG_CACHE", str(folder / "cache"))
        train(
            "shapes:8-1@disjoint",
            "mib",
            folder / "run",
            settings=parse_settings([*settings, "train.epochs=1", "net.decoder=deeplabv3"]),
            bases=folder / "bases",
        )
    return folder / "run"


@pytest.fixture(scope="session")
def exported(trained, tmp_path_factory) -> Path:
    """Its last step as an ONNX file."""
    from sdrseg.exporting import export_model

    file = tmp_path_factory.mktemp("exported") / "model.onnx"
    export_model(trained, file)
    return file


@pytest.fixture(scope="session")
def report_runs(tmp_path_factory) -> dict[str, Path]:
    """Tiny runs of one scenario with three steps: fine-tuning, SDR, and SDR of which only two steps are done."""
    from sdrseg.engine.run import train

    folder = tmp_path_factory.mktemp("report-runs")
    tiny = ["shapes.size=32", "shapes.train=160", "shapes.val=24", "data.crop=32", "data.scale=[0.8, 1.25]"]
    tiny += ["train.batch_size=8", "train.epochs=6", "optim.lr=0.05", "optim.lr_later=0.01", "kd.weight=5"]
    tiny += ["run.log_every=1", "data.workers=0"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SDRSEG_CACHE", str(folder / "cache"))
        for method in ("ft", "sdr"):
            train("shapes:8-1@disjoint", method, folder / method, settings=parse_settings(tiny), bases=folder / "bases")
    shutil.copytree(folder / "sdr", folder / "unfinished")
    shutil.rmtree(folder / "unfinished/steps/2")
    (folder / "unfinished/summary.json").unlink()
    return {name: folder / name for name in ("ft", "sdr", "unfinished")}
