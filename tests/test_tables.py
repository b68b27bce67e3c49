"""The paper's numbers, tables of results, and what differences between methods may be claimed."""

from __future__ import annotations

import csv
import io
import itertools
import json
import re
import shutil
import statistics
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import t

from sdrseg.errors import UsageError
from sdrseg.methods import METHODS
from sdrseg.scenario import parse_spec
from sdrseg.study.activations import with_activations
from sdrseg.study.cell import KEYS, Cell, cell_of, read_cell, scores_of
from sdrseg.study.compare import _letters, abbreviated, compare, differences, grouped
from sdrseg.study.grid import make_experiment
from sdrseg.study.paper import experiments_of, kept_settings, paper_table, paper_tables, study_of
from sdrseg.study.render import to_csv, to_latex, to_markdown
from sdrseg.study.statistics import T95, difference, spread, t95
from sdrseg.study.tables import fill, paper_form


def cell(method: str = "sdr", seed: int = 0, all: float = 50.0, **more) -> Cell:
    """A made-up result."""
    classes = [
        {"name": f"c{n}", "step": 0, "iou": float(n), "accuracy": float(n), "iou_when_new": 1.0} for n in range(21)
    ]
    facts = dict.fromkeys(KEYS) | {
        "dataset": "voc", "scenario": "15-1", "protocol": "disjoint", "method": method, "preset": "default",
        "seed": seed, "eval": "full_image", "all": all, "old": all + 5, "new": all - 20, "forgetting": 3.0,
        "per_class": classes, "settings": {}, "setup": f"setup-{method}", "config": f"{method}-{seed}",
        "scored_on": "the test images",
    }  # fmt: skip
    return facts | more


# --- the paper's numbers ---------------------------------------------------------------------------------------------


def test_old_and_new_give_all_but_where_the_paper_misprints():
    """all = (old · classes + new · classes) / 21; ADE has 150 classes without background."""
    of_ade = {"100-50": 100, "100-10": 100, "50-50": 50}
    wrong = {}
    for name in ("voc", "ade20k", "ablation"):
        table = paper_table(name)
        for row in table.rows:
            for column in table.columns:
                if not (printed := table.printed(row, column)):
                    continue
                task = column.partition(":")[2].partition("@")[0]
                first, last = (int(task.partition("-")[0]) + 1, 21) if name != "ade20k" else (of_ade[task], 150)
                if row.name == "MiB†":
                    first, last = first - 1, last - 1  # without background
                fits = (printed["old"] * first + printed["new"] * (last - first)) / last
                if abs(fits - printed["all"]) > 0.11:
                    wrong[f"{column} all"] = (row.name, round(fits, 1))
    assert wrong == {"voc:15-1@sequential all": ("ILT", 44.7), "ade20k:100-10@disjoint all": ("ILT", 0.1)}
    marked = [row.misprints for table in paper_tables().values() for row in table.rows if row.misprints]
    assert marked == [{"voc:15-1@sequential all": 44.7}, {"ade20k:100-10@disjoint all": 0.07}]


def test_every_table_has_experiments_that_can_be_run():
    counts = {}
    for name, table in paper_tables().items():
        grid = experiments_of(table, [0], "default", {})
        counts[name] = len(study_of([grid], name).experiments)
    assert counts["voc"] >= 73 and counts["ade20k"] == 25 and counts["sparsity"] == 20
    assert (counts["standard"], counts["random-split"], counts["no-pretraining"]) == (8, 4, 5)
    assert min(counts.values()) >= 2


def test_the_plan_of_a_table_is_printed_without_data(sdrseg):
    code, out, _ = sdrseg("tables", "voc", "--dry-run", "--json")
    cells = json.loads(out)["cells"]
    assert code == 0 and len(cells) >= 73
    assert all(c["images"] > 0 and c["seconds"] > 0 for c in cells)
    assert {c["method"] for c in cells if c["iterations"] == 0} == {"laps"}  # it fits rows, from a shared step 0
    assert len({c["name"] for c in cells}) == len(cells)
    assert sdrseg("tables", "vok")[0] == 2
    code, _, error = sdrseg("tables", "voc", "--dry-run", "--set", "train.seed=1")
    assert code == 2 and "by --seeds for a table" in " ".join(error.split())


