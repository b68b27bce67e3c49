"""LAPS: what its terms are, what stays as it was, and that runs can be interrupted."""

from __future__ import annotations

import json
from itertools import pairwise

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from runs import TINY, Quiet, content, run
from sdrseg.config import parse_settings
from sdrseg.datasets.augment import normalise
from sdrseg.engine.launch import make_fabric
from sdrseg.engine.passes import CompiledPass, Pass
from sdrseg.engine.rescore import score_again
from sdrseg.engine.run import train
from sdrseg.errors import UsageError
from sdrseg.methods import METHODS
from sdrseg.methods.memory import fit
from sdrseg.reporting import write_report

from methods_bench import CLASSES, N_OLD, begin, make_batch

DECODER = ("laps.encoder=0", "laps.ridge=1e-3")  # new rows see the decoder's output only
TRAINED = (*DECODER, "laps.fit_only=false", "laps.init=closed_form", "laps.memory=gaussian", "laps.positive=3")


def at_step_1(*settings: str, method: str = "laps", memory: bool = True, protocol: str = "disjoint"):
    """The beginning of step 1, with a memory of made-up features and the survey before training done."""
    stage = begin(method, protocol, settings=(*TRAINED, *settings))
    own, channels = stage.method.memory, stage.student.classifier.in_channels
    own.background = own.classes = None
    if memory:
        torch.manual_seed(0)
        parts = [fit(torch.rand(40, channels), c, 100.0 * c, "gaussian", 2, 2) for c in (1, 3)]
        own.classes = type(parts[0])(*(torch.cat(t) for t in zip(*parts, strict=True)))
        own.background = fit(torch.rand(50, channels), 0, 900.0, "gaussian", 2, 3)
    stage.look("before")
    stage.method.expect(None, 1)
    return stage


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def test_terms_of_a_later_step_equal_loops():
    stage = at_step_1("laps.versus=1", "laps.anchor=1")
    images = normalise(stage.batch.images)
    with torch.no_grad():
        said, seen = stage.student(images), stage.teacher(images)
        terms = stage.forward()
    z, t = said.logits.double().numpy(), seen.logits.double().numpy()
    labels, padding = stage.batch.labels.numpy(), stage.batch.padding.numpy()
    method, rows = stage.method, stage.student.classifier
    points = [(r.points.double().numpy(), r.owner.numpy(), m) for r, m in zip(method.replays, (900, 400), strict=True)]
    total = 1 + 1300 / method.seen.item()  # all data so far in units of this step's
    assert method.scale.item() == pytest.approx(total)

    ce = count = kd = kept = 0.0
    for b, y, x in np.ndindex(labels.shape):
        if labels[b, y, x] != 255:
            count += 1
            for c in range(N_OLD, CLASSES):
                p = sigmoid(z[b, c, y, x])
                ce -= 3 * np.log(p) if labels[b, y, x] == c else np.log(1 - p)
        if not padding[b, y, x]:
            kept += 1
            for c in range(1, N_OLD):  # background has no row
                q, p = sigmoid(t[b, c, y, x]), sigmoid(z[b, c, y, x])
                kd -= q * np.log(p) + (1 - q) * np.log(1 - p)
    assert terms["ce"].item() == pytest.approx(ce / count / total, rel=1e-5)
    assert terms["kd"].item() == pytest.approx(kd / kept, rel=1e-5)

    weight, bias = rows.weight.detach().double().numpy()[:, :, 0, 0], rows.bias.detach().double().numpy()
    replay = versus = 0.0
    for x, owner, stands_for in points:
        per_owner = {c: stands_for * (1 if c == 0 else c / 4) / (owner == c).sum() for c in set(owner)}
        if 0 in per_owner:  # clusters of background differ in size
            per_owner = {}
        each = method.replays[0 if owner[0] == 0 else 1].represents.double().numpy()
        for i in range(len(x)):
            s = weight @ x[i] + bias
            w = per_owner[owner[i]] / method.seen.item() if per_owner else each[i]
            replay += w * np.log1p(np.exp(s[N_OLD:])).sum()
            s[0] = 0
            versus += w * (np.log(np.exp(s).sum()) - s[owner[i]])
        assert each.sum() * method.seen.item() == pytest.approx(stands_for, rel=1e-5)
    assert terms["replay"].item() == pytest.approx(replay / total, rel=1e-4)
    assert terms["versus"].item() == pytest.approx(versus / total, rel=1e-4)

    coarse = seen.coarse.double().numpy()
    stride = labels.shape[-1] // coarse.shape[-1]
    gap = (said.embedding - seen.embedding).double().square().mean(1).numpy()
    anchored = [
        gap[b, i, j]
        for b, i, j in np.ndindex(gap.shape)
        if labels[b, i * stride, j * stride] == 0 and coarse[b, 1:, i, j].max() > 0
    ]
    assert terms["anchor"].item() == pytest.approx(sum(anchored) / max(1, len(anchored)), abs=1e-9)


