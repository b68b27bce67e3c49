"""train.batch_size = auto: a batch size for the number of images, the device and its memory."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator

import torch
from torch.nn import functional

from sdrseg.config import Config, saved_config
from sdrseg.config.sections import AUTO
from sdrseg.datasets.augment import normalise
from sdrseg.datasets.cache import free_memory
from sdrseg.engine.job import Job
from sdrseg.errors import quantity
from sdrseg.network import build_network

LARGEST = 16
"""The learning rates are for batches of 8; benchmarks/stability.py tries 2 to 16."""
BATCHES = 8
"""The minimum number of batches in an epoch of the smallest step, if a smaller batch can give it."""
CPU_PIXELS = 8 * 256**2
"""The largest batch on a CPU, where larger ones are hardly faster: fixed, so that every machine chooses the same."""
MEMORY = 0.4
"""Share of a GPU's free memory for the networks; the rest is for losses and decoded images (at most half of it)."""


def choose_batch_size(job: Job) -> list[str]:
    """Set the batch size in the configuration of a job; returns notes.

    An existing run keeps its batch size. All processes get the same.
    """
    saved = _saved(job)
    if saved is not None:
        job.config = job.config.changed({"train.batch_size": saved})
        return []
    steps = [step for step in job.scenario if job.config.of_step(step.number).train.batch_size == AUTO]
    images = min(len(step.train_ids) for step in steps)
    unit = job.processes.world * job.config.run.accumulate
    size, why = suitable(images, unit, _limit(job, unit))
    job.config = job.config.changed({"train.batch_size": size})
    return [f"batch size {size}, limited by {why}" if why else f"batch size {size} (the largest that auto uses)"]


def suitable(images: int, unit: int, fits: Callable[[int], str]) -> tuple[int, str]:
    """The largest batch size that leaves enough batches in an epoch and that fits, and what limits it, if anything.

    `unit`: a batch is a multiple of twice this. `fits`: "" or what a batch of this size is too large for.
    """
    why = ""
    for size in sizes(unit):
        if images // size < BATCHES:
            why = f"the number of images ({quantity(images, 'image')} in the smallest step)"
        elif reason := fits(size):
            why = reason
        else:
            return size, why
    return size, why


def sizes(unit: int) -> Iterator[int]:
    """Batch sizes to choose from, from the largest; the last is the smallest possible."""
    yield from (unit * n for n in (16, 8, 4) if unit * n <= LARGEST)
    yield 2 * unit


def _saved(job: Job) -> int | None:
    file = job.folder.path / "config.json"
    if not file.exists():
        return None
    known = job.folder.read_json("config.json")
    if not (isinstance(known, dict) and "config" in known):
        return None  # opening the folder says what is wrong with it
    return saved_config(known["config"], str(file)).train.batch_size


def _limit(job: Job, unit: int) -> Callable[[int], str]:
    device, config = job.fabric.device, job.config

    def on_cpu(size: int) -> str:
        return f"the crop ({config.data.crop}) on a CPU" if size * config.data.crop**2 > CPU_PIXELS else ""

    def on_gpu(size: int) -> str:
        missing = job.processes.any(not _fits(job, config, size // unit))
        return "the memory of the GPU" if missing else ""

    return on_gpu if device.type == "cuda" else on_cpu


def _fits(job: Job, config: Config, images: int) -> bool:
    """Whether a batch of this size, with student and teacher, fits in a share of the free memory; found by trying."""
    device = job.fabric.device
    limit = MEMORY * free_memory(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    try:
        _try(job, config, images)
        return torch.cuda.max_memory_allocated(device) - before <= limit
    except torch.OutOfMemoryError:
        return False
    finally:
        gc.collect()
        torch.cuda.empty_cache()


def _try(job: Job, config: Config, images: int) -> None:
    """One pass forward and backward of the last step, with cross-entropy in place of its losses."""
    classes, side, device = len(job.scenario[-1].channels), config.data.crop, job.fabric.device
    student, teacher = (build_network(config.net, classes) for _ in range(2))
    for network in (student, teacher):
        network.place_on(device)
    shape = (images, 3, side, side)
    pixels = normalise(torch.zeros(shape, dtype=torch.uint8, device=device))
    labels = torch.zeros((images, side, side), dtype=torch.int64, device=device)
    with job.fabric.autocast():
        with torch.no_grad():
            teacher.eval()(pixels)
        logits = student.train()(pixels).logits
    job.fabric.backward(functional.cross_entropy(logits.float(), labels))
