"""The machine and the versions with which a run is started, for environment.json and the log."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from sdrseg import __version__

PACKAGES = (
    "torch",
    "torchvision",
    "segmentation-models-pytorch",
    "timm",
    "lightning",
    "torchmetrics",
    "numpy",
    "pillow",
)


def environment(device: str, processes: int, data: Path | None) -> dict[str, Any]:
    """Versions, commit, device and the folder of the data set."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "absent"
    return {
        "sdrseg": __version__,
        "commit": source_commit(),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "device": device,
        "processes": processes,
        "cores": os.cpu_count(),
        "data": None if data is None else str(data.resolve()),
        "packages": versions,
    }


def source_commit() -> str | None:
    """The Git commit of this package: $SDRSEG_COMMIT, or that of its checkout; else None."""
    if commit := os.environ.get("SDRSEG_COMMIT"):
        return commit
    root = Path(__file__).resolve().parents[3]
    if not (root / ".git").exists():
        return None
    try:
        done = subprocess.run(["git", "-C", str(root), "rev-parse", "HEAD"], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