def test_old_rows_stay_bit_for_bit_and_new_ones_learn():
    stage = at_step_1("optim.weight_decay=0.1")
    stage.optimiser = torch.optim.SGD(stage.student.parameters(), lr=1e-3, momentum=0.9, weight_decay=0.1)
    before = [p.detach().clone() for p in stage.student.classifier.parameters()]
    stage.iterate(4)
    for old, now in zip(before, stage.student.classifier.parameters(), strict=True):
        assert torch.equal(old[:N_OLD], now[:N_OLD]) and not torch.equal(old[N_OLD:], now[N_OLD:])
        assert not now[0].any()  # background has no row


def test_remembered_features_push_new_rows_alone():
    stage = at_step_1()
    stage.forward()["replay"].backward()
    rows = stage.student.classifier
    assert rows.weight.grad[N_OLD:].abs().sum() > 0 and not rows.weight.grad[:N_OLD].any()
    assert all(p.grad is None for p in (*stage.student.encoder.parameters(), *stage.student.decoder.parameters()))


def test_a_rare_new_class_can_count_as_an_average_old_one():
    as_seen, average = at_step_1(), at_step_1("laps.prior=average")
    labels, rows = as_seen.batch.labels, as_seen.student.classifier
    with torch.no_grad():
        stride = labels.shape[-1] // as_seen.student(normalise(as_seen.batch.images)).embedding.shape[-1]
    new = sum(int((labels[:, ::stride, ::stride] == c).sum()) for c in range(N_OLD, CLASSES)) / (CLASSES - N_OLD)
    share = new / (400.0 / 2)  # 100 and 300 points of two old classes are remembered
    assert 0 < share < 1
    for mine, whole in zip(average.method.replays, as_seen.method.replays, strict=True):
        torch.testing.assert_close(mine.represents, share * whole.represents)
    assert (average.student.classifier.bias[N_OLD:] > rows.bias[N_OLD:]).all()  # they start with a "yes" more often


def at_start_of_rows(method: str, *settings: str):
    """Features and labels of the cells of a step without a memory, the rows after the survey, and what they exceed."""
    stage = at_step_1(*settings, memory=False, method=method)
    with torch.no_grad():
        stage.student.eval()
        x = stage.student(normalise(make_batch(1, "disjoint").images)).embedding.double().numpy()
    stride = stage.batch.labels.shape[-1] // x.shape[-1]
    labels = stage.batch.labels.numpy()[:, ::stride, ::stride]
    vectors = x.transpose(0, 2, 3, 1)
    rows = stage.student.classifier
    weights, biases = rows.weight[:, :, 0, 0].detach().double().numpy(), rows.bias.detach().double().numpy()

    def level(x):
        z = x @ weights[:N_OLD].T + biases[:N_OLD]
        against_old = method == "laps-softmax" or "laps.level=old" in settings
        return np.log(np.exp(z).sum(1)) if against_old else np.zeros(len(x))

    return vectors[labels != 255], labels[labels != 255], weights, biases, level


