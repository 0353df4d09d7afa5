"""What a rank's processor computes besides kernels, measured beside its price: `python -m studies processor-work`.

For collectives of gloo over TCP that is the processes' own and the system's time, of all their threads; for sums over
sequences that of the thread that trains.

Shape suffixes: N measurements, K amounts that take time, B samples, L rows.
"""

from __future__ import annotations

import random
import resource
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, astuple, dataclass
from itertools import product
from statistics import median
from typing import Annotated, Any, Final

import numpy as np
import torch
import torch.distributed as dist
import typer
from numpy.typing import NDArray
from scipy.optimize import nnls

from autoshard.commands.options import command_options
from autoshard.core import AccessProfile, EmbeddingTable, Feature, Pooling, TableSet
from autoshard.evaluation import AlphaBetaComm
from autoshard.evaluation.reader_work import SUM_SPEED, sequence_amounts, sequence_sums_ms
from autoshard.runtime.batch import BatchOfIds, Embedded
from autoshard.runtime.processes.launch import LOCAL, Launcher
from autoshard.runtime.releases import all_gather, reduce_scatter
from autoshard.runtime.training.step import FeatureVectors
from autoshard.runtime.virtual.wire import GLOO_WORK, Operation, ProcessorWork, Wire
from autoshard.table import Table
from autoshard.whatif.trials import local_topology
from studies.cluster.commands import opened_cluster
from studies.cluster.network import ClusterSpec
from studies.frame import Machine, OutputOptions, StudyResult
from studies.frame.jobs import do_job, mean_of, run_job

_DEVICE: Final = "cpu"
#: Bytes that a process puts into a collective.
_SIZES: Final = tuple(2**power for power in range(13, 23))
#: Numbers of sequences, rows a sample, columns and samples; and tables of sums beside them.
_SEQUENCES, _ROWS, _COLUMNS, _SAMPLES, _SUMS = (5, 20), (3, 12, 40), (16, 64), (32, 128, 512), 30
_ROWS_OF_A_TABLE: Final = 1000
_WARM_UP: Final = 3


@command_options()
class ProcessorWorkOptions:
    """Options of the study `processor-work`."""

    nproc: Annotated[int, typer.Option(min=2, help="Processes of the collectives.")] = 2
    runs: Annotated[int, typer.Option(min=3, help="Runs of each measurement.")] = 20
    mbit_per_s: Annotated[
        float, typer.Option(min=0, help="Rate of each process's link, which needs root and Linux; 0 for the loopback.")
    ] = 1000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveWork:
    """What a process computes for a collective, the mean over processes.

    Attributes:
        operation: The collective.
        put_in_bytes: Bytes that each process puts in.
        measured_ms: Processor time of all its threads.
        priced_ms: By `GLOO_WORK`.
    """

    operation: Operation
    put_in_bytes: int
    measured_ms: float
    priced_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SumsWork:
    """What a thread computes to make vectors of sequences.

    Attributes:
        num_sequences: Sequences.
        rows: Rows of each sample's sequence, the mean.
        columns: Their columns.
        num_samples: Samples.
        measured_ms: Forward and backward, medians.
        priced_ms: By `SUM_SPEED`.
    """

    num_sequences: int
    rows: int
    columns: int
    num_samples: int
    measured_ms: tuple[float, float]
    priced_ms: tuple[float, float]


