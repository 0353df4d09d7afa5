"""DLRM's command lines: the tables and dense layers that options of `dlrm_s_pytorch.py` and `dlrm_main.py` describe."""

from __future__ import annotations

import argparse
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, NoReturn

from autoshard.core import TableSet
from autoshard.core.accepted import MAX_BATCH_SIZE, MAX_EMBEDDING_DIM, MAX_POOLING_FACTOR, MAX_ROWS
from autoshard.core.errors import FormatError
from autoshard.core.quoting import shortened, shown
from autoshard.formats.bundled import bundled_tables
from autoshard.formats.documents.fields import word
from autoshard.formats.documents.tables_json import tables_from_json
from autoshard.formats.files import read_bytes
from autoshard.formats.imports.shell_commands import shell_commands

_log = logging.getLogger(__name__)

#: Commands that name a program and do not start it.
_NO_STARTS: Final = frozenset(
    ["cat", "cd", "chmod", "cp", "curl", "diff", "echo", "git", "grep", "ls", "mv", "printf", "rm", "sed", "test", "vi"]
) | {"vim", "wget", "[", "[["}
_ROWS, _DIMS, _WIDTHS = range(1, MAX_ROWS + 1), range(1, MAX_EMBEDDING_DIM + 1), range(1, 2**20 + 1)
_BATCHES, _FACTORS, _PROCESSES = range(1, MAX_BATCH_SIZE + 1), range(int(MAX_POOLING_FACTOR) + 1), range(1, 2**20 + 1)
_LIMITS: Final = range(-(2**53), 2**53)
#: Short options of launchers that count processes or nodes, and their long names, by launcher. Programs that start
#: others and have such options for other things have none; `-np` counts processes wherever it stands.
_SLURM: Final = {"-n": "--ntasks", "-N": "--nodes"}
_MPI: Final = dict.fromkeys(("-n", "--n"), "--np")
_SHORT_COUNTS: Final[Mapping[str, Mapping[str, str]]] = {
    **dict.fromkeys(("srun", "salloc"), _SLURM),
    **dict.fromkeys(("mpirun", "mpiexec", "orterun", "aprun", "horovodrun"), _MPI),
    "jsrun": {"-n": "--nrs", "-a": "--tasks-per-rs", "-p": "--np"},
    "torchx": {"-j": "--j"},
    **{name: {} for name in ("conda", "ionice", "mamba", "micromamba", "nice", "numactl")},
}
#: Options and variables that count the processes of all nodes, and all that count processes or nodes.
_EVERY_PROCESS: Final = ("--ntasks", "--np", "-np", "--num-proc", "--num-trainers", "WORLD_SIZE")
_COUNTS: Final = (
    *_EVERY_PROCESS,
    *("--j", "--nproc-per-node", "--nnodes", "--ntasks-per-node", "--nodes", "--nrs", "--tasks-per-rs"),
)
#: A launcher of one of the implementations of MPI, such as `mpiexec.hydra` and `mpirun_rsh`.
_OF_ONE_MPI: Final = re.compile(r"(mpirun|mpiexec)[._-].+")
#: Variables that Slurm sets within a job.
_OF_SLURM: Final = re.compile(r"\$\{?SLURM_")
#: Value of an option that stands alone.
_SET: Final = "True"
_NO_LAYERS: Final = "the dense layers are left out of the import"
_ALIKE: Final = "rows are taken to be looked up alike"


def is_dlrm_command(source: str) -> bool:
    """Whether a text is a command line of DLRM, rather than the name of a file with one."""
    is_command = re.search(r"\s-", source) or source.startswith("-")
    return bool(is_command) and not os.path.exists(source) and any(one.is_named_in(source) for one in _PROGRAMS)


