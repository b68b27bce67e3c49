"""EWC, PI and RW: a penalty on changing parameters that are important for the old classes.

Statistics are gathered from the gradients of the losses; the penalty's own gradient is added afterwards, so it never
enters them. All processes see the same averaged gradients and so keep the same statistics. Step 0 has no penalty: the
three methods share its model, which is trained once with the statistics of all three.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from sdrseg.config import Config
from sdrseg.distributed import Processes
from sdrseg.errors import SdrsegError, UsageError
from sdrseg.losses.importance import (
    Named,
    fisher_update,
    normalised,
    path_importance,
    path_update,
    penalty,
    penalty_gradient,
    score_importance,
    score_update,
)
from sdrseg.methods.base import From, Method, StepInfo, adds_code
from sdrseg.methods.terms import Term

if TYPE_CHECKING:
    from sdrseg.datasets.batches import Batch
    from sdrseg.network import Network, Output

SCORE_EVERY = 10  # iterations between two updates of RW's score
PREFIX = "importance"
ONE_RATE = From(1.0, "stability: SGD with Nesterov momentum 0.9 needs 2·λ·lr below 1.36 where Ĩ = 1")


def strength(mib: int) -> dict[str, From]:
    """Values for the switches; `mib`: the weight in MiB's code."""
    weight = From(1000.0, f"official code: method preset (MiB: {mib})")
    return {"importance.weight": weight, "optim.decoder_lr_factor_later": ONE_RATE}


def penalty_term(symbol: str) -> Term:
    """The value is a number for the log: its gradient is added in `after_backward`."""

    def value(method: Method, batch: Batch, student: Output, teacher: Output | None) -> Tensor | None:
        assert isinstance(method, ImportanceMethod)
        return method.last_penalty if method.anchors else None

    weight = "importance.weight"
    return Term("penalty", "importance penalty", symbol, weight, compute=value, in_step0=lambda config: False)


def require_penalty(method: type[Method], config: Config) -> None:
    """Raise an error if the weight of the penalty is set for a method that has none."""
    if config.importance.weight > 0 and not issubclass(method, ImportanceMethod):
        names = ", ".join(kind.name for kind in (EWC, PI, RW))
        raise UsageError(
            f"importance.weight = {config.importance.weight:g}: {method.name} has no penalty on important parameters. "
            f"Use {names}, or leave it out."
        )