@pytest.mark.parametrize("name", list(paper_tables()))
def test_every_missing_run_is_named(name, tmp_path, monkeypatch, sdrseg):
    """Also where only settings of a row distinguish runs. What --json prints is one document."""
    monkeypatch.chdir(tmp_path)
    table = paper_table(name)
    experiments = study_of([experiments_of(table, [1, 2], "default", {})], name).experiments
    code, out, _ = sdrseg("tables", name, "--seeds", "1,2", "--json")
    printed = json.loads(out)
    assert code == 0 and printed["missing"] == [e.label for e in experiments]
    assert len(set(printed["missing"])) == len({e.hash for e in experiments})
    by_paper = [number["paper"] for number in printed["numbers"] if number["paper"] is not None]
    assert by_paper == [
        value for c in table.columns for row in table.rows for value in table.printed(row, c).values()
    ]  # fmt: skip


def test_several_tables_are_one_queue(tmp_path, monkeypatch, sdrseg):
    """What they share is run once; without running, each is printed."""
    monkeypatch.chdir(tmp_path)
    names = ["ablation", "sparsity", "matching-distance", "ablation"]
    cells = {name: json.loads(sdrseg("tables", name, "--dry-run", "--json")[1])["cells"] for name in names}
    code, out, _ = sdrseg("tables", *names, "--dry-run", "--json")
    both = json.loads(out)
    assert code == 0 and both["study"] == "tables" and len({c["name"] for c in both["cells"]}) == len(both["cells"])
    assert {c["name"] for c in both["cells"]} == {c["name"] for some in cells.values() for c in some}
    assert len(both["cells"]) < sum(map(len, cells.values()))
    alone = {name: json.loads(sdrseg("tables", name, "--json")[1]) for name in names}
    assert json.loads(sdrseg("tables", *names, "--json")[1]) == alone
    printed = sdrseg("tables", *names, "--format", "markdown")[1]
    assert printed == "".join(sdrseg("tables", name, "--format", "markdown")[1] for name in alone)
    code, _, err = sdrseg("tables", *names, "--format", "latex", "--to", "table.tex")
    assert code == 2 and "--to table.tex: takes one table, not 3 tables" in " ".join(err.split())
    assert not (tmp_path / "table.tex").exists()


def test_settings_of_a_file_make_another_schedule(tmp_path, sdrseg):
    (tmp_path / "short.toml").write_text("[train]\nepochs = 8\nbatch_size = 16\n")
    words = ["tables", "ablation", "--config", tmp_path / "short.toml", "--set", "train.batch_size=8", "--seeds", "1-2"]
    cells = json.loads(sdrseg(*words, "--dry-run", "--json")[1])["cells"]
    assert {(c["settings"]["train.epochs"], c["settings"]["train.batch_size"]) for c in cells} == {(8, 8)}
    assert {c["seed"] for c in cells} == {1, 2} and len(cells) == 20
    (tmp_path / "short.toml").write_text("epochs = 8\n")
    code, _, err = sdrseg(*words)
    assert code == 2 and "is not in a section" in err


@pytest.mark.parametrize("preset", ["default", "paper", "official"])
def test_rows_that_are_another_method_take_its_runs(preset):
    """So that they are trained once, and the tables agree."""
    same = {"ablation-1": "ft", "ablation-2": "lwf", "ablation-7": "sdr", "sparsity-class_max": "sdr"}
    for table, column in (("ablation", "voc:15-1@disjoint"), ("sparsity", "voc:19-1@disjoint")):
        grid = experiments_of(paper_table(table), [0], preset, {})
        used = {some[0].method for (_, spec), some in grid.items() if spec == column}
        assert not used & same.keys() and used & set(same.values())
    for one, other in same.items():
        made = [
            make_experiment({"spec": spec, "method": name, "preset": preset}, (), "a test", Path()).config
            for name in (one, other)
            for spec in ("voc:15-1@disjoint", "voc:19-1@disjoint")
        ]
        assert made[:2] == made[2:]


