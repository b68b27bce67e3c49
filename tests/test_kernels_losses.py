"""Losses over pixels and sums over features, against loops and against the same arithmetic in float64."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from unittest.mock import patch

import numpy as np
import pytest
import torch

from interpreted import GPU, NEEDS_TRITON, close, interpret
from sdrseg import kernels
from sdrseg.config import load_config
from sdrseg.datasets.batches import Batch
from sdrseg.distributed import Processes
from sdrseg.kernels import pixels
from sdrseg.losses.cross_entropy import cross_entropy_sums, unbiased_cross_entropy_sums
from sdrseg.losses.distillation import unbiased_distillation_sums
from sdrseg.losses.prototypes import Prototypes
from sdrseg.losses.unbiased import unbiased_sums
from sdrseg.methods import StepInfo, method_layers
from sdrseg.methods.latent import LatentSpace

import reference

SUMMED = """
import sys
import numpy as np, torch
import test_kernels_losses as tests

for case in sys.argv[1:]:
    given = {name: torch.from_numpy(array) for name, array in np.load(case).items()}
    z, t = (given[name].contiguous(memory_format=torch.channels_last) for name in "zt")
    said = tests.kernel_sums(z.requires_grad_(), t, given["labels"], given["keep"])
    np.savez(case + ".said.npz", **{name: value.detach().numpy() for name, value in said.items()})
# What a compiler is told about the operation is true, and so is its gradient.
small = [x[:, :, :2, :2].contiguous(memory_format=torch.channels_last).detach() for x in (z, t)]
few = given["labels"][:, :2, :2].contiguous()
for teacher, hidden in ((None, 3), (small[1], 1)):
    given = (small[0].clone().requires_grad_(), few, hidden, teacher, few)
    torch.library.opcheck(tests.pixels.pixel_losses, given)
"""


@contextmanager
def counted_plain() -> Iterator[list[str]]:
    """The names of the plain formulas, as they are called within."""
    calls: list[str] = []

    def counting(name: str):
        formula = getattr(pixels, name)
        return patch.object(pixels, name, lambda *given: calls.append(name) or formula(*given))

    with counting("cross_entropy"), counting("unbiased_distillation"):
        yield calls


def kernel_sums(z: torch.Tensor, t: torch.Tensor, labels: torch.Tensor, keep: torch.Tensor):
    """Values, and gradients of −3 times the values, by the kernels."""
    with counted_plain() as calls:
        said = {name: pixels.cross_entropy_sum(z, labels, n) for name, n in (("ce", 1), ("unce", t.shape[1]))}
        for name, hidden in (("ce", 1), ("unce", t.shape[1])):
            ce, unkd = pixels.loss_sums(z, labels, hidden, t, keep)
            said |= {f"{name} beside unkd": ce, f"unkd beside {name}": unkd, f"{name} + unkd": ce + 0.3 * unkd}
        assert not calls, "the plain formulas ran"
    return said | gradients(said, z)


def gradients(said: dict[str, torch.Tensor], z: torch.Tensor) -> dict[str, torch.Tensor]:
    made = {f"{name} gradient": torch.autograd.grad(-3 * v, z, retain_graph=True)[0] for name, v in said.items()}
    assert all(gradient.stride() == z.stride() for gradient in made.values())
    return made


def plain_sums(z: torch.Tensor, t: torch.Tensor, labels: torch.Tensor, keep: torch.Tensor):
    """Values, and gradients of −3 times the values, by the plain formulas."""
    said = {"ce": cross_entropy_sums(z, labels)[0], "unce": unbiased_cross_entropy_sums(z, labels, t.shape[1])[0]}
    unkd = unbiased_distillation_sums(z, t, keep)[0]
    for name in ("ce", "unce"):
        both = said[name] + 0.3 * unkd
        said |= {f"{name} beside unkd": said[name], f"unkd beside {name}": unkd, f"{name} + unkd": both}
    return said | gradients(said, z)


def drawn_logits(seed: int, shape: tuple[int, int, int, int], n_old: int, scale: float) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(seed)
    images, classes, height, width = shape
    labels = draw.integers(0, classes, (images, height, width)).astype(np.uint8)
    labels[draw.random(labels.shape) < 0.2] = 255
    logits = {
        "z": draw.normal(size=shape, scale=scale),
        "t": draw.normal(size=(images, n_old, height, width), scale=scale),
    }
    return {name: array.astype(np.float32) for name, array in logits.items()} | {
        "labels": labels,
        "keep": draw.random(labels.shape) < 0.8,
    }


LOGITS = (  # shape, old classes, scale
    ((2, 5, 7, 9), 3, 1),
    ((1, 17, 11, 13), 16, 10),
    ((2, 3, 4, 5), 2, 1),
    ((1, 4, 3, 5), 4, 1),  # no new classes
    ((1, 40, 3, 50), 30, 200),  # far apart: single exponentials are 0 or overflow
    ((1, 129, 2, 3), 101, 5),
)


@NEEDS_TRITON
def test_the_losses_over_pixels_equal_loops(tmp_path):
    """Values against loops in plain Python; these and gradients against the plain formulas in float64."""
    cases = {}
    for number, (shape, n_old, scale) in enumerate(LOGITS):
        given = drawn_logits(number, shape, n_old, scale)
        np.savez(tmp_path / f"{number}.npz", **given)
        cases[str(tmp_path / f"{number}.npz")] = given
    interpret(SUMMED, *cases)
    for case, given in cases.items():
        said = np.load(f"{case}.said.npz")
        z, t, labels, keep = (given[name] for name in ("z", "t", "labels", "keep"))
        if np.abs(z).max() < 100:  # the loops cannot do without single exponentials
            counted, n_old = (labels != 255).sum(), t.shape[1]
            truth = {"ce": counted * reference.cross_entropy(z, labels)}
            truth["unce"] = counted * reference.unbiased_cross_entropy(z, labels, n_old)
            each = reference.unbiased_distillation(z, t, keep)
            truth |= {f"unkd beside {name}": keep.sum() * n_old * each for name in ("ce", "unce")}
            assert {name: float(said[name]) for name in truth} == pytest.approx(truth, rel=1e-5, abs=1e-5)
        exact = torch.from_numpy(z).double().requires_grad_()
        others = (torch.from_numpy(t).double(), torch.from_numpy(labels), torch.from_numpy(keep))
        for name, value in plain_sums(exact, *others).items():
            np.testing.assert_allclose(said[name], value.detach().numpy(), atol=1e-4, rtol=1e-4)


COMPILED_SUMS = """
import torch
from sdrseg import kernels
from sdrseg.kernels import triton_pixels
from sdrseg.losses.unbiased import unbiased_sums

