"""The engine on tiny generated data: everything a run leaves, and what is refused."""

from __future__ import annotations

import gc
import json
import os
import shutil
import subprocess
import sys
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from runs import SPEC, TINY, Quiet, content, run
from sdrseg.config import load_config, parse_settings
from sdrseg.datasets.order import TrainOrder
from sdrseg.datasets.pictures import read_image
from sdrseg.engine.bases import base_key
from sdrseg.engine.checkpoint import load_optimiser, load_tensors, optimiser_tensors, save_tensors
from sdrseg.engine.folder import RunFolder
from sdrseg.engine.job import prepare_job
from sdrseg.engine.rescore import score_again
from sdrseg.engine.run import train
from sdrseg.engine.watch import NotFiniteError
from sdrseg.errors import SdrsegError, UsageError
from sdrseg.network import build_network
from sdrseg.reporting import write_report
from sdrseg.scenario import parse_spec
from sdrseg.weights import read_tensors

# --- what a run leaves -----------------------------------------------------------------------------------------------


def test_a_run_leaves_everything(finished):
    files = {"config.json", "environment.json", "scenario.json", "summary.json", "log.jsonl"}
    assert {p.name for p in finished.iterdir()} == files | {".lock", "steps", "tensorboard"}
    for k in range(3):
        assert {p.name for p in (finished / "steps" / str(k)).iterdir()} == {
            "model.safetensors", "memory.safetensors", "meta.json", "metrics.json",
        }  # fmt: skip
    meta = json.loads((finished / "steps/2/meta.json").read_text())
    parent = json.loads((finished / "steps/1/meta.json").read_text())
    assert meta["parent"] == parent["files"]["model"]["sha256"]
    assert [c["step"] for c in meta["classes"]] == [0] * 9 + [1, 2]
    assert [c["name"] for c in meta["classes"]][-2:] == ["arrow", "heart"]
    assert meta["protocol"] == "disjoint" and meta["method"] == "sdr"
    memory = load_tensors(finished / "steps/2/memory.safetensors", meta["files"]["memory"]["sha256"])
    assert memory["prototypes.image.mean"].shape[0] == 11


def test_the_log_is_lines_of_json_in_order(finished):
    lines = (finished / "log.jsonl").read_text().splitlines()
    entries = [json.loads(line, parse_constant=pytest.fail) for line in lines]  # JSON has no Infinity
    assert entries[0]["event"] == "start"
    steps = [(e["step"], e["iteration"]) for e in entries if e["event"] == "train"]
    assert steps == sorted(set(steps))
    later = next(e for e in entries if e["event"] == "train" and e["step"] == 1)
    assert set(later["losses"]) == {"ce", "kd", "pm", "attract", "repel", "sp", "loss"}
    assert set(later["metrics"]) == {"hoyer", "active_channels", "to_prototype", "prototype_gap"}


def test_the_metrics_are_those_of_the_confusion_matrix(finished):
    saved = json.loads((finished / "steps/2/metrics.json").read_text())
    matrix = np.array(saved["confusion"])
    ious = []
    for c in range(11):
        hit = matrix[c, c]
        union = matrix[c].sum() + matrix[:, c].sum() - hit
        ious.append(hit / union if matrix[c].sum() else None)
        assert saved["classes"][c]["iou"] == pytest.approx(ious[c])
    known = [i for i in ious[:9] if i is not None]
    assert saved["miou"]["old"] == pytest.approx(sum(known) / len(known))
    assert matrix.sum() > 0.8 * 24 * 32 * 32  # all but void of the test images, each once


def test_scoring_again_gives_exactly_the_same(finished):
    results = score_again(finished)
    assert [r["same"] for r in results] == [True, True, True]


def test_other_scores_are_explained_where_the_data_changed(finished, tmp_path):
    shutil.copytree(finished, tmp_path / "run")
    metrics, scenario = tmp_path / "run/steps/2/metrics.json", tmp_path / "run/scenario.json"
    then, saved = json.loads(metrics.read_text()), json.loads(scenario.read_text())
    then["miou"]["all"] = 0.5
    metrics.write_text(json.dumps(then))
    assert score_again(tmp_path / "run")[2]["difference"] is None
    saved["mask_digests"][saved["steps"][2]["test_ids"][0]] = "00"
    scenario.write_text(json.dumps(saved))
    results = score_again(tmp_path / "run")
    assert [r["same"] for r in results] == [True, True, False]
    assert results[2]["miou_then"]["all"] == 0.5
    assert "was scored on other images or masks" in results[2]["difference"]


