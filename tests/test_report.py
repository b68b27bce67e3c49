"""`sdrseg report`: what the page says is what the files say, whatever they are called and however far the runs are."""

from __future__ import annotations

import base64
import io
import json
import re
import shlex
import shutil
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from sdrseg.cli import main
from sdrseg.colours import contrast, shade, text_on
from sdrseg.config import load_config, parse_settings
from sdrseg.datasets.shapes import Shapes
from sdrseg.errors import SdrsegError
from sdrseg.methods import method_layers, method_values
from sdrseg.reporting import write_report
from sdrseg.reporting.collect import collect, command_line
from sdrseg.reporting.findings import sentence
from sdrseg.reporting.latent import measure, normalised_counts, project
from sdrseg.reporting.pictures import ModelOutput, choose, open_data
from sdrseg.scenario import SOURCES

VOID_TAGS = {"meta", "img", "input", "link", "br", "hr"}
NASTY = {"disc": "<script>alert('1')</script>", "ring": 'a "b" & c', "star": "狗 كلب собака", "heart": "x" * 60}


class Page(HTMLParser):
    """A tree of (tag, attributes, children); refuses tags that do not match."""

    def __init__(self, text: str):
        super().__init__()
        self.root: list = ["root", {}, []]
        self.open = [self.root]
        self.feed(text)
        assert self.open == [self.root], f"not closed: {[e[0] for e in self.open]}"

    def handle_starttag(self, tag, attrs):
        element = [tag, dict(attrs), []]
        assert len(element[1]) == len(attrs), f"an attribute twice in {tag}"
        self.open[-1][2].append(element)
        if tag not in VOID_TAGS:
            self.open.append(element)

    def handle_startendtag(self, tag, attrs):
        self.open[-1][2].append([tag, dict(attrs), []])

    def handle_endtag(self, tag):
        assert self.open[-1][0] == tag, f"{tag} closes {self.open[-1][0]}"
        self.open.pop()

    def handle_data(self, data):
        self.open[-1][2].append(data)

    def all(self, tag=None, within=None, **attributes):
        wanted = {name.replace("_", "-"): value for name, value in attributes.items()}
        found = []

        def visit(element):
            for child in element[2]:
                if isinstance(child, list):
                    if tag in (None, child[0]) and all(child[1].get(n) == v for n, v in wanted.items()):
                        found.append(child)
                    visit(child)

        visit(within or self.root)
        return found

    def one(self, *args, **attributes):
        (found,) = self.all(*args, **attributes)
        return found


def text_of(element) -> str:
    return "".join(c if isinstance(c, str) else text_of(c) for c in element[2])


def number(page: Page, cell) -> float | None:
    values = page.all("data", within=cell)
    return float(values[0][1]["value"]) if values else None


@pytest.fixture(scope="module")
def both(report_runs, tmp_path_factory) -> str:
    out = tmp_path_factory.mktemp("both") / "both.html"
    file, notes = write_report([report_runs["ft"], report_runs["sdr"]], out, images=3)
    assert file == out and notes == []
    return out.read_text()


@pytest.fixture(scope="module")
def page(both) -> Page:
    return Page(both)


# --- numbers ----------------------------------------------------------------------------------------------------------


def test_the_summary_is_that_of_the_confusion_matrices(report_runs, page):
    """Computed here from metrics.json alone, in plain Python."""
    for name in ("ft", "sdr"):
        per_step = []
        for k in range(3):
            saved = json.loads((report_runs[name] / f"steps/{k}/metrics.json").read_text())
            matrix = saved["confusion"]
            ious = []
            for c in range(len(matrix)):
                truth, hit = sum(matrix[c]), matrix[c][c]
                union = truth + sum(row[c] for row in matrix) - hit
                ious.append(hit / union if truth else None)
            per_step.append(ious)

        def mean(values):
            known = [v for v in values if v is not None]
            return sum(known) / len(known)

        old, new, every = mean(per_step[-1][:9]), mean(per_step[-1][9:]), mean(per_step[-1])
        lost = []
        for c in range(1, 10):
            earlier = [ious[c] for ious in per_step[:-1] if c < len(ious) and ious[c] is not None]
            if earlier:
                lost.append(max(earlier) - per_step[-1][c])
        expected = {
            "old": old,
            "new": new,
            "all": every,
            "harmonic": 2 * old * new / (old + new) if old + new else 0,
            "averaged": mean([mean(ious) for ious in per_step]),
            "forgetting": mean(lost),
        }
        row = page.one("tr", within=page.one("table", id="summary-table"), data_run=name)
        for key, value in expected.items():
            cell = page.one("td", within=row, data_key=key)
            assert number(page, cell) == pytest.approx(value, abs=1e-12)
            assert f"{100 * value:.1f}" in text_of(cell)
        heat = page.one("div", data_run=name, **{"class": "by-run"})
        shown = [
            [number(page, cell) for cell in page.all("td", within=row)]
            for row in page.all("tr", within=page.one("tbody", within=heat))
        ]
        assert shown == [[ious[c] if c < len(ious) else None for ious in per_step] for c in range(11)]


