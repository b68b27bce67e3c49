"""The examples of the documentation, run as they are printed."""

from __future__ import annotations

import ast
import fnmatch
import importlib
import json
import re
import runpy
import shlex
import shutil
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path
from statistics import mean

import numpy as np
import pytest
import torch
import yaml
from PIL import Image

from runs import Quiet
from sdrseg.cli import main
from sdrseg.config import parse_settings, saved_config
from sdrseg.engine.checkpoint import load_tensors
from sdrseg.engine.run import train
from sdrseg.methods import METHODS
from sdrseg.study.cell import KEYS
from sdrseg.study.statistics import spread

from conftest import forget_own_sources, own_sources

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
TINY = ["shapes.train=40", "shapes.val=8", "shapes.size=32", "data.crop=32", "train.epochs=1", "train.batch_size=4"]


def blocks(name: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", (DOCS / name).read_text(), re.MULTILINE | re.DOTALL)


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = dict(METHODS)
    yield
    METHODS.clear()
    METHODS.update(before)
    forget_own_sources()


def program(monkeypatch, *words: str) -> None:
    monkeypatch.setattr(sys, "argv", ["sdrseg", *words])
    with pytest.raises(SystemExit) as end:
        main()
    assert not end.value.code


def test_the_python_examples():
    code = blocks("python-api.md", "python")
    assert len(code) == 8
    exec(compile("\n".join(code), "python-api.md", "exec"), {"__name__": "example"})
    assert Image.open("mask.png").size == (200, 120) and Path("overlay.png").is_file()


def test_the_example_of_a_method(monkeypatch):
    code, _ = blocks("add-a-method.md", "python")
    assert len(code.splitlines()) < 60
    Path("directions.py").write_text(code)
    (commands,) = blocks("add-a-method.md", "sh")
    settings = [word for value in [*TINY, "run.log_every=1"] for word in ("--set", value)]
    for command in commands.splitlines():
        program(monkeypatch, *shlex.split(command)[1:], *settings)
    for name, term in (("directions", True), ("mib", False)):
        lines = [json.loads(line) for line in Path(f"runs/{name}/log.jsonl").read_text().splitlines()]
        seen = [line["losses"] for line in lines if "losses" in line and line["step"] == 1]
        assert seen and all(("direction" in losses) == term for losses in seen)
    assert seen[-1].keys() >= {"ce", "kd"}
    same = [Path(f"runs/{name}/steps/0/model.safetensors").read_bytes() for name in ("directions", "mib")]
    assert same[0] == same[1]
    assert METHODS["directions"](saved_config({"directions": {"weight": 5.0}}, "")).objective() == (
        "CE + 5·(1 − cos(F, F_old))"
    )


def test_the_example_with_a_survey():
    _, code = blocks("add-a-method.md", "python")
    Path("imprint.py").write_text(code)
    settings = parse_settings([*TINY, "imprint.length=2"])
    train("shapes:8-2@disjoint", "imprint.py", "run", settings=settings, bases="bases", display=Quiet())
    old, new = (load_tensors(Path(f"run/steps/{k}/model.safetensors"))["classifier.weight"] for k in (0, 1))
    assert torch.equal(new[: len(old)], old)
    lengths = new[len(old) :, :, 0, 0].norm(dim=1)
    assert len(lengths) == 2 and ((lengths - 2).abs() < 0.3).all()


def test_the_study_from_a_file_to_latex(monkeypatch, capfd):
    (file,) = blocks("experiments.md", "toml")
    for large, small in (("1200", "80"), ("200", "8"), ("64", "32"), ("10", "1\nbatch_size = 4")):
        assert file.count(f"= {large}\n") == 1
        file = file.replace(f"= {large}\n", f"= {small}\n")
    Path("study.toml").write_text(file + '[data]\ncrop = 32\n[net]\ndecoder = "deeplabv3"\n')
    tiny = [word for value in TINY for word in ("--set", value.replace("=40", "=150"))]
    said = {}
    for command in "".join(blocks("experiments.md", "sh")).splitlines():
        first, *words = [name for word in shlex.split(command) for name in _as_a_shell_does(word)]
        assert first == "sdrseg"
        program(monkeypatch, *words, *(tiny if words[0] == "tune" else []))
        said[command] = capfd.readouterr().out
    assert "9 experiments" in said["sdrseg run study.toml --dry-run"]
    assert "6 finished now, 3 finished before" in said["sdrseg run study.toml"]
    assert "95 % interval" in said["sdrseg compare study/results --reference mib"]
    assert r"\toprule" in Path("table.tex").read_text()
    for name in ("steps", "classes", "pictures", "course", "activations", "features"):
        assert all(Path(f"{name}.{kind}").stat().st_size > 1000 for kind in ("svg", "pdf", "png"))
    assert json.loads(Path("tuned/tune.json").read_text())["chosen"].keys() == {"step.1.optim.lr", "step.1.kd.weight"}
    assert "Missing: 10 runs" in said["sdrseg tables ablation"]
    listed = (DOCS / "experiments.md").read_text().partition("## The file of a result")[2]
    first_column = " ".join(re.findall(r"^\| (`.*?) \|", listed, re.MULTILINE))
    assert set(re.findall(r"`(\w+)`", first_column)) == set(KEYS)


def _as_a_shell_does(word: str) -> list[str]:
    return sorted(map(str, Path().glob(word))) if "*" in word else [word]


def test_the_example_of_a_data_set(monkeypatch, capfd):
    code, trial = blocks("add-a-data-set.md", "python")
    assert len(code.splitlines()) < 60
    Path("layers.py").write_text(code)
    exec(compile(trial.replace("train=900, val=100", "train=60, val=12"), "add-a-data-set.md", "exec"), {})
    (commands,) = blocks("add-a-data-set.md", "sh")
    tiny = ["--set", "train.epochs=1", "--set", "train.batch_size=4", "--set", "net.decoder=deeplabv3"]
    said = []
    for command in commands.splitlines():
        first, *words = shlex.split(command)
        assert first == "sdrseg"
        program(monkeypatch, *words, *(tiny if words[0] == "train" else []), "--json")
        assert bool(own_sources()) == (words[0] != "predict")  # which does not need the file
        forget_own_sources()  # the next command is another process
        said.append(json.loads(capfd.readouterr().out))
    data, trained, scores, predicted = said
    assert data["problems"] == [] and [step["new"] for step in data["steps"]][1] == ["triangle"]
    assert data["config"]["net"]["encoder"] == "toy16"
    assert trained["classes"] == ["background", "disc", "square", "triangle"]
    assert len(scores) == 2 and all(score["same"] for score in scores)
    assert len(predicted["images"]) == len(list(Path("layers/val/images").iterdir()))


def test_the_example_of_onnx(exported):
    shutil.copy(exported, "model.onnx")
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (41, 57, 3), dtype=np.uint8)).save("photo.jpg")
    (code,) = blocks("predict-and-export.md", "python")
    names: dict = {}
    exec(compile(code, "predict-and-export.md", "exec"), names)
    assert names["mask"].shape == (1, 41, 57) and names["classes"][1]["name"] == "disc"