def test_offline_with_several_steps_warns_that_it_is_not_a_bound(tmp_path):
    display = Quiet()
    train(SPEC, "offline", tmp_path / "run", settings=parse_settings(TINY), bases=tmp_path / "bases", display=display)
    assert any("offline is fine-tuning, not an upper bound" in said for said in display.said if isinstance(said, str))


def test_scores_of_before_held_out_images_are_those_of_test_images(finished, tmp_path):
    shutil.copytree(finished, tmp_path / "run")
    file = tmp_path / "run/steps/2/metrics.json"
    older = json.loads(file.read_text())
    del older["scored_on"]
    file.write_text(json.dumps(older))
    assert [r["same"] for r in score_again(tmp_path / "run")] == [True, True, True]


def test_the_same_command_again_changes_nothing(finished):
    before = content(finished)
    run(finished, bases=finished.parent / "bases")
    assert content(finished) == before


def test_a_file_without_permission_is_not_to_be_removed(tmp_path, monkeypatch):
    save_tensors(tmp_path / "model.safetensors", {"a": torch.zeros(2)})
    Image.new("RGB", (4, 4)).save(tmp_path / "image.png")

    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_bytes", refuse)
    monkeypatch.setattr(Image, "open", refuse)
    for read, name in ((load_tensors, "model.safetensors"), (read_image, "image.png")):
        with pytest.raises(SdrsegError, match=rf"{name}: cannot be read \(Permission denied\)\. Change its perm"):
            read(tmp_path / name)


def test_a_run_of_another_configuration_is_not_resumed(finished, tmp_path):
    """Such as one of an earlier version, which says nothing of a recipe."""
    shutil.copytree(finished, tmp_path / "run")
    saved = json.loads((finished / "config.json").read_text())
    del saved["recipe"]
    (tmp_path / "run/config.json").write_text(json.dumps(saved))
    with pytest.raises(SdrsegError, match=r"another configuration \(now, in the folder\): recipe: \d+, None"):
        run(tmp_path / "run")


def test_a_run_is_resumed_with_a_later_version_of_the_package(finished, tmp_path, monkeypatch):
    shutil.copytree(finished, tmp_path / "run")
    monkeypatch.setattr("sdrseg.__version__", "9.9")
    monkeypatch.setattr("sdrseg.engine.environment.__version__", "9.9")
    run(tmp_path / "run")
    assert "sdrseg" not in json.loads((tmp_path / "run/config.json").read_text())
    assert [start["sdrseg"] for start in json.loads((tmp_path / "run/environment.json").read_text())][-1] == "9.9"


def test_a_damaged_folder_is_not_held_on_to(finished, tmp_path):
    shutil.copytree(finished, tmp_path / "run")
    for _ in range(2):
        (tmp_path / "run/environment.json").write_text("{")
        with pytest.raises(SdrsegError, match="environment"):
            run(tmp_path / "run")


def test_the_preset_and_its_learning_rates_are_printed(tmp_path):
    said = Quiet()
    train(
        SPEC, "ft", tmp_path / "run", settings=parse_settings([*TINY, "optim.decoder_lr_factor_later=5"]), display=said
    )
    assert "preset default, learning rate 0.02, then 0.02 (decoder 0.1)" in said.said


def test_the_learning_rate_of_every_step_is_printed(tmp_path):
    said = Quiet()
    rates = ["step.1.optim.lr=0.01", "step.2.optim.lr=0.03"]
    train(SPEC, "ft", tmp_path / "run", settings=parse_settings([*TINY, *rates]), display=said)
    assert "preset default, learning rate 0.02, then 0.01, then 0.03" in said.said


def test_intransigence_is_measured_against_an_offline_run(finished, tmp_path):
    run(tmp_path / "offline", "offline", spec="shapes:offline")
    bases = finished.parent / "bases"
    result = train(
        SPEC, "sdr", finished, settings=parse_settings(TINY), bases=bases, offline=tmp_path / "offline", display=Quiet()
    )
    best = json.loads((tmp_path / "offline/steps/0/metrics.json").read_text())["classes"]
    first = json.loads((finished / "steps/1/metrics.json").read_text())["classes"]
    assert result["intransigence"]["by_class"][9] == pytest.approx(best[9]["iou"] - first[9]["iou"])
    run(finished, bases=bases)  # and back to what the other tests expect
    with pytest.raises(UsageError, match=r"is scored on the test images, but this run .* held-out .* \(20 %\)"):
        tune = [*TINY, "train.holdout=0.2"]
        train(
            SPEC, "ft", tmp_path / "tuned", settings=parse_settings(tune), offline=tmp_path / "offline", display=Quiet()
        )
    assert not (tmp_path / "tuned").exists()