def read_dlrm_command(source: str | Path, *, batch_size: int | None = None) -> TableSet:
    """Tables of a command line of DLRM (facebookresearch/dlrm), or of a script that holds one.

    `dlrm_s_pytorch.py` (and `dlrm_s_caffe2.py`): a feature of a data set has one id per sample, as Criteo's have, and
    no table more rows than `--max-ind-range`. Generated features have `--num-indices-per-lookup` ids, or, without
    `--num-indices-per-lookup-fixed`, a number drawn evenly up to that.

    `dlrm_main.py` of `torchrec_dlrm`: features have the ids per sample of `--multi_hot_sizes`, or one. `--batch_size`
    is that of one process, and the launcher says how many there are, with lines `#SBATCH` where it is `srun`.

    Options that are left out have the programs' own defaults. Those that change tables or layers in a way that cannot
    be imported are refused or logged as warnings, as are options that the programs do not have. Rows are taken to be
    looked up alike.

    Args:
        source: The command line, or a file with it. Variables that a script sets are replaced; nothing is run.
        batch_size: Global batch; None for the command's.

    Raises:
        FormatError: If there is no such command, several describe different tables, or a value is not accepted.
    """
    found: dict[TableSet, list[str]] = {}
    text = _text(str(source))
    allocation = " ".join(re.findall(r"^#SBATCH\s(.*)", text, re.MULTILINE)).split()
    for program, words in _started(text):
        tables, notes = program.read(_Command(program, words, allocation, batch_size))
        found.setdefault(tables, notes)
    if not found:
        raise FormatError(f"holds no command of {' or '.join(program.files[0] for program in _PROGRAMS)}")
    if len(found) > 1:
        raise FormatError(f"holds commands for {len(found)} different sets of tables or batches; give one alone")
    [(tables, notes)] = found.items()
    for note in notes:
        _log.warning("%s", note)
    return tables


def _text(source: str) -> str:
    if is_dlrm_command(source):
        return source
    try:
        return read_bytes(source).decode("utf-8")
    except UnicodeDecodeError:
        raise FormatError("is not UTF-8 text") from None


def _started(text: str) -> Iterator[tuple[_Program, list[str]]]:
    """Commands that start one of the programs, or, where none does, that have their options."""
    commands = [words for words in shell_commands(text) if _NO_STARTS.isdisjoint(words[:1])]
    named = [(one, words) for words in commands for one in _PROGRAMS if any(map(one.is_file, words))]
    others = [(one, words) for words in commands for one in _PROGRAMS if one.is_described_by(words)]
    yield from named or others


def _is_other_program(words: Sequence[str]) -> bool:
    """Whether a command names a file of Python, or a module that is no launcher."""
    modules = [name for option, name in pairwise(words) if option == "-m" and name[:1].isalpha()]
    named = [*modules, *(item for item in words if item.endswith(".py"))]
    return any(not name.startswith("torch.distributed.") for name in named)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Program:
    """A program of DLRM.

    Attributes:
        files: Files and functions that start it.
        described_by: Sets of options, each of which tells its command lines from others.
        is_copied: Whether these options tell it although a command names another file, which then is a copy of it.
        separator: Between the words of an option's name.
        comma: Between the numbers of a list.
        batch: Option of the batch.
        default_batch: Its value if left out.
        valued: Options with a value, without the dashes.
        flags: Options without one.
        read: Tables of a command, and notes for the user.
    """

    files: tuple[str, ...]
    described_by: tuple[frozenset[str], ...]
    is_copied: bool
    separator: str
    comma: str
    batch: str
    default_batch: int
    valued: str
    flags: str
    read: Callable[[_Command], tuple[TableSet, list[str]]]

    def is_file(self, item: str) -> bool:
        """Whether a word of a command is the program."""
        return any(re.search(rf"(^|[/.:]){re.escape(name.removesuffix('.py'))}(\.py)?$", item) for name in self.files)

    def start(self, words: Sequence[str]) -> int:
        """Where the program's own options begin in a command: after its file, and after a `--` that follows."""
        files = [n for n, item in enumerate(words) if self.is_file(item)]
        scripts = [n for n, item in enumerate(words) if item.endswith(".py")]
        after = (files or scripts[-1:] or [-1])[0] + 1
        return words.index("--", after) if "--" in words[after:] else after

    def is_named_in(self, text: str) -> bool:
        """Whether a text names the program or one of its options."""
        names = [*(name.removesuffix(".py") for name in self.files), *(f"--{name}" for name in self.valued.split())]
        return any(name in text for name in names)

    def is_described_by(self, words: Sequence[str]) -> bool:
        """Whether a command has options by which the program is known."""
        given = {self.spelled(item).partition("=")[0] for item in words}
        is_described = any(options <= given for options in self.described_by)
        return is_described and (self.is_copied or not _is_other_program(words))

    def spelled(self, item: str) -> str:
        """An option in the program's own spelling, be it with `-` or with `_`."""
        name, equals, value = item.partition("=")
        if not name.startswith("--"):
            return item
        return "--" + re.sub("[-_]", self.separator, name[2:]) + equals + value


