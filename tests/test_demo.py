"""The demo: its table and sentence say what its runs measured, whatever that is."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from sdrseg import demo
from sdrseg.config import parse_settings
from sdrseg.demo import Outcome, require_free, verdict
from sdrseg.engine.run import train
from sdrseg.errors import UsageError


def outcomes(ft: tuple[float, float], sdr: tuple[float, float], before: float = 60.0) -> dict[str, Outcome]:
    made = {name: Outcome(before, old, new, 0.0) for name, (old, new) in {"ft": ft, "sdr": sdr}.items()}
    return {**made, "mib": Outcome(before, 50.0, 30.0, 0.0)}


@pytest.mark.parametrize(
    ("ft", "sdr", "words"),
    [
        (
            (5, 50),
            (55, 50),
            ["Fine-tuning forgets (", "SDR keeps far more", " and learns the new classes equally well"],
        ),
        ((5, 50), (55, 20), ["SDR keeps far more", ", but learns the new classes less well"]),
        ((5, 50), (9, 60), ["SDR keeps more", " and learns the new classes better"]),
        ((50, 50), (58, 50), ["forgets a little", "SDR keeps more"]),
        ((60, 50), (60.5, 50), ["even fine-tuning does not forget", "and SDR keeps no more"]),
        ((5, 50), (5, 20), ["Fine-tuning forgets (", "SDR keeps no more", "less well"]),
        ((30, 50), (10, 50), ["Fine-tuning forgets a little (", "but SDR keeps less"]),
    ],
)
def test_the_sentence_follows_from_the_numbers(ft, sdr, words):
    said = verdict(outcomes(ft, sdr))
    assert all(word in said for word in words), said
    assert said.endswith(".") and f"{sdr[0]:.1f}" in said and f"{ft[1]:.1f}" in said


def test_the_demo_trains_compares_and_writes_a_report(tmp_path, monkeypatch, capsys):
    tiny = ["shapes.size=32", "shapes.train=120", "shapes.val=24", "data.crop=32", "train.batch_size=4"]
    tiny += ["train.epochs=1", "net.decoder=deeplabv3", "data.workers=0"]

    def quick(spec, method, out, bases):
        return train(spec, method, out, settings=parse_settings(tiny), bases=bases)

    monkeypatch.setattr(demo, "train", quick)
    demo.run_demo(tmp_path, json=True)
    told = json.loads(capsys.readouterr().out)
    for method in ("ft", "mib", "sdr"):
        course = json.loads((tmp_path / method / "summary.json").read_text())["miou_by_step"]
        assert told["miou"][method]["before"] == pytest.approx(100 * course[0]["all"])
        assert told["miou"][method]["old"] == pytest.approx(100 * course[1]["old"])
        assert told["miou"][method]["new"] == pytest.approx(100 * course[1]["new"])
    assert told["verdict"] == verdict({m: Outcome(**v) for m, v in told["miou"].items()})
    page = (tmp_path / "report.html").read_text()
    assert all(f">{method}<" in page for method in ("ft", "mib", "sdr")) and told["notes"] == []
    assert len({(tmp_path / m / "steps/0/model.safetensors").read_bytes() for m in ("ft", "mib", "sdr")}) == 1
    demo.run_demo(tmp_path, json=False)  # nothing is trained again, and the report is replaced
    assert told["verdict"] in capsys.readouterr().out.replace("\n", "")
    (tmp_path / "report.html").unlink()
    monkeypatch.setattr(demo, "Processes", lambda: SimpleNamespace(rank=1))
    demo.run_demo(tmp_path, json=True)  # the second of several processes leaves it to the first
    assert capsys.readouterr().out == "" and not (tmp_path / "report.html").exists()


@pytest.mark.parametrize("rank", [0, 1])
def test_of_several_processes_the_first_alone_prints(rank, tmp_path, monkeypatch, capsys):
    """From the first heading on. A process knows its rank once there is a Fabric."""
    known = []
    means = {"all": 0.5, "old": 0.5, "new": 0.5}
    monkeypatch.setattr(demo, "make_fabric", lambda config: known.append(rank))
    monkeypatch.setattr(demo, "Processes", lambda: SimpleNamespace(rank=known[0] if known else 0))
    monkeypatch.setattr(demo, "train", lambda *_, **__: {"miou_by_step": [means, means]})
    monkeypatch.setattr(demo, "write_report", lambda runs, file, data: (file, []))
    demo.run_demo(tmp_path, json=False)
    out, err = capsys.readouterr()
    for heading in (f"{demo.SPEC}: a network learns", "fine-tuning (ft)", "MiB (mib)", "SDR (sdr)"):
        assert err.count(heading) == (rank == 0)
    assert out.count("Report with pictures: ") == (rank == 0)
    assert rank == 0 or out == err == ""


def test_only_a_new_or_empty_folder_or_a_demo_is_written_to(tmp_path):
    require_free(tmp_path / "new")
    require_free(tmp_path)
    for name in ("sdr", "bases", "report.html"):
        (tmp_path / name).mkdir()
    require_free(tmp_path)
    (tmp_path / "photos").mkdir()
    with pytest.raises(UsageError, match="contains photos and is not the folder of a demo"):
        require_free(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="file is a file"):
        require_free(tmp_path / "file")