@pytest.mark.parametrize(
    ("page", "script"),
    [
        ("results.md", "results_tables"),
        ("results.md", "shapes_tables"),
        ("settings.md", "settings_tables"),
        ("performance.md", "speed_tables"),
        ("laps.md", "laps_tables"),
        ("extend.md", "extend_tables"),
    ],
)
def test_the_tables_are_those_that_the_scripts_print(page, script, monkeypatch, capsys):
    """If this fails: python scripts/SCRIPT.py --write"""
    monkeypatch.syspath_prepend(ROOT / "scripts")
    monkeypatch.setattr(sys, "argv", [script])
    runpy.run_path(str(ROOT / "scripts" / f"{script}.py"), run_name="__main__")
    printed = capsys.readouterr().out
    assert printed.count("| ") > 100
    assert importlib.import_module("pages").parts(page, f"{script}.py")[1] == printed


def test_the_runs_that_diverge_are_those_of_the_results():
    page = (DOCS / "own-data.md").read_text()
    found = {f.stem: json.loads(f.read_text())["rows"] for f in (ROOT / "results/stability").glob("*.json")}
    table = []
    for name, crops in (("long", (64, 128)), ("photographs-long", (128,))):
        del found[name]  # with the settings of own data, of which the page has no numbers
        ends = {(r["crop"], r["old"], r["method"]): r["problem"] for r in found.pop(f"{name}-without")}
        for crop in crops:
            cells = (ends[crop, old, method] for old in (2, 7) for method in ("ilt", "sdr"))
            table.append([re.sub(r"step 1, iteration (\d+): .* not finite.*", r"\1", cell) or "–" for cell in cells])
    lines = page.split("| Data, iterations of each step |")[1].split("\n\n")[0].splitlines()[2:]
    assert [[cell.strip() for cell in line.split("|")[3:-1]] for line in lines] == table
    short = [row for rows in found.values() for row in rows]
    diverged = sum(bool(row["problem"]) for row in short)
    assert f"{diverged or 'none'} of {len(short)} diverged" in page


SCENARIOS = ("19-1", "15-5", "15-1")
EXTENDED = {"fine-tuning": ("default", "ft"), "MiB": ("default", "mib"), "SDR": ("default", "sdr")}


