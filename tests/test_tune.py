"""Tuning on held-out training images: what it chooses, and that it cannot see the test images."""

from __future__ import annotations

import json
import shlex
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import optuna
import pytest

from runs import TINY, Quiet, run
from sdrseg.config import Config, load_config, parse_settings
from sdrseg.datasets.index import class_index
from sdrseg.datasets.sealed import Sealed
from sdrseg.datasets.shapes import Shapes
from sdrseg.engine.launch import InterruptedRunError
from sdrseg.errors import DataError, SdrsegError, UsageError
from sdrseg.files import write_json
from sdrseg.methods import METHODS, method_layers
from sdrseg.methods.base import From
from sdrseg.metrics import StepScore
from sdrseg.scenario import build_scenario, parse_spec
from sdrseg.study import tuning
from sdrseg.study.decay import Decay, stability_decay
from sdrseg.study.ranges import Range, default_ranges, parse_range, stability_of
from sdrseg.study.tune import Search, new_of_step, search_ranges

SPEC = "shapes:8-2@disjoint"
QUICK = parse_settings([*TINY, "shapes.train=150"])


def tuned(tmp_path, method="mib", spec=SPEC, **more) -> Search:
    return Search(spec, method, tmp_path / "tune", settings=QUICK, bases=tmp_path / "bases", display=Quiet, **more)


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


def test_no_search_reads_a_test_image_and_trials_are_pruned_after_a_step(tmp_path, monkeypatch):
    class AllButTheFirst(optuna.pruners.BasePruner):
        def prune(self, study, trial):
            return trial.number > 0

    monkeypatch.setattr(optuna.pruners, "MedianPruner", lambda **_: AllButTheFirst())
    seal(monkeypatch)
    search = tuned(tmp_path, spec="shapes:8-1@disjoint")
    result = search_ranges(search, [Range("kd.weight", 0.1, 5, log=True)], trials=2, minutes=None)
    assert [trial["stage"] for trial in result["trials"]] == ["search", "pruned"] and not result["oracle"]
    assert 0.1 <= result["chosen"]["kd.weight"] == result["trials"][0]["values"]["kd.weight"] <= 5
    steps = [sorted(p.name for p in tmp_path.glob(f"tune/trials/{n}/steps/*")) for n in (0, 1)]
    assert steps == [["0", "1", "2"], ["0", "1"]]
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


def test_hold_outs_of_a_step_have_the_labels_of_that_step_only():
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


def made_up(monkeypatch, reference) -> list[tuple[str, str, dict]]:
    """Scores without training: FT's by rate, as `reference` says for each step; MiB's 60 less ten times its weight."""
    asked = []

    def score(self, step, folder, method, values):
        (self.search.out / "trials" / folder).mkdir(parents=True, exist_ok=True)
        if step == 0:
            write_json(self.search.out / "trials" / folder / "scenario.json", {"steps": [{}] * (1 + len(reference))})
            return 0.0
        (self.search.out / "trials" / folder / "steps").mkdir(exist_ok=True)
        asked.append((folder, method, self.before.name, dict(values)))
        rate = values[f"step.{step}.optim.lr"]
        return reference[step - 1][rate] if method == "ft" else 60 - 10 * values[f"step.{step}.kd.weight"]

    monkeypatch.setattr(Decay, "up_to", score)
    return asked


REFERENCE = [{0.002: 10.0, 0.02: 50.0, 0.2: 40.0}, {0.002: 60.0, 0.02: 30.0, 0.2: 60.0}]