class ImportanceMethod(Method):
    """Cross-entropy and a penalty on changing important parameters. Subclasses define importance."""

    own_step0 = True  # the penalty needs statistics of step 0
    carried: ClassVar[tuple[str, ...]] = ()
    temporary: ClassVar[tuple[str, ...]] = ()
    """The names of the statistics in `memory` that the next step needs, and of those that only this one does."""

    def __init__(self, config: Config, processes: Processes | None = None):
        super().__init__(config, processes)
        self.anchors: Named = {}  # θ_old; empty in step 0
        self.importances: Named = {}  # Ĩ of the anchors, 0..1
        self.memory: dict[str, Named] = {}  # statistics by name, then by parameter
        self.rows: list[int] = []  # of the classifier, by the step that added them
        self.iteration = 0
        self.last_penalty = torch.zeros(())

    @property
    def needs_teacher(self) -> bool:
        return adds_code(type(self), EWC, PI, RW) or Method(self.config).needs_teacher  # these three do without

    def begin_step(self, step: StepInfo, student: Network, teacher: Network | None) -> None:
        before = self._parameters(student)
        self.anchors = {n: p.clone() for n, p in before.items()} if step.number > 0 else {}
        super().begin_step(step, student, teacher)
        self.memory = self._without(self._of_others) if step.number > 0 else {}
        self.rows = self.rows if step.number > 0 else []
        self.importances = {n: self.importance(n) for n in self.anchors}
        self.rows += [step.n_new] if step.n_new > 0 else []
        self.iteration = 0
        self.last_penalty = torch.zeros((), device=next(student.parameters()).device)
        self.begin_statistics(self._parameters(student))

    @property
    def _of_others(self) -> set[str]:
        """The statistics in a shared model of step 0 that only other methods need."""
        return {*AllImportances.carried} - {*self.carried} if self.trainer_of_step0() is AllImportances else set()

    def _without(self, kinds: Collection[str]) -> dict[str, Named]:
        return {kind: named for kind, named in self.memory.items() if kind not in kinds}

    @torch.no_grad()
    def after_backward(self, student: Network) -> None:
        self.iteration += 1
        weight = self.config.importance.weight
        for name, parameter in student.named_parameters():
            if parameter.grad is None:
                continue
            self.gather(name, parameter.grad, parameter)
            if name in self.anchors:
                parameter.grad += weight * penalty_gradient(parameter, self.anchors[name], self.importances[name])

    @torch.no_grad()
    def after_update(self, student: Network) -> None:
        if self.anchors:
            self.last_penalty.copy_(penalty(self._parameters(student), self.anchors, self.importances))

    @torch.no_grad()
    def end_step(self, student: Network) -> None:
        super().end_step(student)
        self.end_statistics(self._parameters(student))
        self.memory = self._without(self.temporary)
        self.anchors, self.importances = {}, {}  # computed again from the model and the statistics
        self.last_penalty = torch.zeros_like(self.last_penalty)  # for the log only, and summed with rounding

    def importance(self, name: str) -> Tensor:
        """The importance of a parameter of the old model, 0..1, in its shape."""
        raise NotImplementedError

    def normalised(self, kind: str, name: str) -> Tensor:
        """Statistics of a parameter of the old model, normalised to 0..1; each step's classifier rows separately."""
        return normalised(self.memory[kind][name], self.rows if name.startswith("classifier.") else ())

    def begin_statistics(self, parameters: Named) -> None:
        """Allocate statistics for the parameters of this step, including new rows."""

    def gather(self, name: str, gradient: Tensor, now: Tensor) -> None:
        """Update the statistics with the gradient of one parameter, once per iteration."""

    def end_statistics(self, parameters: Named) -> None:
        """Called at the end of the step."""

    def state_dict(self) -> dict[str, Tensor]:
        state = super().state_dict()
        kept = {"anchors": self.anchors, "importances": self.importances, **self.memory}
        state |= {f"{PREFIX}.{kind}.{n}": tensor for kind, named in kept.items() for n, tensor in named.items()}
        numbers = {"iteration": torch.tensor(self.iteration), "rows": torch.tensor(self.rows, dtype=torch.long)}
        return state | {f"{PREFIX}.{n}": t for n, t in numbers.items()} | {f"{PREFIX}.penalty": self.last_penalty}

    def require_state(self, names: Collection[str]) -> None:
        kinds = {name.split(".")[1] for name in names if name.startswith(f"{PREFIX}.")}
        if not kinds >= {*self.carried}:
            raise SdrsegError(
                f"{self.name} needs statistics of the steps before ({', '.join(self.carried)}), which this model does "
                f"not have: other methods do not gather them. Choose another method, or train with {self.name} from "
                f"step 0 on."
            )

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        super().load_state_dict(state)
        kept: dict[str, Named] = {"anchors": {}, "importances": {}}
        for key, tensor in state.items():
            if key.startswith(f"{PREFIX}.") and key.count(".") > 1:
                _, kind, name = key.split(".", 2)
                kept.setdefault(kind, {})[name] = tensor.clone()
        self.anchors, self.importances = kept.pop("anchors"), kept.pop("importances")
        if lost := self.memory.keys() - kept.keys():
            raise SdrsegError(
                f"method {self.name}: the saved state lacks {', '.join(sorted(lost))}. Another version of sdrseg saved "
                f"it; start in a new folder."
            )
        self.memory = kept
        self.iteration = int(state[f"{PREFIX}.iteration"])
        self.rows = state[f"{PREFIX}.rows"].tolist()
        self.last_penalty = state[f"{PREFIX}.penalty"].clone()

    @staticmethod
    def _parameters(student: Network) -> Named:
        return {n: p.detach() for n, p in student.named_parameters()}


def grown(old: Tensor | None, like: Tensor, fill: float) -> Tensor:
    """Statistics in the shape of a parameter: the old ones, and `fill` for new rows."""
    new = torch.full_like(like, fill)
    if old is not None:
        new[: len(old)] = old
    return new


