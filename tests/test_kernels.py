"""Layers and losses with kernels of their own, against loops and against the same arithmetic in float64."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from interpreted import NEEDS_TRITON, interpret
from sdrseg import kernels as kernels_module
from sdrseg.config import load_config, parse_settings
from sdrseg.data.batches import Batch
from sdrseg.distributed import Everyone
from sdrseg.kernels import layers as layers_module
from sdrseg.kernels import pixels, rows, upsampling
from sdrseg.kernels.layers import BatchNorm2d, DepthwiseConv2d, choose_kernels, depthwise, use_fast_layers
from sdrseg.losses import prototypes, unbiased
from sdrseg.losses.cross_entropy import cross_entropy_sums, unbiased_cross_entropy_sums
from sdrseg.losses.distillation import unbiased_distillation_sums
from sdrseg.losses.prototypes import Prototypes
from sdrseg.losses.unbiased import unbiased_sums
from sdrseg.methods import StepInfo, method_layers
from sdrseg.methods import latent as latent_module
from sdrseg.methods.latent import LatentSpace
from sdrseg.network import build_network

import reference

GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def looped_depthwise(maps: np.ndarray, weight: np.ndarray, dilation: int) -> np.ndarray:
    """Maps (B, h, w, C), weights (C, 3, 3), cell by cell."""
    images, height, width, channels = maps.shape
    result = np.zeros(maps.shape)
    for n, i, j, c in np.ndindex(images, height, width, channels):
        for a in range(3):
            for b in range(3):
                y, x = i + (a - 1) * dilation, j + (b - 1) * dilation
                if 0 <= y < height and 0 <= x < width:
                    result[n, i, j, c] += maps[n, y, x, c] * weight[c, a, b]
    return result


def looped_weights(maps: np.ndarray, gradient: np.ndarray, dilation: int) -> np.ndarray:
    """The gradient of the weights (C, 3, 3), cell by cell."""
    images, height, width, channels = maps.shape
    result = np.zeros((channels, 3, 3))
    for n, i, j, a, b in np.ndindex(images, height, width, 3, 3):
        y, x = i + (a - 1) * dilation, j + (b - 1) * dilation
        if 0 <= y < height and 0 <= x < width:
            result[:, a, b] += maps[n, y, x].astype(float) * gradient[n, i, j]
    return result


INTERPRETED = """
import sys
import numpy as np, torch
from sdrseg.kernels.layers import depthwise, depthwise_weights
from sdrseg.kernels.triton_depthwise import launch

for case in sys.argv[1:]:
    given = np.load(case)
    maps, dilation = torch.from_numpy(given["maps"]).permute(0, 3, 1, 2), int(given["dilation"])
    weight = torch.from_numpy(given["weight"])[:, None]
    said = launch(maps, weight, dilation)
    assert said.is_contiguous(memory_format=torch.channels_last)
    np.save(case + ".said.npy", said.permute(0, 2, 3, 1).numpy())
    weights = depthwise_weights(maps, torch.from_numpy(given["gradient"]).permute(0, 3, 1, 2), dilation)
    np.save(case + ".weights.npy", weights[:, 0].numpy())
# What a compiler is told about the operation is true, and so is its gradient.
torch.library.opcheck(depthwise, (maps.clone().requires_grad_(), weight.requires_grad_(), dilation))
torch.library.opcheck(depthwise_weights, (maps, maps, dilation))
"""
SHAPES = (((2, 7, 9, 5), 2), ((1, 5, 37, 3), 6), ((3, 1, 1, 4), 12), ((2, 3, 3, 130), 1))


@NEEDS_TRITON
def test_the_depthwise_kernel_equals_loops(tmp_path):
    """Triton's interpreter runs it without a GPU: rows, channels and blocks that do not come out even."""
    draw = np.random.default_rng(0)
    wanted = {}
    for number, (shape, dilation) in enumerate(SHAPES):
        maps, weight = draw.normal(size=shape).astype(np.float32), draw.normal(size=(shape[3], 3, 3)).astype(np.float32)
        gradient = draw.normal(size=shape).astype(np.float32)
        np.savez(tmp_path / f"{number}.npz", maps=maps, weight=weight, gradient=gradient, dilation=dilation)
        truth = looped_depthwise(maps, weight, dilation), looped_weights(maps, gradient, dilation)
        wanted[str(tmp_path / f"{number}.npz")] = truth
    interpret(INTERPRETED, *wanted)
    for case, (result, weights) in wanted.items():
        np.testing.assert_allclose(np.load(f"{case}.said.npy"), result, atol=1e-5)
        np.testing.assert_allclose(np.load(f"{case}.weights.npy"), weights, atol=1e-4)