@pytest.mark.parametrize("setting", ["run.accumulate=2", "optim.clip=0.1", "optim.lr_rule=linear", "data.cache=off"])
def test_other_ways_to_train(finished, tmp_path, setting):
    """Accumulation, clipping and the learning-rate rule change the weights; where images are kept does not."""
    run(tmp_path / "run", "sdr", setting)
    same = content(tmp_path / "run") == content(finished)
    assert same == (setting == "data.cache=off")


def test_tuning_scores_held_out_images_also_in_between_and_trains_the_same(tmp_path):
    tune = ["train.holdout=0.3", "train.epochs=3"]
    run(tmp_path / "plain", "ft", *tune)
    display = Quiet()
    run_with = {
        "settings": parse_settings([*TINY, *tune, "eval.every=1"]),
        "bases": tmp_path / "others",
        "display": display,
    }
    result = train(SPEC, "ft", tmp_path / "looked", **run_with)
    weights = [content(tmp_path / name)["steps/2/model.safetensors"] for name in ("plain", "looked")]
    assert weights[0] == weights[1]
    scenario = json.loads((tmp_path / "looked/scenario.json").read_text())
    for step in scenario["steps"]:
        assert step["test_ids"] and all(id.startswith("train") for id in step["test_ids"])
        assert not set(step["test_ids"]) & {id for s in scenario["steps"] for id in s["train_ids"]}
    said = [entry[:2] for entry in display.said if isinstance(entry, tuple)]
    assert said == [(step, epoch) for step in range(3) for epoch in (1, 2)]
    assert result["scored_on"] == "held-out training images (30 %), all labels (oracle)"
    assert score_again(tmp_path / "looked")[-1]["same"]
    page, notes = write_report([tmp_path / "plain", tmp_path / "looked"], tmp_path / "page.html", images=2)
    assert notes == [f"Scored on {result['scored_on']}, not on the test images."]
    assert notes[0] in page.read_text() and "scored differently" not in page.read_text()


def test_scoring_during_training_without_held_out_images_is_refused(tmp_path):
    with pytest.raises(UsageError, match=r"train\.holdout=0\.2"):
        run(tmp_path / "run", "ft", "eval.every=1")
    assert not (tmp_path / "run").exists()


def test_the_order_of_images_determines_the_number_of_iterations(tmp_path, monkeypatch):
    config = load_config(
        "shapes", None, parse_settings([*TINY, "train.epochs=3", "train.epochs_later=2", "train.batch_size_later=5"])
    )
    job = prepare_job(parse_spec(SPEC), "ft", config, None, tmp_path / "run", tmp_path / "bases", Quiet())
    images = [len(step.train_ids) for step in job.scenario.steps]
    later = [2 * (count // 5) for count in images[1:]]
    left = [3 * (images[0] // 4), sum(later), later[1]]
    assert [job.iterations_alike(step) for step in job.scenario.steps] == left
    monkeypatch.setattr(TrainOrder, "__len__", lambda self: 7)  # another rule
    assert [job.iterations_alike(step) for step in job.scenario.steps] == [7, 14, 7]


# --- what is refused, and said ---------------------------------------------------------------------------------------


def test_another_configuration_is_never_silently_continued(finished):
    with pytest.raises(SdrsegError, match=r"another configuration.*kd.weight: 7.0, 5.0"):
        run(finished, "sdr", "kd.weight=7")
    with pytest.raises(SdrsegError, match=r"method: 'mib', 'sdr'"):
        run(finished, "mib")
    run(finished, "sdr", "data.workers=0", bases=finished.parent / "bases")  # this may differ


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda saved: saved["mask_digests"].update({saved["steps"][0]["train_ids"][3]: "00"}), "has changed"),
        (lambda saved: saved["steps"][1]["train_ids"].pop(2), r"step 1 was trained on other .* is new\."),
        (lambda saved: saved["steps"][2]["test_ids"].pop(0), r"step 2 was scored on other images or masks"),
        (lambda saved: saved["classes"].append("cat"), "data with the classes background, .*, cat, not background"),
    ],
)
def test_other_data_are_never_silently_continued(finished, tmp_path, change, message):
    shutil.copytree(finished, tmp_path / "run")
    file = tmp_path / "run/scenario.json"
    saved = json.loads(file.read_text())
    change(saved)
    file.write_text(json.dumps(saved))
    for _ in range(2):  # the folder is given free each time
        with pytest.raises(SdrsegError, match=message):
            run(tmp_path / "run")
    assert json.loads(file.read_text()) == saved


def test_data_of_steps_that_are_not_begun_may_change(finished, tmp_path):
    shutil.copytree(finished, tmp_path / "run")
    shutil.rmtree(tmp_path / "run/steps/2")
    file = tmp_path / "run/scenario.json"
    saved = json.loads(file.read_text())
    saved["steps"][2]["train_ids"].pop(0)  # so one image is new
    file.write_text(json.dumps(saved))
    run(tmp_path / "run")
    assert content(tmp_path / "run") == content(finished)


def test_a_run_without_a_finished_step_is_not_scored_again(finished, tmp_path):
    shutil.copytree(finished, tmp_path / "run")
    shutil.rmtree(tmp_path / "run/steps")
    with pytest.raises(SdrsegError, match="run: no step of this run is trained and scored yet"):
        score_again(tmp_path / "run")


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="a folder that nobody can write to")
def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    with pytest.raises(SdrsegError, match=r"/proc/none/run: cannot be written .*--out"):
        run(Path("/proc/none/run"), bases=tmp_path / "bases")


