"""Whether batch norm gets enough data: iterations for its running statistics, values for a variance."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from sdrseg.config.net import Net
from sdrseg.errors import UsageError, quantity

if TYPE_CHECKING:
    from sdrseg.network import Network


def statistics_moved(momentum: float, iterations: int) -> float:
    """How far running statistics have converged to those of the data after n updates: 1 − (1 − m)^n."""
    return 1 - (1 - momentum) ** iterations


def statistics_warning(net: Net, iterations: int) -> str | None:
    """A warning if step 0 is too short for the momentum of batch norm; evaluation uses the running statistics."""
    for part, momentum in (("encoder", net.bn_momentum_encoder), ("decoder", net.bn_momentum_decoder)):
        if (moved := statistics_moved(momentum, iterations)) < 0.9:
            enough = 1 - 0.1 ** (1 / max(1, iterations))
            return (
                f"Batch norm: in {quantity(iterations, 'iteration')} the running statistics of the {part} move only "
                f"{100 * moved:.0f} % of the way to the data, and evaluation uses them. Train longer, or set "
                f"net.bn_momentum_{part} to at least {math.ceil(1000 * enough) / 1000} (now {momentum})."
            )
    return None


def require_variance(network: Network, crop: int) -> None:
    """Raise if a batch norm in training would get one value per channel, which has no variance."""
    if network.pools or crop <= network.stride:
        raise UsageError(
            "One image at a time is too few: this network trains a batch norm that gets one value per image. "
            "Use a larger train.batch_size or a smaller run.accumulate (at least 2 images at a time in each process), "
            "net.bn=freeze_stats (in later steps net.bn_later), or another net.decoder, such as unet."
        )
