"""What settings affect: resuming, the keys of bases, the configuration of a step, and sections of a method's own."""

from __future__ import annotations

import dataclasses
import json

import pytest

from runs import SPEC, TINY, Quiet
from sdrseg.config import Config, config_from, load_config, parse_settings, saved_config
from sdrseg.config.setting import section, setting
from sdrseg.engine.bases import base_key, base_of
from sdrseg.engine.job import Job, prepare_job
from sdrseg.errors import UsageError
from sdrseg.methods import METHODS, method_layers, own_sections
from sdrseg.methods.importance import AllImportances
from sdrseg.scenario import parse_spec

MAY_CHANGE = {
    "data.cache", "data.workers", "eval.also", "eval.batch_size", "eval.every",
    "run.speed", "run.save_minutes", "run.log_every", "run.loggers", "run.on_bad_image", "run.on_divergence",
}  # fmt: skip
LATER = {
    "train.batch_size_later", "train.epochs_later", "net.bn_later",
    "optim.clip_later", "optim.lr_later", "optim.decoder_lr_factor_later", "optim.encoder_lr_factor_later",
}  # fmt: skip


def other_value(config: Config, key: str) -> object:
    """Another value that a setting may have."""
    name, _, field = key.partition(".")
    kind = config.sections()[name].__dataclass_fields__[field]
    value = getattr(config.sections()[name], field)
    choices = str(kind.type).replace('"', "'").split("'")[1::2]
    candidates = [not value, (), 0.25, 2, 48, 16, 8, "l1", (0.5, 1.5), (0.5, 0.9), *choices, "other"]
    for candidate in candidates:
        try:
            made = config_from({name: {field: candidate}}, "test").sections()[name]
        except UsageError:
            continue
        if getattr(made, field) != value:
            return getattr(made, field)
    raise AssertionError(key)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    folder = tmp_path_factory.mktemp("job")
    return prepare_job(
        parse_spec(SPEC), "ft", load_config("shapes", None, parse_settings(TINY)), None, folder, None, Quiet()
    )


def key_of(job: Job, method: str, config: Config) -> str:
    step, index = job.scenario.steps[0], job.indexes["train"]
    return base_key(*base_of(METHODS[method], config), step, index, "disjoint")


def keys_that_change(job: Job, method: str) -> set[str]:
    config = job.config
    before = key_of(job, method, config)
    values = {s.key: other_value(config, s.key) for s in config.settings()}
    return {key for key, value in values.items() if key_of(job, method, config.changed({key: value})) != before}


def test_every_setting_that_changes_results_keeps_a_run_from_being_resumed():
    config = Config()
    changed = {s.key: config.changed({s.key: other_value(config, s.key)}) for s in config.settings()}
    assert {key for key, other in changed.items() if not config.differences(other)} == MAY_CHANGE


def test_the_key_of_a_base_holds_what_plain_training_depends_on(job):
    of_plain = {
        *(f"data.{name}" for name in ("augment", "crop", "scale", "colour")),
        *(f"train.{name}" for name in ("batch_size", "epochs", "best_every", "patience", "seed")),
        *(s.key for s in job.config.settings() if s.key.split(".")[0] in ("net", "optim")),
        "run.accumulate", "run.precision", "ce.reduction", "ce.class_weights", "latent.official", "latent.step0",
        "proto.average", "proto.decay",
    } - LATER  # fmt: skip
    found = keys_that_change(job, "ft")
    assert found == of_plain, found ^ of_plain


def test_the_held_out_images_that_choose_a_base_are_in_its_key(tmp_path):
    """With train.best_every the model with the best score on them is kept."""

    def key(*more, protocol="overlapped"):
        settings = parse_settings([*TINY, "shapes.train=120", "train.holdout=0.3", *more])
        spec = parse_spec(f"shapes:8-1@{protocol}")
        made = prepare_job(spec, "ft", load_config("shapes", None, settings), None, tmp_path / "run", None, Quiet())
        step, index = made.scenario.steps[0], made.indexes["train"]
        found = [base_key(*base_of(METHODS["ft"], made.config), step, index, protocol)]
        index.digests[index.ids.index(step.test_ids[0])] ^= 1  # another mask
        return (*found, base_key(*base_of(METHODS["ft"], made.config), step, index, protocol))

    last, best = (key(f"train.best_every={n}") for n in (0, 1))
    others = ("eval.transform=crop512", "eval.future=background")
    assert len({*best, *(key("train.best_every=1", other)[0] for other in others)}) == 4
    assert {*last, *(key(other)[0] for other in others)} == {last[0]}  # which are scored only