class _Parser(argparse.ArgumentParser):
    """Options as the programs themselves read them: abbreviated, in any order, the last one counts."""

    def error(self, message: str) -> NoReturn:
        raise FormatError(shortened(message.removeprefix("argument ")))


class _Command:
    """Options of one command, and how many processes its launcher starts; `allocation` are options of Slurm's job."""

    def __init__(
        self, program: _Program, words: Sequence[str], allocation: Sequence[str], batch_size: int | None
    ) -> None:
        self.notes: list[str] = []
        self._program, self._allocation, self._batch_size = program, allocation, batch_size
        parser = _Parser(prog=program.files[0], add_help=False)
        for name in program.valued.split():
            alone: dict[str, Any] = {"nargs": "?", "const": _SET} if f"--{name}" == _FIXED else {}
            parser.add_argument(f"--{name}", dest=f"--{name}", default=argparse.SUPPRESS, **alone)
        flag: dict[str, Any] = {"action": "store_const", "const": _SET, "default": argparse.SUPPRESS}
        for name in program.flags.split():
            parser.add_argument(f"--{name}", dest=f"--{name}", **flag)
        start = program.start(words)
        self._launcher = words[:start] or words
        given, unread = parser.parse_known_args([program.spelled(item) for item in words[start:] if item != "--"])
        self._given: dict[str, str] = vars(given)
        self._unset = [one for one in unread if one.startswith(("$", "`"))]
        for reason, items in (
            ("the script does not set it, and options in it are not read", self._unset),
            (f"not read, for {program.files[0]} has no such option", [one for one in unread if one not in self._unset]),
        ):
            if items:
                self.notes.append(f"{shortened(' '.join(items), 200)}: {reason}")

    def __contains__(self, option: str) -> bool:
        return option in self._given

    def text(self, option: str, default: str = "") -> str:
        """An option's value."""
        if option in _TABLE_SIZES and option not in self and self._unset:
            unset = shortened(" ".join(self._unset), 200)
            raise FormatError(f"must be given: it may stand in {unset}, which the script does not set", field=option)
        return self._given.get(option, default)

    def whole(self, option: str, default: int, limits: range) -> int:
        """An option's value, a whole number."""
        return _whole(self.text(option, str(default)), option, limits)

    def wholes(self, option: str, default: str, limits: range) -> list[int]:
        """An option's value, a list of whole numbers."""
        value, comma = self.text(option, default), self._program.comma
        accepted = f'whole numbers with "{comma}" between them, each'
        return [_whole(part, option, limits, accepted, value) for part in value.split(comma)]

    def num_processes(self) -> int:
        """Processes that the launcher starts; 1 without one."""
        accepted = "a whole number, or the option batch_size has to say the batch,"
        found = _launch_counts(self._launcher)
        if any(item.rpartition("/")[2] == "srun" for item in self._launcher):
            # A variable of Slurm stands for what the job says.
            said = {name: one for name, one in found.items() if not _OF_SLURM.match(one[1])}
            found |= _launch_counts(["srun", *self._allocation]) | said

        def count(*options: str) -> int | None:
            given = [found[one] for one in options if one in found]
            if not given:
                return None
            spelled, value = next((one for one in given if "$" not in one[1]), given[0])
            return _whole(value, spelled, _PROCESSES, accepted)

        if "--j" in found:
            spelled, value = found["--j"]
            nodes, _, each = value.rpartition("x")
            return _whole(nodes or "1", spelled, _PROCESSES, accepted) * _whole(each, spelled, _PROCESSES, accepted)
        if (each_node := count("--nproc-per-node")) is not None:
            return each_node * (count("--nnodes", "--nodes") or 1)
        if (every := count(*_EVERY_PROCESS)) is not None:
            return every
        if (num_sets := count("--nrs")) is not None:
            return num_sets * (count("--tasks-per-rs") or 1)
        if (each_node := count("--ntasks-per-node")) is not None:
            if (num_nodes := count("--nodes")) is None:
                self.notes.append("--nodes: left out, so that 1 is taken")
            return each_node * (num_nodes or 1)
        batch = self._program.batch
        self.notes.append(
            f"{batch}: taken for the global batch, for the command does not say how many processes it has"
        )
        return 1

    def global_batch(self, num_processes: Callable[[], int] = lambda: 1) -> int:
        """The global batch, of all processes together."""
        if self._batch_size is not None:
            return self._batch_size
        option, default = self._program.batch, self._program.default_batch
        if option not in self:
            self.notes.append(f"{option}: left out, so that it is {default}, the program's default")
        batch = self.whole(option, default, _BATCHES) * num_processes()
        if batch > MAX_BATCH_SIZE:
            raise FormatError(f"must make a global batch of at most {MAX_BATCH_SIZE}, got {batch}", field=option)
        return batch


