"""How `python -m bench.…` runs: options by typer, errors in one line, as `autoshard` prints them."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable

import typer

from autoshard import console
from autoshard.core.errors import AutoshardError


def run_program(command: Callable[..., None]) -> None:
    """Runs a function as a program; ends the process with its exit code."""
    try:
        typer.run(command)
    except AutoshardError as error:
        console.log(f"error: {error}")
        sys.exit(error.exit_code)


def command_line(module: str, **options: object) -> str:
    """What to type to run a program with these options; those that are None are left out."""
    words = ["python", "-m", module]
    for name, value in options.items():
        if value is not None:
            words += [f"--{name.replace('_', '-')}", f"{value:g}" if isinstance(value, float) else str(value)]
    return shlex.join(words)
