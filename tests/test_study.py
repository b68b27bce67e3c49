"""Results of runs as cells, grids of runs, and what is made of them: on tiny generated data."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from runs import run
from sdrseg.config import load_config, saved_config
from sdrseg.errors import SdrsegError
from sdrseg.methods import own_sections
from sdrseg.study.cell import KEYS, cell_of, config_hash, read_cell, seconds_in, write_cell

FEW = ("shapes.val=12",)


@pytest.fixture(scope="module")
def scored_twice(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("twice") / "run"
    run(folder, "ft", "eval.also=crop512", *FEW, "train.seed=3")
    return folder


# --- cells -----------------------------------------------------------------------------------------------------------


def without_models(folder: Path, to: Path) -> Path:
    """The run as it comes from another machine: only what a cell may need."""
    for file in ("config.json", "scenario.json", "summary.json", "log.jsonl", *folder.glob("steps/*/metrics*.json")):
        source = folder / file
        place = to / source.relative_to(folder)
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, place)
    return to


def test_a_cell_is_what_the_confusion_matrices_say(scored_twice, tmp_path):
    cell = cell_of(without_models(scored_twice, tmp_path / "bare"))
    assert cell == cell_of(scored_twice) and tuple(cell) == KEYS
    matrix = np.array(json.loads((scored_twice / "steps/2/metrics.json").read_text())["confusion"], float)
    hits, truth, said = np.diag(matrix), matrix.sum(1), matrix.sum(0)
    with np.errstate(invalid="ignore"):
        ious = np.where(truth > 0, hits / (truth + said - hits), np.nan)
        accuracy = np.where(truth > 0, hits / truth, np.nan)
    assert cell["all"] == cell["all_full_image"] == pytest.approx(100 * np.nanmean(ious), abs=1e-3)
    assert cell["old"] == pytest.approx(100 * np.nanmean(ious[:9]), abs=1e-3)
    assert cell["new"] == pytest.approx(100 * np.nanmean(ious[9:]), abs=1e-3)
    assert cell["all_no_background"] == pytest.approx(100 * np.nanmean(ious[1:]), abs=1e-3)
    assert cell["pixel_accuracy"] == pytest.approx(100 * np.nanmean(accuracy), abs=1e-3)
    assert [c["step"] for c in cell["per_class"]] == [0] * 9 + [1, 2]
    assert [s["step"] for s in cell["per_step"]] == [0, 1, 2]
    assert (cell["dataset"], cell["scenario"], cell["protocol"], cell["seed"]) == ("shapes", "8-1", "disjoint", 3)
    assert (cell["batch"], cell["epochs"], cell["eval"]) == ([4, 4], [1, 1], "full_image")
    assert cell["device"] == "cpu" and cell["base"] == "trained" and cell["seconds"] > 0
    assert cell["settings"]["shapes.train"] == 60 and "run.log_every" not in cell["settings"]


def test_the_second_score_is_that_of_the_other_transform(scored_twice, tmp_path):
    other = tmp_path / "other"
    run(other, "ft", "eval.transform=crop512", *FEW, "train.seed=3", bases=scored_twice.parent / "bases")
    assert (scored_twice / "steps/2/metrics-crop512.json").read_text() == (other / "steps/2/metrics.json").read_text()
    first, second = cell_of(scored_twice), cell_of(other)
    assert first["also"]["eval"] == "crop512" and first["also"]["all"] == second["all"]
    assert second["all_full_image"] is None and second["base"] == "taken from the store"
    for one, here, there in zip(first["also"]["per_class"], first["per_class"], second["per_class"], strict=True):
        assert (one["name"], one["step"]) == (here["name"], here["step"])
        assert (one["iou"], one["accuracy"]) == (there["iou"], there["accuracy"])
        assert one["iou_when_new"] == (there["iou_when_new"] if one["step"] == 2 else None)  # scored in the last step


def test_a_finished_run_gets_its_second_score_by_asking_again(tmp_path):
    run(tmp_path / "run", "ft", *FEW)
    assert cell_of(tmp_path / "run")["also"] is None
    models = {p: p.stat().st_mtime_ns for p in tmp_path.glob("run/steps/*/model.safetensors")}
    run(tmp_path / "run", "ft", *FEW, "eval.also=crop512")
    assert cell_of(tmp_path / "run")["also"]["eval"] == "crop512"
    assert models == {p: p.stat().st_mtime_ns for p in tmp_path.glob("run/steps/*/model.safetensors")}


def test_pauses_between_processes_do_not_count_as_time_of_a_run():
    events = [("start", 0), ("train", 10), ("start", 1000), ("train", 1005), ("resume", 2000), ("score", 2001)]
    assert seconds_in([{"event": event, "time": time} for event, time in events]) == 16


def test_a_result_is_written_once_and_never_replaced(scored_twice, tmp_path):
    file = write_cell(scored_twice, tmp_path)
    assert write_cell(scored_twice, tmp_path) == file
    assert file.name.startswith("shapes-8-1-disjoint-ft-default-seed3-")
    changed = read_cell(file) | {"all": 1.0}
    file.write_text(json.dumps(changed))
    with pytest.raises(SdrsegError, match="another result"):
        write_cell(scored_twice, tmp_path)
    assert read_cell(file) == changed
    file.write_text("{}")
    with pytest.raises(SdrsegError, match="not a result"):
        read_cell(file)


def test_results_of_earlier_versions_can_be_read(scored_twice, tmp_path):
    cell = cell_of(scored_twice)
    (tmp_path / "old.json").write_text(json.dumps({k: v for k, v in cell.items() if k != "scored_images"}))
    assert read_cell(tmp_path / "old.json") == {**cell, "scored_images": None}


def test_a_run_that_is_not_finished_has_no_result(scored_twice, tmp_path, sdrseg):
    bare = without_models(scored_twice, tmp_path / "bare")
    code, out, _ = sdrseg("result", bare)
    assert code == 0 and json.loads(out)[0]["method"] == "ft"
    (bare / "summary.json").unlink()
    code, _, err = sdrseg("result", bare)
    assert code == 1 and "not finished yet" in err


def test_a_method_s_own_settings_are_part_of_the_hash():
    """A run is read without its method: the defaults are unknown there, and must not hide a value."""
    hashes = set()
    for versus in (0.0, 1.0):
        declared = load_config("shapes", None, {"laps.versus": versus}, own=own_sections("laps"))
        saved = saved_config(declared.to_dict(), "config.json")
        found = {config_hash("shapes:8-1@disjoint", "laps", "default", None, c) for c in (declared, saved)}
        assert len(found) == 1
        hashes |= found
    assert len(hashes) == 2
