"""From a specification and a folder to a scenario."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sdrseg.config import load_config
from sdrseg.datasets import open_source, read_spec
from sdrseg.datasets.index import class_index
from sdrseg.scenario import Scenario, build_scenario


def open_scenario(spec: str, data: str | Path | None = None, settings: Mapping[str, Any] | None = None) -> Scenario:
    """The steps of a specification on a data set. Its masks are read once and the counts cached.

    `data`: the folder of the data set. `settings`: such as {"data.left_out": "background"}.
    """
    parsed = read_spec(spec)
    config = load_config(parsed.source, None, settings)
    source = open_source(parsed.source, None if data is None else Path(data), config)
    train, val = class_index(source, "train"), class_index(source, "val")
    for index in (train, val):
        index.require_sound(source)
    return build_scenario(parsed, source, train, val, **config.scenario_policy())
