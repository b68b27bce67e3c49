"""LAPS: latent anchors, per-class sigmoids. Each class has its own binary classifier; no image is stored.

Old rows of the classifier stay as they are. The positives of new rows are the pixels labelled with their class, the
negatives everything else: the other pixels of the step, and features drawn from a memory of background and old classes,
weighted so that all of them count as they do in the data seen so far. docs/laps.md has the equations and the ablation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from sdrseg.config import Config
from sdrseg.distributed import Processes
from sdrseg.errors import UsageError
from sdrseg.kernels.plain import at_least_float32
from sdrseg.methods.adjust import Drift, share_of_new
from sdrseg.methods.base import From, Method, StepInfo, When
from sdrseg.methods.discriminant import Rest, discriminant, log_sum_exp
from sdrseg.methods.logistic import logistic
from sdrseg.methods.memory import KEPT, LatentMemory, Memory, Replay, principal, weighted_vectors
from sdrseg.methods.sample import Sample
from sdrseg.methods.sigmoid_rows import SigmoidRows
from sdrseg.methods.trained_rows import TrainedRows

if TYPE_CHECKING:
    from sdrseg.datasets.batches import Batch
    from sdrseg.network import Network, Output

EACH = {"background": 64, "classes": 256}  # points drawn from each component in every iteration
NEGATIVES = 8192  # vectors drawn from each kind of memory for the initialisation of new rows


class LAPS(TrainedRows):
    summary = "One sigmoid per class: new rows learn against remembered features, old rows stay as they are"
    trains_step0_like: ClassVar[type[Method] | None] = SigmoidRows
    switches = {
        "ce.kind": From("one_vs_rest", "each class has its own binary row; background is where none is positive"),
        "kd.kind": From("binary", "sigmoids, summed over the old classes, as in DKD and STAR"),
        "kd.weight": From(5.0, "DKD and STAR"),
    }

    def __init__(self, config: Config, processes: Processes | None = None):
        super().__init__(config, processes)
        own = self.own
        if own.fit_only and own.init != "logistic":
            raise UsageError(f"laps.fit_only=true needs laps.init=logistic, not {own.init}.")
        self.memory = LatentMemory(own.memory, own.rank, own.clusters)
        self.directions: Tensor | None = None  # of the encoder's features that new rows see, (k, C)
        self.iteration = 0
        self.seen = torch.zeros(())  # the weight of this step's data in points, from the survey before fitting
        self.hidden: Tensor | None = None  # the share of each part of the background that this step labels as new

    def iterates(self, step: int) -> bool:
        return step == 0 or not self.own.fit_only

    @property
    def needs_teacher(self) -> bool:
        return not self.own.fit_only  # the student's features and old rows are then the teacher's

    def objective(self) -> str:
        return "logistic regression of each new row on features" if self.own.fit_only else super().objective()

    # --- a step -----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def begin_step(self, step: StepInfo, student: Network, teacher: Network | None) -> None:
        self._check_directions(step, student)
        for network in (student, teacher):
            if self.directions is not None and network is not None and network.shortcut is None:
                network.widen(self.directions)
        super().begin_step(step, student, teacher)
        rows = student.classifier
        assert rows.bias is not None
        if step.number > 0:
            rows.weight[step.n_old :] *= 0.01
            rows.bias[step.n_old :] = -3.0
        self.iteration = 0
        self.replays = []
        self.hidden = None
        self.seen = torch.zeros((), device=rows.weight.device)
        self.scale = torch.ones((), device=rows.weight.device)

    def _check_directions(self, step: StepInfo, student: Network) -> None:
        """Add a note if this model's memory has no features of the encoder."""
        wide = self.directions is not None or student.shortcut is not None
        if self.own.encoder > 0 and step.number > 0 and not wide:
            self.notes.append(
                "this model's memory has no features of the encoder, so new rows see the decoder's output only "
                f"(laps.encoder={self.own.encoder} has no effect)"
            )

    def wants_survey(self, when: When) -> bool:
        """After step 0; before later steps, and after them if their features have changed."""
        if self.step.number == 0:
            return when == "after"
        return when == "before" or self.iterates(self.step.number)

    def survey_views(self, step: int) -> int:
        return self.own.views if step > 0 else 1

    def begin_survey(self, when: When) -> None:
        self._when = when
        channels, device = self.student.classifier.in_channels, self.student.classifier.weight.device
        # directions of the encoder's features are found in the survey after step 0, which samples all of them
        self._all_features = self.own.encoder > 0 and self.step.number == 0 and self.student.shortcut is None
        more, per_class = (self.student.feature_channels, KEPT) if self._all_features else (0, None)
        # one more channel than classes: cells labelled background in which an old class is predicted
        self._sample = Sample(self.step.classes + 1, channels + more, device, per_class)
        self._drift = Drift(self.step.classes, channels, device)

    def survey(self, batch: Batch, student: Output, teacher: Output | None) -> None:
        x = at_least_float32(student.embedding)
        labels = self._on_grid(batch.labels, x)
        if self.step.number > 0:
            old = self.old_class(batch.labels, teacher or student, x)
            if self.own.drift and self._when == "after" and teacher is not None:
                self._drift.add(x, at_least_float32(teacher.embedding), old)
            labels = torch.where(old > 0, self.step.classes, labels)
        self._sample.add(x, labels, batch.ids, student.features if self._all_features else None, batch.epoch)

    def end_survey(self, when: When) -> None:
        self._sample.gather(self.processes)
        self._sample.average(self.survey_views(self.step.number))
        if self._all_features:
            first, (vectors, points) = self.student.classifier.in_channels, self._sample.weighted()
            self.directions = principal(vectors[:, first:], points, self.own.encoder)
            self._sample.project(first, self.directions)
        if when == "before":
            self.seen = self._sample.counts.sum().float() / self._rarity()
            if self.step.protocol == "overlapped" and self.memory.background is not None:
                self.hidden = share_of_new(self.memory.background, self._sample, self._new)
            self._prepare()
            if self.own.init != "small":
                self._start_rows()
        if when == "after" or not self.iterates(self.step.number):
            if self.own.drift:
                self.memory.drift(self._drift.shift(self.memory.classes, self.processes))
            self.memory.learn(self._sample, self._new, self._seed())
            self.hidden = None  # it described the earlier background
        del self._sample, self._drift

    @property
    def _new(self) -> range:
        """The channels of the new classes."""
        return range(max(1, self.step.n_old), self.step.classes)

    def expect(self, whole: Batch | None, parts: int) -> None:
        super().expect(whole, parts)
        if hasattr(self, "replays"):  # also called while the base class is set up
            self._draw()

    def _draw(self) -> None:
        """Draw the points to replay in this iteration."""
        for number, part in enumerate(self.replays):
            part.draw(self._seed() + number)

    def after_update(self, student: Network) -> None:
        self.iteration += 1

    def _seed(self) -> int:
        """A seed for draws of this iteration; torch accepts 64 bits."""
        return ((self.config.train.seed * 1000 + self.step.number) * 10_000_000 + 10 * self.iteration) % 2**63

    def _rarity(self) -> float:
        """The weight of a point of memory: below 1 if new classes should be as frequent as old ones."""
        classes = self.memory.classes
        if self.own.prior == "seen" or classes is None:
            return 1.0
        old = float(classes.points.sum()) / len(set(classes.owner.tolist()))
        new = float(self._sample.counts[list(self._new)].float().mean())
        return min(1.0, max(1.0, new) / max(1.0, old))

    def _remembered(self) -> dict[str, Memory]:
        """The memory with its weights in this step. In overlapped steps earlier background contains the new classes:
        its weight is lower, the more of the similar points of this step are labelled new."""
        parts = self.memory.parts()
        if self.hidden is not None:
            background = parts["background"]
            parts["background"] = background._replace(points=background.points * (1 - self.hidden))
        return parts

    def _prepare(self) -> None:
        """Points to replay with their weights: the number of pixels of this step that each represents."""
        wanted = self.iterates(self.step.number) and (self.own.replay > 0 or self.own.versus > 0)
        self.replays = [Replay(part, EACH[name]) for name, part in self._remembered().items() if wanted]
        for part in self.replays:
            part.represents /= self.seen.clamp_min(1)
        total: Tensor = sum((part.represents.sum() for part in self.replays), self.seen.new_zeros(()))
        self.scale.copy_(1 + self.own.replay * total)

    # --- the rows of the new classes --------------------------------------------------------------------------------

    @torch.no_grad()
    def _start_rows(self) -> None:
        """Initialise each new row by its class against everything else in this step and in memory."""
        sample, own, rows = self._sample, self.own, self.student.classifier
        assert rows.bias is not None
        step = [sample.weighted_of(c) for c in range(len(sample.counts))]
        rarity = self._rarity()
        drawn = [weighted_vectors(part, NEGATIVES, self._seed()) for part in self._remembered().values()]
        memory = [(vectors, points * rarity) for vectors, points in drawn]
        level, length = self._level(), float(self._old_rows().norm(dim=1).mean())
        for channel in self._new:
            rest = Rest([*step[:channel], *step[channel + 1 :], *memory], level)
            vectors, count = step[channel][0], int(sample.counts[channel])
            if count == 0 or rest.weights.sum() == 0:
                self.notes.append(_unfitted(channel, count))
                continue
            points = own.positive * count
            if own.init == "closed_form":
                weight, bias = discriminant(vectors, points, rest, length)
            else:
                weight, bias = logistic(vectors, points, rest, own.ridge)
            rows.weight[channel] = (weight / rows.weight[0, 0].numel()).to(rows.weight)[:, None, None]
            rows.bias[channel] = bias

    def _old_rows(self) -> Tensor:
        """(n_old − 1, D): what turns features into the scores of old classes."""
        return self.student.classifier.weight[1 : self.step.n_old].sum((2, 3))

    def _level(self) -> Callable[[Tensor], Tensor]:
        """What a new row's logit must exceed at features (N, D), in float64 on the CPU."""
        if self.own.init == "logistic" and self.own.level == "old":
            return self._old_together()
        return lambda x: x.new_zeros(len(x))

    def _old_together(self) -> Callable[[Tensor], Tensor]:
        """The log-sum-exp of the old rows; background's logit is 0."""
        rows, n_old = self.student.classifier, self.step.n_old
        assert rows.bias is not None
        return log_sum_exp(rows.weight[:n_old].sum((2, 3)), rows.bias[:n_old])

    # --- what is kept -----------------------------------------------------------------------------------------------

    def metrics(self, batch: Batch, features: Tensor) -> dict[str, Tensor]:
        return super().metrics(batch, features) | {"memory_bytes": torch.tensor(float(self.memory.nbytes))}

    def memory_size(self, classes: int, channels: int) -> int:
        return self.memory.filled(classes, channels + self.own.encoder).nbytes

    def state_dict(self) -> dict[str, Tensor]:
        own_state = {"laps.iteration": torch.tensor(self.iteration), "laps.seen": self.seen}
        own_state |= {} if self.hidden is None else {"laps.hidden": self.hidden}
        own_state |= {} if self.directions is None else {"memory.directions": self.directions}
        return super().state_dict() | self.memory.state_dict() | own_state

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        super().load_state_dict(state)
        self.memory.load_state_dict(state)
        self.directions = state["memory.directions"].clone() if "memory.directions" in state else None
        if "laps.seen" in state:
            self.iteration, self.seen = int(state["laps.iteration"]), state["laps.seen"].clone()
            self.hidden = state["laps.hidden"].clone() if "laps.hidden" in state else None
        if hasattr(self, "step") and self.step.number > 0:  # in the middle of a step
            self._prepare()
            self._draw()  # where a pass is tried again, nothing else does in this iteration


def _unfitted(channel: int, count: int) -> str:
    """A note that the row of a channel could not be fitted."""
    if count == 0:
        why = "none of the sampled cells shows it; its objects may be too small for the network's grid"
    else:
        why = "there is nothing to tell it from: nothing else is labelled or remembered"
    return f"warning: the class in channel {channel} cannot be fitted and will not be predicted: {why}"
