"""How near a method's distillation is to divergence, at the beginning of step 1 of VOC 15-1.

    python benchmarks/curvature.py BASE --voc PATH --method laps [--batch 2] [--crop 224] [--set KEY=VALUE …]

BASE: an exported model of step 0 of voc:15-1@disjoint (`sdrseg base export`) that suits the method.

SGD on a quadratic with curvature λ is stable for learning rates η with ηλ < 2(1 + β) / (1 + 2β) with Nesterov's
momentum β, and ηλ < 2(1 + β) without. At the beginning of a step student and teacher are the same, so the Hessian of
the distillation has no negative eigenvalues; power iteration finds the largest one of (learning rates × Hessian), for
one batch. Encoder and decoder have the learning rates that they have in training; "encoder" is its share.
"""

from __future__ import annotations

import argparse
import tempfile
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sdrseg import kernels
from sdrseg.config import load_config
from sdrseg.config.read import parse_settings
from sdrseg.datasets import open_source
from sdrseg.datasets.augment import normalise
from sdrseg.datasets.batches import train_batches
from sdrseg.datasets.index import class_index
from sdrseg.engine.bases import BaseStore
from sdrseg.engine.optimiser import make_optimiser
from sdrseg.methods import METHODS, StepInfo, method_layers, own_sections
from sdrseg.network import build_network
from sdrseg.scenario import build_scenario, parse_spec
from sdrseg.terminal import print_json, print_table

SPEC = "voc:15-1@disjoint"


def largest(loss: Tensor, groups: list[dict[str, Any]], rounds: int) -> tuple[float, float]:
    """The largest eigenvalue of learning rates × Hessian, and the encoder's (first group's) share of it."""
    rates = [(p, g["lr"]) for g in groups for p in g["params"] if p.requires_grad]
    first = {id(p) for p in groups[0]["params"]}
    parameters = [p for p, _ in rates]
    gradient = torch.autograd.grad(loss, parameters, create_graph=True, materialize_grads=True)
    direction = [torch.randn_like(p) * rate**0.5 for p, rate in rates]
    for _ in range(rounds):
        length = sum((v.square().sum() / rate for v, (_, rate) in zip(direction, rates, strict=True)), loss * 0).sqrt()
        direction = [v / length for v in direction]
        along = sum(((g * v).sum() for g, v in zip(gradient, direction, strict=True)), loss * 0)
        product = torch.autograd.grad(along, parameters, retain_graph=True, materialize_grads=True)
        parts = [float((h * v).sum().detach()) for h, v in zip(product, direction, strict=True)]
        direction = [rate * h for h, (_, rate) in zip(product, rates, strict=True)]
    value = sum(parts)
    return value, sum(x for x, (p, _) in zip(parts, rates, strict=True) if id(p) in first) / value


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("base", type=Path)
    words.add_argument("--voc", type=Path, required=True)
    words.add_argument("--method", default="laps", choices=METHODS)
    words.add_argument("--batch", type=int, default=2)
    words.add_argument("--crop", type=int, default=224)
    words.add_argument("--batches", type=int, default=3)
    words.add_argument("--rounds", type=int, default=6)
    words.add_argument("--step", type=int, default=1)
    words.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE")
    words.add_argument("--json", action="store_true")
    given = words.parse_args()
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    settings = {"net.encoder": "resnet50", "net.stride_on": "conv1", "net.weights": "none", "data.crop": given.crop}
    settings |= {"train.batch_size": given.batch, **parse_settings(given.set)}
    layers = method_layers(given.method, "default", "15-1", "voc")
    config = load_config("voc", None, settings, layers, own_sections(given.method)).of_step(given.step)
    source = open_source("voc", given.voc, config)
    train, val = class_index(source, "train"), class_index(source, "val")
    step = build_scenario(parse_spec(SPEC), source, train, val, **config.scenario_policy())[given.step]
    with tempfile.TemporaryDirectory() as folder:
        store = BaseStore(Path(folder))
        model, memory = store.load(store.import_from(given.base))
    old = len(model["classifier.bias"])
    student, teacher = build_network(config.net, old), build_network(config.net, old)
    for network in (student, teacher):
        network.load_state_dict(model)
        network.to(device).eval().requires_grad_(False)
    student.requires_grad_(True)
    method = METHODS[given.method](config)
    method.load_state_dict({name: tensor.to(device) for name, tensor in memory.items()})
    method.begin_step(StepInfo(1, old, 1, "disjoint", method.decision), student, teacher)
    student.to(device)
    groups = make_optimiser(student, method, config).param_groups
    beta = config.optim.momentum
    limit = 2 * (1 + beta) / ((1 + 2 * beta) if config.optim.nesterov else 1)
    rows = []
    with kernels.disabled():
        for batch in islice(train_batches(source, step.train_ids, step.train_table, config), given.batches):
            batch = batch.to(device)
            images = normalise(batch.images)
            with torch.no_grad():
                seen = teacher(images)
            loss = method.weights()["kd"] * method.terms(batch, student(images), seen)["kd"]
            value, encoder = largest(loss, groups, given.rounds)
            rows.append({"eigenvalue": value, "encoder": encoder})
    if given.json:
        what = {"method": given.method, "images": given.batch, "crop": given.crop, "settings": given.set}
        print_json({**what, "limit": limit, "batches": rows})
    else:
        cells = [
            [number, f"{row['eigenvalue']:.2f}", f"{100 * row['encoder']:.0f} %"] for number, row in enumerate(rows)
        ]
        print_table(f"{given.method}: stable below {limit:.2f}", ("batch", "eigenvalue", "encoder"), cells)


if __name__ == "__main__":
    main()
