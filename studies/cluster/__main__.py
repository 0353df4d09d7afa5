"""The command `python -m studies.cluster NAME`: measures a cluster on this machine, or runs a plan on it."""

from __future__ import annotations

import sys
from importlib.metadata import EntryPoint
from typing import Final

from autoshard.cli import run_commands

_PROGRAM: Final = "python -m studies.cluster"
_COMMANDS: Final = ("measure", "run")


def main(arguments: list[str] | None = None) -> int:
    """Runs a command; returns the exit code, as `autoshard.cli.main` does."""
    points = {
        name: EntryPoint(name=name, value=f"studies.cluster.commands:{name}", group=_PROGRAM) for name in _COMMANDS
    }
    about = "Sets up a cluster of network namespaces on this machine, for testing: needs Linux, root and iproute2."
    return run_commands(points, arguments, program=_PROGRAM, about=about)


if __name__ == "__main__":
    sys.exit(main())
