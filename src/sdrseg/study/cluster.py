"""Several workers for one study, started by submitit: processes on this machine, or an array of SLURM jobs.

Every worker goes through the whole queue. A lock prevents two workers from writing to the same run; if a worker ends,
for any reason, another one resumes its run.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from sdrseg.errors import UsageError, first_line, quantity
from sdrseg.study.queue import run_queue

WAIT = 5.0  # seconds until a worker checks again whether the runs of other workers are finished


@dataclass
class Worker:
    """One job: it reads a study from a file or a table and runs it."""

    read: Callable[..., Any]
    arguments: Mapping[str, Any]
    out: Path
    chosen: tuple[str, ...]
    options: Mapping[str, Any]
    number: int = 0
    workers: int = 1
    wait: float = WAIT

    def __call__(self) -> dict[str, Any]:
        """Go through the queue until every run is finished or has failed."""
        experiments = [e for e in self.read(**self.arguments).experiments if e.folder in self.chosen]
        first = len(experiments) * self.number // self.workers  # workers start at different experiments
        queue = experiments[first:] + experiments[:first]
        minutes = self.options.get("minutes")
        stop_at = None if minutes is None else time.monotonic() + 60 * minutes
        failed: dict[str, str] = {}
        finished: list[str] = []
        left: list[str] = []
        while queue:
            remaining = {} if stop_at is None else {"minutes": (stop_at - time.monotonic()) / 60}
            outcome = run_queue(queue, self.out, **{**self.options, **remaining})
            failed |= outcome.failed
            finished += outcome.finished
            if left := outcome.left:
                break  # out of time
            queue = [e for e in queue if e.label in outcome.elsewhere]
            if queue:
                time.sleep(self.wait)
        return {"finished": finished, "failed": failed, "left": left}

    def checkpoint(self) -> Any:
        """Called by submitit when a job is about to be stopped: submit the same job again."""
        import submitit

        return submitit.helpers.DelayedSubmission(self)


@dataclass(frozen=True)
class Machines:
    """Where workers run, how many, GPUs and minutes per worker, and further options for SLURM."""

    on: str
    array: int = 1
    gpus: int = 0
    minutes: int = 24 * 60
    slurm: Mapping[str, str] = field(default_factory=dict)


def submit(workers: Sequence[Worker], machines: Machines, folder: Path) -> list[Any]:
    """Start the workers; returns submitit's jobs."""
    if machines.on not in ("slurm", "local"):
        raise UsageError(f"--on {machines.on}: use slurm or local.")
    submitit = _submitit()
    gpus = machines.gpus
    if machines.on == "local":
        jobs, found = [], _gpus(len(workers) * gpus)
        for worker in workers:
            executor = submitit.LocalExecutor(folder=folder)
            own_gpus = found[worker.number * gpus : (worker.number + 1) * gpus]
            executor.update_parameters(timeout_min=machines.minutes, gpus_per_node=gpus, visible_gpus=own_gpus)
            jobs.append(executor.submit(worker))
        return jobs
    if shutil.which("sbatch") is None:
        raise UsageError(
            "--on slurm: sbatch not found. Run this command on a machine of the cluster, or use --on local."
        )
    executor = submitit.AutoExecutor(folder=folder, cluster="slurm")
    executor.update_parameters(
        name="sdrseg",
        timeout_min=machines.minutes,
        gpus_per_node=gpus,
        slurm_array_parallelism=len(workers),
        slurm_additional_parameters=dict(machines.slurm),
    )
    with executor.batch():  # one array
        return [executor.submit(worker) for worker in workers]


def make_workers(count: int, **options: Any) -> list[Worker]:
    if count < 1:
        raise UsageError(f"--array {count}: use at least 1 worker.")
    return [Worker(**options, number=number, workers=count) for number in range(count)]


def gather(jobs: Sequence[Any]) -> dict[str, Any]:
    """Wait for the workers; returns the finished, failed and remaining experiments, and the lost workers."""
    result: dict[str, Any] = {"finished": [], "failed": {}, "left": [], "lost": []}
    for job in jobs:
        try:
            one = job.result()
        except Exception as error:  # killed, or its machine is gone
            result["lost"].append(f"worker {job.job_id}: {first_line(error)}")
            continue
        result["finished"] += one["finished"]
        result["failed"] |= one["failed"]
        result["left"] += [label for label in one["left"] if label not in result["left"]]
    result["left"] = [label for label in result["left"] if label not in result["finished"]]
    return result


def _gpus(wanted: int) -> list[int]:
    """The numbers of the first `wanted` GPUs of this machine. Without one, a worker would train on the CPU."""
    count = torch.cuda.device_count()
    if wanted > count:
        raise UsageError(
            f"The workers need {quantity(wanted, 'GPU')} (--array times --gpus); this machine has {count}."
        )
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = list(map(str, range(count))) if visible is None else visible.split(",")
    if not all(name.strip().isdecimal() for name in names[:wanted]):
        raise UsageError(f"CUDA_VISIBLE_DEVICES={visible}: --on local needs the numbers of the GPUs, such as 0,1.")
    return [int(name) for name in names[:wanted]]


def _submitit() -> Any:
    try:
        import submitit
    except ImportError as error:
        raise UsageError("--on needs submitit: pip install 'sdrseg[cluster]'.") from error
    return submitit
