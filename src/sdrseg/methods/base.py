"""What a method is: named terms with weights, and what it remembers between steps.

Most methods are nothing but values for the switches of `config.switches`; the terms themselves are here and in
latent.py. A method with ideas of its own overrides the hooks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from sdrseg.config import Config
from sdrseg.decision import Decision, probabilities
from sdrseg.distributed import Everyone
from sdrseg.errors import UsageError
from sdrseg.labels import VOID
from sdrseg.losses import official
from sdrseg.losses.cross_entropy import (
    binary_cross_entropy_sums,
    cross_entropy_sums,
    pixel_weights,
    unbiased_cross_entropy_sums,
    weighted_cross_entropy_sums,
)
from sdrseg.losses.distillation import (
    binary_distillation_sums,
    cil_sums,
    distillation_sums,
    unbiased_distillation_sums,
)
from sdrseg.losses.one_vs_rest import one_vs_rest_sums
from sdrseg.losses.pixels import mean
from sdrseg.losses.pseudo import confident_labels, split_labels
from sdrseg.losses.unbiased import unbiased_sums
from sdrseg.methods.latent import LatentSpace
from sdrseg.methods.terms import TERMS, Term

if TYPE_CHECKING:
    from sdrseg.data.batches import Batch
    from sdrseg.network import Network, Output


When = Literal["before", "after"]
SEES_TEACHER = ("begin_step", "survey", "relabel", "terms", "more_terms", "own_terms")


class From(NamedTuple):
    """The value of a switch and where it comes from: paper, official code, an author's word, or a measurement."""

    value: Any
    source: str


@dataclass(frozen=True)
class StepInfo:
    """What a method has to know of a step. n_old counts background; in step 0 it is 0 and n_new counts background."""

    number: int
    n_old: int
    n_new: int
    protocol: str
    teacher_decision: Decision = "softmax"
    class_weights: tuple[float, ...] | None = None
    """Of each channel, in the cross-entropy; None: all alike."""

    @property
    def classes(self) -> int:
        return self.n_old + self.n_new


