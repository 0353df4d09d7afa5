"""The command line: imports only the command that is asked for, and prints errors in one line."""

from __future__ import annotations

import contextlib
import errno
import gc
import json
import logging
import os
import re
import sys
import textwrap
import warnings
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from typer._click.core import Command
from typer._click.shell_completion import CompletionItem
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command
from typing_extensions import override

from autoshard import __version__
from autoshard.commands.options import as_typer_function
from autoshard.core.errors import AutoshardError, FormatError
from autoshard.core.quoting import printable, shortened
from autoshard.entry_points import installed

ENTRY_POINT_GROUP = "autoshard.commands"
_ABOUT = """Plans how the embedding tables of recommendation models are sharded, and executes the plan.

Example:
    autoshard plan criteo-kaggle --topology cpu-8 -o plan.json
    autoshard run plan.json
"""

#: Commands of this package. Those of other packages are entry points, named and loaded alike.
OWN_COMMANDS: Mapping[str, str] = {
    "doctor": "autoshard.commands.setup:doctor",
    "init": "autoshard.commands.setup:init",
    "detect": "autoshard.commands.setup:detect",
    "list": "autoshard.commands.tables:list_names",
    "import": "autoshard.commands.tables:import_tables",
    "export": "autoshard.commands.tables:export",
    "plan": "autoshard.commands.plan:plan",
    "evaluate": "autoshard.commands.plan:evaluate",
    "compare": "autoshard.commands.compare:compare",
    "run": "autoshard.commands.run:run",
    "show": "autoshard.commands.plan:show",
    "explain": "autoshard.commands.whatif:explain",
    "diff": "autoshard.commands.compare:diff",
    "drift": "autoshard.commands.drift:drift",
    "replan": "autoshard.commands.drift:replan",
    "simulate": "autoshard.commands.whatif:simulate",
    "jobs": "autoshard.commands.jobs:jobs",
    "checkpoint-show": "autoshard.commands.checkpoint:show_checkpoint",
    "checkpoint-verify": "autoshard.commands.checkpoint:verify_checkpoint",
    "checkpoint-reshard": "autoshard.commands.checkpoint:reshard_checkpoint",
    "checkpoint-import": "autoshard.commands.checkpoint:import_checkpoint",
    "checkpoint-export": "autoshard.commands.checkpoint:export_checkpoint",
}
#: Commands that have sub-commands, with their help; `train-cost` becomes `autoshard train cost`.
GROUPS: Mapping[str, str] = {
    "train": """Trains a cost model or a sharding policy, offline.

    Example:
        autoshard train cost --store samples --registry registry
        autoshard train policy --registry registry
    """,
    "checkpoint": """Shows, verifies, imports and exports checkpoints of training jobs.

    Example:
        autoshard checkpoint show checkpoints
        autoshard checkpoint verify checkpoints
    """,
    "keys": """Makes, lists and revokes the keys of the REST service.

    Example:
        autoshard keys create nightly-training --scope plan --scope train
        autoshard keys list
    """,
    "db": """Upgrades the database of the REST service.

    Example:
        autoshard db upgrade
    """,
}

# The order in which a user needs them; commands of other packages follow, by name.
_ORDER = (
    *("doctor", "init", "detect", "list", "import", "calibrate", "collect", "samples", "train", "models"),
    *("plan", "evaluate", "show", "diff", "explain", "export", "replay", "compare", "simulate", "run"),
    *("drift", "replan", "checkpoint"),
    *("serve", "jobs", "keys", "db"),
)

#: New objects after which Python looks for unreachable cycles. Plans for many tables are made of objects that stay:
#: offering their sharding types took 0.87 s for 800 tables on 80 ranks with Python's 700, 0.67 s without collections
#: (CPU time, least of 5 runs, one core of a Xeon at a load of 9, November 2026).
_OBJECTS_PER_COLLECTION = 50_000
#: Logger of how the columns of table lists were read.
_LISTS_LOGGER = "autoshard.formats.imports.table_lists"
_INTERRUPTED = 130
_BAD_INPUT = 2
#: Characters of the option parser's messages, which repeat what was typed.
_USAGE_ROOM = 255