def test_two_runs_cannot_write_one_folder(finished, tmp_path):
    shutil.copytree(finished, tmp_path / "run")
    config = json.loads((finished / "config.json").read_text())
    folder = RunFolder(tmp_path / "run")
    from sdrseg.config import config_from

    identity = {key: config[key] for key in ("spec", "method", "preset")}
    assert folder.open(identity, config_from(config["config"], "test"))
    with pytest.raises(SdrsegError, match="in use by another process"):
        run(tmp_path / "run", bases=tmp_path / "bases")
    code = f"import fcntl; fcntl.lockf(open({str(tmp_path / 'run/.lock')!r}, 'ab'), fcntl.LOCK_EX | fcntl.LOCK_NB)"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert b"BlockingIOError" in other.stderr  # the refused start has not released the lock
    folder.close()


def test_later_steps_have_the_memory_of_step_0(tmp_path, monkeypatch):
    """Its network, gradients and statistics are freed."""
    import sdrseg.engine.run as engine

    real, alive = engine.assemble, []

    def assemble(*given):
        made = real(*given)
        alive.extend(weakref.ref(one) for one in made if one is not None)
        return made

    def after_step(score):
        gc.collect()
        left.append(sum(one() is not None for one in alive))

    left: list[int] = []
    monkeypatch.setattr(engine, "assemble", assemble)
    settings = parse_settings(TINY)
    train(
        SPEC, "ewc", tmp_path / "run", settings=settings, bases=tmp_path / "b", display=Quiet(), after_step=after_step
    )
    assert len(alive) == 2 and left == [0, 0, 0]


def test_a_step_0_that_another_process_finished_meanwhile_is_not_that_of_step_1(tmp_path, monkeypatch):
    import sdrseg.engine.run as engine

    class EnoughError(Exception):
        pass

    def stop(score):
        raise EnoughError

    real, given = engine.assemble, {"settings": parse_settings(TINY), "bases": tmp_path / "bases", "display": Quiet()}

    def assemble(*parts):
        monkeypatch.setattr(engine, "assemble", real)
        with pytest.raises(EnoughError):  # the other process
            train(SPEC, "ft", tmp_path / "run", **given, after_step=stop)
        return real(*parts)

    monkeypatch.setattr(engine, "assemble", assemble)
    train(SPEC, "ft", tmp_path / "run", **given)
    run(tmp_path / "whole", "ft", bases=tmp_path / "other")
    assert content(tmp_path / "run") == content(tmp_path / "whole")