def test_rate_and_weight_are_chosen_step_by_step(tmp_path, monkeypatch):
    """Step 1: FT is best at 0.02 with 50, and 40 is enough. Step 2: 60 at two rates, of which the smaller, and 48."""
    asked = made_up(monkeypatch, REFERENCE)
    search = tuned(tmp_path)
    weight = search.config().kd.weight
    result = stability_decay(search, rates=list(REFERENCE[0]))
    first, second = ([v[f"step.{n}.kd.weight"] for f, m, _, v in asked if f.startswith(f"step{n}-w")] for n in (1, 2))
    for weights, enough in ((first, 40), (second, 48)):
        assert weights[0] == 8 * weight and all(a == 2 * b for a, b in pairwise(weights))
        assert 60 - 10 * weights[-1] >= enough and all(60 - 10 * w < enough for w in weights[:-1])
    assert result["chosen"] == {
        "step.1.optim.lr": 0.02, "step.1.kd.weight": first[-1],
        "step.2.optim.lr": 0.002, "step.2.kd.weight": second[-1],
    }  # fmt: skip
    begun = {folder[:5]: before for folder, _, before, _ in asked}
    assert begun == {"step1": "step0", "step2": f"step1-weight-{first[-1] / weight:g}"}  # from the model before
    for _, method, _, values in asked:
        if "step.2.optim.lr" in values and method == "mib":
            assert values["step.1.kd.weight"] == first[-1]
        assert method == "mib" or not any("kd." in key for key in values)
    assert result["finished"] and json.loads((tmp_path / "tune/tune.json").read_text()) == result


def test_a_step_in_which_no_weight_is_small_enough_is_named(tmp_path, monkeypatch):
    made_up(monkeypatch, [{0.002: 50.0}, {0.002: 500.0}])  # in step 2 the method reaches 60 at most
    result = stability_decay(tuned(tmp_path), rates=[0.002])
    assert (
        "in step 2 the new classes were not learned 80% as well as by fine-tuning with any weight" in result["strategy"]
    )
    weights = [trial["values"]["kd.weight"] for trial in result["trials"] if trial["stage"] == "step 2: stability"]
    assert len(weights) == 10 and result["chosen"]["step.2.kd.weight"] == min(weights)


@pytest.mark.parametrize("method", ["laps", "laps-softmax"])
def test_what_trains_nothing_in_later_steps_has_no_weights_to_choose(tmp_path, method):
    message = rf"{method} trains nothing in later steps.*--range laps\.SETTING=LOW:HIGH"  # their section is the same
    with pytest.raises(UsageError, match=message):
        stability_decay(tuned(tmp_path, method), rates=[0.002])
    assert not (tmp_path / "tune").exists()


def test_a_budget_ends_the_default_strategy_and_more_resumes_it(tmp_path, monkeypatch):
    made_up(monkeypatch, REFERENCE)
    whole = stability_decay(tuned(tmp_path), rates=list(REFERENCE[0]))
    steps = sum(trial["stage"].startswith("step 1") for trial in whole["trials"])
    part = stability_decay(tuned(tmp_path), trials=steps + 1, rates=list(REFERENCE[0]))
    assert not part["finished"] and "budget" in part["strategy"] and len(part["trials"]) == steps + 1
    assert part["chosen"] == {k: v for k, v in whole["chosen"].items() if k.startswith("step.1.")}
    assert stability_decay(tuned(tmp_path), rates=list(REFERENCE[0])) == whole
    none = stability_decay(tuned(tmp_path), minutes=0, rates=list(REFERENCE[0]))
    assert not none["finished"] and none["chosen"] == {} and none["trials"] == []


def test_the_score_of_a_step_is_that_of_its_own_classes():
    """Channels: background, one old class, one of step 1 (forgotten), two of step 2."""
    confusion = np.zeros((5, 5), np.int64)
    confusion[0, 0], confusion[1, 1], confusion[2, 0] = 10, 5, 5
    confusion[3, 3], confusion[3, 0] = 6, 2  # IoU 6/8
    confusion[4, 4], confusion[4, 2] = 1, 3  # IoU 1/4
    score = StepScore(2, tuple("bacde"), 2, confusion)
    assert new_of_step(score, 3) == pytest.approx(50)
    assert score.miou()["new"] == pytest.approx(1 / 3)  # with that of step 1


