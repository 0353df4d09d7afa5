"""Bytes of each rank that hold tables in tiers, as they are held while a plan runs.

Every tier puts the same on every rank, so that a rank's memory is a sum over tables.
"""

from __future__ import annotations

from collections.abc import Sequence

from autoshard.core import Collective, EmbeddingTable, Exchange
from autoshard.core.plan import Payload
from autoshard.evaluation.batch_memory import gradient_ratio, peak_factor
from autoshard.evaluation.traffic import HELD_ID_BYTES, PairTraffic, id_bytes
from autoshard.planners.flexshard.equations import FlexMachine, TierStrategy
from autoshard.planners.flexshard.frontier import TierBounds


def held_bytes(
    tables: Sequence[EmbeddingTable],
    bounds: Sequence[TierBounds],
    machine: FlexMachine,
    payload: Payload,
    *,
    with_activations: bool,
) -> float:
    """Weights, optimizer state and what training needs, as `evaluate` counts them, but for gradients of replicas.

    Args:
        tables: The tables.
        bounds: By table.
        machine: The machine.
        payload: Number formats of what is sent.
        with_activations: Whether inputs, outputs, what is received and gradients count; dense layers are left out.
    """
    total = outputs = received = 0.0
    for table, bound in zip(tables, bounds, strict=True):
        for strategy, start, stop, exchange in bound.tiers(table):
            owners = machine.num_owners(strategy)
            total += -(-(stop - start) // owners) * (table.storage_bytes // table.num_embeddings)
            if with_activations:
                share = float(table.access.coverage(stop) - table.access.coverage(start))
                requests, answers = pair_bytes(table, share, owners, exchange, machine, payload)
                total += owners * requests
                # What is looked up, and what comes back of it; copies of one's own are looked up where they are used,
                # and a reduce-scatter leaves one answer of all owners.
                is_reduced = machine.collective_of(strategy, exchange) is Collective.REDUCE_SCATTER
                received += answers if is_reduced else owners * answers
                outputs += 0.0 if strategy is TierStrategy.DATA_PARALLEL else owners * answers
    return total + received + max(outputs, gradient_ratio(payload) * (outputs + received))


def pair_bytes(
    table: EmbeddingTable, share: float, owners: int, exchange: Exchange, machine: FlexMachine, payload: Payload
) -> tuple[float, float]:
    """Bytes that a rank asks of one owner with, and that it gets back, for its share of the lookups."""
    batch_size = machine.local_batch_size
    lookups = batch_size * table.pooling_factor * share / owners * peak_factor(table, batch_size)
    bags = batch_size * len(table.features)
    lengths, vectors = (1.0, lookups) if exchange is Exchange.ROWS else (bags, bags)
    values = vectors * table.embedding_dim
    pair = PairTraffic.of_counts(lengths, lookups, values, payload, id_bytes=id_bytes([table]))
    return pair.lengths + lookups * HELD_ID_BYTES, pair.forward
