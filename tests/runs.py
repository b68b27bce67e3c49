"""Tiny runs on generated data, in this process and in several, and what of them has to be the same."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch

from sdrseg.config import parse_settings
from sdrseg.engine.run import train

SPEC = "shapes:8-1@disjoint"
TINY = [
    "shapes.size=32",
    "shapes.train=60",
    "shapes.val=24",
    "data.crop=32",
    "train.batch_size=4",
    "train.epochs=1",
    "optim.lr=0.02",
    "net.decoder=deeplabv3",
    "run.log_every=1",
    "run.save_minutes=0",
]


class Quiet:
    """A display that shows nothing and remembers what was said."""

    def __init__(self):
        self.said = []

    def say(self, text):
        self.said.append(text)

    def update(self, entry):
        pass

    def scored(self, score, oracle):
        pass

    def validated(self, step, epoch, miou, oracle):
        self.said.append((step, epoch, miou["all"]))

    def close(self):
        pass


@contextmanager
def deterministic_algorithms() -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(before)


def run(out: Path, method: str = "sdr", *more: str, spec: str = SPEC, bases: Path | None = None) -> dict:
    return train(
        spec, method, out, settings=parse_settings([*TINY, *more]), bases=bases or out.parent / "bases", display=Quiet()
    )


def content(folder: Path) -> dict[str, bytes]:
    """What has to be the same, bit for bit: weights, memories, metrics, summary."""
    files = [*folder.glob("steps/*/*.safetensors"), *folder.glob("steps/*/metrics.json"), folder / "summary.json"]
    return {str(file.relative_to(folder)): file.read_bytes() for file in files}


def script(out: Path, more: Sequence[str] = (), before: str = "") -> Path:
    """A program that trains into `out`, for several processes; it fails if they are still bound together at its end."""
    code = (
        "import atexit, os, sys, torch; torch.set_num_threads(1)\n"
        "atexit.register(lambda: os._exit(7) if torch.distributed.is_initialized() else None)\n"
        f"from pathlib import Path\nfrom sdrseg.engine.run import train\n{before}\n"
        f"out = Path({str(out)!r})\n"
        f"settings = {parse_settings([*TINY, *more])!r}\n"
        f"train({SPEC!r}, 'sdr', out, settings=settings, bases=out.with_name(out.name + '-bases'))\n"
    )
    file = out.parent / f"{out.name}.py"
    file.write_text(code)
    return file


def start(*command: object, stdout: int | None = None, **variables: str) -> subprocess.Popen:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    words = [sys.executable, *map(str, command)]
    return subprocess.Popen(words, env=environment, stdout=stdout, stderr=subprocess.PIPE, start_new_session=True)


def torchrun(out: Path, *options: str, more: Sequence[str] = (), **variables: str) -> subprocess.Popen:
    options = options or ("--standalone", "--nproc-per-node=2")
    return start("-m", "torch.distributed.run", *options, script(out, more), **variables)


def two_machines(out: Path, more: Sequence[str] = (), **variables: str) -> list[subprocess.Popen]:
    """Two agents of torchrun with a process each. NCCL believes that they are two machines, so they may share a GPU."""
    nodes = ["--nnodes=2", "--nproc-per-node=1", "--master-addr=127.0.0.1", f"--master-port={free_port()}"]
    return [
        torchrun(out, *nodes, f"--node-rank={rank}", more=more, **variables, NCCL_HOSTID=f"machine{rank}")
        for rank in range(2)
    ]


def end_well(processes: Sequence[subprocess.Popen]) -> None:
    codes = [process.wait(200) for process in processes]
    assert not any(codes), "\n".join(process.stderr.read().decode() for process in processes)


def forked(work: Callable[[], object], **variables: str) -> int:
    """Run something in a forked child, which has torch imported already; the process id."""
    child = os.fork()
    if child == 0:
        try:
            os.environ.update(variables)
            work()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    return child


def two_forked(out: Path, variables: Mapping[str, str], ranks: Sequence[str], own_bases: bool = False) -> list[int]:
    """Two forked children that train together; `ranks`: the variables that tell each its number."""

    def work(rank: int) -> None:
        run(out, bases=out.parent / (f"store{rank}" if own_bases else f"{out.name}-bases"))
        torch.distributed.destroy_process_group()  # there is one

    shared = {"OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), **variables}
    return [forked(partial(work, rank), **shared, **dict.fromkeys(ranks, str(rank))) for rank in range(2)]


def torchrun_forked(out: Path, own_bases: bool = False) -> list[int]:
    """What the processes of torchrun see, without its agent."""
    variables = {"TORCHELASTIC_RUN_ID": "test", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0"}
    return two_forked(out, variables, ("RANK", "LOCAL_RANK"), own_bases)


def all_end_well(children: Sequence[int]) -> None:
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * len(children)


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])
