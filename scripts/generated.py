"""Generated files of docs/, which tests compare with what they are generated from."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent


def write_generated(texts: Mapping[str, str], folder: Path) -> int:
    """Writes the files that differ; returns the exit code.

    Args:
        texts: Contents by file name.
        folder: Where the files lie, below `ROOT`.
    """
    for name, text in texts.items():
        path = folder / name
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
            sys.stdout.write(f"wrote {path.resolve().relative_to(ROOT)}\n")
    return 0
