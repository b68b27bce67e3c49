"""Does the GPU ever wait? Training with real images against the same step with synthetic ones, and scoring.

    python benchmarks/pipeline.py voc:15-1@disjoint --data PATH
    python benchmarks/pipeline.py shapes:8-2@disjoint --encoder toy16 --batch 4 --iterations 40     # tiny, anywhere

The engine's own loop trains one step (the last by default) on the images of the scenario, decoded once and kept on the
device, and then on complete batches already on the device; the ratio of images per second is what the input costs.
Rates are medians of the log's; --without measures real images again without one of our kernels. Then all test images
are scored twice: the first time is what a run sees, with decoding.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sdrseg import kernels
from sdrseg.config import load_config, parse_settings
from sdrseg.datasets.batches import Batch, eval_batches, train_batches, workers
from sdrseg.datasets.order import TrainOrder
from sdrseg.datasets.pool import ImagePool
from sdrseg.engine.evaluate import confusion
from sdrseg.engine.fit import fit
from sdrseg.engine.job import prepare_job
from sdrseg.engine.watch import NoLog, Watch
from sdrseg.methods import method_layers
from sdrseg.scenario import parse_spec
from sdrseg.terminal import TrainingDisplay, print_json, print_table
from step import Setting, Step

from timing import device_name, kernel_times, versions


class Synthetic:
    """Batches that lie ready, in the place of real ones."""

    def __init__(self, batches: list[Batch], order: TrainOrder):
        self.batches, self.order = batches, order

    def __iter__(self) -> Iterator[Batch]:
        return itertools.islice(itertools.cycle(self.batches), len(self.order))


def rate(step: Step, batches: Any, log_every: int) -> float:
    """Images per second of the engine's loop: the median of what the log says, after the first three lines."""
    entries: list[dict[str, Any]] = []
    total = len(batches.order)
    watch = Watch(1, total, NoLog(), entries.append, log_every, 1e9)
    nothing: Any = lambda *_: None  # noqa: E731
    fit(step.fabric, step.compute, step.optimiser, batches, step.config, watch, nothing, nothing, nothing)
    return statistics.median(entry["images_per_second"] for entry in entries[3:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("spec")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--method", default="sdr")
    parser.add_argument("--encoder", default="resnet101")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--speed", default="auto")
    parser.add_argument("--step", type=int, default=-1)
    parser.add_argument("--workers", type=int, default=-1)
    parser.add_argument("--iterations", type=int, default=300)
    parser.add_argument("--transforms", nargs="+", default=["crop512", "full_image"])
    parser.add_argument("--set", action="append", default=[], help="a setting, as in `sdrseg train`")
    parser.add_argument("--without", nargs="+", default=[], choices=kernels.KERNELS)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    spec = parse_spec(args.spec)
    settings = [f"net.encoder={args.encoder}", "net.weights=none", f"data.workers={args.workers}", *args.set]
    settings += [f"train.batch_size={args.batch}", "train.epochs=100000"]
    config = load_config(
        spec.source, None, parse_settings(settings), method_layers(args.method, "default", spec.task, spec.source)
    )
    job = prepare_job(spec, args.method, config, args.data, Path("unused"), None, TrainingDisplay(1, False))
    chosen = job.scenario.steps[args.step]
    setting = Setting(args.encoder, config.data.crop, args.batch, len(chosen.old), len(chosen.new))
    more = [*args.set, f"data.workers={args.workers}", f"train.batch_size={args.batch}"]
    step = Step(args.method, args.speed, setting, more)
    figures: dict[str, Any] = {"device": device_name(), **versions(), "method": args.method, **asdict(setting)}
    figures |= {"workers": workers(config), "images": len(chosen.train_ids)}

    begin = time.perf_counter()
    cache = job.cache("train", "train", chosen.train_ids)
    figures["cache_seconds"] = time.perf_counter() - begin
    figures["cache"] = "none" if cache is None else str(cache.device)
    per_epoch = len(chosen.train_ids) // args.batch
    epochs = max(1, round(args.iterations / per_epoch))
    limited = load_config(spec.source, None, parse_settings([*settings, f"train.epochs={epochs}"]))
    data: Any = (job.source, chosen.train_ids, chosen.train_table, limited)
    real = train_batches(*data, cache=cache)
    synthetic = Synthetic(step.inputs, TrainOrder(chosen.train_ids, args.batch, epochs, 0))
    every = max(1, len(real.order) // 12)
    for number in range(8):  # choose kernels, compile, record
        step.iterate(number)
    figures["synthetic_images_per_second"] = rate(step, synthetic, every)
    figures["real_images_per_second"] = rate(step, real, every)
    figures["ratio"] = figures["real_images_per_second"] / figures["synthetic_images_per_second"]
    for name in args.without:
        with kernels.disabled(name):
            figures[f"without_{name}_images_per_second"] = rate(step, train_batches(*data, cache=cache), every)
    figures["passes"] = step.compute.how
    if figures["cache"].startswith("cuda"):
        again = train_batches(*data, cache=cache)
        made = iter(again)
        figures["input_kernels_ms"] = sum(kernel_times(lambda _: next(made), min(20, len(again))).values())

    network = step.compute.student.module
    sizes = job.indexes[chosen.test_split].size_by_id
    for transform in args.transforms:
        job.images = ImagePool()
        scored = load_config(spec.source, None, parse_settings([*settings, f"eval.transform={transform}"]))
        for time_number in (1, 2):
            begin = time.perf_counter()
            kept = job.cache("score", chosen.test_split, chosen.test_ids)
            batches = eval_batches(job.source, chosen.test_ids, sizes, chosen.test_table, scored, cache=kept)
            confusion(step.fabric, network, batches, len(chosen.channels))
            figures[f"{transform}_{time_number}_seconds"] = time.perf_counter() - begin
    figures["test_images"] = len(chosen.test_ids)
    if args.json:
        print_json(figures)
    else:
        print_table(args.spec, ["figure", "value"], [list(item) for item in figures.items()])


if __name__ == "__main__":
    main()