def test_settings_that_define_a_row_are_kept(tmp_path, sdrseg):
    """Runs with pre-trained weights are no results of a row with random weights."""
    words = ["tables", "no-pretraining", "--set", "net.weights=imagenet", "--set", "train.epochs=8"]
    cells = json.loads(sdrseg(*words, "--dry-run", "--json")[1])["cells"]
    assert len(cells) == 5 and {c["settings"]["net.weights"] for c in cells} == {"none"}
    assert sorted(c["settings"]["train.epochs"] for c in cells) == [8, 8, 8, 30, 120]
    said = " ".join(sdrseg(*words, "--out", tmp_path)[1].split())
    assert "offline, 120 epochs: net.weights=none defines these rows (net.weights=imagenet was given)." in said
    assert "offline, 30 epochs: train.epochs=30 defines the row (train.epochs=8 was given)." in said
    words = ["tables", "activation-histogram", "--set", "sp.weight=1e-4", "--dry-run", "--json"]
    assert [c["settings"]["sp.weight"] for c in json.loads(sdrseg(*words)[1])["cells"]] == [0.0, 1e-5]
    (plain, *_) = experiments_of(paper_table("activation-histogram"), [0], "default", {}).values()
    point = {"spec": str(plain[0].spec), "method": "ft", "seed": 0}
    assert plain[0].hash == make_experiment(point, (), "a test", Path()).hash


@pytest.mark.parametrize("option", [("--only", "sdr"), ("--cells", "1-3"), ("--budget", "5")])
def test_options_that_choose_runs_need_runs(option, sdrseg):
    code, _, err = sdrseg("tables", "voc", *option)
    assert code == 2 and f"{option[0]} chooses what runs: add --run or --dry-run." in " ".join(err.split())


def test_estimates_say_for_which_machine_and_what_is_unknown(tmp_path, sdrseg):
    lines = sdrseg("tables", "voc", "--dry-run")[1].splitlines()
    assert lines[-1].startswith("85 experiments, about ") and lines[-1].endswith(" remaining on one NVIDIA H200")
    (tmp_path / "own.toml").write_text('spec = "folder:2-1@disjoint"\nmethod = "ft"\n')
    said = " ".join(sdrseg("run", tmp_path / "own.toml", "--dry-run")[1].split())
    assert said.endswith("1 experiment, 1 of unknown length, because their data are not here (--data PATH)")
    for words in (["voc", "--results", tmp_path / "typo"], ["voc", "--dry-run", "--data", tmp_path / "typo"]):
        code, _, err = sdrseg("tables", *words)
        assert code > 0 and "typo: no such folder" in err.replace("\n", "")


# --- tables ----------------------------------------------------------------------------------------------------------


def ablation(values: dict[str, list[float]]):
    table = paper_table("ablation")
    grid = experiments_of(table, [1, 2, 3], "default", {})
    hashes = {(e.method, e.config.train.seed): e.hash for some in grid.values() for e in some}
    cells = [
        cell(method, seed, all, config=hashes[method, seed])
        for method, some in values.items()
        for seed, all in enumerate(some, 1)
    ]
    return fill(table, grid, cells)