#: First paragraphs of the help of this project's commands, by entry point: generated, so that lists import no command.
SUMMARIES = Path(__file__).parent / "commands" / "summaries.json"


#: Characters of a line of an example, beside the help's indentation and the mark of a line that goes on.
_EXAMPLE_WIDTH = 74


class LazyCommands(Mapping[str, Any]):
    """Commands by name, each imported when it is first asked for."""

    def __init__(self, points: Mapping[str, EntryPoint]) -> None:
        self._points = points
        self._loaded: dict[str, Any] = {}
        self._names = list(dict.fromkeys(_split(name)[0] for name in points))

    def __len__(self) -> int:
        return len(self._names)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __getitem__(self, name: str) -> Any:
        if name not in self._loaded:
            self._loaded[name] = self._load(name)
        return self._loaded[name]

    def listed(self) -> Iterator[tuple[str, Any]]:
        """Names with commands that know their first paragraph; of other installed packages, which package it is.

        No command is imported that is installed.
        """
        known = json.loads(SUMMARIES.read_text(encoding="utf-8"))
        for name in self:
            point = self._points.get(name)
            text = None if point is None else known.get(point.value)
            if text is None and point is not None and point.dist is not None:
                text = f"Comes from {point.dist.name} {point.dist.version}."
            yield name, self[name] if text is None else TyperCommand(name, help=text)

    def _load(self, name: str) -> Any:
        if name not in GROUPS:
            if name not in self._points:
                raise KeyError(name)
            return _command(self._points[name], name)
        inner = {sub: point for key, point in self._points.items() for top, sub in [_split(key)] if top == name and sub}
        group = _LazyGroup(name=name, help=_help_text(GROUPS[name]), rich_markup_mode=None)
        group.commands = LazyCommands(inner)  # type: ignore[assignment]
        return group


class _LazyGroup(TyperGroup):
    """A group that lists its commands without importing them."""

    @override
    def list_commands(self, ctx: Any) -> list[str]:
        """The commands' names, in the order of the help."""
        return list(self.commands)

    @override
    def format_commands(self, ctx: Any, formatter: Any) -> None:
        limit = formatter.width - 6 - max(map(len, self.commands), default=0)
        with formatter.section("Commands"):
            formatter.write_dl([(name, command.get_short_help_str(limit)) for name, command in self._listed()])

    @override
    def shell_complete(self, ctx: Any, incomplete: str) -> list[CompletionItem]:
        found = [(name, command) for name, command in self._listed() if name.startswith(incomplete)]
        items = [CompletionItem(name, help=command.get_short_help_str()) for name, command in found]
        return items + Command.shell_complete(self, ctx, incomplete)

    def _listed(self) -> Iterator[tuple[str, Any]]:
        commands: Any = self.commands
        return commands.listed()  # type: ignore[no-any-return]


class _PanelledCommand(TyperCommand):
    """A command whose help lists options under the headings of their panels; typer does so with markup only."""

    @override
    def format_options(self, ctx: Any, formatter: Any) -> None:
        panels: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            usual = "Arguments" if parameter.param_type_name == "argument" else "Options"
            if record is not None:
                panels.setdefault(getattr(parameter, "rich_help_panel", None) or usual, []).append(record)
        for panel, records in panels.items():
            with formatter.section(panel):
                formatter.write_dl(records)


def main(args: Sequence[str] | None = None) -> int:
    """Runs the command line of autoshard, see `run_commands`."""
    gc.set_threshold(_OBJECTS_PER_COLLECTION)
    return run_commands(command_points(), args, program="autoshard", about=_ABOUT)


def command_tree(points: Mapping[str, EntryPoint] | None = None) -> TyperGroup:
    """Commands of a program, each imported at its first use.

    Args:
        points: The commands by name; those of autoshard when left out.
    """
    return _root(command_points() if points is None else points, _ABOUT, completes=True)


