"""What every command does alike: one JSON object on standard output, progress and logs on standard error.

Texts are printed as they are: names of tables may hold brackets, which rich would take for its markup.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, TextIO

import typer
from rich.console import Console, RenderableType
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

#: The `--json` option, to be used as a parameter's annotation by every command.
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output.")]

Advance = Callable[[float], None]

# Files and pipes have no width of their own, and rich would cut tables at 80 columns.
_WIDTH_WITHOUT_TERMINAL = 160


def log(message: RenderableType) -> None:
    """Prints a line for the user on standard error."""
    _print(sys.stderr, message)


def emit(result: Mapping[str, object], rendered: RenderableType, *, as_json: bool) -> None:
    """Prints a command's result on standard output: the object as JSON, or its rendering for people."""
    if as_json:
        sys.stdout.write(json.dumps(result, indent=2, allow_nan=False) + "\n")
    else:
        _print(sys.stdout, rendered)


@contextmanager
def progress(description: str, total: float) -> Iterator[Advance]:
    """A progress bar on standard error; yields a function that advances it. Silent without a terminal."""
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(description, total=total)
        yield lambda amount: bar.advance(task, amount)


@contextmanager
def working(description: str) -> Iterator[None]:
    """Shows on standard error that work of unknown length goes on, and for how long. Silent without a terminal."""
    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        bar.add_task(description, total=None)
        yield


def _print(stream: TextIO, message: RenderableType) -> None:
    width = None if stream.isatty() else _WIDTH_WITHOUT_TERMINAL
    console = Console(file=stream, width=width, highlight=False, markup=False, emoji=False)
    console.print(message, soft_wrap=isinstance(message, str))
