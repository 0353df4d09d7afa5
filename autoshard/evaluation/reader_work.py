"""Time that ranks work on what they read, besides sending it: on ids that they ask for, and on rows and sums that come.

Shape suffixes: N shards, A amounts, X `EXCHANGE_PARTS`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from autoshard.core import Exchange, GradSync, PlacedShard, Pooling, Split, TableSet, Topology
from autoshard.core.costs import MsArray
from autoshard.core.machine import device_family
from autoshard.evaluation.device_memory import device_memory

#: Rows that came, and their gradients, are fp32.
_VALUE_BYTES = 4

#: What the runtime takes for each amount of what a rank reads (`_amounts`), in seconds: before ids are sent, and for
#: rows and sums that have come, forward and backward. What a batch takes whatever is in it is the weight of `steps`
#: (`core.step.ENGINE_WORK`).
#:
#: By device family. Fitted to what threads computed in 64 plans in virtual time (2 and 8 ranks, 1,500 to 780,000
#: lookups a rank; virtual AMD EPYC with 32 MiB of last-level cache, 2 cores, torch 2.13, November 2026), which the
#: input's take 0.83 to 1.29 times (docs/results/virtual-time.md); sequences that are whole to those of `cost-greedy` in
#: 15 contests of 5 to 31 sequences on 8 and 16 ranks (`studies virtual-contests`, 28 November 2026). Rows in blocks and
#: ranges, and rows that are asked for once, were not among the plans: `cut_lookups` is of `python -m studies
#: input-work`, `dealt_lookups` what the plans leave for it.
#:
#: Of GPUs, where nobody has measured it, the roofline of fused kernels prices what is pooled, and nothing all else.
READER_SPEED: Final[Mapping[str, Mapping[str, tuple[float, float, float]]]] = {
    "cpu": {
        # Of a lookup, for every shard that it is sent to: checked, put in order, packed, unpacked.
        "lookups": (1.5e-9, 0.0, 0.0),
        # Of the length of a bag, for every owner that is asked for its sum.
        "lengths": (15e-9, 0.0, 0.0),
        # Of a lookup in a table whose rows several ranks hold: lookups are put in the order of owners.
        "cut_lookups": (13e-9, 0.0, 0.0),
        # Of one of these where rows are not in one block after the other: the place of each is worked out.
        "dealt_lookups": (12e-9, 0.0, 0.0),
        # Of a lookup that is answered with its row: it is matched to the rows that will come.
        "row_lookups": (2e-9, 0.0, 0.0),
        # Of one of these where rows are asked for once: ids are sorted.
        "repeated_lookups": (25e-9, 0.0, 0.0),
        # Of asking one owner for rows of one shard.
        "requests": (10e-6, 0.0, 0.0),
        # Of a distinct row with several replicas that a rank tells their holders that it hits, on each of these: rows
        # of all ranks are brought together.
        "told_rows": (120e-9, 0.0, 0.0),
        # Of a lookup whose row is pooled.
        "pooled_lookups": (0.0, 30e-9, 35e-9),
        # Of a byte of the sums that are made of such rows.
        "pooled_bytes": (0.0, 0.9e-9, 0.1e-9),
        # Of a byte of rows of a sequence, which are put where their lookups are.
        "sequence_bytes": (0.0, 0.39e-9, 0.41e-9),
        # Of a shard of a sequence.
        "sequences": (0.0, 56e-6, 24e-6),
        # Of one of these whose rows are on several ranks, beside that.
        "split_sequences": (0.0, 89e-6, 24e-6),
        # Of a byte of means: sums come, and are divided by the lengths of bags.
        "mean_bytes": (0.0, 0.9e-9, 0.27e-9),
    }
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SumSpeed:
    """What the model of `autoshard.runtime.training` takes to add up the rows of its sequences, in seconds, both ways.

    Attributes:
        feature_s: Of a feature that is a sequence.
        lookup_s: Of a row of one.
        byte_s: Of a byte of such rows.
        joined_s: Of a byte of the vectors of all features, which are put side by side where some are sequences.
    """

    feature_s: tuple[float, float]
    lookup_s: tuple[float, float]
    byte_s: tuple[float, float]
    joined_s: tuple[float, float]


#: By device family; nobody has measured a GPU's. By six runs of 36 models of 5 and 20 sequences among 30 tables of
#: sums, 3 to 40 rows a sample of 16 and 64 columns, 32 to 512 samples, whose fits of a byte of vectors lie between 0.14
#: and 0.27 ns forward (`studies processor-work`, one thread of a virtual AMD EPYC, torch 2.13, 28 November 2026;
#: docs/results/virtual-time.md).
SUM_SPEED: Final = {
    "cpu": SumSpeed(
        feature_s=(51e-6, 20e-6),
        lookup_s=(17e-9, 3.5e-9),
        byte_s=(0.13e-9, 0.17e-9),
        joined_s=(0.22e-9, 0.22e-9),
    )
}


def reader_ms(placed_N: Sequence[PlacedShard], local_batch: float, topology: Topology) -> MsArray:
    """What each rank that reads a shard works on it, in ms; shape (N, X).

    Before ids are sent, it splits them by the ranks that hold their rows; ranks serve about as much as they ask for,
    and what serving takes is counted here. Forward reads every row that came once, adds the lookups up, and writes the
    bags. Backward reads the gradients of the bags and writes one for every row; where several lookups share a row, they
    are sorted first, as in a fused kernel. Rows of sequences are put in their order, and means are scaled, whoever
    added them up. Sums take nothing once they have come, nor do rows that are pooled where they are.

    Args:
        placed_N: Shards in a plan over all ranks of the topology.
        local_batch: Samples of each rank.
        topology: Of the ranks.

    Source:
        What `autoshard.runtime.engine.ids` and `autoshard.runtime.engine.vectors.assembly` run: `READER_SPEED`, or the
        roofline of `kernel_seconds`. Measured over predicted: docs/results/execution.md, docs/results/virtual-time.md.
    """
    speed = READER_SPEED.get(device_family(topology.device))
    if speed is None:
        return _roofline_ms(placed_N, local_batch, topology)
    amounts = [_amounts(placed, local_batch, topology.world_size) for placed in placed_N]
    amounts_NA = np.array([[one[name] for name in speed] for one in amounts], dtype=np.float64)
    return np.asarray(amounts_NA.reshape(-1, len(speed)) @ np.array(list(speed.values())) * 1e3)


def needed_once(placed_N: Sequence[PlacedShard], num_ranks: int) -> MsArray:
    """What readers do once in a step if any shard needs it, shape (N, 2): pool rows that come; find owners of rows.

    Args:
        placed_N: Shards in a plan over all ranks.
        num_ranks: These.
    """
    needed = [(_pools_rows(placed, num_ranks), _is_cut(placed)) for placed in placed_N]
    return np.array(needed, dtype=np.float64).reshape(-1, 2)


def sequence_sums_ms(tables: TableSet, local_batch: float, device: str) -> MsArray:
    """What a rank takes to make one vector of each sequence of its samples, forward and backward, in ms; shape (2,).

    Args:
        tables: Tables of the model.
        local_batch: Samples of the rank.
        device: Key of the device.

    Source:
        `autoshard.runtime.training.step.FeatureVectors`: `SUM_SPEED`.
    """
    speed = SUM_SPEED.get(device_family(device))
    if speed is None or all(table.pooling is not Pooling.SEQUENCE for table in tables.tables):
        return np.zeros(2)
    seconds_42 = np.array([speed.feature_s, speed.lookup_s, speed.byte_s, speed.joined_s])
    return np.asarray(sequence_amounts(tables, local_batch) @ seconds_42 * 1e3)


def sequence_amounts(tables: TableSet, local_batch: float) -> NDArray[np.float64]:
    """What `SumSpeed` counts of a rank: sequences, rows of them, bytes of these and of all vectors; shape (4,)."""
    sequences = [table for table in tables.tables if table.pooling is Pooling.SEQUENCE]
    lookups_N = np.array([local_batch * table.pooling_factor for table in sequences])
    num_bytes = float(lookups_N @ [_VALUE_BYTES * table.embedding_dim for table in sequences])
    columns = sum(len(table.features) * table.embedding_dim for table in tables.tables)
    num_features = sum(len(table.features) for table in sequences)
    return np.array([num_features, float(lookups_N.sum()), num_bytes, local_batch * columns * _VALUE_BYTES])


def _amounts(placed: PlacedShard, local_batch: float, num_ranks: int) -> dict[str, float]:
    """What a reader does with one shard, by the names of `READER_SPEED`."""
    table, num_owners = placed.shard.table, len(placed.replicas[0])
    profile, share = placed.shard.access()
    is_range = placed.shard.num_embeddings < table.num_embeddings
    is_dealt = (num_owners > 1 and placed.split is not Split.BLOCK) or (is_range and len(placed.replicas) > 1)
    num_lookups, num_bags = local_batch * table.pooling_factor * share, local_batch * len(table.features)
    vector_bytes = placed.shard.embedding_dim * _VALUE_BYTES
    run = placed.as_run(num_ranks)
    comes_by_row, is_sequence = run.exchange is Exchange.ROWS, table.pooling is Pooling.SEQUENCE
    is_pooled = comes_by_row and not is_sequence
    told_rows = 0.0
    if placed.grad_sync in (GradSync.SPARSE, GradSync.ALL_GATHER):
        # Each holder of a part of the rows hears of all ranks' rows in it.
        told_rows = num_ranks / num_owners * float(profile.expected_distinct(num_lookups))
    return {
        "lookups": num_lookups,
        "lengths": 0.0 if comes_by_row else num_bags * num_owners,
        "cut_lookups": num_lookups * _is_cut(placed),
        "dealt_lookups": num_lookups * is_dealt,
        "row_lookups": num_lookups * comes_by_row,
        "repeated_lookups": num_lookups * (comes_by_row and run.deduplicate),
        "requests": float(num_owners * comes_by_row),
        "told_rows": told_rows,
        "pooled_lookups": num_lookups * is_pooled,
        "pooled_bytes": num_bags * vector_bytes * is_pooled,
        "sequence_bytes": num_lookups * vector_bytes * is_sequence,
        "sequences": float(is_sequence),
        "split_sequences": float(is_sequence and num_owners > 1),
        "mean_bytes": num_bags * share * vector_bytes * (table.pooling is Pooling.MEAN),
    }


def _pools_rows(placed: PlacedShard, num_ranks: int) -> bool:
    """Whether rows come that readers pool."""
    return placed.as_run(num_ranks).exchange is Exchange.ROWS and placed.shard.table.pooling is not Pooling.SEQUENCE


def _is_cut(placed: PlacedShard) -> bool:
    """Whether readers look for the owner of each row."""
    return len(placed.replicas[0]) > 1 or placed.shard.num_embeddings < placed.shard.table.num_embeddings


def _roofline_ms(placed_N: Sequence[PlacedShard], local_batch: float, topology: Topology) -> MsArray:
    """As `reader_ms`, where nobody measured: as if fused kernels pooled the rows that come."""
    memory = device_memory(topology.device, topology.memory_bandwidth.hbm)
    pooled = [_pooled(placed, local_batch, topology.world_size) for placed in placed_N]
    lookups_N, rows_N, bags_N, dim_N = np.array(pooled, dtype=np.float64).reshape(-1, 4).T
    vector_bytes_N = dim_N * _VALUE_BYTES
    written_s_N = vector_bytes_N / (memory.output_bytes_per_s or memory.gather_bytes_per_s)
    repeats_s_N = (lookups_N - rows_N) * vector_bytes_N / memory.cache_bytes_per_s
    forward_s_N = (
        lookups_N * memory.lookup_s
        + rows_N * vector_bytes_N / memory.gather_bytes_per_s
        + repeats_s_N
        + bags_N * written_s_N
    )
    sorted_s_N = np.where(lookups_N > rows_N, lookups_N * memory.sort_s, 0.0)
    backward_s_N = (bags_N + rows_N) * written_s_N + repeats_s_N + sorted_s_N
    return np.column_stack([np.zeros(len(placed_N)), forward_s_N, backward_s_N]) * 1e3


def _pooled(placed: PlacedShard, local_batch: float, num_ranks: int) -> tuple[float, float, float, float]:
    """Lookups, rows that come, bags and columns; nothing but columns where nothing is pooled."""
    table, dim = placed.shard.table, float(placed.shard.embedding_dim)
    if not _pools_rows(placed, num_ranks):
        return 0.0, 0.0, 0.0, dim
    profile, share = placed.shard.access()
    num_lookups = local_batch * table.pooling_factor * share
    num_rows = float(profile.expected_distinct(num_lookups)) if placed.deduplicate else num_lookups
    return num_lookups, num_rows, local_batch * len(table.features), dim
