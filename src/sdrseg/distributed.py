"""Communication between the processes of one training. In a single process nothing is exchanged.

DistributedDataParallel averages gradients over processes. A loss that every process computes from the sums of all of
them therefore needs N times its gradient in each process's own part. The sums here provide that, so N processes with
B/N images each train exactly like one with B images.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

Sums = TypeVar("Sums", bound="tuple[Tensor, ...]")


class Processes:
    """All processes of a training, or only this one."""

    def __init__(self, alone: bool = False) -> None:
        active = not alone and dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank() if active else 0
        self.world = dist.get_world_size() if active else 1

    def sum(self, x: Tensor) -> Tensor:
        """Σ over processes, with gradient."""
        return x if self.world == 1 else _apply(_Sum, x, self.world)

    def sum_all(self, sums: Sums) -> Sums:
        """Σ over processes of every tensor of a named tuple, in one exchange."""
        if self.world == 1:
            return sums
        flat = self.sum(torch.cat([tensor.flatten() for tensor in sums]))
        parts = torch.split(flat, [tensor.numel() for tensor in sums])
        return type(sums)(*(part.view_as(tensor) for part, tensor in zip(parts, sums, strict=True)))

    def max(self, x: Tensor) -> Tensor:
        """The maximum over processes, with gradient to the processes that have it."""
        return x if self.world == 1 else _apply(_Max, x)

    def any(self, here: bool) -> bool:
        """Whether `here` is true in any process."""
        if self.world == 1:
            return here
        device = "cuda" if dist.get_backend() == "nccl" else "cpu"
        return bool(self.max(torch.tensor(float(here), device=device)) > 0)

    def counted(self, here: Counter[str]) -> Counter[str]:
        """Σ over processes of their counters."""
        if self.world == 1:
            return here
        all_of_them: list[Counter[str]] = [Counter()] * self.world
        dist.all_gather_object(all_of_them, here)
        return sum(all_of_them, Counter())


def _apply(function: Any, *given: Any) -> Tensor:
    """Call `function.apply`, which is untyped in some versions of torch."""
    result: Tensor = function.apply(*given)
    return result


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, world: int) -> Tensor:
        ctx.world = world
        total = x.contiguous().clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        # Every process has the same gradient here, so their sum is N times it; no communication is needed.
        return gradient * ctx.world, None


class _Max(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        largest = x.contiguous().clone()
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        holds = (x == largest).to(x.dtype)
        holders = holds.clone()
        dist.all_reduce(holders)
        ctx.save_for_backward(holds / holders)
        return largest

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (share,) = ctx.saved_tensors
        total = gradient.contiguous().clone()
        dist.all_reduce(total)
        return torch.mul(total, share)
