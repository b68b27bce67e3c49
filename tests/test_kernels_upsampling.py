"""Upsampling, against sums of shares and against the same arithmetic in float64."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from interpreted import GPU, NEEDS_TRITON, close, interpret
from sdrseg.kernels import upsampling


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
from sdrseg.kernels import triton_upsampling, upsampling

calls, launch = [], triton_upsampling.launch
upsampling.upsample(torch.zeros(1, 3, 2, 2), (4, 4))  # tried out
triton_upsampling.launch = lambda *given, **more: calls.append(0) or launch(*given, **more)
for case in sys.argv[1:]:
    given = np.load(case)
    maps = torch.from_numpy(given["maps"]).permute(0, 3, 1, 2).requires_grad_()
    gradient = torch.from_numpy(given["gradient"]).permute(0, 3, 1, 2)
    said = upsampling.upsample(maps, tuple(gradient.shape[-2:]), align_corners=bool(given["align"]))
    assert said.is_contiguous(memory_format=torch.channels_last)
    (back,) = torch.autograd.grad(said, maps, gradient)
    assert back.is_contiguous(memory_format=torch.channels_last)
    np.savez(case + ".said.npz", said=said.detach().permute(0, 2, 3, 1), back=back.permute(0, 2, 3, 1))
assert len(calls) == 2 * len(sys.argv[1:])  # forward and backward
half = maps.detach().half().requires_grad_()
assert upsampling.upsample(half, (8, 8)).dtype == torch.float32
assert upsampling.upsample(half, (8, 8), dtype=torch.float16).dtype == torch.float16
(back,) = torch.autograd.grad(upsampling.upsample(half, (8, 8)).sum(), half)
assert back.dtype == torch.float16
assert abs(back.double().sum() / (8 * 8 * half[:, :, 0, 0].numel()) - 1) < 1e-3
# What a compiler is told about the operation is true, and so is its gradient.
torch.library.opcheck(upsampling.upsampled, (maps.detach().clone().requires_grad_(), 4, 6, False, torch.float32))
torch.library.opcheck(upsampling.upsampled_backward, (gradient[:, :, :2, :3], 2, 2, False, torch.float16))
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
    assert upsampling._fits(given, shape[-2:], size)
    said = upsampling.upsample(given, size, align_corners=align)
    assert said.dtype == torch.float32 and said.is_contiguous(memory_format=torch.channels_last)
    close(said.detach(), truth.detach(), torch.float32)
    back = [torch.autograd.grad(said, given, gradient.cuda(), retain_graph=True)[0] for _ in range(5)]
    assert all(torch.equal(back[0], other) for other in back)
    close(back[0], torch.autograd.grad(truth, wanted, gradient.double(), retain_graph=True)[0], kind)
    narrow = upsampling.upsample(given, size, align_corners=align, dtype=kind)
    assert narrow.dtype == kind
    close(narrow.detach(), truth.detach(), kind)
    close(
        torch.autograd.grad(narrow, given, gradient.cuda().to(kind))[0],
        torch.autograd.grad(truth, wanted, gradient.to(kind).double())[0],
        kind,
    )


def test_what_upsampling_has_kernels_for(monkeypatch):
    maps = torch.zeros(1, 3, 4, 4)
    assert not upsampling._fits(maps, (4, 4), (16, 16))  # not on a GPU
    monkeypatch.setattr(upsampling, "runs", lambda *given: True)

    def asked(small, large, kind=torch.bfloat16, numbers=1):
        given = SimpleNamespace(device=torch.device("cuda"), dtype=kind, numel=lambda: numbers)
        return upsampling._fits(given, small, large)

    assert asked((4, 5), (128, 5))
    for small, large in (((1, 4), (4, 16)), ((4, 4), (3, 16)), ((4, 4), (16, 129))):
        assert not asked(small, large)
    assert not asked((4, 4), (16, 16), torch.float64)
    assert not asked((4, 4), (16, 16), numbers=0)


def test_the_gradient_of_the_gradient_of_upsampling():
    """A method of somebody's own may ask for it."""
    maps = torch.randn(1, 2, 3, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda maps: upsampling.upsampled(maps, 7, 9, False, torch.float64), maps)
