"""Tuning on held-out training images: what it chooses, and that it cannot see the test images."""

from __future__ import annotations

import json
from itertools import pairwise

import numpy as np
import pytest

from runs import TINY, Quiet, run
from sdrseg.config import load_config, parse_settings
from sdrseg.data.index import class_index
from sdrseg.data.sealed import Sealed
from sdrseg.data.shapes import Shapes
from sdrseg.errors import DataError, SdrsegError, UsageError
from sdrseg.scenario import build_scenario, parse_spec
from sdrseg.study import tune as tune_module
from sdrseg.study.ranges import Range, default_ranges, parse_range, stability_of
from sdrseg.study.tune import Search, search_ranges, stability_decay

SPEC = "shapes:8-2@disjoint"
QUICK = parse_settings([*TINY, "shapes.train=150"])


def tuned(tmp_path, method="mib", **more) -> Search:
    return Search(SPEC, method, tmp_path / "tune", settings=QUICK, bases=tmp_path / "bases", display=Quiet, **more)


def seal(monkeypatch) -> None:
    """From here on, whoever reads a test image or its mask fails."""
    tests = set(Shapes(32, 150, 24).ids("val"))

    def guarded(real):
        def read(self, id):
            if id in tests:
                raise DataError(f"{id} is a test image")
            return real(self, id)

        return read

    for name in ("image", "mask", "mask_content"):
        monkeypatch.setattr(Shapes, name, guarded(getattr(Shapes, name)))


def test_no_search_reads_a_test_image(tmp_path, monkeypatch):
    seal(monkeypatch)
    result = search_ranges(tuned(tmp_path), [Range("kd.weight", 0.1, 5, log=True)], trials=2, minutes=None)
    assert len(result["trials"]) == 2 and 0.1 <= result["chosen"]["kd.weight"] <= 5 and not result["oracle"]
    scenario = json.loads(next(tmp_path.glob("tune/trials/*/scenario.json")).read_text())
    train = set(Shapes(32, 150, 24).ids("train"))
    assert set(scenario["mask_digests"]) == train
    with pytest.raises(DataError):  # and the guard of this test does guard
        run(tmp_path / "run", "ft", "shapes.train=150", bases=tmp_path / "bases")


def test_a_sealed_source_gives_training_images_only():
    source = Shapes(32, 10, 4)
    sealed = Sealed(source)
    assert sealed.ids("val") == () and sealed.ids("train") == source.ids("train")
    assert (sealed.image(source.ids("train")[0]) == source.image(source.ids("train")[0])).all()
    for read in (sealed.image, sealed.mask, sealed.mask_content, sealed.pair):
        with pytest.raises(SdrsegError, match="is a test image"):
            read(source.ids("val")[0])
    assert class_index(sealed, "val").ids == ()


def test_own_hold_outs_have_the_labels_of_their_step_only():
    source = Shapes(32, 200, 4)
    train, val = class_index(source, "train"), class_index(source, "val")
    own = build_scenario(parse_spec(SPEC), source, train, val, holdout=0.2, holdout_scope="step")
    everything = build_scenario(parse_spec(SPEC), source, train, val, holdout=0.2)
    for step, oracle in zip(own, everything, strict=True):
        assert set(step.test_ids) <= set(oracle.test_ids) and not set(step.test_ids) & set(step.train_ids)
        assert step.train_ids == oracle.train_ids
        for c in range(len(source.classes)):
            assert step.test_table[c] == step.train_table[c]  # old and future classes are background, as in training
        assert step.test_table[255] == 255
    assert not set(own[0].test_ids) & set(own[1].test_ids)
    assert set(everything[0].test_ids) < set(everything[1].test_ids)


def test_the_weight_is_halved_until_new_classes_are_learned(tmp_path, monkeypatch):
    """With scores made up: FT is best at the third rate with 50, MiB reaches 80 % of that at twice its weight."""
    asked = []

    def made_up(self, stage, folder, method, values):
        asked.append((stage, method, dict(values)))
        score = {0.002: 10.0, 0.006: 30.0, 0.02: 50.0, 0.06: 40.0, 0.2: 0.0}[values["optim.lr_later"]]
        if method == "mib":
            score = 60 - 10 * values["kd.weight"]
        self.trials.append(tune_module.Trial(stage, dict(values), score))
        return score

    monkeypatch.setattr(Search, "first_new", made_up)
    search = tuned(tmp_path)
    weight = search.config().kd.weight
    rates = [0.002, 0.006, 0.02, 0.06, 0.2]
    result = stability_decay(search, rates)
    assert [stage for stage, _, _ in asked].count("learning rate") == 5
    weights = [values["kd.weight"] for stage, _, values in asked if stage == "stability"]
    assert weights[0] == 8 * weight and all(a == 2 * b for a, b in pairwise(weights))
    assert 60 - 10 * weights[-1] >= 40 and all(60 - 10 * w < 40 for w in weights[:-1])
    assert result["chosen"] == {"optim.lr_later": 0.02, "kd.weight": weights[-1]}
    assert json.loads((tmp_path / "tune/tune.json").read_text()) == result


