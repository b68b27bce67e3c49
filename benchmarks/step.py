"""Time of one training step (step k ≥ 1): network, losses, backward, update, with fresh random inputs.

    python benchmarks/step.py                                  # the paper's setting on a GPU
    python benchmarks/step.py --encoder toy16 --size 64 --batch 4 --repeat 3     # tiny, anywhere
    python benchmarks/step.py --classes 101+50 --batch 4 16    # as many classes as ADE20K
    python benchmarks/step.py --profile --methods ft sdr       # what the time goes to
    python benchmarks/step.py --batch 8 --methods ft sdr --without rows pixels     # what each kernel of ours gains

The passes are the engine's own. Medians over iterations; on a GPU by CUDA events, in bf16 and channels-last. Ratios are
to the first method of the same setting and the same kind of pass. "kd only" is SDR without its four terms on the
features: the difference is what they cost. "step 0" is the first step, which all methods share: all classes, no
teacher, batch norm with the statistics of the batch. With --without every row is measured again without each of these
kernels ("all": without any): "gain" is the share of the time without it that the kernel saves.
"""

from __future__ import annotations

import argparse
import itertools
import re
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from sdrseg import kernels
from sdrseg.compat import batch_norms
from sdrseg.config import load_config, parse_settings
from sdrseg.datasets.augment import normalise
from sdrseg.datasets.batches import Batch
from sdrseg.engine.launch import make_fabric
from sdrseg.engine.optimiser import make_optimiser
from sdrseg.engine.speed import make_pass
from sdrseg.methods import METHODS, StepInfo, method_layers, own_sections
from sdrseg.network import build_network
from sdrseg.terminal import print_json, print_table

from timing import device_name, kernel_times, versions

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


@dataclass(frozen=True)
class Setting:
    """What the time of a step depends on, beside method and pass. `old` counts the background."""

    encoder: str
    size: int
    batch: int
    old: int
    new: int


class Step:
    """A method in the middle of a step, ready to iterate."""

    def __init__(self, row: str, speed: str, setting: Setting, more: Sequence[str] = ()):
        name, settings, number = ROWS[row]
        settings = [f"net.encoder={setting.encoder}", "net.weights=none", f"run.speed={speed}", *settings, *more]
        settings += ["optim.lr=1e-9", "optim.lr_later=1e-9"]  # with random weights and labels anything else diverges
        layers = method_layers(name, "default", "15-1")
        config = load_config("voc", None, parse_settings(settings), layers, own_sections(name))
        fabric = make_fabric(config)
        torch.manual_seed(0)

        def network(classes: int) -> Any:
            made = build_network(config.net, classes).place_on(fabric.device)
            return calibrated(made, self.inputs[0])

        old, classes = (setting.old if number else 0), setting.old + setting.new
        self.inputs = [random_batch(setting.size, setting.batch, old, classes, fabric.device) for _ in range(4)]
        student = network(old or classes)
        method = METHODS[name](config)
        teacher = network(old).eval().requires_grad_(False) if method.needs_teacher and number else None
        method.begin_step(StepInfo(number, old, classes - old, "disjoint"), student, teacher)
        student.to(memory_format=torch.channels_last).train()
        if number:
            student.freeze_statistics()
        self.fabric, self.config = fabric, config
        wrapped, self.optimiser = fabric.setup(student, make_optimiser(student, method, config.of_step(number)))
        self.compute = make_pass(fabric, method, wrapped, teacher, config, 0, print)

    def iterate(self, number: int) -> None:
        self.compute.zero_gradients()
        self.last = self.compute(self.inputs[number % 4])
        self.optimiser.step()


