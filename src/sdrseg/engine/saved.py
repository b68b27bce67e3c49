"""A saved step of a run as a network."""

from __future__ import annotations

from sdrseg.config.net import Net
from sdrseg.decision import Decision, read_decision
from sdrseg.engine.folder import RunFolder
from sdrseg.errors import SdrsegError
from sdrseg.network import Network, build_network


def open_step(folder: RunFolder, number: int, net: Net) -> tuple[Network, Decision]:
    """The network after a step, and how its logits become classes."""
    meta, model, _ = folder.load_step(number)
    network = build_network(net, len(meta["classes"]))
    try:
        network.load_state_dict(model)
    except RuntimeError as error:
        raise SdrsegError(f"{folder.step(number)}: the weights do not fit the network of config.json.") from error
    return network, read_decision(meta.get("decision", "softmax"), folder.step(number) / "meta.json")