def places(small: int, large: int, align: bool) -> np.ndarray:
    """(large, small): how much each row or column of the large map takes of those of the small one."""
    shares = np.zeros((large, small))
    for i in range(large):
        at = i * (small - 1) / (large - 1) if align else (i + 0.5) * small / large - 0.5
        at = min(max(at, 0), small - 1)
        below = int(at)
        shares[i, below] += 1 - (at - below)
        shares[i, min(below + 1, small - 1)] += at - below
    return shares


UPSAMPLED = """
import sys
import numpy as np, torch
from unittest.mock import patch
from sdrseg.kernels import upsampling

seen = []
with patch.object(upsampling, "fits", lambda *given: seen.append(given) or True):
    for case in sys.argv[1:]:
        given = np.load(case)
        maps = torch.from_numpy(given["maps"]).permute(0, 3, 1, 2).requires_grad_()
        gradient = torch.from_numpy(given["gradient"]).permute(0, 3, 1, 2)
        said = upsampling.upsample(maps, tuple(gradient.shape[-2:]), align_corners=bool(given["align"]))
        assert said.is_contiguous(memory_format=torch.channels_last)
        (back,) = torch.autograd.grad(said, maps, gradient)
        assert back.is_contiguous(memory_format=torch.channels_last)
        np.savez(case + ".said.npz", said=said.detach().permute(0, 2, 3, 1), back=back.permute(0, 2, 3, 1))
    assert len(seen) == 3 * len(sys.argv[1:])  # asked before, forward and back
    half = maps.detach().half().requires_grad_()
    assert upsampling.upsample(half, (8, 8)).dtype == torch.float32
    assert upsampling.upsample(half, (8, 8), kind=torch.float16).dtype == torch.float16
    (back,) = torch.autograd.grad(upsampling.upsample(half, (8, 8)).sum(), half)
    assert back.dtype == torch.float16
    assert abs(back.double().sum() / (8 * 8 * half[:, :, 0, 0].numel()) - 1) < 1e-3
    # What a compiler is told about the operation is true, and so is its gradient.
    torch.library.opcheck(upsampling.upsampled, (maps.detach().clone().requires_grad_(), 4, 6, False, torch.float32))
    torch.library.opcheck(upsampling.upsampled_back, (gradient[:, :, :2, :3], 2, 2, False, torch.float16))
"""


@NEEDS_TRITON
def test_upsampling_equals_sums_of_shares(tmp_path):
    """Of sizes that come out even and others, as large as before, and sixteen times as large."""
    draw, wanted = np.random.default_rng(0), {}
    for small, large, channels, align in (
        ((4, 5), (16, 20), 17, False),
        ((4, 3), (8, 6), 90, True),
        ((5, 3), (11, 3), 3, True),
        ((2, 2), (32, 31), 3, False),
        ((2, 3), (5, 33), 2, True),
    ):
        maps = draw.normal(size=(2, *small, channels)).astype(np.float32)
        gradient = draw.normal(size=(2, *large, channels)).astype(np.float32)
        case = tmp_path / f"{len(wanted)}.npz"
        np.savez(case, maps=maps, gradient=gradient, align=align)
        rows, columns = (places(a, b, align) for a, b in zip(small, large, strict=True))
        said = np.einsum("yh,xw,bhwc->byxc", rows, columns, maps)
        wanted[str(case)] = said, np.einsum("yh,xw,byxc->bhwc", rows, columns, gradient)
    interpret(UPSAMPLED, *wanted)
    for case, truth in wanted.items():
        for found, value in zip(np.load(f"{case}.said.npz").values(), truth, strict=True):
            np.testing.assert_allclose(found, value, atol=1e-4, rtol=1e-5)


