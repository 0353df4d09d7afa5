"""What every command does alike: one JSON object on standard output, progress and logs on standard error.

Names of tables, files and devices come from anybody. Brackets in them are printed as they are, though rich would take
them for its markup; characters that a terminal obeys are printed as escapes (`printable`).
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Any, TextIO

import typer
from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.segment import Segment
from rich.text import Text

from autoshard.core.quoting import printable

#: The `--json` option, to be used as a parameter's annotation by every command.
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output.")]

Advance = Callable[[float], None]

_line_every_s: float | None = None

# Files and pipes have no width of their own, and rich would cut tables at 80 columns.
_WIDTH_WITHOUT_TERMINAL = 160


def log(message: RenderableType) -> None:
    """Prints a line for the user on standard error."""
    _print(sys.stderr, message)


def emit(result: Mapping[str, object], rendered: RenderableType, *, as_json: bool) -> None:
    """Prints a command's result on standard output: the object as JSON, or its rendering for people."""
    if as_json:
        # json escapes all that is not ASCII and the control characters below the space, but not DEL.
        sys.stdout.write(json.dumps(result, indent=2, allow_nan=False).replace("\x7f", "\\u007f") + "\n")
    else:
        _print(sys.stdout, rendered)


def print_progress(every_s: float) -> None:
    """Has this process print how far its work is, a line on standard error every few seconds, as logs want it."""
    global _line_every_s
    _line_every_s = every_s


@contextmanager
def progress(description: str, total: float, *, is_shown: bool = True) -> Iterator[Advance]:
    """A progress bar on standard error; yields a function that advances it. Silent without a terminal.

    Args:
        description: Text before the bar.
        total: Amount of all work.
        is_shown: False for a silent one, in processes whose work another one reports.
    """
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, **_shown_while_busy(is_shown=is_shown)) as bar:
        task = bar.add_task(description, total=total)

        def line(elapsed_s: float) -> str:
            done = bar.tasks[0].completed
            left = f", about {elapsed_s * (total / done - 1):.0f} s left" if 0 < done < total else ""
            return f"{description}: {done:,.0f} of {total:,.0f} after {elapsed_s:.0f} s{left}"

        with _lines(line, is_shown=is_shown):
            yield lambda amount: bar.advance(task, amount)


@contextmanager
def until(description: str, limit_s: float) -> Iterator[None]:
    """A bar on standard error that runs towards a time limit, whatever the work reports. Silent without a terminal.

    Args:
        description: Text before the bar.
        limit_s: Seconds from now at which the bar is full; work that goes on is timed further.
    """
    time = TextColumn("{task.elapsed:.0f} of {task.total:g} s", markup=False)
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), time)
    with _Clock(*columns, **_shown_while_busy()) as bar:
        bar.add_task(description, total=limit_s)
        with _lines(lambda elapsed_s: f"{description}: {elapsed_s:.0f} of {limit_s:g} s"):
            yield


@contextmanager
def working(description: str) -> Iterator[None]:
    """Shows on standard error that work of unknown length goes on, and for how long. Silent without a terminal."""
    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    with Progress(*columns, **_shown_while_busy()) as bar:
        bar.add_task(description, total=None)
        with _lines(lambda elapsed_s: f"{description}: {elapsed_s:.0f} s"):
            yield


@contextmanager
def _lines(text: Callable[[float], str], *, is_shown: bool = True) -> Iterator[None]:
    """Prints a text of the seconds that work has taken, again and again until it ends, if the process asked for it."""
    if _line_every_s is None or not is_shown:
        yield
        return
    every_s, started_s, has_ended = _line_every_s, time.monotonic(), threading.Event()

    def tell() -> None:
        while not has_ended.wait(every_s):
            log(text(time.monotonic() - started_s))

    teller = threading.Thread(target=tell, daemon=True)
    teller.start()
    try:
        yield
    finally:
        has_ended.set()
        teller.join()


def _shown_while_busy(*, is_shown: bool = True) -> dict[str, Any]:
    """Settings of bars: on standard error if that is a terminal, and removed at the end."""
    console = _PrintableConsole(stderr=True)
    return {"console": console, "transient": True, "disable": not (is_shown and console.is_terminal)}


class _Clock(Progress):
    """Bars of tasks that are as far as the time that they have taken."""

    def get_renderables(self) -> Iterable[RenderableType]:
        for task in self.tasks:
            task.completed = min(task.elapsed or 0.0, task.total or 0.0)
        return super().get_renderables()


class _PrintableConsole(Console):
    """Escapes texts before they are laid out, and whatever else comes out of a renderable (`Text` for one)."""

    def render_str(self, text: str, **settings: Any) -> Text:
        return super().render_str(printable(text), **settings)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=printable(segment.text))


def _print(stream: TextIO, message: RenderableType) -> None:
    width = None if stream.isatty() else _WIDTH_WITHOUT_TERMINAL
    console = _PrintableConsole(file=stream, width=width, highlight=False, markup=False, emoji=False)
    console.print(message, soft_wrap=isinstance(message, str))
