"""Worker processes that end exactly when their parent does, even if it is killed."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable
from functools import partial

PR_SET_PDEATHSIG = 1
GRACE = 60
"""How many seconds a worker continues after SIGTERM."""


def end_with_parent() -> Callable[[int], None]:
    """A `worker_init_fn` for DataLoader. Otherwise, a worker whose parent was killed would wait forever."""
    return partial(_end_with, os.getpid())


def _end_with(parent: int, worker: int) -> None:
    # `timeout`, SLURM and others send SIGTERM to a run and its workers. The run then finishes its iteration and saves,
    # for which it needs its workers.
    signal.signal(signal.SIGTERM, lambda *_: signal.alarm(GRACE) if hasattr(signal, "alarm") else sys.exit(1))
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # the parent died before prctl
            os._exit(1)
