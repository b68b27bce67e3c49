"""SDR's four terms on the encoder's features, and the running prototypes they need.

Prototypes are accumulated for every method, as image and as pixel means, so that any method can start from any base.
In an iteration, the batch updates the prototypes first; the terms then use them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import Tensor

from sdrseg.config import Config
from sdrseg.distributed import Processes
from sdrseg.errors import UsageError
from sdrseg.kernels.plain import at_least_float32
from sdrseg.kernels.rows import reused
from sdrseg.losses import official
from sdrseg.losses.contrast import (
    attraction,
    attraction_image_sums,
    attraction_norm,
    attraction_norm_image_sums,
    attraction_norm_sums,
    repulsion,
    repulsion_from_nearest,
    smallest_gap,
)
from sdrseg.losses.pixels import mean
from sdrseg.losses.prototypes import (
    Average,
    ClassSums,
    Prototypes,
    class_sums,
    in_batch,
    labels_on_grid,
    matching,
    pseudo_labels,
    update,
)
from sdrseg.losses.sparsity import BY_CLASS, active_sums, class_maxima, hoyer_sums, sparsity_sums
from sdrseg.methods.terms import TERMS

if TYPE_CHECKING:
    from sdrseg.datasets.batches import Batch
    from sdrseg.methods.base import StepInfo

AVERAGES: tuple[Average, ...] = get_args(Average)

OFFICIAL: dict[str, dict[str, Any]] = {
    "proto": {"average": "pixel", "decay": 0.0},
    "pm": {"distance": "mse", "normaliser": "present", "background": False},
    "cl": {
        "form": "mse",
        "scope": "batch",
        "against": "batch",
        "normaliser": "pairs",
        "labels": "truth",
        "background": "include",
    },
    "sp": {"scope": "batch", "detach_max": False},
}
"""What the official code computes; `latent.official` supports nothing else."""


def require_official(config: Config, processes: int) -> None:
    """Raise for settings that the official code's terms would silently ignore."""
    if processes > 1 and (config.latent.official or config.kd.kind == "cil_official"):
        raise UsageError(
            f"The official code's terms (latent.official, kd.kind=cil_official) support one process only, but there "
            f"are {processes}. Train on one device, or with another preset."
        )
    for section, keys in OFFICIAL.items():
        for key, value in keys.items() if config.latent.official else ():
            if (found := getattr(getattr(config, section), key)) != value:
                raise UsageError(
                    f"{section}.{key}={found}: with latent.official the terms are the official code's, where it is "
                    f"{value}. Leave it out (--preset official sets it), or set latent.official=false too."
                )


def updates_background_prototype(config: Config, protocol: str, step: int) -> bool:
    """Whether the background's prototype is updated in a step."""
    if config.proto.background != "by_protocol":
        return config.proto.background == "always"
    return protocol == "sequential" or (protocol == "disjoint" and step == 0)


