"""Settings: where a value comes from, and what the messages say about a wrong one."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sdrseg.config import Config, config_from, load_config, parse_settings, saved_config
from sdrseg.config.setting import section, setting
from sdrseg.errors import UsageError
from sdrseg.methods import own_sections
from sdrseg.scenario import find_source

KEYS = [setting.key for setting in Config().settings()]


def value_of(config: Config, key: str) -> object:
    section, name = key.split(".")
    return getattr(getattr(config, section), name)


# --- layers ---------------------------------------------------------------------------------------------------------


def test_the_defaults_are_those_of_the_paper_on_voc():
    config = load_config("voc")
    assert config == Config()
    assert (config.data.augment, config.data.crop, config.data.scale) == ("scale_crop", 512, (0.5, 2.0))
    assert (config.train.batch_size, config.train.epochs) == (8, 30)
    assert (config.eval.transform, config.eval.future, config.data.void_train) == ("crop512", "ignore", "ignore")
    ade = load_config("ade20k")
    assert (ade.train.batch_size, ade.train.epochs, ade.data.crop) == (4, 60, 512)


def test_later_layers_win_key_by_key(tmp_path: Path):
    file = tmp_path / "own.toml"
    file.write_text("[train]\nepochs = 7\nseed = 5\n[data]\nscale = [1, 1.5]\n")
    config = load_config("ade20k", file, parse_settings(["train.seed=9", "train.seed=11"]))
    assert config.train.batch_size == 4  # the data set's, which nobody changed
    assert config.train.epochs == 7  # the file's, not the data set's 60
    assert config.train.seed == 11  # the last assignment's
    assert config.data.scale == (1.0, 1.5) and type(config.data.scale[0]) is float
    assert load_config("ade20k").train.epochs == 60  # nothing of it stays behind
    assert find_source("ade20k").defaults["train"] == {"batch_size": 4, "epochs": 60}


@pytest.mark.parametrize(
    ("text", "key", "expected"),
    [
        ("data.augment=rrc", "data.augment", "rrc"),
        ('data.augment="rrc"', "data.augment", "rrc"),
        ("data.augment = rrc ", "data.augment", "rrc"),
        ("data.scale=[0.25, 1]", "data.scale", (0.25, 1.0)),
        ("data.scale=[1, 1]", "data.scale", (1.0, 1.0)),
        ("optim.betas=[0.95, 0.9]", "optim.betas", (0.95, 0.9)),
        ("data.workers=-1", "data.workers", -1),
        ("train.epochs=1_000", "train.epochs", 1000),
        (" train.epochs =3", "train.epochs", 3),
    ],
)
def test_assignments_take_toml_values_and_bare_words(text, key, expected):
    assert value_of(load_config("voc", None, parse_settings([text])), key) == expected


def test_values_come_as_they_are():
    path = "C:\\new\\table\t'x'.pth"
    settings = {"net.weights": path, "train.epochs": 3, "data.scale": (1, 1.5), "optim.nesterov": False}
    config = load_config("voc", None, settings)
    assert (config.net.weights, config.train.epochs, config.data.scale) == (path, 3, (1.0, 1.5))
    with pytest.raises(UsageError, match=r"settings: train.epochs = '3' is not a whole number"):
        load_config("voc", None, {"train.epochs": "3"})


def test_a_configuration_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().train.epochs = 3


# --- JSON -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("data_set", ["voc", "ade20k", "folder", "shapes"])
def test_json_gives_the_same_configuration_back(data_set):
    config = load_config(data_set, None, parse_settings(["data.scale=[0.3, 1.7]", "train.seed=123456789012345678901"]))
    text = json.dumps(config.to_dict())
    assert config_from(json.loads(text), "config.json") == config
    assert {f"{section}.{key}" for section, keys in json.loads(text).items() for key in keys} == set(KEYS)


# --- what is wrong is named ---------------------------------------------------------------------------------------

WRONG = [
    ("trian.epochs=3", ["unknown section [trian]", "did you mean 'train'"]),
    ("zzz.epochs=3", ["unknown section [zzz]", "data, eval, train, shapes"]),
    ("train.epoch=3", ["unknown key train.epoch", "did you mean 'train.epochs'"]),
    ("train.crop=3", ["unknown key train.crop", "did you mean 'data.crop'"]),
    ("eval.seed=3", ["unknown key eval.seed", ".seed'"]),
    ("train.epochs.more=3", ["unknown key train.epochs.more", "train.epochs"]),
    ("train.epochs=many", ["train.epochs = 'many'", "a whole number"]),
    ("train.epochs=3.0", ["train.epochs = 3.0", "a whole number"]),
    ("train.epochs=true", ["train.epochs = True", "a whole number"]),
    ("train.epochs=", ["train.epochs = ''", "a whole number"]),
    ("train.epochs=0", ["train.epochs = 0", "at least 1"]),
    ("train.epochs=1979-05-27", ["train.epochs", "a whole number"]),
    ("train.epochs={a = 1}", ["train.epochs", "a whole number"]),
    ("train.epochs=1\nseed=2", ["train.epochs", "a whole number"]),
    ("data.workers=-2", ["data.workers = -2", "between -1 and 256"]),
    ("data.crop=31", ["data.crop = 31", "at least 32"]),
    ("data.augment=scalecrop", ["data.augment = 'scalecrop'", "did you mean 'scale_crop'"]),
    ("data.augment=3", ["data.augment = 3", "scale_crop, rrc"]),
    ("data.augment=[1]", ["data.augment = [1]", "scale_crop, rrc"]),
    ("data.scale=1", ["data.scale = 1", "a list of 2 values"]),
    ("data.scale=[1]", ["data.scale = [1]", "a list of 2 values"]),
    ("data.scale=[2, 1]", ["data.scale = [2, 1]", "smaller value comes first"]),
    ("data.scale=[0, 1]", ["data.scale = 0", "between 0.01 and 100"]),
    ("data.scale=[0.5, nan]", ["data.scale = nan", "between 0.01 and 100"]),
    ("data.scale=[0.5, inf]", ["data.scale = inf", "finite"]),
    ("kd.weight=inf", ["kd.weight = inf", "finite"]),
    ("kd.weight=nan", ["kd.weight = nan", "at least 0"]),
    (f"kd.weight={'9' * 400}", ["kd.weight", "too large"]),
    ("pm.background=1", ["pm.background = 1", "true or false"]),
    ("data.scale=['a', 1]", ["data.scale = 'a'", "a number"]),
    ("data.scale=[true, 1]", ["data.scale = True", "a number"]),
    (f"data.scale=[1, {'9' * 400}]", ["data.scale", "between 0.01 and 100"]),
    ("train=3", ["section.key", "train.epochs"]),
    ("train.epochs", ["section.key=value"]),
    (".epochs=3", ["section.key", "train.epochs"]),
    ("train.=3", ["section.key", "train.epochs"]),
    ("=", ["section.key", "train.epochs"]),
    ("", ["section.key=value"]),
]


@pytest.mark.parametrize(("text", "words"), WRONG, ids=[text[:30] for text, _ in WRONG])
def test_a_wrong_assignment_is_named(text, words):
    with pytest.raises(UsageError) as caught:
        load_config("voc", None, parse_settings(["train.seed=1", text]))
    message = str(caught.value)
    assert message.startswith(("settings: ", f"--set {text}: "))
    assert [word for word in words if word not in message] == [], message


@pytest.mark.parametrize(
    ("toml", "words"),
    [
        (b"[train\n", ["not valid TOML", "line 1"]),
        (b"x = '\xff'", ["not valid TOML"]),
        (b"x = " + b"[" * 5000, ["not valid TOML"]),
        (b"x = " + b"1" * 5000, ["not valid TOML"]),
        (b"train = 3", ["train is a section", "train.KEY = VALUE"]),
        (b"[[train]]\nepochs = 3", ["train is a section"]),
        (b"epochs = 3", ["unknown section [epochs]"]),
        (b"[train]\nepoch = 3", ["unknown key train.epoch", "'train.epochs'"]),
        (b"[train]\nepochs = '3'", ["train.epochs = '3'", "a whole number"]),
    ],
)
def test_a_wrong_file_is_named(tmp_path: Path, toml, words):
    file = tmp_path / "own.toml"
    file.write_bytes(toml)
    with pytest.raises(UsageError) as caught:
        load_config("voc", file)
    message = str(caught.value)
    assert message.startswith(f"{file}: ")
    assert [word for word in words if word not in message] == [], message


def test_a_file_that_is_not_there(tmp_path: Path):
    with pytest.raises(UsageError, match="No such file"):
        load_config("voc", tmp_path / "none.toml")
    with pytest.raises(UsageError, match="Is a directory"):
        load_config("voc", tmp_path)


def test_files_are_utf8_whatever_the_locale(tmp_path: Path):
    (tmp_path / "own.toml").write_bytes("# für später\n[train]\nepochs = 4\n".encode())
    assert load_config("voc", tmp_path / "own.toml").train.epochs == 4


assignments = st.one_of(
    st.text(),
    st.builds("{}={}".format, st.sampled_from([*KEYS, "train.x", "x.y"]), st.text()),
    st.builds("{}={}".format, st.sampled_from(KEYS), st.from_type(bool | int | float).map(str)),
    st.builds("{}=[{}, {}]".format, st.sampled_from(KEYS), st.integers(), st.floats()),
)


@settings(max_examples=300, deadline=None)
@given(assignments)
@example("train.epochs=" + "[" * 5000)
@example("train.epochs=" + "1" * 5000)
@example("train.epochs=\ud800")
def test_any_assignment_is_understood_or_refused(text):
    try:
        config = load_config("voc", None, parse_settings([text]))
    except UsageError as error:
        assert str(error)
    else:
        key = text.partition("=")[0]
        assert key.strip() in KEYS
        others = [k for k in KEYS if k != key.strip()]
        assert [value_of(config, k) for k in others] == [value_of(Config(), k) for k in others]
        assert config_from(json.loads(json.dumps(config.to_dict())), "config.json") == config
        value = value_of(config, key.strip())
        if not isinstance(value, str):
            assert load_config("voc", None, parse_settings([f"{key}={json.dumps(value)}"])) == config


def test_statistics_of_a_random_start_move_faster():
    assert load_config("voc").net.bn_momentum_encoder == 0.01
    assert load_config("voc", None, parse_settings(["net.weights=none"])).net.bn_momentum_encoder == 0.1
    assert (
        load_config(
            "voc", None, parse_settings(["net.weights=none", "net.bn_momentum_encoder=0.02"])
        ).net.bn_momentum_encoder
        == 0.02
    )


# --- values for one step ----------------------------------------------------------------------------------------------


def test_a_value_for_one_step_replaces_those_of_the_others(tmp_path: Path):
    file = tmp_path / "own.toml"
    file.write_text("[kd]\nweight = 1\n[step.2.kd]\nweight = 2\n[step.3]\noptim.lr = 3e-3\n")
    config = load_config("voc", file, parse_settings(["step.2.kd.weight=5", "optim.lr_later=0.1"]))
    assert [config.of_step(n).kd.weight for n in range(4)] == [1, 1, 5, 1]
    assert [config.of_step(n).optim.lr for n in range(4)] == [1e-3, 0.1, 0.1, 3e-3]
    assert config_from(config.to_dict(), "saved") == saved_config(config.to_dict(), "saved") == config
    assert "step" not in Config().to_dict()
    plain = load_config("voc", None, {"kd.weight": 1.0, "optim.lr_later": 0.1})
    assert config.without("later") == plain.without("later")  # the model of step 0 does not depend on it
    assert config.differences(plain) == ["step.2.kd.weight: 5.0, None", "step.3.optim.lr: 0.003, None"]
    assert plain.differences(config) == ["step.2.kd.weight: None, 5.0", "step.3.optim.lr: None, 0.003"]
    config.require_steps(4)
    with pytest.raises(UsageError, match=r"step\.3\.optim\.lr: the scenario has the steps 0 to 2"):
        config.require_steps(3)


def test_a_value_for_one_step_of_a_method_s_own_setting_is_read_without_the_method():
    own = own_sections("laps")
    config = load_config("shapes", None, {"step.1.laps.positive": 3.0}, own=own)
    assert config.source_of("laps.positive", 1) == "step.1.laps.positive"
    assert [config.source_of("laps.positive", step) for step in (0, 2)] == ["laps.positive"] * 2
    assert [config.source_of("optim.lr", step) for step in (0, 1)] == ["optim.lr", "optim.lr_later"]
    assert config.source_of("train.batch_size", 1) == "train.batch_size"  # train.batch_size_later is "as in step 0"
    saved = saved_config(config.to_dict(), "config.json")
    assert saved.to_dict() == config.to_dict() and config.differences(saved) == saved.differences(config) == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("step.0.kd.weight=1", "a step from 1"),
        ("step.x.kd.weight=1", "a step from 1"),
        ("step.2=1", "a step from 1"),
        ("step.2.kd.wait=1", "did you mean 'kd.weight'"),
        ("step.2.net.encoder=resnet50", "not a setting of single steps"),
        ("step.2.optim.lr_later=1", "not a setting of single steps"),
        ("step.2.kd.weight=-1", "at least 0"),
        ("step.2.kd.weight=[1]", "not a number"),
        ("step=1", "is not a setting"),
    ],
)
def test_a_value_for_one_step_that_cannot_be_is_refused(text, message):
    with pytest.raises(UsageError, match=message):
        load_config("voc", None, parse_settings([text]))


def test_messages_on_settings_of_methods_and_on_lists_say_what_is_possible():
    own = section("plop", {"weight": setting(1.0, "the weight")})
    with pytest.raises(
        UsageError, match=r"plop\.weight is not a setting of single steps\. Its method allows that with "
    ):
        load_config("voc", None, parse_settings(["step.1.plop.weight=3"]), own={"plop": own})
    with pytest.raises(
        UsageError, match=r"run\.loggers = 'wandbb' is not a list .* such as \[\"tensorboard\"\]; known are"
    ):
        load_config("voc", None, parse_settings(["run.loggers=wandbb"]))