def test_the_stability_weights_are_those_of_the_method(tmp_path):
    methods = ("ft", "mib", "ilt", "ewc", "laps")
    found = {method: sorted(stability_of(tuned(tmp_path, method).config())) for method in methods}
    assert found == {
        "ft": [], "mib": ["kd.weight"], "ilt": ["enc.weight", "kd.weight"], "ewc": ["importance.weight"],
        "laps": ["kd.weight"],
    }  # fmt: skip


def test_rates_are_chosen_for_the_optimiser_of_the_method(tmp_path, monkeypatch):
    values = {"optim.optimiser": From("adamw", "mine"), "kd.weight": From(1.0, "mine"), "ce.kind": From("unbiased", "")}
    monkeypatch.setitem(
        METHODS, "adapted", type("Adapted", (METHODS["mib"],), {"name": "adapted", "switches": values, "by_task": {}})
    )
    search = tuned(tmp_path, "adapted")
    decay = Decay(search, None, None)
    of_plain = decay._settings("ft")
    config = load_config("shapes", settings=of_plain, between=method_layers("ft", "default", "8-2", "shapes"))
    assert config.optim == search.config().optim and config.optim.optimiser == "adamw"
    assert config.net == search.config().net and (config.kd.weight, config.ce.kind) == (0.0, "standard")


def test_a_method_without_stability_weights_is_told_so(tmp_path, monkeypatch):
    made_up(monkeypatch, REFERENCE)
    monkeypatch.setattr(Decay, "up_to", lambda self, step, folder, *_: _folder(self, folder) or 30.0)
    result = stability_decay(tuned(tmp_path, "ft"), rates=[0.02])
    assert "ft has none of kd.weight, enc.weight, importance.weight, so only learning rates" in result["strategy"]


def _folder(decay: Decay, name: str) -> None:
    """What a trial leaves in its folder."""
    folder = decay.search.out / "trials" / name
    (folder / "steps").mkdir(parents=True, exist_ok=True)
    write_json(folder / "scenario.json", {"steps": [{}, {}]})


def test_a_trial_that_diverges_has_learned_nothing(tmp_path):
    search = tuned(tmp_path)
    result = search_ranges(search, [Range("optim.lr_later", 1e29, 1e30)], trials=1, minutes=None)
    assert result["trials"] == [{"stage": "search", "values": result["chosen"], "score": 0.0}]


def test_the_default_strategy_on_data(tmp_path, monkeypatch):
    """A rate that diverges is not chosen; every step continues from the chosen model; a resumed search is the same."""
    seal(monkeypatch)
    monkeypatch.setattr("sdrseg.study.decay.HALVINGS", 1)
    result = stability_decay(tuned(tmp_path, "mib", spec="shapes:8-1@disjoint"), rates=[0.02, 1e30])
    assert result["finished"] and [t["score"] for t in result["trials"] if t["values"] == {"optim.lr": 1e30}] == [0, 0]
    assert result["chosen"]["step.1.optim.lr"] == result["chosen"]["step.2.optim.lr"] == 0.02
    trials = tmp_path / "tune/trials"
    model = "model.safetensors"
    last = trials / "step2-weight-8"
    assert (last / "steps/1" / model).read_bytes() == (trials / "step1-weight-8/steps/1" / model).read_bytes()
    assert not list(trials.glob(f"step*-lr-*/steps/*/{model}")) and (trials / "step0/steps/0" / model).exists()
    monkeypatch.setattr(Decay, "up_to", lambda self, step, *_: 0.0 if step == 0 else pytest.fail("trained again"))
    again = stability_decay(tuned(tmp_path, "mib", spec="shapes:8-1@disjoint"), rates=[0.02, 1e30])
    assert again == result
    values = json.loads((last / "config.json").read_text())["config"]["step"]
    assert {f"step.{key}": value for key, value in values.items()} == result["chosen"]


def test_a_scenario_without_new_classes_cannot_be_tuned(tmp_path):
    search = tuned(tmp_path, "ft", spec="shapes:offline")
    with pytest.raises(UsageError, match="one step"):
        stability_decay(search)
    with pytest.raises(UsageError, match="one step"):
        search_ranges(search, [Range("optim.lr_later", 1e-3, 1e-2)], trials=1, minutes=None)
    assert not search.out.exists()  # nothing was trained for it