def test_a_base_of_its_own_depends_on_the_losses_too(job):
    plain = keys_that_change(job, "ft")
    own = {s.key for s in job.config.settings() if s.key.startswith("ce.")} - {"ce.reduction", "ce.class_weights"}
    assert keys_that_change(job, "ewc") - plain == own

    def key(**changed):
        return key_of(job, "ewc", job.config.changed(changed))

    for name in ("cl.repel", "sp.weight"):  # terms that step 0 has only if it is told so
        assert key(**{name: 0.5}) == key()
        assert key(**{name: 0.5, "latent.step0": True}) != key(**{"latent.step0": True})


def test_plain_training_of_a_base_has_no_losses_of_the_method(job):
    plain = job.config.without("later")
    config = plain.changed({"kd.weight": 7.0, "ce.kind": "unbiased", "ce.reduction": "all", "proto.decay": 0.5})
    method, base = base_of(METHODS["mib"], config)
    assert method is METHODS["ft"]
    assert base == plain.changed({"ce.reduction": "all", "proto.decay": 0.5})
    without_teacher = config.changed({"kd.weight": 0.0})
    assert base_of(METHODS["lwf-mc"], config) == (METHODS["lwf-mc"], without_teacher)
    for name in ("ewc", "pi", "rw"):
        assert base_of(METHODS[name], config) == (AllImportances, without_teacher)


@pytest.mark.parametrize("section_name", ["net", "run", "ce"])
def test_a_new_setting_leaves_the_keys_of_stored_bases(job, section_name):
    kind = type(job.config.sections()[section_name])
    wider = dataclasses.make_dataclass("Wider", [("added", int, setting(3, "new"))], bases=(kind,), frozen=True)
    old = job.config.sections()[section_name]
    values = {f.name: getattr(old, f.name) for f in dataclasses.fields(old)}
    newer = dataclasses.replace(job.config, **{section_name: wider(**values)})
    assert key_of(job, "ewc", newer) == key_of(job, "ewc", job.config)
    changed = dataclasses.replace(job.config, **{section_name: wider(**values, added=4)})
    assert key_of(job, "ewc", changed) != key_of(job, "ewc", job.config)


def test_the_defaults_that_keys_leave_out_are_those_of_this_recipe():
    """A key does not hold defaults: whoever changes one of these counts RECIPE up, then changes it here."""
    pinned = {
        "data.augment": "scale_crop", "data.crop": 512, "data.scale": (0.5, 2.0), "data.colour": 0.0,
        "train.batch_size": 8, "train.epochs": 30, "train.best_every": 0, "train.patience": 0, "train.seed": 0,
        "net.encoder": "resnet101", "net.decoder": "deeplabv3plus", "net.output_stride": 16, "net.atrous": "6,12,18",
        "net.decoder_activation": "relu", "net.dilate_first_block": True, "net.stride_on": "conv2",
        "net.align_corners": False, "net.weights": "imagenet",
        "net.bn_momentum_encoder": 0.01, "net.bn_momentum_decoder": 0.1, "net.bn": "train",
        "optim.optimiser": "sgd", "optim.lr": 1e-3, "optim.decoder_lr_factor": 10.0, "optim.encoder_lr_factor": 1.0,
        "optim.momentum": 0.9, "optim.nesterov": True, "optim.betas": (0.9, 0.999), "optim.weight_decay": 1e-4,
        "optim.schedule": "poly", "optim.power": 0.9, "optim.warmup": 0, "optim.lr_rule": "fixed",
        "optim.reference_batch": 8, "optim.clip": 0.0, "run.accumulate": 1, "run.precision": "auto",
        "ce.reduction": "valid", "ce.class_weights": "none", "ce.kind": "standard", "ce.init": "default",
        "proto.average": "image", "proto.decay": 0.0, "proto.background": "by_protocol",
        "latent.step0": False, "latent.official": False,
        "cl.attract": 0.0, "cl.repel": 0.0, "cl.form": "mse", "cl.scope": "batch", "cl.against": "batch",
        "cl.normaliser": "classes", "cl.labels": "truth", "cl.background": "include_if_known",
        "sp.weight": 0.0, "sp.variant": "class_max", "sp.scope": "image", "sp.detach_max": False,
        "laps.positive_base": 2.0,
    }  # fmt: skip
    sections = {name: kind for method in METHODS for name, kind in own_sections(method).items()}
    config = config_from({}, "test", sections)
    assert {s.key: s.value for s in config.settings() if s.affects in ("base", "losses")} == pinned


