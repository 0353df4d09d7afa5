"""What ranks take to split ids by their owners, measured beside its price: `python -m studies input-work`.

Processes distribute batches over gloo, with no table in memory. What counts is the processor time of the thread that
does it: waiting for other processes and the links is none of it. Between runs the caches are overwritten.

Shape suffixes: T tables, R ranks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Annotated, Final, TypeAlias

import torch
import torch.distributed as dist
import typer

from autoshard.commands.options import command_options
from autoshard.core import (
    EmbeddingTable,
    Exchange,
    GradSync,
    PlacedShard,
    RowRange,
    RowsBy,
    Shard,
    ShardingPlan,
    Split,
    TableSet,
    Tier,
    Topology,
)
from autoshard.core.optimizers import UpdateSettings
from autoshard.core.step import PART_FEATURES, StepPart, plain_coefficients
from autoshard.evaluation.reader_work import reader_ms
from autoshard.formats import load_tables, read_plan
from autoshard.formats.metasyn import metasyn
from autoshard.runtime.engine.ids.requests import InputExchange
from autoshard.runtime.participation import Participation
from autoshard.runtime.training.synthetic import draw_samples, ranked_rows
from autoshard.table import Table
from autoshard.whatif.trials import local_topology
from studies.engines.layouts import Layout, plan_of
from studies.frame import Machine, OutputOptions, StudyResult
from studies.frame.jobs import do_job, mean_of, run_job

_WARM_UP = 2
_FLUSHED_BYTES = 64 << 20


def input_ms(plan: ShardingPlan, runs: int) -> list[float]:
    """Processor time of this thread for each of several batches, in milliseconds."""
    part = Participation.agree(plan, UpdateSettings(learning_rate=0.0))
    exchange = InputExchange(part.owners, {}, part.local_batch_size, part.groups, part.device)
    ranked = ranked_rows(plan, {})
    flushed = torch.empty(_FLUSHED_BYTES, dtype=torch.uint8)
    times_ms = []
    for number in range(_WARM_UP + runs):
        batch = draw_samples(plan.tables, 0, part.local_batch_size, (0, number, part.process), ranked).ids
        flushed.fill_(number % 2)
        dist.barrier()
        begun_s = time.thread_time()
        exchange(batch)
        times_ms.append((time.thread_time() - begun_s) * 1e3)
    return times_ms[_WARM_UP:]


_DEVICE: Final = "cpu"
_TABLE_BYTES: Final = 1 << 40
#: Tables of many lookups a sample, and of one; the rows of the former do not matter here.
_NUM_METASYN, _SCALE, _SEED = 80, 64, 2026
_ONE_HOT: Final = "criteo-kaggle"
#: Share of a table's rows that are hot.
_HOT_SHARE: Final = 0.05
#: Of so many tables, one is answered with rows.
_ONE_IN: Final = 8

_Shards: TypeAlias = Callable[[EmbeddingTable, int], list[PlacedShard]]


@dataclass(frozen=True, slots=True, kw_only=True)
class InputWork:
    """Processor time in which ranks distribute a batch, the mean over ranks of medians, and its price.

    Attributes:
        tables: Name of the tables.
        layout: How they are held.
        num_processes: Processes, one per rank.
        measured_ms: Processor time.
        priced_ms: The same by `reader_ms`.
    """

    tables: str
    layout: str
    num_processes: int
    measured_ms: float
    priced_ms: float

    @property
    def cells(self) -> tuple[str, ...]:
        """A row of the table of results."""
        times = (f"{self.measured_ms:.1f}", f"{self.priced_ms:.1f}", f"{self.priced_ms / self.measured_ms:.2f}")
        return (self.tables, self.layout, str(self.num_processes), *times)


@command_options()
class InputWorkOptions:
    """Options of the study `input-work`."""

    nproc: Annotated[list[int] | None, typer.Option(min=1, help="Processes, one per rank.  [default: 2, 4]")] = None
    runs: Annotated[int, typer.Option(min=1, help="Measured batches of each plan.")] = 7


def plans_of(tables: TableSet, topology: Topology) -> dict[str, ShardingPlan]:
    """Plans of tables by the name of their layout: all ways to hold rows that ask for other work."""
    R = topology.world_size

    def rows(split: Split, exchange: Exchange = Exchange.PARTIAL_SUMS, *, deduplicate: bool = False) -> _Shards:
        def shards(table: EmbeddingTable, _number: int) -> list[PlacedShard]:
            return [
                PlacedShard(
                    shard=Shard.whole(table),
                    tier=Tier.ROW_WISE,
                    replicas=(tuple(range(R)),),
                    split=split,
                    exchange=exchange,
                    deduplicate=deduplicate,
                )
            ]

        return shards

    def columns(table: EmbeddingTable, number: int) -> list[PlacedShard]:
        half = table.embedding_dim // 2
        cuts = [(0, half), (half, table.embedding_dim)]
        parts = [replace(Shard.whole(table), columns=cut) for cut in cuts]
        return [PlacedShard.table_wise(part, (number + at) % R) for at, part in enumerate(parts)]

    def hot_rows(table: EmbeddingTable, _number: int) -> list[PlacedShard]:
        num_hot = max(1, int(table.num_embeddings * _HOT_SHARE))
        if num_hot == table.num_embeddings:
            return rows(Split.CYCLIC)(table, 0)
        hot, cold = (
            replace(Shard.whole(table), rows=RowRange(start=start, stop=stop, by=RowsBy.ACCESS_RANK))
            for start, stop in ((0, num_hot), (num_hot, table.num_embeddings))
        )
        copies = tuple((rank,) for rank in range(R))
        return [
            PlacedShard(shard=hot, tier=Tier.DATA_PARALLEL, replicas=copies, grad_sync=GradSync.SPARSE),
            PlacedShard(shard=cold, tier=Tier.ROW_WISE, replicas=(tuple(range(R)),), split=Split.CYCLIC),
        ]

    def ranges(table: EmbeddingTable, number: int) -> list[PlacedShard]:
        num_hot = max(1, int(table.num_embeddings * _HOT_SHARE))
        bounds = [(0, num_hot), (num_hot, table.num_embeddings)]
        cuts = [RowRange(start=start, stop=stop, by=RowsBy.ACCESS_RANK) for start, stop in bounds if stop > start]
        parts = [replace(Shard.whole(table), rows=rows) for rows in cuts]
        return [PlacedShard.table_wise(part, (number + at) % R) for at, part in enumerate(parts)]

    def few_exchanged(table: EmbeddingTable, number: int) -> list[PlacedShard]:
        whole = PlacedShard.table_wise(Shard.whole(table), number % R)
        return [replace(whole, exchange=Exchange.ROWS) if number % _ONE_IN == 0 else whole]

    layouts: dict[str, _Shards] = {
        "halves of columns": columns,
        "ranges of access ranks": ranges,
        "blocks of rows": rows(Split.BLOCK),
        "rows in turn": rows(Split.CYCLIC),
        "hot rows on all ranks": hot_rows,
        "whole tables, rows of some exchanged": few_exchanged,
        "rows in turn, rows exchanged": rows(Split.CYCLIC, Exchange.ROWS),
        "rows in turn, rows exchanged once": rows(Split.CYCLIC, Exchange.ROWS, deduplicate=True),
    }
    plans = {"whole tables": plan_of(Layout.TABLE_WISE, tables, topology)}
    for name, shards_of in layouts.items():
        shards = tuple(one for number, table in enumerate(tables.tables) for one in shards_of(table, number))
        plans[name] = ShardingPlan(tables=tables, topology=topology, shards=shards)
    return plans


def measure(name: str, tables: TableSet, num_processes: int, runs: int) -> list[InputWork]:
    """Distributes batches of all plans on processes of this machine.

    Args:
        name: Of the tables.
        tables: The tables.
        num_processes: Processes, one per rank.
        runs: Measured batches of each plan.

    Raises:
        AutoshardError: If a process fails.
    """
    plans = plans_of(tables, local_topology(_DEVICE, num_processes, _TABLE_BYTES))
    measured = run_job("studies.engines.input_work", {"runs": runs}, list(plans.values()), num_processes)
    return [
        InputWork(
            tables=name,
            layout=layout,
            num_processes=num_processes,
            measured_ms=measured_ms,
            priced_ms=_priced_ms(plan),
        )
        for (layout, plan), measured_ms in zip(plans.items(), measured, strict=True)
    ]


def _priced_ms(plan: ShardingPlan) -> float:
    of_shards = reader_ms(plan.shards, plan.tables.batch_size / plan.topology.world_size, plan.topology)
    weights = dict(
        zip(PART_FEATURES[StepPart.INPUT], plain_coefficients(StepPart.INPUT, plan.topology.device), strict=True)
    )
    return float(of_shards[:, 0].sum() + weights["steps"])


def _table_sets() -> Iterator[tuple[str, TableSet]]:
    yield f"MetaSyn / {_SCALE}, {_NUM_METASYN} tables", metasyn().scaled(_SCALE).sample(_NUM_METASYN, _SEED)
    yield "Criteo Kaggle", load_tables(_ONE_HOT)


def main(options: InputWorkOptions, output: OutputOptions) -> None:
    """Measures what splitting a batch's ids by their owners takes, beside what evaluation says.

    Example:
        python -m studies input-work
    """
    found = [
        one
        for name, tables in _table_sets()
        for num_processes in options.nproc or [2, 4]
        for one in measure(name, tables, num_processes, options.runs)
    ]
    table = Table(
        columns=("tables", "held as", "processes", "input, ms", "priced", "priced over measured"),
        rows=tuple(one.cells for one in found),
        caption=f"Processor time in which a rank distributes its batch, medians of {options.runs} batches",
    )
    plans = {"plans": [asdict(one) for one in found]}
    document = Machine.of("input-work", options).document(plans, "autoshard.input_work/1")
    output.write(StudyResult(name="input-work", document=document, tables=(table,)))


if __name__ == "__main__":
    do_job(lambda job: [mean_of(median(input_ms(read_plan(path), job["runs"]))) for path in job["plan_paths"]])
