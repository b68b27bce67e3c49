"""One pass forward and backward: plain, compiled, and replayed as a CUDA graph.

A graph replays the recorded kernels, so its results are bit-identical; it only saves launching them one by one.
Compiled code computes the same function with fewer roundings. A pass ends with the gradients; inspecting them and the
update follow, so hooks there are not restricted.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from sdrseg import kernels
from sdrseg.compat import copy_to_compile
from sdrseg.datasets.augment import normalise
from sdrseg.datasets.batches import Batch
from sdrseg.errors import first_line
from sdrseg.methods.base import Method
from sdrseg.network import Network, Output

if TYPE_CHECKING:
    from lightning.fabric import Fabric


class PassResult(NamedTuple):
    """The result of a pass. The next replay overwrites it."""

    terms: dict[str, Tensor]
    loss: Tensor
    features: Tensor


class Pass:
    """Plain forward and backward. `student` is wrapped by Fabric, the teacher is not."""

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
        target = self._teacher_output(images)
        output = self.student(images)
        return self.method.terms(self.method.relabel(batch, target), output, target), output.features

    def relabelled(self, whole: Batch, parts: list[Batch]) -> Batch:
        """The batch with the labels that the terms get for its parts. The teacher is run twice on each part, because
        its outputs for all parts would take too much memory."""
        if not self.method.relabels:
            return whole
        new = [self.method.relabel(part, self._teacher_output(normalise(part.images))).labels for part in parts]
        return replace(whole, labels=torch.cat(new))

    @torch.no_grad()
    def _teacher_output(self, images: Tensor) -> Output | None:
        if self.teacher is None:
            return None
        with self.fabric.autocast():
            output: Output = self.teacher(images)
        return output


class CompiledPass(Pass):
    """Two compiled parts: the trunk, which is the same in every step and so compiled once, and the part that depends on
    the number of classes: classifier, upsampling and all terms. If not `whole`, that part is plain."""

    how = "compiled"
    backend: ClassVar[str] = "inductor"

    def __init__(
        self,
        fabric: Fabric,
        method: Method,
        student: Any,
        teacher: Network | None,
        say: Callable[[str], None],
        whole: bool = True,
    ):
        super().__init__(fabric, method, student, teacher)
        kernels.prepare(fabric.device)
        self._say = say
        config = method.config
        self._trunk = _compiled_trunk(self.backend, config.net, config.data.crop, config.train.batch_size)
        self._finish: Any = _finish
        if whole:
            self._finish = torch.compile(copy_to_compile(_finish), dynamic=False, backend=self.backend)
        else:
            self.how = "compiled trunk"
        self._tried = False

    def __call__(self, batch: Batch) -> PassResult:
        """The first call compiles. If that fails, this and all later passes are plain."""
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
        images, student, teacher = normalise(batch.images), self.student.module, None
        with self.fabric.autocast():
            if self.teacher is not None:
                with torch.no_grad():
                    teacher = (self.teacher, self._trunk(self.teacher, images))
            trunk = self._trunk(student, images)
            half = torch.is_autocast_enabled(images.device.type)
        own = (student, trunk)
        return self._finish(self.method, batch.images, batch.labels, batch.padding, own, teacher, half), trunk[-2]


@cache
def _compiled_trunk(backend: str, *alike: Hashable) -> Any:
    """The trunk to be compiled, once for all networks and batches that are `alike`: torch keeps only eight versions of
    a function, and runs it uncompiled from then on."""
    return torch.compile(copy_to_compile(Network.trunk), dynamic=False, backend=backend)


def _finish(
    method: Method, images: Tensor, labels: Tensor, padding: Tensor, student: Any, teacher: Any, half: bool
) -> dict[str, Tensor]:
    """The terms, from (network, output of its trunk) of student and teacher."""
    height, width = images.shape[-2:]
    batch = Batch(images, labels, padding, ())
    with torch.autocast(images.device.type, torch.bfloat16, enabled=half):
        output = student[0].classify(student[1], height, width)
        with torch.no_grad():
            target = None if teacher is None else teacher[0].classify(teacher[1], height, width)
    return method.terms(method.relabel(batch, target), output, target)


class GraphPass:
    """Record another pass as a CUDA graph and replay it. The first passes run without a graph and choose kernels."""

    WARMUP = 3  # passes before the recording

    def __init__(self, inner: Pass, say: Callable[[str], None]):
        self.inner, self._say = inner, say
        self.method, self.student = inner.method, inner.student
        self._left = self.WARMUP
        self._graph: torch.cuda.CUDAGraph | None = None
        self._gradients: list[tuple[torch.nn.Parameter, Tensor | None]] = []
        self._stream = torch.cuda.Stream(inner.fabric.device)  # type: ignore[no-untyped-call]

    @property
    def how(self) -> str:
        return f"{self.inner.how}, replayed as a CUDA graph" if self._left >= 0 else self.inner.how

    def zero_gradients(self) -> None:
        if self._graph is None:
            self.inner.zero_gradients()
        for parameter, gradient in self._gradients:  # a replay writes to these tensors, even if .grad was replaced
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
        """Record a pass without computing it. If that fails, all later passes run without a graph.

        Only operations of this thread are recorded: another one may be pinning the memory of the next batches.
        """
        self._batch = batch.map(lambda tensor: tensor.clone(memory_format=torch.preserve_format))
        restore = _snapshot(self.method, self.student.module)
        generator = torch.cuda.default_generators[self._stream.device_index]
        random_state = generator.clone_state()
        graph = torch.cuda.CUDAGraph()
        torch.cuda.empty_cache()
        try:
            with torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"):
                self._passed = self.inner(self._batch)
            self._graph = graph
            self._gradients = [(parameter, parameter.grad) for parameter in self.student.parameters()]
        except Exception as error:  # a method may do anything that cannot be recorded
            self._say(f"no CUDA graph ({first_line(error)}): kernels are launched one by one")
            torch.cuda.synchronize()
            generator.graphsafe_set_state(random_state)
            self.inner.zero_gradients()
            restore()
            self._left = -1


def _snapshot(method: Method, network: Network) -> Callable[[], None]:
    """Save what a failed attempt may change; call the result to restore it."""
    memory = {name: tensor.clone() for name, tensor in method.state_dict().items()}
    buffers = {name: tensor.clone() for name, tensor in network.named_buffers()}

    def restore() -> None:
        method.load_state_dict(memory)
        for name, tensor in network.named_buffers():
            tensor.copy_(buffers[name])

    return restore
