"""Continual semantic segmentation: learn new classes without the old images and without forgetting the old classes.

`import sdrseg` is light; PyTorch is imported when one of the names below is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sdrseg.config.setting import setting
    from sdrseg.datasets import register_source
    from sdrseg.datasets.inspect import data_facts as data
    from sdrseg.datasets.source import Source
    from sdrseg.engine.rescore import score_again as evaluate
    from sdrseg.engine.run import train
    from sdrseg.exporting import export_model as export
    from sdrseg.methods import Method, register_method
    from sdrseg.methods.base import From
    from sdrseg.methods.terms import Term, register_term
    from sdrseg.predict import Model, Prediction, load
    from sdrseg.reporting import write_report as report
    from sdrseg.scenario import Scenario

__version__ = "0.1.0.dev0"

__all__ = [
    "From",
    "Method",
    "Model",
    "Prediction",
    "Scenario",
    "Source",
    "Term",
    "__version__",
    "data",
    "evaluate",
    "export",
    "load",
    "register_method",
    "register_source",
    "register_term",
    "report",
    "setting",
    "train",
]

_MODULES = {
    "From": "sdrseg.methods.base",
    "Method": "sdrseg.methods",
    "Model": "sdrseg.predict",
    "Prediction": "sdrseg.predict",
    "Scenario": "sdrseg.scenario",
    "Source": "sdrseg.datasets.source",
    "Term": "sdrseg.methods.terms",
    "data": "sdrseg.datasets.inspect:data_facts",
    "evaluate": "sdrseg.engine.rescore:score_again",
    "export": "sdrseg.exporting:export_model",
    "load": "sdrseg.predict",
    "register_method": "sdrseg.methods",
    "register_source": "sdrseg.datasets",
    "register_term": "sdrseg.methods.terms",
    "setting": "sdrseg.config.setting",
    "train": "sdrseg.engine.run",
    "report": "sdrseg.reporting:write_report",
}


if not TYPE_CHECKING:  # type checkers know the names from the imports above, and no others

    def __getattr__(name: str) -> Any:
        if name not in _MODULES:
            raise AttributeError(f"module 'sdrseg' has no attribute {name!r}")
        module, _, attribute = _MODULES[name].partition(":")
        return getattr(import_module(module), attribute or name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_MODULES])