def test_the_command_marks_an_oracle_and_resumes(tmp_path, sdrseg):
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
    assert again["plots"] == [str(tmp_path / f"tune/tune.{kind}") for kind in ("svg", "pdf", "png")]
    assert sdrseg(*command)[0] == 2  # neither trials nor minutes
    code, _, err = sdrseg(*command, "--trials", 3, "--set", "train.epochs=2", "--set", "run.log_every=5")
    assert code == 2 and "has another search (now, in the folder): settings: " in err and "'train.epochs': 2" in err
    code, _, err = sdrseg(*command, "--trials", 3, "--range", "pm.weight=0.1|1.0")
    assert code == 2
    assert "(now, in the folder): ranges: 'kd.weight=0.1:5:log, pm.weight=0.1|1.0', 'kd.weight=0.1:5:log'" in err
    file = tmp_path / "tune/search.json"
    file.write_text(json.dumps({k: v for k, v in json.loads(file.read_text()).items() if k != "ranges"}))
    assert sdrseg(*command, "--trials", 2)[0] == 0  # a search of an earlier version
    assert json.loads((tmp_path / "tune/tune.json").read_text())["trials"] == again["trials"]


def test_values_on_a_plot_can_be_read(tmp_path, monkeypatch):
    """Two or more labels on the axis of values, which do not overlap."""
    drawn = []
    monkeypatch.setattr(tuning, "save", lambda made, *_, **__: drawn.append(made))
    trials = [{"stage": "search", "values": {"kd.weight": value}, "score": 1.0} for value in (0.12, 1.0, 2.46)]
    tuning.draw_trials({"trials": trials, "oracle": False}, tmp_path / "tune")
    drawn[0].canvas.draw()
    labels = [label for label in drawn[0].axes[0].get_xticklabels(which="both") if label.get_text()]
    boxes = sorted((label.get_window_extent() for label in labels), key=lambda box: box.x0)
    assert len(boxes) >= 2 and all(a.x1 < b.x0 for a, b in pairwise(boxes))


def test_two_workers_share_a_search(tmp_path, monkeypatch):
    folders = []

    def scored(self, folder, method, values, after, **_):
        folders.append(folder)
        time.sleep(0.05)
        after(StepScore(1, ("a", "b"), 1, np.eye(2, dtype=np.int64)))

    monkeypatch.setattr(Search, "run", scored)
    search = partial(search_ranges, ranges=[Range("kd.weight", 0.1, 5)], trials=6, minutes=None)
    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(search, [tuned(tmp_path), tuned(tmp_path)]))
    assert sorted(folders, key=int) == [str(number) for number in range(len(folders))]  # each trial once
    assert len(folders) in (6, 7)  # when one worker ends, the other may be in a trial
    assert max(len(result["trials"]) for result in results) == len(folders)


@pytest.mark.parametrize(
    "text",
    "kd.wait=1:2 kd.weight kd.weight=2:1 kd.weight=0:1:log kd.weight=a:b kd.kind=1:2 kd.weight=1:2:3".split(),
)
def test_ranges_that_cannot_be_are_refused(text):
    with pytest.raises(UsageError, match="--range"):
        parse_range(text, Config())


@pytest.mark.parametrize(
    ("text", "message"),
    [("kd.on_new=skip|foo", "--range kd.on_new: .*foo"), ("kd.weight=-1:2", "--range kd.weight: .*-1")],
)
def test_values_that_a_setting_does_not_take_are_refused_before_a_trial(text, message, tmp_path):
    search = tuned(tmp_path)
    with pytest.raises(UsageError, match=message):
        search_ranges(search, [parse_range(text, search.config())], 2, None)
    assert not (tmp_path / "journal.log").exists()


