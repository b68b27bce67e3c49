"""HEIC, the format of photographs from phones, which Pillow reads with the package pillow-heif."""

from __future__ import annotations

from pathlib import Path

from sdrseg.errors import DataError

HEIF = frozenset({".heic", ".heif"})


def allow_heif(path: Path) -> None:
    """Call this before Pillow opens a file."""
    if path.suffix.lower() in HEIF:
        try:
            from pillow_heif import register_heif_opener
        except ImportError as error:
            raise DataError(f"{path}: a HEIC photograph. To read it, run pip install 'sdrseg[heif]'.") from error
        register_heif_opener()
