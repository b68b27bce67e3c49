"""Segmenting images: tiles against the whole, every kind of picture, names that do not collide, and what is refused."""

from __future__ import annotations

import csv
import json
import os
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torch import nn

from sdrseg.colours import colour_table
from sdrseg.datasets.shapes import Shapes
from sdrseg.errors import DataError, SdrsegError, UsageError
from sdrseg.predict import ClassInfo, Model, load
from sdrseg.predict.images import find_inputs, pixels_of, read_pixels
from sdrseg.tiles import logit_strips, tile_axis

SCENE = Shapes(size=64, train=1, val=2).image("val-00000")


# --- tiles ------------------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(st.integers(1, 700), st.integers(32, 200), st.integers(0, 100), st.sampled_from([1, 8, 16, 32]))
def test_tiles_cover_everything_with_enough_in_common_and_weights_sum_to_one(length, tile, share, multiple):
    overlap = min(share, tile // 2)
    axis = tile_axis(length, tile, overlap, multiple)
    assert axis.canvas >= max(length, 32) and axis.canvas % multiple == 0 and axis.canvas - max(length, 32) < multiple
    assert axis.tile == min(-(-tile // multiple) * multiple, axis.canvas)
    assert axis.starts[0] == 0 and axis.starts[-1] + axis.tile == axis.canvas
    assert all(s % multiple == 0 for s in axis.starts)
    gaps = np.diff(axis.starts)
    assert (gaps > 0).all()
    assert (axis.tile - gaps >= min(overlap, axis.tile - multiple)).all()
    total = np.zeros(axis.canvas)
    for start, row in zip(axis.starts, axis.weights().double().numpy(), strict=True):
        assert row.min() >= 0
        total[start : start + axis.tile] += row
    np.testing.assert_allclose(total, 1, atol=1e-6)


def test_the_outer_quarter_of_an_overlap_counts_nothing():
    axis = tile_axis(112, 64, 16, 8)
    assert axis.starts == (0, 48)
    first, second = axis.weights().numpy()
    assert (first[:52] == 1).all() and (first[60:] == 0).all() and (second[:4] == 0).all() and (second[12:] == 1).all()
    assert (np.diff(first[51:61]) <= 0).all() and 0 < first[55] < 1


class Local(nn.Module):
    """Stride 2 and back, looking 4 pixels far, with a shape of its own for each channel."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.down = nn.Conv2d(3, 6, 3, stride=2, padding=1)
        self.look = nn.Conv2d(6, 5, 3, padding=1)
        self.up = nn.ConvTranspose2d(5, 4, 2, stride=2)

    @torch.no_grad()
    def forward(self, tiles):
        return self.up(self.look(self.down(tiles.float() / 255).tanh()).tanh())


@pytest.mark.parametrize(
    ("height", "width", "tile", "overlap", "batch"),
    [(100, 130, 64, 24, 8), (64, 300, 64, 32, 3), (129, 65, 40, 16, 1), (96, 96, 96, 24, 1), (70, 71, 200, 24, 1)],
)
def test_tiles_of_a_local_network_give_the_logits_of_the_whole_image(height, width, tile, overlap, batch):
    network = Local()
    image = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (3, height, width), dtype=np.uint8))
    options = {"tile": tile, "overlap": overlap, "multiple": 2, "batch_size": batch}
    strips = list(logit_strips(image, network, **options))
    assert [top for top, _ in strips] == list(np.cumsum([0, *(s.shape[1] for _, s in strips)])[:-1])
    tiled = torch.cat([strip for _, strip in strips], 1)
    whole = torch.cat([s for _, s in logit_strips(image, network, **{**options, "tile": 512, "overlap": 0})], 1)
    assert tiled.shape == whole.shape == (4, height, width)
    assert (tiled - whole).abs().max() < 1e-5


def test_tiles_are_needed_for_that():
    """Without an overlap the answers differ: the test above can fail."""
    image = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (3, 64, 128), dtype=np.uint8))
    tiled = torch.cat([s for _, s in logit_strips(image, Local(), tile=64, overlap=0, multiple=2, batch_size=2)], 1)
    whole = torch.cat([s for _, s in logit_strips(image, Local(), tile=512, overlap=0, multiple=2, batch_size=2)], 1)
    assert (tiled - whole).abs().max() > 1e-3


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 150), st.integers(1, 150))
def test_the_mask_has_the_size_of_the_image_and_pixels_their_place(height, width):
    """A network that says what the pixel is: any shift or wrong crop would show."""
    pixels = np.random.default_rng(height * 200 + width).choice([0, 100, 200], (height, width)).astype(np.uint8)
    levels = torch.tensor([0.0, 100, 200])[:, None, None]
    ids = (0, 7, 254)
    model = Model(
        tuple(ClassInfo(i, str(i), (0, 0, 0), 0) for i in ids),
        lambda tiles: -(tiles[:, :1].float() - levels).abs(),
        multiple=16,
        crop=64,
        batch_size=3,
        facts={},
    )
    prediction = model.predict(pixels, tile=64)
    np.testing.assert_array_equal(prediction.mask, np.array(ids, np.uint8)[pixels // 100])
    assert {c.name: prediction.areas[c.name].pixels for c in model.classes} == {
        str(i): int((pixels == 100 * n).sum()) for n, i in enumerate(ids)
    }


def test_a_small_image_is_answered_as_in_evaluation(trained):
    """The mask of a run's own images is the argmax of the network, channels replaced by ids."""
    from sdrseg.datasets.augment import normalise

    model = load(trained)
    image = torch.from_numpy(Shapes(size=32, train=1, val=1).image("val-00000").copy()).movedim(-1, 0)
    with torch.no_grad():
        logits = model.network(normalise(image[None])).logits[0].double().numpy()
    power = np.exp(logits - logits.max(0))
    prediction = model.predict(image)
    np.testing.assert_array_equal(prediction.mask, np.array([c.id for c in model.classes])[logits.argmax(0)])
    np.testing.assert_allclose(prediction.probabilities, power / power.sum(0), atol=1e-5)
    asked = model.predict(image, probabilities=True)
    np.testing.assert_allclose(asked.probabilities, prediction.probabilities, atol=1e-6)


def test_the_masks_of_a_run_score_what_the_run_scored(trained):
    """The confusion matrix of metrics.json, counted again from predictions by hand."""
    source = Shapes(size=32, train=60, val=12)
    for step in (0, 2):
        model = load(trained, step=step)
        channel = {c.id: n for n, c in enumerate(model.classes)}
        matrix = np.zeros((len(channel), len(channel)), int)
        scenario = json.loads((trained / "scenario.json").read_text())["steps"][step]
        for id in scenario["test_ids"]:
            truth, mask = source.mask(id), model.predict(source.image(id)).mask
            for t, m in zip(truth.ravel().tolist(), mask.ravel().tolist(), strict=True):
                if t in channel:
                    matrix[channel[t], channel[m]] += 1
        measured = json.loads((trained / f"steps/{step}/metrics.json").read_text())["confusion"]
        assert matrix.tolist() == measured


# --- pictures ---------------------------------------------------------------------------------------------------------

GREY = np.asarray(Image.fromarray(SCENE).convert("L"))


def three(grey: np.ndarray) -> np.ndarray:
    return np.repeat(grey[:, :, None], 3, axis=2)


def save(name: str, **options) -> Path:
    """The scene as another kind of picture."""
    picture, path = Image.fromarray(SCENE), Path(name)
    kind = path.stem
    if kind == "deep":
        picture = Image.fromarray(GREY.astype(np.uint16) * 257)
        if path.suffix == ".pgm":
            path.write_bytes(b"P5 64 64 65535\n" + (GREY.astype(">u2") * 257).tobytes())
            return path
    elif kind != "RGB":
        picture = picture.convert(kind)
    picture.save(path, **options)
    return path


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("RGB.png", SCENE),
        ("RGB.tif", SCENE),
        ("RGB.webp", None),
        ("RGB.avif", None),
        ("L.png", three(GREY)),
        ("LA.png", three(GREY)),
        ("RGBA.png", SCENE),
        ("P.png", None),
        ("CMYK.tif", None),
        ("1.png", three(np.asarray(Image.fromarray(SCENE).convert("1")).astype(np.uint8) * 255)),
        ("deep.png", three(GREY)),
        ("deep.tif", three(GREY)),
        ("deep.pgm", three(GREY)),
    ],
)
def test_every_kind_of_picture(name, expected, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pixels, note = read_pixels(save(name))
    assert pixels.shape == SCENE.shape and pixels.dtype == np.uint8 and note == ""
    if expected is not None:
        np.testing.assert_array_equal(pixels, expected)
    else:  # palettes, CMYK and lossy files: close
        assert abs(pixels.astype(int) - SCENE).mean() < 20


def test_floating_point_pixels_from_0_to_1_are_not_taken_for_black(tmp_path):
    Image.fromarray(GREY.astype(np.float32)).save(tmp_path / "to255.tif")
    np.testing.assert_array_equal(read_pixels(tmp_path / "to255.tif")[0], three(GREY))
    Image.fromarray(GREY.astype(np.float32) / 255).save(tmp_path / "to1.tif")
    with pytest.raises(DataError, match="floating-point pixels from 0 to 1"):
        read_pixels(tmp_path / "to1.tif")


def test_the_first_frame_of_an_animation(tmp_path):
    frames = [Image.fromarray(SCENE), Image.fromarray(255 - SCENE)]
    frames[0].save(tmp_path / "a.webp", save_all=True, append_images=frames[1:], lossless=True)
    pixels, note = read_pixels(tmp_path / "a.webp")
    np.testing.assert_array_equal(pixels, SCENE)
    assert note == "2 frames; the first is used"


@pytest.mark.parametrize("orientation", range(1, 9))
def test_pictures_are_turned_upright(orientation, tmp_path):
    turns = {
        1: lambda a: a,
        2: np.fliplr,
        3: lambda a: np.rot90(a, 2),
        4: np.flipud,
        5: lambda a: a.transpose(1, 0, 2),
        6: lambda a: np.rot90(a, -1),
        7: lambda a: np.rot90(a, 2).transpose(1, 0, 2),
        8: np.rot90,
    }
    tall = SCENE[:, :40]
    exif = Image.Exif()
    exif[0x0112] = orientation
    Image.fromarray(tall).save(tmp_path / "a.png", exif=exif)
    np.testing.assert_array_equal(read_pixels(tmp_path / "a.png")[0], turns[orientation](tall))
    with Image.open(tmp_path / "a.png") as picture:
        np.testing.assert_array_equal(pixels_of(picture), turns[orientation](tall))


def test_objects_that_are_not_images_in_python():
    for wrong in (SCENE.astype(float), SCENE[..., :2], np.zeros((0, 3), np.uint8), torch.zeros(3, 4, 4), None):
        with pytest.raises(DataError, match="uint8"):
            pixels_of(wrong)


def test_one_path_is_not_a_list_of_images(trained):
    model = load(trained, device="cpu")
    for path in ("a.jpg", Path("a.jpg")):
        with pytest.raises(UsageError, match=r"a\.jpg: one path\. `predict` takes one image"):
            list(model.predict_each(path))


# --- which images, and names ------------------------------------------------------------------------------------------


def touch(*names: str) -> None:
    for name in names:
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_bytes(b"")


@pytest.mark.parametrize(
    ("files", "words", "names"),
    [
        (["d/a.jpg", "d/b.PNG", "d/e/c.tif", "d/.h.png", "d/x.txt"], ["d"], ["a", "b", "e/c"]),
        (["a.jpg", "a.png", "b.png"], ["a.jpg", "a.png", "b.png"], ["a.jpg", "a.png", "b"]),
        (["x/a.jpg", "y/a.jpg"], ["x/a.jpg", "y/a.jpg"], ["x/a.jpg", "y/a.jpg"]),
        (["x/a.jpg", "y/a.jpg"], ["x", "y"], ["x/a.jpg", "y/a.jpg"]),
        (["d/x/a.jpg", "d/y/a.jpg"], ["d"], ["x/a", "y/a"]),
        (["a.jpg", "a.png", "a.jpg.png"], ["*"], None),
        (["x/a.txt"], ["x/a.txt"], ["a"]),
        (["x/a.txt", "x/b.jpg"], ["x/*"], ["a", "b"]),
        (["x/y/a.png", "x/b.png"], ["x/**/*.png"], ["b", "a"]),
        (["a[1].png", "a1.png"], ["a[1].png"], ["a[1]"]),
        (["d/a.png"], ["d", "d/a.png", "./d/../d/a.png"], ["a"]),
        (["d/A.png", "e/a.png"], ["d/A.png", "e/a.png"], ["d/A.png", "e/a.png"]),
    ],
)
def test_inputs_and_their_names(files, words, names, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    touch(*files)
    inputs = find_inputs(words)
    assert len({i.name.casefold() for i in inputs}) == len(inputs) == len({i.path for i in inputs})
    if names is not None:
        assert [i.name for i in inputs] == names


def test_names_that_are_too_long_are_cut(sdrseg, trained):
    Path("in").mkdir()
    names = [letter + "x" * 248 for letter in "ab"] + ["x" * 248 + letter for letter in "ab"]
    for name in names:
        Image.fromarray(SCENE).save(f"in/{name}.png")
    code, out, _ = sdrseg("predict", trained, "in", "--out", "o", "--json")
    written = [Path(entry["files"]["masks"]) for entry in json.loads(out)["images"]]
    assert code == 0 and len(set(written)) == 4 and all(path.is_file() for path in written)


def test_a_folder_in_place_of_a_picture(trained, tmp_path):
    with pytest.raises(SdrsegError, match=r"photos: a folder, not a picture\.$"):
        (tmp_path / "photos").mkdir()
        load(trained, device="cpu").predict(tmp_path / "photos")


def test_inputs_that_are_not_there(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    touch("d/x.txt", "out/masks/a.png")
    for word, message in (("no.png", "no such file"), ("*.png", "no file matches"), ("d", "no image in this folder")):
        with pytest.raises(SdrsegError, match=message):
            find_inputs([word])
    with pytest.raises(SdrsegError, match="no image in this folder"):
        find_inputs(["."], leave_out=Path("out"))
    touch("d/a.png", "e/f/x.txt")
    for images, out in (("d", "d"), ("d", "d/../d"), (str(tmp_path / "d"), "."), ("out/masks", "out")):
        with pytest.raises(UsageError, match=f"--out {out}: the folder of the images. Choose another one."):
            find_inputs([images], leave_out=Path(out))
    with pytest.raises(SdrsegError, match="no image in this folder"):
        find_inputs(["e"], leave_out=Path("e"))


def test_colours_differ_and_stay():
    colours = colour_table()
    assert colours.shape == (256, 3) and len({tuple(c) for c in colours.tolist()}) == 256
    assert colours[0].tolist() == [0, 0, 0] and colours[1].tolist() == [230, 159, 0]
    apart = np.abs(colours[:151, None].astype(int) - colours[None, :151]).max(-1) + 999 * np.eye(151, dtype=int)
    assert apart.min() >= 24


# --- the command ------------------------------------------------------------------------------------------------------


def test_everything_that_is_written(sdrseg, trained):
    Path("in/sub").mkdir(parents=True)
    big = Shapes(size=90, train=1, val=1).image("val-00000")[:70]
    Image.fromarray(big).save("in/big.png")
    Image.fromarray(SCENE).save("in/sub/a.png")
    Image.fromarray(SCENE[:1, :1]).save("in/tiny.png")
    code, out, err = sdrseg(
        "predict", trained, "in", "--out", "o", "--overlays", "--probabilities", "--json", "--tile", 48, "--overlap", 16
    )
    assert (code, err) == (0, "")
    told = json.loads(out)
    assert told == json.loads(Path("o/areas.json").read_text())
    meta = json.loads((trained / "steps/2/meta.json").read_text())
    assert told["model"]["step"] == 2 and told["model"]["model_sha256"] == meta["files"]["model"]["sha256"]
    assert [(c["id"], c["name"], c["step"]) for c in told["classes"]] == [
        (c["id"], c["name"], c["step"]) for c in meta["classes"]
    ]
    written = sorted(str(p) for p in Path("o").rglob("*") if p.is_file())
    kinds = {"masks": "png", "overlays": "png", "probabilities": "npz"}
    names = [f"o/{k}/{n}.{s}" for k, s in kinds.items() for n in ("big", "sub/a", "tiny")]
    assert written == sorted(["o/areas.csv", "o/areas.json", *names])
    model = load(trained)
    expected = model.predict("in/big.png", tile=48, overlap=16)
    with Image.open("o/masks/big.png") as picture:
        assert picture.mode == "P"
        np.testing.assert_array_equal(np.asarray(picture), expected.mask)
        assert np.array(picture.getpalette(), np.uint8).reshape(-1, 3).tolist() == colour_table().tolist()
    stored = np.load("o/probabilities/big.npz")
    assert stored["probabilities"].dtype == np.float16 and stored["ids"].tolist() == [c.id for c in model.classes]
    assert stored["names"].tolist() == [c.name for c in model.classes]
    np.testing.assert_allclose(stored["probabilities"].astype(float), expected.probabilities, atol=1e-3)
    overlay = np.asarray(Image.open("o/overlays/big.png")).astype(int)[:70]  # the legend is below
    mixed = (big.astype(int) + colour_table()[expected.mask]) / 2
    wanted = np.where(expected.mask[..., None] == 0, big, mixed)
    assert abs(overlay - wanted).max() <= 1
    rows = list(csv.DictReader(Path("o/areas.csv").open()))
    assert len(rows) == 3 * len(model.classes)
    for row in rows[: len(model.classes)]:
        pixels = int((expected.mask == int(row["id"])).sum())
        assert row["image"] == "in/big.png" and int(row["pixels"]) == pixels
        assert float(row["share"]) == pytest.approx(pixels / (70 * 90), abs=1e-6)


def test_unreadable_files_are_named_and_the_others_processed(sdrseg, trained):
    Path("in").mkdir()
    Image.fromarray(SCENE).save("in/good.png")
    Image.fromarray(SCENE).save("in/whole.jpg")
    content = Path("in/whole.jpg").read_bytes()
    Path("in/cut.jpg").write_bytes(content[: len(content) // 2])
    Path("in/text.png").write_text("no picture")
    Image.new("1", (15000, 15000)).save("in/bomb.png")
    Path("in/link.png").symlink_to("nowhere")
    code, out, err = sdrseg("predict", trained, "in", "--out", "o")
    assert code == 1 and "2 images, step 2 of shapes:8-1@disjoint" in out
    assert "4 of 6 images could not be read" in err
    reasons = {"cut.jpg": "truncated", "text.png": "identify", "bomb.png": "--max-pixels", "link.png": "no such file"}
    for name, reason in reasons.items():
        assert f"in/{name}" in err and reason in err
    assert sorted(p.name for p in Path("o/masks").iterdir()) == ["good.png", "whole.png"]
    assert len(json.loads(Path("o/areas.json").read_text())["failed"]) == 4


def test_nothing_is_created_without_a_readable_image(sdrseg, trained):
    Path("notes.txt").write_text("no picture")
    code, out, err = sdrseg("predict", trained, "notes.txt", "--out", "o")
    assert code == 1 and "1 of 1 image could not be read" in err and not out and not Path("o").exists()
    code, out, _ = sdrseg("predict", trained, "notes.txt", "--out", "o", "--json")
    assert code == 1 and len(json.loads(out)["failed"]) == 1 and not Path("o").exists()


def test_more_pixels_can_be_allowed(sdrseg, trained, monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    Image.fromarray(SCENE).save("a.png")
    assert sdrseg("predict", trained, "a.png", "--out", "o")[0] == 1
    assert sdrseg("predict", trained, "a.png", "--out", "o2", "--max-pixels", 4096)[0] == 0


def test_nothing_is_overwritten_unless_allowed(sdrseg, trained):
    Image.fromarray(SCENE).save("a.png")
    assert sdrseg("predict", trained, "a.png", "--out", "o")[0] == 0
    Path("o/masks/a.png").write_bytes(b"mine")
    code, _, err = sdrseg("predict", trained, "a.png", "--out", "o")
    assert code == 1 and "o/areas.csv and 2 more: already exists" in err and "--overwrite" in err
    assert Path("o/masks/a.png").read_bytes() == b"mine"
    assert sdrseg("predict", trained, "a.png", "--out", "o", "--overwrite")[0] == 0
    assert Image.open("o/masks/a.png").size == (64, 64)
    code, _, err = sdrseg("predict", trained, "o/masks/a.png", "--out", "o", "--overwrite")
    assert code == 1 and "is one of the images" in err


def test_steps_by_option_and_by_folder(sdrseg, trained):
    Image.fromarray(SCENE).save("a.png")
    classes = {}
    for words in ([trained, "--step", 0], [trained / "steps/0"], [trained]):
        code, out, _ = sdrseg("predict", *words, "a.png", "--out", f"o{len(classes)}", "--json")
        assert code == 0
        classes[str(words)] = [c["id"] for c in json.loads(out)["classes"]]
    assert list(classes.values()) == [list(range(9)), list(range(9)), list(range(11))]
    shutil.copytree(trained / "steps/1", "alone")
    assert len(load("alone").classes) == 10 and load("alone").crop == 512


def test_models_that_are_none(sdrseg, trained):
    Image.fromarray(SCENE).save("a.png")
    shutil.copytree(trained, "run")
    touch("empty/x", "young/config.json", "weights.pt", "text.onnx", "run/steps/7/x")
    Path("half").mkdir()
    shutil.copy(trained / "config.json", "half/config.json")
    content = bytearray(Path("run/steps/2/model.safetensors").read_bytes())
    content[-5] ^= 1
    Path("run/steps/2/model.safetensors").write_bytes(content)
    for words, message in (
        (["nowhere"], "nowhere: no such run"),
        (["empty"], "not a run (there is no config"),
        (["half"], "no step of this run is finished"),
        (["run"], "run/steps/2/model.safetensors: not the file that was written"),
        (["run", "--step", 7], "step 7 is not finished. Finished steps: 0, 1, 2"),
        (["run/steps/7"], "this step is not finished"),
        (["run/steps/1", "--step", 0], "is already a step"),
        (["weights.pt"], "not a model"),
        (["text.onnx"], "not a usable ONNX file"),
        (["run", "--step", 1, "--device", "tpu"], "device tpu: cannot be used"),
    ):
        code, out, err = sdrseg("predict", *words, "a.png", "--out", "o")
        assert (code, out) == (1, "") and message in err and "Traceback" not in err, err
    assert not Path("o").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--tile", 8], "too small"),
        (["--tile", 64, "--overlap", 40], "use 0 to 32"),
        (["--overlap", -1], "use 0 to"),
        (["--batch-size", 0], "at least 1"),
        (["--max-pixels", 0], "at least 1"),
    ],
)
def test_wrong_numbers_are_refused_before_any_work(sdrseg, trained, words, message):
    Image.fromarray(SCENE).save("a.png")
    code, _, err = sdrseg("predict", trained, "a.png", "--out", "o", *words)
    assert code == 2 and message in err and not Path("o").exists()


@pytest.mark.skipif(sys.platform != "linux", reason="names of bytes")
def test_names_that_are_not_utf8(sdrseg, trained):
    Path("in").mkdir()
    Image.fromarray(SCENE).save(os.fsencode("in") + b"/caf\xe9.png")
    code, out, _ = sdrseg("predict", trained, "in", "--out", "o", "--json")
    assert code == 0 and json.loads(out)["images"][0]["image"] == "in/caf\\udce9.png"
    assert Path(os.fsdecode(b"o/masks/caf\xe9.png")).is_file()


def test_images_that_fit_into_a_tile_go_through_the_network_together(trained, monkeypatch):
    model = load(trained)
    sizes = [(40, 48), (40, 48), (33, 48), (40, 48), (70, 90), (40, 41)]  # the third and the last pad to the same
    images = [np.resize(SCENE[::-1], (*size, 3)) for size in sizes]
    alone = [model.predict(image, tile=48, probabilities=True) for image in images]
    seen: list[tuple[int, ...]] = []
    inner = model._forward
    monkeypatch.setattr(model, "_forward", lambda tiles: (seen.append(tuple(tiles.shape)), inner(tiles))[1])
    together = model.predict_many(images, tile=48, batch_size=4, probabilities=True)
    assert seen[0][0] == 4 and sum(shape[0] for shape in seen[:2]) == 5
    for one, other in zip(alone, together, strict=True):
        np.testing.assert_allclose(one.probabilities, other.probabilities, atol=1e-5)
        assert (one.mask != other.mask).mean() < 1e-3


def test_broken_images_between_good_ones_are_named_and_the_rest_is_written(sdrseg, trained):
    Path("in").mkdir()
    for name in "abcde":
        Image.fromarray(SCENE).save(f"in/{name}.png")
    Path("in/c.png").write_bytes(b"no picture")
    code, out, _ = sdrseg("predict", trained, "in", "--out", "o", "--json", "--batch-size", 3)
    told = json.loads(out)
    assert code == 1 and [Path(i["image"]).name for i in told["images"]] == ["a.png", "b.png", "d.png", "e.png"]
    assert [Path(f["image"]).name for f in told["failed"]] == ["c.png"]
    masks = [np.asarray(Image.open(i["files"]["masks"])) for i in told["images"]]
    assert all(np.array_equal(mask, masks[0]) for mask in masks)