def test_a_table_has_mean_spread_difference_rank_and_what_is_missing():
    table = ablation({"sdr": [50, 51, 52], "ablation-6": [40.0], "ft": [3.9, 4.1]})
    lines = {line.name: line.values[2] for line in table.blocks[0].lines}
    best = lines["7: 5 and UNKD (SDR)"]
    assert (best.ours.mean, best.ours.std, best.ours.count, best.rank) == (51, 1, 3, 1)
    assert best.difference == pytest.approx(51 - 48.1)
    assert lines["6: 5 and KD"].rank == 2 and lines["6: 5 and KD"].ours.std is None
    assert lines["1: CE"].rank == 0 and lines["3: UNCE, matching"].ours is None
    assert len(table.missing) == 30 - 6
    text = to_markdown(table)
    assert "| **51.0 ± 1.0** | 48.1 | +2.9 |" in text and "<u>40.0</u>" in text and "Missing: 24 runs" in text
    latex = to_latex(table)
    assert r"\textbf{51.0}\,{\scriptsize$\pm$1.0}" in latex and r"\underline{40.0}" in latex and r"\toprule" in latex
    assert r"\textit{48.1}\,{\scriptsize(+2.9)}" in latex and r"\textit{41.9}\,{\scriptsize($-$1.9)}" in latex
    rows = list(csv.DictReader(io.StringIO(to_csv(table))))
    mine = next(r for r in rows if r["row"] == "7: 5 and UNKD (SDR)" and r["value"] == "all")
    assert (float(mine["mean"]), float(mine["paper"]), mine["seeds"]) == (51, 48.1, "3")
    assert len(rows) == 10 * 3


def test_an_offline_run_is_divided_into_the_classes_of_each_scenario():
    offline = cell("offline", scenario="offline", protocol="sequential")
    found = scores_of(offline, None, parse_spec("voc:15-1@disjoint"))
    assert found["old"] == statistics.fmean(range(16)) and found["new"] == statistics.fmean(range(16, 21))
    assert scores_of(offline, "crop512") is None


@given(st.text(max_size=20))
def test_names_cannot_break_latex(name):
    table = compare([cell("a", settings={"x.y": name}), cell("a", setup="other", settings={"x.y": 1}, seed=0)])
    require_sound_latex(to_latex(table))


@pytest.mark.parametrize("name", list(paper_tables()))
def test_the_papers_tables_are_sound_latex(name):
    table = paper_table(name)
    runs = [(row.name, column) for row in table.rows for column in table.columns if row.is_run(column)]
    for found in ({}, {place: [cell("ft")] for place in runs}):
        text = to_latex(paper_form(table, found))
        assert ("tabular" in text) == bool(found or name != "per-class")
        require_sound_latex(text)


def require_sound_latex(text: str) -> None:
    """Tabulars with braces that close, no character that means something to TeX, and as many cells as columns."""
    lines = [line for line in text.splitlines() if not line.startswith("%")]
    assert not any("%" in line.replace("\\%", "") for line in lines)
    for tabular in filter(str.strip, "\n".join(lines).split("\n\n")):
        require_sound_tabular(tabular.splitlines())


def require_sound_tabular(lines: list[str]) -> None:
    begin, *body, end = lines
    columns = re.fullmatch(r"\\begin\{tabular\}\{([lr ]+)\}", begin)
    assert columns and end == r"\end{tabular}" and (body[0], body[-1]) == (r"\toprule", r"\bottomrule")
    for line in body:
        plain = re.sub(r"\\[\\%&_#${}]", "", line)  # without escaped characters and the end of the row
        depths = list(itertools.accumulate({"{": 1, "}": -1}.get(c, 0) for c in plain))
        assert min(depths, default=0) >= 0 and not (depths and depths[-1]), line
        assert not set(plain) & set("#_~^") and plain.count("$") % 2 == 0, line
        assert all(command in KNOWN for command in re.findall(r"\\([a-zA-Z]+)", plain)), line
        if line.endswith(r"\\"):
            wide = sum(int(n) - 1 for n in re.findall(r"\\multicolumn\{(\d+)\}", plain))
            assert plain.count("&") + 1 + wide == len(columns[1].replace(" ", "")), line
        else:
            assert re.fullmatch(r"\\(toprule|midrule|bottomrule)|(\\cmidrule\(lr\)\{\d+-\d+\} ?)+", line), line


KNOWN = set(
    "toprule midrule bottomrule cmidrule multicolumn textbf underline textit quad scriptsize pm dag "
    "textbackslash textasciitilde textasciicircum".split()
)


