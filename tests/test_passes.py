"""Passes: which one is chosen, and that a compiled one computes what the plain one does. On a GPU see test_cuda.py."""

from __future__ import annotations

import copy
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from sdrseg.datasets.batches import Batch
from sdrseg.engine.launch import make_fabric
from sdrseg.engine.passes import CompiledPass, GraphPass, Pass
from sdrseg.engine.speed import compiling_pays, make_pass, replayable
from sdrseg.errors import UsageError
from sdrseg.kernels.upsampling import upsample, upsampled
from sdrseg.methods import METHODS, Method, StepInfo
from sdrseg.network import Network, Output, build_network, resize_canvas

from methods_bench import CLASSES, N_NEW, N_OLD, begin, make_batch, make_config


@pytest.fixture(autouse=True)
def trace_only(monkeypatch):
    """Everything but the making of machine code, which takes a minute; that is left to test_cuda.py."""
    monkeypatch.setattr(CompiledPass, "backend", "aot_eager")


def gradients(name: str, speed: str, *, fail: bool = False) -> tuple[str, torch.Tensor, dict[str, torch.Tensor]]:
    """Kind of pass, gradient and prototypes after two passes."""
    config = make_config(name, "default", f"run.speed={speed}")
    torch.manual_seed(0)
    student = build_network(config.net, N_OLD)
    method = METHODS[name](config)
    teacher = copy.deepcopy(student).eval().requires_grad_(False) if method.needs_teacher else None
    method.begin_step(StepInfo(1, N_OLD, N_NEW, "disjoint"), student, teacher)
    student.train()
    fabric = make_fabric(config)
    compute = make_pass(fabric, method, fabric.setup(student), teacher, config, 0, lambda text: None)
    if fail:
        assert isinstance(compute, CompiledPass)

        def broken(*_: object) -> None:
            method.latent.prototypes["image"].mean.add_(1)
            raise RuntimeError("no compiler")

        compute._finish = broken
    for images in (4, 4):
        compute.zero_gradients()
        passed = compute(make_batch(1, "disjoint", images))
    assert set(passed.terms) == {"ce", "kd", "pm", "attract", "repel", "sp"}
    memory = {**method.state_dict(), **{n: b for n, b in student.named_buffers() if "running" in n}}
    return compute.how, torch.cat([p.grad.flatten() for p in student.parameters() if p.grad is not None]), memory


