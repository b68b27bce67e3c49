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

    def any(self, local: bool) -> bool:
        """Whether `local` is true in any process."""
        if self.world == 1:
            return local
        device = "cuda" if dist.get_backend() == "nccl" else "cpu"
        return bool(self.max(torch.tensor(float(local), device=device)) > 0)

    def counted(self, local: Counter[str]) -> Counter[str]:
        """Σ over processes of their counters."""
        if self.world == 1:
            return local
        counters: list[Counter[str]] = [Counter()] * self.world
        dist.all_gather_object(counters, local)
        return sum(counters, Counter())


def _apply(function: Any, *args: Any) -> Tensor:
    """Call `function.apply`, which is untyped in some versions of torch."""
    result: Tensor = function.apply(*args)
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
        has_max = (x == largest).to(x.dtype)
        processes_with_max = has_max.clone()
        dist.all_reduce(processes_with_max)
        ctx.save_for_backward(has_max / processes_with_max)
        return largest

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (share,) = ctx.saved_tensors
        total = gradient.contiguous().clone()
        dist.all_reduce(total)
        return torch.mul(total, share)
