"""The kernels of sdrseg/kernels against PyTorch's, forward and backward.

    python benchmarks/kernels.py                                   # the paper's maps, on a GPU
    python benchmarks/kernels.py --size 32 --batch 1 --repeat 2    # tiny; without a GPU, only what needs none

On a GPU every way is recorded as a CUDA graph, as in training, and replayed ten times in a round; all ways take turns.
"without" is plain torch, "compiled" torch.compile of the same, both without our kernels. "least_ms" is how long 4.8
TB/s, the memory of an H200 by its data sheet, take to read what goes in, forward and backward, and to write what comes
out.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from sdrseg import kernels
from sdrseg.config import load_config
from sdrseg.distributed import Processes
from sdrseg.kernels.layers import use_fast_layers
from sdrseg.kernels.upsampling import upsample
from sdrseg.losses.cross_entropy import unbiased_cross_entropy_sums
from sdrseg.losses.unbiased import unbiased_sums
from sdrseg.methods import StepInfo, method_layers
from sdrseg.methods.latent import LatentSpace
from sdrseg.terminal import print_json, print_table
from step import classes, random_batch

from timing import device_name, rounds, spread, versions

BYTES_PER_MS = 4.8e9
REPLAYS = 10
Ways = dict[str, Callable[[], Any]]


def logits(images: int, channels: int, size: int, device: torch.device) -> Tensor:
    drawn = torch.randn(images, channels, size, size, device=device)
    return drawn.contiguous(memory_format=torch.channels_last)


def losses(images: int, size: int, old: int, new: int, device: torch.device) -> Iterator[tuple[str, Ways, float]]:
    torch.compiler.reset()  # it keeps only eight versions of a function, and then computes as it stands
    z, t = logits(images, old + new, size, device).requires_grad_(), logits(images, old, size, device)
    labels = torch.randint(0, old + new, (images, size, size), device=device, dtype=torch.uint8)
    keep = torch.rand(images, size, size, device=device) < 0.9

    def cross_entropy() -> Tensor:
        return unbiased_cross_entropy_sums(z, labels, old)[0]

    def both() -> Tensor:
        ce, kd = unbiased_sums(z, labels, old, t, keep)
        return ce[0] + kd[0]

    for name, loss, more in (
        ("cross-entropy", cross_entropy, 0),
        ("cross-entropy and distillation", both, 2 * t.nbytes),
    ):

        def once(loss: Callable[[], Tensor]) -> Any:
            return torch.autograd.grad(loss(), z)

        yield f"{name}, {old} + {new} classes", all_ways(once, loss), (3 * z.nbytes + more) / BYTES_PER_MS


def without_kernels(once: Callable[[], Any]) -> Callable[[], Any]:
    """The same by the plain versions."""

    def plain() -> Any:
        with kernels.disabled():
            return once()

    return plain


def all_ways(once: Callable[..., Any], forward: Callable[..., Any]) -> Ways:
    """`once(forward)` does `forward` and its backward. On a GPU also compiled, and with our kernels."""
    ways: Ways = {"without": without_kernels(partial(once, forward))}
    if torch.cuda.is_available():
        compiled: Any = torch.compile(forward, dynamic=False)
        ways |= {"compiled": without_kernels(partial(once, compiled)), "ours": partial(once, forward)}
    return ways


def terms(images: int, size: int, old: int, new: int, device: torch.device) -> tuple[str, Ways, float]:
    """SDR's four terms on the features."""
    kind = torch.bfloat16 if device.type == "cuda" else torch.float32
    features = logits(images, 2048, size // 16, device).relu().to(kind).requires_grad_()
    batch = random_batch(size, images, old, old + new, device)
    teacher = logits(images, old, size, device)
    space = LatentSpace(load_config("voc", None, None, method_layers("sdr", "default", None)), Processes(alone=True))
    space.begin_step(StepInfo(1, old, new, "disjoint"), 2048, 16, device, nonnegative=True)

    weights = space.weights()

    def weighted() -> Any:
        return sum(weights[name] * term for name, term in space.terms(batch, features, teacher).items())

    def once(loss: Callable[[], Tensor]) -> Any:
        return torch.autograd.grad(loss(), features)

    return f"terms on the features, {old} + {new} classes", all_ways(once, weighted), 3 * features.nbytes / BYTES_PER_MS


def layers(images: int, size: int, device: torch.device) -> Iterator[tuple[str, Ways, float]]:
    def depthwise(channels: int, dilation: int) -> nn.Module:
        return nn.Conv2d(channels, channels, 3, padding=dilation, dilation=dilation, groups=channels, bias=False)

    for name, make, channels, stride, back in (
        ("batch norm, frozen", lambda: nn.BatchNorm2d(256), 256, 4, True),
        ("depthwise convolution, dilation 12", lambda: depthwise(2048, 12), 2048, 16, True),
        ("depthwise convolution, dilation 1, inference", lambda: depthwise(304, 1), 304, 4, False),
    ):
        kind: Any = torch.bfloat16 if device.type == "cuda" else torch.float32
        maps = logits(images, channels, size // stride, device).to(kind).requires_grad_(back)
        upstream = torch.ones_like(maps)
        layer = nn.Sequential(make()).eval().to(device)
        use_fast_layers(layer)

        def once(
            forward: Any, layer: Any = layer, maps: Tensor = maps, up: Tensor = upstream, back: bool = back
        ) -> Any:
            with torch.inference_mode(not back), torch.autocast(device.type, torch.bfloat16, device.type == "cuda"):
                said = forward(maps)
            return torch.autograd.grad(said, [maps, *layer.parameters()], up) if back else said

        yield name, all_ways(once, layer), (5 if back else 2) * maps.nbytes / BYTES_PER_MS


def upsamplings(
    images: int, size: int, classes: Sequence[int], device: torch.device
) -> Iterator[tuple[str, Ways, float]]:
    """Of the decoder's features, and of logits."""
    kind = torch.bfloat16 if device.type == "cuda" else torch.float32
    cases = [("upsampling, 256 channels", 256, 16, True, kind)]
    cases += [(f"upsampling, {n} classes", n, 4, False, torch.float32) for n in classes]
    for name, channels, stride, align, to in cases:
        maps = logits(images, channels, size // stride, device).to(kind).requires_grad_()
        upstream = logits(images, channels, 4 * size // stride, device).to(to)

        def larger(maps: Tensor = maps, up: Tensor = upstream, align: bool = align, to: torch.dtype = to) -> Tensor:
            return upsample(maps, (up.shape[-2], up.shape[-1]), align_corners=align, dtype=to)

        def once(forward: Callable[[], Tensor], maps: Tensor = maps, up: Tensor = upstream) -> Any:
            return torch.autograd.grad(forward(), maps, up)

        yield name, all_ways(once, larger), 2 * (maps.nbytes + upstream.nbytes) / BYTES_PER_MS


def recorded(once: Callable[[], Any]) -> Callable[[int], None]:
    """Many times at once; on a GPU as a graph."""
    if not torch.cuda.is_available():
        return lambda number: once()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            once()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        graph.kept = once()  # type: ignore[attr-defined]

    def replay(number: int) -> None:
        for _ in range(REPLAYS):
            graph.replay()

    return replay


def clock() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--size", type=int, default=512)
    parser.add_argument("--classes", type=classes, nargs="+", default=[(16, 1), (51, 10), (101, 50)])
    parser.add_argument("--repeat", type=int, default=20)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows: list[dict[str, Any]] = []

    def measure(name: str, ways: Ways, least: float) -> None:
        seconds, _ = rounds({way: recorded(once) for way, once in ways.items()}, args.repeat, clock)
        times = 1 if device.type == "cpu" else REPLAYS
        took = {f"{way}_ms": 1000 * spread(each).median / times for way, each in seconds.items()}
        rows.append({"what": name, "batch": args.batch, "size": args.size, "least_ms": least, **took})

    for case in layers(args.batch, args.size, device):
        measure(*case)
    for case in upsamplings(args.batch, args.size, [old + new for old, new in args.classes], device):
        measure(*case)
    for old, new in args.classes:
        for case in losses(args.batch, args.size, old, new, device):
            measure(*case)
        measure(*terms(args.batch, args.size, old, new, device))
    if args.json:
        print_json({"device": device_name(), **versions(), "rows": rows})
        return
    heads = ["what", "least_ms", "without_ms", "compiled_ms", "ours_ms"]
    print_table(f"kernels, {device_name()}", heads, [[row.get(head, "") for head in heads] for row in rows])


if __name__ == "__main__":
    main()
