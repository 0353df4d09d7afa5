"""Time that ranks take to pool rows that come from other ranks or are a sequence's, and to spread gradients over them.

Shape suffixes: N shards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from autoshard.core import Exchange, PlacedShard, Pooling, TableSet, Topology
from autoshard.core.costs import MsArray
from autoshard.core.machine import device_family
from autoshard.evaluation.device_memory import device_memory

#: Rows that came, and their gradients, are fp32.
_VALUE_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingSpeed:
    """What the runtime takes for rows and sums that have come, in seconds, forward and backward.

    Attributes:
        lookup_s: Of a lookup whose row is pooled.
        bag_s: Of a byte of the sums that are made of such rows.
        placed_s: Of a byte of rows of a sequence, which are put where their lookups are.
        sequence_s: Of a shard of a sequence.
        split_s: Of one whose rows are on several ranks, beside that.
        scaled_s: Of a byte of means: sums come, and are divided by the lengths of bags.
    """

    lookup_s: tuple[float, float]
    bag_s: tuple[float, float]
    placed_s: tuple[float, float]
    sequence_s: tuple[float, float]
    split_s: tuple[float, float]
    scaled_s: tuple[float, float]


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


#: By device family. Fitted as `INPUT_SPEED` of `input_work`, to the same plans; sequences that are whole to those of
#: `cost-greedy` in 15 contests of 5 to 31 sequences on 8 and 16 ranks (`studies virtual-contests`, 28 November 2026).
#: Of GPUs, where nobody has measured it, the roofline of fused kernels prices what is pooled, and nothing what is
#: placed and scaled.
POOLING_SPEED: Final = {
    "cpu": PoolingSpeed(
        lookup_s=(30e-9, 35e-9),
        bag_s=(0.9e-9, 0.1e-9),
        placed_s=(0.39e-9, 0.41e-9),
        sequence_s=(56e-6, 24e-6),
        split_s=(89e-6, 24e-6),
        scaled_s=(0.9e-9, 0.27e-9),
    )
}


def pooling_ms(placed_N: Sequence[PlacedShard], local_batch: float, topology: Topology) -> MsArray:
    """What each rank that reads a shard takes to pool its rows, forward and backward, in ms; shape (N, 2).

    Forward reads every row that came once, adds the lookups up, and writes the bags. Backward reads the gradients of
    the bags and writes one for every row; where several lookups share a row, they are sorted first, as in a fused
    kernel. Rows of sequences are put in their order, and means are scaled, whoever added them up. Sums take nothing
    here, nor do rows that are pooled where they are.

    Args:
        placed_N: Shards in a plan over all ranks of the topology.
        local_batch: Samples of each rank.
        topology: Of the ranks.

    Source:
        What `autoshard.runtime.engine.vectors.assembly` runs: `POOLING_SPEED`, or the roofline of `kernel_seconds`.
        Measured over predicted: docs/results/virtual-time.md.
    """
    amounts = [_amounts(placed, local_batch, topology.world_size) for placed in placed_N]
    speed = POOLING_SPEED.get(device_family(topology.device))
    if speed is None:
        return _roofline_ms(np.array(amounts, dtype=np.float64).reshape(-1, 4), topology)
    of_sequences = (speed.placed_s, speed.sequence_s, speed.split_s)
    seconds_62 = np.array([speed.lookup_s, speed.bag_s, *of_sequences, speed.scaled_s])
    done_N6 = np.zeros((len(placed_N), len(seconds_62)))
    for done_6, placed, (num_lookups, _, num_bags, dim) in zip(done_N6, placed_N, amounts, strict=True):
        table, share, vector_bytes = placed.shard.table, placed.shard.access()[1], dim * _VALUE_BYTES
        done_6[:2] = num_lookups, num_bags * vector_bytes
        if table.pooling is Pooling.SEQUENCE:
            is_split = len(placed.replicas[0]) > 1
            done_6[2:5] = local_batch * table.pooling_factor * share * vector_bytes, 1.0, is_split
        if table.pooling is Pooling.MEAN:
            done_6[5] = local_batch * len(table.features) * share * vector_bytes
    return np.asarray(done_N6 @ seconds_62 * 1e3)


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


def _roofline_ms(amounts_N4: MsArray, topology: Topology) -> MsArray:
    memory = device_memory(topology.device, topology.memory_bandwidth.hbm)
    lookups_N, rows_N, bags_N, dim_N = amounts_N4.T
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
    return np.column_stack([forward_s_N, backward_s_N]) * 1e3


def _amounts(placed: PlacedShard, local_batch: float, num_ranks: int) -> tuple[float, float, float, float]:
    """Lookups, rows that come, bags and columns; nothing but columns where nothing is pooled."""
    table, dim = placed.shard.table, float(placed.shard.embedding_dim)
    sends_rows = placed.as_run(num_ranks).exchange is Exchange.ROWS
    if not sends_rows or table.pooling is Pooling.SEQUENCE:
        return 0.0, 0.0, 0.0, dim
    profile, share = placed.shard.access()
    num_lookups = local_batch * table.pooling_factor * share
    num_rows = float(profile.expected_distinct(num_lookups)) if placed.deduplicate else num_lookups
    return num_lookups, num_rows, local_batch * len(table.features), dim
