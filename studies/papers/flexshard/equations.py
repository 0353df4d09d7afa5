"""FlexShard's formulas that only its figures need.

The letters are those of `autoshard.planners.flexshard.equations`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from autoshard.core.accepted import Range
from autoshard.core.errors import InvalidTopologyError
from autoshard.planners.flexshard.equations import (
    Bandwidths,
    FlexMachine,
    RowSet,
    TierStrategy,
    dynamic_memory_bytes,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedBandwidths(Bandwidths):
    """Bandwidths with that of sums, which the paper does not have."""

    reduce_scatter_global: float
    """Of the input of a reduce-scatter and the output of an all-gather, one after the other."""


def memory_neutral_probability(
    world_size: int, local_batch_size: float, memory_multiplier: float, sharded_multiplier: float = 1.0
) -> float:
    """Row probability above which replicating a row on every rank saves memory over row-wise sharding.

    Args:
        world_size: Number of ranks U, at least 2.
        local_batch_size: Samples per rank and step, B.
        memory_multiplier: Bytes held per replicated byte of weights (optimizer state, gradients).
        sharded_multiplier: Bytes held per byte of weights that are not replicated; the paper takes 1.

    Returns:
        Expected lookups of the row in one sample, in [0, inf); what no row reaches if replicas never save memory.

    Raises:
        InvalidTopologyError: If world_size is below 2.

    Source:
        FlexShard, Table 2 and Sec. 4.2: (m - 1/U) / B, with weights and payload of one dtype.
    """
    Range(at_least=2).check(world_size, "world_size", InvalidTopologyError)
    more = max(0.0, memory_multiplier - sharded_multiplier / world_size)
    return more / local_batch_size if local_batch_size > 0 else math.inf


def ids_distributed(strategy: TierStrategy, rows: RowSet, machine: FlexMachine) -> float:
    """Ids that a rank sends before lookups can start.

    Source:
        FlexShard, Table 3, "input data dist".
    """
    copies = {TierStrategy.COLUMN_WISE: machine.world_size, TierStrategy.DATA_PARALLEL: 0}.get(strategy, 1)
    return copies * machine.local_batch_size * rows.lookups_per_sample


def reduced_memory_bytes(rows: RowSet, machine: FlexMachine) -> float:
    """As `dynamic_memory_bytes`, of sums of rows over all ranks that are added up on the way: one comes of each U."""
    looked_up = dynamic_memory_bytes(TierStrategy.DATA_PARALLEL, rows, machine)
    return looked_up * (1 + 1 / machine.world_size)


def reduced_communication_s(rows: RowSet, machine: FlexMachine, bytes_per_s: float) -> float:
    """As `dynamic_communication_s`, of a reduce-scatter or of its all-gather; not in the paper."""
    num_bytes = machine.local_batch_size * rows.lookups_per_sample * rows.embedding_dim * rows.payload_bytes
    return num_bytes / bytes_per_s
