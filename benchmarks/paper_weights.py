"""Weights for the preset `paper`, whose λ nobody published.

Each is chosen such that its term's gradient on the features has the norm that the term of the preset `default` has,
averaged over the first iterations of the first later step:

    python benchmarks/paper_weights.py RUN --data PATH          # RUN: a run with a finished step 0
"""

from __future__ import annotations

import argparse
import json
from itertools import islice
from pathlib import Path

import torch

from sdrseg.config import config_from, load_config
from sdrseg.datasets.augment import normalise
from sdrseg.datasets.batches import train_batches
from sdrseg.engine.job import Job, prepare_job
from sdrseg.engine.optimiser import make_optimiser
from sdrseg.engine.step import assemble
from sdrseg.methods import METHODS, method_layers
from sdrseg.scenario import parse_spec
from sdrseg.terminal import print_json, print_table

TERMS = ("kd", "pm", "attract", "repel", "sp")


SWITCHES = ("ce", "kd", "enc", "proto", "pm", "cl", "sp", "latent", "importance")


def prepare(run: Path, data: Path | None) -> Job:
    """The job of a run, with SDR as its method."""
    saved = json.loads((run / "config.json").read_text())
    spec = parse_spec(saved["spec"])
    chosen = load_config(spec.source, between=method_layers("sdr", "default", spec.task)).to_dict()
    config = config_from(saved["config"] | {section: chosen[section] for section in SWITCHES}, str(run))
    return prepare_job(spec, "sdr", config, data, run, None, None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--iterations", type=int, default=50)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    job = prepare(args.run, args.data)
    step = job.scenario.steps[1]
    config = job.config.of_step(1)
    method, student, teacher = assemble(job, step, METHODS["sdr"], config)
    printed = load_config(job.scenario.spec.source, between=method_layers("sdr", "paper", job.scenario.spec.task))
    ones = {"kd.weight": 1, "pm.weight": 1, "cl.attract": 1, "cl.repel": 1, "sp.weight": 1}
    values = config.to_dict() | {s: printed.to_dict()[s] for s in ("kd", "pm", "cl", "sp", "proto")}
    for key, value in ones.items():
        section, name = key.split(".")
        values[section][name] = value
    paper = METHODS["sdr"](config_from(values, "paper"))
    paper.load_state_dict(method.state_dict())
    paper.step = method.step
    paper.latent.begin_step(method.step, student.feature_channels, student.stride, job.fabric.device)
    optimiser = make_optimiser(student, method, config)
    student, optimiser = job.fabric.setup(student, optimiser)
    weights = method.weights()
    norms: dict[str, list[list[float]]] = {name: [[], []] for name in TERMS}
    batches = train_batches(
        job.source, step.train_ids, step.train_table, config, cache=job.cache("train", "train", step.train_ids)
    )
    for batch in islice(batches, args.iterations):
        batch = batch.to(job.fabric.device)
        images = normalise(batch.images)
        with torch.no_grad(), job.fabric.autocast():
            seen = teacher(images)
        with job.fabric.autocast():
            output = student.module(images)
        both = method.terms(batch, output, seen), paper.terms(batch, output, seen)
        for name in TERMS:
            for side, terms in enumerate(both):
                (gradient,) = torch.autograd.grad(terms[name], output.features, retain_graph=True)
                norms[name][side].append(gradient.float().norm().item() * (weights[name] if side == 0 else 1.0))
        optimiser.zero_grad()
        job.fabric.backward(sum(weights.get(n, 1.0) * t for n, t in both[0].items()))
        optimiser.step()
    rows = []
    for name, (default, plain) in norms.items():
        mean_default, mean_plain = (sum(values) / len(values) for values in (default, plain))
        rows.append(
            {"term": name, "default": weights[name], "gradient_norm": mean_default, "paper": mean_default / mean_plain}
        )
    if args.json:
        print_json({"iterations": args.iterations, "spec": job.spec, "rows": rows})
    else:
        print_table(
            f"{job.spec}, first {args.iterations} iterations of step 1",
            ["term", "λ in default", "norm of its gradient on F", "λ in paper"],
            [[r["term"], *(f"{r[k]:.3g}" for k in ("default", "gradient_norm", "paper"))] for r in rows],
        )


if __name__ == "__main__":
    main()