# --- the configuration of a step -----------------------------------------------------------------------------------


def test_later_steps_have_values_of_their_own():
    given = ["train.epochs=9", "train.batch_size_later=2", "optim.lr_later=0.5", "optim.decoder_lr_factor_later=3"]
    config = load_config("voc", None, parse_settings(given))
    assert config.of_step(0) == config
    for step in (config.of_step(1), config.of_step(2), config.of_step(1).of_step(1)):
        assert (step.train.epochs, step.train.batch_size) == (9, 2)  # 0: the same
        assert (step.optim.lr, step.optim.decoder_lr_factor, step.net.bn) == (0.5, 3.0, "freeze_stats")
    assert (config.optim.lr, config.net.bn) == (1e-3, "train")


def test_every_later_setting_replaces_a_setting():
    keys = {s.key: s for s in Config().settings()}
    assert {key for key, s in keys.items() if s.affects == "later"} == LATER
    assert all(key.removesuffix("_later") in keys for key in LATER)


# --- sections of a method's own ------------------------------------------------------------------------------------

POD = section("pod", {"weight": setting(10.0, "λ", 0), "weight_later": setting(0.0, "", same=0.0, affects="later"),
                      "scales": setting(3, "how many", 1), "note": setting("a", "", affects="nothing")})  # fmt: skip


def test_a_section_of_a_method_is_read_written_and_compared(tmp_path):
    (tmp_path / "own.toml").write_text("[pod]\nscales = 4\n")
    config = load_config(
        "voc", tmp_path / "own.toml", parse_settings(["pod.weight=3", "pod.weight_later=2"]), own={"pod": POD}
    )
    assert (config.own["pod"].weight, config.own["pod"].scales) == (3.0, 4)
    assert config.of_step(1).own["pod"].weight == 2.0
    saved = json.loads(json.dumps(config.to_dict()))
    assert config_from(saved, "config.json", {"pod": POD}) == config
    unread = saved_config(saved, "config.json")  # without the method
    assert unread.to_dict() == saved and unread.own["pod"].weight == 3.0
    other = config.changed({"pod.weight": 5.0, "pod.note": "b"})
    assert other.differences(unread) == ["pod.weight: 5.0, 3.0"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("pod.weight=-1", "at least 0"),
        ("pod.scales=1.5", "a whole number"),
        ("pod.wieght=1", "did you mean 'pod.weight'"),
        ("podd.weight=1", "did you mean 'pod'"),
    ],
)
def test_a_section_of_a_method_is_checked(text, message):
    with pytest.raises(UsageError, match=message):
        load_config("voc", None, parse_settings([text]), own={"pod": POD})


def test_without_the_method_its_section_is_unknown():
    with pytest.raises(UsageError, match=r"unknown section \[pod\]"):
        load_config("voc", None, parse_settings(["pod.weight=3"]))


@pytest.mark.parametrize(
    "wrong",
    [{"weight": 3.0}, {"weight": setting([1], "")}, {"a b": setting(1, "")}, {"weight_later": setting(1, "")}],
)
def test_a_wrong_declaration_is_named(wrong):
    with pytest.raises(UsageError, match="pod"):
        section("pod", wrong)


def test_what_a_saved_run_holds_is_checked():
    with pytest.raises(UsageError, match=r"pod\.weight"):
        saved_config({"pod": {"weight": [[]]}}, "config.json")
    with pytest.raises(UsageError, match="not the configuration"):
        saved_config([], "config.json")


def test_a_base_of_plain_training_does_not_know_a_methods_section(job):
    config = dataclasses.replace(job.config, own={"pod": POD(weight=3.0)})
    assert key_of(job, "ft", config) == key_of(job, "ft", job.config)
    assert key_of(job, "ewc", config) != key_of(job, "ewc", job.config)


def test_rows_of_an_ablation_share_a_base_where_step_0_is_the_same(job):
    def key(name):
        layers = method_layers(name, "default", None, "shapes")
        config = load_config("shapes", None, {}, layers, own_sections(name))
        return key_of(job, name, config)

    assert key("laps") == key("laps-trained-no-versus") == key("laps-gaussian") == key("laps-prototype")
    assert len({key("laps"), key("laps-softmax"), key("ewc")}) == 3