@pytest.mark.parametrize(("method", "against"), [("laps", "zero"), ("laps", "old"), ("laps-softmax", "old")])
def test_new_rows_can_start_by_logistic_regression(method, against):
    """The gradient of the weighted cross-entropy with its penalty, in NumPy, is zero."""
    settings = ("laps.init=logistic", "laps.ridge=0.01", f"laps.level={against}")
    vectors, labels, weights, biases, level = at_start_of_rows(method, *settings)
    assert (np.abs(level(vectors)).max() > 0.1) == (against == "old")
    for c in range(N_OLD, CLASSES):
        y = labels == c
        share = np.where(y, 3.0, 1.0) / np.where(y, 3.0, 1.0).sum()
        variance = share @ (vectors - share @ vectors) ** 2
        residual = share * (sigmoid(vectors @ weights[c] + biases[c] - level(vectors)) - y)
        gradient = residual @ vectors + 0.01 * variance * weights[c]
        assert y.any() and np.abs(weights[c]).max() > 0.1
        np.testing.assert_allclose(gradient, 0, atol=1e-5)
        assert residual.sum() == pytest.approx(0, abs=1e-5)


@pytest.mark.parametrize("method", ["laps", "laps-softmax"])
def test_new_rows_can_start_as_linear_discriminants(method):
    """Against NumPy: the whitened difference of means, as long as old rows, with the best of all biases; in a softmax
    model on top of the linear function that is nearest to the log-sum-exp of the old rows."""
    vectors, labels, weights, biases, level = at_start_of_rows(method, "laps.init=closed_form")
    zero = weights[0] if method == "laps-softmax" else 0
    length = np.linalg.norm(weights[1:N_OLD] - zero, axis=1).mean()

    for c in range(N_OLD, CLASSES):
        own, no = vectors[labels == c], vectors[labels != c]
        mean, spread = no.mean(0), np.cov(no.T, bias=True)
        spread += 0.1 * np.diag(spread).mean() * np.eye(len(mean))
        direction = np.linalg.solve(spread, own.mean(0) - mean)
        both, share = np.concatenate([own, no]), np.repeat([0.5 / len(own), 0.5 / len(no)], [len(own), len(no)])
        ridge = 1e-3 * (share @ (both - share @ both) ** 2).mean() * np.eye(both.shape[1])  # as further equations
        centred = np.concatenate([(both - share @ both) * np.sqrt(share)[:, None], np.sqrt(ridge)])
        wanted = np.concatenate([(level(both) - share @ level(both)) * np.sqrt(share), np.zeros(len(ridge))])
        slope = np.linalg.lstsq(centred, wanted, rcond=None)[0]
        expected = direction * length / np.linalg.norm(direction) + slope
        np.testing.assert_allclose(weights[c], expected, rtol=1e-3, atol=1e-3)

        def loss(bias, c=c, own=own, no=no):
            yes, rest = own @ weights[c] + bias - level(own), no @ weights[c] + bias - level(no)
            return 3 * np.logaddexp(0, -yes).sum() + np.logaddexp(0, rest).sum()

        assert loss(biases[c]) <= min(loss(biases[c] - 0.01), loss(biases[c] + 0.01))


