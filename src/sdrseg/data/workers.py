"""Worker processes that end with the process that started them, even if it is killed."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable
from functools import partial

PR_SET_PDEATHSIG = 1


def end_with_parent() -> Callable[[int], None]:
    """For a DataLoader's `worker_init_fn`. A worker that missed its parent's death would wait for work for ever."""
    return partial(_end_with, os.getpid())


def _end_with(parent: int, worker: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before we asked
            os._exit(1)
