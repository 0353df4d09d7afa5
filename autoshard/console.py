"""What every command does alike: one JSON object on standard output, progress and logs on standard error.

Names of tables, files and devices come from anybody. Brackets in them are printed as they are, though rich would take
them for its markup; characters that a terminal obeys are printed as escapes (`printable`).
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from copy import copy
from typing import Annotated, Any, TextIO

import typer
from rich.console import Console, ConsoleOptions, RenderableType
from rich.measure import Measurement
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.protocol import rich_cast
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from autoshard.core.quoting import printable

#: The `--json` option, to be used as a parameter's annotation by every command.
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output.")]

Advance = Callable[[float], None]

_line_every_s: float | None = None

# Files and pipes have no width of their own unless $COLUMNS says it, and rich would take 80.
_WIDTH_WITHOUT_TERMINAL = 160


def log(message: RenderableType) -> None:
    """Prints a line for the user on standard error."""
    _print(sys.stderr, message)


def warn(message: str) -> None:
    """Prints a warning on standard error."""
    log(f"warning: {message}")


def emit(result: Mapping[str, object], rendered: RenderableType, *, as_json: bool, kind: str = "") -> None:
    """Prints a command's result on standard output: the object as JSON, or its rendering for people.

    Args:
        result: The object.
        rendered: The same for people.
        as_json: Which of both.
        kind: Kind of result, by which the JSON names its version; empty for an object that names it itself.
    """
    if as_json:
        named = {"schema": f"autoshard.{kind}/1", **result} if kind else result
        # json escapes all that is not ASCII and the control characters below the space, but not DEL.
        sys.stdout.write(json.dumps(named, indent=2, allow_nan=False).replace("\x7f", "\\u007f") + "\n")
    else:
        _print(sys.stdout, rendered)


def print_progress(every_s: float | None) -> None:
    """Has this process print how far its work is, a line on standard error every few seconds, as logs want it.

    Args:
        every_s: Seconds between two lines; None for no lines, as at first.
    """
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
def step_progress(description: str) -> Iterator[Callable[[int, int], None]]:
    """A progress bar of something whose steps become known on the way; yields what is told how many are done of all."""
    with progress(description, 1.0) as advance:
        before = 0

        def on_step(done: int, total: int) -> None:
            nonlocal before
            advance((done - before) / total)
            before = done

        yield on_step


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
        width = (options or self.options).max_width
        renderable = rich_cast(renderable)
        fitting = _fitted(renderable, self, width) if isinstance(renderable, Table) else (renderable,)
        for index, part in enumerate(fitting):
            if index:
                yield Segment.line()
            for segment in super().render(part, options):
                yield segment if segment.control else segment._replace(text=printable(segment.text))


def _fitted(table: Table, console: Console, width: int) -> Iterator[Table]:
    """The table, or one below the other where its columns do not fit: each begins with the first column.

    rich alone narrows columns down to breaking words and numbers.
    """
    ranges = [table._measure_column(console, console.options.update(width=10_000), one) for one in table.columns]
    room = width - table._extra_width
    if not ranges or sum(one.maximum for one in ranges) <= room:
        yield table
        return
    parts: list[list[int]] = [[0]]
    for index, least in enumerate(ranges[1:], start=1):
        if len(parts[-1]) > 1 and sum(ranges[one].minimum for one in parts[-1]) + least.minimum > room:
            parts.append([0])
        parts[-1].append(index)
    for part in parts:
        yield _part_of(table, part, _widths([ranges[index] for index in part], room))


def _widths(ranges: Sequence[Measurement], room: int) -> list[int]:
    """Widths between least and most that fill the room; columns that need little more get it first."""
    widths = [one.minimum for one in ranges]
    spare = room - sum(widths)
    for index in sorted(range(len(ranges)), key=lambda one: ranges[one].maximum - ranges[one].minimum):
        more = max(min(spare, ranges[index].maximum - widths[index]), min(0, spare))
        widths[index], spare = max(1, widths[index] + more), spare - more
    return widths


def _part_of(table: Table, indices: Sequence[int], widths: Sequence[int]) -> Table:
    """Some of a table's columns, with set widths (padding included)."""
    part = copy(table)
    part.columns = [copy(table.columns[index]) for index in indices]
    for index, (column, width) in enumerate(zip(part.columns, widths, strict=True)):
        column._index = index
        column.min_width = column.max_width = None
        column.width = max(1, width - part._get_padding_width(index))
        column.no_wrap, column.overflow = False, "fold"
    return part


def _print(stream: TextIO, message: RenderableType) -> None:
    width = _width(stream)
    console = _PrintableConsole(
        file=stream, width=width or _WIDTH_WITHOUT_TERMINAL, highlight=False, markup=False, emoji=False
    )
    # Messages stay lines that can be searched; sentences of results are wrapped where there is a width.
    is_line = isinstance(message, str) and (stream is sys.stderr or width is None)
    console.print(message, soft_wrap=is_line)


def _width(stream: TextIO) -> int | None:
    """Columns of $COLUMNS, or of the terminal that the stream is; None where neither says it."""
    columns = os.environ.get("COLUMNS", "")
    if columns.isdigit() and int(columns) > 0:
        return int(columns)
    with suppress(OSError, ValueError):  # rich would take the size of standard input's terminal
        return os.get_terminal_size(stream.fileno()).columns or None
    return None