@pytest.mark.parametrize("on_new", ["teacher", "skip", "no"])
def test_what_old_rows_learn_where_the_label_is_a_new_class(on_new):
    stage = at_step_1("kd.on_new=skip" if on_new == "skip" else f"laps.on_new={on_new}")
    images = normalise(stage.batch.images)
    with torch.no_grad():
        z, t = (net(images).logits.double().numpy() for net in (stage.student, stage.teacher))
        found = stage.forward()["kd"].item()
    labels, padding = stage.batch.labels.numpy(), stage.batch.padding.numpy()
    total, count = 0.0, 0
    for b, y, x in np.ndindex(labels.shape):
        new = N_OLD <= labels[b, y, x] < CLASSES
        if padding[b, y, x] or (new and on_new == "skip"):
            continue
        count += 1
        for c in range(1, N_OLD):
            q = 0.0 if new and on_new == "no" else sigmoid(t[b, c, y, x])
            p = sigmoid(z[b, c, y, x])
            total -= q * np.log(p) + (1 - q) * np.log(1 - p)
    assert (labels >= N_OLD).any() and found == pytest.approx(total / count, rel=1e-5)


def test_a_softmax_model_is_extended_against_the_log_sum_exp_of_its_rows():
    stage = at_step_1(method="laps-softmax")
    z = stage.student(normalise(stage.batch.images)).logits
    old = z[:, :N_OLD].detach().double().numpy()
    expected = z.detach().double().numpy()[:, N_OLD:] - np.log(np.exp(old).sum(1, keepdims=True))
    said = stage.method._against_rest(z)
    np.testing.assert_allclose(said[:, N_OLD:].detach(), expected, atol=1e-4)
    said[:, N_OLD:].sum().backward()
    assert not stage.student.classifier.weight.grad[:N_OLD].any()
    assert METHODS["laps-softmax"](stage.method.config).decision == "softmax"
    assert stage.method.objective() == "Σ_new BCE(σ(z_c − LSE(z_old))) + 5·KD + L_replay + L_versus"

    weight, bias = (p.detach().double().numpy() for p in stage.student.classifier.parameters())
    versus = 0.0
    for part in stage.method.replays:  # on remembered features, one softmax over all logits
        z = part.points.double().numpy() @ weight[:, :, 0, 0].T + bias
        own = z[np.arange(len(z)), part.owner.numpy()]
        versus += part.represents.double().numpy() @ (np.log(np.exp(z).sum(1)) - own)
    assert stage.forward()["versus"].item() == pytest.approx(versus / stage.method.scale.item(), rel=1e-4)


def test_in_overlapped_steps_background_counts_less_where_it_is_like_a_new_class():
    stage = at_step_1(protocol="overlapped")
    method = stage.method
    with torch.no_grad():
        stage.student.eval()
        x = stage.student(normalise(stage.batch.images)).embedding.double().numpy()
    stride = stage.batch.labels.shape[-1] // x.shape[-1]
    labels = stage.batch.labels.numpy()[:, ::stride, ::stride]
    centres = method.memory.background.mean.double().numpy()
    points = {0: np.zeros(len(centres)), 1: np.zeros(len(centres))}
    for b, i, j in np.ndindex(labels.shape):
        if labels[b, i, j] != 255:
            nearest = np.square(centres - x[b, :, i, j]).sum(1).argmin()
            points[int(labels[b, i, j] >= N_OLD)][nearest] += 1
    share = points[1] / np.maximum(points[0] + points[1], 1)
    before = method.memory.background.points.double().numpy()
    found = method.replays[0].represents.view(len(centres), -1).sum(1) * method.seen
    assert share.max() > 0
    np.testing.assert_allclose(found, before * (1 - share), rtol=1e-4)
    old, kept = method.scale.item(), method.state_dict()
    assert old == pytest.approx(1 + (found.sum().item() + 400) / method.seen.item())
    method.hidden = None
    method.load_state_dict(kept)  # as when a run is resumed in the middle of the step
    assert method.scale.item() == old < at_step_1().method.scale.item()


def test_remembered_features_are_scored_once_and_only_if_wanted(monkeypatch):
    stage, plain, scored = at_step_1(), METHODS["laps"].scores_of, []
    monkeypatch.setattr(METHODS["laps"], "scores_of", lambda self, x: scored.append(len(x)) or plain(self, x))
    assert {"replay", "versus"} <= stage.forward().keys() and scored == [len(r.points) for r in stage.method.replays]
    stage = at_step_1("laps.replay=0", "laps.versus=0", "kd.weight=0")
    assert not stage.method.replays and stage.forward().keys() == {"ce"}
    assert at_step_1("laps.versus=0").forward().keys() == {"ce", "kd", "replay"}


