"""`run.speed`: chooses plain, compiled or replayed passes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sdrseg.config import Config
from sdrseg.engine.passes import CompiledPass, GraphPass, Pass
from sdrseg.errors import UsageError
from sdrseg.methods.base import Method
from sdrseg.network import Network

if TYPE_CHECKING:
    from lightning.fabric import Fabric

COMPILE_FROM = 20_000
"""Iterations from which compiling saves time: it takes one to three minutes, and saves at least 4 ms per iteration."""
COMPILED = ("deeplabv3", "deeplabv3plus", "official")
"""Decoders that `auto` compiles: those whose upsampling keeps its precision when compiled."""


def compiling_pays(iterations: int, decoder: str) -> bool:
    """Whether compiling saves time for this number of iterations (docs/performance.md)."""
    return iterations >= COMPILE_FROM and decoder in COMPILED


def make_pass(
    fabric: Fabric,
    method: Method,
    student: Any,
    teacher: Network | None,
    config: Config,
    iterations: int,
    say: Callable[[str], None],
) -> Pass | GraphPass:
    """The pass that `run.speed` names; with auto, the fastest possible one for this many iterations."""
    speed, gpu = config.run.speed, fabric.device.type == "cuda"
    reason = why_plain(method, config, fabric.world_size)
    if reason is not None and speed in ("graph", "compile", "trunk"):
        raise UsageError(f"run.speed={speed}: {reason}. Use run.speed=auto.")
    if speed == "graph" and not gpu:
        raise UsageError("run.speed=graph: there is no NVIDIA GPU here. Use run.speed=auto.")
    result = Pass(fabric, method, student, teacher)
    if speed == "plain" or reason is not None:
        return result
    if speed == "auto" and gpu:
        speed = "compile" if compiling_pays(iterations, config.net.decoder) else "graph"
    if speed in ("compile", "trunk"):
        result = CompiledPass(fabric, method, student, teacher, say, whole=speed == "compile")
    return GraphPass(result, say) if gpu else result


def why_plain(method: Method, config: Config, processes: int) -> str | None:
    """Why a pass can be neither compiled nor replayed, or None."""
    if processes > 1:
        return f"there are {processes} processes"
    if config.run.accumulate > 1:
        return f"run.accumulate={config.run.accumulate} cuts batches into parts"
    if not replayable(method):
        return f"the method {method.name} does not declare that its terms can be replayed (Method.replayable)"
    return None


def replayable(method: Method) -> bool:
    """Whether a method is declared replayable, or inherits its terms from a class that is."""
    for kind in type(method).__mro__:
        if "replayable" in vars(kind):
            return method.replayable
        if {"terms", "more_terms", "own_terms", "relabel"} & vars(kind).keys():
            return False
    return False
