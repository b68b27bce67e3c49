"""What all kernels share: they compile for GPUs, they can be switched off, compiled code knows where they run."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from interpreted import NEEDS_TRITON
from sdrseg import kernels
from sdrseg.kernels import pixels

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
        shares = triton_pixels.block_shape(channels)
        types = ["*fp32", "*fp32", "*u8", "*u8", "*fp32", "*fp32", *["i32"] * 4]
        for distil in (False, True):
            ptx = compile(triton_pixels.losses, types, triton_pixels.WARPS, BACKWARD=back, DISTIL=distil, **shares)
            assert "fma.rn" in ptx
for kind in ("*bf16", "*fp32", "*fp16"):
    sizes = [*["i32"] * 5, *["fp32"] * 3]
    part = {"SPAN_Y": 9, "SPAN_X": 10, "BLOCK": triton_upsampling.BLOCK_BACK}
    for large in {kind, "*fp32"}:
        compile(triton_upsampling.kernel, [kind, large, *sizes], triton_upsampling.WARPS, BLOCK=triton_upsampling.BLOCK)
        types = [large, kind, *sizes, "fp32", "fp32"]
        compile(triton_upsampling.kernel_backward, types, triton_upsampling.WARPS_BACK, **part)
types = ["*i32", "*i64", "*i32", "*i32", "*u8", "*u8", "*u8", *["i32"] * 5]
compile(triton_views.views, types, VOID=255, BLOCK=triton_views.BLOCK)
for kind in ("*bf16", "*fp32"):
    shares = {"ROWS": triton_rows.ROWS, "LANES": triton_rows.LANES}
    one, sizes = ["*fp32"], ["i32", "i32"]
    compile(triton_rows.rows, [kind, *one * 4, *sizes], triton_rows.WARPS, **shares)
    compile(triton_rows.rows_backward, [kind, *one * 4, kind, *sizes], triton_rows.WARPS, **shares)
    compile(triton_rows.exponentials, [kind, *one * 3, *sizes], triton_rows.WARPS, **shares)
    compile(triton_rows.exponentials_backward, [kind, *one * 2, kind, *sizes], triton_rows.WARPS, **shares)
"""


@NEEDS_TRITON
def test_the_kernels_compile_for_gpus(tmp_path):
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path)}
    subprocess.run([sys.executable, "-W", "error", "-c", COMPILED], env=environment, check=True)


def test_compiled_code_knows_where_kernels_run(monkeypatch):
    """What was found before it was compiled; afterwards, too."""
    device = torch.device("cpu")
    key = ("pixels", device)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def asked(x):
        return x + 1 if pixels.runs_on(x.device) else x

    for found in (None, True, False):
        monkeypatch.setattr(kernels, "_found", {} if found is None else {key: found})
        assert asked(torch.zeros(())) == bool(found)
    monkeypatch.setattr(kernels, "_found", {})
    assert not pixels.runs_on(device) and key in kernels._found


def test_kernels_can_be_switched_off(monkeypatch):
    """Some or all, for a while; what was found before holds afterwards."""
    device = torch.device("cpu")
    monkeypatch.setattr(kernels, "_found", {("pixels", device): True})
    assert pixels.runs_on(device) and kernels.enabled("norm")
    with kernels.disabled("norm"):
        assert pixels.runs_on(device) and not kernels.enabled("norm")
        with kernels.disabled():
            assert not any(map(kernels.enabled, kernels.KERNELS)) and not pixels.runs_on(device)
        assert pixels.runs_on(device) and not kernels.enabled("norm")
    assert all(map(kernels.enabled, kernels.KERNELS))
    with pytest.raises(ValueError, match="no such kernels: views2; there are norm,"), kernels.disabled("views2"):
        pass


@pytest.mark.parametrize(("value", "enabled"), [(None, True), ("1", True), ("0", False)])
def test_the_environment_switches_all_kernels_off(value, enabled):
    environment = {name: text for name, text in os.environ.items() if name != "SDRSEG_KERNELS"}
    if value is not None:
        environment["SDRSEG_KERNELS"] = value
    program = "from sdrseg import kernels; print({kernels.enabled(name) for name in kernels.KERNELS})"
    said = subprocess.run([sys.executable, "-c", program], env=environment, check=True, capture_output=True, text=True)
    assert said.stdout.strip() == str({enabled})