torch.manual_seed(0)
z = torch.randn(2, 7, 8, 8).contiguous(memory_format=torch.channels_last).requires_grad_()
t = torch.randn(2, 4, 8, 8).contiguous(memory_format=torch.channels_last)
labels, keep = torch.randint(0, 7, (2, 8, 8), dtype=torch.uint8), torch.rand(2, 8, 8) < 0.8

def both(low, t, labels, padding):
    z = torch.nn.functional.interpolate(low, scale_factor=2, mode="bilinear")
    ce, kd = unbiased_sums(z[:, :, ::2, ::2].contiguous(memory_format=torch.channels_last), labels, 4, t, ~padding)
    return ce[0] / ce[1] + kd[0] / kd[1]

def said(function):
    value = function(z, t, labels, ~keep)
    return value.detach(), torch.autograd.grad(value, z)[0]

with kernels.disabled():
    wanted = said(both)
kernels.prepare(torch.device("cpu"))
calls, launch = [], triton_pixels.launch
triton_pixels.launch = lambda *given: calls.append(len(given)) or launch(*given)
found = said(torch.compile(both, fullgraph=True, dynamic=False))
torch.testing.assert_close(found, wanted)
assert calls == [5, 6], calls  # forward, and back with a gradient
"""


@NEEDS_TRITON
@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler")
def test_compiled_code_calls_the_kernel(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    interpret(COMPILED_SUMS)


ROWED = """
import sys
import numpy as np, torch
from sdrseg.kernels.rows import _class_totals, _exponential_sums, _row_sums

for case in sys.argv[1:]:
    given = {name: torch.from_numpy(array) for name, array in np.load(case).items()}
    f = given["f"].contiguous(memory_format=torch.channels_last).requires_grad_()
    factor = given["factor"].requires_grad_()
    rows = _row_sums(f)
    said = rows._asdict()
    said |= {"exponentials": _exponential_sums(f, factor), "classes": _class_totals(f, given["member"])}
    weighted = sum((given["of " + name] * value).sum() for name, value in said.items() if name != "ties")
    said["gradient"], said["gradient of factor"] = torch.autograd.grad(weighted, [f, factor])
    assert said["gradient"].is_contiguous(memory_format=torch.channels_last)
    np.savez(case + ".said.npz", **{name: value.detach().numpy() for name, value in said.items()})