def test_the_readme_quotes_the_files_of_results(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "scripts")
    results = importlib.import_module("results_tables")
    read_results = results.read_results
    readme = re.sub(r"\s+", " ", (ROOT / "README.md").read_text())
    named = {
        "fine-tuning": "ft",
        "LwF": "lwf",
        "MiB": "mib",
        "SDR + MiB's initialisation": "sdr+mib",
        "SDR": "sdr",
    }
    for name, method in {**named, "[LAPS](docs/laps.md), ours": "laps"}.items():
        scores = [
            spread([cell[kind] for cell in results.seeds_of(method, scenario)])
            for scenario in SCENARIOS
            for kind in ("old", "new", "all")
        ]
        assert f"| {name} | {' | '.join(score.text() for score in scores)} |" in readme
    long = [c for c in read_results() if (c["scenario"], c["method"], c["epochs"]) == ("15-1", "laps", [30, 30])]
    old, new, all = (mean(cell[kind] for cell in long) for kind in ("old", "new", "all"))
    assert (
        f"reaches {old:.1f}, {new:.1f} and {all:.1f} on 15-1 (mean of {['one', 'two', 'three'][len(long) - 1]} seeds)"
        in readme
    )
    for name, (variant, method) in {**EXTENDED, "LAPS, the default": ("wide16", "laps-softmax")}.items():
        one, two = (
            json.loads(file.read_text())
            for file in sorted((ROOT / "results/extend").glob(f"test-{variant}-*-50-{method}.json"))
        )
        assert [one["class"], two["class"]] == ["sheep", "train"]
        cells = " | ".join(f"{r['new_iou']:.1f}; {round(r['lost_elsewhere'], 1) + 0:.1f}" for r in (one, two))
        seconds = "–".join(dict.fromkeys(f"{s:.0f}" for s in sorted(r["seconds"] for r in (one, two))))
        assert f"| {name} | {cells} | {seconds} |" in readme
    rows = json.loads((ROOT / "results/speed/step-resnet101-batch8.json").read_text())["rows"]
    sdr, without = ({r["method"]: r for r in rows if r["speed"] == "compile"}[name] for name in ("sdr", "kd only"))
    time = f"takes {sdr['ms']:.1f} ms ({sdr['images_per_second']:.0f} images/s), {sdr['time_ratio']:.2f} times"
    assert time in readme
    assert f"take {100 * (1 - without['ms'] / sdr['ms']):.1f} % of it" in readme


def test_the_citation_agrees_with_the_package_and_the_paper():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert (citation["cff-version"], citation["type"], citation["title"]) == ("1.2.0", "software", "sdrseg")
    assert citation["license"] == "Apache-2.0" and citation["message"]
    assert "version" not in citation  # the number is in one place, sdrseg/__init__.py
    assert all(author.get("name") for author in citation["authors"])
    (paper,) = citation["references"]
    assert [author["family-names"] for author in paper["authors"]] == ["Michieli", "Zanuttigh"]
    assert (paper["type"], paper["year"]) == ("conference-paper", 2021)
    assert paper["title"].startswith("Continual Semantic Segmentation via Repulsion-Attraction of Sparse and Disent")


def imports(file: Path) -> set[str]:
    """The packages that a file imports, anywhere in it."""
    nodes = list(ast.walk(ast.parse(file.read_text(encoding="utf-8"))))
    modules = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    modules += [node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module]
    return {module.split(".")[0] for module in modules}


def test_every_import_is_declared():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    optional = [line for name, lines in extras.items() if name != "dev" for line in lines]
    places = {"src": optional} | dict.fromkeys(("tests", "benchmarks", "scripts"), extras["dev"])
    files = {place: list((ROOT / place).rglob("*.py")) for place in places}
    own = {"sdrseg", "triton", *(file.stem for found in files.values() for file in found)}  # triton comes with torch
    distributions = packages_distributions()
    for place, more in places.items():
        declared = {re.split("[><=]", line)[0] for line in [*project["dependencies"], *more]}
        for file in files[place]:
            for name in imports(file) - own - sys.stdlib_module_names:
                sources = {source.lower().replace("_", "-") for source in distributions.get(name, [name])}
                assert sources & declared, f"{file}: {name} is not declared in pyproject.toml"
    assert sum(map(len, files.values())) > 100


def test_pre_commit_checks_what_make_lint_checks():
    lint = re.search(r"^lint:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    made = {line.strip().removeprefix("$(BIN)/").removesuffix(" .") for line in lint[1].splitlines()}
    (local,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert {
        hook["entry"].removeprefix(".venv/bin/").removesuffix(" --force-exclude") for hook in local["hooks"]
    } == made
    jobs = yaml.safe_load((ROOT / ".github/workflows/test.yml").read_text())["jobs"]
    assert [step["run"] for step in jobs["test"]["steps"] if "run" in step] == ["make test"]


def test_every_test_and_file_that_the_documentation_names_is_there():
    texts = [*DOCS.glob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
    pages = {page: page.read_text(encoding="utf-8") for page in texts}
    defined = {
        name
        for file in (ROOT / "tests").glob("test_*.py")
        for name in re.findall(r"^def (test_\w+)", file.read_text(encoding="utf-8"), re.MULTILINE)
    }
    for page, text in pages.items():
        for name in re.findall(r"`(test_[\w*]+)`", text):
            assert fnmatch.filter(defined, name), f"{page.name}: no test {name}"
        for link in re.findall(r"\]\((?!https?:)([^)#]+)", text):
            assert (page.parent / link).exists(), f"{page.name}: no {link}"
        for file in re.findall(r"`((?:tests|benchmarks|scripts|results)/[\w./*-]+)`", text):
            assert list(ROOT.glob(file)), f"{page.name}: no {file}"
    assert len(pages) > 10 and len(defined) > 100
