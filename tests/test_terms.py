"""A term or a setting is declared once, and is then known everywhere: weights, formula, teacher, run, report."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from runs import SPEC, TINY, Quiet, run
from sdrseg import From, Term, load, register_method, register_term, setting, train
from sdrseg.config import load_config, parse_settings
from sdrseg.engine.bases import base_key, base_of
from sdrseg.engine.job import prepare_job
from sdrseg.engine.rescore import score_again
from sdrseg.errors import SdrsegError, UsageError
from sdrseg.methods import METHODS, Method, own_sections, resolve_method
from sdrseg.methods.terms import TERMS, only_later
from sdrseg.reporting.curves import meaning
from sdrseg.scenario import parse_spec
from sdrseg.study.cell import cell_of

from methods_bench import begin, make_config


@pytest.fixture
def drift():
    """A built-in term that one registration makes."""

    def compute(method, batch, student, teacher):
        return (student.features - teacher.features).square().mean()

    settings = {"weight": setting(0.0, "λ of the drift", 0, affects="losses")}
    yield register_term(Term("drift", "how far features move", "L_d", "drift.weight", True, compute, settings))
    TERMS.pop("drift", None)


def test_a_registered_term_is_known_everywhere(drift):
    off, on = (METHODS["ft"](make_config("ft", "default", *s)) for s in ((), ("drift.weight=2.5",)))
    assert (off.weights()["drift"], on.weights()["drift"]) == (0, 2.5)
    assert (off.objective(), on.objective()) == ("CE", "CE + 2.5·L_d")
    assert (off.needs_teacher, on.needs_teacher) == (False, True)
    assert meaning("drift") == "how far features move"
    _, base = base_of(METHODS["ft"], on.config)
    assert METHODS["ft"](base).objective() == "CE"
    stage = begin("ft", "disjoint", settings=("drift.weight=2.5",))
    stage.iterate(2)
    assert set(stage.terms[0]) == {"ce", "drift"} and stage.terms[1]["drift"] > 0
    with pytest.raises(UsageError, match="The term 'drift' exists already"):
        register_term(drift)


def test_a_registered_term_of_later_steps_leaves_the_base_of_a_method_alone():
    """Its section may be its own, or that of a term which step 0 has."""
    settings = {"weight": setting(0.0, "λ", 0, affects="losses")}
    register_term(Term("late", "later only", "L_l", "late.weight", settings=settings, in_step0=lambda config: False))
    register_term(Term("both", "with it", "L_b", "pm.weight", in_step0=lambda config: False))
    try:
        off, on = (make_config("ewc", "default", *s) for s in ((), ("late.weight=2.5",)))
        bases = [base_of(METHODS["ewc"], config)[1] for config in (off, on)]
        first, second = ({s.key: s.value for s in base.settings()} for base in bases)
        assert first == second and first["late.weight"] == 0
        assert only_later(on) == {"late", "cl", "sp"}
    finally:
        TERMS.pop("late"), TERMS.pop("both")


SLOW = """
import sdrseg
from functools import partial

def compute(method, batch, student, teacher, factor):
    return factor * student.features.float().square().mean()

settings = {{"weight": sdrseg.setting({default}, "how much", 0, affects="losses")}}
compute = partial(compute, factor={factor})
sdrseg.register_term(sdrseg.Term("slow", "small features", "L_s", "slow.weight", compute=compute, settings=settings))

@sdrseg.register_method
class Slow({base}):
    name = "slower"
    summary = "small features"
