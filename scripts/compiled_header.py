"""Writes the header of the compiled search: `python -m scripts.compiled_header`; a test compares it."""

from __future__ import annotations

import sys
from typing import Final

from autoshard.planners.hybrid.compiled.library import header
from scripts.generated import ROOT, write_generated

FOLDER: Final = ROOT / "autoshard/planners/hybrid/compiled"


def headers() -> dict[str, str]:
    """The header, by its name in `FOLDER`."""
    return {"task.h": header()}


if __name__ == "__main__":
    sys.exit(write_generated(headers(), FOLDER))