class LatentSpace:
    """Running prototypes, and the terms on the features that the configuration enables."""

    def __init__(self, config: Config, processes: Processes):
        self.config, self.processes = config, processes
        self.prototypes: dict[Average, Prototypes] = {}

    def begin_step(
        self, step: StepInfo, channels: int, stride: int, device: torch.device, nonnegative: bool = False
    ) -> None:
        """Add the new classes. `channels` and `stride` of the features; `nonnegative`: whether they are never negative
        by construction."""
        self.step, self._stride, self._nonnegative = step, stride, nonnegative
        for average in AVERAGES:
            old = self.prototypes.get(average)
            dtype = torch.float32 if old is None else old.mean.dtype
            mean = torch.zeros(step.classes, channels, dtype=dtype, device=device)
            seen = torch.zeros(step.classes, dtype=torch.long, device=device)
            if old is not None:
                mean[: len(old.mean)], seen[: len(old.seen)] = old.mean, old.seen
            self.prototypes[average] = Prototypes(mean, seen)
        self._learned = torch.ones(step.classes, dtype=torch.bool, device=device)
        self._learned[0] = updates_background_prototype(self.config, step.protocol, step.number)
        self._contrasted = torch.ones_like(self._learned)
        self._contrasted[0] = self.config.cl.background != "exclude"
        self._always_known = torch.zeros_like(self._learned)
        self._always_known[0] = self.config.cl.background == "include"

    def weights(self) -> dict[str, float]:
        return {name: TERMS[name].weight_in(self.config) for name in ("pm", "attract", "repel", "sp")}

    def terms(self, batch: Batch, features: Tensor, teacher_logits: Tensor | None) -> dict[str, Tensor]:
        """Update the prototypes with the batch, then compute the terms with a weight."""
        labels = self._grid(batch, features)
        weight = {name: w for name, w in self.weights().items() if w > 0}
        if self.step.number == 0 and not self.config.latent.step0:
            weight = {}
        if teacher_logits is None:
            weight.pop("pm", None)
        if self.config.latent.official:
            return self._official(at_least_float32(features), labels, teacher_logits, weight)
        features = reused(features)
        used = features if weight.keys() - {"sp"} else features.detach()
        sums = self.processes.sum_all(class_sums(used, labels, self.step.classes))
        self._accumulate(sums)
        terms = {}
        pseudo = self._pseudo(labels, teacher_logits)
        if "pm" in weight:
            terms["pm"] = self._matching(features, pseudo)
        if weight.keys() & {"attract", "repel"}:
            terms |= self._contrast(features, labels, sums, pseudo)
        if "sp" in weight:
            terms["sp"] = self._sparsity(features, labels)
        return {name: term for name, term in terms.items() if name in weight}

    def _grid(self, batch: Batch, features: Tensor) -> Tensor:
        """Labels on the feature grid; padding is void."""
        size = (features.shape[-2], features.shape[-1])
        return labels_on_grid(batch.labels, batch.padding, size, self._stride)

    @torch.no_grad()
    def _accumulate(self, sums: ClassSums) -> None:
        """Update the prototypes in place, so that a recorded pass uses the same tensors."""
        decay = self.config.proto.decay or None
        for average, old in self.prototypes.items():
            new = update(old, sums, average, self._learned, decay)
            old.mean.copy_(new.mean)
            old.seen.copy_(new.seen)

    def _pseudo(self, labels: Tensor, teacher_logits: Tensor | None) -> Tensor:
        """Labels with background relabelled by the teacher, except in sequential training, which masks no classes."""
        if teacher_logits is None or self.step.protocol == "sequential":
            return labels
        return pseudo_labels(labels, teacher_logits, self._stride)

    def _matching(self, features: Tensor, pseudo: Tensor) -> Tensor:
        config = self.config
        sums = self.processes.sum_all(class_sums(features, pseudo, self.step.classes))
        current, present = in_batch(sums, config.proto.average)
        return matching(
            self.prototypes[config.proto.average],
            current,
            present,
            n_old=self.step.n_old,
            distance=config.pm.distance,
            normaliser=config.pm.normaliser,
            background=config.pm.background,
        )

    def _contrast(self, features: Tensor, labels: Tensor, sums: ClassSums, pseudo: Tensor) -> dict[str, Tensor]:
        cl, average = self.config.cl, self.config.proto.average
        mean_of, seen = self.prototypes[average]
        prototypes = Prototypes(mean_of, seen + self._always_known)
        if cl.labels == "pseudo":
            labels = pseudo
            sums = self.processes.sum_all(class_sums(features, pseudo, self.step.classes))
        included = self._contrasted & prototypes.known
        over: Literal["sum", "mean"] = "sum" if cl.form == "norm_sum" else "mean"
        if cl.form != "mse" and cl.scope == "image":
            attract = mean(self.processes.sum(attraction_norm_image_sums(features, labels, prototypes, included, over)))
        elif cl.form != "mse":
            attract = attraction_norm(
                self.processes.sum(attraction_norm_sums(features, labels, prototypes, included)), over
            )
        elif cl.scope == "image":
            attract = mean(self.processes.sum(attraction_image_sums(features, labels, prototypes, included)))
        else:
            attract = attraction(sums, prototypes, included)
        current, present = in_batch(sums, average)
        if cl.against == "nearest":
            return {"attract": attract, "repel": repulsion_from_nearest(current, present, prototypes, included)}
        return {"attract": attract, "repel": repulsion(current, present, included, cl.normaliser)}

    def _sparsity(self, features: Tensor, labels: Tensor) -> Tensor:
        sp = self.config.sp
        if not self._nonnegative:  # an encoder that does not end in a ReLU
            features = at_least_float32(features).clamp_min(0)
        maxima = None
        if sp.variant in BY_CLASS or sp.variant == "norm_max_overall":
            maxima = class_maxima(features, labels, self.step.classes)
            if sp.variant == "norm_max_overall":
                maxima = self.processes.max(maxima.amax().reshape(1, 1))
            elif sp.scope == "batch":
                maxima = self.processes.max(maxima.amax(0, keepdim=True))
            maxima = maxima.detach() if sp.detach_max else maxima
        return mean(self.processes.sum(sparsity_sums(features, labels, sp.variant, maxima)))

    def _official(
        self, features: Tensor, labels: Tensor, teacher_logits: Tensor | None, weight: Mapping[str, float]
    ) -> dict[str, Tensor]:
        """The official code's terms (one process only)."""
        mean, seen = (tensor.clone() for tensor in self.prototypes["pixel"])
        official.update_prototypes(mean, seen, features.detach(), labels, not bool(self._learned[0]))
        self.prototypes["pixel"] = Prototypes(mean, seen)
        terms = {}
        if "pm" in weight and teacher_logits is not None:
            pseudo = self._pseudo(labels, teacher_logits)
            hidden = labels == 0 if self.step.protocol != "sequential" else labels < self.step.n_old
            terms["pm"] = official.matching(features, torch.where(hidden, pseudo, 0), mean)
        if "attract" in weight:
            terms["attract"] = official.attraction(features, labels, mean)
        if "repel" in weight:
            terms["repel"] = official.repulsion(features, labels)
        if "sp" in weight:
            variant = self.config.sp.variant  # the official code has no l0
            terms["sp"] = (
                self._sparsity(features, labels) if variant == "l0" else official.sparsity(features, labels, variant)
            )
        return terms

    @torch.no_grad()
    def metrics(self, batch: Batch, features: Tensor) -> dict[str, Tensor]:
        """Hoyer sparsity and active channels of F, distance of features to their prototypes, and between prototypes."""
        labels = self._grid(batch, features)
        prototypes = self.prototypes[self.config.proto.average]
        distances = attraction_norm_sums(features, labels, prototypes, torch.ones_like(self._learned))
        return {
            "hoyer": mean(self.processes.sum(hoyer_sums(features, labels))),
            "active_channels": mean(self.processes.sum(active_sums(features, labels))),
            "to_prototype": attraction_norm(self.processes.sum(distances), "mean"),
            "prototype_gap": smallest_gap(prototypes),
        }

    def state_dict(self) -> dict[str, Tensor]:
        return {
            f"prototypes.{average}.{part}": getattr(prototypes, part)
            for average, prototypes in self.prototypes.items()
            for part in ("mean", "seen")
        }

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Copy the tensors: they are updated in place, and `state` may belong to another method."""
        self.prototypes = {
            average: Prototypes(*(state[f"prototypes.{average}.{part}"].clone() for part in ("mean", "seen")))
            for average in AVERAGES
            if f"prototypes.{average}.mean" in state
        }
