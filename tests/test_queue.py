"""Files of experiments and the queue that runs them: on tiny generated data."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extend_data import base_folder
from runs import Quiet
from sdrseg.engine.launch import InterruptedRunError
from sdrseg.engine.run import train
from sdrseg.errors import UsageError
from sdrseg.methods import METHODS
from sdrseg.scenario import build_scenario, parse_spec
from sdrseg.study import cluster as cluster_module
from sdrseg.study import queue as queue_module
from sdrseg.study.cell import KEYS, read_cells
from sdrseg.study.cluster import Machines, gather, make_workers, submit
from sdrseg.study.estimate import by_base, known_sizes, plan, work_of
from sdrseg.study.grid import make_study, read_study
from sdrseg.study.queue import Outcome, run_queue

TINY_FILE = """
spec = "shapes:8-1@disjoint"
method = ["ft", "mib"]
seed = [1, 2]
bases = "bases"
[shapes]
size = 32
train = 60
val = 12
[data]
crop = 32
[train]
batch_size = 4
epochs = 1
[net]
decoder = "deeplabv3"
"""


class QueueQuiet(Quiet):
    def begin(self, number, experiment, steps, expected, later):
        self.said.append(f"begin {experiment.label}")


def test_the_folder_of_the_data_next_to_its_settings():
    values = {"spec": "shapes:8-1@disjoint", "method": "ft"}
    for data in ("x", {"path": "x", "crop": 64}):
        assert make_study({**values, "data": data}, "f", Path("/here"), "n").data == Path("/here/x")


def study(values: dict) -> list[str]:
    made = make_study({"spec": "shapes:8-1@disjoint", "method": "ft", **values}, "file", Path(), "name")
    return [experiment.label for experiment in made.experiments]


# --- files -----------------------------------------------------------------------------------------------------------


def test_lists_make_a_grid_and_pairs_stay_one_value():
    labels = study({"method": ["ft", "mib"], "seed": [1, 2], "kd": {"weight": [1, 10.0]}, "data": "x"})
    assert len(labels) == 8
    assert labels[0] == "shapes:8-1@disjoint ft kd.weight=1 seed=1"
    assert labels[-1] == "shapes:8-1@disjoint mib kd.weight=10.0 seed=2"
    assert len(study({"data": {"scale": [0.5, 2.0]}})) == 1
    assert len(study({"data": {"scale": [[0.5, 2.0], [1, 1]], "path": "x"}})) == 2


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"methods": "ft"}, "unknown key methods"),
        ({"method": []}, "leaves nothing to run"),
        ({"train": {"epoch": 3}}, "unknown key train.epoch"),
        ({"train": {"epochs": [3, "x"]}}, "is not a whole number"),
        ({"seed": -1}, "must be at least 0"),
        ({"grid": {"method": "ft"}}, r"\[\[grid\]\]"),
        ({"seed": [1, 2], "train": {"seed": 3}}, r"train.seed = 3, but its seed is 1. Leave train.seed out"),
        ({"grid": [{"data": "x"}]}, "applies to the whole file"),
        ({"spec": "shapes:99-1@disjoint2"}, "unknown protocol"),
        ({"method": 3}, "is not a string"),
        ({"method": "sdrr"}, "file: unknown method"),
        ({"preset": "fast"}, "file: unknown preset"),
        ({"seed": list(range(20000))}, "more than 10,000"),
        ({"train": 3}, r"file: train = 3: train is a section\. Write its settings below \[train\]"),
        ({"grids": []}, r"unknown key grids; did you mean 'grid'\?"),
        ({"step": {"5": {"kd": {"weight": 1.0}}}}, r"file: step\.5\.kd\.weight: the scenario has the steps 0 to 2"),
        ({"latent": {"official": True}}, r"file: .*: with latent\.official the terms are the official code's"),
        ({"ce": {"class_weights": "disk=3"}}, "file: .*did you mean 'disc'"),
        ({"train": {"best_every": 1}}, "file: .* needs held-out images"),
        ({"importance": {"weight": 5.0}}, "file: .* ft has no penalty"),
        ({"spec": "shapes:20-1@disjoint"}, "file: shapes"),
    ],
)
def test_errors_in_a_file_are_reported_before_anything_begins(values, says):
    with pytest.raises(UsageError, match=says):
        study(values)


def test_several_grids_share_the_values_above_them():
    labels = study({"train": {"epochs": 2}, "grid": [{"method": ["mib", "sdr"]}, {"spec": "shapes:offline"}]})
    assert [label.split()[:2] for label in labels] == [
        ["shapes:8-1@disjoint", "mib"], ["shapes:8-1@disjoint", "sdr"], ["shapes:offline@sequential", "ft"],
    ]  # fmt: skip


def test_a_grid_keeps_the_settings_above_it_at_any_depth():
    values = {"step": {"1": {"kd": {"weight": 7.0}}}, "train": {"epochs": 2}}
    grids = [{}, {"step": {"1": {"optim": {"lr": 0.5}}}}, {"step": {"2": {"kd": {"weight": 3.0}}}}]
    made = make_study({"spec": "shapes:8-1@disjoint", "method": "mib", **values, "grid": grids}, "f", Path(), "n")
    assert [(dict(e.config.step), e.config.train.epochs) for e in made.experiments] == [
        ({"1.kd.weight": 7.0}, 2),
        ({"1.kd.weight": 7.0, "1.optim.lr": 0.5}, 2),
        ({"1.kd.weight": 7.0, "2.kd.weight": 3.0}, 2),
    ]


def test_a_label_names_only_what_its_grid_sets():
    labels = study({"grid": [{"kd": {"weight": [1.0, 2.0]}}, {"sp": {"weight": 0.5}}]})
    settings = [[word for word in label.split() if "." in word and "@" not in word] for label in labels]
    assert settings == [["kd.weight=1.0"], ["kd.weight=2.0"], ["sp.weight=0.5"]]


@given(st.text(max_size=12))
def test_numbers_of_cells_are_numbers_or_an_error(text):
    made = make_study({"spec": "shapes:8-1@disjoint", "method": "ft", "seed": [1, 2, 3]}, "f", Path(), "n")
    try:
        chosen = made.chosen(text)
    except UsageError:
        return
    assert 1 <= len(chosen) <= 3


def test_cells_and_patterns_choose():
    made = make_study({"spec": "shapes:8-1@disjoint", "method": ["ft", "sdr"], "seed": [1, 2]}, "f", Path(), "n")
    seeds = [(e.method, e.config.train.seed) for e in made.chosen("2-3", ["sdr", "seed=2"])]
    assert seeds == [("sdr", 1), ("ft", 2)]
    assert {e.method for e in made.chosen(None, ["method=sd*"])} == {"sdr"}  # the file's own keys
    assert len(made.chosen(None, ["spec=shapes:8-1@disjoint"])) == len(made.chosen(None, ["preset=default"])) == 4
    scales = {"scale": [[0.5, 2.0], [1.0, 1.0]], "crop": 96}
    lists = make_study({"spec": "shapes:8-1@disjoint", "method": "ft", "data": scales}, "f", Path(), "n")
    for text in ("data.scale=[1.0,1.0]", "data.scale=[1.0, 1.0]"):
        assert [e.config.data.scale for e in lists.chosen(None, [text])] == [(1.0, 1.0)]
    for text in ("data.crop=96", "data.crop=96.0"):  # also what does not vary; numbers by their value
        assert len(lists.chosen(None, [text])) == 2
    with pytest.raises(UsageError, match="--only mib: matches none of 4 experiments"):
        made.chosen(None, ["sdr", "mib"])


def test_known_sizes_are_those_of_the_scenarios(voc_presence):
    from sdrseg.datasets.voc import Voc

    class Classes(Voc):
        def __init__(self):
            pass

    for key, sizes in known_sizes()["voc"].items():
        steps = build_scenario(parse_spec(f"voc:{key}"), Classes(), voc_presence["train"], voc_presence["val"]).steps
        assert [len(step.train_ids) for step in steps] == sizes["train"]
        assert [len(step.test_ids) for step in steps] == sizes["test"]


def test_the_plan_counts_iterations_and_shares_step_0():
    values = {"spec": ["voc:15-1@disjoint", "voc:15-5@sequential"], "method": ["ft", "sdr", "ewc"]}
    made = make_study({**values, "train": {"epochs": 30, "batch_size": 8}}, "f", Path(), "n")
    whole = work_of(made.experiments[0], None)
    assert whole.iterations == (31620, 1410, 1110, 1560, 1860, 2040)  # 8437 // 8 * 30, 378 // 8 * 30, …
    rows = plan(made.experiments, None)
    later = sum(whole.iterations[1:])
    assert [row["iterations"] for row in rows[:3]] == [31620 + later, later, 31620 + later]  # EWC has its own
    assert [row["iterations"] for row in rows[3:]] == [8040] * 3
    assert all(row["seconds"] > 0 for row in rows)


def test_experiments_that_share_step_0_follow_each_other():
    specs = ["voc:19-1@sequential", "voc:19-1@disjoint", "voc:19-1@overlapped", "voc:15-1@disjoint"]
    made = make_study({"spec": specs, "method": ["ft", "ewc", "sdr"]}, "f", Path(), "n").experiments
    ordered = [(str(e.spec), e.method) for e in by_base(made)]
    shared, own = ["ft", "sdr"], ["ewc"]  # EWC trains a step 0 of its own; sequential and disjoint share one
    groups = [(specs[:2], shared), (specs[:2], own), *((s, m) for s in (specs[2:3], specs[3:]) for m in (shared, own))]
    assert ordered == [(spec, method) for some, methods in groups for spec in some for method in methods]
    assert ordered != [(str(e.spec), e.method) for e in made]  # the order of the file


def test_the_plan_of_laps_has_no_iteration_where_rows_are_fitted():
    methods = ["laps", "laps-gaussian", "laps-trained", "sdr", "laps-softmax"]
    values = {"spec": "voc:15-1@disjoint", "method": methods, "train": {"epochs": 30, "batch_size": 8}}
    rows = plan(make_study(values, "f", Path(), "n").experiments, None)
    first, *later = known_sizes()["voc"]["15-1@disjoint"]["train"]
    base, trained = first // 8 * 30, sum(count // 8 * 30 for count in later)
    # laps trains a step 0 of its own, which its variants share; sdr and laps-softmax share that of plain training
    assert [row["iterations"] for row in rows] == [base, 0, trained, base + trained, 0]
    once = sum(later)  # one pass over the images of later steps
    assert [row["images"] for row in rows] == [8 * base + once, once, 8 * trained, 8 * (base + trained), once]
    assert rows[1]["seconds"] < rows[2]["seconds"]
    (viewed,) = plan(make_study({**values, "method": "laps", "laps": {"views": 4}}, "f", Path(), "n").experiments, None)
    assert viewed["images"] == 8 * base + 4 * once and viewed["iterations"] == base


def test_the_plan_knows_stored_models_of_step_0(tmp_path):
    (tmp_path / "grid.toml").write_text(TINY_FILE)
    made = {(e.method, e.config.train.seed): e for e in read_study(tmp_path / "grid.toml").experiments}
    mib, store = made["mib", 1], tmp_path / "store"
    train(str(mib.spec), "mib", tmp_path / "run", settings=mib.settings, bases=store, display=Quiet())
    for seed, first in ((1, 1), (2, 0)):  # step 0 of seed 1 is stored, that of seed 2 is not
        (row,) = plan([made["ft", seed]], None, (), store)
        assert row["iterations"] == sum(work_of(made["ft", seed], None).iterations[first:])


# --- the queue -------------------------------------------------------------------------------------------------------


def test_a_queue_goes_past_failures_stops_in_time_and_resumes(tmp_path, monkeypatch):
    (tmp_path / "grid.toml").write_text(TINY_FILE)
    made = read_study(tmp_path / "grid.toml")
    assert made.bases == tmp_path / "bases"
    out = tmp_path / "study"
    real, calls = queue_module.train, []

    def failing(spec, method, folder, **options):
        calls.append(folder.name)
        if len(calls) == 1:
            raise RuntimeError("the disk is on fire")
        return real(spec, method, folder, **options)

    monkeypatch.setattr(queue_module, "train", failing)
    options = {"bases": made.bases, "display": QueueQuiet()}
    none = run_queue(made.experiments, out, minutes=0, **options)
    assert len(none.left) == 4 and not none.finished and not calls
    first = run_queue(made.experiments[:2], out, keep="none", **options)
    assert list(first.failed) == [made.experiments[0].label] and first.finished == [made.experiments[1].label]
    assert "the disk is on fire" in next(iter(first.failed.values()))
    assert "RuntimeError" in next((out / "errors").iterdir()).read_text()
    assert not list(out.glob("runs/*/steps/*/*.safetensors")) and len(list(out.glob("results/*.json"))) == 1
    second = run_queue(made.experiments, out, **options)
    assert len(second.finished) == 3 and second.before == first.finished and not second.failed
    assert calls[-3:] == [made.experiments[i].folder for i in (0, 2, 3)]
    cells = read_cells([out / "results"])
    assert {cell["config"] for cell in cells} == {e.hash for e in made.experiments}
    assert {(cell["method"], cell["seed"]) for cell in cells} == {("ft", 1), ("ft", 2), ("mib", 1), ("mib", 2)}
    assert [len({c["setup"] for c in cells if c["method"] == m}) for m in ("ft", "mib")] == [1, 1]
    assert len(list((tmp_path / "bases").iterdir())) == 2  # one a seed
    again = run_queue(made.experiments, tmp_path / "other", results=[out / "results"], **options)
    assert len(again.before) == 4 and len(calls) == 5


def test_a_budget_stops_within_a_run_and_the_next_call_resumes_it(tmp_path):
    (tmp_path / "grid.toml").write_text(TINY_FILE.replace("epochs = 1", "epochs = 400"))
    (one, *_) = read_study(tmp_path / "grid.toml").experiments
    outcome = run_queue([one], tmp_path / "out", minutes=4 / 60, bases=tmp_path / "bases", display=QueueQuiet())
    assert outcome.left == [one.label] and not outcome.failed
    state = json.loads((tmp_path / "out/runs" / one.folder / "state/current.json").read_text())
    assert state["iteration"] > 0


def test_a_queue_that_cannot_write_does_not_begin(tmp_path, sdrseg):
    (tmp_path / "grid.toml").write_text(TINY_FILE)
    code, _, err = sdrseg("run", tmp_path / "grid.toml", "--out", "/proc/none")
    assert code == 1 and "/proc/none: cannot be written" in err and "failed" not in err


def test_the_command_shows_runs_and_reports(tmp_path, sdrseg, monkeypatch):
    file = tmp_path / "grid.toml"
    file.write_text(TINY_FILE)
    code, out, _ = sdrseg("run", file, "--dry-run", "--json")
    rows = json.loads(out)["cells"]
    assert code == 0 and [row["method"] for row in rows] == ["ft", "mib"] * 2
    assert all(row["images"] and row["iterations"] and row["seconds"] for row in rows)
    (alone,) = json.loads(sdrseg("run", file, "--dry-run", "--json", "--cells", "4")[1])["cells"]
    assert alone["number"] == 4 and alone["iterations"] == rows[2]["iterations"]  # no other one trains its step 0
    code, out, _ = sdrseg("run", file, "--only", "ft", "--cells", "1-2", "--out", tmp_path / "out")
    assert code == 0 and "1 finished now" in out
    code, out, _ = sdrseg("run", file, "--dry-run", "--out", tmp_path / "out")
    assert code == 0 and "done" in out and "4 experiments" in out
    file.write_text(TINY_FILE.replace("8-1", "10-2"))  # more classes than there are
    code, _, err = sdrseg("run", file, "--dry-run")
    assert code == 2 and f"{file}: shapes" in err
    base_folder(tmp_path / "data", 24)
    file.write_text(
        'spec = "folder:20-2@disjoint"\nmethod = ["ft", "mib"]\ndata = "data"\n'
    )  # known from the data only
    code, out, _ = sdrseg("run", file, "--dry-run")
    assert code == 0 and "2 of unknown length (below)" in out and "data are not here" not in out
    assert "2 experiments: folder" in out
    assert sdrseg("run", file, "--keep-models", "some")[0] == 2


def test_without_the_data_no_run_begins_but_finished_ones_need_none(tmp_path, sdrseg):
    file, out = tmp_path / "grid.toml", tmp_path / "out"
    file.write_text('spec = "voc:15-1@disjoint"\nmethod = ["ft", "mib"]\ndata = "nowhere"\n')
    code, _, err = sdrseg("run", file, "--out", out)
    assert code == 1 and "nowhere: no such folder" in err and "failed" not in err and not out.exists()
    file.write_text('spec = "voc:15-1@disjoint"\nmethod = "ft"\n')
    assert "needs --data PATH" in sdrseg("run", file, "--out", out)[2] and not out.exists()
    (one,) = read_study(file).experiments
    (out / "results").mkdir(parents=True)
    (out / "results/ft.json").write_text(json.dumps(dict.fromkeys(KEYS) | {"config": one.hash}))
    assert sdrseg("run", file, "--out", out)[0] == 0


def test_a_file_with_one_experiment_is_trained_as_a_run(tmp_path, sdrseg, monkeypatch):
    file = tmp_path / "one.toml"
    file.write_text(TINY_FILE)
    code, _, err = sdrseg("train", file, "--out", tmp_path / "run")
    assert code == 2 and "4 experiments" in err
    file.write_text(TINY_FILE.replace('["ft", "mib"]', '"ft"').replace("[1, 2]", "2"))
    code, out, _ = sdrseg("train", file, "--out", tmp_path / "run", "--json", "--set", "shapes.val=6")
    saved = json.loads((tmp_path / "run/config.json").read_text())
    assert code == 0 and json.loads(out)["steps"] == 3
    assert (saved["method"], saved["config"]["train"]["seed"], saved["config"]["shapes"]["val"]) == ("ft", 2, 6)
    assert (tmp_path / "bases").is_dir()
    monkeypatch.chdir(tmp_path)
    code, out, _ = sdrseg("train", file, "--json", "--set", "shapes.val=6")
    assert code == 0 and json.loads(out)["run"] == "one" and (tmp_path / "one/summary.json").exists()
    assert "--out RUN" in sdrseg("train", "shapes:8-1@disjoint", "--method", "ft")[2]
    assert "Leave out --method" in sdrseg("train", file, "--method", "ft", "--out", tmp_path / "run")[2]
    assert "--method NAME" in sdrseg("train", "shapes:8-1@disjoint", "--out", tmp_path / "run")[2]


# --- several workers -------------------------------------------------------------------------------------------------


def test_a_setting_of_a_method_that_affects_nothing_is_no_other_experiment(sdrseg):
    Path("loud.py").write_text("""
