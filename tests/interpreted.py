"""What tests of kernels share: Triton's interpreter in place of a GPU, and how close is close."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import version
from importlib.util import find_spec

import numpy as np
import pytest
import torch

GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
NEEDS_TRITON = pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")


def interpret(program: str, *words: str) -> None:
    """Run a program with Triton's interpreter in place of a GPU; it may import tests."""
    environment = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    # where a kernel does not run, an error says why; otherwise its plain version would hide that
    strict = "import warnings\nwarnings.filterwarnings('error', '.* run without our kernel')"
    program = f"{strict}\nfrom sdrseg import kernels\nkernels.DEVICES.add('cpu')\n{program}"
    command = [sys.executable, "-W", "ignore", "-c", program, *words]
    done = subprocess.run(command, env=environment, stderr=subprocess.PIPE, text=True)
    if "only 0-dimensional arrays can be converted" in done.stderr:
        pytest.skip(f"the interpreter of Triton {version('triton')} cannot loop with NumPy {np.__version__}")
    assert done.returncode == 0, done.stderr


def close(found: torch.Tensor, truth: torch.Tensor, kind: torch.dtype) -> None:
    far = float((found.double().cpu() - truth).norm() / truth.norm().clamp_min(1e-2))
    assert far < TOLERANCE[kind], far
