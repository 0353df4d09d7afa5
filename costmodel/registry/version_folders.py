"""Folders of versions on disk, which are there as a whole or not at all."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from costmodel.registry.aliases import LEFTOVER_SECONDS

WEIGHTS, CARD = "weights.safetensors", "card.json"
#: A card and weights are no larger; those that come with this package have 0.6 MB at most.
MAX_BYTES = {CARD: 1 << 22, WEIGHTS: 1 << 27}
_STAGING = ".publish-"


def store_version(folder: Path, version: str, files: Mapping[str, bytes]) -> None:
    """Writes a version's folder under another name, and renames it when it is complete.

    Raises:
        OSError: If it cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(folder)
    staging = Path(tempfile.mkdtemp(prefix=_STAGING, dir=folder))
    try:
        for name, content in files.items():
            with (staging / name).open("xb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
        staging.chmod(0o755)
        try:
            staging.rename(folder / version)
        except OSError:
            if not (folder / version).is_dir():  # else it was there, or another process was quicker
                raise
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _remove_leftovers(folder: Path) -> None:
    """Removes what publishers left that were killed an hour ago or more."""
    for staging in folder.glob(f"{_STAGING}*"):
        try:
            if time.time() - staging.stat().st_mtime > LEFTOVER_SECONDS:
                shutil.rmtree(staging, ignore_errors=True)
        except FileNotFoundError:  # another process was quicker
            continue