def collective_ms(operation: Operation, put_in_bytes: int, runs: int) -> float:
    """Processor time of this process for a collective, of all its threads and the system's for it, in milliseconds."""
    size, count = dist.get_world_size(), put_in_bytes // torch.float32.itemsize
    own = torch.zeros(count)
    match operation:
        case Operation.ALL_TO_ALL:
            other = torch.zeros(count)
        case Operation.ALL_GATHER:
            other = torch.zeros(size * count)
        case Operation.REDUCE_SCATTER:
            other = torch.zeros(count // size)
        case Operation.ALL_REDUCE:
            other = own

    def once() -> None:
        match operation:
            case Operation.ALL_TO_ALL:
                dist.all_to_all_single(other, own)
            case Operation.ALL_GATHER:
                all_gather(other, own)
            case Operation.REDUCE_SCATTER:
                reduce_scatter(other, own)
            case Operation.ALL_REDUCE:
                dist.all_reduce(own)

    for _ in range(_WARM_UP):
        once()
    dist.barrier()
    begun = resource.getrusage(resource.RUSAGE_SELF)
    for _ in range(runs):
        once()
    ended = resource.getrusage(resource.RUSAGE_SELF)
    seconds = ended.ru_utime + ended.ru_stime - begun.ru_utime - begun.ru_stime
    return mean_of(seconds / runs * 1e3)


def _collectives(job: Mapping[str, Any]) -> list[float]:
    return [collective_ms(Operation(name), size, job["runs"]) for name, size in job["measured"]]


def collectives(num_processes: int, runs: int, launcher: Launcher) -> list[CollectiveWork]:
    """Measures all collectives on processes that a launcher starts."""
    measured = list(product(Operation, _SIZES))
    job = {"runs": runs, "measured": [(operation.value, size) for operation, size in measured]}
    found = run_job("studies.engines.processor_work", job, [], num_processes, launcher)
    wire = Wire(local_topology(_DEVICE, num_processes, 1), _NO_LINKS, GLOO_WORK)
    return [
        CollectiveWork(
            operation=operation,
            put_in_bytes=size,
            measured_ms=ms,
            priced_ms=wire.work_s(operation, _bytes_of(operation, size, num_processes)) * 1e3,
        )
        for (operation, size), ms in zip(measured, found, strict=True)
    ]


#: Links count for nothing here.
_NO_LINKS: Final = AlphaBetaComm()


def _bytes_of(operation: Operation, put_in_bytes: int, num_processes: int) -> NDArray[np.float64]:
    """What `Wire.work_s` is told of a rank: what goes to each other one, or first what it puts in."""
    if operation is Operation.ALL_TO_ALL:
        return np.array([0.0] + [put_in_bytes / num_processes] * (num_processes - 1))
    return np.array([float(put_in_bytes)] + [0.0] * (num_processes - 1))


def tables_of(num_sequences: int, rows: int, columns: int, num_samples: int) -> TableSet:
    """Sequences of so many rows among tables of sums."""
    kinds = [Pooling.SEQUENCE] * num_sequences + [Pooling.SUM] * _SUMS
    random.Random(num_sequences).shuffle(kinds)
    tables = tuple(
        EmbeddingTable(
            name=f"t{number}",
            num_embeddings=_ROWS_OF_A_TABLE,
            embedding_dim=columns,
            pooling=kind,
            access=AccessProfile.uniform(_ROWS_OF_A_TABLE),
            features=(Feature(name=f"f{number}", pooling_factor=float(rows)),),
        )
        for number, kind in enumerate(kinds)
    )
    return TableSet(batch_size=num_samples, tables=tables)


def sums_ms(tables: TableSet, runs: int) -> tuple[float, float]:
    """Processor time of this thread for the vectors of a batch, forward and backward, medians in milliseconds."""
    rng, num_samples = np.random.default_rng(0), tables.batch_size
    lengths_FB = torch.tensor(
        rng.poisson([one.features[0].pooling_factor for one in tables.tables], (num_samples, len(tables.tables))).T,
        dtype=torch.int32,
    )
    ids = BatchOfIds(lengths_FB=lengths_FB, ids_L=torch.zeros(int(lengths_FB.sum()), dtype=torch.int64))
    sequences = {
        table.features[0].name: torch.randn(int(lengths_B.sum()), table.embedding_dim, requires_grad=True)
        for table, lengths_B in zip(tables.tables, lengths_FB, strict=True)
        if table.pooling is Pooling.SEQUENCE
    }
    columns = sum(one.embedding_dim for one in tables.tables if one.pooling is not Pooling.SEQUENCE)
    embedded = Embedded(torch.randn(num_samples, columns, requires_grad=True), sequences)
    vectors = FeatureVectors(tables)
    times_ms = []
    for _ in range(_WARM_UP + runs):
        begun_s = time.thread_time()
        vectors_BC = vectors(embedded, ids)
        forward_s = time.thread_time()
        vectors_BC.backward(torch.ones_like(vectors_BC))
        times_ms.append(((forward_s - begun_s) * 1e3, (time.thread_time() - forward_s) * 1e3))
    forward, backward = zip(*times_ms[_WARM_UP:], strict=True)
    return median(forward), median(backward)


def sums(runs: int) -> list[SumsWork]:
    """Measures sums over sequences of all sizes, on one thread."""
    torch.set_num_threads(1)
    found = []
    for sizes in product(_SEQUENCES, _ROWS, _COLUMNS, _SAMPLES):
        tables = tables_of(*sizes)
        forward_ms, backward_ms = sequence_sums_ms(tables, float(tables.batch_size), _DEVICE).tolist()
        found.append(
            SumsWork(
                num_sequences=sizes[0],
                rows=sizes[1],
                columns=sizes[2],
                num_samples=sizes[3],
                measured_ms=sums_ms(tables, runs),
                priced_ms=(forward_ms, backward_ms),
            )
        )
    return found


def fitted(amounts_NK: NDArray[np.float64], measured_N: NDArray[np.float64]) -> NDArray[np.float64]:
    """What each amount takes, none less than nothing, shape (K,): least squares of relative errors."""
    return np.asarray(nnls(amounts_NK / measured_N[:, None], np.ones(len(measured_N)))[0])


def _collective_lines(found: Sequence[CollectiveWork], num_processes: int) -> list[tuple[str, ...]]:
    lines: list[tuple[str, ...]] = []
    for operation in Operation:
        own = [one for one in found if one.operation is operation]
        measured_N = np.array([one.measured_ms for one in own])
        each, byte = _sent_work(operation, own, num_processes)
        ratios = np.array([one.priced_ms for one in own]) / measured_N
        price = GLOO_WORK[operation]
        lines.append(
            (
                operation.value,
                f"{each:.2f} and {byte:.2f}",
                f"{price.each_s * 1e3:.2f} and {price.byte_s * 1e9:.2f}",
                _quantiles(ratios),
            )
        )
    return lines


def _sent_work(operation: Operation, own: Sequence[CollectiveWork], num_processes: int) -> tuple[float, float]:
    """Milliseconds of a collective, and those of a megabyte that the process sends."""
    by_megabyte = {operation: ProcessorWork(each_s=0.0, byte_s=1e-6)}
    wire = Wire(local_topology(_DEVICE, num_processes, 1), _NO_LINKS, by_megabyte)
    sent = [wire.work_s(operation, _bytes_of(operation, one.put_in_bytes, num_processes)) for one in own]
    amounts_N2 = np.column_stack([np.ones(len(own)), sent])
    each, byte = fitted(amounts_N2, np.array([one.measured_ms for one in own])).tolist()
    return each, byte


def _sums_lines(found: Sequence[SumsWork]) -> list[tuple[str, ...]]:
    sizes = [(one.num_sequences, one.rows, one.columns, one.num_samples) for one in found]
    amounts_NK = np.array([sequence_amounts(tables_of(*of), float(of[-1])) for of in sizes])
    lines: list[tuple[str, ...]] = []
    units = np.array([1e3, 1e6, 1e6, 1e6])
    prices_K2 = np.array(astuple(SUM_SPEED[_DEVICE]))
    for number, name in enumerate(("forward", "backward")):
        measured_N = np.array([one.measured_ms[number] for one in found])
        fit_K = fitted(amounts_NK, measured_N) * units
        priced_N = np.array([one.priced_ms[number] for one in found])
        now_K = prices_K2[:, number] * 1e3 * units
        lines.append((name, _joined(fit_K), _joined(now_K), _quantiles(priced_N / measured_N)))
    return lines


def _joined(values: NDArray[np.float64]) -> str:
    return ", ".join(f"{one:.2g}" for one in values)


def _quantiles(ratios: NDArray[np.float64]) -> str:
    low, middle, high = np.quantile(ratios, (0.05, 0.5, 0.95))
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


@contextmanager
def _links(options: ProcessorWorkOptions) -> Iterator[Launcher]:
    """What starts processes, each on a node of its own or all on this machine."""
    if not options.mbit_per_s:
        yield LOCAL
        return
    spec = ClusterSpec(num_nodes=options.nproc, ranks_per_node=1, bits_per_s=options.mbit_per_s * 1e6)
    with opened_cluster(spec) as cluster:
        yield cluster


def main(options: ProcessorWorkOptions, output: OutputOptions) -> None:
    """Measures what processors compute for collectives and sums over sequences, beside what evaluation says.

    Example:
        python -m studies processor-work
    """
    with _links(options) as launcher:
        of_collectives = collectives(options.nproc, options.runs, launcher)
    of_sums = sums(options.runs)
    ratio = "priced over measured (5% to 95%)"
    where = f"links of {options.mbit_per_s:g} Mbit/s" if options.mbit_per_s else "the loopback"
    first = Table(
        columns=("collective", "measured: ms each, and a megabyte sent", "priced", ratio),
        rows=tuple(_collective_lines(of_collectives, options.nproc)),
        caption=f"Processor time of gloo's collectives, {options.nproc} processes, {where}, {options.runs} runs",
    )
    second = Table(
        columns=("sums", "measured: us a sequence, ns a row, ns a byte of rows, and of vectors", "priced", ratio),
        rows=tuple(_sums_lines(of_sums)),
        caption=f"Processor time of sums over sequences, medians of {options.runs} runs of {len(of_sums)} models",
    )
    found = {
        "collectives": [asdict(one) for one in of_collectives],
        "sums": [asdict(one) for one in of_sums],
    }
    document = Machine.of("processor-work", options).document(found, "autoshard.processor_work/1")
    output.write(StudyResult(name="processor-work", document=document, tables=(first, second)))


if __name__ == "__main__":
    do_job(_collectives)
