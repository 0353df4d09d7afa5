"""How right counted accesses are, in what memory, and what counting costs: `python -m studies access-counts`.

Lookups of Zipf-like tables are counted as in a job, and rows are compared with the distribution that they were drawn
from, as far as they make 90% of the lookups: group by group, each twice as many rows as the one before, and row by row.
A DLRM is trained with and without counting, in turns.
"""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from statistics import median
from typing import Annotated, Final

import numpy as np
import torch
import torch.distributed as dist
import typer

from autoshard.commands.options import command_options
from autoshard.core import AccessProfile, EmbeddingTable, Feature, PlacedShard, Shard, ShardingPlan, TableSet
from autoshard.core.accepted import FINITE_AT_LEAST_0
from autoshard.core.batches import coprime_step, scatter_ranks
from autoshard.runtime.access_counts import MAX_BYTES, SAMPLED_IDS, AccessCounter
from autoshard.runtime.embeddings import ShardedEmbeddings
from autoshard.runtime.engine.rows.fused import FusedSettings
from autoshard.runtime.training.dense import DenseModel, default_layers
from autoshard.runtime.training.step import TrainingStep, distributed_step
from autoshard.runtime.training.synthetic import draw_samples
from autoshard.table import Table
from autoshard.whatif.trials import local_topology
from studies.frame import Machine, OutputOptions, StudyResult, numbers_in

#: Share of the lookups whose rows are compared.
_COVERED: Final = 0.9
#: Relative error that counts as right.
_TOLERANCE: Final = 0.05
_BATCH: Final = 4_096
#: Lookups of a batch of the counted tables: few, since memory that batches take is measured, too.
_LOOKUPS: Final = 100_000
#: The model that is trained: tables, rows and lookups per sample of each; steps of a turn, and of the counter alone.
_TRAINED_TABLES, _TRAINED_ROWS, _TRAINED_FACTOR = 26, 40_000, 10.0
_TURN, _DIRECT_STEPS = 10, 2_000


