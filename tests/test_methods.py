"""Every method passes one tester: two tiny steps, losses fall, state is restored exactly, bf16 works, and so on."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch

from sdrseg.config import load_config
from sdrseg.datasets.augment import normalise
from sdrseg.engine.bases import base_of
from sdrseg.errors import UsageError
from sdrseg.labels import VOID
from sdrseg.losses import official
from sdrseg.losses.prototypes import class_sums
from sdrseg.methods import (
    METHODS,
    Method,
    StepInfo,
    find_method,
    limits_in,
    list_methods,
    method_layers,
    own_sections,
    register_method,
)
from sdrseg.methods.base import From
from sdrseg.methods.latent import require_official
from sdrseg.methods.show import show_method, show_methods
from sdrseg.network import build_network
from sdrseg.variants import SparsityVariant

import reference as slow
from methods_bench import CLASSES, N_NEW, N_OLD, Stage, begin, make_batch, make_config

PAPER = ["ft", "offline", "lwf", "lwf-mc", "ilt", "cil", "mib", "ewc", "pi", "rw", "sdr", "sdr+mib"]


class MethodTester:
    """What has to hold for any method. A subclass names one, and the terms it has in a later step."""

    name: str
    terms: frozenset[str] = frozenset({"ce"})
    protocol = "disjoint"

    lr = 0.01

    @pytest.fixture(scope="class")
    @classmethod
    def stage(cls):
        stage = cls.begin()
        stage.iterate(8)
        return stage

    @classmethod
    def begin(cls, **options):
        return begin(cls.name, cls.protocol, lr=cls.lr, **options)

    def test_losses_fall(self, stage):
        assert stage.losses[5] < stage.losses[0]  # step 0
        later = [sum(w * t.get(n, 0) for n, w in {"ce": 1.0, **stage.method.weights()}.items()) for t in stage.terms]
        assert later[-1] < later[0]

    def test_the_terms_are_those_of_the_method(self, stage):
        assert set(stage.terms[0]) == set(self.terms)

    def test_gradients_are_finite_and_reach_every_parameter(self, stage):
        for name, parameter in stage.student.named_parameters():
            assert parameter.grad is not None, name
            assert parameter.grad.isfinite().all(), name

    def test_the_classifier_has_grown(self, stage):
        assert stage.student.classes == CLASSES

    def test_state_is_saved_and_restored_exactly(self, stage):
        model, state = copy.deepcopy(stage.student.state_dict()), copy.deepcopy(stage.method.state_dict())
        momentum = copy.deepcopy(stage.optimiser.state_dict())
        going_on = copy.deepcopy(stage)
        going_on.iterate(3)
        other = self.begin(base_iterations=1)
        other.student.load_state_dict(model)
        other.optimiser.load_state_dict(momentum)
        other.method.load_state_dict(state)
        if stage.teacher is not None:
            other.teacher.load_state_dict(stage.teacher.state_dict())
        other.iterate(3)
        for name, tensor in going_on.student.state_dict().items():
            assert torch.equal(tensor, other.student.state_dict()[name]), name
        for name, tensor in going_on.method.state_dict().items():
            assert torch.equal(tensor, other.method.state_dict()[name]), name

    def test_the_same_seed_gives_the_same_numbers(self, stage):
        again = self.begin()
        again.iterate(8)
        assert again.losses == stage.losses

    def test_bf16_gives_nearly_the_same_losses(self, stage):
        half = self.begin()
        half.iterate(1, bf16=True)
        for name, value in half.terms[0].items():
            close = 0.5 if name == "repel" else 0.1  # inverse distances of classes that are hardly apart yet
            assert value == pytest.approx(stage.terms[0][name], rel=close, abs=2e-2), name

    def test_prototypes_of_new_classes_are_learned(self, stage):
        for prototypes in stage.method.latent.prototypes.values():
            assert prototypes.mean.shape[0] == CLASSES
            assert prototypes.known[1:].sum() >= 3
            assert prototypes.known[N_OLD:].any()


class TestFT(MethodTester):
    name = "ft"


class TestOffline(MethodTester):
    name = "offline"


class TestLwF(MethodTester):
    name = "lwf"
    terms = frozenset({"ce", "kd"})


class TestLwFMC(MethodTester):
    name = "lwf-mc"
    terms = frozenset({"ce", "kd"})


class TestILT(MethodTester):
    name = "ilt"
    terms = frozenset({"ce", "kd", "enc"})


class TestCIL(MethodTester):
    name = "cil"
    terms = frozenset({"ce", "kd"})


class TestMiB(MethodTester):
    name = "mib"
    terms = frozenset({"ce", "kd"})


class TestEWC(MethodTester):
    name = "ewc"
    terms = frozenset({"ce", "penalty"})
    lr = 3e-4  # a penalty of 1000 is stiff


class TestPI(MethodTester):
    name = "pi"
    terms = frozenset({"ce", "penalty"})
    lr = 3e-4  # a penalty of 1000 is stiff


class TestRW(MethodTester):
    name = "rw"
    terms = frozenset({"ce", "penalty"})
    lr = 3e-4  # a penalty of 1000 is stiff


class TestSDR(MethodTester):
    name = "sdr"
    terms = frozenset({"ce", "kd", "pm", "attract", "repel", "sp"})


class TestSDRMiB(MethodTester):
    name = "sdr+mib"
    terms = frozenset({"ce", "kd", "pm", "attract", "repel", "sp"})


class TestSDRSequential(TestSDR):
    protocol = "sequential"


class TestSDROverlapped(TestSDR):
    protocol = "overlapped"


# --- what the methods are --------------------------------------------------------------------------------------------


def test_all_methods_of_the_paper_are_there():
    assert [m.name for m in list_methods()][: len(PAPER)] == PAPER
    assert {m.name for m in list_methods("sdr*")} == {"sdr", "sdr+mib"}
    assert len(list_methods("sparsity-*")) == 10
    assert {f"ablation-{row}" for row in (1, 2, 3, 4, 5, 6, 7, "cl")} <= set(METHODS)


def test_step_0_is_plain_training_except_for_four_methods_of_which_three_share_it(capsys):
    trainers = {name: METHODS[name].trainer_of_step0().name for name in PAPER if METHODS[name].own_step0}
    assert trainers == {"lwf-mc": "lwf-mc", **dict.fromkeys(("ewc", "pi", "rw"), "importance")}
    show_methods("lwf-mc", json=False), show_methods("ewc", json=False)
    shown = capsys.readouterr().out.split("ewc")
    assert "own" in shown[0] and "shared" not in shown[0] and "shared" in shown[1]


@pytest.mark.parametrize(
    ("name", "objective"),
    [
        ("ft", "CE"),
        ("lwf", "CE + 100·KD"),
        ("lwf-mc", "BCE + 10·Σ_c BCE(σ(z_c), σ(t_c))"),
        ("ilt", "CE + 100·KD + 100·ENC"),
        ("cil", "CE + L_CIL"),
        ("mib", "UNCE + 10·UNKD, MiB init"),
        ("ewc", "CE + 1000·Σ_θ F̃_θ (θ − θ_old)²"),
        ("sdr", "UNCE + 100·UNKD + 0.01·L_pm + 0.001·L_a + 0.001·L_r + 1e-05·L_sp[class_max]"),
        ("ablation-1", "CE"),
        ("ablation-2", "CE + 100·KD"),
        ("ablation-3", "UNCE + 0.01·L_pm"),
        ("ablation-4", "UNCE + 0.01·L_pm + 1e-05·L_sp[class_max]"),
        ("ablation-5", "UNCE + 0.01·L_pm + 0.001·L_a + 0.001·L_r + 1e-05·L_sp[class_max]"),
        ("ablation-6", "UNCE + 100·KD + 0.01·L_pm + 0.001·L_a + 0.001·L_r + 1e-05·L_sp[class_max]"),
        ("ablation-cl", "UNCE + 0.001·L_a + 0.001·L_r"),
        ("sparsity-l0", "UNCE + 100·UNKD + 0.01·L_pm + 0.001·L_a + 0.001·L_r + 1e-05·L_sp[l0]"),
    ],
)
def test_objectives(name, objective):
    assert METHODS[name](make_config(name)).objective() == objective


ALL = {"kd", "pm", "attract", "repel", "sp"}
ROWS = {
    "ablation-1": set(),
    "ablation-2": {"kd"},
    "ablation-3": {"pm"},
    "ablation-4": {"pm", "sp"},
    "ablation-5": ALL - {"kd"},
    "ablation-6": ALL,
    "ablation-7": ALL,
    "ablation-cl": {"attract", "repel"},
    "offline-sp": {"sp"},
    "offline-cl": {"attract", "repel"},
    "offline-sp-cl": {"sp", "attract", "repel"},
}


@pytest.mark.parametrize("task", ["15-1", "15-5"])
@pytest.mark.parametrize("preset", ["default", "paper", "official"])
@pytest.mark.parametrize("name", [*ROWS, *(f"sparsity-{kind}" for kind in get_args(SparsityVariant))])
def test_a_row_of_a_study_has_its_terms_in_every_preset_and_task(name, preset, task):
    config, sdr = (load_config("voc", between=method_layers(one, preset, task)) for one in (name, "sdr"))
    weights = METHODS[name](config).weights()
    assert {term for term, weight in weights.items() if weight > 0} == ROWS.get(name, ALL)
    for term, weight in weights.items():
        if weight > 0 and name != "ablation-2":  # it is built on fine-tuning
            assert weight == METHODS["sdr"](sdr).weights()[term]
    if weights["attract"] > 0:
        assert config.cl.form == sdr.cl.form
    assert config.sp.variant == (name.removeprefix("sparsity-") if name.startswith("sparsity-") else "class_max")


@pytest.mark.parametrize(("preset", "weight"), [("default", 10.0), ("official", 100.0), ("paper", 6.25)])
@pytest.mark.parametrize("name", ["sdr", "sdr+mib"])
def test_the_weight_that_was_tuned_for_a_task_is_only_in_the_default(name, preset, weight):
    for task in ("15-5", "15-1", "19-1"):
        config = load_config("voc", between=method_layers(name, preset, task))
        assert config.kd.weight == (100.0 if preset == "default" and task != "15-5" else weight)


def test_what_the_presets_set_for_all():
    paper, official = (
        load_config("voc", between=method_layers("ft", preset, None)) for preset in ("paper", "official")
    )
    assert (paper.optim.nesterov, paper.optim.lr, paper.optim.lr_later) == (False, 1e-2, 1e-3)
    assert (official.optim.nesterov, official.optim.lr, official.optim.lr_later) == (True, 1e-3, 1e-4)
    assert (official.train.seed, official.latent.official, official.proto.average) == (42, True, "pixel")
    assert [make_config("sdr", p).cl.background for p in ("default", "paper", "official")] == [
        "include_if_known",
        "include",
        "include",
    ]


def test_the_official_code_s_prototypes_are_scrambled_from_step_0_on():
    """Bug A: what a class with pixels in two images leaves is not its mean."""
    stage = begin("sdr", "disjoint", preset="official", settings=("net.bn_momentum_encoder=0.1",), base_iterations=1)
    right = begin("sdr", "disjoint", settings=("proto.average=pixel",), base_iterations=1)
    found, correct = (s.method.latent.prototypes["pixel"] for s in (stage, right))
    assert torch.equal(found.seen, correct.seen)
    assert not torch.allclose(found.mean[0], correct.mean[0], rtol=0.1)

    config = make_config("sdr", "official")
    student = build_network(config.net, N_OLD)
    base_type, base_config = base_of(METHODS["sdr"], config)
    method = base_type(base_config)
    method.begin_step(StepInfo(0, 0, N_OLD, "disjoint"), student, None)
    batch = make_batch(0, "disjoint")
    with torch.no_grad():
        output = student(normalise(batch.images))
    method.terms(batch, output, None)
    mean, count = torch.zeros_like(method.latent.prototypes["pixel"].mean), torch.zeros(N_OLD, dtype=torch.long)
    grid = method.latent._grid(batch, output.features)
    official.update_prototypes(mean, count, output.features, grid, drop_smallest=False)
    assert torch.equal(method.latent.prototypes["pixel"].mean, mean)
    assert torch.equal(method.latent.prototypes["pixel"].seen, count) and (count > 0).sum() > 2


def test_the_sparsity_measures_of_the_official_code_are_used():
    values = set()
    for kind in get_args(SparsityVariant):
        stage = begin(f"sparsity-{kind}", "disjoint", preset="official", settings=("net.bn_momentum_encoder=0.1",))
        value = stage.forward()["sp"].item()
        features = stage.student(normalise(stage.batch.images)).features.detach()
        grid = stage.method.latent._grid(stage.batch, features)
        assert (grid == VOID).any()
        if kind != "l0":  # which that code lacks
            F = features.double().numpy()
            expected = slow.official_lasso(F) if kind == "l1" else slow.official_sparsity(F, grid.numpy(), kind)
            assert value == pytest.approx(expected, rel=1e-5)
        values.add(value)
    assert len(values) == 10


@pytest.mark.parametrize(
    ("settings", "processes", "message"),
    [
        (("cl.form=norm_sum",), 1, r"cl\.form=norm_sum: with latent\.official .* where it is mse\."),
        (("proto.decay=0.5",), 1, r"proto\.decay=0\.5: .* where it is 0\.0\."),
        ((), 2, "support one process only, but there are 2"),
    ],
)
def test_what_the_official_code_cannot_do_is_refused(settings, processes, message):
    with pytest.raises(UsageError, match=message):
        require_official(make_config("sdr", "official", *settings), processes)
    require_official(make_config("sdr", "official"), 1)
    require_official(make_config("sdr", "default", *settings), processes)


def test_background_without_a_prototype_takes_part_if_asked_to():
    """In overlapped it never has one: it is drawn to 0 then, as every class of Eq. 6."""
    known, all_of_them = (begin("sdr", "overlapped", settings=s) for s in ((), ("cl.background=include",)))
    terms = []
    for stage in (known, all_of_them):
        terms.append({name: value.item() for name, value in stage.forward().items()})
        assert stage.method.latent.prototypes["image"].seen[0] == 0
    assert terms[0]["pm"] == terms[1]["pm"]
    features = known.student(normalise(known.batch.images)).features
    labels = known.method.latent._grid(known.batch, features)
    sums = class_sums(features, labels, N_OLD + N_NEW)
    present = ((sums.pixels > 0) & known.method.latent.prototypes["image"].known).sum()
    to_zero = sums.square[0] / (sums.pixels[0] * features.shape[1])
    expected = (terms[0]["attract"] * present + to_zero) / (present + 1)
    assert terms[1]["attract"] == pytest.approx(expected.item(), rel=1e-5)


def test_padding_is_distilled_if_asked_to():
    skip, include = (begin("ilt", "disjoint", settings=s, lr=3e-4) for s in ((), ("kd.padding=include",)))
    with torch.no_grad():  # where nothing has moved yet there is nothing to see
        for stage in (skip, include):
            next(iter(stage.student.encoder_parameters())).mul_(1.5)
    a, b = skip.forward(), include.forward()
    assert a["ce"] == b["ce"] and a["kd"] != b["kd"] and a["enc"] != b["enc"]


@pytest.mark.parametrize("on_new", ["distil", "skip"])
def test_which_pixels_are_distilled_where_the_label_is_a_new_class(on_new):
    stage = begin("sdr", "disjoint", settings=(f"kd.on_new={on_new}",))
    images = normalise(stage.batch.images)
    with torch.no_grad():
        z, t = (net(images).logits.double().numpy() for net in (stage.student, stage.teacher))
        found = stage.forward()["kd"].item()
    labels, padding = stage.batch.labels.numpy(), stage.batch.padding.numpy()
    total, count, new = 0.0, 0, 0
    for b, y, x in np.ndindex(labels.shape):
        is_new = N_OLD <= labels[b, y, x] < N_OLD + N_NEW
        new += is_new
        if padding[b, y, x] or (is_new and on_new == "skip"):
            continue
        p, q = (np.exp(v[b, :, y, x]) / np.exp(v[b, :, y, x]).sum() for v in (t, z))
        q = np.array([q[0] + q[N_OLD:].sum(), *q[1:N_OLD]])
        total, count = total - (p * np.log(q)).sum(), count + 1
    normaliser = {"n_old": N_OLD, "at_least_16": max(16, N_OLD), "none": 1}[stage.method.config.kd.normaliser]
    assert new and found == pytest.approx(total / count / normaliser, rel=1e-5)


def test_mib_has_the_authors_weight_on_15_1():
    assert METHODS["mib"].values("default", "15-1")["kd.weight"].value == 100
    assert METHODS["mib"].values("default", "15-5")["kd.weight"].value == 10


@pytest.mark.parametrize("preset", ["paper", "official"])
@pytest.mark.parametrize("protocol", ["sequential", "disjoint", "overlapped"])
def test_sdr_runs_in_every_preset(preset, protocol):
    stage = begin("sdr", protocol, preset=preset, settings=("net.bn_momentum_encoder=0.1",))
    stage.iterate(3)
    assert all(torch.isfinite(p).all() for p in stage.student.parameters())
    assert set(stage.terms[0]) == TestSDR.terms


@pytest.mark.parametrize("name", ["ft", "ilt", "lwf-mc", "ewc"])
def test_any_term_can_be_put_on_top_of_any_method(name):
    plain, more = (
        begin(name, "disjoint", settings=extra, lr=3e-4) for extra in ((), ("pm.weight=0.01", "sp.weight=1e-5"))
    )
    plain.iterate(1)
    more.iterate(1)
    assert set(more.terms[0]) == set(plain.terms[0]) | {"pm", "sp"}
    assert more.terms[0]["ce"] == plain.terms[0]["ce"]


def test_standard_segmentation_has_the_latent_terms_in_step_0():
    config = make_config("offline-sp-cl")
    student = build_network(config.net, N_OLD)
    method = METHODS["offline-sp-cl"](config)
    method.begin_step(StepInfo(0, 0, N_OLD, "sequential"), student, None)
    stage = Stage(method, student, None, make_batch(0, "sequential"), torch.optim.SGD(student.parameters(), lr=0.01))
    stage.iterate(2)
    assert set(stage.terms[0]) == {"ce", "attract", "repel", "sp"}


def test_image_by_image_also_with_norms():
    batch, image = (begin("sdr", "disjoint", settings=("cl.form=norm_sum", *s)) for s in ((), ("cl.scope=image",)))
    assert batch.forward()["attract"] > 1.5 * image.forward()["attract"] > 0


@pytest.mark.parametrize("scope", ["cl.scope=image", "cl.form=norm_mean", "cl.labels=pseudo", "cl.background=exclude"])
def test_switches_of_the_contrast_change_it(scope):
    # The teacher has to know something before it can relabel anything.
    plain, other = (begin("sdr", "disjoint", settings=s, base_iterations=40, lr=0.05) for s in ((), (scope,)))
    plain.iterate(1)
    other.iterate(1)
    assert other.terms[0]["attract"] != plain.terms[0]["attract"]
    assert other.terms[0]["pm"] == plain.terms[0]["pm"]


def test_background_is_never_in_the_prototypes_of_overlapped():
    for protocol, known in (("overlapped", False), ("disjoint", True), ("sequential", True)):
        stage = begin("sdr", protocol)
        before = stage.method.latent.prototypes["image"].seen[0].item()
        stage.iterate(1)
        after = stage.method.latent.prototypes["image"].seen[0].item()
        assert (after > 0) == known
        assert (after > before) == (protocol == "sequential")


def test_ewc_holds_important_parameters_back():
    free = begin("ewc", "disjoint", settings=("importance.weight=0",), lr=3e-4)
    held = begin("ewc", "disjoint", lr=3e-4)
    for stage in (free, held):
        stage.iterate(6)
    importance, anchors = held.method.importances, held.method.anchors
    assert float(held.method.last_penalty) < 0.7 * float(free.method.last_penalty)
    assert all(0 <= float(i.min()) and float(i.max()) <= 1 for i in importance.values())
    assert anchors.keys() == importance.keys() == dict(held.student.named_parameters()).keys()
    assert len(anchors["classifier.weight"]) == N_OLD


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("mib", "plain cross-entropy, shared with other methods"),
        ("rw", "plain cross-entropy, with the statistics of ewc, pi and rw; shared with other methods"),
        ("laps", "one sigmoid per class; shared with other methods"),
        ("lwf-mc", "trained with this method"),
    ],
)
def test_the_description_of_a_method_says_how_step_0_is_trained(name, said, capsys):
    show_method(name, "default", None, json=False)
    assert f"step 0: {said}\n" in capsys.readouterr().out


def test_unknown_methods_presets_and_double_names_are_named():
    with pytest.raises(UsageError, match="unknown method 'sdt'; did you mean 'sdr'"):
        find_method("sdt")
    with pytest.raises(UsageError, match="unknown preset 'oficial'; did you mean 'official'"):
        method_layers("sdr", "oficial", None)

    class Other(Method):
        name = "sdr"
        summary = "a second one"

    with pytest.raises(UsageError, match="The method 'sdr' exists already"):
        register_method(Other)


def test_a_custom_method_is_a_class():
    class Gentle(Method):
        name = "gentle"
        summary = "LwF with a gentle hand"
        switches = {"kd.kind": From("standard", "mine"), "kd.weight": From(1.0, "mine")}

    register_method(Gentle)
    try:
        stage = begin("gentle", "disjoint")
        stage.iterate(2)
        assert set(stage.terms[0]) == {"ce", "kd"}
    finally:
        del METHODS["gentle"]


def test_generated_data_has_weights_that_its_learning_rate_bears() -> None:
    def weights(name: str, data_set: str, preset: str = "default") -> tuple[float, float, float]:
        config = load_config(data_set, between=method_layers(name, preset, None, data_set))
        return config.kd.weight, config.enc.weight, config.importance.weight

    assert weights("sdr", "shapes")[0] == 5 and weights("sdr", "voc")[0] == 100
    assert weights("cil", "shapes")[0] == 1  # a smaller one stays
    assert weights("lwf-mc", "shapes")[0] == 1 and weights("ilt", "shapes")[:2] == (5, 1)
    assert weights("ewc", "shapes")[2] == 15 and weights("ft", "shapes")[0] == 0
    assert weights("sdr", "shapes", "paper") == weights("sdr", "voc", "paper")
    assert limits_in(method_layers("ilt", "default", None, "shapes")) == [("kd", "weight", 5.0), ("enc", "weight", 1.0)]
    assert limits_in(method_layers("ft", "default", None, "shapes")) == []


def test_a_method_that_takes_over_prototypes_leaves_the_others_alone() -> None:
    stage = begin("sdr", "disjoint")
    other = METHODS["sdr"](stage.method.config)
    other.load_state_dict(stage.method.state_dict())
    kept = {name: tensor.clone() for name, tensor in other.state_dict().items()}
    stage.iterate(1)
    assert all(torch.equal(tensor, kept[name]) for name, tensor in other.state_dict().items())
    assert any(not torch.equal(tensor, kept[name]) for name, tensor in stage.method.state_dict().items())


@pytest.mark.parametrize("method", ["ft", "lwf", "ilt", "mib", "sdr", "rw"])
def test_careful_defaults_are_for_own_data_only(method):
    """Generated scenes have limits of their own; the presets of the paper and its code are unchanged."""
    config = load_config("shapes", None, {}, method_layers(method, "default", "15-1", "shapes"))
    assert (config.kd.normaliser, config.optim.clip) == ("n_old", 0.0)
    own = load_config("folder", None, {}, method_layers(method, "default", "15-1", "folder"))
    assert (own.kd.normaliser, own.optim.clip, own.eval.transform) == ("at_least_16", 25.0, "full_image")
    for preset in ("paper", "official"):
        exact = load_config("folder", None, {}, method_layers(method, preset, None, "folder"))
        assert exact.optim.clip == 0 and exact.kd.normaliser != "at_least_16"


@pytest.mark.parametrize("data_set", ["voc", "ade20k"])
def test_voc_and_ade20k_keep_the_values_they_had_before_the_careful_defaults(data_set):
    """Recorded with the version before: every setting of every method of that version, in step 0 and in later ones."""
    known = json.loads((Path(__file__).parent / "data" / "voc_ade20k_settings.json").read_text())
    tasks = {"voc": ("19-1", "15-5", "15-1"), "ade20k": ("100-50", "50")}
    for name, of_method in known["methods"].items():
        for task in tasks[data_set]:
            config = load_config(data_set, None, {}, method_layers(name, "default", task, data_set), own_sections(name))
            expected = known["defaults"] | known["data sets"][data_set] | of_method
            expected |= known["tasks"].get(f"{name} {task}", {})
            for step in range(3):
                if step == 1:
                    expected |= known["later"][data_set] | known["methods later"].get(name, {})
                    expected |= {"optim.clip": 25.0} if name == "ilt" else {}  # it diverged, on VOC too
                values = {s.key: s for s in config.of_step(step).settings()}
                found = json.loads(json.dumps({key: values[key].value for key in expected}))
                assert found == expected, (name, task, step)
                added = {s.key for s in values.values() if s.key not in expected and s.value != s.declared.default}
                assert added == ({"optim.clip_later"} if name == "ilt" else set()), (name, task, step)


@pytest.mark.parametrize(("normaliser", "n_old", "by"), [("n_old", 3, 3), ("at_least_16", 3, 16), ("none", 3, 1)])
@pytest.mark.parametrize("kind", ["standard", "unbiased"])
def test_distillation_is_divided_by_the_normaliser(normaliser, n_old, by, kind):
    values = {}
    for chosen in (normaliser, "none"):
        settings = {"kd.weight": 1.0, "kd.kind": kind, "kd.normaliser": chosen}
        method = find_method("ft")(load_config("shapes", None, settings))
        sums = torch.tensor([6.0, 2.0])
        method.expect(None, 1)
        values[chosen] = method._distillation_mean(sums, torch.zeros(1, n_old, 2, 2)).item()
    assert values[normaliser] == values["none"] / by == pytest.approx(3 / by)


def test_rows_of_an_ablation_have_the_limits_of_their_method():
    for name in ("laps", "laps-trained-no-versus"):
        assert limits_in(method_layers(name, "default", None, "shapes")) == [("kd", "weight", 0.5)]