def run_commands(points: Mapping[str, EntryPoint], args: Sequence[str] | None, *, program: str, about: str) -> int:
    """Runs one of several commands.

    Args:
        points: What can be run, by name, in the order of the help; loaded when it is asked for.
        args: Arguments without the program's name; those of the process when left out.
        program: What users type before the name of a command.
        about: What the program does, for its help.

    Returns:
        The exit code: 0 done, 2 bad input, 3 no feasible plan, 130 interrupted, 1 anything else.
    """
    _own_location_first()
    for stream in (sys.stdout, sys.stderr):
        # Names of tables may hold characters that the terminal's encoding does not have.
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    arguments = list(sys.argv[1:] if args is None else args)
    try:
        with _logged_warnings():
            code = _root(points, about, completes=" " not in program).main(
                arguments or ["--help"], prog_name=program, standalone_mode=False
            )
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except typer.Abort:
        return _fail("aborted", 1)
    except typer.TyperException as error:
        return _fail(shortened(error.format_message(), _USAGE_ROOM) + _usage_hint(error), error.exit_code)
    except AutoshardError as error:
        for fault in error.faults if isinstance(error, FormatError) and error.faults else [error]:
            _fail(str(fault), error.exit_code)
        return error.exit_code
    except BrokenPipeError:  # the reader of our output has left
        _drop_output()
        return 1
    except OSError as error:
        code = _fail(_os_error_text(error), _os_error_code(error))
        try:
            sys.stdout.flush()
        except OSError:
            _drop_output()
        return code
    except MemoryError:
        return _fail("out of memory", 1)
    except KeyboardInterrupt:
        return _INTERRUPTED


def _root(points: Mapping[str, EntryPoint], about: str, *, completes: bool) -> TyperGroup:
    """The program; `completes` adds options that make shells complete its words."""

    def root(
        version: Annotated[
            bool,
            typer.Option(
                "--version",
                callback=_print_version,
                is_eager=True,
                help="Print the version, and on standard error which packages are missing.",
            ),
        ] = False,
    ) -> None:
        pass

    app = typer.Typer(add_completion=completes, rich_markup_mode=None, cls=_LazyGroup)
    app.callback(help=_help_text(about))(root)
    group = get_command(app)
    assert isinstance(group, TyperGroup)
    group.commands = LazyCommands(points)  # type: ignore[assignment]
    return group


def _print_version(wanted: bool) -> None:
    if wanted:
        from autoshard.commands.packages import missing_packages

        sys.stdout.write(f"autoshard {__version__}\n")
        sys.stderr.write("".join(f"missing: {line}\n" for line in missing_packages()))
        raise typer.Exit


def command_points() -> dict[str, EntryPoint]:
    """The commands of this library and of installed packages, by name; none of them is imported."""
    own = {name: EntryPoint(name=name, value=value, group=ENTRY_POINT_GROUP) for name, value in OWN_COMMANDS.items()}
    found = {**{point.name: point for point in installed(ENTRY_POINT_GROUP)}, **own}
    first = {name: index for index, name in enumerate(_ORDER)}
    return dict(sorted(found.items(), key=lambda item: (first.get(_split(item[0])[0], len(first)), item[0])))


def _split(name: str) -> tuple[str, str]:
    top, _, sub = name.partition("-")
    return (top, sub) if top in GROUPS and sub else (name, "")


def _command(point: EntryPoint, name: str) -> Any:
    try:
        function = point.load()
    except Exception as error:  # noqa: BLE001 - one damaged plugin must not take the others' help away
        reason = str(error) if isinstance(error, ImportError | AttributeError) else f"{type(error).__name__}: {error}"
        return _unavailable(name, f"{point.value} cannot be loaded: {reason}")
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    app.command(name, cls=_PanelledCommand, help=_help_text(function.__doc__))(as_typer_function(function))
    return get_command(app)


