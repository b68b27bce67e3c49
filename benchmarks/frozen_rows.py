"""How well new classes can be told from frozen features: rows of LAPS fitted by logistic regression, on VOC 15-1.

    python benchmarks/frozen_rows.py OUT.json --voc PATH --base FOLDER --features FOLDER

BASE: an exported model of step 0 (`sdrseg base export`), of LAPS or trained with a softmax. Only training images are
used: 600 are scored with all their labels, and the rows of the five new classes are fitted on others: 140 images of
each new class, and 400 more, of which those without a new class are for the memory. Features are those of one cell in
16×16 pixels, kept in --features; making them takes half an hour on a CPU, the rest a few minutes. Each row is fitted as
if its class were the only new one. Variants with "encoder" give new rows not only the decoder's output, which is the
input of the classifier, but also that many principal components of the encoder's features; with "around", also the mean
of the decoder's output over the 3×3 cells around each.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from extend_photos import BASE
from sdrseg.config import load_config
from sdrseg.datasets import open_source
from sdrseg.datasets.augment import normalise
from sdrseg.datasets.index import class_index
from sdrseg.engine.bases import BaseStore
from sdrseg.engine.environment import source_commit
from sdrseg.files import write_json
from sdrseg.labels import VOID
from sdrseg.methods.discriminant import Rest, log_sum_exp
from sdrseg.methods.logistic import logistic
from sdrseg.methods.memory import fit, joined, weighted_vectors
from sdrseg.methods.sample import BACKGROUND, CLASS
from sdrseg.metrics import iou
from sdrseg.network import build_network

N_OLD, NEW, STRIDE = 16, range(16, 21), 16
SCORED, EACH, OTHERS = 600, 140, 400
COMPONENTS = 512  # principal components of the encoder's features that are kept
DEFAULT = {
    "memory": "features",
    "level": "old",
    "positive": 3.0,
    "ridge": 1e-3,
    "images": 0,
    "prior": "seen",
    "encoder": 0,
    "around": False,
    "clusters": 64,
}
BEST = {"positive": 2.0, "ridge": 1e-2, "encoder": 256}
FEW = {"prior": "average", "positive": 1.0}
VARIANTS: list[dict[str, Any]] = [
    {"memory": "everything"},
    {"memory": "nothing"},
    {"memory": "gaussian"},
    {},
    {"level": "zero"},
    {"positive": 2.0},
    {"ridge": 1e-2},
    *({"images": count, **more} for count in (50, 25, 10) for more in ({}, FEW)),
    *({**BEST, "encoder": components} for components in (0, 64, 256, 512)),
    *({**BEST, "ridge": ridge} for ridge in (1e-3, 3e-2, 1e-1)),
    {**BEST, "level": "zero"},
    {**BEST, "memory": "gaussian"},
    *({"ridge": 1e-2, "encoder": 256, "images": count, **FEW} for count in (50, 25, 10)),
    {"memory": "prototype"},
    *({"memory": "gaussian", "clusters": clusters} for clusters in (16, 256)),
    *({**BEST, "positive": positive} for positive in (1.0, 3.0, 4.0)),
    *({**BEST, "encoder": encoder, "around": True} for encoder in (0, 256)),
]


def chosen(classes: dict[str, set[int]]) -> dict[str, list[str]]:
    order = sorted(classes)
    random.Random(0).shuffle(order)
    rest = order[SCORED:]
    found: dict[str, None] = {}
    for c in NEW:
        found |= dict.fromkeys([id for id in rest if c in classes[id]][:EACH])
    found |= dict.fromkeys([id for id in rest if id not in found][:OTHERS])
    return {"scored": order[:SCORED], "fitted": list(found)}


def principal(features: list[Any], old: list[bool]) -> Tensor:
    """(C, COMPONENTS): the directions of largest variance of the encoder's features on images without a new class."""
    x = torch.cat([torch.from_numpy(x).float() for x, kept in zip(features, old, strict=True) if kept])
    x -= x.mean(0)
    _, directions = torch.linalg.eigh((x.T @ x / len(x)).double())
    found: Tensor = directions[:, -COMPONENTS:].flip(1).float()
    return found