COMPILED = """
import triton
from triton.backends.compiler import GPUTarget
from sdrseg.kernels import triton_depthwise, triton_pixels, triton_rows, triton_upsampling, triton_views

def compile(kernel, types, warps=4, **constants):
    names = dict(zip(kernel.arg_names, [*types, *["constexpr"] * len(constants)], strict=True))
    source = triton.compiler.ASTSource(kernel, names, constexprs=constants)
    options = {"enable_fp_fusion": True, "num_warps": warps}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]

for kind in ("*bf16", "*fp32", "*fp16"):
    part = {"CELLS": triton_depthwise.CELLS, "CHANNELS": triton_depthwise.CHANNELS}
    assert "fma.rn" in compile(triton_depthwise.kernel, [kind] * 3 + ["i32"] * 4, **part)
    compile(triton_depthwise.weights, [kind] * 2 + ["*fp32"] + ["i32"] * 5, **triton_depthwise.GROUP)
for back in (False, True):
    for channels in (17, 61, 151):
        shares = triton_pixels.share_out(channels)
        types = ["*fp32", "*fp32", "*u8", "*u8", "*fp32", "*fp32", *["i32"] * 4]
        for distil in (False, True):
            ptx = compile(triton_pixels.losses, types, triton_pixels.WARPS, BACK=back, DISTIL=distil, **shares)
            assert "fma.rn" in ptx
for kind in ("*bf16", "*fp32", "*fp16"):
    sizes = [*["i32"] * 5, *["fp32"] * 3]
    part = {"SPAN_Y": 9, "SPAN_X": 10, "BLOCK": triton_upsampling.BLOCK_BACK}
    for large in {kind, "*fp32"}:
        compile(triton_upsampling.kernel, [kind, large, *sizes], triton_upsampling.WARPS, BLOCK=triton_upsampling.BLOCK)
        types = [large, kind, *sizes, "fp32", "fp32"]
        compile(triton_upsampling.kernel_back, types, triton_upsampling.WARPS_BACK, **part)
types = ["*i32", "*i64", "*u8", "*u8", "*u8", *["i32"] * 5]
compile(triton_views.views, types, VOID=255, BLOCK=triton_views.BLOCK)
for kind in ("*bf16", "*fp32"):
    shares = {"ROWS": triton_rows.ROWS, "LANES": triton_rows.LANES}
    one, sizes = ["*fp32"], ["i32", "i32"]
    compile(triton_rows.rows, [kind, *one * 4, *sizes], triton_rows.WARPS, **shares)
    compile(triton_rows.rows_back, [kind, *one * 4, kind, *sizes], triton_rows.WARPS, **shares)
    compile(triton_rows.exponentials, [kind, *one * 3, *sizes], triton_rows.WARPS, **shares)
    compile(triton_rows.exponentials_back, [kind, *one * 2, kind, *sizes], triton_rows.WARPS, **shares)
"""


@NEEDS_TRITON
def test_the_kernels_compile_for_gpus(tmp_path):
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path)}
    subprocess.run([sys.executable, "-W", "error", "-c", COMPILED], env=environment, check=True)


SUMMED = """
import sys
import numpy as np, torch
import test_kernels as tests

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


def kernel_sums(z: torch.Tensor, t: torch.Tensor, labels: torch.Tensor, keep: torch.Tensor):
    """Values, and gradients of −3 times the values, by the kernels."""
    said = {"ce": pixels.loss_sums(z, labels, 1)[0], "unce": pixels.loss_sums(z, labels, t.shape[1])[0]}
    for name, hidden in (("ce", 1), ("unce", t.shape[1])):
        ce, unkd = pixels.loss_sums(z, labels, hidden, t, keep)
        said |= {f"{name} beside unkd": ce, f"unkd beside {name}": unkd, f"{name} + unkd": ce + 0.3 * unkd}
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
from unittest.mock import patch
from sdrseg.kernels import pixels, triton_pixels
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

wanted = said(both)
calls, launch = [], triton_pixels.launch
counted = patch.object(triton_pixels, "launch", lambda *given: calls.append(len(given)) or launch(*given))
with patch.object(pixels, "fits", lambda *given: True), counted:
    found = said(torch.compile(both, fullgraph=True, dynamic=False))
torch.testing.assert_close(found, wanted)
assert calls == [5, 6], calls  # forward, and back with a gradient
"""


