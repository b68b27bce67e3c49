"""What Apple's GPUs need, seen without one: they have no float64, which is an error there."""

from __future__ import annotations

import pytest
import torch
from lightning.fabric import Fabric
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import sdrseg.losses.contrast
import sdrseg.methods.adjust
from sdrseg.datasets.augment import normalise
from sdrseg.datasets.batches import Batches
from sdrseg.engine.evaluate import confusion
from sdrseg.methods import METHODS

from methods_bench import CLASSES, begin


class NoFloat64(TorchDispatchMode):
    """Inside, an operation that takes or makes float64 is an error."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for value in tree_leaves((args, kwargs, result)):
            if isinstance(value, torch.Tensor) and value.dtype == torch.float64:
                raise TypeError(f"{function} in float64")
        return result


@pytest.fixture(autouse=True)
def without_float64(monkeypatch):
    monkeypatch.setattr(sdrseg.losses.contrast, "widest", lambda x: x)


@pytest.mark.parametrize("protocol", ["sequential", "disjoint"])
@pytest.mark.parametrize("name", [n for n in METHODS if not n.startswith("ablation")])
def test_no_method_needs_float64(name, protocol):
    stage = begin(name, protocol)
    with NoFloat64():
        stage.iterate(2)
        stage.method.end_step(stage.student)
    assert all(map(torch.isfinite, map(torch.tensor, stage.losses)))


@pytest.mark.parametrize("when", ["before", "after"])
def test_the_pass_over_the_data_of_laps_needs_no_float64(when, monkeypatch):
    """What is fitted to the samples after it is computed on the CPU."""
    monkeypatch.setattr(sdrseg.methods.adjust, "widest", lambda x: x)
    stage = begin("laps", "overlapped", settings=("laps.fit_only=false", "laps.drift=true"))
    images = normalise(stage.batch.images)
    with NoFloat64(), torch.no_grad():
        stage.method.begin_survey(when)
        stage.method.survey(stage.batch, stage.student(images), stage.teacher(images))
        stage.method._sample.gather(stage.method.processes)
        stage.method._drift.shift(stage.method.memory.classes, stage.method.processes)


def test_scoring_needs_no_float64():
    stage = begin("ft", "disjoint")
    batches: Batches = [stage.batch]  # type: ignore[assignment]
    with NoFloat64():
        total = confusion(Fabric(accelerator="cpu"), stage.student, batches, CLASSES)
    assert total.sum() == (stage.batch.labels != 255).sum()


def test_float64_would_be_noticed():
    with NoFloat64(), pytest.raises(TypeError):
        torch.ones(3).double()