def test_a_compiled_pass_equals_the_plain_one(monkeypatch):
    monkeypatch.setattr(CompiledPass, "backend", "aot_eager")
    gradients = []
    for kind in (Pass, CompiledPass):
        stage = at_step_1("laps.anchor=1")
        fabric = make_fabric(stage.method.config)
        more = (pytest.fail,) if kind is CompiledPass else ()  # is told if it cannot be compiled
        compute = kind(fabric, stage.method, fabric.setup(stage.student), stage.teacher, *more)
        assert {"ce", "kd", "replay", "versus", "anchor"} <= compute(stage.batch).terms.keys()
        gradients.append(torch.cat([p.grad.flatten() for p in stage.student.parameters()]))
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-6)


def test_the_softmax_model_of_step_0_is_that_of_other_methods_and_is_surveyed(tmp_path):
    run(tmp_path / "ft", "ft", spec="shapes:9-1@disjoint")
    run(tmp_path / "laps", "laps-softmax", spec="shapes:9-1@disjoint")
    step0 = [tmp_path / name / "steps/0" for name in ("ft", "laps")]
    assert (step0[0] / "model.safetensors").read_bytes() == (step0[1] / "model.safetensors").read_bytes()
    assert len(list((tmp_path / "bases").iterdir())) == 1
    plain, memory = (load_file(step / "memory.safetensors") for step in step0)
    assert set(memory["memory.classes.owner"].tolist()) == set(range(1, 10))
    assert all(torch.equal(memory[name], tensor) for name, tensor in plain.items())
    run(tmp_path / "own", "laps-softmax", spec="shapes:9-1@disjoint", bases=tmp_path / "others")  # trains it itself
    assert content(tmp_path / "own") == content(tmp_path / "laps")


def test_all_forms_of_memory_share_a_model_of_step_0(tmp_path):
    for form in ("gaussian", "features"):
        run(tmp_path / form, "laps", f"laps.memory={form}", "laps.encoder=0", spec="shapes:9-1@disjoint")
    settings = ("laps.memory=features", "laps.encoder=0")
    run(tmp_path / "own", "laps", *settings, spec="shapes:9-1@disjoint", bases=tmp_path / "others")
    assert len(list((tmp_path / "bases").iterdir())) == 1
    assert content(tmp_path / "features") == content(tmp_path / "own")
    kept = [load_file(tmp_path / form / "steps/0/memory.safetensors") for form in ("gaussian", "features")]
    assert "memory.classes.factor" in kept[0] and "memory.classes.factor" not in kept[1]


@pytest.mark.parametrize("memory", ["gaussian", "prototype", "features"])
def test_a_run_remembers_every_class_and_no_image(tmp_path, memory):
    run(tmp_path / "run", "laps", f"laps.memory={memory}", "laps.encoder=0", spec="shapes:6-2@disjoint")
    kept = load_file(tmp_path / "run" / "steps" / "2" / "memory.safetensors")
    own = [tensor for name, tensor in kept.items() if name.startswith("memory.")]
    write_report([tmp_path / "run"], tmp_path / "report.html", images=0)
    size = sum(tensor.nbytes for tensor in own)
    assert f'<data value="{size}">{size:,}</data>' in (tmp_path / "report.html").read_text()
    assert set(kept["memory.classes.owner"].tolist()) <= set(range(1, 11)) and 10 in kept["memory.classes.owner"]
    counted = {c: kept["memory.classes.points"][kept["memory.classes.owner"] == c].sum() for c in (1, 7, 9)}
    assert all(points > 0 for points in counted.values())


