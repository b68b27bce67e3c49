"""Time of one training step (step k ≥ 1): network, losses, backward, update, with fresh random inputs.

    python benchmarks/step.py                                  # the paper's setting on a GPU
    python benchmarks/step.py --encoder toy16 --size 64 --batch 4 --repeat 3     # tiny, anywhere

Medians over iterations; on a GPU by CUDA events, in bf16 and channels-last. The ratio is to fine-tuning with the same
batch.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch

from sdrseg.config import load_config
from sdrseg.data.augment import normalise
from sdrseg.data.batches import Batch
from sdrseg.engine.fit import make_optimiser
from sdrseg.methods import METHODS, StepInfo, method_layers
from sdrseg.network import build_network
from sdrseg.terminal import print_json, print_table


def random_batch(size: int, images: int, n_old: int, classes: int, device: str) -> Batch:
    """Images of noise; labels in blocks, old classes masked, a tenth of the pixels void."""
    blocks = torch.randint(0, classes, (images, 8, 8), device=device)
    blocks[blocks < n_old] = 0
    labels = blocks.repeat_interleave(size // 8, 1).repeat_interleave(size // 8, 2).to(torch.uint8)
    labels[torch.rand(labels.shape, device=device) < 0.1] = 255
    pixels = torch.randint(0, 256, (images, size, size, 3), dtype=torch.uint8, device=device).permute(0, 3, 1, 2)
    outside = torch.zeros(labels.shape, dtype=torch.bool, device=device)
    return Batch(pixels, labels, outside, tuple(map(str, range(images))))


def measure(name: str, args: argparse.Namespace, batch_size: int, device: str) -> dict[str, float]:
    settings = [f"net.encoder={args.encoder}", "net.weights=none"]
    config = load_config("voc", None, settings, method_layers(name, "default", "15-1"))
    torch.manual_seed(0)
    student = build_network(config.net, args.old).to(device).to(memory_format=torch.channels_last)
    method = METHODS[name](config)
    teacher = None
    if method.needs_teacher:
        teacher = build_network(config.net, args.old).to(device).to(memory_format=torch.channels_last)
        teacher.eval().requires_grad_(False)
    method.begin_step(StepInfo(1, args.old, args.new, "disjoint"), student, teacher)
    student.to(memory_format=torch.channels_last).train()
    student.freeze_statistics()
    optimiser = make_optimiser(student, config, 1)
    weights = method.weights()
    inputs = [random_batch(args.size, batch_size, args.old, args.old + args.new, device) for _ in range(4)]
    gpu = device == "cuda"
    if gpu:
        torch.cuda.reset_peak_memory_stats()

    def iteration(batch: Batch) -> None:
        optimiser.zero_grad(set_to_none=True)
        images = normalise(batch.images)
        with torch.autocast(device, dtype=torch.bfloat16, enabled=gpu):
            output = student(images)
            with torch.no_grad():
                seen = None if teacher is None else teacher(images)
        terms = method.terms(batch, output, seen)
        sum(weights.get(n, 1.0) * term for n, term in terms.items()).backward()
        optimiser.step()

    times = []
    for number in range(args.warm + args.repeat):
        if gpu:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            iteration(inputs[number % 4])
            end.record()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(end))
        else:
            begin = time.perf_counter()
            iteration(inputs[number % 4])
            times.append(1000 * (time.perf_counter() - begin))
    ms = statistics.median(times[args.warm :])
    memory = torch.cuda.max_memory_allocated() / 2**30 if gpu else float("nan")
    return {"ms": ms, "images_per_second": 1000 * batch_size / ms, "peak_gib": memory}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--encoder", default="resnet101")
    parser.add_argument("--size", type=int, default=512)
    parser.add_argument("--batch", type=int, nargs="+", default=[8, 24])
    parser.add_argument("--old", type=int, default=16, help="old classes, background included")
    parser.add_argument("--new", type=int, default=1)
    parser.add_argument("--methods", nargs="+", default=["ft", "mib", "sdr"])
    parser.add_argument("--warm", type=int, default=8)
    parser.add_argument("--repeat", type=int, default=30)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows = []
    for batch_size in args.batch:
        base = None
        for name in args.methods:
            result = measure(name, args, batch_size, device)
            base = base or result
            ratios = {"time_ratio": result["ms"] / base["ms"], "memory_ratio": result["peak_gib"] / base["peak_gib"]}
            rows.append({"method": name, "batch": batch_size} | result | ratios)
    if args.json:
        print_json(rows)
    else:
        title = f"{args.encoder}, {args.size}×{args.size}, {args.old}+{args.new} classes, {device}"
        print_table(title, list(rows[0]), [list(row.values()) for row in rows])


if __name__ == "__main__":
    main()