@command_options()
class AccessCountOptions:
    """Options of the study `access-counts`."""

    alphas: Annotated[str, typer.Option(help="Zipf exponents of the counted tables, with commas between them.")] = (
        "1.05,1.2,1.4"
    )
    rows: Annotated[int, typer.Option(min=1_000, help="Rows of the counted tables in all.")] = 2_000_000_000
    num_tables: Annotated[int, typer.Option(min=1, help="Counted tables.")] = 8
    batches: Annotated[
        int, typer.Option(min=1, help="Counted batches of each exponent, all of whose ids are taken.")
    ] = 400
    steps: Annotated[int, typer.Option(min=2, help="Training steps with and without counting, each.")] = 200
    seed: Annotated[int, typer.Option(min=0, help="Seed of lookups.")] = 0

    def __post_init__(self) -> None:
        _ = self.exponents

    @property
    def exponents(self) -> tuple[float, ...]:
        """The Zipf exponents."""
        return numbers_in(self.alphas, "--alphas", float, FINITE_AT_LEAST_0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Accuracy:
    """Counts of tables of one exponent.

    Attributes:
        alpha: The exponent.
        num_hits: Lookups that were sampled.
        rows_compared: Rows that make 90% of a table's lookups.
        known_share: Share of the lookups that go to rows which are known one by one.
        group_error: Largest relative error of a group's lookups, over groups and tables.
        curve_error: Largest error of a coverage, over access ranks and tables.
        rows_right: Share of these lookups that go to rows whose own frequency is within 5%.
        hits_for_right: Hits of a row from which on nine of ten rows are within 5%.
        peak_mib: Most memory that was allocated while counting, batches included.
    """

    alpha: float
    num_hits: int
    rows_compared: int
    known_share: float
    group_error: float
    curve_error: float
    rows_right: float
    hits_for_right: float
    peak_mib: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CountingCost:
    """What counting adds to training, in ms of the processor per step; its thread included.

    Attributes:
        ids_per_step: Lookups of a step.
        step_ms: Without counting, median over turns.
        added_ms: With counting, less that; median over turns, in few of which rows are merged.
        direct_ms: What the counter itself took, merging included.
    """

    ids_per_step: int
    step_ms: float
    added_ms: float
    direct_ms: float


def accuracy(alpha: float, options: AccessCountOptions) -> Accuracy:
    """Counts lookups of tables of one exponent."""
    num_rows = options.rows // options.num_tables
    access = AccessProfile.zipf(num_rows, alpha)
    factor = _LOOKUPS / options.num_tables / _BATCH
    tables = TableSet(
        batch_size=_BATCH,
        tables=tuple(_table(number, num_rows, factor, alpha) for number in range(options.num_tables)),
    )
    of_table = _LOOKUPS // options.num_tables
    counter = AccessCounter(tables, sampled_ids=_LOOKUPS, half_life=1e12, seed=(options.seed, 0))
    rng = np.random.default_rng(options.seed)
    tracemalloc.start()
    for _ in range(options.batches):
        ranks_L = access.sample_ranks(of_table * options.num_tables, rng)
        ids_L = torch.from_numpy(scatter_ranks(ranks_L, num_rows))
        counter.observe(ids_L, (of_table,) * options.num_tables, _BATCH)
    counter.close()
    peak_mib = tracemalloc.get_traced_memory()[1] / 2**20
    tracemalloc.stop()
    counts = counter.counted()
    now, rows = counts.tables(tables)
    covered = int(np.searchsorted(access.cumulative_K, _COVERED))
    compared = int(access.ranks_K[covered])
    inverse = pow(coprime_step(num_rows), -1, num_rows)
    groups, known, right, of_hits = [], [], [], []
    for table in now.tables:
        found = rows[table.name]
        # Products of ids and the inverse exceed 64 bits.
        ranks = np.array([one * inverse % num_rows for one in found.ids_N.tolist()])
        groups.append(_group_error(access, ranks, found.shares_N, compared))
        known.append(float(access.probability_at(ranks[: found.num_known].astype(np.float64)).sum()))
        is_compared = ranks < compared
        exact = access.probability_at(ranks[is_compared].astype(np.float64))
        is_right = np.abs(found.shares_N[is_compared] / exact - 1) <= _TOLERANCE
        right.append(float(exact[is_right].sum() / access.coverage(compared)))
        of_hits.append(_hits_for_right(exact * counts.num_hits / options.num_tables, is_right))
    ends = access.ranks_K[1:]
    return Accuracy(
        alpha=alpha,
        num_hits=round(counts.num_hits),
        rows_compared=compared,
        known_share=float(np.mean(known)),
        group_error=max(groups),
        curve_error=max(float(np.abs(one.access.coverage(ends) - access.coverage(ends)).max()) for one in now.tables),
        rows_right=float(np.mean(right)),
        hits_for_right=median(of_hits),
        peak_mib=peak_mib,
    )


def _group_error(access: AccessProfile, ranks: np.ndarray, shares: np.ndarray, compared: int) -> float:
    """Largest relative error of the lookups of rows [0, 1), [1, 2), [2, 4) and so on."""
    ends = np.minimum(2 ** np.arange(64), compared)
    ends = np.concatenate([[0], np.unique(ends[: int(np.searchsorted(ends, compared)) + 1])])
    counted = np.histogram(ranks, bins=ends, weights=shares)[0]
    return float(np.abs(counted / np.diff(access.coverage(ends.astype(np.float64))) - 1).max())


def _hits_for_right(hits: np.ndarray, is_right: np.ndarray) -> float:
    """Expected hits from which on nine of ten rows are right."""
    falling = np.argsort(-hits)
    share = np.cumsum(is_right[falling]) / np.arange(1, len(falling) + 1)
    last = np.flatnonzero(share >= 0.9)
    return float(hits[falling[last[-1]]]) if len(last) else float("inf")


def counting_cost(options: AccessCountOptions) -> CountingCost:
    """Trains with and without counting in turns of ten steps, and compares the processor's time."""
    tables = TableSet(
        batch_size=_BATCH,
        tables=tuple(_table(number, _TRAINED_ROWS, _TRAINED_FACTOR, 1.05) for number in range(_TRAINED_TABLES)),
    )
    shards = tuple(PlacedShard.table_wise(Shard.whole(table), 0) for table in tables.tables)
    plan = ShardingPlan(tables=tables, topology=local_topology("cpu", 1, 1 << 34), shards=shards)
    settings = FusedSettings(learning_rate=0.05)
    with closing(AccessCounter(tables, seed=(options.seed, 0))) as counter:
        engines = {
            is_counted: ShardedEmbeddings(plan, settings, counter=counter if is_counted else None)
            for is_counted in (False, True)
        }
        steps = {is_counted: _step(engine, tables) for is_counted, engine in engines.items()}
        batches = [draw_samples(tables, 13, _BATCH, (options.seed, number)) for number in range(8)]
        turns = []
        for turn in range(-1, options.steps // _TURN):
            times_ms = {}
            for is_counted in (False, True) if turn % 2 else (True, False):
                begun_s = time.process_time()
                for step in range(_TURN):
                    steps[is_counted](batches[step % len(batches)])
                times_ms[is_counted] = (time.process_time() - begun_s) * 1e3 / _TURN
            if turn >= 0:  # the first is a warm-up
                turns.append(times_ms)
        for engine in engines.values():
            engine.close()
    ids = batches[0].ids
    with closing(AccessCounter(tables, seed=(options.seed, 1))) as counter:
        counts_F = tuple(ids.lengths_FB.sum(1).tolist())
        begun_s = time.process_time()
        for _ in range(_DIRECT_STEPS):
            counter.observe(ids.ids_L, counts_F, _BATCH)
        counter.counted()
        direct_ms = (time.process_time() - begun_s) * 1e3 / _DIRECT_STEPS
    return CountingCost(
        ids_per_step=len(ids.ids_L),
        step_ms=median(one[False] for one in turns),
        added_ms=median(one[True] - one[False] for one in turns),
        direct_ms=direct_ms,
    )


def _table(number: int, num_rows: int, factor: float, alpha: float) -> EmbeddingTable:
    feature = Feature(name=f"f{number}", pooling_factor=factor)
    access = AccessProfile.zipf(num_rows, alpha)
    return EmbeddingTable(
        name=f"t{number}", num_embeddings=num_rows, embedding_dim=64, features=(feature,), access=access
    )


def _step(embeddings: ShardedEmbeddings, tables: TableSet) -> TrainingStep:
    dense = DenseModel(default_layers(embeddings.feature_dims), embeddings.feature_dims, 0)
    return distributed_step(embeddings, tables, dense, 0.05)


def main(options: AccessCountOptions, output: OutputOptions) -> None:
    """Compares counted accesses with those that were drawn, and measures what counting costs.

    Example:
        python -m studies access-counts -o docs/figures
    """
    torch.set_num_threads(1)
    found = [accuracy(alpha, options) for alpha in options.exponents]
    dist.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    cost = counting_cost(options)
    dist.destroy_process_group()
    numbers = {
        "rows": options.rows,
        "max_bytes": MAX_BYTES,
        "sampled_ids": SAMPLED_IDS,
        "accuracy": [asdict(one) for one in found],
        "cost": asdict(cost),
    }
    output.write(
        StudyResult(
            name="access-counts",
            document=Machine.of("access-counts", options).document(numbers, "autoshard.access-counts/1"),
            tables=(_accuracy_table(found, options), _cost_table(cost)),
        )
    )


def _accuracy_table(found: Sequence[Accuracy], options: AccessCountOptions) -> Table:
    return Table.of(
        found,
        [
            ("alpha", lambda one: f"{one.alpha:g}"),
            ("lookups sampled", lambda one: f"{one.num_hits:,}"),
            ("rows of 90%", lambda one: f"{one.rows_compared:,}"),
            ("groups, largest error", lambda one: f"{one.group_error:.1%}"),
            ("curve, largest error", lambda one: f"{one.curve_error:.2%}"),
            ("known one by one", lambda one: f"{one.known_share:.1%}"),
            ("rows within 5%, of the 90%", lambda one: f"{one.rows_right:.1%}"),
            ("from hits on", lambda one: f"{one.hits_for_right:,.0f}"),
            ("memory MiB", lambda one: f"{one.peak_mib:.1f}"),
        ],
        caption=f"Counts of {options.rows:,} rows in {options.num_tables} tables, against what was drawn",
    )


def _cost_table(cost: CountingCost) -> Table:
    return Table.of(
        [cost],
        [
            ("lookups a step", lambda one: f"{one.ids_per_step:,}"),
            ("step, processor ms", lambda one: f"{one.step_ms:.1f}"),
            ("counting adds", lambda one: f"{one.added_ms:+.2f} ({one.added_ms / one.step_ms:+.2%})"),
            ("the counter itself", lambda one: f"{one.direct_ms:.3f} ({one.direct_ms / one.step_ms:.2%})"),
        ],
        caption="What counting costs a training step on one core",
    )
