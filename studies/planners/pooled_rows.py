"""What readers take to pool rows, measured beside its price: `python -m studies pooled-rows`.

The engine's own functions run on one thread: rows of one table come from several owners, are matched to the lookups and
pooled, and the gradients of the bags are spread over the rows. Between runs the caches are overwritten.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from statistics import median
from typing import Annotated, Final

import torch
import typer

from autoshard.commands.options import command_options
from autoshard.core import (
    AccessProfile,
    EmbeddingTable,
    Exchange,
    Feature,
    PlacedShard,
    Shard,
    ShardingPlan,
    Split,
    TableSet,
    Tier,
)
from autoshard.evaluation.reader_work import reader_ms
from autoshard.runtime.batch import BatchOfIds
from autoshard.runtime.engine.ids.messages import Jagged, Request
from autoshard.runtime.engine.ids.requests import DistributedBatch, RowLookups
from autoshard.runtime.engine.rows.replicas import NO_LOOKUPS
from autoshard.runtime.engine.vectors.assembly import Assembly, ReceivedVectors
from autoshard.runtime.engine.vectors.reading import Reading, RowFeature, RowKernel
from autoshard.runtime.ownership import ownership_of
from autoshard.table import Table
from autoshard.whatif.trials import local_topology
from studies.frame import Machine, OutputOptions, StudyResult

_DEVICE: Final = "cpu"
_OWNERS: Final = 4
#: Samples of a reader, lookups of each and columns: rows of half a megabyte, of 4 and of 17.
_SIZES: Final = ((1024, 2, 64), (2048, 8, 64), (8192, 8, 64))
_FLUSHED_BYTES: Final = 64 << 20
_WARM_UP: Final = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class PooledRows:
    """Processor time in ms in which a reader pools rows of one table, forward and backward: medians, and their prices.

    Attributes:
        num_bags: Bags, one a sample.
        num_rows: Rows that come, one a lookup.
        embedding_dim: Their columns.
        measured_ms: Forward and backward.
        priced_ms: The same by `reader_ms`.
    """

    num_bags: int
    num_rows: int
    embedding_dim: int
    measured_ms: tuple[float, float]
    priced_ms: tuple[float, float]

    @property
    def cells(self) -> tuple[str, ...]:
        """A row of the table of results."""
        pairs = zip(self.measured_ms, self.priced_ms, strict=True)
        times = (text for measured, priced in pairs for text in (f"{measured:.2f}", f"{priced:.2f}"))
        return (f"{self.num_bags:,}", f"{self.num_rows:,}", str(self.embedding_dim), *times)


@command_options()
class PooledRowsOptions:
    """Options of the study `pooled-rows`."""

    runs: Annotated[int, typer.Option(min=1, help="Measured runs of each size.")] = 5


def measure(num_bags: int, per_bag: int, dim: int, runs: int) -> PooledRows:
    """Runs the engine's functions on rows of a table that several owners share.

    Args:
        num_bags: Samples of the reader.
        per_bag: Lookups of each.
        dim: Columns.
        runs: Measured runs.
    """
    plan = _plan(num_bags, per_bag, dim)
    owners = ownership_of(plan, _OWNERS)
    assembly = Assembly(owners, _reading(owners.holdings[0].kernel_key, dim), torch.device(_DEVICE))
    batch, came = _batch(num_bags, per_bag, dim, owners.holdings[0].kernel_key)
    gradients_BC = torch.randn(num_bags, dim)
    assembled = assembly.put_together(batch, came, NO_LOOKUPS, None, gradients_BC.new_empty(0))[1]
    forward_ms = _median_ms(
        lambda: assembly.put_together(batch, came, NO_LOOKUPS, None, gradients_BC.new_empty(0)), runs
    )
    backward_ms = _median_ms(lambda: assembly.take_apart(assembled, [gradients_BC]), runs)
    priced = reader_ms(plan.shards, num_bags, plan.topology)[0, 1:].tolist()
    return PooledRows(
        num_bags=num_bags,
        num_rows=num_bags * per_bag,
        embedding_dim=dim,
        measured_ms=(forward_ms, backward_ms),
        priced_ms=(priced[0], priced[1]),
    )


def _plan(num_bags: int, per_bag: int, dim: int) -> ShardingPlan:
    table = EmbeddingTable(
        name="t",
        num_embeddings=1 << 16,
        embedding_dim=dim,
        features=(Feature(name="f", pooling_factor=float(per_bag)),),
        access=AccessProfile.uniform(1 << 16),
    )
    placed = PlacedShard(
        shard=Shard.whole(table),
        tier=Tier.ROW_WISE,
        replicas=(tuple(range(_OWNERS)),),
        split=Split.CYCLIC,
        exchange=Exchange.ROWS,
    )
    return ShardingPlan(
        tables=TableSet(batch_size=num_bags * _OWNERS, tables=(table,)),
        topology=local_topology(_DEVICE, _OWNERS, 1 << 30),
        shards=(placed,),
    )


def _reading(key: tuple[object, ...], dim: int) -> Reading:
    feature = RowFeature(feature=0, holding=0, is_whole=True)
    kernel = RowKernel(
        key=key,
        dim=dim,
        holdings=(((0, 0, (0,)),),) * _OWNERS,
        pooled=(feature,),
        sequences=(),
        deduplicated=False,
    )
    return Reading(
        groups=(),
        rows=(kernel,),
        gathered=((0, 0, dim),),
        added=(),
        scattered=(((0, dim),),),
        dim_F=(dim,),
        sequences=(),
    )


def _batch(
    num_bags: int, per_bag: int, dim: int, key: tuple[object, ...]
) -> tuple[DistributedBatch, list[ReceivedVectors]]:
    """A batch whose lookups are of owners at random, and the rows that these send."""
    num_lookups = num_bags * per_bag
    owner_L = torch.randint(_OWNERS, (num_lookups,), generator=torch.Generator().manual_seed(0))
    counts = torch.bincount(owner_L, minlength=_OWNERS).tolist()
    nothing = torch.empty(0, dtype=torch.int64)
    lengths_FB = torch.full((1, num_bags), per_bag, dtype=torch.int32)
    batch = DistributedBatch(
        batch=BatchOfIds(lengths_FB, torch.arange(num_lookups)),
        batch_size=num_bags,
        num_samples=num_bags,
        lengths_FB=lengths_FB,
        counts_F=(num_lookups,),
        served=(),
        local=Request(Jagged(nothing, (), nothing), (), nothing),
        rows=RowLookups(
            lookups_L=torch.argsort(owner_L, stable=True),
            arrival_L=torch.arange(num_lookups),
            counts=tuple(((count,),) for count in counts),
            num_rows=tuple((count,) for count in counts),
        ),
        bucketized=None,
    )
    return batch, [ReceivedVectors(torch.empty(num_bags, 0), {key: torch.randn(count, dim)}) for count in counts]


def _median_ms(run: Callable[[], object], runs: int) -> float:
    return median(list(_times_ms(run, _WARM_UP + runs))[_WARM_UP:])


def _times_ms(run: Callable[[], object], runs: int) -> Iterator[float]:
    """Processor time of the calling thread in each run, with cold caches: other processes do not count."""
    flushed = torch.empty(_FLUSHED_BYTES, dtype=torch.uint8)
    for number in range(runs):
        flushed.fill_(number % 2)
        started_s = time.thread_time()
        run()
        yield (time.thread_time() - started_s) * 1e3


def main(options: PooledRowsOptions, output: OutputOptions) -> None:
    """Measures what pooling rows of other ranks takes a reader, beside what evaluation says.

    Example:
        python -m studies pooled-rows
    """
    torch.set_num_threads(1)
    found = [measure(*size, options.runs) for size in _SIZES]
    table = Table(
        columns=("bags", "rows", "columns", "forward, ms", "priced", "backward, ms", "priced"),
        rows=tuple(one.cells for one in found),
        caption=f"Pooling of rows from {_OWNERS} owners on one thread, medians of {options.runs} runs",
    )
    sizes = {"sizes": [asdict(one) for one in found]}
    document = Machine.of("pooled-rows", options).document(sizes, "autoshard.pooled_rows/1")
    output.write(StudyResult(name="pooled-rows", document=document, tables=(table,)))
