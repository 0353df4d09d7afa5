"""Command lines, drawn from the command tree itself: every command and option, new ones included."""

import enum
import os
import types
import typing
from dataclasses import dataclass
from pathlib import Path

from hypothesis import strategies as st

from autoshard.cli import LazyCommands, command_points
from tests.fuzz.mutations import TEXTS

#: Not drawn: `--ray` starts a cluster, or waits for one; `--image` a browser, which takes seconds and answers no forked
#: process.
NOT_DRAWN = {"ray", "help", "image"}
#: Commands that measure, train or serve for long when nothing is wrong: they always get something that is.
LONG = {
    *(("calibrate",), ("collect",), ("replay",), ("run",), ("serve",)),
    *(("train", "cost"), ("train", "policy"), ("train", "step")),
}
#: Values that make what a command does short, where it has the option; the last ones for commands of `LONG` only.
SHORT = {"time_limit": "0.01", "ranks": "2,4", "batches": "2"}
SHORTEST = {
    "seconds": "0.1",
    "num_samples": "1",
    "updates": "1",
    "num_updates": "1",
    "num_tasks": "2",
    "num_tables": "3",
    "num_ranks": "2",
    "steps": "1",
    "nproc": "2",
    "repeats": "1",
    "rounds": "1",
    "num_actors": "0",
    "max_tables": "2",
}
#: No address of this machine: the service ends.
ALWAYS = {"host": "192.0.2.1"}
#: Values that an option can have, by its name; others are found by their types.
GOOD = {
    "tables": ("tables.json", "nvidia-tiny"),
    "topology": ("topology.json", "cpu-4"),
    "plan": ("plan.json", "flex.json"),
    "start": ("plan.json", "flex.json"),
    "planner": (
        "cost-greedy",
        "random",
        "auto",
        "flexshard",
        "oper",
        "neo",
        "replica-groups",
        "karmarkar-karp",
        "neuroshard",
        "policy",
    ),
    "planners": ("random,cost-greedy", "random", "auto,neo"),
    "registry": ("registry", "empty"),
    "store": ("store", "empty"),
    "source": (
        *("tables.json", "ids.parquet", "ids.pt", "batch.pt", "batch.pt.gz", "tbe.json", "counts.parquet"),
        *("tables.yaml", "list.csv", "hugectr.json", "models.py", "models.py:tiny", "dlrm.sh"),
    ),
    "format": (
        *("table-list", "hugectr", "nvidia-models", "dlrm-command"),
        *("id-batches", "tables-json", "tbe-data-config", "dlrm-datasets", "row-counts", "bundled"),
    ),
    "settings": (
        "seed=1",
        "embedding_dim=8",
        "batch_size=8",
        "num_samples=9",
        "random.x=1",
        "auto.sharding_types=table_wise",
    ),
    "device": ("cpu", "auto", "cuda"),
    "output": ("out.json", "tables.json"),
    "output_dir": ("out",),
    "html": ("out.html",),
    "report": ("out.html",),
    "replayed": ("replay.json",),
    "part": ("1/2",),
    "ranks": ("2,4", "2"),
    "groups": ("1,2",),
    "overlap": ("none", "neo", "neo_prefetch", "pipelined"),
    "lengths": ("declared", "constant"),
    "what": ("kernels", "dense", "kernels,dense", "tables", "planners"),
    "where": ("random=3,slices=1",),
    "engine": ("thin", "torchrec"),
    "kind": ("cost", "policy", "step"),
    "version": ("production", "0123456789abcdef"),
    "alias": ("production", "candidate"),
    "objective": ("balance", "step"),
    "table": ("zipf", "counts"),
}
#: Paths of files and folders that are not what a command is after; `place_oddities` makes those that no content says.
ODD_PATHS = ("missing", "missing/file.json", "empty", "nothing.json", "pipe", "/dev/zero", "loop", "huge.json")
#: An argument of a process ends at the first zero byte, and halves of characters arrive as bytes that are no UTF-8.
ODD_TEXTS = tuple(text for text in TEXTS if "\x00" not in text and "\ud800" not in text and "/" not in text)
ODD_TEXTS += ("\udcff", "=", ",", "a=b=c", "nan", "inf", "0x10", "1_000", "--json")
ODD_NUMBERS = (
    "-1",
    "0",
    "nan",
    "inf",
    "-inf",
    "1e308",
    "1e-300",
    "9" * 25,
    "2147483648",
    "x",
    "",
    "1.5",
)
#: Numbers that an option of `SHORTEST` may accept, and that take a command of `LONG` for ever.
ENDLESS = {"1e308", "9" * 25, "2147483648"}


