"""train.batch_size = auto: the number, where it is recorded, and who may not use it."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from runs import SPEC, TINY, Quiet, run
from sdrseg.config import config_from, load_config, parse_settings
from sdrseg.config.sections import AUTO
from sdrseg.engine import batch_size
from sdrseg.engine.batch_size import choose_batch_size, suitable
from sdrseg.engine.job import prepare_job
from sdrseg.errors import UsageError
from sdrseg.extend.plan import make_config
from sdrseg.scenario import parse_spec
from sdrseg.study.grid import read_study


def up_to(most):
    return lambda size: "the memory" if size > most else ""


@pytest.mark.parametrize(
    ("images", "unit", "most", "size"),
    [
        (1000, 1, 99, 16),
        (128, 1, 99, 16),
        (127, 1, 99, 8),
        (32, 1, 99, 4),  # forty photographs, a fifth held out
        (3, 1, 99, 2),
        (1000, 1, 4, 4),
        (1000, 1, 1, 2),  # nothing fits: the smallest is tried in training
        (1000, 4, 99, 16),  # four processes, or parts
        (100, 4, 99, 8),
        (100, 16, 99, 32),
    ],
)
def test_the_largest_batch_that_fits_and_leaves_eight_in_an_epoch(images, unit, most, size):
    assert suitable(images, unit, up_to(most))[0] == size


@given(st.integers(1, 10_000), st.integers(1, 64), st.integers(0, 64))
def test_every_process_and_part_gets_two_images_or_more(images, unit, most):
    size, why = suitable(images, unit, up_to(most))
    assert size % (2 * unit) == 0
    assert 2 * unit == size or (size <= 16 and size <= most and images // size >= 8)
    assert why or size == next(iter(batch_size.sizes(unit)))


def automatic_job(tmp_path, *more, spec=SPEC):
    config = load_config("shapes", None, parse_settings([*TINY, "train.batch_size=auto", *more]))
    assert config.train.batch_size == AUTO
    return prepare_job(parse_spec(spec), "ft", config, None, tmp_path / "run", None, Quiet())


def test_on_a_cpu_the_crop_limits_it(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    job = automatic_job(tmp_path, "shapes.train=400", spec="shapes:offline")
    limited = ", limited by the crop ({}) on a CPU"
    chosen = [(32, 16, " (the largest that auto uses)"), (256, 8, limited.format(256)), (512, 2, limited.format(512))]
    for crop, size, why in chosen:
        job.config = job.config.changed({"data.crop": crop, "train.batch_size": AUTO})
        (said,) = choose_batch_size(job)
        assert job.config.train.batch_size == size
        assert said == f"batch size {size}{why}"


def test_on_a_gpu_it_is_tried_in_every_process(tmp_path, monkeypatch):
    job = automatic_job(tmp_path, "shapes.train=400", "data.crop=512", spec="shapes:offline")
    job.fabric = SimpleNamespace(device=torch.device("cuda"))
    tried = []
    monkeypatch.setattr(batch_size, "_fits", lambda _job, _config, images: tried.append(images) or images <= 2)
    job.processes.world = 2  # the other one is short of memory for eight
    monkeypatch.setattr(job.processes, "any", lambda here: here)
    assert choose_batch_size(job) == ["batch size 4, limited by the memory of the GPU"]
    assert tried == [8, 4, 2]


def test_what_is_tried_needs_no_trained_model(tmp_path):
    job = automatic_job(tmp_path)
    batch_size._try(job, job.config, 2)


def test_a_later_batch_size_of_its_own_leaves_the_choice_to_step_0(tmp_path):
    job = automatic_job(tmp_path, "shapes.train=400", "train.batch_size_later=4")
    assert len(job.scenario[1].train_ids) < 16 * 8
    choose_batch_size(job)
    assert [job.config.of_step(n).train.batch_size for n in (0, 1)] == [16, 4]


def test_the_run_records_the_number_and_keeps_it(tmp_path, monkeypatch):
    settings = ["train.batch_size=auto", "shapes.train=20"]
    run(tmp_path / "auto", "ft", *settings, spec="shapes:offline")
    recorded = (tmp_path / "auto/config.json").read_text()
    assert json.loads(recorded)["config"]["train"]["batch_size"] == 2
    monkeypatch.setattr(batch_size, "sizes", lambda _unit: iter([4]))  # as a machine with more memory would choose
    (tmp_path / "auto/steps/0/meta.json").unlink()
    run(tmp_path / "auto", "ft", *settings, spec="shapes:offline")
    assert (tmp_path / "auto/config.json").read_text() == recorded


def test_auto_is_a_word_of_this_setting_only():
    with pytest.raises(UsageError, match="'automatic' is not a whole number or \"auto\""):
        config_from({"train": {"batch_size": "automatic"}}, "here")
    with pytest.raises(UsageError, match=r"train.batch_size = 0 must be at least 1"):
        config_from({"train": {"batch_size": 0}}, "here")
    with pytest.raises(UsageError, match=r"train.epochs = 'auto' is not a whole number"):
        config_from({"train": {"epochs": "auto"}}, "here")


def test_extending_takes_the_size_that_goes_with_the_images():
    parent = SimpleNamespace(
        config=load_config("shapes"),
        folder=SimpleNamespace(path=Path("run")),
        source="shapes",
        decision="softmax",
        rate_set=None,
    )
    for images, size in ((100, 8), (40, 4), (3, 3)):
        config = make_config(parent, "mib", images, True, None, {"train.batch_size": "auto"})
        assert config.train.batch_size == size


def test_an_experiment_needs_a_number(tmp_path):
    file = tmp_path / "grid.toml"
    file.write_text(f'spec = "{SPEC}"\nmethod = "ft"\n[train]\nbatch_size = "auto"\n')
    with pytest.raises(UsageError, match="depends on the machine"):
        read_study(file)