def test_ranges_of_a_methods_own_settings(tmp_path):
    config = tuned(tmp_path, "laps").config()
    assert parse_range("laps.ridge=1e-3:1:log", config) == Range("laps.ridge", 1e-3, 1, log=True)
    assert parse_range("laps.fit_only=true|false", config).choices == (True, False)
    assert parse_range("laps.views=1:4", config).whole
    tuned(tmp_path, "laps").require([whole := parse_range("laps.views=1|4", config)])
    assert [type(choice) for choice in whole.choices] == [int, int]


def test_an_interrupted_trial_is_resumed(tmp_path, monkeypatch, caplog):
    """With the same values and the same run, and without a traceback."""
    tried = []

    def scored(self, folder, method, values, after, **_):
        tried.append((folder, values["kd.weight"]))
        if len(tried) == 2:
            raise InterruptedRunError(2)
        after(StepScore(1, ("a", "b"), 1, np.eye(2, dtype=np.int64)))

    monkeypatch.setattr(Search, "run", scored)
    search = partial(search_ranges, ranges=[Range("kd.weight", 0.1, 5)], trials=3, minutes=None)
    with pytest.raises(InterruptedRunError):
        search(tuned(tmp_path))
    result = search(tuned(tmp_path))
    assert tried[1] == tried[2] and tried[1][0] == "1"
    assert [trial["values"]["kd.weight"] for trial in result["trials"]] == [tried[0][1], tried[2][1], tried[3][1]]
    assert not caplog.records


def test_ranges_are_read_and_published_ones_follow_the_method():
    assert parse_range("kd.weight=1:300:log", Config()) == Range("kd.weight", 1, 300, log=True)
    assert parse_range("train.epochs_later=4:30", Config()).whole
    assert parse_range("pm.distance=mse|cosine", Config()).choices == ("mse", "cosine")
    config = load_config("voc", settings={"kd.weight": 10.0})
    assert [r.key for r in default_ranges(config)] == ["kd.weight", "optim.lr_later"]
    assert np.isclose(default_ranges(config)[1].high, 1e-3)


def test_the_command_has_settings_that_can_be_parsed_again():
    values = {"data.scale": (0.5, 1.5), "optim.nesterov": False, "net.weights": "my weights.pth"}
    search = SimpleNamespace(spec="shapes:8-2", method="ft", preset="default", data=None, bases="B C", settings=values)
    words = shlex.split(tuning.train_command(search, {"kd.weight": 2.0}))
    assert ("--bases", "B C") in pairwise(words)
    texts = [text for word, text in pairwise(words) if word == "--set"]
    assert parse_settings(texts) == {**values, "data.scale": [0.5, 1.5], "kd.weight": 2.0}


def test_a_method_from_a_file_is_tuned_by_the_default_strategy(tmp_path, sdrseg):
    file = tmp_path / "gentle.py"
    file.write_text(
        "import sdrseg\nfrom sdrseg import From\n\n\n@sdrseg.register_method\nclass Gentle(sdrseg.Method):\n"
        "    name = 'gentle'\n    summary = 'LwF'\n"
        "    switches = {'kd.kind': From('standard', 'mine'), 'kd.weight': From(1.0, 'mine')}\n"
    )
    try:
        options = ["--bases", tmp_path / "bases", *(word for text in TINY for word in ("--set", text))]
        command = ["tune", "shapes:8-2@disjoint", "--method", file, "--out", tmp_path / "tune", *options]
        code, out, err = sdrseg(*command, "--trials", 1, "--set", "shapes.train=150")
        assert code == 0, err
        assert "step 1" in out
    finally:
        METHODS.pop("gentle", None)


@pytest.mark.parametrize("name", ["tune.json", "tune.svg", "journal.log", "trials/mine.txt"])
def test_a_search_does_not_begin_in_a_folder_with_files_of_these_names(tmp_path, name):
    (tmp_path / "tune" / name).parent.mkdir(parents=True)
    (tmp_path / "tune" / name).write_text("mine")
    with pytest.raises(UsageError, match=r"exists, but search\.json does not: .* Choose a new folder with --out"):
        tuned(tmp_path).claim("ranges")
    assert (tmp_path / "tune" / name).read_text() == "mine" and not (tmp_path / "tune/search.json").exists()