def test_the_best_value_is_marked_only_where_runs_are_compared(report_runs, page, tmp_path):
    summaries = {n: json.loads((report_runs[n] / "summary.json").read_text()) for n in ("ft", "sdr")}
    top = max(s["miou"]["all"] for s in summaries.values())
    for name, summary in summaries.items():
        row = page.one("tr", within=page.one("table", id="summary-table"), data_run=name)
        cell = page.one("td", within=row, data_key="all")
        assert bool(page.all("strong", within=cell)) == (summary["miou"]["all"] == top)
    write_report([report_runs["ft"]], tmp_path / "one.html", images=0)
    alone = Page((tmp_path / "one.html").read_text())
    assert not alone.all("strong", within=alone.one("table", id="summary-table"))
    write_report([report_runs["ft"], report_runs["unfinished"]], tmp_path / "two.html", images=0)
    uneven = Page((tmp_path / "two.html").read_text())
    assert not uneven.all("strong", within=uneven.one("table", id="summary-table"))


def test_the_sentence_is_computed(report_runs, page):
    lead = text_of(page.one("p", **{"class": "lead"})).replace("\xa0", " ")
    summaries = {n: json.loads((report_runs[n] / "summary.json").read_text()) for n in ("ft", "sdr")}
    best = max(summaries, key=lambda n: summaries[n]["miou"]["all"])
    assert lead.startswith(f"{best} has {100 * summaries[best]['miou']['all']:.1f} % mIoU")


def test_the_sentence_does_not_rank_what_looks_the_same(report_runs, tmp_path):
    """Differences of less than half a tenth of a point."""
    for name, more in (("one", 0), ("two", 1e-4)):
        shutil.copytree(report_runs["sdr"], tmp_path / name)
        file = tmp_path / name / "summary.json"
        saved = json.loads(file.read_text())
        saved["miou"]["all"], saved["forgetting"]["final"] = 0.5 + more, 0.02 + more
        file.write_text(json.dumps(saved))
    one, two = collect([tmp_path / "one", tmp_path / "two"])
    assert one.forgetting.mean < two.forgetting.mean and one.summary["miou"]["all"] < two.summary["miou"]["all"]
    said = sentence([one, two])
    assert "the same as" in said and "An old class " in said and "forgets least" not in said


# --- the page as such -------------------------------------------------------------------------------------------------


def test_the_page_is_complete_and_needs_nothing_else(both, page):
    assert page.one("html")[1]["lang"] == "en"
    for section in ("summary", "steps", "classes", "pictures", "losses", "latent", "setup"):
        page.one("section", id=section)
    levels = [int(e[0][1]) for e in page.all() if re.fullmatch("h[1-6]", e[0])]
    assert levels[0] == 1 and levels.count(1) == 1
    assert all(b <= a + 1 for a, b in pairwise(levels))
    for tag, attributes, _ in page.all():
        for name, value in attributes.items():
            if name in ("src", "href"):
                assert value.startswith(("data:", "#")), f"{tag} asks for {value[:50]}"
    assert not re.search(r"url\((?!data:)", both) and "@import" not in both
    ids = [e[1]["id"] for e in page.all() if "id" in e[1]]
    assert len(set(ids)) == len(ids)
    assert {e[1]["href"][1:] for e in page.all("a")} <= set(ids)


