"""What a table's rows cost in each tier, as numbers that are linear in rows and lookups.

Shape suffixes: I intervals of an access curve with rows of one probability, S strategies.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import lru_cache

import numpy as np

from autoshard.core import Collective, EmbeddingTable, Exchange, Payload, Pooling, Tier, weight_row_bytes
from autoshard.core.access import FloatArray
from autoshard.evaluation.traffic import REDUCED_BYTES, wire_bytes
from autoshard.planners.flexshard.equations import (
    FlexMachine,
    RowSet,
    TierStrategy,
    dynamic_communication_s,
    dynamic_memory_bytes,
    input_distribution_s,
    reduced_communication_s,
    reduced_memory_bytes,
    static_communication_s,
    static_memory_bytes,
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TierCost:
    """Memory per rank and time per step of some rows of a table in one tier.

    Each cost is an array of two: bytes, and seconds.

    Attributes:
        strategy: The tier.
        exchange: What owners send back.
        per_row: Cost of a row.
        per_lookup: Cost of one lookup per sample.
        fixed: Cost as soon as the tier has a row.
    """

    strategy: TierStrategy
    exchange: Exchange
    per_row: FloatArray
    per_lookup: FloatArray
    fixed: FloatArray

    def of(self, rows_I: FloatArray, lookups_I: FloatArray) -> FloatArray:
        """Bytes and seconds without the fixed part, shape (2, I)."""
        return rows_I * self.per_row[:, None] + lookups_I * self.per_lookup[:, None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pricing:
    """How tables are priced.

    Attributes:
        machine: The machine.
        memory_multiplier: Bytes held per replicated byte of weights, where split rows have 1 (the paper's way); 0 for
            what each table's optimizer needs, where split rows have their state too.
        payload: Number formats of what is sent; the equations have one for both ways, of their mean width.
    """

    machine: FlexMachine
    memory_multiplier: float = 0.0
    payload: Payload = field(default_factory=Payload)

    def rows_of(self, table: EmbeddingTable) -> RowSet:
        """The whole table, for the scaling equations."""
        replica, sharded = self.memory_multiplier, 1.0
        if not self.memory_multiplier:
            replica, sharded = real_multipliers(table)
        return RowSet(
            num_rows=table.num_embeddings,
            lookups_per_sample=table.pooling_factor,
            embedding_dim=table.embedding_dim,
            weight_bytes=weight_row_bytes(table.dtype, table.optimizer, table.embedding_dim) / table.embedding_dim,
            payload_bytes=(wire_bytes(self.payload.forward) + wire_bytes(self.payload.backward)) / 2,
            replica_multiplier=replica,
            sharded_multiplier=sharded,
        )

    def cost(self, table: EmbeddingTable, strategy: TierStrategy, exchange: Exchange) -> TierCost:
        """What the table's rows cost in a tier.

        Owners that send partial sums send a vector per bag, each of them, whatever the lookups; those of the row-wise
        tier travel by the faster collective. Replicas of pooled tables are pooled where they are.

        Source:
            FlexShard, Tables 2 and 3, with the time of the ids added; partial sums and pooling are not in the paper.
        """
        kind = self.rows_of(table).one_lookup
        return _cost(self.machine, kind, strategy, exchange, len(table.features), table.pooling is Pooling.SEQUENCE)


@lru_cache(maxsize=4096)
def _cost(
    machine: FlexMachine,
    rows: RowSet,
    strategy: TierStrategy,
    exchange: Exchange,
    num_features: int,
    is_sequence: bool,
) -> TierCost:
    """What rows cost in a tier; kept, for tables of one width and optimizer cost alike."""
    row, lookup = rows.one_row, rows.one_lookup
    is_replicated = strategy is TierStrategy.DATA_PARALLEL
    by_lookup = is_sequence if is_replicated else exchange is Exchange.ROWS
    vectors = 0 if is_replicated else machine.num_owners(strategy) * num_features
    sent = lookup if by_lookup else replace(lookup, lookups_per_sample=vectors)
    if machine.collective_of(strategy, exchange) is Collective.REDUCE_SCATTER:
        sent_memory, sent_s = reduced_memory_bytes(sent, machine), reduced_communication_s(sent, machine)
    else:
        sent_memory, sent_s = (
            dynamic_memory_bytes(strategy, sent, machine),
            dynamic_communication_s(strategy, sent, machine),
        )
    sent_cost = np.array([sent_memory, 2 * sent_s])
    synced_s = static_communication_s(strategy, replace(row, payload_bytes=REDUCED_BYTES), machine)
    ids_cost = np.array([0.0, input_distribution_s(strategy, lookup, machine)])
    return TierCost(
        strategy=strategy,
        exchange=exchange,
        per_row=np.array([static_memory_bytes(strategy, row, machine), synced_s]),
        per_lookup=ids_cost + sent_cost if by_lookup else ids_cost,
        fixed=np.zeros(2) if by_lookup else sent_cost,
    )


def real_multipliers(table: EmbeddingTable) -> tuple[float, float]:
    """Bytes held per byte of weights: of replicated rows, and of rows that are on one rank only.

    Both hold the optimizer's state. Gradients of replicas are collected in fp32, row by row, before the all-reduce;
    those of other rows go into the fused update and are never held.
    """
    state = table.optimizer.state_bytes_per_row(table.embedding_dim)
    weights = weight_row_bytes(table.dtype, table.optimizer, table.embedding_dim)
    gradients = table.embedding_dim * REDUCED_BYTES
    return (weights + state + gradients) / weights, (weights + state) / weights


def tiers_of(table: EmbeddingTable, machine: FlexMachine, num_tiers: int) -> tuple[TierStrategy, ...]:
    """Strategies that a table's rows may have, from least to most replicated.

    With two tiers rows are row-wise or data-parallel, the third is Flex in between. Flex is left out where it is
    one of the others, or where nodes are slower than what connects them. A table whose row order is unknown has one
    strategy for all its rows.
    """
    bandwidths = machine.bandwidths
    is_flex_apart = min(machine.num_nodes, machine.ranks_per_node) > 1
    offered = {
        TierStrategy.ROW_WISE: True,
        TierStrategy.FLEX: num_tiers > 2
        and is_flex_apart
        and bandwidths.all_to_all_intra >= bandwidths.all_to_all_global,
        TierStrategy.DATA_PARALLEL: num_tiers > 1 and machine.world_size > 1,
    }
    forbidden = table.constraints.forbidden_tiers
    tiers = tuple(strategy for strategy, is_there in offered.items() if is_there and Tier(strategy) not in forbidden)
    return tiers if table.row_order is not None else tiers[:1]


def intervals(table: EmbeddingTable) -> tuple[FloatArray, FloatArray]:
    """Rows between the knots of a table's access curve, and their lookups per sample, shapes (I,)."""
    rows_I = np.diff(table.access.ranks_K)
    return rows_I, np.diff(table.access.cumulative_K) * table.pooling_factor