# --- differences -----------------------------------------------------------------------------------------------------


def test_differences_are_paired_by_seed():
    of_a, of_b = {1: 50.0, 2: 52.0, 3: 54.0, 9: 0.0}, {1: 49.0, 2: 50.0, 3: 51.0, 8: 99.0}
    found = difference("A", "B", "all", of_a, of_b)
    assert found.seeds == (1, 2, 3) and found.mean == 2 and found.error == pytest.approx(1 / 3**0.5)
    assert found.half == pytest.approx(4.303 / 3**0.5) and not found.shown
    assert "no difference shown" in found.sentence()
    assert difference("A", "B", "all", {1: 1.0}, {2: 1.0}) is None


@pytest.mark.parametrize("freedom", [1, 4, 30, 31, 60, 1000])
def test_every_t_quantile_is_right(freedom):
    assert t95(freedom) == pytest.approx(t.ppf(0.975, freedom), abs=6e-4)


def test_t_quantiles_are_students():
    from scipy.stats import t

    assert pytest.approx([t.ppf(0.975, n) for n in range(1, 31)], abs=6e-4) == T95


@given(st.lists(st.tuples(st.floats(0, 100), st.floats(0, 100)), min_size=1, max_size=40))
def test_no_sentence_claims_what_the_seeds_do_not_show(pairs):
    of_a, of_b = ({seed: pair[k] for seed, pair in enumerate(pairs)} for k in (0, 1))
    found = difference("A", "B", "all", of_a, of_b)
    sentence = found.sentence()
    each = [a - b for a, b in pairs]
    if len(pairs) < 3:
        assert " is above " not in sentence
    elif " is above " in sentence:
        assert abs(statistics.fmean(each)) > 1.9 * statistics.stdev(each) / len(each) ** 0.5
        assert ("A is above B" in sentence) == (statistics.fmean(each) > 0)


def test_runs_are_compared_by_setup_and_wrong_comparisons_refused():
    cells = [cell(m, s, a + s) for m, a in (("mib", 50), ("sdr", 55)) for s in (1, 2, 3)]
    table = compare(cells)
    assert [line.values[2].ours.text() for line in table.blocks[0].lines] == ["52.0 ± 1.0", "57.0 ± 1.0"]
    assert "sdr is above mib" in table.notes[0]
    (one,) = differences(grouped(cells), "all", reference="sdr")
    assert one.mean == -5 and "sdr is above mib" in one.sentence()
    with pytest.raises(UsageError, match="two results with seed 1"):
        compare([*cells, cell("mib", 1)])
    with pytest.raises(UsageError, match="scored on"):
        compare([*cells, cell("ft", 1, scored_on="held-out training images (20 %)")])
    with pytest.raises(UsageError, match="not among"):
        compare(cells, reference="ft")


def test_a_label_has_only_what_distinguishes_it():
    usual, more = {"train.epochs": 8}, {"train.epochs": 8, "kd.weight": 1}
    cells = [cell("ft", settings=usual), cell("sdr", settings=usual), cell("sdr", setup="other", settings=more)]
    assert list(grouped(cells)) == ["ft", "sdr", "sdr kd.weight=1"]
    paper = cell("ft", setup="paper", preset="paper", settings=usual)
    labels = ["ft default", "sdr default", "sdr default kd.weight=1", "ft paper"]
    assert list(grouped([*cells, paper])) == labels


def test_other_settings_or_presets_of_other_methods_are_named():
    long, short = cell("laps"), cell("sdr", settings={"train.epochs": 8})
    assert list(grouped([long, short])) == ["laps", "sdr train.epochs=8"]
    assert list(grouped([cell("sdr", preset="paper"), cell("mib")])) == ["sdr paper", "mib default"]
    (one,) = differences(grouped([long, short]), "all", reference="sdr")  # a method is enough if it occurs once
    assert one.b == "sdr train.epochs=8"
    other = cell("sdr", setup="other", settings={"train.epochs": 4})
    with pytest.raises(
        UsageError, match=r"--reference sdr: could be sdr train\.epochs=8 or sdr train\.epochs=4\. Name"
    ):
        differences(grouped([long, short, other]), "all", reference="sdr")


