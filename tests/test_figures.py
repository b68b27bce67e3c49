"""Figures for papers: drawn from results and from models of tiny runs."""

from __future__ import annotations

import json
import shutil
import xml.etree.ElementTree as ET
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from sdrseg.errors import UsageError
from sdrseg.reporting.latent import BINS, Latent, share_uncertain
from sdrseg.reporting.panels import histogram_panel
from sdrseg.study.cell import cell_of
from sdrseg.study.figures import COLUMN, FORMATS, PAGE, draw_classes, draw_steps, figure, legend_below, line_style
from test_tables import cell


@pytest.mark.parametrize("kind", ["steps", "per-class", "qualitative", "histogram", "latent"])
def test_a_figure_comes_in_three_formats_and_replaces_nothing(kind, trained, tmp_path, sdrseg):
    more = ["--images", 2] + (["--every-step"] if kind == "qualitative" else [])
    code, out, err = sdrseg("figures", kind, trained, "--out", tmp_path / "figure", *more)
    assert code == 0, err
    files = [tmp_path / f"figure.{format}" for format in FORMATS]
    assert out.split() == [str(file) for file in files]
    width = float(ET.parse(files[0]).getroot().attrib["width"].removesuffix("pt"))
    assert width == pytest.approx(72 * (6.875 if kind in ("steps", "qualitative", "latent") else 3.25), abs=0.1)
    assert files[1].read_bytes().startswith(b"%PDF")
    with Image.open(files[2]) as picture:
        assert len(np.unique(np.asarray(picture.convert("L")))) > 10  # something is on it
    styles = [text.attrib["style"] for text in _texts(files[0]) if "style" in text.attrib]  # not powers of ten
    assert styles and all("font-size: 8px" in style or "font: 8px" in style for style in styles)
    before = [file.read_bytes() for file in files]
    assert sdrseg("figures", kind, trained, "--out", tmp_path / "figure", *more)[0] == 2
    assert [file.read_bytes() for file in files] == before


def _texts(file: Path) -> list[ET.Element]:
    return [element for element in ET.parse(file).iter() if element.tag.endswith("}text")]


def test_a_figure_shows_one_scenario(trained, tmp_path, sdrseg):
    with pytest.raises(UsageError, match="one scenario"):
        draw_steps([cell_of(trained), cell("ft")], tmp_path / "x")
    assert sdrseg("figures", "step", trained)[0] == 2


def test_every_step_of_several_runs_on_named_images(trained, tmp_path, sdrseg):
    other = tmp_path / "other"
    shutil.copytree(trained, other)
    ids = json.loads((trained / "scenario.json").read_text())["steps"][-1]["test_ids"][:2]
    more = ["--every-step", "--dpi", 100, *(word for id in ids for word in ("--id", id)), "--out", tmp_path / "figure"]
    code, _, err = sdrseg("figures", "qualitative", trained, other, *more)
    assert code == 0, err
    texts = ["".join(text.itertext()) for text in _texts(tmp_path / "figure.svg")]
    assert [text for text in texts if text.startswith("step ")] == ["step 0", "step 1", "step 2"]
    assert "8 classes" in texts and texts.count("image and truth") == 1
    assert sum("(other)" in text for text in texts) == 2  # a row for each image
    pictures = [e for e in ET.parse(tmp_path / "figure.svg").iter() if e.tag.endswith("}image")]
    assert len(pictures) == 2 * (2 + 2 * 3)  # image and truth, two runs with three steps
    with Image.open(tmp_path / "figure.png") as picture:
        assert picture.width == 687
    code, _, err = sdrseg("figures", "qualitative", trained, other, "--no-photos", *more[:-1], tmp_path / "masks")
    assert code == 0, err
    tree = ET.parse(tmp_path / "masks.svg")
    assert len([e for e in tree.iter() if e.tag.endswith("}image")]) == 2 * (1 + 2 * 3)
    assert [text.text for text in _texts(tmp_path / "masks.svg") if "truth" in (text.text or "")] == ["truth"]
    code, _, err = sdrseg("figures", "qualitative", trained, "--id", "nothing", "--out", tmp_path / "none")
    assert code == 2 and "--id nothing" in err


def test_the_last_model_is_enough_for_a_figure_of_the_last_step(trained, tmp_path, sdrseg):
    pruned = tmp_path / "pruned"
    shutil.copytree(trained, pruned)
    (pruned / "steps/0/model.safetensors").unlink()
    code, _, err = sdrseg("figures", "qualitative", pruned, "--images", 1, "--dpi", 50, "--out", tmp_path / "last")
    assert code == 0, err
    code, _, err = sdrseg("figures", "qualitative", pruned, "--images", 1, "--every-step", "--out", tmp_path / "all")
    assert code == 1 and "steps/0" in err and "model.safetensors" in err


def test_seeds_become_one_line_with_a_band(trained, tmp_path):
    one = cell_of(trained)
    other = {
        **one,
        "seed": 1,
        "config": "other",
        "per_step": [{**s, "all": (s["all"] or 0) + 5} for s in one["per_step"]],
    }
    files = draw_steps([one, other], tmp_path / "steps")
    names = ["".join(text.itertext()) for text in _texts(files[0])]
    assert names.count("mib") == 1 and not any("scored on" in name for name in names)
    tuned = draw_steps(
        [{**one, "scored_on": "held-out training images (20 %), all labels (oracle)"}], tmp_path / "tuned"
    )
    assert any("all labels (oracle)" in "".join(text.itertext()) for text in _texts(tuned[0]))
    assert draw_classes([one, other], tmp_path / "classes")[0].exists()


@pytest.mark.parametrize("width", [COLUMN, PAGE])
@pytest.mark.parametrize("label", ["ft", "mib train.epochs=60 optim.lr=0.02", 3 * "long-name " + 30 * "W"])
@pytest.mark.parametrize("count", [1, 8])
def test_a_legend_is_inside_the_figure_and_below_the_axes(width, label, count):
    with figure(width, 2.0) as made:
        axis = made.subplots()
        lines = [axis.plot([0, 1], **line_style(number))[0] for number in range(count)]
        legend_below(made, lines, [f"{label} {number}" for number in range(count)])
        made.canvas.draw()
        (legend,) = made.legends
        box = legend.get_window_extent()
        assert 0 <= box.x0 and box.x1 <= made.bbox.x1 and 0 <= box.y0
        assert box.y1 <= axis.get_tightbbox().y0
        assert axis.get_window_extent().height > 100  # the lines of the legend do not take the room of the plot


def test_lines_differ_in_more_than_colour():
    looks = [line_style(number) for number in range(12)]
    assert len({look["color"] for look in looks[:6]}) == 6
    assert len({(str(look["linestyle"]), look["marker"], look["color"]) for look in looks}) == 12


def test_the_share_of_uncertain_activations():
    assert share_uncertain(np.full(BINS, 1 / BINS)) == pytest.approx(0.55)
    assert share_uncertain(np.eye(BINS)[0]) == 0 and share_uncertain(np.eye(BINS)[BINS // 2]) == pytest.approx(1)


def test_the_report_names_the_same_share():
    latent = Latent(histogram=np.full(BINS, 1 / BINS))
    panel = histogram_panel([SimpleNamespace(label="sdr")], [latent])
    assert panel["between"] == "Between 0.3 and 0.85: sdr 55.0\u00a0%." and panel["between"] in str(panel["chart"])
