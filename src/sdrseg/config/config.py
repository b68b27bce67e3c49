"""The configuration: frozen dataclasses whose fields declare their meaning and what they affect."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from sdrseg.config.engine import Optim, Run
from sdrseg.config.net import Net
from sdrseg.config.sections import Data, Eval, Shapes, Train
from sdrseg.config.setting import Affects, Setting
from sdrseg.config.switches import Ce, Cl, Enc, Importance, Kd, Latent, Pm, Proto, Pseudo, Sp


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

    def sections(self) -> dict[str, Any]:
        """All sections by name, including those of a custom method."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "own"} | dict(self.own)

    def settings(self) -> Iterator[Setting]:
        """All settings, section by section."""
        for name, section in self.sections().items():
            for declared in fields(section):
                yield Setting(f"{name}.{declared.name}", declared, getattr(section, declared.name))

    def changed(self, values: Mapping[str, Any]) -> Config:
        """A copy with some values replaced, given by "section.key"."""
        sections = self.sections()
        for key, value in values.items():
            section, _, name = key.partition(".")
            sections[section] = replace(sections[section], **{name: value})
        own = {name: sections.pop(name) for name in self.own}
        return Config(**sections, own=own)

    def of_step(self, number: int) -> Config:
        """The configuration of a step: in later steps, X_later replaces X."""
        later = [s for s in self.settings() if s.affects == "later"] if number > 0 else []
        return self.changed({s.key.removesuffix("_later"): s.value for s in later if s.value != s.same})

    def without(self, *kinds: Affects) -> Config:
        """A copy in which all settings that affect `kinds` have their defaults."""
        return self.changed({s.key: s.declared.default for s in self.settings() if s.affects in kinds})

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
        theirs = {s.key: s.value for s in other.settings()}
        return [
            f"{s.key}: {s.value!r}, {theirs.get(s.key)!r}"
            for s in self.settings()
            if s.affects != "nothing" and s.value != theirs.get(s.key)
        ]

    def to_dict(self) -> dict[str, Any]:
        """Nested plain values, ready for JSON; `config_from` reads them back."""
        plain: dict[str, Any] = json.loads(json.dumps({name: asdict(s) for name, s in self.sections().items()}))
        return plain