def test_a_scenario_without_the_reference_is_named():
    made = [cell("ft"), cell("mib"), cell("sdr", scenario="15-5"), cell("mib", scenario="15-5")]
    notes = compare(made, reference="ft").notes
    assert "voc:15-5@disjoint: no ft, so nothing is compared with it here." in notes
    assert [note for note in notes if "mib − ft" in note] and not [note for note in notes if "sdr −" in note]


def test_the_reference_has_scores_with_the_transform_that_is_asked_for():
    also = {"also": {"eval": "crop512", "all": 40.0, "old": 50.0, "new": 10.0}}
    made = [cell("ft", seed) for seed in (1, 2, 3)]
    made += [cell(method, seed, **also) for method in ("mib", "sdr") for seed in (1, 2)]
    assert any(": sdr − mib: " in note for note in compare(made, "crop512").notes)


def test_rows_with_fewer_seeds_are_named():
    made = [cell("mib", seed=1), cell("mib", seed=2), cell("sdr", seed=1), cell("sdr", seed=2), cell("ft", seed=1)]
    notes = compare(made).notes
    assert [note for note in notes if " has " in note] == ["voc:15-1@disjoint: ft has 1 of 2 seeds."]
    assert any(note.startswith("2 comparisons without correction") for note in notes)


def test_scores_with_another_transform_that_some_or_all_results_lack():
    also = {"also": {"eval": "crop512", "all": 40.0, "old": 50.0, "new": 10.0}}
    made = [cell("mib", seed=1, **also), cell("ft", seed=1), cell("ft", seed=2), cell("ft", seed=3)]
    notes = compare(made, "crop512").notes
    assert "voc:15-1@disjoint: ft was not scored with crop512." in notes and not any(" of " in note for note in notes)
    with pytest.raises(UsageError, match=r"No result was scored with crop512\. Leave out --eval"):
        compare(made[1:], "crop512")


def test_settings_that_several_methods_share_become_a_letter(tmp_path, sdrseg):
    short = {"train.epochs": 8, "train.batch_size": 16}
    made = [
        cell("mib", settings=short),
        cell("sdr", settings=short),
        cell("sdr", settings={}, setup="long"),
        cell("laps", settings={"train.epochs": 4}, setup="other"),
        cell("mib", settings=short, scenario="15-5", setup="elsewhere"),
    ]
    whole = compare(made, reference="mib train.epochs=8 train.batch_size=16")  # as programs and --reference name them
    assert [line.name for line in whole.blocks[1].lines] == ["mib train.epochs=8 train.batch_size=16"]
    assert compare(made, reference="mib") == whole
    table = abbreviated(whole)
    assert [[line.name for line in block.lines] for block in table.blocks] == [
        ["mib [A]", "sdr [A]", "sdr", "laps train.epochs=4"],
        ["mib [A]"],
    ]
    assert table.notes[0] == "[A]: train.epochs=8 train.batch_size=16" and ": sdr [A] − mib [A]: " in table.notes[1]
    assert [block.values for block in table.blocks] == [block.values for block in whole.blocks]
    for number, one in enumerate(made):
        (tmp_path / f"{number}.json").write_text(json.dumps(one))
    (tmp_path / "4.json").unlink()
    assert "[A]: train.epochs=8" in sdrseg("compare", tmp_path, "--format", "markdown")[1]
    assert ": mib [A] − sdr [A]: " in sdrseg("compare", tmp_path, "--format", "markdown", "--reference", "sdr [A]")[1]
    assert "mib train.epochs=8 train.batch_size=16" in sdrseg("compare", tmp_path, "--format", "csv")[1]
    assert [_letters(n) for n in (0, 25, 26, 51, 52, 701, 702)] == ["A", "Z", "AA", "AZ", "BA", "ZZ", "AAA"]
    assert abbreviated(compare(made[:2])) == compare(made[:2])  # nothing differs