def test_the_stability_weights_are_those_of_the_method(tmp_path):
    methods = ("ft", "mib", "ilt", "ewc", "laps")
    found = {method: sorted(stability_of(tuned(tmp_path, method).config())) for method in methods}
    assert found == {
        "ft": [], "mib": ["kd.weight"], "ilt": ["enc.weight", "kd.weight"], "ewc": ["importance.weight"],
        "laps": ["kd.weight"],
    }  # fmt: skip


def test_a_trial_that_diverges_has_learned_nothing(tmp_path):
    search = tuned(tmp_path)
    assert search.first_new("stability", "one", "mib", {"optim.lr_later": 1e30}) == 0
    result = search_ranges(search, [Range("optim.lr_later", 1e29, 1e30)], trials=1, minutes=None)
    assert result["trials"] == [{"stage": "search", "values": result["chosen"], "score": 0.0}]


def test_the_default_strategy_stops_after_the_first_new_step_and_resumes(tmp_path, monkeypatch):
    seal(monkeypatch)
    search = tuned(tmp_path)
    score = search.first_new("stability", "one", "mib", {"kd.weight": 1.0})
    assert sorted(p.name for p in tmp_path.glob("tune/trials/one/steps/*")) == ["0", "1"]
    assert not (tmp_path / "tune/trials/one/summary.json").exists()
    before = (tmp_path / "tune/trials/one/steps/1/meta.json").stat().st_mtime_ns
    assert search.first_new("stability", "one", "mib", {"kd.weight": 1.0}) == score
    assert (tmp_path / "tune/trials/one/steps/1/meta.json").stat().st_mtime_ns == before
    with pytest.raises(UsageError, match="one step"):
        Search("shapes:offline", "ft", tmp_path / "t", settings=QUICK, display=Quiet).first_new("x", "x", "ft", {})


def test_the_command_says_oracle_where_it_is_one_and_goes_on(tmp_path, sdrseg):
    options = ["--bases", tmp_path / "bases", "--range", "kd.weight=0.1:5:log"]
    options += [word for text in (*TINY, "shapes.train=150") for word in ("--set", text)]
    command = ["tune", SPEC, "--method", "mib", "--out", tmp_path / "tune", "--oracle", "--json", *options]
    code, out, err = sdrseg(*command, "--trials", 1)
    assert code == 0, err
    first = json.loads(out)
    assert first["oracle"] and "ORACLE" in first["scored"] and len(first["trials"]) == 1
    assert "--set kd.weight=" in first["command"]
    code, out, _ = sdrseg(*command, "--trials", 2)
    again = json.loads(out)
    assert len(again["trials"]) == 2 and again["trials"][0] == first["trials"][0]
    assert all((tmp_path / f"tune/tune-2.{kind}").exists() for kind in ("svg", "pdf", "png"))
    assert sdrseg(*command)[0] == 2  # neither trials nor minutes


@pytest.mark.parametrize(
    "text",
    "kd.wait=1:2 kd.weight kd.weight=2:1 kd.weight=0:1:log kd.weight=a:b kd.kind=1:2 kd.weight=1:2:3".split(),
)
def test_ranges_that_cannot_be_are_refused(text):
    with pytest.raises(UsageError, match="--range"):
        parse_range(text)


def test_ranges_are_read_and_published_ones_follow_the_method():
    assert parse_range("kd.weight=1:300:log") == Range("kd.weight", 1, 300, log=True)
    assert parse_range("train.epochs_later=4:30").whole
    assert parse_range("pm.distance=mse|cosine").words == ("mse", "cosine")
    config = load_config("voc", settings={"kd.weight": 10.0})
    assert [r.key for r in default_ranges(config)] == ["kd.weight", "optim.lr_later"]
    assert np.isclose(default_ranges(config)[1].high, 1e-3)