def test_compiled_code_knows_where_kernels_run(monkeypatch):
    """What was found before it was compiled; afterwards, too."""
    device = torch.device("cpu")
    key = ("Losses over pixels", device)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def asked(x):
        return x + 1 if pixels.found_to_run(x.device) else x

    for found in (None, True, False):
        monkeypatch.setattr(kernels_module, "_found", {} if found is None else {key: found})
        assert asked(torch.zeros(())) == bool(found)
    monkeypatch.setattr(kernels_module, "_found", {})
    assert not pixels.found_to_run(device) and key in kernels_module._found


@NEEDS_TRITON
@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler")
def test_compiled_code_calls_the_kernel(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    interpret(COMPILED_SUMS)


ROWED = """
import sys
import numpy as np, torch
from sdrseg.kernels.rows import class_totals, exponential_sums, row_sums

for case in sys.argv[1:]:
    given = {name: torch.from_numpy(array) for name, array in np.load(case).items()}
    f = given["f"].contiguous(memory_format=torch.channels_last).requires_grad_()
    factor = given["factor"].requires_grad_()
    rows = row_sums(f)
    said = {"exponentials": exponential_sums(f, factor), "classes": class_totals(f, given["member"]), **rows._asdict()}
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


def layers(kind: type[nn.Module], network: nn.Module) -> list[str]:
    return [name for name, module in network.named_modules() if type(module) is kind]


def test_only_the_layers_meant_are_replaced():
    class Other(nn.BatchNorm2d):
        """Of somebody else, who may compute something else."""

    network = nn.Sequential(
        nn.BatchNorm2d(4),
        Other(4),
        nn.Conv2d(4, 4, 3, padding=6, dilation=6, groups=4, bias=False),
        nn.Conv2d(4, 4, 3, padding=1, groups=4, bias=False),
        nn.Conv2d(4, 4, 3, padding=1, stride=2, groups=4, bias=False),
        nn.Conv2d(4, 4, 3, padding=6, dilation=6, groups=4),  # with a bias
        nn.Conv2d(4, 4, 3, padding=5, dilation=6, groups=4, bias=False),  # smaller than what went in
        nn.Conv2d(4, 4, 3, padding=6, dilation=6, groups=2, bias=False),
        nn.Conv2d(4, 8, 3, padding=6, dilation=6, groups=4, bias=False),
        nn.Conv2d(4, 4, 3, padding=6, dilation=6, groups=4, bias=False, padding_mode="reflect"),
        nn.Conv2d(4, 4, 5, padding=6, dilation=6, groups=4, bias=False),
    )
    keys = list(network.state_dict())
    use_fast_layers(network)
    assert layers(BatchNorm2d, network) == ["0"]
    assert layers(DepthwiseConv2d, network) == ["2", "3"]
    assert list(network.state_dict()) == keys


def test_without_a_gpu_nothing_changes():
    network = nn.Sequential(nn.Conv2d(4, 4, 3, padding=2, dilation=2, groups=4, bias=False), nn.BatchNorm2d(4)).eval()
    maps = torch.randn(2, 4, 8, 8, requires_grad=True)

    def said():
        output = network(maps)
        return output, *torch.autograd.grad(output.square().sum(), [maps, *network.parameters()])

    before = said()
    use_fast_layers(network)
    choose_kernels(network, torch.device("cpu"))
    assert all(torch.equal(a, b) for a, b in zip(before, said(), strict=True))


def test_deeplab_has_both():
    network = build_network(load_config("voc").net, 3)
    assert len(layers(BatchNorm2d, network)) > 100
    assert not layers(nn.BatchNorm2d, network)
    assert len(layers(DepthwiseConv2d, network)) == 5


def close(found: torch.Tensor, truth: torch.Tensor, kind: torch.dtype) -> None:
    far = float((found.double().cpu() - truth).norm() / truth.norm().clamp_min(1e-2))
    assert far < TOLERANCE[kind], far


@GPU
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(4, 24, 9, 7), (2, 512, 16, 16), (8, 256, 1, 1), (1, 3, 5, 5)])
@pytest.mark.parametrize("layout", [torch.channels_last, torch.contiguous_format])
def test_frozen_batch_norm_equals_float64(kind, shape, layout):
    torch.manual_seed(0)
    norm = nn.BatchNorm2d(shape[1]).eval()
    for tensor in (*norm.parameters(), norm.running_mean):
        tensor.data.normal_()
    norm.running_var.uniform_(0.1, 3)
    maps, gradient = torch.randn(shape).to(kind), torch.randn(shape).to(kind)
    exact = norm.double()
    wanted = maps.double().requires_grad_()
    truth = torch.autograd.grad(exact(wanted), [wanted, *exact.parameters()], gradient.double())

    use_fast_layers(network := nn.Sequential(norm.float().cuda()))
    given = maps.cuda().contiguous(memory_format=layout).requires_grad_()
    said = network(given)
    assert torch.equal(said, F.batch_norm(given, norm.running_mean, norm.running_var, norm.weight, norm.bias))
    back = gradient.cuda().contiguous(memory_format=layout)
    found = torch.autograd.grad(said, [given, *norm.parameters()], back)
    assert found[0].is_contiguous(memory_format=layout)
    for one, other in zip(found, truth, strict=True):
        close(one, other, kind)


@GPU
def test_frozen_batch_norm_without_trained_parameters():
    norm = nn.BatchNorm2d(8).eval().requires_grad_(False).cuda()
    norm.running_var.uniform_(0.1, 3)
    use_fast_layers(network := nn.Sequential(norm))
    maps = torch.randn(2, 8, 4, 4, device="cuda", requires_grad=True)
    network(maps).sum().backward()
    scale = (norm.running_var.double() + norm.eps).rsqrt().cpu()
    close(maps.grad, scale[:, None, None].expand(2, 8, 4, 4), torch.float32)


@GPU
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("shape", "dilation"), [((2, 5, 7, 9), 2), ((2, 512, 32, 32), 12), ((2, 304, 40, 33), 18)])
def test_depthwise_convolutions_equal_float64(kind, shape, dilation):
    torch.manual_seed(0)
    channels = shape[1]
    conv = nn.Conv2d(channels, channels, 3, padding=dilation, dilation=dilation, groups=channels, bias=False)
    conv.weight.data = conv.weight.data.to(kind).float()
    maps, gradient = torch.randn(shape).to(kind), torch.randn(shape).to(kind)
    wanted, weight = maps.double().requires_grad_(), conv.weight.detach().double().requires_grad_()
    made = F.conv2d(wanted, weight, padding=dilation, dilation=dilation, groups=channels)
    truth = (made, *torch.autograd.grad(made, [wanted, weight], gradient.double()))

    use_fast_layers(network := nn.Sequential(conv).cuda())
    choose_kernels(network, torch.device("cuda", 0))
    assert conv.fast
    given = maps.cuda().requires_grad_()
    with torch.autocast("cuda", torch.bfloat16, enabled=kind == torch.bfloat16):
        said = network(given)
    assert said.dtype == kind
    found = (said, *torch.autograd.grad(said, [given, conv.weight], gradient.cuda()))
    for one, other in zip(found, truth, strict=True):
        close(one, other.detach(), kind)


@GPU
def test_in_inference_mode_every_depthwise_convolution_is_ours(monkeypatch):
    calls = []
    monkeypatch.setattr(layers_module, "depthwise", lambda *given: calls.append(0) or depthwise(*given))
    conv = nn.Conv2d(48, 48, 3, padding=1, groups=48, bias=False)
    maps = torch.randn(2, 48, 9, 11)
    wanted = conv.double()(maps.double()).detach()
    use_fast_layers(network := nn.Sequential(conv.float()).cuda())
    choose_kernels(network, torch.device("cuda", 0))
    with torch.no_grad():
        close(network(maps.cuda()), wanted, torch.float32)
    assert not calls
    with torch.inference_mode():
        close(network(maps.cuda()), wanted, torch.float32)
    assert calls


@GPU
def test_a_whole_network_learns_the_same_with_and_without(monkeypatch):
    """Features, logits and every gradient of ResNet-50 DeepLabV3+ with frozen statistics, in float32."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    net = load_config("voc", None, parse_settings(["net.encoder=resnet50"])).net
    found = []
    for kernels in (True, False):
        torch.manual_seed(0)
        network = build_network(net, 5).place_on(torch.device("cuda", 0))
        images = torch.randn(2, 3, 128, 128, device="cuda")
        network.train()(images)
        network.freeze_statistics()
        if not kernels:
            monkeypatch.setattr(upsampling, "fits", lambda *given: False)
            for module in network.modules():
                if isinstance(module, BatchNorm2d):
                    module.__class__ = nn.BatchNorm2d
                elif isinstance(module, DepthwiseConv2d):
                    module.fast = False
        said = network(images)
        torch.nn.functional.cross_entropy(said.logits, images.argmax(1)).backward()
        found.append((said.features, said.logits, torch.cat([p.grad.flatten() for p in network.parameters()])))
    for fast, without in zip(*found, strict=True):
        close(fast, without.detach().double().cpu(), torch.float32)


@GPU
@pytest.mark.parametrize("align", [False, True])
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("shape", "size"),
    [((2, 17, 32, 32), (128, 128)), ((2, 256, 8, 8), (32, 32)), ((1, 5, 7, 9), (100, 31)), ((1, 151, 5, 2), (5, 32))],
)
def test_upsampling_equals_float64(shape, size, kind, align):
    torch.manual_seed(0)
    maps, gradient = torch.randn(shape).to(kind), torch.randn(*shape[:2], *size)
    wanted = maps.double().requires_grad_()
    truth = F.interpolate(wanted, size=size, mode="bilinear", align_corners=align)
    given = maps.cuda().requires_grad_()
    assert upsampling.fits(given, shape[-2:], size)
    said = upsampling.upsample(given, size, align_corners=align)
    assert said.dtype == torch.float32 and said.is_contiguous(memory_format=torch.channels_last)
    close(said.detach(), truth.detach(), torch.float32)
    back = [torch.autograd.grad(said, given, gradient.cuda(), retain_graph=True)[0] for _ in range(5)]
    assert all(torch.equal(back[0], other) for other in back)
    close(back[0], torch.autograd.grad(truth, wanted, gradient.double(), retain_graph=True)[0], kind)
    narrow = upsampling.upsample(given, size, align_corners=align, kind=kind)
    assert narrow.dtype == kind
    close(narrow.detach(), truth.detach(), kind)
    close(
        torch.autograd.grad(narrow, given, gradient.cuda().to(kind))[0],
        torch.autograd.grad(truth, wanted, gradient.to(kind).double())[0],
        kind,
    )