"""


@pytest.mark.parametrize("base", ["sdrseg.methods.EWC", "sdrseg.methods.LAPS", "sdrseg.methods.MiB"])
def test_a_step_0_with_a_registered_term_is_that_of_its_code(base, tmp_path):
    """Where the method trains step 0 itself; the step 0 that other methods share has no registered term."""
    spec, folder, plain = parse_spec(SPEC), tmp_path / "run", "ewc" if base.endswith("EWC") else "ft"

    def key(method, *more):
        config = load_config("shapes", None, parse_settings([*TINY, *more]), own=own_sections(method))
        found = prepare_job(spec, method, config, None, folder, None, Quiet())
        return base_key(*found.base[:2], found.scenario[0], found.indexes["train"], found.protocol)

    without, keys = key(plain), []
    try:
        for default, factor, more in (
            (0.0, 1, ["slow.weight=2"]),
            (0.0, 50, ["slow.weight=2"]),
            (2.0, 50, []),
            (0.0, 50, []),
        ):
            (tmp_path / "slow.py").write_text(SLOW.format(base=base, default=default, factor=factor))
            resolve_method(str(tmp_path / "slow.py"))
            keys.append(key("slower", *more))
    finally:
        METHODS.pop("slower", None)
        TERMS.pop("slow", None)
    first, edited, by_default, off = keys
    assert key(plain) == without
    if base.endswith("MiB"):
        assert {*keys} == {without}
        return
    assert len({first, edited, by_default, off}) == 4
    assert off == without or base.endswith("LAPS")


def test_plain_training_has_no_registered_term():
    settings = {"weight": setting(3.0, "λ", 0, affects="losses")}
    register_term(Term("on", "always", "L_o", "on.weight", settings=settings))
    try:
        _, base = base_of(METHODS["mib"], make_config("mib", "default"))
        assert METHODS["ft"](base).objective() == "CE"
        assert METHODS["ft"](make_config("ft", "default")).objective() == "CE + 3·L_o"
    finally:
        TERMS.pop("on")


def test_a_method_is_shown_with_the_settings_of_registered_terms(drift, sdrseg):
    code, said, _ = sdrseg("methods", "ft")
    assert code == 0 and "drift.weight" in said and "λ of the drift" in said
    assert "Own settings" in said and "set by" not in said  # ft sets nothing, so it has no table of values
    assert "set by" in sdrseg("methods", "mib")[1]


OWN = """
import sdrseg

@sdrseg.register_method
class Near(sdrseg.Method):
    name = "near"
    summary = "features stay near"
    settings = {"weight": sdrseg.setting(2.0, "pull towards the old features", 0)}

    def more_terms(self, batch, student, teacher):
        if teacher is None or self.own.weight == 7:
            return {}
        return {"near": (student.features.float() - teacher.features.float()).square().mean()}

    def weights(self):
        return super().weights() | {"near": self.own.weight}
