"""Models of step 0: shared by runs, with their scores, and taken to other machines."""

from __future__ import annotations

import json
import os
import shutil
import subprocess

import numpy as np
import pytest
import torch
from PIL import Image

from extend_data import SMALL, base_folder
from runs import SPEC, TINY, Quiet, content, run
from sdrseg.config import load_config, parse_settings
from sdrseg.datasets.folder.masks import Folder
from sdrseg.datasets.sealed import Sealed
from sdrseg.engine import bases as bases_module
from sdrseg.engine import evaluate
from sdrseg.engine.bases import BaseStore, base_key, export_base, parse_size, write_base
from sdrseg.engine.job import prepare_job
from sdrseg.engine.rescore import score_again
from sdrseg.engine.run import train
from sdrseg.errors import SdrsegError, UsageError
from sdrseg.methods import METHODS
from sdrseg.scenario import parse_spec
from sdrseg.study.cell import cell_of


def test_the_base_is_trained_once_for_all_methods_and_shared_by_sequential(finished, tmp_path):
    store = finished.parent / "bases"
    assert len(list(store.iterdir())) == 1
    base = (finished / "steps/0/model.safetensors").read_bytes()
    for method, spec in (("mib", SPEC), ("ft", "shapes:8-1@sequential")):
        run(tmp_path / method, method, spec=spec, bases=store)
        assert (tmp_path / method / "steps/0/model.safetensors").read_bytes() == base
    assert len(list(store.iterdir())) == 1
    run(tmp_path / "ewc", "ewc", bases=store)
    assert len(list(store.iterdir())) == 2  # a step 0 of its own


def test_runs_that_share_step_0_share_its_scores(tmp_path, monkeypatch):
    """Scored once; the same numbers as without sharing, and nothing else is taken for them."""
    scored, real = [], evaluate.score
    monkeypatch.setattr(
        evaluate, "score", lambda job, step, *more: scored.append(step.number) or real(job, step, *more)
    )
    store = tmp_path / "bases"
    run(tmp_path / "ft", "ft", bases=store)
    run(tmp_path / "mib", "mib", bases=store)
    assert scored == [0, 1, 2, 1, 2]
    (file,) = store.glob("*/score-*.json")
    found = [json.loads((tmp_path / name / "steps/0/metrics.json").read_text()) for name in ("ft", "mib")]
    assert found[0] == found[1] and found[0] == json.loads(file.read_text()) | {"scored_on": "the test images"}
    assert [r["same"] for r in score_again(tmp_path / "mib")] == [True, True, True]  # scored again, not read
    others = ("eval.transform=crop512", "eval.batch_size=3", "eval.future=background", "data.cache=off")
    for number, other in enumerate(others, 2):
        scored.clear()
        run(tmp_path / f"other{number}", "ft", other, bases=store)
        assert scored[0] == 0 and len(list(store.glob("*/score-*.json"))) == number
    for damaged in ("{", "[]", json.dumps({**found[0], "confusion": [[1]]}), json.dumps({**found[0], "classes": 7})):
        file.write_text(damaged)
        scored.clear()
        shutil.rmtree(tmp_path / "mib")
        run(tmp_path / "mib", "mib", bases=store)
        assert scored == [0, 1, 2] and json.loads(file.read_text())["confusion"] == found[0]["confusion"]


def test_scores_are_not_shared_where_a_test_image_has_changed(tmp_path, monkeypatch):
    """Also in a file of the same size, and with the time of the old one."""
    data, (height, width) = base_folder(tmp_path / "data", 24), (32, 32)
    for file in (data / "images").iterdir():
        Image.open(file).save(file.with_suffix(".bmp"))  # every file has the same size
        file.unlink()
    given = {"data": data, "settings": {**SMALL, "train.epochs": 1}, "bases": tmp_path / "bases", "display": Quiet()}
    train("folder:offline", "ft", tmp_path / "first", **given)
    (id, another, *_) = json.loads((tmp_path / "first/scenario.json").read_text())["steps"][0]["test_ids"]
    image = data / f"images/{id}.bmp"
    time, size = image.stat().st_mtime_ns, image.stat().st_size
    Image.new("RGB", (width, height), (230, 30, 30)).save(image)
    os.utime(image, ns=(time, time))
    assert image.stat().st_size == size
    scored, real = [], evaluate.score
    monkeypatch.setattr(
        evaluate, "score", lambda job, step, *more: scored.append(step.number) or real(job, step, *more)
    )
    train("folder:offline", "ft", tmp_path / "changed", **given)
    train("folder:offline", "ft", tmp_path / "again", **given)
    assert scored == [0] and len(list((tmp_path / "bases").glob("*/score-*.json"))) == 2
    mask = data / f"masks/{another}.png"
    pixels = np.array(Image.open(mask))
    Image.fromarray(np.where(pixels == pixels.max(), 0, pixels)).save(mask)
    train("folder:offline", "ft", tmp_path / "mask", **given)
    assert scored == [0, 0] and len(list((tmp_path / "bases").glob("*/score-*.json"))) == 3