def test_what_upsampling_has_kernels_for(monkeypatch):
    maps = torch.zeros(1, 3, 4, 4)
    assert not upsampling.fits(maps, (4, 4), (16, 16))  # not on a GPU
    monkeypatch.setattr(upsampling, "runs", lambda *given: True)

    def asked(small, large, kind=torch.bfloat16, numbers=1):
        given = SimpleNamespace(is_cuda=True, device=None, dtype=kind, numel=lambda: numbers)
        return upsampling.fits(given, small, large)

    assert asked((4, 5), (128, 5))
    for small, large in (((1, 4), (4, 16)), ((4, 4), (3, 16)), ((4, 4), (16, 129))):
        assert not asked(small, large)
    assert not asked((4, 4), (16, 16), torch.float64)
    assert not asked((4, 4), (16, 16), numbers=0)


def test_the_gradient_of_the_gradient_of_upsampling():
    """A method of somebody's own may ask for it."""
    maps = torch.randn(1, 2, 3, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda maps: upsampling.upsampled(maps, 7, 9, False, torch.float64), maps)


@GPU
@pytest.mark.parametrize(("shape", "n_old", "scale"), LOGITS + (((2, 151, 64, 64), 101, 3),))
def test_losses_over_pixels_equal_float64(shape, n_old, scale):
    given = {name: torch.from_numpy(array) for name, array in drawn_logits(0, shape, n_old, scale).items()}
    exact = given["z"].double().requires_grad_()
    truth = plain_sums(exact, given["t"].double(), given["labels"], given["keep"])
    z, t = (given[name].cuda().contiguous(memory_format=torch.channels_last) for name in "zt")
    assert pixels.fits(z, n_old, t)
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
    assert pixels.found_to_run(z.device)
    monkeypatch.setattr(unbiased, "unbiased_distillation_sums", None)
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
    assert pixels.fits(z, 2) and pixels.fits(z, 5, z) and pixels.fits(z, 1, z) and not pixels.fits(z, 2, z)
    others = [z.double(), z.bfloat16(), z.contiguous(), z[:, :3], z[:, :, :, :3], z[:0], z.cpu()]
    assert not any(pixels.fits(other, 1) or pixels.fits(z, 1, other) for other in others if other.numel())
    assert not pixels.fits(z[:0], 1) and not pixels.fits(z, 1, z.clone().requires_grad_())


