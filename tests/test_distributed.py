"""Two processes with half the images each train exactly like one process with all of them, for every method.

One pair of processes runs all checks in turn; what goes wrong in it comes back as text.
"""

from __future__ import annotations

import copy
import socket
import traceback
from collections import Counter
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from sdrseg.distributed import Processes
from sdrseg.engine.fit import update

from methods_bench import Stage, begin

METHODS = ["ft", "lwf", "lwf-mc", "ilt", "cil", "mib", "ewc", "pi", "rw", "sdr", "sdr+mib"]
VARIANTS = {  # every collective that some switch needs
    "sdr, batch maximum": ("sdr", "disjoint", ("sp.scope=batch",)),
    "sdr, overall maximum": ("sdr", "disjoint", ("sp.variant=norm_max_overall",)),
    "sdr, norms": ("sdr", "disjoint", ("cl.form=norm_sum", "cl.attract=1e-5")),
    "sdr, image by image": ("sdr", "disjoint", ("cl.scope=image",)),
    "sdr, pseudo, pixels": ("sdr", "disjoint", ("cl.labels=pseudo", "proto.average=pixel")),
    "sdr, sequential": ("sdr", "sequential", ()),
    "laps, drift and all terms": (
        "laps",
        "overlapped",
        (
            "laps.fit_only=false",
            "laps.drift=true",
            "laps.anchor=1",
            "pm.weight=0.01",
            "cl.attract=1e-3",
            "cl.repel=1e-3",
            "cl.against=nearest",
            "sp.weight=1e-4",
        ),
    ),
    "laps-softmax, drift": ("laps-softmax", "disjoint", ("laps.fit_only=false", "laps.drift=true")),
    "laps, fitted": ("laps", "overlapped", ()),
    "laps, fitted with the encoder": ("laps", "disjoint", ("laps.encoder=3",)),
    "laps-softmax, fitted": ("laps-softmax", "disjoint", ("laps.memory=gaussian", "laps.encoder=0")),
    "sdr, all pixels": ("sdr", "disjoint", ("ce.reduction=all",)),
}
CASES = {name: (name, "disjoint", ()) for name in METHODS} | VARIANTS | {"counts": ()}
OPTIONS = {"lr": 3e-4, "base_lr": 0.05, "base_iterations": 30}  # classes apart enough for the repulsion in float32


def half(stage: Stage, rank: int) -> Stage:
    """The same stage in one of two processes: its half of the batch, and sums over both."""
    mine = copy.deepcopy(stage)
    mine.batch = mine.batch.split(2)[rank]
    mine.method.processes = mine.method.latent.processes = Processes()
    return mine


def averaged_gradients(stage: Stage) -> dict[str, torch.Tensor]:
    """Terms, backward, and gradients averaged over processes, as DistributedDataParallel does it."""
    stage.optimiser.zero_grad(set_to_none=True)
    stage.method.expect(None, 1)
    terms = stage.forward()
    weights = stage.method.weights()
    sum(weights.get(n, 1.0) * t for n, t in terms.items()).backward()
    if stage.method.processes.world > 1:
        parameters = [parameter for parameter in stage.student.parameters() if parameter.requires_grad]
        flat = torch.cat([parameter.grad.flatten() for parameter in parameters])
        dist.all_reduce(flat)
        parts = (flat / 2).split([parameter.numel() for parameter in parameters])
        for parameter, part in zip(parameters, parts, strict=True):
            parameter.grad.copy_(part.view_as(parameter))
    stage.terms.append({n: t.item() for n, t in terms.items()})
    return {n: p.grad.clone() for n, p in stage.student.named_parameters() if p.requires_grad}


def check(rank: int, name: str, protocol: str, settings: tuple[str, ...]) -> None:
    if begin(name, protocol, settings=settings, **OPTIONS).method.iterates(1):
        check_gradients(rank, name, protocol, settings)
    check_steps(rank, name, protocol, settings)


def check_gradients(rank: int, name: str, protocol: str, settings: tuple[str, ...]) -> None:
    """One iteration in float32: terms and gradients to rounding, whose size depends on the machine's kernels."""
    one = begin(name, protocol, settings=settings, **OPTIONS)
    two = half(one, rank)
    one.look("before")
    two.look("before")
    expected, found = averaged_gradients(one), averaged_gradients(two)
    assert one.terms[0].keys() == two.terms[0].keys()
    for term, value in one.terms[0].items():
        assert two.terms[0][term] == pytest.approx(value, rel=1e-5, abs=1e-6), f"term {term}"
    largest = max(float(g.abs().max()) for g in expected.values())
    for parameter, gradient in expected.items():
        apart = float((gradient - found[parameter]).abs().max()) / largest
        assert apart < 5e-6, f"gradient of {parameter} differs by {apart:.2e} of the largest"