def test_the_command_compares_files(tmp_path, sdrseg):
    for number, one in enumerate([cell("mib", 1), cell("sdr", 1, 51.25)]):
        (tmp_path / f"{number}.json").write_text(json.dumps(one))
        assert read_cell(tmp_path / f"{number}.json") == one
    code, out, _ = sdrseg("compare", tmp_path)
    assert code == 0 and "sdr − mib: +1.2 points of all with one seed" in " ".join(out.split())
    code, out, _ = sdrseg("compare", tmp_path, "--format", "latex", "--to", tmp_path / "table.tex")
    assert code == 0 and r"\begin{tabular}" in (tmp_path / "table.tex").read_text()
    assert sdrseg("compare", tmp_path, "--format", "latex", "--to", tmp_path / "table.tex")[0] == 2
    assert sdrseg("compare", tmp_path, "--format", "word")[0] == 2
    code, _, err = sdrseg("compare", tmp_path / "nothing")
    assert code == 2 and "nothing: no such file or folder" in err
    assert sdrseg("compare", tmp_path / "0.json", "--eval", "crop256")[0] == 2


def test_uncertain_activations_are_measured_once_and_kept(trained, tmp_path):
    one = cell_of(trained)
    experiment = SimpleNamespace(hash=one["config"], folder="run", spec=parse_spec("shapes:8-1@disjoint"))
    (measured,), notes = with_activations([one], [experiment], tmp_path, None)
    assert measured == one and notes == (f"Not measured where the run with its models is not in {tmp_path / 'runs'}.",)
    photos = SimpleNamespace(hash=one["config"], folder="run", spec=parse_spec("voc:15-1@disjoint"))
    (tmp_path / "runs/run").mkdir(parents=True)  # a run without its models
    assert "the data (--data PATH): " in with_activations([one], [photos], tmp_path, None)[1][0]
    assert "cannot be read" in with_activations([one], [experiment], tmp_path, None)[1][0]
    shutil.copytree(trained, tmp_path / "runs/run", dirs_exist_ok=True)
    (measured,), notes = with_activations([one], [experiment], tmp_path, None)
    kept = json.loads((tmp_path / "activations/run.json").read_text())
    low, high = (sum(kept["histogram"][k] for k in range(*bins)) for bins in ((8, 21), (7, 22)))  # bins of 0.04
    assert 100 * low <= measured["uncertain"] <= 100 * high and sum(kept["histogram"]) == pytest.approx(1)
    assert kept["images"] == 12 and notes == ()
    shutil.rmtree(tmp_path / "runs")  # the models are not needed again
    assert with_activations([one], [experiment], tmp_path, None) == ([measured], ())


def test_of_uncertain_activations_fewer_are_better():
    table = paper_table("activation-histogram")
    found = {("FT", table.columns[0]): [cell("ft") | {"uncertain": 20.0}]}
    found["FT, sparsity", table.columns[0]] = [cell("ft") | {"uncertain": 10.0}]
    (block,) = paper_form(table, found).blocks
    assert [line.values[0].rank for line in block.lines] == [2, 1]
    assert [value.paper for value in block.lines[0].values] == [None, 5.8, 4.9, 5.6]


def test_a_run_with_a_lowered_rate_is_named():
    lowered = cell("sdr", settings={"lowered_rate": "step 1 × 0.33"}, seed=2)
    table = paper_table("voc")
    found = {("SDR", "voc:15-1@disjoint"): [cell("sdr"), lowered]}
    said = "SDR, voc:15-1@disjoint, seed 2: diverged and was trained with a lower learning rate (step 1 × 0.33)."
    assert said in paper_form(table, found).notes and not paper_form(table, {}).notes == paper_form(table, found).notes
    with_both = compare([cell("sdr"), {**lowered, "setup": "another"}])
    assert [line.name for line in with_both.blocks[0].lines] == ["sdr", "sdr lowered_rate=step 1 × 0.33"]