"""


def looped_rows(given: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Sums of each position and class, and the gradient of all of them, by plain loops in float64."""
    f = given["f"].astype(np.float64)
    images, channels, height, width = f.shape
    positions, classes = height * width, given["member"].shape[1]
    names = ("top", "ties", "total", "square", "exponentials", "gradient of factor")
    said = {name: np.zeros((images, positions)) for name in names}
    said |= {"classes": np.zeros((images, classes, channels)), "gradient": np.zeros_like(f)}
    of = {name: given["of " + name].astype(np.float64) for name in (*names[:1], *names[2:5], "classes")}
    for b in range(images):
        for i in range(positions):
            row, r, back = f[b, :, i // width, i % width], float(given["factor"][b, i]), np.zeros(channels)
            said["top"][b, i], said["ties"][b, i] = row.max(), (row == row.max()).sum()
            said["total"][b, i], said["square"][b, i] = row.sum(), (row**2).sum()
            said["exponentials"][b, i] = np.exp(r * row).sum()
            back += of["total"][b, i] + 2 * of["square"][b, i] * row
            back += of["top"][b, i] * (row == row.max()) / (row == row.max()).sum()
            back += of["exponentials"][b, i] * r * np.exp(r * row)
            said["gradient of factor"][b, i] = of["exponentials"][b, i] * (row * np.exp(r * row)).sum()
            for c in range(classes):
                if given["member"][b, c, i]:
                    said["classes"][b, c] += row
                    back += of["classes"][b, c]
            said["gradient"][b, :, i // width, i % width] = back
    return said


@NEEDS_TRITON
def test_sums_over_features_equal_loops(tmp_path):
    cases = {}
    for number, (images, channels, height, width) in enumerate([(2, 300, 3, 3), (1, 5, 1, 2), (1, 256, 2, 5)]):
        draw = np.random.default_rng(number)
        f = np.maximum(draw.normal(size=(images, channels, height, width)), 0).round(1)  # with ties
        f[0, :, 0, 0] = 0
        positions, classes = (images, height * width), draw.integers(-1, 4, (images, 1, height * width))
        given = {"f": f, "factor": draw.random(positions), "of classes": draw.normal(size=(images, 4, channels))}
        for name in ("top", "total", "square", "exponentials"):
            given[f"of {name}"] = draw.normal(size=positions)
        given = {name: array.astype(np.float32) for name, array in given.items()}
        given["member"] = classes == np.arange(4)[:, None]
        np.savez(tmp_path / f"{number}.npz", **given)
        cases[str(tmp_path / f"{number}.npz")] = given
    interpret(ROWED, *cases)
    for case, given in cases.items():
        said = np.load(f"{case}.said.npz")
        for name, value in looped_rows(given).items():
            np.testing.assert_allclose(said[name], value, rtol=1e-4, atol=1e-4, err_msg=name)


@GPU
@pytest.mark.parametrize(("shape", "n_old", "scale"), LOGITS + (((2, 151, 64, 64), 101, 3),))
def test_losses_over_pixels_equal_float64(shape, n_old, scale):
    given = {name: torch.from_numpy(array) for name, array in drawn_logits(0, shape, n_old, scale).items()}
    exact = given["z"].double().requires_grad_()
    truth = plain_sums(exact, given["t"].double(), given["labels"], given["keep"])
    z, t = (given[name].cuda().contiguous(memory_format=torch.channels_last) for name in "zt")
    for name, value in kernel_sums(z.requires_grad_(), t, given["labels"].cuda(), given["keep"].cuda()).items():
        close(value, truth[name].detach(), torch.float32)


@GPU
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("hidden", [1, 3])
def test_both_losses_over_pixels_are_one_operation(compiled, hidden, monkeypatch):
    """Values and gradients of the sums of both, and no formula of their own."""
    given = {name: torch.from_numpy(array) for name, array in drawn_logits(0, (2, 5, 8, 8), 3, 1).items()}

    def both(z, t, labels, keep):
        return [each[0] / each[1] for each in unbiased_sums(z, labels, hidden, t, keep, count_void=hidden == 1)]

    exact = given["z"].double().requires_grad_()
    truth = both(exact, given["t"].double(), given["labels"], given["keep"])
    (wanted,) = torch.autograd.grad(truth[0] + 2 * truth[1], exact)
    z, t = (given[name].cuda().contiguous(memory_format=torch.channels_last) for name in "zt")
    assert pixels.runs_on(z.device)
    monkeypatch.setattr(pixels, "unbiased_distillation", None)
    torch.compiler.reset()
    said = (torch.compile(both, fullgraph=True) if compiled else both)(
        z.requires_grad_(), t, given["labels"].cuda(), given["keep"].cuda()
    )
    for one, other in zip(said, truth, strict=True):
        close(one, other.detach(), torch.float32)
    close(torch.autograd.grad(said[0] + 2 * said[1], z)[0], wanted, torch.float32)


@GPU
def test_logits_of_another_kind_are_left_to_the_plain_formulas():
    z = torch.randn(2, 5, 4, 6, device="cuda").contiguous(memory_format=torch.channels_last)

    def is_plain(z: torch.Tensor, hidden: int, teacher: torch.Tensor | None = None) -> bool:
        labels = torch.zeros(z.shape[0], *z.shape[2:], dtype=torch.uint8, device=z.device)
        with counted_plain() as calls:
            if teacher is None:
                pixels.cross_entropy_sum(z, labels, hidden)
            else:
                pixels.loss_sums(z, labels, hidden, teacher, labels.bool())
        return bool(calls)

    assert not (is_plain(z, 2) or is_plain(z, 5, z) or is_plain(z, 1, z)) and is_plain(z, 2, z)
    others = [z.double(), z.contiguous(), z[:, :3], z[:, :, :, :3], z.bfloat16().contiguous()]
    assert all(is_plain(other, 1) and is_plain(z, 1, other) for other in others if other.shape == z.shape)
    assert all(is_plain(other, 1) for other in (*others, z.cpu(), z[:0]))
    assert not is_plain(z.bfloat16(), 1) and is_plain(z, 1, z.clone().requires_grad_())
    with kernels.disabled("pixels"):
        assert is_plain(z, 2)


def latent_terms(device: str, kind: torch.dtype) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """SDR's terms on some features, and the gradient of their weighted sum, as that of one strong enough in each."""
    torch.manual_seed(0)
    f = torch.randn(3, 40, 8, 8).relu().bfloat16().to(device, kind).contiguous(memory_format=torch.channels_last)
    labels = torch.randint(0, 4, (3, 8, 8), dtype=torch.uint8)
    labels[0, :2] = 255
    teacher, images = torch.randn(3, 3, 8, 8), torch.zeros(3, 3, 8, 8, dtype=torch.uint8)
    batch = Batch(images, labels, torch.zeros(3, 8, 8, dtype=torch.bool), ()).to(torch.device(device))
    latent = LatentSpace(load_config("voc", None, None, method_layers("sdr", "default", None)), Processes(alone=True))
    latent.begin_step(StepInfo(1, 3, 1, "disjoint"), 40, 1, torch.device(device), nonnegative=True)
    for average, (mean, seen) in latent.prototypes.items():
        latent.prototypes[average] = Prototypes(
            mean.to(kind if kind == torch.float64 else torch.float32) + 0.5, seen + 7
        )
    terms = latent.terms(batch, f.requires_grad_(), teacher.to(device))
    strengths = {"pm": 3.0, "attract": 2.0, "repel": 5.0, "sp": 0.1}
    (gradient,) = torch.autograd.grad(sum(strengths[name] * term for name, term in terms.items()), f)
    return terms, gradient


def counted_launches() -> list[str]:
    """The names of the kernels over features, as they are launched from now on."""
    from sdrseg.kernels import triton_rows

    names: list[str] = []
    launch = triton_rows.launch

    def counting(kernel, *given):
        names.append(next(name for name, value in vars(triton_rows).items() if value is kernel))
        return launch(kernel, *given)

    triton_rows.launch = counting
    return names


TERMS = """
import sys
import torch
import test_kernels_losses as tests

launched = tests.counted_launches()
terms, gradient = tests.latent_terms("cpu", torch.float32)
assert {"rows", "rows_backward", "exponentials", "exponentials_backward"} <= set(launched)
torch.save(({name: float(term.detach()) for name, term in terms.items()}, gradient), sys.argv[1])
"""


@NEEDS_TRITON
def test_terms_on_features_without_a_gpu(tmp_path):
    """The same terms from kernels, in Triton's interpreter, and from the plain formulas in float64."""
    interpret(TERMS, str(tmp_path / "said"))
    terms, gradient = torch.load(tmp_path / "said")
    wanted, truth = latent_terms("cpu", torch.float64)
    assert terms == pytest.approx({name: float(term.detach()) for name, term in wanted.items()}, rel=1e-5)
    close(gradient, truth, torch.float32)


@GPU
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("plain", [True, False])
def test_terms_on_features_equal_float64(kind, plain):
    with kernels.disabled() if plain else nullcontext():
        terms, gradient = latent_terms("cuda", kind)
    wanted, truth = latent_terms("cpu", torch.float64)
    found = {name: float(term.detach()) for name, term in terms.items()}
    assert found == pytest.approx({name: float(term.detach()) for name, term in wanted.items()}, rel=1e-4)
    close(gradient, truth, kind)