def check_steps(rank: int, name: str, protocol: str, settings: tuple[str, ...]) -> None:
    """Some iterations in float64: parameters and prototypes to 1e-9, and the same in both processes."""
    one = begin(name, protocol, settings=settings, dtype=torch.float64, **OPTIONS)
    two = half(one, rank)
    iterations = 12 if name == "rw" else 5  # its score changes in the 11th
    for stage in (one, two):
        stage.look("before")
        for _ in range(iterations if stage.method.iterates(1) else 0):
            averaged_gradients(stage)
            stage.method.after_backward(stage.student)
            update(stage.optimiser, stage.method, stage.student)
            stage.method.after_update(stage.student)
        stage.look("after")
    for parameter, value in one.student.state_dict().items():
        assert torch.allclose(value, two.student.state_dict()[parameter], rtol=0, atol=1e-9), parameter
    ours = torch.cat([tensor.flatten().double() for tensor in two.method.state_dict().values()])
    theirs = [torch.empty_like(ours) for _ in range(2)]
    dist.all_gather(theirs, ours)
    assert torch.equal(*theirs), "prototypes or importances differ between the processes"
    for key, value in one.method.state_dict().items():
        other = two.method.state_dict()[key]
        assert torch.allclose(value.double(), other.double(), rtol=1e-9, atol=1e-9), key


def check_counts(rank: int) -> None:
    found = Processes().counted(Counter({"both": 1, str(rank): 2}))
    assert found == {"both": 2, "0": 2, "1": 2}


def work(rank: int, port: int, cases: dict, results) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    for label, case in cases.items():
        try:
            check(rank, *case) if case else check_counts(rank)
            outcome = ""
        except Exception:
            outcome = traceback.format_exc()
        failed = torch.tensor(float(bool(outcome)))
        dist.all_reduce(failed)
        results.put((label, rank, outcome))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def outcomes() -> dict[str, list[str]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = mp.get_context("spawn")
    results = context.SimpleQueue()
    processes = mp.start_processes(work, (port, CASES, results), nprocs=2, join=False, start_method="spawn")
    found: dict[str, list[str]] = {}
    for _ in range(2 * len(CASES)):
        label, rank, outcome = results.get()
        if outcome:
            found.setdefault(label, []).append(f"process {rank}: {outcome}")
    processes.join()
    return found


@pytest.mark.parametrize("label", CASES)
def test_two_processes_equal_one(outcomes, label):
    assert not outcomes.get(label), "\n".join(outcomes[label])


@pytest.mark.parametrize(("name", "settings"), [("cil", ("kd.kind=cil_official",)), ("ewc", ())])
def test_in_parts_the_other_terms_are_averaged(name, settings):
    """CIL of the official code, and the penalty in the log."""
    stage = begin(name, "disjoint", dtype=torch.float64, lr=3e-4, settings=settings)
    stage.iterate(1)  # only now there is a penalty
    term = "kd" if name == "cil" else "penalty"
    pieces = stage.batch.split(2)
    alone = [replace(stage, batch=piece).forward()[term].item() for piece in pieces]
    stage.method.expect(stage.batch, 2)
    together = [replace(stage, batch=piece).forward()[term].item() for piece in pieces]
    assert sum(together) == pytest.approx(sum(alone) / 2) and alone[0] != 0


def test_a_batch_in_parts_has_the_same_cross_entropy_and_distillation():
    """Gradient accumulation: CE and KD over the parts add up to those of the whole batch, and so do their gradients."""
    whole = begin("mib", "disjoint", dtype=torch.float64)
    parts = copy.deepcopy(whole)
    expected = averaged_gradients(whole)
    pieces = parts.batch.split(4)
    assert sum((piece.ids for piece in pieces), ()) == parts.batch.ids
    parts.method.expect(parts.batch, 4)
    parts.optimiser.zero_grad(set_to_none=True)
    sums = dict.fromkeys(("ce", "kd"), 0.0)
    for piece in pieces:
        part = replace(parts, batch=piece)
        terms = part.forward()
        sum(parts.method.weights().get(n, 1.0) * t for n, t in terms.items()).backward()
        sums = {n: sums[n] + terms[n].item() for n in sums}
    assert sums == pytest.approx(whole.terms[0], rel=1e-6)
    for name, parameter in parts.student.named_parameters():
        assert torch.allclose(parameter.grad, expected[name], rtol=1e-5, atol=1e-7), name