def latent_terms(device: str, kind: torch.dtype) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """SDR's terms on some features, and the gradient of their weighted sum, as that of one strong enough in each."""
    torch.manual_seed(0)
    f = torch.randn(3, 40, 8, 8).relu().bfloat16().to(device, kind).contiguous(memory_format=torch.channels_last)
    labels = torch.randint(0, 4, (3, 8, 8), dtype=torch.uint8)
    labels[0, :2] = 255
    teacher, images = torch.randn(3, 3, 8, 8), torch.zeros(3, 3, 8, 8, dtype=torch.uint8)
    batch = Batch(images, labels, torch.zeros(3, 8, 8, dtype=torch.bool), ()).to(torch.device(device))
    latent = LatentSpace(load_config("voc", None, None, method_layers("sdr", "default", None)), Everyone(alone=True))
    latent.begin_step(StepInfo(1, 3, 1, "disjoint"), 40, 1, torch.device(device), nonnegative=True)
    for average, (mean, seen) in latent.prototypes.items():
        latent.prototypes[average] = Prototypes(
            mean.to(kind if kind == torch.float64 else torch.float32) + 0.5, seen + 7
        )
    terms = latent.terms(batch, f.requires_grad_(), teacher.to(device))
    strengths = {"pm": 3.0, "attract": 2.0, "repel": 5.0, "sp": 0.1}
    (gradient,) = torch.autograd.grad(sum(strengths[name] * term for name, term in terms.items()), f)
    return terms, gradient


TERMS = """
import sys
import torch
import test_kernels as tests

for module in (tests.latent_module, tests.prototypes):
    module.fits = lambda features: True
terms, gradient = tests.latent_terms("cpu", torch.float32)
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
@pytest.mark.parametrize("kernels", [True, False])
def test_terms_on_features_equal_float64(kind, kernels, monkeypatch):
    calls = []
    monkeypatch.setattr(latent_module, "row_sums", lambda f: calls.append(0) or rows.row_sums(f))
    if not kernels:
        for module in (latent_module, prototypes):
            monkeypatch.setattr(module, "fits", lambda features: False)
    terms, gradient = latent_terms("cuda", kind)
    assert len(calls) == kernels
    wanted, truth = latent_terms("cpu", torch.float64)
    found = {name: float(term.detach()) for name, term in terms.items()}
    assert found == pytest.approx({name: float(term.detach()) for name, term in wanted.items()}, rel=1e-4)
    close(gradient, truth, kind)