@dataclass(frozen=True)
class Parameter:
    """An argument or an option of a command."""

    name: str
    flags: tuple[str, ...]
    """As they are written on the command line; none for an argument."""
    kind: type
    is_flag: bool
    is_required: bool
    is_repeated: bool


@dataclass(frozen=True)
class Command:
    path: tuple[str, ...]
    parameters: tuple[Parameter, ...]


def all_commands():
    """Every command of the program."""
    return tuple(_walk(LazyCommands(command_points()), ()))


def _walk(commands, path):
    for name, command in commands.items():
        if hasattr(command, "commands"):
            yield from _walk(command.commands, (*path, name))
        else:
            yield Command(path=(*path, name), parameters=tuple(map(_parameter, command.params)))


def _parameter(found):
    annotation = found.type_descriptor.annotation
    options = [kind for kind in typing.get_args(annotation) if kind is not types.NoneType]
    flags = tuple(name for name in (*found.opts, *found.secondary_opts) if name.startswith("-"))
    return Parameter(
        name=found.name,
        flags=flags,
        kind=options[0] if options else annotation,
        is_flag=getattr(found, "is_flag", False),
        is_required=found.required,
        is_repeated=getattr(found, "multiple", False),
    )


def good_values(parameter):
    if parameter.name in GOOD:
        return GOOD[parameter.name]
    if issubclass(parameter.kind, enum.Enum):
        return tuple(str(member.value) for member in parameter.kind)
    return {int: ("1", "2", "0"), float: ("0.5", "1", "0.01"), Path: ("out.x",)}.get(parameter.kind, ("x", "a"))


def odd_values(parameter):
    if issubclass(parameter.kind, int | float):
        return ODD_NUMBERS
    if issubclass(parameter.kind, Path) or parameter.name in ("tables", "topology", "source"):
        return ODD_PATHS + ODD_TEXTS
    return ODD_TEXTS + ODD_NUMBERS


@st.composite
def command_lines(draw, command):
    """Arguments for a command: required ones, some of the others, and something odd."""
    drawn = [parameter for parameter in command.parameters if parameter.name not in NOT_DRAWN]
    present = {parameter.name for parameter in drawn if parameter.is_required or draw(_rarely(5))}
    is_long = command.path in LONG
    able = [parameter for parameter in drawn if not parameter.is_flag]
    odd = {draw(st.sampled_from(able)).name} if able and (is_long or draw(st.booleans())) else set()
    short = SHORT | SHORTEST if is_long else SHORT
    arguments = [*command.path]
    for parameter in drawn:
        if parameter.name in ALWAYS:
            arguments += [parameter.flags[0], ALWAYS[parameter.name]]
        elif parameter.name in present | odd:
            values = odd_values(parameter) if parameter.name in odd else good_values(parameter)
            if is_long and parameter.name in SHORTEST:
                values = tuple(value for value in values if value not in ENDLESS)
            arguments += draw(_given(parameter, values))
        elif parameter.name in short:
            arguments += [parameter.flags[0], short[parameter.name]]
    if draw(_rarely(20)):
        arguments.append(draw(st.sampled_from(("--help", "--nonsense", "extra", "--", "-"))))
    return tuple(arguments)


def _rarely(one_in):
    return st.sampled_from([False] * (one_in - 1) + [True])


@st.composite
def _given(draw, parameter, values):
    if parameter.is_flag:
        return [draw(st.sampled_from(parameter.flags))]
    value = draw(st.sampled_from(values))
    if not parameter.flags:
        return [value]
    form = [f"{parameter.flags[0]}={value}"] if value.startswith("-") else [parameter.flags[0], value]
    return form * (2 if parameter.is_repeated and draw(_rarely(8)) else 1)


def place_oddities(case, folder):
    """Makes those of `ODD_PATHS` that a case names in the folder that it runs in."""
    makers = {
        "empty": Path.mkdir,
        "nothing.json": Path.touch,
        "pipe": os.mkfifo,
        "loop": lambda path: path.symlink_to(path.name),
        "huge.json": _make_sparse,
    }
    for name, make in makers.items():
        if any(name == argument.split("/")[0] for argument in case.arguments):
            make(folder / name)


def _make_sparse(path):
    with path.open("wb") as file:
        file.truncate(1 << 36)
