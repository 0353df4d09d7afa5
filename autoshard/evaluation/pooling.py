"""Time that ranks take to pool rows that come from other ranks, and to spread the gradients of bags over them.

Shape suffixes: N shards.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autoshard.core import Exchange, PlacedShard, Pooling, Topology
from autoshard.core.costs import MsArray
from autoshard.evaluation.device_memory import device_memory

#: Rows that came, and their gradients, are fp32.
_VALUE_BYTES = 4


def pooling_ms(placed_N: Sequence[PlacedShard], local_batch: float, topology: Topology) -> MsArray:
    """What each rank that reads a shard takes to pool its rows, forward and backward, in ms; shape (N, 2).

    Forward reads every row that came once, adds the lookups up, and writes the bags. Backward reads the gradients of
    the bags and writes one for every row; where several lookups share a row, they are sorted first, as in a fused
    kernel. Sums and sequences take nothing, nor do rows that are pooled where they are.

    Args:
        placed_N: Shards in a plan over all ranks of the topology.
        local_batch: Samples of each rank.
        topology: Of the ranks.

    Source:
        The roofline of `kernel_seconds`, for what `autoshard.runtime.engine.vectors.assembly` runs. Measured over
        predicted: docs/results/planners.md.
    """
    memory = device_memory(topology.device, topology.memory_bandwidth.hbm)
    amounts = [_amounts(placed, local_batch, topology.world_size) for placed in placed_N]
    lookups_N, rows_N, bags_N, dim_N = np.array(amounts, dtype=np.float64).reshape(-1, 4).T
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