def test_runs_on_other_images_are_not_compared():
    one, other = cell("mib", scored_images="a" * 16), cell("sdr", scored_images="b" * 16)
    with pytest.raises(UsageError, match="mib and sdr have other test images or masks"):
        compare([one, other])
    compare([one, {**other, "scored_images": None}])  # an older result
    compare([one, {**other, "scenario": "15-5"}])


def test_a_setting_that_adds_a_term_to_rows_without_it_is_named():
    (note,) = kept_settings(paper_table("ablation"), {"kd.weight": 5.0, "train.epochs": 3})
    assert note.endswith(": without kd.weight in the paper; kd.weight=5.0 adds this term.")
    for row in paper_table("ablation").rows:
        if row.method is not None and row.paper:
            has = METHODS[row.method].values().get("kd.weight")
            assert (f"{row.name}," in note or f"{row.name}:" in note) == (has is None or has.value == 0), row.name
    assert kept_settings(paper_table("ablation"), {"kd.weight": 0.0}) == ()
    notes = kept_settings(paper_table("activation-histogram"), {"sp.weight": 0.1})
    assert notes and not any("adds this term" in note for note in notes)  # its rows have weights of their own
    (note,) = kept_settings(paper_table("voc"), {"sp.weight": 0.1})
    assert "LAPS" not in note and note.startswith("FT, ")


def test_there_is_no_minus_before_zero():
    assert spread([-0.04, -0.01]).text() == "0.0 ± 0.0" and spread([-0.04]).text(sign=True) == "+0.0"
    assert spread([-0.06]).text() == "-0.1"


def test_rows_with_other_seeds_are_named():
    one, two = [cell("mib", seed) for seed in (0, 1, 2)], [cell("sdr", seed) for seed in (1, 2, 3)]
    said = "voc:15-1@disjoint: sdr has other seeds (1, 2, 3) than the others (0, 1, 2), which adds noise."
    assert said in compare([*one, *two]).notes
    assert not any("other seeds (" in note for note in compare([*one, *two[:2]]).notes)


def test_the_best_method_of_each_class_is_marked():
    table = paper_table("per-class")
    found = {("FT", table.columns[0]): [cell("ft")], ("SDR", table.columns[0]): [cell("sdr"), cell("sdr", 1)]}
    better = [{**one, "iou": 30.0, "accuracy": 1.0} for one in cell()["per_class"]]
    found["MiB", table.columns[0]] = [cell("mib", per_class=better)]
    block = paper_form(table, found).blocks[0]
    ranks = {head: value.rank for head, value in zip(block.values, block.lines[5].values, strict=True)}
    assert [line.name for line in block.lines] == [f"c{n}" for n in range(21)]
    assert {head: rank for head, rank in ranks.items() if rank} == {
        "MiB IoU": 1, "FT IoU": 2, "SDR IoU": 2, "FT accuracy": 1, "SDR accuracy": 1, "MiB accuracy": 2,
    }  # fmt: skip


def test_scenarios_without_a_result_have_no_empty_table():
    """The classes of a table per class are known from results only."""
    table = paper_table("per-class")
    some = paper_form(table, {("FT", table.columns[1]): [cell("ft")]})
    assert [block.title for block in some.blocks] == [table.columns[1]]
    none = paper_form(table, {}, missing=["voc:15-1@disjoint ft seed=0"])
    assert none.blocks == ()
    for text in (to_markdown(none), to_latex(none)):
        assert "Missing: 1 run (voc:15-1@disjoint ft seed=0)." in text and "|" not in text and "tabular" not in text
    assert to_csv(none).count("\n") == 1


def test_tables_of_held_out_images_say_so():
    oracle = "held-out training images (20 %), all labels (oracle)"
    table = paper_table("ablation")
    found = {(table.rows[0].name, table.columns[0]): [cell("ft", scored_on=oracle)]}
    assert f"Ours is scored on {oracle}." in paper_form(table, found).notes
    assert oracle in to_latex(compare([cell("ft", scored_on=oracle)])).replace("\\%", "%")