def _unavailable(name: str, reason: str) -> Any:
    def fail() -> NoReturn:
        raise AutoshardError(reason, source=name)

    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    settings = {"ignore_unknown_options": True, "allow_extra_args": True}
    app.command(name, help=f"Unavailable: {reason}", context_settings=settings)(fail)
    return get_command(app)


def _help_text(docstring: str | None) -> str:
    """A docstring without its sections for programmers; paragraphs with indented lines stay as they are."""
    text = re.split(r"\n\s*(?:Args|Returns|Raises|Source):\s*\n", docstring or "")[0]
    lines = [line.rstrip() for line in text.splitlines()]
    margin = min((len(line) - len(line.lstrip()) for line in lines[1:] if line), default=0)
    paragraphs = "\n".join([*lines[:1], *(line[margin:] for line in lines[1:])]).strip().split("\n\n")
    return "\n\n".join(_folded(part) if re.search(r"^ +\S", part, re.MULTILINE) else part for part in paragraphs)


def _folded(example: str) -> str:
    """A paragraph shown as it is; commands that do not fit a terminal of 80 columns go on in the next line."""
    lines = ["\b"]
    for line in example.splitlines():
        # An option's value stays on its line.
        bound = re.sub(r"( --?[a-z-]+) (?=[^-\s])", "\\1\x00", line)
        folded = textwrap.wrap(
            bound, _EXAMPLE_WIDTH, subsequent_indent="        ", break_long_words=False, break_on_hyphens=False
        )
        lines.append(" \\\n".join(folded).replace("\x00", " ") if line.startswith(" ") else line)
    return "\n".join(lines)


def _usage_hint(error: typer.TyperException) -> str:
    context = getattr(error, "ctx", None)
    return f" (see {context.command_path} --help)" if context is not None else ""


@contextlib.contextmanager
def _logged_warnings() -> Iterator[None]:
    """Prints warnings, logged ones and Python's, and how table lists were read, as lines of standard error.

    `autoshard serve` has logs of its own.
    """

    class Lines(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            _write_line(f"{'warning: ' if record.levelno >= logging.WARNING else ''}{record.getMessage()}")

    def show(message: Warning | str, *_: object, **__: object) -> None:
        _write_line(f"warning: {message}")

    handler, lists = Lines(), logging.getLogger(_LISTS_LOGGER)
    handler.addFilter(lambda record: record.levelno >= logging.WARNING or record.name == _LISTS_LOGGER)
    logging.getLogger().addHandler(handler)
    lists.setLevel(logging.INFO)
    try:
        with warnings.catch_warnings():
            warnings.showwarning = show
            yield
    finally:
        logging.getLogger().removeHandler(handler)
        lists.setLevel(logging.NOTSET)


def _own_location_first() -> None:
    """Puts this installation first on `sys.path`: others may have an `env` or a `server` too."""
    location = str(Path(__file__).resolve().parent.parent)
    sys.path[:] = [location, *(entry for entry in sys.path if entry != location)]


def _os_error_text(error: OSError) -> str:
    name = error.filename.decode(errors="replace") if isinstance(error.filename, bytes) else error.filename
    text = error.strerror or str(error)
    if name is None:
        return text
    return f"{shortened(str(name)) if error.errno == errno.ENAMETOOLONG else name}: {text}"


def _os_error_code(error: OSError) -> int:
    bad_path = FileNotFoundError | IsADirectoryError | NotADirectoryError | PermissionError
    return _BAD_INPUT if isinstance(error, bad_path) or error.errno == errno.ENAMETOOLONG else 1


def _fail(message: str, code: int) -> int:
    _write_line(f"error: {message.replace('Value error, ', '')}")
    return code


def _drop_output() -> None:
    """Sees to it that what is still buffered is not written at exit, where Python would fail, too."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _write_line(message: str) -> None:
    with contextlib.suppress(OSError):  # when nobody listens any more, the exit code still says it
        sys.stderr.write(printable(" ".join(message.split())) + "\n")
