"""The terms of the objective: the class, and all built-in terms, each declared only here.

Weights, the formula of a method, whether it needs a teacher and the labels of the report follow from it. A new term is
its function (losses/) and a call of `register_term`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from torch import Tensor

from sdrseg.config import Config
from sdrseg.config.setting import section
from sdrseg.errors import UsageError, nearest
from sdrseg.losses.distillation import encoder_distillation_sums
from sdrseg.losses.pixels import to_grid
from sdrseg.own_files import built_in

if TYPE_CHECKING:
    from sdrseg.datasets.batches import Batch
    from sdrseg.methods.base import Method
    from sdrseg.network import Output

Compute = Callable[["Method", "Batch", "Output", "Output | None"], "Tensor | None"]


@dataclass(frozen=True)
class Term:
    """A term of the objective: its name, weight and computation."""

    name: str
    summary: str  # a short description
    symbol: str | Callable[[Config], str]  # in the formula of a method
    weight: str = ""  # the setting of its weight, "section.key"; without one the weight is 1
    needs_teacher: bool = False  # computed only if there is a teacher
    compute: Compute | None = None
    """Returns the unweighted value, or None to omit the term. Without a function the term is computed elsewhere: the
    terms over pixels share a kernel (methods/pixels.py), those on prototypes their sums (methods/latent.py)."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the term, in a section with its name."""
    in_step0: Callable[[Config], bool] = lambda config: True
    """Whether a step 0 that the method trains itself has this term. Terms that need the teacher never appear there, and
    in the step 0 that methods share no registered term with a weight does."""

    def weight_in(self, config: Config) -> float:
        name, _, key = self.weight.partition(".")
        sections = config.sections()
        if name not in sections and self.settings:  # a configuration without the term, as of plain training
            return 0.0
        return float(getattr(sections[name], key))

    def expected(self, config: Config, step: int, has_teacher: bool) -> bool:
        """Whether a step has to compute the term if it has a weight."""
        return (has_teacher or not self.needs_teacher) and (step > 0 or self.in_step0(config))

    def formula(self, config: Config) -> str:
        """Weight and symbol, such as 10·UNKD."""
        symbol = self.symbol if isinstance(self.symbol, str) else self.symbol(config)
        weight = self.weight_in(config) if self.weight else 1.0
        return symbol if weight == 1 else f"{weight:g}·{symbol}"


CE = {"standard": "CE", "unbiased": "UNCE", "unbiased_if_masked": "UNCE", "binary": "BCE", "one_vs_rest": "Σ_new BCE"}
KD = {"standard": "KD", "unbiased": "UNKD", "binary": "Σ_c BCE(σ(z_c), σ(t_c))", "cil": "L_CIL"}


def encoder_distillation(method: Method, batch: Batch, student: Output, teacher: Output | None) -> Tensor:
    assert teacher is not None
    size = (student.features.shape[-2], student.features.shape[-1])
    keep = to_grid(method.distilled(batch), size, method.student.stride, False)
    return method.mean_of("enc", encoder_distillation_sums(student.features, teacher.features, keep))


def _latent_step0(config: Config) -> bool:
    return config.latent.step0


TERMS: dict[str, Term] = {}


def only_later(config: Config) -> set[str]:
    """The sections of the configuration whose terms step 0 does not have, besides those that need a teacher."""
    section = {name: term.weight.partition(".")[0] for name, term in TERMS.items()}
    return {*section.values()} - {section[name] for name, term in TERMS.items() if term.in_step0(config)}


def sections_of(terms: Iterable[Term]) -> dict[str, type]:
    """The sections of the configuration that terms declare, by name."""
    return {term.name: section(term.name, term.settings) for term in terms if term.settings}


def require_sound(term: Term, own: Mapping[str, type]) -> None:
    """Raise an error if the weight of a term is not a setting. `own`: sections besides the built-in ones."""
    built_in = {name: type(values) for name, values in Config().sections().items()}
    if term.settings and term.name in (*built_in, "step"):
        raise UsageError(f"{term.name!r} cannot name a section of settings. Choose another name for the term.")
    keys = {name: [f"{name}.{f.name}" for f in fields(kind)] for name, kind in (built_in | dict(own)).items()}
    named, _, key = term.weight.partition(".")
    if key in term.settings and named not in keys:
        raise UsageError(
            f"The weight of the term {term.name!r}: the settings of a term are in the section of its name. Write "
            f'weight="{term.name}.{key}" in place of {term.weight!r}.'
        )
    if term.weight and not any(term.weight in known for known in keys.values()):
        possible = [key for name in own for key in keys[name]] + [t.weight for t in TERMS.values() if t.weight]
        raise UsageError(
            f"The weight of the term {term.name!r}: there is no setting {term.weight!r}"
            f"{nearest(term.weight, possible)} Declare it in `settings`."
        )


def register_term(term: Term) -> Term:
    """Register a term for all methods; a weight above 0 enables it."""
    if term.name in TERMS:
        raise UsageError(f"The term {term.name!r} exists already. Choose another name.")
    require_sound(term, sections_of([*TERMS.values(), term]))
    TERMS[term.name] = term
    return term


for _term in (
    Term("ce", "cross-entropy", lambda c: CE[c.ce.kind]),
    Term("kd", "distillation of the output", lambda c: KD.get(c.kd.kind, c.kd.kind), "kd.weight", True),
    Term("enc", "distillation of the features", "ENC", "enc.weight", True, encoder_distillation),
    Term("pm", "prototype matching", "L_pm", "pm.weight", True),
    Term("attract", "attraction", "L_a", "cl.attract", in_step0=_latent_step0),
    Term("repel", "repulsion", "L_r", "cl.repel", in_step0=_latent_step0),
    Term("sp", "sparsity", lambda c: f"L_sp[{c.sp.variant}]", "sp.weight", in_step0=_latent_step0),
):
    register_term(_term)
BUILT_IN = built_in(TERMS)


def registered_in_step0(config: Config) -> list[Term]:
    """The registered terms that a step 0 with this configuration has."""
    found = [term for name, term in TERMS.items() if name not in BUILT_IN and term.expected(config, 0, False)]
    return [term for term in found if not term.weight or term.weight_in(config) > 0]