class Method:
    """Fine-tuning, and every term that the configuration switches on. The base of all methods."""

    name: ClassVar[str]
    summary: ClassVar[str]
    switches: ClassVar[Mapping[str, From]] = {}
    """Values for the configuration, by "section.key"."""
    by_preset: ClassVar[Mapping[str, Mapping[str, From]]] = {}
    by_task: ClassVar[Mapping[str, Mapping[str, From]]] = {}
    """What differs for a preset, and for a task such as "15-1"."""
    settings: ClassVar[Mapping[str, Any]] = {}
    """Settings of the method's own: {"weight": setting(10.0, "λ")} is `--set NAME.weight=3` and `self.own.weight`."""
    own_terms: ClassVar[tuple[Term, ...]] = ()
    """Terms of the method's own."""
    own_step0: ClassVar[bool] = False
    """Whether step 0 has to be trained with this method; all others share one step-0 model."""
    needs_stages: ClassVar[bool] = False
    """Whether `Output.stages` holds every stage of the encoder, of student and teacher; else the last alone."""

    def __init__(self, config: Config, everyone: Everyone | None = None):
        self.config = config
        self.everyone = everyone or Everyone()
        self.latent = LatentSpace(config, self.everyone)
        self._class_weights: Tensor | None = None
        self.expect(None, 1)

    @classmethod
    def values(cls, preset: str = "default", task: str | None = None) -> dict[str, From]:
        """All values this method sets, for a preset and a task."""
        return {**cls.switches, **cls.by_task.get(task or "", {}), **cls.by_preset.get(preset, {})}

    @property
    def own(self) -> Any:
        """The values of the method's own settings."""
        return self.config.own[self.name]

    @property
    def replayable(self) -> bool:
        """Whether `terms` may be compiled, recorded once and replayed as a CUDA graph: it never makes the host wait,
        and what it remembers it writes into the tensors it has, instead of making new ones. A class with terms of its
        own has to say so itself; those of the official code cannot be."""
        return not self.config.latent.official and self.config.kd.kind != "cil_official"

    @property
    def decision(self) -> Decision:
        """How logits become a class and probabilities; saved with each step, for scores, predictions and exports."""
        return {"binary": "sigmoid_all", "one_vs_rest": "sigmoid"}.get(self.config.ce.kind, "softmax")  # type: ignore[return-value]

    @property
    def row_rates(self) -> tuple[float, float]:
        """Learning-rate multipliers of the classifier's old and new rows in later steps; 0 keeps rows bit for bit."""
        return 1.0, 1.0

    # --- hooks, in the order in which they are called ---------------------------------------------------------------

    @property
    def needs_teacher(self) -> bool:
        """Whether anything looks at the model of the step before: a term, or a hook of the method's own."""
        config, kind = self.config, type(self)
        if any(getattr(kind, hook) is not getattr(Method, hook) for hook in SEES_TEACHER):
            return True
        relabels = config.pseudo.threshold > 0 or config.cl.labels == "pseudo"
        return relabels or any(term.needs_teacher for term in self.objective_terms)

    def begin_step(self, step: StepInfo, student: Network, teacher: Network | None) -> None:
        """Get ready for a step: grow the classifier (and prototypes) by the new classes.

        Both networks stay reachable as `self.student` and `self.teacher`, for terms on the classifier's parameters.
        """
        self.step, self.student, self.teacher = step, student, teacher
        if step.number > 0 and step.n_new > 0:
            student.grow(step.n_new, init=self.config.ce.init)
        device = next(student.parameters()).device
        self._class_weights = None if step.class_weights is None else torch.tensor(step.class_weights, device=device)
        nonnegative = student.features_nonnegative
        self.latent.begin_step(step, student.feature_channels, student.stride, device, nonnegative)

    def begin_survey(self, when: When) -> None:
        """The survey `before` or `after` fitting begins."""

    def survey(self, batch: Batch, student: Output, teacher: Output | None) -> None:
        """Look at the step's training data without gradients, networks in eval mode: every image once, in the views of
        the first epoch, before fitting and again before `end_step`. Runs only where a method overrides it.

        Processes see different images and different numbers of batches: add up in `end_survey`, not here. What the
        first survey leaves goes into `state_dict`, for a run that resumes does not repeat it.
        """

    def end_survey(self, when: When) -> None:
        """All images were seen; `self.everyone.sum` adds up what the processes saw."""

    def parameter_groups(self, network: Network, encoder: float, decoder: float) -> list[dict[str, Any]]:
        """The optimiser's groups, each with its learning rate at the beginning. What is in no group stays as it is."""
        return [
            {"params": list(network.encoder_parameters()), "lr": encoder},
            {"params": list(network.decoder_parameters()), "lr": decoder},
        ]

    @property
    def relabels(self) -> bool:
        """Whether `relabel` may change labels."""
        return self.config.pseudo.threshold > 0 or type(self).relabel is not Method.relabel

    def relabel(self, batch: Batch, teacher: Output | None) -> Batch:
        """The batch with the labels that the terms see: background becomes an old class where the teacher is sure."""
        threshold = self.config.pseudo.threshold
        if teacher is None or threshold == 0:
            return batch
        likely = probabilities(teacher.logits.float(), self.step.teacher_decision)
        return replace(batch, labels=confident_labels(batch.labels, likely, threshold))

    def expect(self, whole: Batch | None, parts: int) -> None:
        """With gradient accumulation: the batch that comes in parts. CE and KD are means over its pixels; the terms on
        the features are computed on each part and averaged, which is not the same as on one large batch."""
        self._parts = parts
        self._counts = {} if whole is None else self.counts(whole)

    def counts(self, batch: Batch) -> dict[str, Tensor]:
        """How many pixels of a batch the means of CE and KD go over."""
        everything = torch.ones_like(batch.padding)
        all_count = self.config.ce.reduction == "all" or self.config.ce.kind == "binary"
        kept = self.distilled(batch)
        if self.config.kd.kind == "cil":
            kept = kept & ((batch.labels == 0) | (batch.labels == VOID))
        chosen: dict[str, Tensor] = {"ce": everything if all_count else batch.labels != VOID, "kd": kept}
        if self._class_weights is not None and not all_count:
            hidden = self._hidden()
            chosen["ce"] = pixel_weights(batch.labels, hidden, self._class_weights)
        if self.config.kd.kind == "cil_official":  # a mean over its own pixels
            del chosen["kd"]
        return {name: self.everyone.sum(pixels.sum().float()) for name, pixels in chosen.items()}

    def terms(self, batch: Batch, student: Output, teacher: Output | None) -> dict[str, Tensor]:
        """The loss terms of a batch by name, unweighted. Called outside autocast; everything is on one device."""
        terms = self._over_pixels(batch, student.logits, None if teacher is None else teacher.logits)
        for term in self.objective_terms:
            if term.compute is not None and (teacher is not None or not term.needs_teacher):
                value = term.compute(self, batch, student, teacher)
                terms |= {} if value is None else {term.name: value}
        terms |= self.latent.terms(batch, student.features, None if teacher is None else teacher.logits)
        more = self.more_terms(batch, student, teacher)
        self._require_terms(more, terms)
        terms |= more
        return {name: term if name in self._counts else term / self._parts for name, term in terms.items()}

    def more_terms(self, batch: Batch, student: Output, teacher: Output | None) -> dict[str, Tensor]:
        """Terms of a method's own, beside those that are switched on; docs/add-a-method.md has an example."""
        return {}

    def _require_terms(self, more: Any, known: Mapping[str, Tensor]) -> None:
        """Stop if `more_terms` returned anything but new names with one number each."""
        if not isinstance(more, dict):
            raise UsageError(f"method {self.name}: more_terms returns {type(more).__name__}, not a dict of losses.")
        for name, term in more.items():
            if name in known:
                raise UsageError(f"method {self.name}: more_terms returns {name!r}, a term that is there. Rename it.")
            if not isinstance(term, Tensor) or term.dim() > 0:
                is_now = f"shape {tuple(term.shape)}" if isinstance(term, Tensor) else type(term).__name__
                raise UsageError(f"method {self.name}: the term {name!r} is not a tensor of one number, but {is_now}.")

    def objective(self) -> str:
        """What the later steps minimise, as a formula."""
        formula = " + ".join(term.formula(self.config) for term in self.objective_terms)
        return formula + (", MiB init" if self.config.ce.init == "mib" else "")

    def weights(self) -> dict[str, float]:
        """The weight of each term; one that is not named here weighs 1."""
        return {term.name: term.weight_in(self.config) for term in self.known_terms if term.weight}

    @property
    def known_terms(self) -> list[Term]:
        """All terms, whether they have a weight or not."""
        return [*TERMS.values(), *self.own_terms]

    @property
    def objective_terms(self) -> list[Term]:
        """Those that have a weight."""
        return [term for term in self.known_terms if not term.weight or term.weight_in(self.config) > 0]

    def after_backward(self, student: Network) -> None:
        """Gradients are ready and averaged over processes; they may be looked at and added to."""

    def after_update(self, student: Network) -> None:
        """The optimiser has made its step."""

    def end_step(self, student: Network) -> None:
        """The step is over."""

    def metrics(self, batch: Batch, features: Tensor) -> dict[str, Tensor]:
        """What the paper argues with, for the log: sparsity, distances to prototypes and between them."""
        return self.latent.metrics(batch, features)

    def state_dict(self) -> dict[str, Tensor]:
        """All that has to outlive the process, as tensors by name."""
        return self.latent.state_dict()

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self.latent.load_state_dict(state)

    # --- terms ------------------------------------------------------------------------------------------------------

    def _over_pixels(self, batch: Batch, z: Tensor, t: Tensor | None) -> dict[str, Tensor]:
        """Cross-entropy and, where there is a teacher and it has a weight, distillation."""
        ce, kd, labels, hidden = self.config.ce, self.config.kd, batch.labels, self._hidden()
        t = t if kd.weight > 0 else None
        count_void = ce.reduction == "all"
        if ce.kind == "binary":
            return {"ce": self.mean_of("ce", binary_cross_entropy_sums(z, labels))} | self._distillation(batch, z, t)
        if ce.kind == "one_vs_rest":
            first = max(1, self.step.n_old)
            sums = one_vs_rest_sums(z[:, first:], labels, first)
            return {"ce": self.mean_of("ce", sums)} | self._distillation(batch, z, t)
        certain = None
        if self.relabels and hidden > 1:  # a pixel that got an old class is no background: plain CE for it
            labels, certain = split_labels(labels, hidden)
        if self._class_weights is not None:
            weighted = partial(weighted_cross_entropy_sums, z, weights=self._class_weights, count_void=count_void)
            sums = weighted(labels, hidden)
            if certain is not None:
                loss, count = weighted(certain, 1)
                sums = torch.stack([sums[0] + loss, sums[1] if count_void else sums[1] + count])
            return {"ce": self.mean_of("ce", sums)} | self._distillation(batch, z, t)
        if t is not None and kd.kind == "unbiased":
            sums, distilled = unbiased_sums(z, labels, hidden, t, self.distilled(batch), count_void=count_void)
            kept = {"kd": self._distillation_mean(distilled, t)}
        else:
            sums = unbiased_cross_entropy_sums(z, labels, hidden, count_void=count_void)
            kept = self._distillation(batch, z, t)
        if certain is not None:
            loss, count = cross_entropy_sums(z, certain)
            sums = torch.stack([sums[0] + loss, sums[1] if count_void else sums[1] + count])
        return {"ce": self.mean_of("ce", sums)} | kept

    def _hidden(self) -> int:
        """How many channels a pixel labelled background may belong to."""
        kind, step = self.config.ce.kind, self.step
        unbiased = kind == "unbiased" or (kind == "unbiased_if_masked" and step.protocol != "sequential")
        return max(1, step.n_old) if unbiased and step.n_new > 0 else 1

    def _distillation(self, batch: Batch, z: Tensor, t: Tensor | None) -> dict[str, Tensor]:
        kd = self.config.kd
        if t is None:
            return {}
        if kd.kind == "cil_official":
            return {"kd": official.cil(z, t, batch.labels)}
        keep = self.distilled(batch)
        if kd.kind == "cil":
            return {"kd": self.mean_of("kd", cil_sums(z, t, batch.labels, keep, entropy_weight=kd.entropy_weight))}
        if kd.kind == "binary":
            return {"kd": self.mean_of("kd", binary_distillation_sums(z, t, keep))}
        sums = distillation_sums if kd.kind == "standard" else unbiased_distillation_sums  # beside a binary CE
        return {"kd": self._distillation_mean(sums(z, t, keep), t)}

    def _distillation_mean(self, sums: Tensor, t: Tensor) -> Tensor:
        value, n_old = self.mean_of("kd", sums), t.shape[1]
        return value / {"n_old": n_old, "at_least_16": max(16, n_old), "none": 1}[self.config.kd.normaliser]

    def distilled(self, batch: Batch) -> Tensor:
        """(B, H, W) bool: the pixels at which the teacher is listened to."""
        return torch.ones_like(batch.padding) if self.config.kd.padding == "include" else ~batch.padding

    def mean_of(self, name: str, sums: Tensor) -> Tensor:
        """The mean over all processes and, where the batch comes in parts, this part's share of the whole mean."""
        sums = self.everyone.sum(sums)
        return sums[0] / self._counts[name].clamp_min(1) if name in self._counts else mean(sums)