def test_an_interrupted_run_ends_bit_for_bit_the_same(tmp_path, monkeypatch):
    """Overlapped, with drift and with SDR's terms on top."""
    settings = (*TRAINED, "laps.drift=true", "laps.versus=0.1", "pm.weight=0.01", "cl.attract=1e-4", "cl.repel=1e-4")
    settings = (*settings, "cl.against=nearest", "sp.weight=1e-5")
    run(tmp_path / "whole", "laps", *settings, spec="shapes:8-1@overlapped")
    lines = map(json.loads, (tmp_path / "whole" / "log.jsonl").read_text().splitlines())
    terms = [line["losses"].keys() - {"loss"} for line in lines if line["event"] == "train" and line["step"] > 0]
    assert terms and all(found == {"ce", "kd", "replay", "versus", "pm", "attract", "repel", "sp"} for found in terms)
    laps = METHODS["laps"]
    plain = laps.after_update

    def stop(self, student):
        plain(self, student)
        if self.step.number == 1 and self.iteration == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(laps, "after_update", stop)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "run", "laps", *settings, spec="shapes:8-1@overlapped")
    monkeypatch.setattr(laps, "after_update", plain)
    run(tmp_path / "run", "laps", *settings, spec="shapes:8-1@overlapped")
    assert content(tmp_path / "run") == content(tmp_path / "whole")


@pytest.mark.parametrize("memory", ["gaussian", "features"])
def test_rows_alone_can_be_fitted_without_an_iteration(tmp_path, memory, monkeypatch):
    settings = (f"laps.memory={memory}", "laps.encoder=0")
    spec = "shapes:6-2@disjoint"
    run(tmp_path / "whole", "laps", *settings, spec=spec)
    models = [load_file(tmp_path / f"whole/steps/{n}/model.safetensors") for n in range(3)]
    for before, after in pairwise(models):
        for name, tensor in before.items():
            assert torch.equal(after[name][: len(tensor)] if name.startswith("classifier") else after[name], tensor)
        assert after["classifier.weight"][len(before["classifier.weight"]) :].abs().amax((1, 2, 3)).min() > 0.1
    lines = [*map(json.loads, (tmp_path / "whole/log.jsonl").read_text().splitlines())]
    assert {line["step"] for line in lines if line["event"] == "train"} == {0}
    kept = load_file(tmp_path / "whole/steps/2/memory.safetensors")
    sizes = {line["step"]: line["bytes"] for line in lines if line["event"] == "memory"}
    assert sizes.keys() == {0, 1, 2} and sizes[2] == sum(t.nbytes for n, t in kept.items() if n.startswith("memory."))
    write_report([tmp_path / "whole"], tmp_path / "report.html", images=0)
    laps, plain = METHODS["laps"], METHODS["laps"].end_survey

    def stop(self, when):
        plain(self, when)
        if self.step.number == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(laps, "end_survey", stop)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "run", "laps", *settings, spec=spec)
    monkeypatch.setattr(laps, "end_survey", plain)
    run(tmp_path / "run", "laps", *settings, spec=spec)
    assert content(tmp_path / "run") == content(tmp_path / "whole")