def measure(row: str, speed: str, setting: Setting, args: argparse.Namespace) -> dict[str, Any]:
    gpu = torch.cuda.is_available()
    if gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    step = Step(row, speed, setting, args.set)
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
    figures: dict[str, Any] = {"ms": ms, "images_per_second": 1000 * setting.batch / ms}
    if gpu:
        figures["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    return figures | ({"kernels": profile(step)} if args.profile else {})


KINDS = {  # in this order: what the name of a kernel has to contain
    "compiled, fused": r"^triton_",
    "copies": r"copy|memcpy|memset|cat_|tensorTransform",
    "depthwise convolutions": r"depthwise|^_weights$|grouped_direct|_dw_|_c1_k1_",
    "our kernels for losses and terms": r"^_(losses|rows|exponentials)",
    "convolutions and products": r"conv|xmma|cutlass|gemm|cudnn|nvjet|dot_kernel|splitK",
    "update": r"multi_tensor",
    "upsampling": r"upsample",
    "batch norm": r"batch_norm|bn_",
    "others": r"",
}


def profile(step: Step, iterations: int = 5) -> dict[str, Any]:
    """Milliseconds of an iteration by kind of kernel, and those kernels that take longest."""
    kinds, kernels = dict.fromkeys(KINDS, 0.0), Counter[str]()
    for name, ms in kernel_times(step.iterate, iterations).items():
        kinds[next(kind for kind, pattern in KINDS.items() if re.search(pattern, name, re.IGNORECASE))] += ms
        kernels[name[:120]] += ms
    return {"kinds": kinds, "longest": dict(kernels.most_common(25))}


def classes(text: str) -> tuple[int, int]:
    old, new = text.split("+")
    return int(old), int(new)


def main() -> None:
    gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--encoder", default="resnet101")
    parser.add_argument("--size", type=int, nargs="+", default=[512])
    parser.add_argument("--batch", type=int, nargs="+", default=[8, 24])
    parser.add_argument(
        "--classes", type=classes, nargs="+", default=[(16, 1)], help="old ones with background, and new ones"
    )
    parser.add_argument("--methods", nargs="+", default=["ft", "mib", "kd only", "sdr"], choices=ROWS)
    parser.add_argument("--speed", nargs="+", default=["plain", "graph", "compile"] if gpu else ["plain"])
    parser.add_argument("--set", action="append", default=[], help="a setting, as in `sdrseg train`")
    parser.add_argument("--warm", type=int, default=8)
    parser.add_argument("--repeat", type=int, default=30)
    parser.add_argument("--profile", action="store_true", help="also the time of each kind of kernel")
    choices = [*kernels.KERNELS, "all"]
    parser.add_argument("--without", nargs="+", default=[], choices=choices, help="measure again without each of these")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for (old, new), size, batch, speed in itertools.product(args.classes, args.size, args.batch, args.speed):
        setting, first = Setting(args.encoder, size, batch, old, new), None
        for row in args.methods:
            figures = measure(row, speed, setting, args)
            first = first or figures
            ratios = {"time_ratio": figures["ms"] / first["ms"]}
            if gpu:
                ratios["memory_ratio"] = figures["peak_gib"] / first["peak_gib"]
            rows.append({"method": row, "speed": speed, **asdict(setting), **figures, **ratios})
            for name in args.without:
                torch.compiler.reset()  # what was compiled with the kernel
                with kernels.disabled(*() if name == "all" else (name,)):
                    plain = measure(row, speed, setting, args)
                torch.compiler.reset()
                rows[-1] |= {f"without_{name}_ms": plain["ms"], f"gain_{name}": 1 - figures["ms"] / plain["ms"]}
    if args.json:
        print_json({"device": device_name(), **versions(), "rows": rows})
        return
    shown = [name for name in rows[0] if name != "kernels"]
    print_table(f"one step, {device_name()}", shown, [[row[name] for name in shown] for row in rows])
    for row in rows if args.profile else []:
        heading = f"{row['method']}, {row['speed']}, batch {row['batch']}: milliseconds by kind of kernel"
        print_table(heading, ["kind", "ms"], [list(item) for item in row["kernels"]["kinds"].items()])


if __name__ == "__main__":
    main()