def test_every_picture_has_words_in_its_place(page):
    assert all(len(e[1]["alt"]) > 10 for e in page.all("img"))
    charts = [e for e in page.all("svg") if "swatch" not in e[1]["class"]]
    assert len(charts) >= 3 + 1 + 7 + 4 + 3
    assert all(e[1]["role"] == "img" and len(e[1]["aria-label"]) > 20 for e in charts)
    assert all(e[1]["aria-hidden"] == "true" for e in page.all("svg", **{"class": "swatch"}))
    assert all(e[1]["aria-pressed"] == "false" for e in page.all("button") if "data-channel" in e[1])


def test_predictions_are_those_of_the_saved_models(report_runs, page):
    from sdrseg.datasets.augment import normalise
    from sdrseg.engine.checkpoint import load_tensors
    from sdrseg.network import build_network

    source = Shapes(32, 160, 24, 0)
    rows = page.all("div", **{"class": "row"})
    assert len(rows) == 3
    id = rows[0][1]["aria-label"].removeprefix("Test image ")
    image = torch.from_numpy(source.image(id)).permute(2, 0, 1)[None]
    figure = page.one("figure", within=rows[0], data_run="sdr")
    tiles = page.all("img", within=figure)
    assert [t[1]["data-step"] for t in tiles] == ["0", "1", "2"] and ["hidden" in t[1] for t in tiles] == [1, 1, 0]
    config = load_config("shapes")
    for k, tile in enumerate(tiles):
        network = build_network(config.net, 9 + k).eval()
        network.load_state_dict(load_tensors(report_runs["sdr"] / f"steps/{k}/model.safetensors"))
        with torch.no_grad():
            expected = network(normalise(image)).logits.argmax(1)[0].numpy()
        assert np.array_equal(_values(tile[1]["src"]), expected) and len(np.unique(expected)) > 1
    truth = page.all("img", within=rows[0])[0]
    assert np.array_equal(_values(truth[1]["src"]), np.where(source.mask(id) == 255, 11, source.mask(id)))


def _values(uri: str) -> np.ndarray:
    picture = Image.open(io.BytesIO(base64.b64decode(uri.split(",")[1])))
    assert picture.mode == "P"
    return np.asarray(picture)


def test_the_images_show_every_class_and_do_not_depend_on_results(report_runs):
    run = collect([report_runs["ft"]])[0]
    tests = open_data([run], None)
    choice = choose(run, tests, 8)
    assert choice.missing == () and len(set(choice.ids)) == 8
    shown = {int(v) for id in choice.ids for v in np.unique(tests.source.mask(id))}
    assert shown >= set(range(1, 11))
    assert choose(collect([report_runs["sdr"]])[0], tests, 8) == choice
    few = choose(run, tests, 1)
    assert len(few.ids) == 1 and few.ids[0] == choice.ids[0] and few.missing


# --- names, missing things, unfinished runs ---------------------------------------------------------------------------


def test_names_are_escaped(report_runs, tmp_path):
    for name in ("ft", "sdr"):
        folder = tmp_path / f"{name} <b>&\"'"
        shutil.copytree(report_runs[name], folder)
        for file in folder.rglob("*.json"):
            content = file.read_text()
            for plain, nasty in NASTY.items():
                content = content.replace(f'"{plain}"', json.dumps(nasty))
            file.write_text(content)
        config = json.loads((folder / "config.json").read_text())
        config["method"] = "<i>m</i>"  # a method of somebody's own, twice: folders tell them apart
        (folder / "config.json").write_text(json.dumps(config))
    paths = sorted(tmp_path.iterdir())
    write_report(paths, tmp_path / "out.html", images=8)
    text = (tmp_path / "out.html").read_text()
    page = Page(text)
    assert len(page.all("script")) == 2 and "alert" not in text_of(page.all("script")[1])
    assert not page.all("i") and not page.all("b")
    legend = [text_of(e) for e in page.all("button") if "data-channel" in e[1]]
    assert set(NASTY.values()) <= set(legend)
    assert json.loads(text_of(page.one("script", id="step-names")))[2] == [NASTY["heart"]]
    assert any(str(paths[0]) == text_of(e) for e in page.all("code"))
    labels = [e[1]["data-run"] for e in page.all("tr", within=page.one("table", id="summary-table")) if e[1]]
    assert labels == [f"<i>m</i> ({p.name})" for p in paths]


