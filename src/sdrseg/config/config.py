"""The configuration: frozen dataclasses whose fields declare their meaning and what they affect."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from sdrseg.config.engine import Optim, Run
from sdrseg.config.net import Net
from sdrseg.config.sections import Data, Eval, Shapes, Train
from sdrseg.config.setting import Affects, Setting, setting
from sdrseg.config.switches import Ce, Cl, Enc, Importance, Kd, Latent, Pm, Proto, Pseudo, Sp
from sdrseg.errors import UsageError

OF_STEP: Any = setting(None, "a value for one step", affects="later")


@dataclass(frozen=True)
class Config:
    """Everything that a run depends on besides its specification, its method and its data."""

    data: Data = field(default_factory=Data)
    eval: Eval = field(default_factory=Eval)
    train: Train = field(default_factory=Train)
    shapes: Shapes = field(default_factory=Shapes)
    net: Net = field(default_factory=Net)
    optim: Optim = field(default_factory=Optim)
    run: Run = field(default_factory=Run)
    ce: Ce = field(default_factory=Ce)
    kd: Kd = field(default_factory=Kd)
    pseudo: Pseudo = field(default_factory=Pseudo)
    enc: Enc = field(default_factory=Enc)
    proto: Proto = field(default_factory=Proto)
    pm: Pm = field(default_factory=Pm)
    cl: Cl = field(default_factory=Cl)
    sp: Sp = field(default_factory=Sp)
    latent: Latent = field(default_factory=Latent)
    importance: Importance = field(default_factory=Importance)
    own: Mapping[str, Any] = field(default_factory=dict)
    """Sections declared by a custom method, by name; see `sdrseg.config.setting.section`."""
    step: Mapping[str, Any] = field(default_factory=dict)
    """Values for one step, by "NUMBER.section.key"."""

    def sections(self) -> dict[str, Any]:
        """All sections by name, including those of a custom method."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("own", "step")} | dict(self.own)

    def settings(self) -> Iterator[Setting]:
        """All settings, section by section, and then the values for single steps."""
        for name, section in self.sections().items():
            for declared in fields(section):
                yield Setting(f"{name}.{declared.name}", declared, getattr(section, declared.name))
        for key, value in self.step.items():
            yield Setting(f"step.{key}", OF_STEP, value)

    def changed(self, values: Mapping[str, Any]) -> Config:
        """A copy with some values replaced, by "section.key"; None removes a value for one step."""
        sections, step_values = self.sections(), dict(self.step)
        for key, value in values.items():
            section, _, name = key.partition(".")
            if section == "step":
                step_values[name] = value
            else:
                sections[section] = replace(sections[section], **{name: value})
        own = {name: sections.pop(name) for name in self.own}
        return Config(**sections, own=own, step={key: value for key, value in step_values.items() if value is not None})

    def of_step(self, number: int) -> Config:
        """The configuration of a step: in later steps, X_later replaces X, and a value for this step replaces both."""
        later = [s for s in self.settings() if s.affects == "later" and s.declared is not OF_STEP]
        values = {s.key.removesuffix("_later"): s.value for s in later if number > 0 and s.value != s.same}
        for key, value in self.step.items():
            step, _, name = key.partition(".")
            if int(step) == number:
                values[name] = value
        return self.changed(values)

    def source_of(self, key: str, number: int) -> str:
        """The setting from which a setting has its value in a step: itself, its X_later, or a value for this step."""
        if f"{number}.{key}" in self.step:
            return f"step.{number}.{key}"
        later = [s for s in self.settings() if s.key == f"{key}_later"]
        return later[0].key if number > 0 and later and later[0].value != later[0].same else key

    def without(self, *kinds: Affects, sections: Collection[str] = ()) -> Config:
        """A copy in which all settings that affect `kinds`, and all of some sections, have their defaults."""

        def dropped(s: Setting) -> bool:
            return s.affects in kinds or s.key.partition(".")[0] in sections

        return self.changed({s.key: s.declared.default for s in self.settings() if dropped(s)})

    def require_steps(self, count: int) -> None:
        """Raise if there is a value for a step that a scenario with this many steps does not have."""
        if beyond := [key for key in self.step if int(key.partition(".")[0]) >= count]:
            raise UsageError(f"step.{beyond[0]}: the scenario has the steps 0 to {count - 1}.")

    @property
    def oracle(self) -> bool:
        """Whether held-out images are scored with all labels, which a method without old images does not have."""
        return self.train.holdout > 0 and self.train.holdout_scope == "all"

    def scenario_policy(self) -> dict[str, Any]:
        """The keyword arguments of `build_scenario`."""
        return {
            "void_train": self.data.void_train,
            "eval_future": self.eval.future,
            "holdout": self.train.holdout,
            "holdout_scope": self.train.holdout_scope,
            "left_out": self.data.left_out,
        }

    def differences(self, other: Config) -> list[str]:
        """Differences that change results, as "section.key: own value, other value"."""
        own, theirs = ({s.key: s.value for s in c.settings() if s.affects != "nothing"} for c in (self, other))
        keys = [*own, *(f"step.{key}" for key in other.step if f"step.{key}" not in own)]
        return [f"{k}: {own.get(k)!r}, {theirs.get(k)!r}" for k in keys if own.get(k) != theirs.get(k)]

    def to_dict(self) -> dict[str, Any]:
        """Nested plain values, ready for JSON; `config_from` reads them back."""
        values = {name: asdict(s) for name, s in self.sections().items()}
        plain: dict[str, Any] = json.loads(json.dumps(values | ({"step": dict(self.step)} if self.step else {})))
        return plain