def test_the_score_of_a_model_is_not_taken_for_that_of_another(tmp_path, monkeypatch):
    """Also if its base is trained again, with other weights, in the same folder of the store."""
    store = tmp_path / "bases"
    run(tmp_path / "first", "ft", bases=store)
    (base,) = store.iterdir()
    model, memory = BaseStore(store).load(base.name)
    facts = json.loads((base / "meta.json").read_text())
    write_base(base, facts, {name: -t if "classifier" in name else t for name, t in model.items()}, memory)
    run(tmp_path / "second", "ft", bases=store)
    assert len(list(base.glob("score-*.json"))) == 2
    matrices = [
        json.loads((tmp_path / f"{name}/steps/0/metrics.json").read_text())["confusion"] for name in ("first", "second")
    ]
    assert matrices[0] != matrices[1]


def test_a_class_that_overrides_image_has_the_content_of_its_pixels(tmp_path):
    base_folder(tmp_path, 2)

    class Darker(Folder):
        def image(self, id):
            return super().image(id) // 2

    class Halved:
        def image(self, id):
            return super().image(id) // 2

    class Mixed(Halved, Folder):
        pass

    plain, darker, mixed = (kind(tmp_path) for kind in (Folder, Darker, Mixed))
    (id,) = plain.ids("train")[:1]
    assert plain.image_content(id) == (tmp_path / f"images/{id}.png").read_bytes()
    assert darker.image_content(id).endswith((plain.image(id) // 2).tobytes())
    assert mixed.image_content(id) == darker.image_content(id)
    assert Sealed(darker).image_content(id) == darker.image_content(id)


def test_changed_image_files_are_noticed_where_a_base_is_taken(tmp_path):
    base_folder(tmp_path / "data", 24)
    given = {"data": tmp_path / "data", "settings": {**SMALL, "train.epochs": 1}, "bases": tmp_path / "bases"}

    def said(out: str) -> list[str]:
        display = Quiet()
        train("folder:offline", "ft", tmp_path / out, **given, display=display)
        return [str(text) for text in display.said if "other sizes" in str(text)]

    assert said("first") == said("again") == []
    file = sorted((tmp_path / "data/images").iterdir())[0]
    Image.open(file).save(file.with_suffix(".bmp"))
    file.unlink()
    (warning,) = said("changed")
    assert "pass another --bases" in warning


def test_a_base_belongs_to_protocols_that_treat_the_background_alike(tmp_path):
    config = load_config("shapes", None, parse_settings(TINY))
    job = prepare_job(parse_spec(SPEC), "ft", config, None, tmp_path / "run", None, Quiet())
    facts = (METHODS["ft"], config, job.scenario.steps[0], job.indexes["train"])
    keys = {protocol: base_key(*facts, protocol) for protocol in ("sequential", "disjoint", "overlapped")}
    assert keys["sequential"] == keys["disjoint"] != keys["overlapped"]
    parts = load_config("shapes", None, parse_settings([*TINY, "run.accumulate=2"]))  # batch norm sees them
    assert base_key(facts[0], parts, *facts[2:], "disjoint") != keys["disjoint"]


def test_the_store_may_be_in_the_run(tmp_path):
    run(tmp_path / "run", "ft", bases=tmp_path / "run/bases")
    assert len(list((tmp_path / "run/bases").iterdir())) == 1


def test_a_run_that_is_refused_makes_no_store(tmp_path):
    with pytest.raises(SdrsegError, match="nowhere"):
        run(tmp_path / "run", "ft", "net.weights=nowhere.pth", bases=tmp_path / "deep/store")
    assert not (tmp_path / "deep").exists()


def test_a_stored_base_needs_no_weights(finished, tmp_path, monkeypatch):
    def load_weights(*_):
        raise SdrsegError("the weights are not at hand")

    monkeypatch.setattr("sdrseg.engine.step.load_weights", load_weights)
    run(tmp_path / "run", "mib", bases=finished.parent / "bases")
    with pytest.raises(SdrsegError, match="not at hand"):
        run(tmp_path / "other", "mib", bases=tmp_path / "empty")


@pytest.mark.parametrize("where", ["file", "file/below", "closed", "closed/below"])
def test_a_store_that_cannot_be_written_is_reported_before_the_folder_is_made(tmp_path, where):
    (tmp_path / "file").write_text("")
    (tmp_path / "closed").mkdir(mode=0o500)
    if where.startswith("closed") and os.access(tmp_path / "closed", os.W_OK):
        pytest.skip("root may write everywhere")
    with pytest.raises(SdrsegError, match=rf"{where}: cannot be written \(.*--bases"):
        run(tmp_path / "run", bases=tmp_path / where)
    assert not (tmp_path / "run").exists()


def test_a_store_that_cannot_be_written_is_read(finished, tmp_path):
    store = tmp_path / "bases"
    shutil.copytree(finished.parent / "bases", store)
    if os.geteuid() != 0 or subprocess.run(["mount", "-o", "bind,ro", store, store]).returncode:
        pytest.skip("cannot mount anything here")
    try:
        run(tmp_path / "run", bases=store)
        with pytest.raises(SdrsegError, match=r"bases: cannot be written \(Read-only file system"):
            run(tmp_path / "other", "sdr", "train.seed=5", bases=store)
        assert content(tmp_path / "run") == content(finished) and not (tmp_path / "other").exists()
    finally:
        subprocess.run(["umount", "-l", store])


def test_a_base_travels_in_shards_of_float16(finished, tmp_path):
    store = BaseStore(finished.parent / "bases")
    key = next(p.name for p in store.folder.iterdir() if (p / "meta.json").exists())
    model, memory = store.load(key)
    write_base(tmp_path / "travel", {"key": key}, model, memory, half=True, shard_bytes=200_000)
    files = list((tmp_path / "travel").glob("*.safetensors"))
    assert len(files) > 2 and all(file.stat().st_size <= 200_000 for file in files)
    other = BaseStore(tmp_path / "store")
    assert other.import_from(tmp_path / "travel") == key
    again, remembered = other.load(key)
    assert again.keys() == model.keys()
    for name, tensor in model.items():
        assert again[name].shape == tensor.shape and again[name].dtype == tensor.dtype
        assert torch.allclose(again[name].float(), tensor.float(), rtol=1e-3, atol=1e-6)
        if tensor.dim() <= 1:
            assert torch.equal(again[name], tensor)  # batch norm stays as it was
    assert remembered.keys() == memory.keys()
    assert all(torch.equal(remembered[name], tensor) for name, tensor in memory.items())  # may be too small for float16
    assert other.rounded(key) and not store.rounded(key)
    write_base(tmp_path / "whole", {"key": key}, model, memory)
    exact = BaseStore(tmp_path / "exact")
    assert exact.import_from(tmp_path / "whole") == key and not exact.rounded(key)


def test_what_is_exported_is_the_base_and_not_what_a_method_remembers_beside_it(tmp_path):
    """A memory of Gaussians would be taken for vectors by a method that remembers vectors."""
    store, other = BaseStore(tmp_path / "bases"), BaseStore(tmp_path / "other")
    run(tmp_path / "gaussian", "laps-gaussian")
    export_base(tmp_path / "gaussian", tmp_path / "travel", None, store.folder)
    key = other.import_from(tmp_path / "travel")
    assert {n: t.shape for n, t in other.load(key)[1].items()} == {n: t.shape for n, t in store.load(key)[1].items()}
    assert other.images(key) == store.images(key) is not None
    run(tmp_path / "decoder", "laps-decoder", bases=other.folder)
    with pytest.raises(SdrsegError, match=r"nowhere does not contain [0-9a-f]{24}, the base of .*/gaussian\. Name its"):
        export_base(tmp_path / "gaussian", tmp_path / "again", None, tmp_path / "nowhere")


def test_a_base_is_added_whole_or_not_at_all_and_never_replaced(finished, tmp_path, monkeypatch):
    whole = BaseStore(finished.parent / "bases")
    key = next(p.name for p in whole.folder.iterdir() if (p / "meta.json").exists())
    model, memory = whole.load(key)
    store, real = BaseStore(tmp_path / "store"), bases_module.write_json

    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(bases_module, "write_json", killed)
    with pytest.raises(KeyboardInterrupt):
        store.save(key, model, memory, {})
    assert not store.has(key) and list(store.folder.iterdir()) == []
    monkeypatch.setattr(bases_module, "write_json", real)
    store.save(key, model, memory, {})
    store.save(key, {name: -tensor for name, tensor in model.items()}, memory, {})  # trained by two at the same time
    assert all(torch.equal(tensor, model[name]) for name, tensor in store.load(key)[0].items())
    assert [p.name for p in store.folder.iterdir()] == [key]
    half = BaseStore(tmp_path / "half")
    shutil.copytree(store.folder / key, half.folder / key)
    (half.folder / key / "meta.json").unlink()  # of a process that was killed
    half.save(key, model, memory, {})
    assert half.load(key)[0].keys() == model.keys() and [p.name for p in half.folder.iterdir()] == [key]
    (half.folder / key / "meta.json").unlink()
    (half.folder / key / "mine").write_text("mine")
    with pytest.raises(SdrsegError, match=r"cannot be written .* Remove it if it exists"):
        half.save(key, model, memory, {})
    assert (half.folder / key / "mine").read_text() == "mine"


def test_a_result_says_if_its_base_was_rounded(finished, tmp_path):
    export_base(finished, tmp_path / "travel", None, finished.parent / "bases")
    BaseStore(tmp_path / "bases").import_from(tmp_path / "travel")
    run(tmp_path / "run", "ft")
    assert cell_of(tmp_path / "run")["base"] == "taken from the store, rounded to float16"
    run(tmp_path / "other", "ft", bases=finished.parent / "bases")
    assert cell_of(tmp_path / "other")["base"] == "taken from the store"


@pytest.mark.parametrize(
    ("text", "size"), [("15MB", 15_000_000), ("16MiB", 2**24), ("1.5 kB", 1500), ("200000", 200_000)]
)
def test_sizes(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "many", "-3MB", "0", "1.2.3MB", "5TB"])
def test_sizes_that_are_none(text):
    with pytest.raises(UsageError, match="is not a size"):
        parse_size(text)