import sdrseg

@sdrseg.register_method
class Loud(sdrseg.Method):
    name = "loud"
    summary = "fine-tuning"
    settings = {"strength": sdrseg.setting(1.0, "λ"), "note": sdrseg.setting("a", "a note", affects="nothing")}
""")
    try:
        for note, expected in (("a", "1 finished now"), ("a", "1 finished before"), ("b", "1 finished before")):
            values = TINY_FILE.replace('["ft", "mib"]', '"loud.py"').replace("[1, 2]", "[1]")
            Path("one.toml").write_text(f'{values}[loud]\nnote = "{note}"\n')
            code, out, err = sdrseg("run", "one.toml")
            assert code == 0 and expected in out + err
    finally:
        METHODS.pop("loud", None)


def test_settings_of_another_method_of_the_grid_are_explained(tmp_path):
    file = tmp_path / "grid.toml"
    file.write_text(TINY_FILE.replace('["ft", "mib"]', '["laps", "ft"]') + "[laps]\nviews = 2\n")
    with pytest.raises(UsageError, match=r"grid\.toml: the method ft has no section \[laps\]\. Name settings"):
        read_study(file)
    file.write_text(TINY_FILE + "[trian]\nepochs = 2\n")
    with pytest.raises(UsageError, match=r"unknown section \[trian\]; did you mean 'train'\?$"):
        read_study(file)


@pytest.mark.parametrize("step", [0, 2])
def test_a_signal_during_a_score_stops_the_queue(tmp_path, step):
    """After the last score, too, when no iteration follows that could notice it."""
    file = tmp_path / "grid.toml"
    file.write_text(TINY_FILE.replace("seed = [1, 2]", "seed = 1"))

    class Impatient(QueueQuiet):
        def scored(self, score, oracle=False):
            super().scored(score, oracle)
            if score.step == step:
                os.kill(os.getpid(), signal.SIGTERM)

    study, display = read_study(file), Impatient()
    with pytest.raises(InterruptedRunError):
        run_queue(study.experiments, tmp_path / "out", bases=study.bases, display=display)
    assert len([said for said in display.said if said.startswith("begin ")]) == 1
    assert len(list((tmp_path / "out/results").glob("*"))) == (step == 2)
    outcome = run_queue(study.experiments, tmp_path / "out", bases=study.bases, display=QueueQuiet())
    assert len(outcome.before) == (step == 2) and len(outcome.before + outcome.finished) == 2


def test_two_workers_share_a_queue_and_another_finishes_what_a_killed_one_left(tmp_path):
    file = tmp_path / "grid.toml"
    slow = TINY_FILE.replace("epochs = 1", "epochs = 6").replace('["ft", "mib"]', '"ft"')
    file.write_text(slow + "[run]\nsave_minutes = 0\nlog_every = 1\n")
    study = read_study(file)
    folders = tuple(e.folder for e in study.experiments)
    what = {"read": read_study, "arguments": {"file": file}, "out": tmp_path / "out", "chosen": folders, "wait": 0.2}
    workers = make_workers(2, **what, options={"bases": study.bases})
    jobs = submit(workers, Machines("local", 2), tmp_path / "jobs")
    first = tmp_path / "out/runs" / folders[0]
    for _ in range(1200):
        if (first / "state/current.json").exists():
            break
        time.sleep(0.1)
    controller = jobs[0]._process.pid  # of submitit; the worker is its child
    (worker,) = Path(f"/proc/{controller}/task/{controller}/children").read_text().split()
    os.kill(int(worker), signal.SIGKILL)
    found = gather(jobs)
    assert len(found["lost"]) == 1 and not found["failed"] and len(found["finished"]) == 2
    cells = read_cells([tmp_path / "out/results"])
    assert {cell["config"] for cell in cells} == {e.hash for e in study.experiments}
    events = [json.loads(line)["event"] for line in (first / "log.jsonl").read_text().splitlines()]
    assert "resume" in events and events.count("score") == 3  # it went on where the other was


def test_slurm_gets_an_array_that_can_be_requeued(tmp_path, sdrseg, monkeypatch):
    """With programs in place of SLURM's that note what they are given."""
    (tmp_path / "bin").mkdir()
    for name in ("sbatch", "srun"):
        (tmp_path / "bin" / name).write_text(f'#!/bin/sh\ncp "$1" {tmp_path}/job.sh\necho "Submitted batch job 12"\n')
        (tmp_path / "bin" / name).chmod(0o755)
    file = tmp_path / "grid.toml"
    file.write_text(TINY_FILE)
    words = ["run", file, "--on", "slurm", "--array", 3, "--gpus", 1, "--slurm", "partition=fast", "--budget", 50]
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    assert "sbatch not found" in sdrseg(*words)[2]
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    code, out, err = sdrseg(*words, "--out", tmp_path / "out", "--json")
    assert code == 0, err
    assert json.loads(out)["jobs"] == ["12_0", "12_1", "12_2"]
    asked = (tmp_path / "job.sh").read_text()
    for line in ("--array=0-2%3", "--gpus-per-node=1", "--partition=fast", "--time=60"):
        assert line in asked
    (worker,) = make_workers(1, read=read_study, arguments={}, out=tmp_path, chosen=(), options={})
    assert worker.checkpoint().function is worker  # what submitit runs again after a pre-emption