@pytest.mark.parametrize("method", ["laps", "laps-softmax"])
def test_settings_that_do_not_change_fitted_rows_are_named(tmp_path, method):
    """All runs are bit-identical although these settings differ; those that matter are not named."""
    idle = {
        "train.epochs_later": 2,
        "net.bn_later": "train",
        "optim.lr_later": 0.5,
        "optim.encoder_lr_factor_later": 0.0,
        "optim.clip_later": 1.0,
        "kd.weight": 3.0,
        "pseudo.threshold": 0.5,
        "enc.weight": 2.0,
        "pm.weight": 1.0,
        "step.1.optim.momentum": 0.5,
        "step.2.kd.weight": 7.0,
        "laps.replay": 0.0,
        "laps.versus": 0.0,
        "laps.anchor": 1.0,
        "laps.row_rate": 3.0,
        "laps.on_new": "no",
        "laps.drift": True,
        "step.2.laps.replay": 0.5,
        "cl.repel": 0.1,
        "sp.weight": 1.0,
    }
    matter = {"optim.momentum": 0.8, "laps.ridge": 0.01, "step.1.laps.positive": 3.0, "step.2.ce.init": "mib"}
    said = {}
    for name, settings in (("plain", matter), ("idle", matter | idle)):
        display = Quiet()
        given = {**parse_settings(TINY), **settings}
        train("shapes:6-2@disjoint", method, tmp_path / name, settings=given, bases=tmp_path / "bases", display=display)
        said[name] = [text for text in display.said if "do not change the result" in str(text)]
    assert content(tmp_path / "idle") == content(tmp_path / "plain")
    assert said["plain"] == []
    (note,) = said["idle"]
    assert set(note.partition(": ")[2].split(", ")) == idle.keys()


def test_the_terms_of_step_0_are_not_called_idle(tmp_path):
    display, given = Quiet(), {**parse_settings(TINY), "latent.step0": True, "sp.weight": 1.0, "laps.replay": 0.0}
    train("shapes:9-1@disjoint", "laps", tmp_path / "run", settings=given, bases=tmp_path / "bases", display=display)
    (note,) = (str(text) for text in display.said if "do not change the result" in str(text))
    assert note.endswith(": laps.replay")


def test_a_softmax_has_no_level_zero():
    with pytest.raises(UsageError, match=r"laps\.level=zero needs scores with a zero, which a softmax does not have"):
        begin("laps-softmax", "disjoint", settings=("laps.level=zero",))


def test_draws_accept_large_seeds():
    method = at_step_1("train.seed=2000000000").method
    first = method.replays[0].points.clone()
    method.iteration += 1
    method.expect(None, 1)
    assert 0 <= method._seed() < 2**63 and not torch.equal(first, method.replays[0].points)


def test_settings_of_training_are_not_named_where_there_is_training(tmp_path):
    display, given = Quiet(), {**parse_settings([*TINY, *TRAINED]), "train.epochs_later": 2}
    train("shapes:9-1@disjoint", "laps", tmp_path / "run", settings=given, bases=tmp_path / "bases", display=display)
    assert not any("do not change the result" in str(text) for text in display.said)


def test_one_pass_over_the_images_fits_rows_and_remembers():
    """Old classes that are labelled background are negatives, but not remembered as background."""
    stage = begin("laps", "disjoint")
    method, memory, rows = stage.method, stage.method.memory, stage.student.classifier
    memory.background = memory.classes = None
    assert not method.needs_teacher and not method.wants_survey("after")
    with torch.no_grad():
        stage.student.eval()
        rows.bias[1] -= stage.student(normalise(stage.batch.images)).coarse[:, 1].median()
        said = stage.student(normalise(stage.batch.images))
    stage.teacher = None
    stage.look("before")
    stride = stage.batch.labels.shape[-1] // said.embedding.shape[-1]
    labels = stage.batch.labels[:, ::stride, ::stride]
    old = (said.coarse[:, 1:N_OLD] > 0).any(1) & (labels == 0)
    assert 0 < old.sum() < (labels == 0).sum()
    assert memory.background.points.sum() == ((labels == 0) & ~old).sum()
    assert method.seen == (labels != 255).sum()
    counted = {c: memory.classes.points[memory.classes.owner == c].sum() for c in range(N_OLD, CLASSES)}
    assert counted == {c: (labels == c).sum() for c in range(N_OLD, CLASSES)}


