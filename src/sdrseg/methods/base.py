"""The base class of methods: named terms with weights, and state that is kept between steps.

Most methods only set values for the switches of `config.switches`; the terms themselves are in terms.py, pixels.py and
latent.py. A method with custom behaviour overrides the hooks.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

from torch import Tensor

from sdrseg.config import Config
from sdrseg.config.setting import section
from sdrseg.decision import Decision
from sdrseg.distributed import Processes
from sdrseg.errors import UsageError
from sdrseg.methods.latent import LatentSpace
from sdrseg.methods.pixels import PixelTerms
from sdrseg.methods.terms import TERMS, Term, sections_of

if TYPE_CHECKING:
    from sdrseg.datasets.batches import Batch
    from sdrseg.network import Network, Output


When = Literal["before", "after"]

OF_PYTHON = ("__dict__", "__weakref__", "__annotate__", "__annotate_func__")
"""Descriptors and functions that Python adds to a class without code."""


def adds_code(method: type, *to: type) -> bool:
    """Whether a class defines code or terms besides those of the classes `to` and their bases.

    Code is anything that can be called or computes an attribute, and a value in place of it (`decision = "sigmoid"`),
    but not classes (`settings`, `trains_step0_like`) and what Python itself adds to a class.
    """
    known = {base for one in to for base in one.__mro__}
    added = [member for kind in method.__mro__ if kind not in known for member in vars(kind).items()]
    if any(name == "own_terms" and value for name, value in added):
        return True
    members = [(name, value) for name, value in added if name not in OF_PYTHON and not isinstance(value, type)]
    return any(_is_code(value) or any(_is_code(vars(kind).get(name)) for kind in known) for name, value in members)


def _is_code(member: Any) -> bool:
    return callable(member) or hasattr(member, "__get__")


class From(NamedTuple):
    """The value of a switch and its source: paper, official code, a statement of an author, or a measurement."""

    value: Any
    source: str


@dataclass(frozen=True)
class StepInfo:
    """The step as seen by a method. n_old counts background; in step 0 it is 0 and n_new counts background."""

    number: int
    n_old: int
    n_new: int
    protocol: str
    teacher_decision: Decision = "softmax"
    class_weights: tuple[float, ...] | None = None
    """The weight of each channel in the cross-entropy; None: equal weights."""
    old_labels: bool = False
    """Whether some images, the replayed ones, have labels of old classes."""

    @property
    def classes(self) -> int:
        return self.n_old + self.n_new


class Method(PixelTerms):
    """Fine-tuning plus every term that the configuration enables. The base class of all methods."""

    name: ClassVar[str]
    summary: ClassVar[str]
    switches: ClassVar[Mapping[str, From]] = {}
    """Values for the configuration, by "section.key"."""
    by_preset: ClassVar[Mapping[str, Mapping[str, From]]] = {}
    by_task: ClassVar[Mapping[str, Mapping[str, From]]] = {}
    """Values that override `switches` for a preset, and for a task such as "15-1"."""
    settings: ClassVar[Mapping[str, Any] | type] = {}
    """Custom settings: {"weight": setting(10.0, "λ")} is `--set NAME.weight=3` and `self.own.weight`. Or a frozen
    dataclass of settings, in a subclass derived from that of its class. A subclass adds to the settings of its class:
    `--set laps.weight=3` for one of LAPS."""
    section: ClassVar[str] = ""
    """The section of these settings; by default the name of the first class that has settings."""
    own_terms: ClassVar[tuple[Term, ...]] = ()
    """Custom terms."""
    own_step0: ClassVar[bool] = False
    """Whether step 0 is trained with this method; all others share one model of step 0."""
    trains_step0_like: ClassVar[type[Method] | None] = None
    """Another method with the same step 0, whose model is then shared; settings that differ in step 0 still count. A
    subclass with code of its own trains step 0 itself, unless it declares this, too."""
    needs_stages: ClassVar[bool] = False
    """Whether `Output.stages` contains all stages of the encoder, for student and teacher, or only the last."""

    def __init__(self, config: Config, processes: Processes | None = None):
        super().__init__(config, processes or Processes())
        self.latent = LatentSpace(config, self.processes)
        self.notes: list[str] = []
        """Messages for the user, printed after a survey."""

    @classmethod
    def values(cls, preset: str = "default", task: str | None = None) -> dict[str, From]:
        """All values this method sets, for a preset and a task."""
        return {**cls.switches, **cls.by_task.get(task or "", {}), **cls.by_preset.get(preset, {})}

    @classmethod
    def trainer_of_step0(cls) -> type[Method]:
        """The method that trains step 0 where `own_step0` is set."""
        declared_in = next(kind for kind in cls.__mro__ if "trains_step0_like" in vars(kind))
        return cls if cls.trains_step0_like is None or adds_code(cls, declared_in) else cls.trains_step0_like

    @classmethod
    def own_section(cls) -> str:
        """The section of the custom settings."""
        having = [kind for kind in cls.__mro__ if any(vars(base).get("settings") for base in kind.__mro__)]
        names = [vars(kind)["name"] for kind in having if "name" in vars(kind)]
        return cls.section or (names[-1] if names else cls.name)

    @classmethod
    def own_sections(cls) -> dict[str, type]:
        """The sections of the configuration with the settings of this class and of its terms, by name."""
        name, of_terms = cls.own_section(), sections_of(cls.own_terms)
        made: type | None = None
        for kind in reversed(cls.__mro__):
            if settings := vars(kind).get("settings"):
                made = section(name, settings, made)
        return of_terms | ({name: made} if made else {})

    @property
    def own(self) -> Any:
        """The values of the custom settings."""
        return self.config.own[self.own_section()]

    @property
    def replayable(self) -> bool:
        """Whether `terms` may be compiled, or recorded once and replayed as a CUDA graph: it never synchronises with
        the host, and it updates its state in place instead of creating new tensors. A class with custom terms has to
        set it itself; the terms of the official code cannot be replayed."""
        return not self.config.latent.official and self.config.kd.kind != "cil_official"

    @property
    def decision(self) -> Decision:
        """How logits become a class and probabilities; saved with each step, for scores, predictions and exports."""
        return {"binary": "sigmoid_all", "one_vs_rest": "sigmoid"}.get(self.config.ce.kind, "softmax")  # type: ignore[return-value]

    @property
    def row_rates(self) -> tuple[float, float]:
        """Learning-rate multipliers of the classifier's old and new rows in later steps; 0 keeps rows bit-identical."""
        return 1.0, 1.0

    def iterates(self, step: int) -> bool:
        """Whether a step is trained by gradient descent. If not, only its surveys run."""
        return True

    # --- hooks, in the order in which they are called ---------------------------------------------------------------

    @property
    def needs_teacher(self) -> bool:
        """Whether later steps have a teacher: if a term uses it, or if the class has any code or terms of its own."""
        config = self.config
        if adds_code(type(self), Method):
            return True
        relabels = config.pseudo.threshold > 0 or config.cl.labels == "pseudo"
        return relabels or any(term.needs_teacher for term in self.objective_terms)

    def begin_step(self, step: StepInfo, student: Network, teacher: Network | None) -> None:
        """Prepare for a step: grow the classifier (and prototypes) by the new classes.

        Both networks remain available as `self.student` and `self.teacher`, for terms on the classifier's parameters.
        """
        self.step, self.student, self.teacher = step, student, teacher
        if step.number > 0 and step.n_new > 0:
            student.grow(step.n_new, init=self.config.ce.init)
        device = next(student.parameters()).device
        self.weigh_classes(step.class_weights, device)
        nonnegative = student.features_nonnegative
        self.latent.begin_step(step, student.feature_channels, student.stride, device, nonnegative)

    def wants_survey(self, when: When) -> bool:
        """Whether to pass over this step's data `before` or `after` fitting; by default if `survey` is overridden."""
        return type(self).survey is not Method.survey

    def survey_views(self, step: int) -> int:
        """How many augmented views of each image a survey of a step sees: those of the first epochs."""
        return 1

    def begin_survey(self, when: When) -> None:
        """Called before the survey `before` or `after` fitting."""

    def survey(self, batch: Batch, student: Output, teacher: Output | None) -> None:
        """Called with the step's training data without gradients, networks in eval mode: every image once, augmented as
        in the first epoch, before fitting and again before `end_step`, where `wants_survey` says so.

        Processes get different images and different numbers of batches: sum over them in `end_survey`, not here. Keep
        the results of the first survey in `state_dict`, because a resumed run does not repeat it.
        """

    def end_survey(self, when: When) -> None:
        """Called after the last batch of a survey; `self.processes.sum` sums over processes."""

    def parameter_groups(self, network: Network, encoder: float, decoder: float) -> list[dict[str, Any]]:
        """The optimiser's groups, each with its initial learning rate. Parameters in no group are not trained."""
        return [
            {"params": list(network.encoder_parameters()), "lr": encoder},
            {"params": list(network.decoder_parameters()), "lr": decoder},
        ]

    # relabel(batch, teacher) is defined in pixels.py

    def terms(self, batch: Batch, student: Output, teacher: Output | None) -> dict[str, Tensor]:
        """The loss terms of a batch by name, unweighted. Called outside autocast; everything is on one device."""
        terms = self._over_pixels(batch, student.logits, None if teacher is None else teacher.logits)
        for term in self.objective_terms:
            if term.compute is not None and (teacher is not None or not term.needs_teacher):
                value = term.compute(self, batch, student, teacher)
                if value is not None:
                    self._require_number(term.name, value)
                    terms[term.name] = value
        terms |= self.latent.terms(batch, student.features, None if teacher is None else teacher.logits)
        more = self.more_terms(batch, student, teacher)
        self._require_terms(more, terms)
        terms |= more
        return {name: term if name in self._counts else term / self._parts for name, term in terms.items()}

    def more_terms(self, batch: Batch, student: Output, teacher: Output | None) -> dict[str, Tensor]:
        """Further custom terms by name, besides `own_terms`."""
        return {}

    def _require_terms(self, more: Any, known: Mapping[str, Tensor]) -> None:
        """Raise if `more_terms` returned anything but scalars with new names."""
        if not isinstance(more, dict):
            raise UsageError(f"method {self.name}: more_terms returns {type(more).__name__}, not a dict of losses.")
        for name, term in more.items():
            if name in known:
                raise UsageError(f"method {self.name}: more_terms returns {name!r}, which exists already. Rename it.")
            self._require_number(name, term)

    def _require_number(self, name: str, term: Any) -> None:
        if not isinstance(term, Tensor) or term.dim() > 0:
            found = f"shape {tuple(term.shape)}" if isinstance(term, Tensor) else type(term).__name__
            raise UsageError(f"method {self.name}: the term {name!r} is not a tensor of one number, but {found}.")

    def objective(self) -> str:
        """The objective of the later steps as a formula."""
        formula = " + ".join(term.formula(self.config) for term in self.objective_terms)
        return formula + (", MiB init" if self.config.ce.init == "mib" else "")

    def weights(self) -> dict[str, float]:
        """The weight of each term by name; 1 for terms that are not named. It may depend on `self.step`."""
        return {term.name: term.weight_in(self.config) for term in self.known_terms if term.weight}

    @property
    def known_terms(self) -> list[Term]:
        """All terms, with or without a weight."""
        return [*TERMS.values(), *self.own_terms]

    @property
    def objective_terms(self) -> list[Term]:
        """The terms with a weight above 0."""
        return [term for term in self.known_terms if not term.weight or term.weight_in(self.config) > 0]

    def after_backward(self, student: Network) -> None:
        """Called after the backward pass; gradients are averaged over processes and may be changed."""

    def after_update(self, student: Network) -> None:
        """Called after the optimiser's update."""

    def end_step(self, student: Network) -> None:
        """Called after the last iteration of a step."""

    def metrics(self, batch: Batch, features: Tensor) -> dict[str, Tensor]:
        """Statistics of the features for the log: sparsity, distances to prototypes and between them."""
        return self.latent.metrics(batch, features)

    def memory_size(self, classes: int, channels: int) -> int:
        """The size in bytes of the memory for `classes` classes and background; 0 if the method keeps none."""
        return 0

    def state_dict(self) -> dict[str, Tensor]:
        """The state to save, as tensors by name."""
        return self.latent.state_dict()

    def require_state(self, names: Collection[str]) -> None:
        """Raise an error if a later step cannot begin with this state of the step before; `names`: of its tensors."""

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self.latent.load_state_dict(state)