def test_without_the_data_the_rest_is_reported(report_runs, tmp_path):
    config = report_runs["sdr"] / "config.json"
    moved = tmp_path / "run"
    shutil.copytree(report_runs["sdr"], moved)
    (moved / "config.json").write_text(config.read_text().replace("shapes:", "voc:"))
    _, notes = write_report([moved], tmp_path / "out.html")
    assert len(notes) == 1 and "voc needs --data PATH" in notes[0] and "again with --data PATH" in notes[0]
    page = Page((tmp_path / "out.html").read_text())
    assert notes[0] in text_of(page.one("aside"))
    assert not page.all("img") and not page.all("input")
    assert number(page, page.one("td", data_key="all", within=page.one("table", id="summary-table"))) is not None
    assert "As logged" in text_of(page.one("section", id="latent"))
    before = (tmp_path / "out.html").read_text()
    with pytest.raises(SdrsegError, match="nowhere: no such folder"):  # mistyped: a page that is there stays
        write_report([moved], tmp_path / "out.html", data=tmp_path / "nowhere")
    assert (tmp_path / "out.html").read_text() == before
    write_report([report_runs["sdr"]], tmp_path / "out.html", images=1)
    pictured = (tmp_path / "out.html").read_text()
    with pytest.raises(SdrsegError, match="has pictures, and the new page would have none"):
        write_report([moved], tmp_path / "out.html")
    with pytest.raises(SdrsegError, match=r"would have none\. No pictures or features, as requested"):
        write_report([report_runs["sdr"]], tmp_path / "out.html", images=0)
    assert (tmp_path / "out.html").read_text() == pictured
    write_report([moved], tmp_path / "out.html", overwrite=True)
    assert len((tmp_path / "out.html").read_text()) < len(pictured)


def test_other_data_than_the_runs_were_scored_on_are_not_shown(report_runs, tmp_path):
    shutil.copytree(report_runs["ft"], tmp_path / "run")
    scenario = json.loads((tmp_path / "run/scenario.json").read_text())
    scenario["mask_digests"]["val-00003"] = "00" * 16
    (tmp_path / "run/scenario.json").write_text(json.dumps(scenario))
    _, notes = write_report([tmp_path / "run"], tmp_path / "out.html", images=2)
    assert "val-00003 has changed" in notes[0] and "--data" not in notes[0]  # which generated data refuse
    (tmp_path / "data").mkdir()
    with pytest.raises(SdrsegError):  # data that was asked for by name has to be the right one
        write_report([tmp_path / "run"], tmp_path / "out.html", data=tmp_path / "data", images=2)


def test_a_missing_model_is_a_note(report_runs, tmp_path):
    shutil.copytree(report_runs["ft"], tmp_path / "run")
    (tmp_path / "run/steps/1/model.safetensors").unlink()
    _, notes = write_report([tmp_path / "run", report_runs["sdr"]], tmp_path / "out.html", images=2)
    assert len(notes) == 1 and "Predictions and features of ft are missing" in notes[0]
    Page((tmp_path / "out.html").read_text())


def test_an_unfinished_run_is_reported_as_far_as_it_is(report_runs, tmp_path):
    paths = [report_runs["unfinished"], report_runs["ft"]]
    write_report(paths, tmp_path / "out.html", images=2)
    page = Page((tmp_path / "out.html").read_text())
    label = page.all("tr", within=page.one("table", id="summary-table"))[1][1]["data-run"]
    row = page.one("tr", within=page.one("table", id="summary-table"), data_run=label)
    assert "2 of 3" in text_of(row)
    step1 = json.loads((report_runs["sdr"] / "steps/1/metrics.json").read_text())
    assert number(page, page.one("td", within=row, data_key="all")) == step1["miou"]["all"]
    assert "fewer steps are finished" in text_of(page.one("section", id="summary"))
    figure = page.all("figure", data_run=label)[0]
    assert len(page.all("img", within=figure)) == 2
    write_report(paths[:1], tmp_path / "alone.html", images=2)
    alone = Page((tmp_path / "alone.html").read_text())
    assert "No run is finished" in text_of(alone.one("section", id="summary"))


def test_a_run_of_one_step_has_a_report(report_runs, tmp_path):
    shutil.copytree(report_runs["unfinished"], tmp_path / "run")
    shutil.rmtree(tmp_path / "run/steps/1")
    write_report([tmp_path / "run"], tmp_path / "out.html", images=2)
    page = Page((tmp_path / "out.html").read_text())
    assert "No class has been known" in text_of(page.one("section", id="classes"))