class EWC(ImportanceMethod):
    name = "ewc"
    summary = "Elastic Weight Consolidation: importance is the running mean of squared gradients"
    own_terms = (penalty_term("Σ_θ F̃_θ (θ − θ_old)²"),)
    replayable = Method.replayable
    switches = strength(mib=500)
    carried: ClassVar[tuple[str, ...]] = ("fisher",)

    def begin_statistics(self, parameters: Named) -> None:
        super().begin_statistics(parameters)
        fisher = self.memory.get("fisher", {})
        self.memory["fisher"] = {n: grown(fisher.get(n), p, 1.0) for n, p in parameters.items()}

    def importance(self, name: str) -> Tensor:
        return self.normalised("fisher", name)

    def gather(self, name: str, gradient: Tensor, now: Tensor) -> None:
        super().gather(name, gradient, now)
        fisher = self.memory["fisher"]
        fisher[name] = fisher_update(fisher[name], gradient)


class PI(ImportanceMethod):
    name = "pi"
    summary = "Path Integral (synaptic intelligence): importance is the loss reduction along the parameter's path"
    own_terms = (penalty_term("Σ_θ Ω̃_θ (θ − θ_old)²"),)
    replayable = Method.replayable
    switches = strength(mib=500)
    carried: ClassVar[tuple[str, ...]] = ("omega",)
    temporary: ClassVar[tuple[str, ...]] = ("path", "start", "before")

    def begin_statistics(self, parameters: Named) -> None:
        super().begin_statistics(parameters)
        omega = self.memory.get("omega", {})
        self.memory["omega"] = {n: grown(omega.get(n), p, 0.0) for n, p in parameters.items()}
        self.memory["path"] = {n: torch.zeros_like(p) for n, p in parameters.items()}
        self.memory["start"] = {n: p.clone() for n, p in parameters.items()}
        self.memory["before"] = {n: p.clone() for n, p in parameters.items()}

    def importance(self, name: str) -> Tensor:
        return self.normalised("omega", name)

    def gather(self, name: str, gradient: Tensor, now: Tensor) -> None:
        super().gather(name, gradient, now)
        path, before = self.memory["path"], self.memory["before"]
        path[name] = path_update(path[name], gradient, before[name], now)
        before[name] = now.detach().clone()

    def end_statistics(self, parameters: Named) -> None:
        super().end_statistics(parameters)
        memory = self.memory
        for n, p in parameters.items():
            memory["omega"][n] = path_importance(memory["path"][n], memory["start"][n], p, memory["omega"][n])


class RW(EWC):
    name = "rw"
    summary = "Riemannian Walk: squared gradients, and the loss reduction along the path relative to them"
    own_terms = (penalty_term("Σ_θ (F̃_θ + s̃_θ)(θ − θ_old)²"),)
    replayable = Method.replayable
    switches = strength(mib=100)
    carried: ClassVar[tuple[str, ...]] = ("fisher", "saved")
    temporary: ClassVar[tuple[str, ...]] = ("score", "last")

    def begin_statistics(self, parameters: Named) -> None:
        super().begin_statistics(parameters)
        self.memory["score"] = {n: torch.zeros_like(p) for n, p in parameters.items()}
        self.memory["last"] = {n: p.clone() for n, p in parameters.items()}

    def importance(self, name: str) -> Tensor:
        return super().importance(name) + self.normalised("saved", name)

    def gather(self, name: str, gradient: Tensor, now: Tensor) -> None:
        if self.iteration > 1 and self.iteration % SCORE_EVERY == 1:  # the 11th, 21st and so on
            score, last = self.memory["score"], self.memory["last"]
            score[name] = score_update(score[name], gradient, self.memory["fisher"][name], last[name], now)
            last[name] = now.detach().clone()
        super().gather(name, gradient, now)  # after the score, which uses the previous F

    def end_statistics(self, parameters: Named) -> None:
        super().end_statistics(parameters)
        before = self.memory.get("saved", {})
        self.memory["saved"] = {}
        for n in parameters:
            self.memory["saved"][n] = score_importance(self.memory["score"][n], before.get(n))


class AllImportances(PI, RW):
    """Step 0 of the three: plain training that gathers what each of them needs."""

    name = "importance"
    summary = "plain cross-entropy, with the statistics of ewc, pi and rw"
    replayable = Method.replayable
    carried: ClassVar[tuple[str, ...]] = (*PI.carried, *RW.carried)
    temporary: ClassVar[tuple[str, ...]] = (*PI.temporary, *RW.temporary)


EWC.trains_step0_like = PI.trains_step0_like = RW.trains_step0_like = AllImportances