"""


def test_a_subclass_adds_settings_to_those_of_its_base():
    class Shifted(METHODS["laps"]):
        name = "shifted"
        settings = {"shift": setting(0.5, "added to the bias of new rows", 0)}

    (kind,) = [kind for name, kind in Shifted.own_sections().items() if name == "laps"]
    assert {"shift", "ridge", "memory"} <= set(kind.__dataclass_fields__) and kind().shift == 0.5
    register_method(Shifted)  # the terms of its base find their settings
    try:
        config = load_config("voc", None, {"laps.shift": 2.0, "laps.ridge": 0.1}, (), own_sections("shifted"))
        assert (config.own["laps"].shift, config.own["laps"].ridge) == (2.0, 0.1)
    finally:
        METHODS.pop("shifted")


def test_the_term_of_a_base_finds_its_weight_in_a_subclass():
    """Settings are in the section of the first class that has some, also where a subclass adds more or none."""

    def value(method, batch, student, teacher):
        return student.features.float().mean()

    class Base(METHODS["mib"]):
        name = "base"
        settings = {"weight": setting(5.0, "λ", 0)}
        own_terms = (Term("pull", "a pull", "P", weight="base.weight", compute=value),)

    class Plain(Base):
        name = "plain"
        summary = "the same"

    class More(Base):
        name = "more"
        summary = "one more setting"
        settings = {"scale": setting(2.0, "a scale", 0)}

    try:
        for kind in (Base, Plain, More):
            register_method(kind)
            config = load_config("voc", None, {"base.weight": 3.0}, (), own_sections(kind.name))
            method = kind(config)
            assert method.own.weight == 3.0 and method.weights()["pull"] == 3.0
        assert method.own.scale == 2.0
    finally:
        for name in ("base", "plain", "more"):
            METHODS.pop(name, None)


def test_a_step_0_that_needs_settings_of_another_method_is_refused():
    like = {"name": "like", "summary": "s", "trains_step0_like": METHODS["laps"].trains_step0_like}
    with pytest.raises(UsageError, match="Like: trains_step0_like names a method with settings of its own, laps"):
        register_method(type("Like", (METHODS["ewc"],), like))
    assert "like" not in METHODS


@pytest.mark.parametrize("base", ["laps", "ft"])
def test_settings_add_up_over_several_classes_and_are_declared_once(base):
    """A second default would share a base with the first: keys of bases leave out what has its default."""

    class First(METHODS[base]):
        name = "first"
        settings = {"shift": setting(0.5, "added to the bias of new rows", 0)}

    class Second(First):
        name = "second"
        settings = {"scale": setting(2.0, "of new rows", 0)}

    section = "laps" if base == "laps" else "first"
    kind = Second.own_sections()[section]
    assert (kind().shift, kind().scale) == (0.5, 2.0) and hasattr(kind(), "ridge") == (base == "laps")

    class Again(Second):
        name = "again"
        settings = {"ridge" if base == "laps" else "shift": setting(9.0, "another default", 0)}

    with pytest.raises(UsageError, match=r"the method that this one extends has this setting\. .* switches = "):
        register_method(Again)
    assert "again" not in METHODS


@dataclass(frozen=True)
class Wider(METHODS["laps"].settings):
    shift: float = setting(0.5, "added to the bias of new rows", 0)


@dataclass(frozen=True)
class Changed(METHODS["laps"].settings):
    positive_base: float = setting(20.0, "another default", 0)


@dataclass(frozen=True)
class Alone:
    shift: float = setting(0.5, "added to the bias of new rows", 0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (Wider, ""),
        ({"ridge_later": setting(0.5, "in later steps", 0)}, ""),
        ({"other_later": setting(0.5, "in later steps", 0)}, r"laps\.other_later: not a name .* needs a setting NAME"),
        (Changed, r"laps\.positive_base: the method that this one extends has this setting"),
        (Alone, r"laps: .* has settings, too\. Give further ones as a dict, or derive their dataclass from Laps\."),
    ],
)
def test_a_dataclass_of_settings_adds_to_that_of_its_base(settings, message):
    kind = type("More", (METHODS["laps"],), {"name": "more", "summary": "s", "settings": settings})
    if message:
        with pytest.raises(UsageError, match=message):
            register_method(kind)
        assert "more" not in METHODS
        return
    assert {"ridge", "memory"} < set(kind.own_sections()["laps"].__dataclass_fields__)


def test_a_file_that_registers_a_term_may_be_edited(tmp_path):
    file, summaries = tmp_path / "drift.py", []
    try:
        for summary in ("first", "second"):
            term = f"sdrseg.register_term(sdrseg.Term('drift', {summary!r}, 'L_d', compute=lambda *given: None))"
            file.write_text(f"{OWN}\n{term}")
            assert resolve_method(str(file)) == "near"
            summaries.append(TERMS["drift"].summary)
        assert summaries == ["first", "second"]
        file.write_text(f"{OWN}\n{term}\n1 / 0")
        with pytest.raises(UsageError, match="ZeroDivisionError"):
            resolve_method(str(file))
        assert "drift" not in TERMS and "near" not in METHODS
    finally:
        TERMS.pop("drift", None)
        METHODS.pop("near", None)


@pytest.fixture
def own(sdrseg):
    Path("near.py").write_text(OWN)
    yield sdrseg
    METHODS.pop("near", None)


def trained(out, *more):
    settings = parse_settings([*TINY, *more])
    return train("shapes:8-2@disjoint", "near.py", out, settings=settings, bases="bases", display=Quiet())


def test_settings_of_a_method_are_settings(own):
    trained("one")
    trained("two", "near.weight=5")
    assert len(list(Path("bases").iterdir())) == 1  # plain training does not depend on them
    configs = [json.loads(Path(r, "config.json").read_text())["config"] for r in ("one", "two")]
    assert [c["near"]["weight"] for c in configs] == [2.0, 5.0]
    with pytest.raises(SdrsegError, match=r"near\.weight"):
        trained("one", "near.weight=3")  # another setting is another run
    with pytest.raises(UsageError, match=r"unknown key near\.wait"):
        trained("three", "near.wait=3")
    _, said, _ = own("methods", "near.py")
    assert "near.weight" in said and "pull towards the old features" in said

    assert Path("one/method.py").read_text() == OWN
    known = [cell_of(Path(run))["settings"] for run in ("one", "two")]
    METHODS.pop("near")
    assert [cell_of(Path(run))["settings"] for run in ("one", "two")] == known  # read without the method
    assert "near.weight" not in known[0] and known[1]["near.weight"] == 5.0
    Path("near.py").unlink()
    Path("one/method.py").write_text("raise SystemExit('executed')")
    assert all(again["same"] for again in score_again(Path("one")))
    assert load("one", device="cpu").facts["method"] == "near"
    assert own("report", "one", "two", "--out", "report.html")[0] == 0
    assert "near.weight" in Path("report.html").read_text()


def test_the_report_labels_a_term_without_the_code_of_its_method(own):
    code = WITHOUT_TEACHER.replace("*given: None", "m, b, student, t: student.features.float().square().mean()")
    Path("near.py").write_text(code.format(own_step0=False))
    trained("run")
    METHODS.pop("near")
    assert own("report", "run", "--out", "report.html")[0] == 0
    assert "nearness" in Path("report.html").read_text()


def test_a_weighted_term_that_never_appears_stops_the_run(own):
    message = "method near: the term 'near' has weight 7, but nothing returned it in the first epoch of step 1"
    with pytest.raises(UsageError, match=message):
        trained("run", "near.weight=7")


WITHOUT_TEACHER = """
import sdrseg

