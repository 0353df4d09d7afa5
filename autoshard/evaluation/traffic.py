"""Bytes that a plan sends between ranks in one step.

Shape suffixes: R ranks. Where a matrix has (R, R), entry [i, j] travels from rank i to rank j, and the diagonal is
what stays.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from autoshard.core import Exchange, GradSync, PlacedShard, ShardingPlan
from autoshard.core.costs import MsArray
from autoshard.core.plan import Payload

ID_BYTES = 8
LENGTH_BYTES = 4
#: Gradients are reduced in fp32, whatever the weights are.
REDUCED_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Bytes per step: requests to owners, embeddings back, gradients to owners, and sums over replicas."""

    lengths_RR: MsArray
    ids_RR: MsArray
    forward_RR: MsArray
    backward_RR: MsArray
    sync_R: MsArray
    """Bytes of gradients that each rank puts into all-reduces, as those of an all-reduce over all ranks."""

    def activation_bytes(self) -> MsArray:
        """Bytes a rank holds at the forward exchange, shape (R,): its inputs, its outputs and what it receives."""
        inputs_R = self.lengths_RR.sum(axis=0) + self.ids_RR.sum(axis=0)
        return np.asarray(inputs_R + self.forward_RR.sum(axis=1) + self.forward_RR.sum(axis=0))


@dataclass(frozen=True, slots=True, kw_only=True)
class PairTraffic:
    """Bytes per step between a rank that reads a placed shard and each owner in the replica that it reads."""

    lengths: float
    """From reader to owner, as `ids` and `backward`."""
    ids: float
    forward: float
    """From owner to reader."""
    backward: float

    @classmethod
    def of(cls, placed: PlacedShard, local_batch: float, payload: Payload) -> PairTraffic:
        """Traffic of one shard; `local_batch` samples of each reader."""
        table = placed.shard.table
        profile, share = placed.shard.access()
        num_owners = len(placed.replicas[0])
        num_bags = local_batch * len(table.features)
        num_lookups = local_batch * table.pooling_factor * share / num_owners
        if placed.exchange is Exchange.PARTIAL_SUMS:
            num_vectors = num_bags
        elif placed.deduplicate:
            num_vectors = profile.expected_distinct(num_lookups * num_owners) / num_owners
        else:
            num_vectors = num_lookups
        values = num_vectors * placed.shard.embedding_dim
        return cls(
            lengths=num_bags * LENGTH_BYTES,
            ids=num_lookups * ID_BYTES,
            forward=values * payload.forward.num_bytes,
            backward=values * payload.backward.num_bytes,
        )


def synced_bytes(placed: PlacedShard, group_batch_size: int) -> float:
    """Bytes of gradients that each holder of a shard with several replicas puts into all-reduces.

    Counted as bytes of an all-reduce over all ranks, which first adds up within nodes, so that each rank's port carries
    its share of them. Where rows are split over a node's ranks already, ranks put in a share each, but the ports carry
    as much (FlexShard's Table 6: 86 GB/s over all ranks, 11 GB/s across nodes, with 8 ranks a node).
    """
    shard = placed.shard
    num_rows = float(shard.num_embeddings)
    if placed.grad_sync is GradSync.SPARSE:
        profile, share = shard.access()
        num_rows = profile.expected_distinct(group_batch_size * shard.table.pooling_factor * share)
    return num_rows * shard.embedding_dim * REDUCED_BYTES


def plan_traffic(plan: ShardingPlan) -> Traffic:
    """Adds up what every placed shard sends.

    Each rank asks, for its local batch, every owner in the replica that it reads: lengths and ids (int64). Owners
    answer with one vector per bag (`partial_sums`), or with one row per lookup (`rows`; per distinct row with
    `deduplicate`), in the payload's formats. Lookups are taken to spread evenly over the owners of a replica.
    """
    ledger = _Ledger(plan)
    for placed in plan.shards:
        ledger.add_exchange(placed)
        if len(placed.replicas) > 1:
            ledger.add_sync(placed)
    return ledger.total


class _Ledger:
    def __init__(self, plan: ShardingPlan) -> None:
        square = (plan.group_size, plan.group_size)
        self.plan = plan
        self.total = Traffic(
            lengths_RR=np.zeros(square),
            ids_RR=np.zeros(square),
            forward_RR=np.zeros(square),
            backward_RR=np.zeros(square),
            sync_R=np.zeros(plan.group_size),
        )

    def add_exchange(self, placed: PlacedShard) -> None:
        read_by = replicas_read(self.plan, placed)
        local_batch = self.plan.group_batch_size / self.plan.group_size
        pair = PairTraffic.of(placed, local_batch, self.plan.payload)
        for index, owners in enumerate(placed.replicas):
            readers = np.flatnonzero(read_by == index)
            requests, answers = np.ix_(readers, np.array(owners)), np.ix_(np.array(owners), readers)
            self.total.lengths_RR[requests] += pair.lengths
            self.total.ids_RR[requests] += pair.ids
            self.total.forward_RR[answers] += pair.forward
            self.total.backward_RR[requests] += pair.backward

    def add_sync(self, placed: PlacedShard) -> None:
        holders = [rank for replica in placed.replicas for rank in replica]
        self.total.sync_R[holders] += synced_bytes(placed, self.plan.group_batch_size)


def replicas_read(plan: ShardingPlan, placed: PlacedShard) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """For each rank, the index of the replica that it reads, shape (R,).

    Without `fetch` that is the replica which the rank belongs to, else one of its own node, else they take turns.
    """
    if placed.fetch is not None:
        return np.array(placed.fetch, dtype=np.int64)
    read_by = np.arange(plan.group_size, dtype=np.int64) % len(placed.replicas)
    nodes = np.arange(plan.group_size) // plan.topology.local_world_size
    for index, owners in reversed(list(enumerate(placed.replicas))):
        read_by[np.isin(nodes, nodes[list(owners)])] = index
    for index, owners in enumerate(placed.replicas):
        read_by[list(owners)] = index
    return read_by
