"""Custom methods: a Python file instead of a name, and how its code enters the keys of bases."""

from __future__ import annotations

import hashlib
import inspect
import sys
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sdrseg.errors import UsageError
from sdrseg.methods.base import Method
from sdrseg.methods.latent import LatentSpace
from sdrseg.own_files import OWN, run_file

_DIGESTS: dict[Callable[..., Any], str] = {}


def load_method_file(text: str, known: dict[str, type[Method]]) -> str:
    """Run FILE.py, or FILE.py:NAME if the file registers several methods, and return the name of the method."""
    head, colon, wanted = text.rpartition(":")
    file, wanted = (Path(head), wanted) if colon and head.endswith(".py") else (Path(text), "")
    names = run_file(file, known)
    if not names:
        raise UsageError(f"{file}: registers no method. Put @sdrseg.register_method above your class.")
    if wanted and wanted not in names:
        raise UsageError(f"{text}: {file} registers no method {wanted!r}, but {', '.join(names)}.")
    if not wanted and len(names) > 1:
        raise UsageError(f"{file}: registers {', '.join(names)}. Choose one: {file}:{names[0]}")
    return wanted or names[0]


def file_digest(method: type[Method]) -> str:
    """The start of the SHA-256 of the file of a custom method, "" for a method given by name."""
    return source_digest(method)[:12] if method.__module__.startswith(OWN) else ""


def require_appeared(method: Method, seen: Collection[str]) -> None:
    """Raise an error if a step lacks a term that has a weight."""
    step = method.step.number
    terms = {term.name: term for term in method.known_terms}
    for name, weight in method.weights().items():
        excused = name in terms and not terms[name].expected(method.config, step, method.teacher is not None)
        if weight > 0 and name not in seen and not excused:
            hint = "" if method.teacher is not None else " (there is no teacher in this step)"
            raise UsageError(
                f"method {method.name}: the term {name!r} has weight {weight:g}, but nothing returned it in the first "
                f"epoch of step {step}{hint}. Return it from its compute function or from more_terms(), or set its "
                f"weight to 0."
            )


def require_super(method: Method, hook: str, attribute: str) -> None:
    """Raise an error if a hook of a custom method did not call the one it overrides, which sets an attribute."""
    if not hasattr(method, attribute):
        raise UsageError(f"method {method.name}: its {hook} has to call super().{hook}(…).")


def require_state_dict(method: Method) -> None:
    """Raise an error if the state of a custom method cannot be saved, or lacks that of its class: before training."""
    state = method.state_dict()
    for name, value in state.items():
        if not isinstance(value, Tensor):
            raise UsageError(
                f"method {method.name}: its state_dict() has {name!r} of type {type(value).__name__}. Save tensors, "
                f"such as torch.tensor({value!r})."
            )
    if missing := sorted(method.latent.state_dict().keys() - state.keys()):
        raise UsageError(f"method {method.name}: its state_dict() lacks {missing[0]}. Begin with super().state_dict().")


def require_loaded(method: Method, state: Mapping[str, Tensor]) -> None:
    """Raise an error if a custom `load_state_dict` leaves out the state of its class."""
    expected = LatentSpace(method.config, method.processes)
    expected.load_state_dict(state)
    loaded = method.latent.state_dict()
    for name, value in expected.state_dict().items():
        if name not in loaded or not torch.equal(value.cpu(), loaded[name].cpu()):
            raise UsageError(
                f"method {method.name}: its load_state_dict() does not load {name}. Begin with "
                f"super().load_state_dict(state)."
            )


def require_weights(method: Method) -> None:
    """Raise an error if a custom `weights` lacks configured weights: their terms would have weight 1."""
    if dropped := [name for name in Method.weights(method) if name not in method.weights()]:
        raise UsageError(
            f"method {method.name}: its weights() leaves out {', '.join(dropped)}. Begin with super().weights()."
        )
    added = [name for name in method.weights() if name not in Method.weights(method)]
    kind = type(method)
    if added and kind.more_terms is Method.more_terms and kind.terms is Method.terms:
        raise UsageError(
            f"method {method.name}: its weights() names {', '.join(added)}, but nothing computes that. Write a method "
            f"more_terms() that returns it (or check its spelling)."
        )


def source_digest(custom: Callable[..., Any]) -> str:
    """SHA-256 of the code of a custom method, or of a function; "" for built-in ones: changed code does not share its
    earlier bases.

    That of the moment when a method was registered, which is the code that runs: the file may be edited meanwhile.
    """
    while isinstance(custom, partial):
        custom = custom.func
    if custom.__module__.startswith("sdrseg."):
        return ""
    if custom not in _DIGESTS:
        _DIGESTS[custom] = _digest(custom)
    return _DIGESTS[custom]


def _digest(custom: Callable[..., Any]) -> str:
    file = getattr(sys.modules.get(custom.__module__), "__file__", None)
    try:
        code = Path(file).read_bytes() if file else inspect.getsource(custom).encode()
    except (OSError, TypeError):
        return "unknown"
    return hashlib.sha256(code).hexdigest()
