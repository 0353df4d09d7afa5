"""What every command does alike: one JSON object on standard output, progress and logs on standard error."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated

import typer
from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

#: The `--json` option, to be used as a parameter's annotation by every command.
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output.")]

Advance = Callable[[float], None]


def log(message: RenderableType) -> None:
    """Prints a line for the user on standard error."""
    Console(stderr=True, highlight=False).print(message)


def emit(result: Mapping[str, object], rendered: RenderableType, *, as_json: bool) -> None:
    """Prints a command's result on standard output: the object as JSON, or its rendering for people."""
    if as_json:
        json.dump(result, sys.stdout, indent=2, allow_nan=False)
        sys.stdout.write("\n")
    else:
        Console(highlight=False).print(rendered)


@contextmanager
def progress(description: str, total: float) -> Iterator[Advance]:
    """A progress bar on standard error; yields a function that advances it. Without a terminal it stays silent."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(description, total=total)
        yield lambda amount: bar.advance(task, amount)