@pytest.mark.parametrize("memory", ["features", "gaussian"])
def test_new_rows_may_see_the_features_of_the_encoder(tmp_path, memory):
    """Step 0 and the old rows stay as they are; the memory and the new rows have four inputs more."""
    spec = "shapes:6-2@disjoint"
    run(tmp_path / "plain", "laps", *DECODER, spec=spec)
    settings = (f"laps.memory={memory}", "laps.encoder=4")
    run(tmp_path / "wide", "laps", *settings, spec=spec)
    plain, wide = (
        [load_file(tmp_path / f"{n}/steps/{k}/model.safetensors") for k in range(3)] for n in ("plain", "wide")
    )
    assert plain[0].keys() == wide[0].keys() and all(torch.equal(plain[0][name], wide[0][name]) for name in plain[0])
    inputs, n_old = plain[0]["classifier.weight"].shape[1], 7
    kept = load_file(tmp_path / "wide/steps/0/memory.safetensors")
    assert kept["memory.classes.mean"].shape[1] == kept["memory.background.mean"].shape[1] == inputs + 4
    for model in wide[1:]:
        assert torch.equal(model["shortcut.weight"].flatten(1), kept["memory.directions"])
        assert torch.equal(model["classifier.weight"][:n_old, :inputs], plain[0]["classifier.weight"])
        assert not model["classifier.weight"][:n_old, inputs:].any()
        assert (model["classifier.weight"][n_old:, inputs:].abs().amax((1, 2, 3)) > 0).all()
    assert [step["same"] for step in score_again(tmp_path / "wide")] == [True] * 3
    write_report([tmp_path / "wide"], tmp_path / "report.html", images=1)
    run(tmp_path / "again", "laps", *settings, spec=spec, bases=tmp_path / "others")  # trains step 0 itself
    assert content(tmp_path / "again") == content(tmp_path / "wide")


def test_a_memory_without_features_of_the_encoder_is_named_and_used():
    stage = begin("laps", "disjoint", settings=("laps.encoder=4",))
    stage.student.shortcut = None  # a model of a run without laps.encoder
    stage.method.directions = None
    stage.method.notes.clear()
    stage.method.begin_step(stage.method.step, stage.student, None)
    assert stage.student.shortcut is None
    assert "memory has no features of the encoder" in stage.method.notes[0]


def test_a_later_step_surveys_as_many_views_as_asked(tmp_path, monkeypatch):
    """Step 0 is seen once, a later step in every one of its views, which differ."""
    seen: dict[int, list[tuple[int, str, int]]] = {}
    survey = METHODS["laps"].survey

    def watch(self, batch, student, teacher):
        numbers = [int(image.sum()) for image in batch.images.long()]
        seen.setdefault(self.step.number, []).extend(
            (batch.epoch, id, number) for id, number in zip(batch.ids, numbers, strict=True)
        )
        survey(self, batch, student, teacher)

    monkeypatch.setattr(METHODS["laps"], "survey", watch)
    run(tmp_path / "run", "laps", "laps.views=3", spec="shapes:9-1@disjoint")
    assert {epoch for epoch, _, _ in seen[0]} == {0}
    by_view = [{id: number for epoch, id, number in seen[1] if epoch == view} for view in range(3)]
    assert by_view[0].keys() == by_view[1].keys() == by_view[2].keys() and len(seen[1]) == 3 * len(by_view[0])
    assert by_view[0] != by_view[1] != by_view[2]


def test_a_class_that_no_sampled_cell_shows_is_named():
    stage = begin("laps", "disjoint")
    stage.batch.labels[stage.batch.labels == CLASSES - 1] = 0
    before = stage.student.classifier.weight[CLASSES - 1].clone()
    stage.look("before")
    assert torch.equal(stage.student.classifier.weight[CLASSES - 1], before)
    (note,) = stage.method.notes
    assert f"channel {CLASSES - 1} cannot be fitted" in note and "none of the sampled cells shows it" in note


def test_rows_that_are_not_fitted_need_training():
    with pytest.raises(UsageError, match=r"laps.fit_only=true needs laps.init=logistic, not small"):
        at_step_1("laps.fit_only=true", "laps.init=small")
