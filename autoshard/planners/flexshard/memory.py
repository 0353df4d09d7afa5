"""Bytes of each rank that hold tables in tiers, as plans are evaluated.

Every tier puts the same on every rank, so that a rank's memory is a sum over tables.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from autoshard.core import EmbeddingTable, Exchange, Pooling
from autoshard.core.plan import Payload
from autoshard.evaluation.traffic import ID_BYTES, LENGTH_BYTES
from autoshard.planners.flexshard.equations import Machine, Strategy
from autoshard.planners.flexshard.frontier import TierBounds

#: Of the normal distribution: what a batch's sum exceeds once in a hundred steps.
_P99_DEVIATIONS = 2.3263


def segments(table: EmbeddingTable, bounds: TierBounds) -> tuple[tuple[Strategy, int, int, Exchange], ...]:
    """A table's tiers that have rows: strategy, first access rank, end, and exchange."""
    replicated, flexed, end = bounds.replicated, bounds.flexed, table.num_embeddings
    hot = Exchange.ROWS if table.pooling is Pooling.SEQUENCE else Exchange.PARTIAL_SUMS
    parts = (
        (Strategy.DATA_PARALLEL, 0, replicated, hot),
        (Strategy.FLEX, replicated, flexed, bounds.flex_exchange),
        (Strategy.ROW_WISE, flexed, end, bounds.tail_exchange),
    )
    return tuple(part for part in parts if part[1] < part[2])


def held_bytes(
    tables: Sequence[EmbeddingTable],
    bounds: Sequence[TierBounds],
    machine: Machine,
    payload: Payload,
    *,
    with_activations: bool,
) -> float:
    """Weights, optimizer state and activations of each rank.

    Activations are inputs, outputs and what is received, as in `Traffic.activation_bytes`. Differs: sequences count
    at the 99th percentile of the batch's lookups.

    Args:
        tables: The tables.
        bounds: By table.
        machine: The machine.
        payload: Number formats on the wire.
        with_activations: Whether activations count.
    """
    total = 0.0
    for table, bound in zip(tables, bounds, strict=True):
        row_bytes = table.embedding_dim * table.dtype.num_bytes
        row_bytes += table.optimizer.state_bytes_per_row(table.embedding_dim)
        for strategy, start, stop, exchange in segments(table, bound):
            owners = owners_of(strategy, machine)
            total += -(-(stop - start) // owners) * row_bytes
            if with_activations:
                share = float(table.access.coverage(stop) - table.access.coverage(start))
                requests, answers = pair_bytes(table, share, owners, exchange, machine.local_batch_size, payload)
                total += owners * (requests + 2 * answers)
    return total


def owners_of(strategy: Strategy, machine: Machine) -> int:
    """Ranks over which a copy of the rows is split."""
    return {Strategy.ROW_WISE: machine.world_size, Strategy.FLEX: machine.ranks_per_node}.get(strategy, 1)


def pair_bytes(
    table: EmbeddingTable, share: float, owners: int, exchange: Exchange, local_batch_size: float, payload: Payload
) -> tuple[float, float]:
    """Bytes that a rank asks of one owner with, and that it gets back, for its share of the lookups."""
    bags = local_batch_size * len(table.features)
    lookups = local_batch_size * table.pooling_factor * share / owners * peak_factor(table, local_batch_size)
    vectors = lookups if exchange is Exchange.ROWS else bags
    return bags * LENGTH_BYTES + lookups * ID_BYTES, vectors * table.embedding_dim * payload.forward.num_bytes


def peak_factor(table: EmbeddingTable, local_batch_size: float) -> float:
    """99th percentile over mean of the lookups of a rank's batch in a sequence table; 1 for pooled tables.

    Samples are independent, so that the batch's sum is close to normal. A feature without a variance takes that of
    a normal distribution with its 99th percentile.
    """
    if table.pooling is not Pooling.SEQUENCE or not table.pooling_factor or not local_batch_size:
        return 1.0
    variance = 0.0
    for feature in table.features:
        beyond = max(0.0, (feature.pooling_p99 or 0.0) - feature.pooling_factor)
        variance += feature.pooling_variance or (beyond / _P99_DEVIATIONS) ** 2
    return 1.0 + _P99_DEVIATIONS * math.sqrt(variance / local_batch_size) / table.pooling_factor