@pytest.mark.parametrize(("speed", "expected"), [("compile", "compiled"), ("trunk", "compiled trunk")])
def test_a_compiled_pass_equals_the_plain_one(speed: str, expected: str) -> None:
    how, plain, memory = gradients("sdr", "plain")
    compiled_how, compiled, compiled_memory = gradients("sdr", speed)
    assert (how, compiled_how) == ("plain", expected)
    assert float((plain - compiled).norm() / plain.norm()) < 1e-5
    for name, tensor in memory.items():
        torch.testing.assert_close(compiled_memory[name], tensor, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("speed", ["compile", "trunk"])
def test_what_cannot_be_compiled_is_computed_plainly_and_nothing_is_counted_twice(speed: str) -> None:
    _, plain, memory = gradients("sdr", "plain")
    how, other, other_memory = gradients("sdr", speed, fail=True)
    assert how == "plain"
    assert torch.equal(plain, other)
    assert all(torch.equal(memory[name], other_memory[name]) for name in memory)


@pytest.mark.parametrize("memory", ["gaussian", "features"])
def test_a_pass_that_is_tried_again_replays_the_same_memory(memory: str) -> None:
    found = []
    for speed in ("plain", "compile"):
        settings = ("laps.fit_only=false", f"laps.memory={memory}", f"run.speed={speed}")
        stage = begin("laps", "disjoint", settings=settings)
        stage.look("before")
        fabric = make_fabric(stage.method.config)
        setup = fabric.setup(stage.student)
        compute = make_pass(fabric, stage.method, setup, stage.teacher, stage.method.config, 0, lambda text: None)
        if isinstance(compute, CompiledPass):
            compute._finish = Broken.apply  # fails, whatever it is called with
        stage.method.expect(None, 1)
        compute.zero_gradients()
        compute(stage.batch)
        assert compute.how == "plain" and stage.method.replays
        found.append([p.grad for p in stage.student.parameters()])
    assert all((a is None) == (b is None) and (a is None or torch.equal(a, b)) for a, b in zip(*found, strict=True))


def old_background_is_void(self: Method, batch: Batch, teacher: Output | None) -> Batch:
    """A method's own relabel: what the teacher takes for anything but background becomes void."""
    assert teacher is not None
    doubtful = (batch.labels == 0) & (teacher.logits.argmax(1) > 0)
    return replace(batch, labels=torch.where(doubtful, 255, batch.labels))


@pytest.mark.parametrize(
    ("name", "settings", "own"),
    [
        ("cil", ("pseudo.threshold=0.2",), False),
        ("mib", ("pseudo.threshold=0.2",), False),
        ("mib", ("pseudo.threshold=0.2", "ce.class_weights=frequency"), False),
        ("lwf", (), True),
        ("lwf", ("ce.reduction=all",), True),
        ("laps", ("laps.fit_only=false", "ce.reduction=all", "pseudo.threshold=0.2"), False),
        ("laps-softmax", ("laps.fit_only=false", "ce.class_weights=frequency", "pseudo.threshold=0.1"), False),
    ],
)
def test_means_over_parts_go_over_the_labels_that_the_terms_see(name, settings, own, monkeypatch) -> None:
    """Gradient accumulation: CE and KD of the parts add up to those of the batch, whatever `relabel` changes."""
    if own:
        monkeypatch.setattr(METHODS[name], "relabel", old_background_is_void)
    stage = begin(name, "disjoint", settings=settings)
    weights = tuple(1.0 + channel for channel in range(CLASSES)) if "class_weights" in str(settings) else None
    assert stage.teacher is not None
    torch.nn.init.normal_(stage.teacher.classifier.weight)  # so that it sees old classes
    if name.startswith("laps"):
        stage.teacher.classifier.bias.data = torch.tensor([-9.0, *[0.0] * (N_OLD - 1)])
    stage.method.weigh_classes(weights, torch.device("cpu"))
    fabric = make_fabric(stage.method.config)
    compute = Pass(fabric, stage.method, fabric.setup(stage.student), stage.teacher)
    parts = stage.batch.split(4)
    seen = compute.relabelled(stage.batch, parts)
    assert not torch.equal(seen.labels, stage.batch.labels)
    whole = compute(stage.batch).terms
    stage.method.expect(seen, len(parts))
    passed = [compute(part).terms for part in parts]
    for term in ("ce", "kd"):
        assert sum(float(terms[term]) for terms in passed) == pytest.approx(float(whole[term]), rel=1e-5), term


class Broken(torch.autograd.Function):
    """Fails in the backward pass."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise RuntimeError("no compiler for the backward pass")


def test_a_failure_in_the_backward_pass_leaves_no_gradients() -> None:
    """Those of the classifier exist already when the backward pass of the trunk is compiled."""
    found = []
    for speed in ("plain", "compile"):
        config = make_config("sdr", "default", f"run.speed={speed}")
        torch.manual_seed(0)
        student = build_network(config.net, N_OLD)
        method = METHODS["sdr"](config)
        method.begin_step(StepInfo(0, 0, N_OLD, "disjoint"), student, None)
        fabric = make_fabric(config)
        compute = make_pass(fabric, method, fabric.setup(student.train()), None, config, 0, lambda text: None)
        if isinstance(compute, CompiledPass):
            compute._trunk = lambda network, images: tuple(Broken.apply(x) for x in Network.trunk(network, images))
        compute.zero_gradients()
        compute(make_batch(0, "disjoint", 4))
        assert compute.how == "plain"
        found.append([p.grad for p in student.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


class Recording:
    """Stands in for torch.cuda: a graph that, replayed, writes into the gradients it was recorded with."""

    def __init__(self, monkeypatch):
        self.modes: list[str] = []
        self.inner = self.gradients = None
        nothing = SimpleNamespace(wait_stream=lambda other: None, device_index=0)
        draws = SimpleNamespace(clone_state=lambda: None, graphsafe_set_state=lambda state: None)
        for name, stand_in in {
            "Stream": lambda device: nothing,
            "stream": lambda stream: nullcontext(),
            "current_stream": lambda: nothing,
            "empty_cache": lambda: None,
            "default_generators": [draws],
            "CUDAGraph": lambda: self,
            "graph": self.record,
        }.items():
            monkeypatch.setattr(torch.cuda, name, stand_in)

    @contextmanager
    def record(self, graph, stream, capture_error_mode="global"):
        self.modes.append(capture_error_mode)
        yield
        self.gradients = [p.grad for p in self.compute.student.parameters()]

    def replay(self):
        parameters = list(self.compute.student.parameters())
        shown = [p.grad for p in parameters]
        self.compute.inner.zero_gradients()
        self.compute.inner(self.compute._batch)
        for parameter, recorded, before in zip(parameters, self.gradients, shown, strict=True):
            recorded.copy_(parameter.grad)
            parameter.grad = before


def test_gradients_that_a_method_replaces_are_back_before_a_replay(monkeypatch) -> None:
    recording = Recording(monkeypatch)
    config = make_config("ft")
    found = []
    for graph in (False, True):
        torch.manual_seed(0)
        student = build_network(config.net, N_OLD).eval()
        method = METHODS["ft"](config)
        method.begin_step(StepInfo(0, 0, N_OLD, "disjoint"), student, None)
        fabric = make_fabric(config)
        compute = Pass(fabric, method, fabric.setup(student), None)
        if graph:
            compute = recording.compute = GraphPass(compute, print)
        for images in (4, 4, 4, 4, 4, 4):
            compute.zero_gradients()
            compute(make_batch(0, "disjoint", images))
            with torch.no_grad():
                for number, parameter in enumerate(student.parameters()):
                    if number % 2:
                        parameter.grad = parameter.grad * 2  # another tensor
                    else:
                        parameter.grad += parameter
                    parameter -= 0.01 * parameter.grad
        found.append([p.detach().clone() for p in student.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert recording.modes == ["thread_local"]  # other threads may go on pinning memory


class Quiet(Method):
    name, summary = "quiet", "terms of its own, and not a word on replaying"

    def terms(self, batch, student, teacher):
        return super().terms(batch, student, teacher)


class Sure(Quiet):
    name, summary, replayable = "sure", "says that it can be replayed", True


def test_a_method_with_custom_terms_is_replayed_only_if_declared_replayable() -> None:
    config = make_config("sdr")
    assert all(replayable(kind(make_config(name))) for name, kind in METHODS.items())
    assert not replayable(Quiet(config))
    assert replayable(Sure(config))
    assert not replayable(METHODS["sdr"](make_config("sdr", "official")))


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("ft", ["run.speed=graph"], "no NVIDIA GPU"),
        ("ft", ["run.speed=compile", "run.accumulate=2"], "run.accumulate=2"),
        ("sdr", ["run.speed=compile", "latent.official=true"], "Method.replayable"),
    ],
)
def test_a_wish_that_cannot_be_met_is_refused(name: str, settings: list[str], message: str) -> None:
    if torch.cuda.is_available():
        pytest.skip("about machines without a GPU")
    config = make_config(name, "default", *settings)
    network = build_network(config.net, 3)
    with pytest.raises(UsageError, match=message):
        make_pass(make_fabric(config), METHODS[name](config), network, None, config, 0, print)


def test_on_a_cpu_auto_is_plain() -> None:
    if torch.cuda.is_available():
        pytest.skip("about machines without a GPU")
    config = make_config("ft")
    made = make_pass(
        make_fabric(config), METHODS["ft"](config), build_network(config.net, 3), None, config, 10**6, print
    )
    assert type(made) is Pass


@pytest.fixture
def compiled(monkeypatch) -> list[Any]:
    """Every graph that is compiled from now on; they run as they are."""
    graphs: list[Any] = []

    def counted(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(CompiledPass, "backend", staticmethod(counted))
    return graphs


def test_the_compiled_trunk_serves_every_number_of_classes(compiled) -> None:
    """The other part would be compiled anew in every step."""
    config = make_config("sdr", "default", "run.speed=trunk")
    graphs = []
    for n_old in (3, 4, 5):
        student = build_network(config.net, n_old)
        teacher = copy.deepcopy(student).eval().requires_grad_(False)
        method = METHODS["sdr"](config)
        method.begin_step(StepInfo(1, n_old, 1, "disjoint"), student, teacher)
        student.train().freeze_statistics()
        fabric = make_fabric(config)
        compute = make_pass(fabric, method, fabric.setup(student), teacher, config, 0, pytest.fail)
        compute.zero_gradients()
        batch = make_batch(1, "disjoint", 4)
        new = (batch.labels >= N_OLD) & (batch.labels < CLASSES)
        compute(replace(batch, labels=torch.where(new, n_old, batch.labels)))
        graphs.append(len(compiled))
    assert graphs == [2, 2, 2]  # student and teacher


def test_the_trunk_is_compiled_for_any_number_of_settings(compiled) -> None:
    """torch keeps eight versions of a function, and runs further ones uncompiled."""
    for images in range(1, 11):
        config = make_config("ft", "default", "run.speed=trunk", f"train.batch_size={images}")
        method, student = METHODS["ft"](config), build_network(config.net, N_OLD)
        method.begin_step(StepInfo(0, 0, N_OLD, "disjoint"), student, None)
        fabric = make_fabric(config)
        compute = make_pass(fabric, method, fabric.setup(student.eval()), None, config, 0, pytest.fail)
        compute(make_batch(0, "disjoint", images))
        assert len(compiled) == images


@pytest.mark.parametrize(
    ("iterations", "decoder", "pays"),
    [
        (20_000, "deeplabv3plus", True),
        (19_999, "deeplabv3plus", False),
        (20_000, "unet", False),  # its upsampling would lose digits
    ],
)
def test_when_auto_compiles(iterations: int, decoder: str, pays: bool) -> None:
    assert compiling_pays(iterations, decoder) is pays


@pytest.mark.parametrize("align", [False, True])
@pytest.mark.parametrize("size", [(9, 14), (12, 5)])
def test_upsampling_as_one_operation_equals_interpolation(align: bool, size: tuple[int, int]) -> None:
    torch.manual_seed(0)
    maps = torch.randn(2, 3, 4, 5, dtype=torch.float64, requires_grad=True)
    other = maps.detach().clone().requires_grad_()
    weight = torch.randn(2, 3, *size, dtype=torch.float64)
    one = upsampled(maps, *size, align, torch.float64)
    two = F.interpolate(other, size=size, mode="bilinear", align_corners=align)
    (one * weight).sum().backward()
    (two * weight).sum().backward()
    torch.testing.assert_close(one, two, rtol=0, atol=0)
    torch.testing.assert_close(maps.grad, other.grad, rtol=1e-12, atol=1e-12)
    torch.library.opcheck(upsampled, (maps, *size, align, torch.float64))


def test_a_compiler_sees_upsampling_as_one_operation_and_padding_as_padding() -> None:
    """Not the ways of an exported network: some versions of torch say that they export whenever they compile."""
    seen: list[str] = []

    def look(graph: torch.fx.GraphModule, _: Any) -> Any:
        seen.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph

    def prepare(maps: torch.Tensor) -> torch.Tensor:
        return resize_canvas(upsample(maps, (20, 20)), 19, 18)

    maps = torch.randn(1, 3, 5, 5)
    made = torch.compile(prepare, backend=look, dynamic=False)(maps)
    torch.testing.assert_close(made, prepare(maps))
    assert len(seen) == 2 and "sdrseg.upsample" in seen[0] and "pad" in seen[1], seen


def test_the_pooled_branch_and_the_upsampling_of_deeplab_are_smps() -> None:
    """With other code but the same numbers."""
    import segmentation_models_pytorch as smp

    theirs = smp.create_model("deeplabv3plus", "resnet18", encoder_weights=None, classes=CLASSES).eval()
    config = make_config("ft", "default", "net.encoder=resnet18", "net.decoder=deeplabv3plus", "net.output_stride=16")
    ours = build_network(config.net, CLASSES).eval()
    assert [n for n, _ in ours.decoder.named_parameters()] == [n for n, _ in theirs.decoder.named_parameters()]
    ours.decoder.load_state_dict(theirs.decoder.state_dict())
    scales = [
        torch.randn(2, c, 64 // s, 64 // s)
        for c, s in zip(theirs.encoder.out_channels, (1, 2, 4, 8, 16, 16), strict=True)
    ]
    torch.testing.assert_close(ours.decoder(scales), theirs.decoder(scales), rtol=1e-5, atol=1e-6)