@sdrseg.register_method
class Near(sdrseg.Method):
    name = "near"
    summary = "a term that is never returned"
    own_step0 = {own_step0}
    needs_teacher = False
    settings = {{"weight": sdrseg.setting(2.0, "weight of the term", 0)}}
    own_terms = (sdrseg.Term("near", "nearness", "L_n", "near.weight", compute=lambda *given: None),)
"""


@pytest.mark.parametrize(("own_step0", "step"), [(False, 1), (True, 0)])
def test_it_stops_the_run_without_a_teacher_too(own, own_step0, step):
    Path("near.py").write_text(WITHOUT_TEACHER.format(own_step0=own_step0))
    message = f"'near' has weight 2, but nothing returned it in the first epoch of step {step}"
    with pytest.raises(UsageError, match=message):
        trained("run")


@pytest.mark.parametrize("method", ["lwf-mc", "ewc"])
def test_a_step_0_of_its_own_lacks_the_terms_of_later_steps(tmp_path, method):
    run(tmp_path / "run", method, "sp.weight=1e-5", "train.epochs=1")


def test_a_method_whose_name_is_a_section_cannot_have_settings():
    kind = {"name": "kd", "summary": "s", "settings": {"weight": setting(1.0, "w")}}
    with pytest.raises(UsageError, match="'kd' cannot name a section"):
        register_method(type("Kd", (Method,), kind))


@pytest.mark.parametrize(
    ("weight", "settings", "message"),
    [
        ("nera.weight", {}, "there is no setting 'nera.weight'; did you mean 'near.weight'"),
        ("near.wait", {}, "there is no setting 'near.wait'; did you mean 'near.weight'"),
        ("near", {}, "there is no setting 'near'"),
        ("kd.weight", {"weight": setting(1.0, "w")}, "'kd' cannot name a section"),
        ("n.weight", {"weight": setting(1.0, "w")}, 'section of its name. Write weight="entropy.weight" in place of'),
    ],
)
def test_the_weight_of_a_term_has_to_be_a_setting(weight, settings, message):
    name = {"kd.weight": "kd", "n.weight": "entropy"}.get(weight, "near")
    own = (Term(name, "nearness", "L_n", weight, settings=settings),)
    kind = {"name": "near", "summary": "s", "settings": {"weight": setting(1.0, "w")}, "own_terms": own}
    with pytest.raises(UsageError, match=message):
        register_method(type("Near", (Method,), kind))
    assert "near" not in METHODS


WEIGHT = {"weight": setting(1.0, "w")}


@pytest.mark.parametrize(
    ("terms", "message"),
    [
        ([Term("kd", "own distillation", "L_k")], "Near: the term 'kd' exists already"),
        ([Term("pull", "one", "L_1"), Term("pull", "two", "L_2")], "Near: the term 'pull' exists already"),
        ([Term("near", "nearness", "L_n", "near.weight", settings=WEIGHT)], r"both declare settings \[near\]"),
    ],
)
def test_names_of_terms_are_their_own(terms, message):
    kind = {"name": "near", "summary": "s", "settings": WEIGHT, "own_terms": tuple(terms)}
    with pytest.raises(UsageError, match=message):
        register_method(type("Near", (Method,), kind))
    assert "near" not in METHODS


def test_a_method_cannot_declare_the_settings_of_a_registered_term(drift):
    with pytest.raises(UsageError, match=r"both declare settings \[drift\]"):
        register_method(type("Drift", (Method,), {"name": "drift", "summary": "s", "settings": WEIGHT}))
    assert "drift" not in METHODS


def test_a_term_registered_after_a_method_cannot_take_the_name_of_one_of_its_terms():
    own = (Term("late", "own", "L_o"),)
    register_method(type("Near", (Method,), {"name": "near", "summary": "s", "own_terms": own}))
    try:
        register_term(Term("late", "of all", "L_a"))
        with pytest.raises(UsageError, match="Near: the term 'late' exists already"):
            make_config("near", "default")
    finally:
        del METHODS["near"]
        TERMS.pop("late", None)


def test_a_term_of_a_method_may_declare_settings():
    own = (Term("pull", "pull", "L_p", "pull.weight", settings={"weight": setting(3.0, "w")}),)
    kind = register_method(type("Near", (Method,), {"name": "near", "summary": "s", "own_terms": own}))
    try:
        config = make_config("near", "default", "pull.weight=4")
        assert kind(config).weights()["pull"] == 4
        assert "4·L_p" in kind(config).objective()
    finally:
        del METHODS["near"]


def test_weights_may_depend_on_the_step(own):
    Path("near.py").write_text(OWN.replace("self.own.weight}", "self.own.weight * self.step.number}"))
    trained("run")
    code, said, _ = own("methods", "near.py", "--json")
    assert code == 0 and json.loads(said)["weights"]["near"] == 2.0


@pytest.mark.parametrize(
    ("switches", "message"),
    [({"ce.init": "mib"}, "write 'ce.init': From\\('mib', "), ({"kd": From(1.0, "mine")}, "'kd' is not a switch")],
)
def test_switches_of_another_form_are_named(switches, message):
    with pytest.raises(UsageError, match=f"Odd: {message}"):
        register_method(type("Odd", (Method,), {"name": "odd", "summary": "odd", "switches": switches}))
    assert "odd" not in METHODS


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (lambda f: f.mean(), "more_terms returns Tensor, not a dict"),
        (lambda f: {"own": f}, r"the term 'own' is not a tensor of one number, but shape \(\d+, "),
        (lambda f: {"own": 3.0}, "the term 'own' is not a tensor of one number, but float"),
        (lambda f: {"ce": f.mean()}, "returns 'ce', which exists already"),
    ],
)
def test_terms_of_another_form_are_named(more, message):
    def more_terms(self, batch, student, teacher):
        return more(student.features)

    METHODS["odd"] = type("Odd", (Method,), {"name": "odd", "summary": "odd", "more_terms": more_terms})
    try:
        with pytest.raises(UsageError, match=f"method odd: .*{message}"):
            begin("odd", "disjoint").iterate(1)
    finally:
        del METHODS["odd"]


@pytest.mark.parametrize(("value", "found"), [(lambda f: f, r"shape \("), (lambda f: 3.0, "float")])
def test_an_own_term_that_is_no_number_is_named(value, found):
    def compute(method, batch, student, teacher):
        return value(student.features)

    term = Term("own", "own", "L_own", "odd.weight", False, compute)
    settings = {"weight": setting(1.0, "λ")}
    members = {"name": "odd", "summary": "odd", "settings": settings, "own_terms": (term,), "replayable": True}
    METHODS["odd"] = type("Odd", (Method,), members)
    try:
        with pytest.raises(UsageError, match=f"method odd: the term 'own' is not a tensor of one number, but {found}"):
            begin("odd", "disjoint").iterate(1)
    finally:
        del METHODS["odd"]