def test_the_budget_of_a_worker_is_for_all_its_rounds(tmp_path, monkeypatch):
    """The only run is always in use by another worker: a worker ends when its time is up."""
    file, asked = tmp_path / "grid.toml", []
    file.write_text(TINY_FILE)
    (one, *_) = read_study(file).experiments

    def in_use(queue, out, minutes):
        asked.append(minutes)
        late = minutes <= 0
        return Outcome(left=[one.label]) if late else Outcome(elsewhere=[one.label])

    monkeypatch.setattr(cluster_module, "run_queue", in_use)
    what = {"read": read_study, "arguments": {"file": file}, "out": tmp_path, "chosen": (one.folder,), "wait": 0.1}
    (worker,) = make_workers(1, **what, options={"minutes": 0.25 / 60})
    assert worker() == {"finished": [], "failed": {}, "left": [one.label]}
    assert len(asked) >= 2 and asked == sorted(asked, reverse=True)


def test_workers_on_this_machine_get_gpus_of_their_own(monkeypatch):
    monkeypatch.setattr(cluster_module.torch.cuda, "device_count", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert cluster_module._gpus(0) == [] and cluster_module._gpus(2) == [0, 1]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,3")
    assert cluster_module._gpus(2) == [5, 3]
    with pytest.raises(UsageError, match=r"need 3 GPUs.* has 2"):
        cluster_module._gpus(3)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-1,GPU-2")
    with pytest.raises(UsageError, match="CUDA_VISIBLE_DEVICES=GPU-1,GPU-2"):
        cluster_module._gpus(1)
    monkeypatch.setattr(cluster_module.torch.cuda, "device_count", lambda: 0)
    with pytest.raises(UsageError, match=r"need 1 GPU .* has 0"):
        cluster_module._gpus(1)


def test_where_workers_run_is_checked(tmp_path, sdrseg):
    file = tmp_path / "grid.toml"
    file.write_text(TINY_FILE)
    assert "slurm or local" in sdrseg("run", file, "--on", "moon")[2]
    assert "KEY=VALUE" in sdrseg("run", file, "--on", "slurm", "--slurm", "gpu")[2]


def test_a_worker_that_is_lost_without_a_message_is_named():
    class Lost:
        job_id = "7"

        def result(self):
            raise MemoryError

    assert gather([Lost()])["lost"] == ["worker 7: MemoryError"]
