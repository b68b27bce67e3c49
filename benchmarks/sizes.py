"""The cost of images of a new size, by kind of layer: kernels are chosen, and some are compiled.

    python benchmarks/sizes.py                                            # a GPU
    python benchmarks/sizes.py --encoder toy16 --sizes 2 --batch 1        # tiny, anywhere

Full images are scored in batches of one size, and a data set has many sizes. Prints the host's milliseconds until a
layer has issued its work, for each new size, and those of whole batches, the first and the second time.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from sdrseg import kernels
from sdrseg.config import load_config, parse_settings
from sdrseg.datasets.augment import normalise
from sdrseg.engine.launch import make_fabric
from sdrseg.network import build_network
from sdrseg.terminal import print_json, print_table

from timing import device_name, versions


def kind(layer: nn.Module) -> str:
    if not isinstance(layer, nn.Conv2d):
        return type(layer).__name__
    square = "×".join(map(str, layer.kernel_size))
    how = "" if layer.groups == 1 else "depthwise, " + ("dilated, " if layer.dilation[0] > 1 else "not dilated, ")
    return f"convolution, {how}{square}"


class Stopwatch:
    """Milliseconds of the host by kind of layer."""

    def __init__(self, network: nn.Module):
        self.ms: Counter[str] = Counter()
        for layer in network.modules():
            if not list(layer.children()):
                layer.register_forward_pre_hook(self._begin)
                layer.register_forward_hook(self._end)

    def _begin(self, layer: nn.Module, given: Any) -> None:
        self._began = time.perf_counter()

    def _end(self, layer: nn.Module, given: Any, said: Any) -> None:
        self.ms[kind(layer)] += 1000 * (time.perf_counter() - self._began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--encoder", default="resnet101")
    parser.add_argument("--sizes", type=int, default=10, choices=range(1, 31), metavar="1..30")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--without", action="store_true", help="depthwise convolutions without our kernel")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    config = load_config("voc", None, parse_settings([f"net.encoder={args.encoder}", "net.weights=none"]))
    fabric = make_fabric(config)
    network = build_network(config.net, 21).place_on(fabric.device).eval()
    stopwatch = Stopwatch(network)
    heights = [512 - 16 * number for number in range(args.sizes + 1)]  # others would be padded to these

    @torch.inference_mode()
    def batch(height: int) -> float:
        images = torch.randint(0, 256, (args.batch, height, 500, 3), dtype=torch.uint8).permute(0, 3, 1, 2)
        images = images.to(fabric.device)
        begin = time.perf_counter()
        without = kernels.disabled("depthwise") if args.without else nullcontext()
        with fabric.autocast(), without:
            network(normalise(images))
        if fabric.device.type == "cuda":
            torch.cuda.synchronize()
        return 1000 * (time.perf_counter() - begin)

    batch(heights[0])  # the first one of all has more to do
    stopwatch.ms.clear()
    new = [batch(height) for height in heights[1:]]
    kinds = {name: ms / args.sizes for name, ms in stopwatch.ms.most_common()}
    again = [batch(height) for height in heights[1:]]
    figures: dict[str, Any] = {
        "encoder": args.encoder,
        "without": args.without,
        "batch": args.batch,
        "sizes": args.sizes,
    }
    figures |= {"new_ms": sum(new) / args.sizes, "again_ms": sum(again) / args.sizes, "kinds": kinds}
    if args.json:
        print_json({"device": device_name(), **versions(), **figures})
        return
    rows = [*kinds.items(), ("a whole batch, first time", figures["new_ms"]), ("second time", figures["again_ms"])]
    print_table(f"a new size, {args.encoder}, {device_name()}", ["kind of layer", "ms"], [list(row) for row in rows])


if __name__ == "__main__":
    main()
