"""Several processes: how much faster a training step gets, and how many bytes they exchange in it.

    python benchmarks/scaling.py                    # one and two processes on the CPU, one thread each
    python benchmarks/scaling.py --bytes resnet101  # what the paper's network would exchange; nothing is trained

The batch is the same for any number of processes, which share it. Bytes are what one process hands to all-reduce in an
iteration of a later step: all gradients (by DDP), and the sums of which the terms are made. The second part is counted
in the run, and compared with the formula that `--bytes` uses.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from sdrseg.config import load_config, parse_settings
from sdrseg.methods import METHODS, StepInfo, method_layers
from sdrseg.network import build_network
from sdrseg.terminal import print_json, print_table

FLOAT = 4
SETTING = {"voc": (16, 1), "ade": (101, 50)}


def sums_bytes(classes: int, channels: int) -> int:
    """What the terms of SDR exchange: class sums by label and by pseudo-label, and three means of two numbers."""
    one = 3 * classes + 2 * classes * channels
    return FLOAT * (2 * one + 3 * 2)


def gradient_bytes(network: torch.nn.Module) -> int:
    return FLOAT * sum(p.numel() for p in network.parameters() if p.requires_grad)


def worker(args: argparse.Namespace) -> None:
    """One process of a run: times iterations and counts what is exchanged."""
    from sdrseg.datasets.augment import normalise
    from sdrseg.distributed import Processes
    from sdrseg.engine.launch import make_fabric
    from sdrseg.engine.optimiser import make_optimiser
    from sdrseg.engine.speed import make_pass
    from step import random_batch

    torch.set_num_threads(1)
    old, new = SETTING["voc"]
    settings = [f"net.encoder={args.encoder}", "net.weights=none", "run.speed=plain", "optim.lr_later=1e-9"]
    config = load_config("voc", None, parse_settings(settings), method_layers("sdr", "default", None))
    fabric, processes = make_fabric(config), Processes()
    torch.manual_seed(0)
    student, teacher = build_network(config.net, old), build_network(config.net, old).eval().requires_grad_(False)
    method = METHODS["sdr"](config, processes)
    method.begin_step(StepInfo(1, old, new, "disjoint"), student, teacher)
    batch = random_batch(args.size, args.batch // processes.world, old, old + new, "cpu")
    student.train()(normalise(batch.images))  # sensible statistics
    student.freeze_statistics()
    wrapped, optimiser = fabric.setup(student, make_optimiser(student, method, config.of_step(1)))
    compute = make_pass(fabric, method, wrapped, teacher, config, 0, print)
    sent: list[int] = []
    reduce = dist.all_reduce

    def counted(tensor: torch.Tensor, *more: Any, **named: Any) -> Any:
        sent.append(tensor.numel() * tensor.element_size())
        return reduce(tensor, *more, **named)

    dist.all_reduce = counted  # type: ignore[assignment]
    times = []
    for _ in range(args.repeat + 2):
        sent.clear()
        begin = time.perf_counter()
        compute.zero_gradients()
        compute(batch)
        optimiser.step()
        times.append(time.perf_counter() - begin)
    expected = sums_bytes(old + new, student.feature_channels) if processes.world > 1 else 0
    assert sum(sent) == expected, f"{sum(sent)} bytes were exchanged, not {expected}"
    if processes.rank == 0:
        seconds = statistics.median(times[2:])
        figures = {"processes": processes.world, "ms": 1000 * seconds, "images_per_second": args.batch / seconds}
        figures |= {"gradient_bytes": gradient_bytes(student) if processes.world > 1 else 0, "sums_bytes": sum(sent)}
        Path(args.worker).write_text(json.dumps(figures))


def run(processes: int, args: argparse.Namespace, folder: Path) -> dict[str, float]:
    out = folder / f"{processes}.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}", __file__]
    command += ["--worker", str(out), "--encoder", args.encoder, "--size", str(args.size), "--batch", str(args.batch)]
    subprocess.run([*command, "--repeat", str(args.repeat)], check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    result: dict[str, float] = json.loads(out.read_text())
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--encoder", default="toy16")
    parser.add_argument("--size", type=int, default=128)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--repeat", type=int, default=15)
    parser.add_argument("--bytes", metavar="ENCODER")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if args.worker:
        worker(args)
        return
    rows: list[dict[str, Any]] = []
    if args.bytes:
        for name, (old, new) in SETTING.items():
            config = load_config("voc", None, parse_settings([f"net.encoder={args.bytes}", "net.weights=none"]))
            network = build_network(config.net, old + new)
            sums = sums_bytes(old + new, network.feature_channels)
            gradients = gradient_bytes(network)
            rows.append({"classes": f"{name}: {old} + {new}", "gradients MB": gradients / 1e6, "sums MB": sums / 1e6})
            rows[-1]["share of sums %"] = 100 * sums / (sums + gradients)
    else:
        import tempfile

        with tempfile.TemporaryDirectory() as folder:
            rows = [run(processes, args, Path(folder)) for processes in (1, 2)]
        for row in rows:
            row["times faster"] = row["images_per_second"] / rows[0]["images_per_second"]
    if args.json:
        print_json(rows)
    else:
        print_table(f"{args.bytes or args.encoder}, SDR, a later step", list(rows[0]), [list(r.values()) for r in rows])


if __name__ == "__main__":
    main()
