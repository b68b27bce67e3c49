"""Every loss can be compiled as one graph, and runs on a GPU without waiting for it."""

from __future__ import annotations

import shutil
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.decomposition import select_decomp_table

from loss_cases import METRICS, TERMS, Case, Term, value_and_gradient
from sdrseg.losses.cross_entropy import binary_cross_entropy_sums, unbiased_cross_entropy_sums
from sdrseg.losses.distillation import unbiased_distillation_sums
from sdrseg.losses.prototypes import class_sums, labels_on_grid, pseudo_labels, update
from sdrseg.losses.sparsity import class_maxima

CASE = Case.random(0, B=2, C=8, h=4, w=4, zeros=True)

STEPS = {
    "running prototypes": lambda c: update(c.prototypes, class_sums(c.F, c.grid, c.K), "image", c.take),
    "exponential prototypes": lambda c: update(c.prototypes, class_sums(c.F, c.grid, c.K), "pixel", c.take, 0.1),
    "pseudo-labels": lambda c: pseudo_labels(c.grid[:, :2, :2], c.t, 2),
    "pseudo-labels, cells outside": lambda c: pseudo_labels(c.grid, c.t, 2),
    "padding": lambda c: labels_on_grid(c.y, c.keep, (3, 3), 2),
    "class maxima": lambda c: class_maxima(c.F, c.grid, c.K),
}
"""What prepares the terms."""


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def compiled(term: Term, **how: Any) -> Term:
    """Compiled as a function of tensors: everything else in a case is constant."""
    return replace(term, ours=torch.compile(term.ours, fullgraph=True, dynamic=False, **how))


def same(ours: Any, theirs: Any) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


CONSTANTS = ("void counted", "alpha", "entropy weight", "by n_old")
"""Terms that are another with a constant changed."""


@pytest.mark.parametrize("name", [name for name in TERMS if not any(constant in name for constant in CONSTANTS)])
def test_term_is_one_graph(name):
    same(value_and_gradient(compiled(TERMS[name], backend="aot_eager"), CASE), value_and_gradient(TERMS[name], CASE))


@pytest.mark.parametrize("name", METRICS)
def test_metric_is_one_graph(name):
    same(compiled(METRICS[name], backend="aot_eager").ours(CASE), METRICS[name].ours(CASE))


@pytest.mark.parametrize("name", STEPS)
def test_preparation_is_one_graph(name):
    traced = torch.compile(STEPS[name], fullgraph=True, backend="aot_eager", dynamic=False)
    same(traced(CASE), STEPS[name](CASE))


@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler")
@pytest.mark.parametrize(
    "names",
    [
        ("UNCE", "UNKD"),
        ("attraction", "repulsion, image means, by classes", "sparsity, class_max, by image"),
    ],
    ids=["logits", "features"],
)
def test_terms_compile_with_inductor(names, tmp_path_factory, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "inductor"))
    together = Term(TERMS[names[0]].wrt, lambda c: sum(TERMS[name].ours(c) for name in names), lambda n: 0.0)
    same(
        value_and_gradient(compiled(together, options={"compile_threads": 1}), CASE), value_and_gradient(together, CASE)
    )


# ---------------------------------------------------------------------------------------------------------------------
# On a GPU


@pytest.fixture
def no_waiting():
    """A context in which any call that makes the host wait for the GPU is an error."""
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")

    @contextmanager
    def context():
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")

    return context


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_everything_runs_without_waiting_for_the_gpu(dtype, no_waiting):
    """Forward and backward, with the result of the CPU."""
    case = Case.random(0, B=2, C=64, h=8, w=8, H=32, W=32, K=7, n_old=4, zeros=True)
    case = case.floating(dtype).floating(torch.float32, ("p",)).labels(torch.uint8)
    on_gpu = case.each(lambda _, x: x.cuda())
    tolerance = {"rtol": 1e-4, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 1e-3}
    calls = {name: partial(value_and_gradient, term) for name, term in TERMS.items()}
    calls |= {name: metric.ours for name, metric in METRICS.items()} | STEPS
    wrong = {}
    for name, call in calls.items():
        expected = call(case)
        call(on_gpu)  # libraries load on first use
        try:
            with no_waiting():
                result = call(on_gpu)
            torch.testing.assert_close(result, expected, check_device=False, **tolerance)
        except (RuntimeError, AssertionError) as error:
            wrong[name] = str(error)
    assert not wrong


def test_waiting_for_the_gpu_would_be_noticed(no_waiting):
    x = torch.ones(3, device="cuda")
    with no_waiting(), pytest.raises(RuntimeError, match="synchroniz"):
        x.sum().item()


def test_compiled_losses_over_pixels_keep_nothing_but_logits():
    """With many classes any other tensor of that size would double the memory of a step: those stored for the backward
    pass, and the buffer that the gradient of a gather needs."""
    kept: list[torch.Size] = []
    called: list[str] = []
    z, t = torch.randn(2, 31, 16, 16, requires_grad=True), torch.randn(2, 21, 16, 16)
    labels, keep = torch.randint(0, 31, (2, 16, 16)), torch.rand(2, 16, 16) < 0.9
    large = 2 * 16 * 16 * 5

    def forward(graph: torch.fx.GraphModule, _: Any) -> Any:
        returned = next(node for node in graph.graph.nodes if node.op == "output").args[0]
        kept.extend(node.meta["val"].shape for node in returned if node.meta["val"].numel() > large)
        return make_boxed_func(graph.forward)

    def backward(graph: torch.fx.GraphModule, _: Any) -> Any:
        called.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return make_boxed_func(graph.forward)

    def loss(z, t, labels, keep):
        sums = [unbiased_cross_entropy_sums(z, labels, 21), unbiased_cross_entropy_sums(z, labels, 1)]
        return sum(
            each[0] for each in [*sums, unbiased_distillation_sums(z, t, keep), binary_cross_entropy_sums(z, labels)]
        )

    compiler = aot_autograd(
        fw_compiler=forward,
        bw_compiler=backward,
        decompositions=select_decomp_table(),
        partition_fn=min_cut_rematerialization_partition,
    )
    torch.compile(loss, backend=compiler, dynamic=False)(z, t, labels, keep).backward()
    assert set(kept) == {z.shape, t.shape} and len(kept) == 2
    assert called and not [name for name in called if name.startswith(("aten.scatter", "aten.index_put"))]
