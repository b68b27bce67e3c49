"""From "voc:15-1@disjoint" to steps. Pure data: no torch, and no files except the published lists in the package."""

from sdrseg.scenario.registry import SOURCES, declarations, find_source, saved_source
from sdrseg.scenario.spec import PROTOCOLS, Spec, class_lists, parse_spec
from sdrseg.scenario.steps import Scenario, Step, build_scenario

__all__ = [
    "PROTOCOLS",
    "SOURCES",
    "Scenario",
    "Spec",
    "Step",
    "build_scenario",
    "class_lists",
    "declarations",
    "find_source",
    "parse_spec",
    "saved_source",
]
