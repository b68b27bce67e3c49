"""A saved step of a run as a network: for the next step, scores, reports and predictions."""

from __future__ import annotations

from pathlib import Path

from sdrseg.config.net import Net
from sdrseg.decision import Decision, read_decision
from sdrseg.engine.folder import load_part, read_meta
from sdrseg.errors import SdrsegError, first_line
from sdrseg.network import Network, build_network


def open_step(step: Path, net: Net) -> tuple[Network, Decision]:
    """The network in the folder of a step, and how its logits become classes."""
    meta = read_meta(step)
    network = build_network(net, len(meta["classes"]))
    try:
        network.load_state_dict(load_part(step, meta, "model"))
    except RuntimeError as error:
        raise SdrsegError(
            f"{step}: the weights do not fit the network of config.json and meta.json ({first_line(error)})."
        ) from error
    return network, read_decision(meta.get("decision", "softmax"), step / "meta.json")
