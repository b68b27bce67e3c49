"""Worker processes that end with the process that started them: not later, even if it is killed, and not before."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable
from functools import partial

PR_SET_PDEATHSIG = 1
GRACE = 60
"""Seconds that a worker continues after SIGTERM."""


def end_with_parent() -> Callable[[int], None]:
    """For a DataLoader's `worker_init_fn`. A worker that missed its parent's death would wait for work for ever."""
    return partial(_end_with, os.getpid())


def _end_with(parent: int, worker: int) -> None:
    # `timeout`, SLURM and others send SIGTERM to a run and its workers alike. The run then finishes its iteration and
    # saves; without its workers it could not.
    signal.signal(signal.SIGTERM, lambda *_: signal.alarm(GRACE) if hasattr(signal, "alarm") else sys.exit(1))
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before we asked
            os._exit(1)
