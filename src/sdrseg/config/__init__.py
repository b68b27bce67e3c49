"""The configuration: frozen dataclasses, read from TOML and `--set section.key=value`, written as JSON."""

from sdrseg.config.config import Config
from sdrseg.config.read import (
    Layer,
    config_from,
    load_config,
    nested,
    parse_settings,
    read_settings,
    saved_config,
    write_setting,
)

__all__ = [
    "Config",
    "Layer",
    "config_from",
    "load_config",
    "nested",
    "parse_settings",
    "read_settings",
    "saved_config",
    "write_setting",
]
