"""What settings must not be together: refused before anything is trained, by `train` and before a queue begins."""

from __future__ import annotations

from collections.abc import Sequence

from sdrseg.config import Config
from sdrseg.engine.class_weights import require_class_weights
from sdrseg.methods import Method
from sdrseg.methods.importance import require_penalty
from sdrseg.methods.latent import require_official


def require_possible(
    method: type[Method],
    config: Config,
    *,
    processes: int = 1,
    classes: Sequence[str] | None = None,
    steps: int | None = None,
) -> None:
    """Raise an error if a run with this configuration is not possible. `classes`, `steps`: None without the data."""
    if steps is not None:
        config.require_steps(steps)
    require_official(config, processes)
    if classes is not None:
        require_class_weights(config, classes)
    require_penalty(method, config)