# --- what is refused --------------------------------------------------------------------------------------------------


def test_other_scenarios_are_refused(report_runs, tmp_path):
    shutil.copytree(report_runs["ft"], tmp_path / "other")
    config = (tmp_path / "other/config.json").read_text()
    (tmp_path / "other/config.json").write_text(config.replace("shapes:8-1@disjoint", "shapes:8-1@overlapped"))
    with pytest.raises(SdrsegError, match=r"its scenario is shapes:8-1@overlapped, not shapes:8-1@disjoint"):
        write_report([report_runs["sdr"], tmp_path / "other"], tmp_path / "out.html")
    shutil.copytree(report_runs["ft"], tmp_path / "masks")
    scenario = json.loads((tmp_path / "masks/scenario.json").read_text())
    scenario["mask_digests"]["val-00003"] = "00" * 16
    (tmp_path / "masks/scenario.json").write_text(json.dumps(scenario))
    with pytest.raises(SdrsegError, match="test masks have different content"):
        write_report([report_runs["sdr"], tmp_path / "masks"], tmp_path / "out.html")
    with pytest.raises(SdrsegError, match="named twice"):
        write_report([report_runs["sdr"], report_runs["sdr"]], tmp_path / "out.html")
    with pytest.raises(SdrsegError, match=r"Is .* a run\?"):
        write_report([tmp_path / "nothing"], tmp_path / "out.html")
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign/config.json").write_text("[1, 2]")
    with pytest.raises(SdrsegError, match="not the configuration of a run"):
        write_report([tmp_path / "foreign"], tmp_path / "out.html")
    shutil.rmtree(tmp_path / "other/steps")
    with pytest.raises(SdrsegError, match="step 0 is not trained"):
        write_report([tmp_path / "other"], tmp_path / "out.html")
    assert not (tmp_path / "out.html").exists()


def test_a_file_of_somebody_else_is_not_overwritten(report_runs, tmp_path, monkeypatch, capsys):
    file = tmp_path / "mine.html"
    file.write_text("<!doctype html><p>mine</p>")
    arguments = ["sdrseg", "report", str(report_runs["ft"]), "--images", "0", "--out", str(file)]
    monkeypatch.setattr("sys.argv", arguments)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 1 and "is not an sdrseg report" in capsys.readouterr().err
    assert "mine" in file.read_text()
    for more in (["--overwrite"], []):  # the second time it is ours
        monkeypatch.setattr("sys.argv", [*arguments, *more])
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code in (0, None)
    out, err = capsys.readouterr()
    assert f"{file} (0." in out and "as requested (--images 0)" in err
    with pytest.raises(SdrsegError, match="is a folder"):
        write_report([report_runs["ft"]], tmp_path)
    with pytest.raises(SdrsegError, match=r"Not a directory|cannot write to"):
        write_report([report_runs["ft"]], file / "below.html")
    with pytest.raises(SdrsegError, match="Choose another name with --out"):
        write_report([report_runs["ft"]], tmp_path / ("x" * 300))