def _launch_counts(words: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Options of launchers that count processes or nodes, each as it is spelled, with its value, by its long name.

    Of an option that is there twice the first one counts: the second one is of a program that the launcher starts.
    """
    found: dict[str, tuple[str, str]] = {}
    short: Mapping[str, str] = {}
    for item, following in pairwise([*words, ""]):
        launcher = _OF_ONE_MPI.sub(r"\1", item.rpartition("/")[2])
        short = _SHORT_COUNTS.get(launcher, short)
        spelled, equals, value = item.partition("=")
        if attached := re.fullmatch(r"(-[A-Za-z])([\d$].*)", item):
            spelled, equals, value = attached[1], "=", attached[2]
        name = short.get(spelled, spelled.replace("_", "-") if spelled.startswith("--") else spelled)
        if name in _COUNTS:
            found.setdefault(name, (spelled, value if equals else following))
    return found


def _whole(value: str, option: str, limits: range, accepted: str = "a whole number", said: str | None = None) -> int:
    """A value or a part of one, which `said` then is."""
    if re.fullmatch("-?[0-9]{1,18}", value) and int(value) in limits:
        return int(value)
    unset = "; the script does not set the variable" if "$" in value else ""
    raise FormatError(
        f"must be {accepted} in [{limits.start}, {limits.stop - 1}], got {shown(said or value)}{unset}", field=option
    )


def _table(name: str, feature: str, rows: int, dim: int, pooling_factor: float, **values: object) -> dict[str, Any]:
    return {
        "name": name,
        "num_embeddings": rows,
        "embedding_dim": dim,
        "dtype": "fp32",
        "pooling": "sum",
        "features": [{"name": feature, "pooling_factor": pooling_factor}],
        "access": {"kind": "uniform"},
        **values,
    }


def _made(tables: list[dict[str, Any]], batch_size: int, dense: Mapping[str, object] | None) -> TableSet:
    document = {"schema": "autoshard.tables/1", "batch_size": batch_size, "tables": tables}
    return tables_from_json(document if dense is None else document | {"dense": dense})


_SIZES, _DIM, _DATA = "--arch-embedding-size", "--arch-sparse-feature-size", "--data-generation"
_DATA_SET, _KAGGLE = "--data-set", "criteo-kaggle"
_LOOKUPS, _FIXED, _LIMIT = "--num-indices-per-lookup", "--num-indices-per-lookup-fixed", "--max-ind-range"
_BOTTOM, _TOP, _OPERATION = "--arch-mlp-bot", "--arch-mlp-top", "--arch-interaction-op"
_OPTIMIZERS: Final = {"sgd": "sgd", "rwsadagrad": "rowwise_adagrad", "adagrad": "adagrad"}
#: Options of `dlrm_s_pytorch.py` whose tables are no plain tables, and what they make of them.
_REFUSED: Final = {"--qr-flag": "quotient-remainder tables", "--md-flag": "tables of mixed dimensions"}
#: The option that only counts with `--inference-only`, and its bits.
_QUANTIZED: Final = "--quantize-emb-with-bit"
_BITS: Final = {"32": "fp32", "8": "int8"}


def _read_dlrm_s(command: _Command) -> tuple[TableSet, list[str]]:
    """Tables of `dlrm_s_pytorch.py`."""
    for name, meaning in _REFUSED.items():
        if name in command:
            raise FormatError(f"makes {meaning}, which cannot be imported", field=name)
    is_data_set = word(command.text(_DATA, "random"), _DATA, {"random": False, "dataset": True})
    is_weighted = bool(command.text("--weighted-pooling"))
    if is_weighted:
        command.notes.append("--weighted-pooling: its weight for each row, 4 bytes, is left out of what tables take")
    if is_data_set:
        command.notes.append(f"{_DATA}: {_ALIKE}")
    if not is_data_set and command.text("--rand-data-dist", "uniform") != "uniform":
        command.notes.append(f"--rand-data-dist: not read; {_ALIKE}")
    if command.text(_FIXED).lower() in ("false", "0"):
        command.notes.append(f"{_FIXED}: taken for true, as the program takes any value; leave it out for false")
    is_trained = "--inference-only" not in command
    values = {
        **({"weighted": True} if is_weighted else {}),
        "optimizer": word(command.text("--optimizer", "sgd"), "--optimizer", _OPTIMIZERS) if is_trained else "sgd",
        "dtype": "fp32" if is_trained else word(command.text(_QUANTIZED, "32"), _QUANTIZED, _BITS),
    }
    dim = command.whole(_DIM, 2, _DIMS)
    tables = [
        _table(f"table_{number}", f"feature_{number}", rows, dim, _lookups(rows, is_data_set, command), **values)
        for number, rows in enumerate(_rows(is_data_set, command))
    ]
    made = _made(tables, command.global_batch(), _dense_of_dlrm_s(command, dim))
    return made, command.notes


def _rows(is_data_set: bool, command: _Command) -> list[int]:
    """Rows of each table: those of a data set have the remainders of ids by `--max-ind-range`."""
    sizes = _counts(command) if is_data_set and _SIZES not in command else command.wholes(_SIZES, "4-3-2", _ROWS)
    limit = command.whole(_LIMIT, -1, _LIMITS)
    if limit <= 0 or max(sizes) <= limit:
        return sizes
    if not is_data_set:
        command.notes.append(f"{_LIMIT}: without effect, for the program limits rows with {_DATA}=dataset only")
        return sizes
    return [min(rows, limit) for rows in sizes]


def _counts(command: _Command) -> list[int]:
    """Rows of a data set that the program counts in its data, where they are known."""
    if command.text(_DATA_SET, "kaggle") != "kaggle":
        raise FormatError(
            f"is missing: with {_DATA}=dataset the program counts rows in its data; give the counts with this option",
            field=_SIZES,
        )
    command.notes.append(f"{_SIZES}: left out, so that rows are those of {_DATA_SET}=kaggle, the bundled {_KAGGLE}")
    return [table.num_embeddings for table in bundled_tables(_KAGGLE).tables]


def _lookups(rows: int, is_data_set: bool, command: _Command) -> float:
    """Mean ids per sample of a feature.

    DLRM draws round(max(1, r m)) ids for an even r in [0, 1) and m the smaller one of rows and option: 1 to 1.5 gives
    1, and m has half the share of the others, so that the mean is m / 2 + 1 / (2 m). Ids that a sample draws twice,
    which DLRM drops, are counted.
    """
    if is_data_set:
        return 1.0
    most = min(rows, command.whole(_LOOKUPS, 10, _FACTORS))
    return float(most) if command.text(_FIXED) or most < 1 else most / 2 + 1 / (2 * most)


def _dense_of_dlrm_s(command: _Command, dim: int) -> dict[str, object] | None:
    """The dense layers, if the command describes a perceptron and they can be priced."""
    interaction = word(command.text(_OPERATION, "dot"), _OPERATION, {"dot": "dot", "cat": "concat"})
    if _BOTTOM not in command and _TOP not in command:
        return None
    inputs, *bottom = command.wholes(_BOTTOM, "4-3-2", _WIDTHS)
    if interaction == "dot" and bottom[-1:] != [dim]:
        command.notes.append(f"{_BOTTOM}: {_NO_LAYERS}, for it does not end in {dim}, as {_DIM}")
        return None
    if "--arch-interaction-itself" in command:
        command.notes.append("--arch-interaction-itself: not read; each feature's product with itself is not priced")
    top = command.wholes(_TOP, "4-2-1", _WIDTHS)
    return {"num_dense_features": inputs, "bottom_mlp": bottom, "top_mlp": top, "interaction": interaction}


#: Features of the Criteo data sets, the only ones of `dlrm_main.py`.
_NUM_FEATURES, _NUM_DENSE_FEATURES = 26, 13
_EACH_SIZE, _ONE_SIZE, _HOT_SIZES = "--num_embeddings_per_feature", "--num_embeddings", "--multi_hot_sizes"
_HOT_SIZE, _HOT_ROWS = "--multi_hot_size", "--multi_hot_min_table_size"
_BINARY_FILES: Final = "--in_memory_binary_criteo_path"
_MULTI_HOT_FILES: Final = "--synthetic_multi_hot_criteo_path"
_BOTTOM_SIZES, _TOP_SIZES, _WIDTH = "--dense_arch_layer_sizes", "--over_arch_layer_sizes", "--embedding_dim"
#: Options of both programs whose defaults are not taken where an unset variable may hold them.
_TABLE_SIZES: Final = frozenset((_SIZES, _DIM, _DATA_SET, _ONE_SIZE, _WIDTH))


def _read_dlrm_main(command: _Command) -> tuple[TableSet, list[str]]:
    """Tables of `dlrm_main.py`."""
    rows = command.wholes(_EACH_SIZE, "", _ROWS) if _EACH_SIZE in command else []
    rows = rows or [command.whole(_ONE_SIZE, 100_000, _ROWS)] * _NUM_FEATURES
    if len(rows) != _NUM_FEATURES:
        command.notes.append(f"{_EACH_SIZE}: the program expects {_NUM_FEATURES} numbers, got {len(rows)}")
    hot = _hot_sizes(command, rows)
    if _MULTI_HOT_FILES in command and _HOT_SIZES not in command and _HOT_SIZE not in command:
        command.notes.append(
            f"{_MULTI_HOT_FILES}: ids per sample stand in these files, and 1 is taken; {_HOT_SIZES} says them"
        )
    command.notes += [f"{name}: not read; {_ALIKE}" for name in (_BINARY_FILES, _MULTI_HOT_FILES) if name in command]
    if command.text("--multi_hot_distribution_type") == "pareto":
        command.notes.append(f"--multi_hot_distribution_type: not read; {_ALIKE}")
    dim = command.whole(_WIDTH, 64, _DIMS)
    optimizer = "adagrad" if "--adagrad" in command else "sgd"
    tables = [
        _table(f"t_cat_{number}", f"cat_{number}", size, dim, float(lookups), optimizer=optimizer)
        for number, (size, lookups) in enumerate(zip(rows, hot, strict=True))
    ]
    made = _made(tables, command.global_batch(command.num_processes), _dense_of_dlrm_main(command, dim))
    return made, command.notes


def _hot_sizes(command: _Command, rows: Sequence[int]) -> list[int]:
    """Ids per sample of each table: those that are listed, or, in the program of 2022, one number for large tables."""
    if _HOT_SIZE in command and "," not in command.text(_HOT_SIZE):
        size, least_rows = command.whole(_HOT_SIZE, 1, _FACTORS), command.whole(_HOT_ROWS, 200, _LIMITS)
        return [size if one >= least_rows else 1 for one in rows]
    listed = next((option for option in (_HOT_SIZES, _HOT_SIZE) if option in command), None)
    hot = [1] * len(rows) if listed is None else command.wholes(listed, "", _FACTORS)
    if len(hot) != len(rows):
        raise FormatError(f"must be {len(rows)} numbers, one for each table, got {len(hot)}", field=_HOT_SIZES)
    return hot


def _dense_of_dlrm_main(command: _Command, dim: int) -> dict[str, object] | None:
    interactions = {"original": True, "dcn": False, "projection": False}
    interaction = word(command.text("--interaction_type", "original"), "--interaction_type", interactions)
    bottom = command.wholes(_BOTTOM_SIZES, "512,256,64", _WIDTHS)
    top = command.wholes(_TOP_SIZES, "512,512,256,1", _WIDTHS)
    if not interaction:
        command.notes.append(f"--interaction_type: {_NO_LAYERS}, for only original can be priced")
        return None
    if bottom[-1] != dim:
        command.notes.append(f"{_BOTTOM_SIZES}: {_NO_LAYERS}, for it ends in {bottom[-1]} and {_WIDTH} is {dim}")
        return None
    return {"num_dense_features": _NUM_DENSE_FEATURES, "bottom_mlp": bottom, "top_mlp": top, "interaction": "dot"}


_DLRM_S: Final = _Program(
    files=("dlrm_s_pytorch.py", "dlrm_s_caffe2.py"),
    described_by=(frozenset([_SIZES]),),
    is_copied=True,
    separator="-",
    comma="-",
    batch="--mini-batch-size",
    default_batch=1,
    valued="""activation-function arch-embedding-size arch-interaction-op arch-mlp-bot arch-mlp-top
        arch-sparse-feature-size caffe2-net-type data-generation data-randomize data-set data-size data-sub-sample-rate
        data-trace-enable-padding data-trace-file dist-backend learning-rate load-model local-rank loss-function
        loss-threshold loss-weights lr-decay-start-step lr-num-decay-steps lr-num-warmup-steps max-ind-range
        md-temperature md-threshold mini-batch-size mlperf-acc-threshold mlperf-auc-threshold mlperf-grad-accum-iter
        nepochs num-batches num-indices-per-lookup num-indices-per-lookup-fixed num-workers numpy-rand-seed optimizer
        print-freq print-precision processed-data-file qr-collisions qr-operation qr-threshold quantize-emb-with-bit
        quantize-mlp-with-bit rand-data-dist rand-data-max rand-data-min rand-data-mu rand-data-sigma raw-data-file
        round-targets save-model sync-dense-params tensor-board-filename test-freq test-mini-batch-size
        test-num-workers weighted-pooling""",
    flags="""arch-interaction-itself dataset-multiprocessing debug-mode enable-profiling inference-only md-flag
        md-round-dims memory-map mlperf-bin-loader mlperf-bin-shuffle mlperf-logging plot-compute-graph print-time
        print-wall-time qr-flag save-onnx save-proto-types-shapes use-gpu""",
    read=_read_dlrm_s,
)
_DLRM_MAIN: Final = _Program(
    files=("dlrm_main.py", "run_dlrm_main"),
    described_by=(frozenset([_EACH_SIZE]), frozenset([_ONE_SIZE, _TOP_SIZES])),
    is_copied=False,
    separator="_",
    comma=",",
    batch="--batch_size",
    default_batch=32,
    valued="""batch_size dataset_name dcn_low_rank_dim dcn_num_layers dense_arch_layer_sizes embedding_dim epochs eps
        in_memory_binary_criteo_path interaction_branch1_layer_sizes interaction_branch2_layer_sizes interaction_type
        learning_rate limit_test_batches limit_train_batches limit_val_batches lr_decay_start lr_decay_steps
        lr_warmup_steps multi_hot_distribution_type multi_hot_min_table_size multi_hot_size multi_hot_sizes
        num_embeddings num_embeddings_per_feature over_arch_layer_sizes seed synthetic_multi_hot_criteo_path
        test_batch_size undersampling_rate validation_freq_within_epoch""",
    flags="""adagrad allow_tf32 collect_multi_hot_freqs_stats drop_last_training_batch mmap_mode pin_memory print_lr
        print_sharding_plan shuffle_batches shuffle_training_set""",
    read=_read_dlrm_main,
)
_PROGRAMS: Final = (_DLRM_S, _DLRM_MAIN)