def make_features(
    given: argparse.Namespace, source: Any, config: Any, ids: dict[str, list[str]], classes: dict[str, set[int]]
) -> None:
    """Vectors (N, D), labels and the number of the image of each cell, and the rows of the base, as files."""
    with tempfile.TemporaryDirectory() as scratch:
        store = BaseStore(Path(scratch))
        network = build_network(config.net, N_OLD)
        network.load_state_dict(store.load(store.import_from(given.base))[0])
    device = "cuda" if torch.cuda.is_available() else "cpu"
    network.to(device).eval()
    given.features.mkdir(parents=True, exist_ok=True)
    directions: Tensor | None = None
    for part in ("fitted", "scored"):
        cells: dict[str, list[Any]] = {"vectors": [], "around": [], "labels": [], "images": [], "encoder": []}
        for number, id in enumerate(ids[part]):
            labels = source.mask(id)[STRIDE // 2 :: STRIDE, STRIDE // 2 :: STRIDE]
            image = torch.from_numpy(source.image(id).copy()).permute(2, 0, 1)[None].to(device)
            with torch.no_grad():
                output = network(normalise(image))
            embedding, encoder = output.embedding[0].cpu(), output.features[0].cpu()
            finer = STRIDE * embedding.shape[1] // (-(-image.shape[2] // network.multiple) * network.multiple)
            x = embedding[:, finer // 2 :: finer, finer // 2 :: finer][:, : labels.shape[0], : labels.shape[1]]
            known = labels != VOID
            cells["vectors"].append(x.permute(1, 2, 0).numpy()[known].astype(np.float16))
            around = F.avg_pool2d(x[None], 3, 1, 1, count_include_pad=False)[0]
            cells["around"].append(around.permute(1, 2, 0).numpy()[known].astype(np.float16))
            cells["labels"].append(labels[known])
            cells["images"].append(np.full(known.sum(), number))
            coarse = encoder[:, : labels.shape[0], : labels.shape[1]].permute(1, 2, 0)
            cells["encoder"].append(coarse.numpy()[known].astype(np.float16))
        if directions is None:
            directions = principal(cells["encoder"], [classes[id].isdisjoint(NEW) for id in ids[part]])
        cells["encoder"] = [(torch.from_numpy(x).float() @ directions).half().numpy() for x in cells["encoder"]]
        for name, values in cells.items():
            np.save(given.features / f"{part}-{name}.npy", np.concatenate(values))
    rows = {"weight": network.classifier.weight.detach().flatten(1), "bias": network.classifier.bias.detach()}
    np.savez(given.features / "rows.npz", **{name: tensor.cpu().numpy() for name, tensor in rows.items()})


def inputs(folder: Path, part: str, encoder: int, around: bool = False) -> Tensor:
    """(N, D): the decoder's output, `encoder` components of the encoder's features, and means over cells around."""
    names = ["vectors", *["encoder"] * (encoder > 0), *["around"] * around]
    parts = {name: torch.from_numpy(np.load(folder / f"{part}-{name}.npy")) for name in names}
    return torch.cat([(x[:, :encoder] if name == "encoder" else x).float() for name, x in parts.items()], 1)


class Cells:
    """The cells of the images that rows are fitted on, and how many images each stands for."""

    def __init__(self, folder: Path, ids: list[str], classes: dict[str, set[int]], rest: list[str], *more: Any):
        self.x = inputs(folder, "fitted", *more)
        self.y = torch.from_numpy(np.load(folder / "fitted-labels.npy").astype(np.int64))
        self.image = torch.from_numpy(np.load(folder / "fitted-images.npy").astype(np.int64))
        self.has = torch.tensor([[c in classes[id] for c in NEW] for id in ids])
        share = [sum(c in classes[id] for id in rest) / max(1, int(self.has[:, n].sum())) for n, c in enumerate(NEW)]
        without = sum(classes[id].isdisjoint(NEW) for id in rest) / int((~self.has.any(1)).sum())
        stands = [max((s for s, mine in zip(share, row, strict=True) if mine), default=without) for row in self.has]
        self.points = torch.tensor(stands)[self.image]
        self.other = ~self.has.any(1)[self.image]

    def memory(self, form: str, clusters: int) -> list[tuple[Tensor, Tensor]]:
        """What is known of the images without a new class: vectors, and the points that each represents."""
        if form == "nothing":
            return []
        if form == "everything":
            return [(self.x[self.other], self.points[self.other])]
        fitted = []
        for c in range(N_OLD):
            cells = torch.nonzero(self.other & (self.y == c)).flatten()
            some = cells[torch.randperm(len(cells), generator=torch.Generator().manual_seed(c))]
            count = float(self.points[cells].sum())
            fitted.append(fit(self.x[some[: CLASS if c else BACKGROUND]], c, count, form, 16, clusters))  # type: ignore[arg-type]
        return [weighted_vectors(part, 4 * BACKGROUND, 0) for part in (fitted[0], joined(fitted[1:]))]

    def rows(self, variant: dict[str, Any], old: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        memory = self.memory(variant["memory"], variant["clusters"])
        weights, biases = [], []
        for n, c in enumerate(NEW):
            images = torch.nonzero(self.has[:, n]).flatten()[: variant["images"] or None]
            mine = torch.isin(self.image, images)
            points = torch.ones_like(self.points) if variant["images"] else self.points
            some = {True: CLASS, False: BACKGROUND}
            parts = {}
            for yes in (True, False):
                cells = torch.nonzero(mine & ((self.y == c) == yes)).flatten()
                kept = cells[torch.randperm(len(cells), generator=torch.Generator().manual_seed(n))[: some[yes]]]
                parts[yes] = self.x[kept], points[cells].sum() / len(kept) * torch.ones(len(kept))
            rarity = 1.0
            if variant["prior"] == "average":
                average = self.points[self.other & (self.y > 0)].sum() / (N_OLD - 1)
                rarity = min(1.0, float(parts[True][1].sum() / average))
            level = log_sum_exp(old["weight"], old["bias"]) if variant["level"] == "old" else zero
            rest = Rest([parts[False], *((x, rarity * p) for x, p in memory)], level)
            own, count = parts[True]
            weight, bias = logistic(own, variant["positive"] * float(count.sum()), rest, variant["ridge"])
            weights.append(weight)
            biases.append(bias)
        return torch.stack(weights).float(), torch.tensor(biases)


def zero(x: Tensor) -> Tensor:
    return x.new_zeros(len(x))


def scored(x: Tensor, y: Tensor, old: dict[str, Tensor], new: tuple[Tensor, Tensor] | None) -> list[float]:
    """The IoU of each class in per cent, on cells."""
    s = x @ old["weight"].T + old["bias"]  # with sigmoids, the row of background is 0
    if new is not None:
        s = torch.cat([s, x @ new[0].T + new[1]], 1)
    classes = s.shape[1]
    matrix = torch.bincount(y * classes + s.argmax(1), minlength=classes**2).view(classes, classes)
    return [100 * float(value) for value in iou(matrix.numpy())]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--voc", type=Path, required=True)
    parser.add_argument("--base", type=Path, required=True)
    parser.add_argument("--features", type=Path, required=True)
    given = parser.parse_args()
    config = load_config("voc", None, BASE)
    source = open_source("voc", given.voc, config)
    index = class_index(source, "train")
    classes = {id: {*np.flatnonzero(row)} for id, row in zip(index.ids, index.present[:, :VOID], strict=True)}
    ids = chosen(classes)
    if not (given.features / "rows.npz").exists():
        make_features(given, source, config, ids, classes)
    with np.load(given.features / "rows.npz") as file:
        old = {name: torch.from_numpy(file[name]).float() for name in file}
    y = torch.from_numpy(np.load(given.features / "scored-labels.npy")).long()
    before = scored(inputs(given.features, "scored", 0), torch.where(y < N_OLD, y, 0), old, None)
    rest = [id for id in classes if id not in set(ids["scored"])]
    found = []
    for more in sorted({((DEFAULT | change)["encoder"], (DEFAULT | change)["around"]) for change in VARIANTS}):
        x = inputs(given.features, "scored", *more)
        cells = Cells(given.features, ids["fitted"], classes, rest, *more)
        added = x.shape[1] - old["weight"].shape[1]
        wider = {**old, "weight": F.pad(old["weight"], (0, added))}  # old rows see the decoder's output alone
        for change in VARIANTS:
            variant = DEFAULT | change
            if (variant["encoder"], variant["around"]) != more:
                continue
            scores = scored(x, y, wider, cells.rows(variant, wider))
            found.append({**variant, "iou": dict(zip((source.classes[c] for c in range(21)), scores, strict=True))})
            print(change, f"old {np.mean(scores[:N_OLD]):.1f}, new {np.mean(scores[N_OLD:]):.1f}", flush=True)
    write_json(given.out, {"before": float(np.mean(before)), "variants": found, "commit": source_commit()})


if __name__ == "__main__":
    main()
