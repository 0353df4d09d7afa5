"""Bytes of each rank that hold tables in tiers, as they are held while a plan runs.

Every tier puts the same on every rank, so that a rank's memory is a sum over tables.

Shape suffixes: K knots of an access curve, I intervals between them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autoshard.core import EmbeddingTable, Exchange, GradSync
from autoshard.core.plan import Payload
from autoshard.evaluation.batch_memory import peak_factor
from autoshard.evaluation.traffic import ID_BYTES, REDUCED_BYTES, PairTraffic
from autoshard.planners.flexshard.equations import Machine, Strategy
from autoshard.planners.flexshard.frontier import TierBounds


def held_bytes(
    tables: Sequence[EmbeddingTable],
    bounds: Sequence[TierBounds],
    machine: Machine,
    payload: Payload,
    *,
    with_activations: bool,
) -> float:
    """Weights, optimizer state and activations of each rank, as `evaluate` counts them.

    Args:
        tables: The tables.
        bounds: By table.
        machine: The machine.
        payload: Number formats of what is sent.
        with_activations: Whether inputs, outputs and what is received count; gradients of replicas always do.
    """
    total = 0.0
    for table, bound in zip(tables, bounds, strict=True):
        for strategy, start, stop, exchange in bound.tiers(table):
            owners = machine.num_owners(strategy)
            total += -(-(stop - start) // owners) * (table.storage_bytes // table.num_embeddings)
            if owners < machine.world_size:
                batch_size = machine.local_batch_size * machine.world_size
                total += gradient_sum(table, start, stop, batch_size)[1] / owners
            if with_activations:
                share = float(table.access.coverage(stop) - table.access.coverage(start))
                requests, answers = pair_bytes(table, share, owners, exchange, machine, payload)
                # What is looked up, and what comes back of it; copies of one's own are looked up where they are used.
                total += owners * (requests + (1 if strategy is Strategy.DATA_PARALLEL else 2) * answers)
    return total


def pair_bytes(
    table: EmbeddingTable, share: float, owners: int, exchange: Exchange, machine: Machine, payload: Payload
) -> tuple[float, float]:
    """Bytes that a rank asks of one owner with, and that it gets back, for its share of the lookups."""
    batch_size = machine.local_batch_size
    lookups = batch_size * table.pooling_factor * share / owners * peak_factor(table, batch_size)
    bags = batch_size * len(table.features)
    lengths, vectors = (1.0, lookups) if exchange is Exchange.ROWS else (bags, bags)
    pair = PairTraffic.of_counts(lengths, lookups, vectors * table.embedding_dim, payload)
    return pair.lengths + pair.ids, pair.forward


def gradient_sum(table: EmbeddingTable, start: int, stop: int, batch_size: float) -> tuple[GradSync, float]:
    """How gradients of replicated rows [start, stop) by access rank are summed, and the bytes of a replica.

    Whole, or those of the rows that a batch of all ranks is expected to hit, with their ids: what is fewer bytes.
    """
    row_bytes = table.embedding_dim * REDUCED_BYTES
    knots_K = table.access.ranks_K
    knots_K = np.concatenate([[start], knots_K[(knots_K > start) & (knots_K < stop)], [stop]])
    rows_I = np.diff(knots_K)
    lookups_I = np.diff(table.access.coverage(knots_K)) * (batch_size * table.pooling_factor)
    hit = float((rows_I * -np.expm1(-lookups_I / rows_I)).sum())
    dense, sparse = float((stop - start) * row_bytes), hit * (row_bytes + ID_BYTES)
    return (GradSync.SPARSE, sparse) if sparse < dense else (GradSync.DENSE, dense)
