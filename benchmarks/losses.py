"""SDR's four terms on the features, forward and backward, against the same terms written as loops over classes.

    python benchmarks/losses.py            # features 8×2048×32×32 on the CPU, 2 to 151 classes; some minutes
    python benchmarks/losses.py --tiny     # small features: a look at whether it runs

The loops are what one writes first: for each class a boolean mask, a gather of its features, and a piece of loss; for
terms that go by image, for each image and class. They give the same values and gradients, which is checked. Both sides
take turns in one process with all its threads. `speedup_K` is the median ratio at K classes; `growth` is our time at
151 classes over our time at 2. Below a speed-up of 5 at 12 classes or above a growth of 1.5 the exit code is 1.
"""

from __future__ import annotations

import argparse
import sys
import time

import torch
from torch import Tensor

from sdrseg.config import load_config
from sdrseg.datasets.batches import Batch
from sdrseg.distributed import Processes
from sdrseg.losses.prototypes import Prototypes, pseudo_labels
from sdrseg.methods import StepInfo, method_layers
from sdrseg.methods.latent import LatentSpace
from sdrseg.terminal import print_json, print_table

from timing import ratio, rounds, spread, versions

VOID = 255


class Inputs:
    """Features, labels in blocks with a tenth void, teacher logits and running prototypes of the old classes."""

    def __init__(self, classes: int, shape: tuple[int, int, int, int]):
        torch.manual_seed(classes)
        images, channels, height, width = shape
        self.classes, self.n_old = classes, max(1, classes // 2)
        blocks = torch.randint(0, classes, (images, 8, 8))
        labels = blocks.repeat_interleave(height // 8, 1).repeat_interleave(width // 8, 2).to(torch.uint8)
        labels[torch.rand(labels.shape) < 0.1] = VOID
        outside = torch.zeros(labels.shape, dtype=torch.bool)
        self.batch = Batch(torch.zeros(images, 3, height, width, dtype=torch.uint8), labels, outside, ())
        self.teacher = torch.randn(images, self.n_old, height, width)
        self.features = torch.rand(shape).contiguous(memory_format=torch.channels_last).requires_grad_()
        self.prototypes = torch.rand(classes, channels)


class Ours:
    def __init__(self, inputs: Inputs):
        self.inputs = inputs
        config = load_config("voc", None, None, method_layers("sdr", "default", None))
        self.latent = LatentSpace(config, Processes(alone=True))
        step = StepInfo(1, inputs.n_old, inputs.classes - inputs.n_old, "disjoint")
        self.latent.begin_step(step, inputs.features.shape[1], 1, torch.device("cpu"))
        self.weights = self.latent.weights()
        self.average = config.proto.average

    def __call__(self, round: int = 0) -> dict[str, Tensor]:
        inputs = self.inputs
        for average in self.latent.prototypes:
            seen = torch.full((inputs.classes,), 100, dtype=torch.long)
            self.latent.prototypes[average] = Prototypes(inputs.prototypes.clone(), seen)
        inputs.features.grad = None
        terms = self.latent.terms(inputs.batch, inputs.features, inputs.teacher)
        sum(self.weights[name] * term for name, term in terms.items()).backward()
        return terms


class Loops:
    """The same, class by class."""

    def __init__(self, inputs: Inputs, ours: Ours):
        self.inputs, self.weights, self.average = inputs, ours.weights, ours.average

    def __call__(self, round: int = 0) -> dict[str, Tensor]:
        inputs = self.inputs
        inputs.features.grad = None
        labels = inputs.batch.labels.long()
        pseudo = pseudo_labels(labels, inputs.teacher, 1)
        by_label, by_pseudo = self.in_batch(labels), self.in_batch(pseudo)
        running = self.update(labels, by_label)
        terms = {
            "pm": self.matching(running, by_pseudo),
            "attract": self.attraction(running, labels),
            "repel": self.repulsion(by_label),
            "sp": self.sparsity(labels),
        }
        sum(self.weights[name] * term for name, term in terms.items()).backward()
        return terms

    def in_batch(self, labels: Tensor) -> dict[int, Tensor]:
        """The mean over images of the class's mean in the image (or over all its pixels)."""
        features, means = self.inputs.features, {}
        rows = features.permute(0, 2, 3, 1)
        for c in range(self.inputs.classes):
            mask = labels == c
            if not mask.any():
                continue
            if self.average == "pixel":
                means[c] = rows[mask].mean(0)
            else:
                means[c] = torch.stack([rows[b][mask[b]].mean(0) for b in range(len(mask)) if mask[b].any()]).mean(0)
        return means

    def update(self, labels: Tensor, now: dict[int, Tensor]) -> Tensor:
        running = self.inputs.prototypes.clone()
        for c, mean in now.items():
            if c > 0:
                mask = labels == c
                count = int(mask.flatten(1).any(1).sum()) if self.average == "image" else int(mask.sum())
                running[c] = (100 * running[c] + count * mean.detach()) / (100 + count)
        return running

    def matching(self, running: Tensor, now: dict[int, Tensor]) -> Tensor:
        each = [(running[c] - mean).square().mean() for c, mean in now.items() if 0 < c < self.inputs.n_old]
        return torch.stack(each).mean() if each else self.inputs.features.sum() * 0

    def attraction(self, running: Tensor, labels: Tensor) -> Tensor:
        rows = self.inputs.features.permute(0, 2, 3, 1)
        chosen = [c for c in range(self.first, self.inputs.classes) if (labels == c).any()]
        return torch.stack([(rows[labels == c] - running[c]).square().mean() for c in chosen]).mean()

    def repulsion(self, now: dict[int, Tensor]) -> Tensor:
        chosen = [c for c in now if c >= self.first]
        total = self.inputs.features.sum() * 0
        for j in chosen:
            for k in chosen:
                if j != k:
                    total = total + 1 / (now[j] - now[k]).norm()
        return total / len(chosen)

    def sparsity(self, labels: Tensor) -> Tensor:
        total, count = self.inputs.features.sum() * 0, 0
        for b in range(len(labels)):
            rows = self.inputs.features[b].permute(1, 2, 0)
            for c in range(self.inputs.classes):
                mask = labels[b] == c
                if mask.any():
                    own = rows[mask]
                    bar = own / own.max()
                    total = total + (bar.exp().sum(1) / bar.sum(1)).sum()
                    count += len(own)
        return total / count

    first = 0


def compare(classes: int, shape: tuple[int, int, int, int], repeat: int) -> dict[str, float]:
    inputs = Inputs(classes, shape)
    ours = Ours(inputs)
    loops = Loops(inputs, ours)
    loops.first = 0 if bool(ours.latent._contrasted[0]) else 1
    results = {}
    for name, side in (("ours", ours), ("loops", loops)):
        terms = side()
        results[name] = ({n: t.item() for n, t in terms.items()}, inputs.features.grad.clone())
    for name, value in results["loops"][0].items():
        assert abs(results["ours"][0][name] - value) <= 1e-4 * abs(value) + 1e-9, (name, value, results["ours"][0])
    far = float((results["ours"][1] - results["loops"][1]).norm() / results["loops"][1].norm())
    assert far < 1e-3, f"gradients differ by {far}"
    seconds, _ = rounds({"ours": ours, "loops": loops}, repeat, time.perf_counter)
    faster = ratio(seconds["loops"], seconds["ours"])
    medians = {f"{name}_ms": 1000 * spread(values).median for name, values in seconds.items()}
    return {"classes": classes, **medians, "speedup": faster.median, "low": faster.low, "high": faster.high}


def growth(shape: tuple[int, int, int, int], repeat: int) -> float:
    """Our time with 151 classes over our time with 2, in turns."""
    seconds, _ = rounds({str(k): Ours(Inputs(k, shape)) for k in (2, 151)}, repeat, time.perf_counter)
    return ratio(seconds["151"], seconds["2"]).median


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--classes", type=int, nargs="+", default=[2, 12, 21, 151])
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    shape = (2, 64, 16, 16) if args.tiny else (8, 2048, 32, 32)
    rows = [compare(classes, shape, args.repeat) for classes in args.classes]
    figures = {f"speedup_{row['classes']}": row["speedup"] for row in rows}
    figures["growth"] = growth(shape, args.repeat)
    if args.json:
        print_json({**figures, "rows": rows, "versions": versions()})
    else:
        print(f"growth from 2 to 151 classes: {figures['growth']:.2f} times")
        print_table(f"features {'×'.join(map(str, shape))}", list(rows[0]), [list(row.values()) for row in rows])
    if not args.tiny and (figures.get("speedup_12", 5) < 5 or figures["growth"] > 1.5):
        sys.exit(1)


if __name__ == "__main__":
    main()
