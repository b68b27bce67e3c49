"""Devices of a run (CPU, one or several GPUs, several machines), and interruption by signals."""

from __future__ import annotations

import atexit
import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch

from sdrseg.config import Config
from sdrseg.distributed import Processes
from sdrseg.errors import SdrsegError
from sdrseg.threads import adapt

if TYPE_CHECKING:
    from lightning.fabric import Fabric
    from lightning.fabric.plugins import MixedPrecision


def best_device() -> torch.device:
    """A GPU of NVIDIA or Apple if there is one, otherwise the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu")


def make_fabric(config: Config) -> Fabric:
    """Fabric for this process. Under torchrun or SLURM it joins the others; alone it takes all GPUs, or the CPU."""
    from lightning.fabric import Fabric

    for part in ("fabric", "pytorch"):  # hints about settings that we chose
        logging.getLogger(f"lightning.{part}").setLevel(logging.WARNING)
    torch.backends.cudnn.deterministic = True  # bit-identical results, and no slower
    accelerator = best_device().type
    gpu = accelerator == "cuda"
    devices, nodes = _devices_and_nodes(torch.cuda.device_count() if gpu else 1)
    many = devices * nodes > 1
    precision = config.run.precision
    bf16 = precision == "bf16" or (precision == "auto" and gpu and torch.cuda.is_bf16_supported())
    fabric = Fabric(
        accelerator=accelerator,
        devices=devices,
        num_nodes=nodes,
        strategy="ddp" if many else "auto",
        plugins=_half(accelerator) if bf16 else None,
    )
    fabric.launch()
    adapt(at_once=True)
    if many and not gpu:
        atexit.register(_leave)  # for GPUs Fabric does that
    return fabric


LARGE = 20_000_000
"""Parameters of an encoder that is slow on a CPU: ResNet-18 has 11 million, ResNet-50 24, ResNet-101 43."""


def cpu_warning(device: torch.device, encoder: str, parameters: int) -> str:
    """A warning before a large encoder is trained on a CPU, or ""."""
    if device.type != "cpu" or parameters < LARGE:
        return ""
    return f"warning: {encoder} is slow on a CPU; try --encoder resnet18"


def _leave() -> None:
    """Disconnect from the other processes: threads that still listen to them could end the program with an error."""
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def _devices_and_nodes(local: int) -> tuple[int, int]:
    """The number of processes per machine and of machines; `local`: the devices of this one."""
    if "LOCAL_WORLD_SIZE" in os.environ:  # torchrun
        devices = int(os.environ["LOCAL_WORLD_SIZE"])
        return devices, int(os.environ["WORLD_SIZE"]) // devices
    if int(os.environ.get("SLURM_NTASKS", "1")) > 1:
        nodes = int(os.environ["SLURM_NNODES"])
        return int(os.environ["SLURM_NTASKS"]) // nodes, nodes
    # The others are started with the same command, which a notebook or a prompt does not have.
    return (1 if hasattr(sys, "ps1") else local), 1


def _half(accelerator: str) -> MixedPrecision:
    """bf16 by autocast. Outputs of the network stay in bf16; the losses convert what they need to float32."""
    from lightning.fabric.plugins import MixedPrecision

    class Half(MixedPrecision):
        def convert_output(self, data: Any) -> Any:
            return data

    return Half("bf16-mixed", accelerator)


class InterruptedRunError(SdrsegError):
    """A signal stopped the run; its state is saved. The exit code is that of shells for the signal."""

    prefix = ""

    def __init__(self, number: int) -> None:
        super().__init__("Stopped and saved. Run the same command again to resume.")
        self.exit_code = 128 + number


class Interruption:
    """Ctrl-C, SIGTERM, a time limit: finish the iteration, save, and say how to resume. A second Ctrl-C stops at once;
    a second SIGTERM does not, because senders (SLURM, `timeout`, a shell to its whole group) often send more.

    `stop_at`: the limit, by `time.monotonic()`. A run in a queue shares the queue's signals, so a signal that comes
    too late for the run stops the queue.
    """

    def __init__(self, processes: Processes | None = None) -> None:
        """`processes`: those of a run; a queue begins before its processes know each other."""
        self.save: Callable[[], None] | None = None
        self.stop_at: float | None = None
        self._processes = processes
        self._signals: set[int] = set()  # received so far
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interruption:
        try:
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = before = signal.signal(number, self._request)
                if isinstance(outer := getattr(before, "__self__", None), Interruption):
                    self._signals = outer._signals
        except ValueError:
            pass  # not in the main thread: the caller handles signals
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _request(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and number in self._signals:
            raise KeyboardInterrupt
        self._signals.add(number)

    def check(self, together: bool) -> None:
        """Called after every iteration; stops if any process received a signal. All processes must stop at the same
        iteration, so they communicate in those that are logged (`together`)."""
        late = self.stop_at is not None and time.monotonic() > self.stop_at
        self._stop(late or bool(self._signals), together)

    def check_signals(self) -> None:
        """Called by all processes between training and scoring, and between the runs of a queue."""
        self._stop(bool(self._signals), together=True)

    def _stop(self, asked: bool, together: bool) -> None:
        processes = self._processes or Processes()
        if processes.world > 1:
            asked = together and processes.any(asked)
        if asked:
            if self.save is not None:
                self.save()
            raise InterruptedRunError(min(self._signals, default=signal.SIGTERM))  # in another process, or out of time
