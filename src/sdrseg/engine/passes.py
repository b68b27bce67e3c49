"""One pass forward and backward: plain, compiled, and replayed as a CUDA graph.

A graph replays the very kernels that were recorded, so it computes the same bit for bit and only spares launching them
one by one. Compiled code computes the same function with fewer roundings on the way. What a pass leaves behind are the
gradients; looking at them and the update come after it, so methods may do there what they like.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from types import FunctionType
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from sdrseg import kernels
from sdrseg.config import Config
from sdrseg.data.augment import normalise
from sdrseg.data.batches import Batch
from sdrseg.errors import UsageError, first_line
from sdrseg.methods.base import Method
from sdrseg.network import Network, Output

if TYPE_CHECKING:
    from lightning.fabric import Fabric


class PassResult(NamedTuple):
    """What a pass says. A replayed one overwrites it the next time."""

    terms: dict[str, Tensor]
    loss: Tensor
    features: Tensor


class Pass:
    """Forward and backward as they stand. `student` is wrapped by Fabric, the teacher is not."""

    how = "plain"

    def __init__(self, fabric: Fabric, method: Method, student: Any, teacher: Network | None):
        self.fabric, self.method, self.student, self.teacher = fabric, method, student, teacher
        self.weights = method.weights()

    def zero_gradients(self) -> None:
        """Called before the first pass of an iteration."""
        for parameter in self.student.parameters():
            parameter.grad = None

    def __call__(self, batch: Batch) -> PassResult:
        terms, features = self.forward(batch)
        loss: Tensor = sum(self.weights.get(name, 1.0) * term for name, term in terms.items())  # type: ignore[assignment]
        self.fabric.backward(loss)
        return PassResult({name: term.detach() for name, term in terms.items()}, loss.detach(), features.detach())

    def forward(self, batch: Batch) -> tuple[dict[str, Tensor], Tensor]:
        """The terms, and the features."""
        images = normalise(batch.images)
        seen = self._seen(images)
        output = self.student(images)
        return self.method.terms(self.method.relabel(batch, seen), output, seen), output.features

    def relabelled(self, whole: Batch, parts: list[Batch]) -> Batch:
        """A batch with the labels that the terms will see in its parts. The teacher looks at each part twice, for its
        outputs of all of them would be too large to keep."""
        if not self.method.relabels:
            return whole
        new = [self.method.relabel(part, self._seen(normalise(part.images))).labels for part in parts]
        return replace(whole, labels=torch.cat(new))

    @torch.no_grad()
    def _seen(self, images: Tensor) -> Output | None:
        if self.teacher is None:
            return None
        with self.fabric.autocast():
            seen: Output = self.teacher(images)
        return seen


class CompiledPass(Pass):
    """Two compiled parts: the trunk, which is the same in every step and so compiled once, and what knows the number
    of classes: classifier, upsampling and all terms, which run together over the pixels."""

    how = "compiled"
    backend: ClassVar[str] = "inductor"

    def __init__(
        self, fabric: Fabric, method: Method, student: Any, teacher: Network | None, say: Callable[[str], None]
    ):
        super().__init__(fabric, method, student, teacher)
        kernels.prepare(fabric.device)  # while compiling it is too late to try
        self._say = say
        self._trunk = _compiled_trunk(self.backend)
        self._finish: Any = torch.compile(_copy(_finish), dynamic=False, backend=self.backend)
        self._tried = False

    def __call__(self, batch: Batch) -> PassResult:
        """The first call compiles. Where that fails, this and all that follow are plain."""
        if self._tried:
            return super().__call__(batch)
        self._tried = True
        restore = _snapshot(self.method, self.student.module)
        try:
            return super().__call__(batch)
        except Exception as error:  # no compiler for C or for the GPU, or a term that cannot be compiled
            self._say(f"not compiled ({first_line(error)})")
            self.how, self._finish = "plain", None
            self.zero_gradients()  # backward may have reached some of them
            restore()
            return super().__call__(batch)

    def forward(self, batch: Batch) -> tuple[dict[str, Tensor], Tensor]:
        if self._finish is None:
            return super().forward(batch)
        images, student, seen = normalise(batch.images), self.student.module, None
        with self.fabric.autocast():
            if self.teacher is not None:
                with torch.no_grad():
                    seen = (self.teacher, self._trunk(self.teacher, images))
            trunk = self._trunk(student, images)
            half = torch.is_autocast_enabled(images.device.type)
        own = (student, trunk)
        return self._finish(self.method, batch.images, batch.labels, batch.padding, own, seen, half), trunk[-2]


@cache
def _compiled_trunk(backend: str) -> Any:
    return torch.compile(Network.trunk, dynamic=False, backend=backend)


def _finish(
    method: Method, images: Tensor, labels: Tensor, padding: Tensor, student: Any, teacher: Any, half: bool
) -> dict[str, Tensor]:
    """The terms, from (network, what its trunk returned) of student and teacher."""
    height, width = images.shape[-2:]
    batch = Batch(images, labels, padding, ())
    with torch.autocast(images.device.type, torch.bfloat16, enabled=half):
        said = student[0].classify(student[1], height, width)
        with torch.no_grad():
            seen = None if teacher is None else teacher[0].classify(teacher[1], height, width)
    return method.terms(method.relabel(batch, seen), said, seen)


def _copy(function: Any) -> FunctionType:
    """The same function with room of its own for compiled versions: torch keeps only eight of each, and every step
    with its number of classes needs another one."""
    return FunctionType(function.__code__.replace(), function.__globals__, function.__name__)


class GraphPass:
    """Another pass, recorded: the first ones run as they are and choose kernels, the next is recorded, and from then
    on it is replayed."""

    BEFORE = 3  # passes before the recording

    def __init__(self, inner: Pass, say: Callable[[str], None]):
        self.inner, self._say = inner, say
        self.method, self.student = inner.method, inner.student
        self._left = self.BEFORE
        self._graph: torch.cuda.CUDAGraph | None = None
        self._gradients: list[tuple[torch.nn.Parameter, Tensor | None]] = []
        self._stream = torch.cuda.Stream(inner.fabric.device)  # type: ignore[no-untyped-call]

    @property
    def how(self) -> str:
        return f"{self.inner.how}, replayed as a CUDA graph" if self._left >= 0 else self.inner.how

    def zero_gradients(self) -> None:
        if self._graph is None:
            self.inner.zero_gradients()
        for parameter, gradient in self._gradients:  # a replay overwrites them where they were, whoever replaced them
            parameter.grad = gradient

    def __call__(self, batch: Batch) -> PassResult:
        if self._graph is None and self._left == 0:
            self._record(batch)
        if self._graph is None:
            self._left -= 1
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                passed = self.inner(batch)
            torch.cuda.current_stream().wait_stream(self._stream)
            return passed
        for name in ("images", "labels", "padding"):
            getattr(self._batch, name).copy_(getattr(batch, name))
        self._graph.replay()
        return self._passed

    def _record(self, batch: Batch) -> None:
        """Record a pass; nothing is computed meanwhile. Where that fails, all that follow run as they are.

        Only what this thread does is part of it: another one may be pinning the memory of the next batches.
        """
        self._batch = batch.map(lambda tensor: tensor.clone(memory_format=torch.preserve_format))
        restore = _snapshot(self.method, self.student.module)
        draws = torch.cuda.default_generators[self._stream.device_index]
        drawn = draws.clone_state()
        graph = torch.cuda.CUDAGraph()
        torch.cuda.empty_cache()
        try:
            with torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"):
                self._passed = self.inner(self._batch)
            self._graph = graph
            self._gradients = [(parameter, parameter.grad) for parameter in self.student.parameters()]
        except Exception as error:  # whatever a method does that cannot be recorded
            self._say(f"no CUDA graph ({first_line(error)}): kernels are launched one by one")
            torch.cuda.synchronize()
            draws.graphsafe_set_state(drawn)
            self.inner.zero_gradients()
            restore()
            self._left = -1


def _snapshot(method: Method, network: Network) -> Callable[[], None]:
    """What a failed attempt may have changed; call the result to undo it."""
    memory = {name: tensor.clone() for name, tensor in method.state_dict().items()}
    buffers = {name: tensor.clone() for name, tensor in network.named_buffers()}

    def restore() -> None:
        method.load_state_dict(memory)
        for name, tensor in network.named_buffers():
            tensor.copy_(buffers[name])

    return restore


COMPILE_FROM = 20_000
"""Iterations from which on compiling pays: it takes one to three minutes, and spares 4 milliseconds or more each."""
COMPILED = ("deeplabv3", "deeplabv3plus", "official")
"""Decoders that are compiled without being asked to: those whose upsampling keeps its precision then."""


def compiling_pays(iterations: int, decoder: str) -> bool:
    """As measured (docs/performance.md), for so many iterations that compute alike."""
    return iterations >= COMPILE_FROM and decoder in COMPILED


def make_pass(
    fabric: Fabric,
    method: Method,
    student: Any,
    teacher: Network | None,
    config: Config,
    iterations: int,
    say: Callable[[str], None],
) -> Pass | GraphPass:
    """The fastest pass that `run.speed` allows for this many iterations; with auto, one that is possible here."""
    wish, gpu = config.run.speed, fabric.device.type == "cuda"
    reason = why_plain(method, config, fabric.world_size)
    if reason is not None and wish in ("graph", "compile"):
        raise UsageError(f"run.speed={wish}: {reason}. Use run.speed=auto.")
    if wish == "graph" and not gpu:
        raise UsageError("run.speed=graph: there is no NVIDIA GPU here. Use run.speed=auto.")
    made = Pass(fabric, method, student, teacher)
    if wish == "plain" or reason is not None:
        return made
    if wish == "auto" and gpu:
        wish = "compile" if compiling_pays(iterations, config.net.decoder) else "graph"
    if wish == "compile":
        made = CompiledPass(fabric, method, student, teacher, say)
    return GraphPass(made, say) if gpu else made


def why_plain(method: Method, config: Config, processes: int) -> str | None:
    """Why a pass can be neither compiled nor replayed, or None."""
    if processes > 1:
        return f"there are {processes} processes"
    if config.run.accumulate > 1:
        return f"run.accumulate={config.run.accumulate} cuts batches into parts"
    if not replayable(method):
        return f"the method {method.name} does not say that its terms can be replayed (Method.replayable)"
    return None


def replayable(method: Method) -> bool:
    """Whether a method says so itself, or leaves the terms to a class that does."""
    for kind in type(method).__mro__:
        if "replayable" in vars(kind):
            return method.replayable
        if {"terms", "more_terms", "own_terms", "relabel"} & vars(kind).keys():
            return False
    return False