def test_a_folder_with_other_things_is_left_alone(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/thesis.tex").write_text("years of work")
    with pytest.raises(SdrsegError, match=r"contains thesis\.tex and is not a run of sdrseg"):
        run(tmp_path / "mine")
    assert [p.name for p in (tmp_path / "mine").iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize("damage", ["truncated", "foreign", "missing"])
def test_a_damaged_model_is_named(finished, tmp_path, damage):
    shutil.copytree(finished, tmp_path / "run")
    file = tmp_path / "run/steps/1/model.safetensors"
    (tmp_path / "run/steps/2/meta.json").unlink()
    if damage == "missing":
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[:1000] if damage == "truncated" else b"GIF89a")
    with pytest.raises(SdrsegError) as error:
        run(tmp_path / "run", bases=tmp_path / "bases")
    assert str(file) in str(error.value) and "Restore it from a copy, or remove" in str(error.value)


def test_a_loss_that_is_not_finite_stops_the_run_and_names_its_images(tmp_path):
    with pytest.raises(NotFiniteError) as error:
        run(tmp_path / "run", "sdr", "optim.lr=1e30", "run.log_every=5")
    text = str(error.value)
    assert "step 0, iteration" in text and "the term ce" in text and "train-0" in text
    assert not (tmp_path / "run/steps/0/meta.json").exists()


def test_several_terms_that_are_not_finite_are_named_together(tmp_path):
    with pytest.raises(NotFiniteError, match=r"step 1, iteration \d+: the terms ce, kd.* are not finite; \w+ grew"):
        run(tmp_path / "run", "sdr", "optim.lr_later=1e30", "run.log_every=5")


def test_a_full_disk_stops_the_run_with_the_last_state_intact(finished, tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    if os.geteuid() != 0 or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", disk]).returncode:
        pytest.skip("cannot mount a small disk here")
    try:
        with pytest.raises(SdrsegError, match="No space left on device"):
            run(disk / "run", bases=tmp_path / "bases")
        kept = RunFolder(disk / "run")
        facts = kept.read_json("state/current.json")
        load_tensors(disk / "run/state" / facts["file"], facts["sha256"])
        assert not list((disk / "run").rglob("*.tmp"))
        subprocess.run(["mount", "-o", "remount,size=200m", disk], check=True)
        run(disk / "run", bases=tmp_path / "bases")
        assert content(disk / "run") == content(finished)
    finally:
        subprocess.run(["umount", "-l", disk])


def test_too_few_images_for_a_batch_is_reported_before_any_work(tmp_path):
    with pytest.raises(SdrsegError, match=r"step 0 .* fewer than the batch of 500"):
        run(tmp_path / "run", "sdr", "train.batch_size=500")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("wrong", ["net.encoder=resnet5", "net.weights=/nowhere.pth", "net.decoder=dpt"])
def test_a_wrong_network_is_reported_before_the_folder_is_made(tmp_path, wrong):
    with pytest.raises(SdrsegError, match=wrong.split("=")[0]):
        run(tmp_path / "run", "sdr", wrong)
    assert not (tmp_path / "run").exists()


def test_a_file_of_weights_is_hashed_once_and_read_once(tmp_path, monkeypatch):
    network = build_network(load_config("shapes", None, parse_settings(TINY)).net, 9)
    save_tensors(tmp_path / "start.safetensors", network.state_dict())
    done = []

    def counted(name, real):
        return lambda *given: done.append(name) or real(*given)

    monkeypatch.setattr("sdrseg.weights.read_tensors", counted("read", read_tensors))
    monkeypatch.setattr("sdrseg.engine.job.base_key", counted("hashed", base_key))
    display = Quiet()
    settings = [*TINY, f"net.weights={tmp_path / 'start.safetensors'}"]
    train(SPEC, "sdr", tmp_path / "run", settings=parse_settings(settings), bases=tmp_path / "bases", display=display)
    assert done == ["hashed", "read"]
    assert sum("Weights of the whole network from" in text for text in display.said) == 1


# --- files -----------------------------------------------------------------------------------------------------------


def test_tensors_on_disk_are_checked(tmp_path):
    digest = save_tensors(tmp_path / "t.safetensors", {"a": torch.arange(4)})
    assert torch.equal(load_tensors(tmp_path / "t.safetensors", digest)["a"], torch.arange(4))
    with pytest.raises(SdrsegError, match="not the file that was written"):
        load_tensors(tmp_path / "t.safetensors", "0" * 64)
    (tmp_path / "text").write_text("hello")
    with pytest.raises(SdrsegError, match="not a safetensors file"):
        load_tensors(tmp_path / "text")


def test_the_state_of_a_fused_optimiser_is_restored_exactly(tmp_path):
    """Fused code goes through weights and momentum as they lie in memory; files hold them row by row."""
    torch.manual_seed(0)
    images = torch.randn(3, 2, 3, 32, 32)
    start = build_network(load_config("shapes").net, 3).state_dict()
    weights = []
    for interrupted in (False, True):
        network = build_network(load_config("shapes").net, 3)
        network.load_state_dict(start)
        network.to(memory_format=torch.channels_last)

        def fused(network=network):
            return torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9, nesterov=True, fused=True)

        optimiser = fused()
        for number, batch in enumerate(images):
            if interrupted and number == 2:
                save_tensors(tmp_path / "state", optimiser_tensors(optimiser))
                optimiser = fused()
                load_optimiser(optimiser, load_tensors(tmp_path / "state"))
            optimiser.zero_grad()
            network(batch).logits.square().mean().backward()
            optimiser.step()
        weights.append(network.state_dict())
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in start)