def test_the_file_is_named_after_the_scenario(report_runs, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file, _ = write_report([report_runs["ft"]], images=0)
    assert file == Path("shapes-8-1-disjoint.html") and file.exists()


# --- parts ------------------------------------------------------------------------------------------------------------


def test_the_command_line_gives_the_same_configuration(report_runs, page):
    for name in ("ft", "sdr"):
        run = collect([report_runs[name]])[0]
        words = shlex.split(command_line(run))
        assert words[:5] == ["sdrseg", "train", "shapes:8-1@disjoint", "--method", name] and "--data" not in words
        given = [words[n + 1] for n, word in enumerate(words) if word == "--set"]
        assert (
            load_config("shapes", None, parse_settings(given), method_layers(name, "default", "8-1", "shapes"))
            == run.config
        )
        assert command_line(run) in [text_of(e) for e in page.all("code")]


def test_the_command_of_a_method_that_is_not_known_has_what_was_set_only(report_runs):
    """config.json has what such a method sets itself."""
    run = collect([report_runs["sdr"]])[0]
    values = method_values("sdr", "default", "8-1", "shapes")
    unknown = replace(run, identity=run.identity | {"method": "gone", "method_values": values})
    named = command_line(run).replace("--method sdr", "--method FILE.py:gone")
    assert command_line(unknown) == named and "--set" in named


@pytest.mark.parametrize("needs_folder", [True, False])
def test_the_command_line_of_own_data_names_a_folder_where_they_need_one(report_runs, monkeypatch, needs_folder):
    own = type("Figures", (Shapes,), {"name": "figures", "needs_folder": needs_folder})
    monkeypatch.setitem(SOURCES, "figures", own)
    run = collect([report_runs["ft"]])[0]
    run = replace(run, identity=run.identity | {"spec": "figures:8-1@disjoint"})
    assert ("--data PATH" in command_line(run)) == needs_folder


def test_tuning_is_not_compared_with_testing(report_runs, tmp_path):
    shutil.copytree(report_runs["sdr"], tmp_path / "tuned")
    file = tmp_path / "tuned/scenario.json"
    saved = json.loads(file.read_text())
    for step in saved["steps"]:
        step["test_split"] = "train"
    file.write_text(json.dumps(saved))
    with pytest.raises(SdrsegError, match=r"tuned cannot be compared .* held-out training images \(--holdout"):
        collect([report_runs["ft"], tmp_path / "tuned"])


def test_hashes_and_settings_are_there(report_runs, page):
    meta = json.loads((report_runs["sdr"] / "steps/2/meta.json").read_text())
    shown = {text_of(e) for e in page.all("code")}
    assert {meta["files"][part]["sha256"] for part in ("model", "memory")} <= shown
    differing = {text_of(page.one("code", within=row)) for row in page.all("tr", **{"class": "differs"})}
    assert {"method", "pm.weight", "sp.weight"} <= differing and "train.epochs" not in differing


def test_a_setting_that_affects_nothing_does_not_differ(report_runs, tmp_path):
    shutil.copytree(report_runs["ft"], tmp_path / "again")
    file = tmp_path / "again/config.json"
    saved = json.loads(file.read_text())
    saved["config"]["data"]["workers"] += 1
    file.write_text(json.dumps(saved))
    out, _ = write_report([report_runs["ft"], tmp_path / "again"], tmp_path / "page.html", images=0)
    page = Page(out.read_text())
    assert not page.all("tr", **{"class": "differs"})
    assert "data.workers" in {text_of(e) for e in page.all("code")}  # among all settings


def test_activations_are_divided_by_the_maximum_of_their_class_in_the_image():
    features = torch.tensor([[[[1.0, 2.0, 0.0, 9.0]], [[4.0, 0.5, 0.0, 9.0]]]])  # channels 1, 2 at four cells
    labels = torch.tensor([[[0, 1, 2, 255]]], dtype=torch.uint8)
    counts = normalised_counts(features, labels, 3)
    expected = np.zeros(25)
    for value in (1 / 4, 4 / 4, 2 / 2, 0.5 / 2):  # class 2 is all zero and void takes no part
        expected[min(24, int(value * 25))] += 1
    assert np.array_equal(counts, expected)


def test_images_without_a_labelled_cell_have_no_projection():
    void = torch.full((1, 2, 2), 255, dtype=torch.uint8)
    outputs = [ModelOutput(step, None, np.zeros((16, 16), np.uint8), torch.rand(1, 4, 2, 2), void) for step in (0, 1)]
    assert measure(outputs, SimpleNamespace(last=1), 3).projection is None


def test_the_projection_has_one_basis_for_both():
    draw = torch.Generator().manual_seed(0)
    plane = torch.randn(2, 8, generator=draw)
    first = torch.randn(200, 2, generator=draw) * torch.tensor([5.0, 1.0]) @ plane
    labels = torch.arange(200) % 4
    moved = first + plane[0]
    result = project(0, 1, (first, labels), (moved, labels))
    assert result.explained == pytest.approx(1)
    shift = result.points[1] - result.points[0]
    assert np.allclose(shift, shift[0], atol=1e-5)
    assert np.linalg.norm(shift[0]) == pytest.approx(float(plane[0].norm()), rel=1e-5)


def test_text_can_be_read_on_every_shade():
    for warm in (False, True):
        for share in np.linspace(0, 1, 101):
            ground = shade(float(share), warm)
            ink = (0, 0, 0) if text_on(ground) == "#000" else (255, 255, 255)
            assert contrast(ground, ink) >= 4.5
