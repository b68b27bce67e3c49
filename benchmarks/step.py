"""Time of one training step (step k ≥ 1): network, losses, backward, update, with fresh random inputs.

    python benchmarks/step.py                                  # the paper's setting on a GPU
    python benchmarks/step.py --encoder toy16 --size 64 --batch 4 --repeat 3     # tiny, anywhere

The passes are the engine's own. Medians over iterations; on a GPU by CUDA events, in bf16 and channels-last. Ratios are
to the first method with the same batch and the same kind of pass. "kd only" is SDR without its four terms on the
features: the difference is what they cost. "step 0" is the first step, which all methods share: all classes, no
teacher, batch norm with the statistics of the batch.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch

from sdrseg.config import load_config
from sdrseg.data.augment import normalise
from sdrseg.data.batches import Batch
from sdrseg.engine.fit import make_optimiser
from sdrseg.engine.launch import make_fabric
from sdrseg.engine.passes import make_pass
from sdrseg.methods import METHODS, StepInfo, method_layers
from sdrseg.network import batch_norms, build_network
from sdrseg.terminal import print_json, print_table

WITHOUT_LATENT = [f"{name}=0" for name in ("pm.weight", "cl.attract", "cl.repel", "sp.weight")]
ROWS: dict[str, tuple[str, list[str], int]] = {name: (name, [], 1) for name in METHODS}
ROWS |= {"kd only": ("sdr", WITHOUT_LATENT, 1), "step 0": ("ft", [], 0)}


def random_batch(size: int, images: int, n_old: int, classes: int, device: Any) -> Batch:
    """Images of noise; labels in blocks, old classes masked, a tenth of the pixels void."""
    blocks = torch.randint(0, classes, (images, 8, 8), device=device)
    blocks[blocks < n_old] = 0
    labels = blocks.repeat_interleave(size // 8, 1).repeat_interleave(size // 8, 2).to(torch.uint8)
    labels[torch.rand(labels.shape, device=device) < 0.1] = 255
    pixels = torch.randint(0, 256, (images, size, size, 3), dtype=torch.uint8, device=device).permute(0, 3, 1, 2)
    outside = torch.zeros(labels.shape, dtype=torch.bool, device=device)
    return Batch(pixels, labels, outside, tuple(map(str, range(images))))


@torch.no_grad()
def calibrated(network: Any, batch: Batch) -> Any:
    """A random network whose batch norms know what comes: without, values overflow when statistics are frozen."""
    momenta = {norm: norm.momentum for norm in batch_norms(network)}
    for norm in momenta:
        norm.momentum = 1.0
    network.train()(normalise(batch.images))
    for norm, momentum in momenta.items():
        norm.momentum = momentum
    return network


class Step:
    """A method in the middle of a step, ready to iterate."""

    def __init__(self, row: str, speed: str, args: argparse.Namespace, batch_size: int):
        name, settings, number = ROWS[row]
        settings = [f"net.encoder={args.encoder}", "net.weights=none", f"run.speed={speed}", *settings, *args.set]
        settings += ["optim.lr=1e-9", "optim.lr_later=1e-9"]  # with random weights and labels anything else diverges
        config = load_config("voc", None, settings, method_layers(name, "default", "15-1"))
        fabric = make_fabric(config)
        torch.manual_seed(0)

        def network(classes: int) -> Any:
            made = build_network(config.net, classes).to(fabric.device).to(memory_format=torch.channels_last)
            return calibrated(made, self.inputs[0])

        old, classes = (args.old, args.old + args.new) if number else (0, args.old + args.new)
        self.inputs = [random_batch(args.size, batch_size, old, classes, fabric.device) for _ in range(4)]
        student = network(old or classes)
        method = METHODS[name](config)
        teacher = network(old).eval().requires_grad_(False) if method.needs_teacher and number else None
        method.begin_step(StepInfo(number, old, classes - old, "disjoint"), student, teacher)
        student.to(memory_format=torch.channels_last).train()
        if number:
            student.freeze_statistics()
        self.fabric, self.config = fabric, config
        wrapped, self.optimiser = fabric.setup(student, make_optimiser(student, config, number))
        self.compute = make_pass(fabric, method, wrapped, teacher, config, 0, print)

    def iterate(self, number: int) -> None:
        self.compute.forget_gradients()
        self.last = self.compute(self.inputs[number % 4])
        self.optimiser.step()


def measure(row: str, speed: str, args: argparse.Namespace, batch_size: int) -> dict[str, float]:
    gpu = torch.cuda.is_available()
    if gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    step = Step(row, speed, args, batch_size)
    times = []
    for number in range(args.warm + args.repeat):
        if gpu:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            step.iterate(number)
            end.record()
            if number >= args.warm:
                times.append((start, end))
        else:
            begin = time.perf_counter()
            step.iterate(number)
            times.append(1000 * (time.perf_counter() - begin))
    if gpu:
        torch.cuda.synchronize()
        times = [start.elapsed_time(end) for start, end in times]
    if not torch.isfinite(step.last.loss):
        raise SystemExit(f"{row}, {speed}: the loss is not finite, so the times mean nothing")
    ms = statistics.median(times[-args.repeat :])
    memory = torch.cuda.max_memory_allocated() / 2**30 if gpu else float("nan")
    return {"ms": ms, "images_per_second": 1000 * batch_size / ms, "peak_gib": memory}


def main() -> None:
    gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--encoder", default="resnet101")
    parser.add_argument("--size", type=int, default=512)
    parser.add_argument("--batch", type=int, nargs="+", default=[8, 24])
    parser.add_argument("--old", type=int, default=16, help="old classes, background included")
    parser.add_argument("--new", type=int, default=1)
    parser.add_argument("--methods", nargs="+", default=["ft", "mib", "kd only", "sdr"], choices=ROWS)
    parser.add_argument(
        "--speed", nargs="+", default=["plain", "graph", "compile"] if torch.cuda.is_available() else ["plain"]
    )
    parser.add_argument("--set", action="append", default=[], help="a setting, as in `sdrseg train`")
    parser.add_argument("--warm", type=int, default=8)
    parser.add_argument("--repeat", type=int, default=30)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    rows = []
    for batch_size in args.batch:
        for speed in args.speed:
            base = None
            for row in args.methods:
                result = measure(row, speed, args, batch_size)
                base = base or result
                ratios = {
                    "time_ratio": result["ms"] / base["ms"],
                    "memory_ratio": result["peak_gib"] / base["peak_gib"],
                }
                rows.append({"method": row, "speed": speed, "batch": batch_size} | result | ratios)
    if args.json:
        print_json(rows)
    else:
        device = torch.cuda.get_device_name() if gpu else "CPU"
        title = f"{args.encoder}, {args.size}×{args.size}, {args.old}+{args.new} classes, {device}"
        print_table(title, list(rows[0]), [list(row.values()) for row in rows])


if __name__ == "__main__":
    main()
