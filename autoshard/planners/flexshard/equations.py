"""FlexShard's scaling equations and break points: what rows of a sequence table cost each rank, by sharding strategy.

The letters are those of FlexShard's Table 1: E rows, D embedding dim, L lookups per sample, U ranks, W ranks of a
node, N nodes, B samples per rank. All equations are expectations, and linear in E and L: a table costs the sum of its
rows, each with E = 1 and its own probability for L (Sec. 4.2). The paper's rule is made of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from itertools import pairwise

import numpy as np

from autoshard.core import AccessProfile, CommModel, EmbeddingTable, Payload, Topology, weight_row_bytes
from autoshard.core.accepted import ABOVE_0, AT_LEAST_1, FINITE_ABOVE_0, FINITE_AT_LEAST_0
from autoshard.core.costs import LinkBytes, MsArray
from autoshard.core.errors import InvalidTableError, InvalidTopologyError
from autoshard.evaluation.traffic import REDUCED_BYTES, wire_bytes

#: Bytes per replicated byte of weights that FlexShard assumes, from TorchRec; an over-estimate by its Sec. 6.3.
PAPER_MEMORY_MULTIPLIER = 6.0

#: Bytes per rank at which bandwidths are read off a model of collectives: large, so that latencies vanish.
_PROBE_BYTES = float(1 << 28)


class TierStrategy(StrEnum):
    """How rows are held by the ranks."""

    ROW_WISE = "row_wise"
    """Rows split over all ranks."""
    COLUMN_WISE = "column_wise"
    """Columns split over all ranks."""
    FLEX = "flex"
    """Rows split over the ranks of a node, and a copy on each node (Sec. 4.4)."""
    DATA_PARALLEL = "data_parallel"
    """A copy on each rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bandwidths:
    """Bytes per second and rank, of the payload as it is on each rank; infinite where nothing has to travel."""

    all_to_all_global: float
    all_to_all_intra: float
    """Within nodes, all at once."""
    all_reduce_global: float
    all_reduce_cross: float
    """Over nodes, between ranks of the same place in their node, all places at once."""

    def __post_init__(self) -> None:
        ABOVE_0.check_fields(self, *(item.name for item in fields(self)), error=InvalidTopologyError)

    @classmethod
    def of(cls, topology: Topology, comm: CommModel) -> Bandwidths:
        """Bandwidths as a model of collectives has them.

        An all-reduce over the world first adds up within nodes, so that each rank's port carries 1 / W of its bytes.
        One between the W places of a node at once shares no bytes, and has 1 / W of that bandwidth per rank
        (FlexShard's Table 6 has 86 against 11 GB/s for RM-2, with W = 8).
        """
        node = topology.local_world_size
        sizes = [1, *(level.size for level in topology.levels)]
        # What each rank exchanges by level with as many bytes for every rank of the world, and of its node.
        to_world_L = _PROBE_BYTES * np.diff(sizes) / topology.world_size
        to_node_L = np.where(np.arange(len(topology.levels)) == 0, _PROBE_BYTES * (node - 1) / node, 0.0)

        def all_to_all(bytes_L: MsArray) -> float:
            # All ranks do alike.
            links = LinkBytes(leaving_LR=bytes_L[:, None], arriving_LR=bytes_L[:, None])
            return _bytes_per_s(float(comm.links_ms(links, topology).max()))

        all_reduce = _bytes_per_s(comm.collective_ms("all_reduce", _PROBE_BYTES, topology))
        return cls(
            all_to_all_global=all_to_all(to_world_L),
            all_to_all_intra=all_to_all(to_node_L),
            all_reduce_global=all_reduce,
            all_reduce_cross=all_reduce / node if topology.num_nodes > 1 else math.inf,
        )


def _bytes_per_s(probe_ms: float) -> float:
    return _PROBE_BYTES / probe_ms * 1e3 if probe_ms > 0 else math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class FlexMachine:
    """The machine and its share of the batch.

    Attributes:
        ranks_per_node: W.
        num_nodes: N.
        local_batch_size: B, samples per rank and step; a mean, so any number of at least 0.
        bandwidths: Of its collectives.
    """

    ranks_per_node: int
    num_nodes: int
    local_batch_size: float
    bandwidths: Bandwidths

    def __post_init__(self) -> None:
        AT_LEAST_1.check_fields(self, "ranks_per_node", "num_nodes", error=InvalidTopologyError)
        FINITE_AT_LEAST_0.check_fields(self, "local_batch_size", error=InvalidTopologyError)

    @classmethod
    def of(cls, topology: Topology, comm: CommModel, batch_size: int) -> FlexMachine:
        """The ranks of a topology, with a global batch of `batch_size` samples."""
        return cls(
            ranks_per_node=topology.local_world_size,
            num_nodes=topology.num_nodes,
            local_batch_size=batch_size / topology.world_size,
            bandwidths=Bandwidths.of(topology, comm),
        )

    @property
    def world_size(self) -> int:
        """U."""
        return self.ranks_per_node * self.num_nodes

    def num_owners(self, strategy: TierStrategy) -> int:
        """Ranks over which a copy of the rows is split."""
        return {TierStrategy.DATA_PARALLEL: 1, TierStrategy.FLEX: self.ranks_per_node}.get(strategy, self.world_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSet:
    """Rows that are held alike: a table, a tier of it, or one row.

    Attributes:
        num_rows: E; may be a mean or 0.
        lookups_per_sample: L, expected lookups of these rows in one sample.
        embedding_dim: D.
        weight_bytes: Bytes per number in memory.
        payload_bytes: Bytes per number on the wire and in its buffers; the paper has one dtype for both.
        gradient_bytes: Bytes per number of gradients that replicas sum, whatever the payload.
        replica_multiplier: Bytes held per byte of weights that are replicated: weights, optimizer state, gradients.
        sharded_multiplier: The same of weights that are not; the paper takes 1.
    """

    num_rows: float
    lookups_per_sample: float
    embedding_dim: int
    weight_bytes: float = 4.0
    payload_bytes: float = 4.0
    gradient_bytes: float = float(REDUCED_BYTES)
    replica_multiplier: float = PAPER_MEMORY_MULTIPLIER
    sharded_multiplier: float = 1.0

    def __post_init__(self) -> None:
        FINITE_AT_LEAST_0.check_fields(self, "num_rows", "lookups_per_sample")
        FINITE_ABOVE_0.check_fields(
            self,
            *("embedding_dim", "weight_bytes", "payload_bytes", "gradient_bytes"),
            *("replica_multiplier", "sharded_multiplier"),
        )

    @classmethod
    def of(cls, table: EmbeddingTable, payload: Payload, memory_multiplier: float = 0.0) -> RowSet:
        """A whole table, with payload of the mean width of both ways.

        Args:
            table: The table.
            payload: Number formats of what is sent.
            memory_multiplier: Bytes held per replicated byte of weights, where split rows have 1 (the paper's way); 0
                for what is held: weights and optimizer state, and of copies their gradients, in fp32.
        """
        weights = weight_row_bytes(table.dtype, table.optimizer, table.embedding_dim)
        split = weights + table.optimizer.state_bytes_per_row(table.embedding_dim)
        held = (split + table.embedding_dim * REDUCED_BYTES) / weights, split / weights
        replica, sharded = (memory_multiplier, 1.0) if memory_multiplier else held
        return cls(
            num_rows=table.num_embeddings,
            lookups_per_sample=table.pooling_factor,
            embedding_dim=table.embedding_dim,
            weight_bytes=weights / table.embedding_dim,
            payload_bytes=(wire_bytes(payload.forward) + wire_bytes(payload.backward)) / 2,
            replica_multiplier=replica,
            sharded_multiplier=sharded,
        )

    @property
    def one_row(self) -> RowSet:
        """One row that nobody looks up: E = 1, L = 0."""
        return replace(self, num_rows=1, lookups_per_sample=0)

    @property
    def one_lookup(self) -> RowSet:
        """What one lookup per sample costs: E = 0, L = 1."""
        return replace(self, num_rows=0, lookups_per_sample=1)


def static_memory_bytes(strategy: TierStrategy, rows: RowSet, machine: FlexMachine) -> float:
    """Bytes per rank that hold the rows, whatever the batch.

    Source:
        FlexShard, Table 2. Differs: multipliers are arguments, and split rows have one too.
    """
    is_replicated = strategy in (TierStrategy.FLEX, TierStrategy.DATA_PARALLEL)
    multiplier = rows.replica_multiplier if is_replicated else rows.sharded_multiplier
    return multiplier * (rows.num_rows * rows.embedding_dim * rows.weight_bytes) / machine.num_owners(strategy)


def dynamic_memory_bytes(strategy: TierStrategy, rows: RowSet, machine: FlexMachine) -> float:
    """Bytes per rank of rows looked up: once where they are looked up, once more where they were sent to.

    Source:
        FlexShard, Table 2.
    """
    copies = 1 if strategy is TierStrategy.DATA_PARALLEL else 2
    return copies * machine.local_batch_size * rows.lookups_per_sample * rows.embedding_dim * rows.payload_bytes


def dynamic_communication_s(strategy: TierStrategy, rows: RowSet, machine: FlexMachine) -> float:
    """Seconds of the all-to-all of rows, in the forward pass and once more in the backward pass.

    Source:
        FlexShard, Table 3.
    """
    num_bytes = machine.local_batch_size * rows.lookups_per_sample * rows.embedding_dim * rows.payload_bytes
    return num_bytes / _all_to_all_bytes_per_s(strategy, machine)


def static_communication_s(strategy: TierStrategy, rows: RowSet, machine: FlexMachine) -> float:
    """Seconds of the all-reduce of replicas' gradients, in the backward pass only.

    Source:
        FlexShard, Table 3.
    """
    num_bytes = rows.num_rows * rows.embedding_dim * rows.gradient_bytes
    if strategy is TierStrategy.DATA_PARALLEL:
        return num_bytes / machine.bandwidths.all_reduce_global
    if strategy is TierStrategy.FLEX:
        return num_bytes / machine.ranks_per_node / machine.bandwidths.all_reduce_cross
    return 0.0


def memory_bytes(strategy: TierStrategy, rows: RowSet, machine: FlexMachine) -> float:
    """Static and dynamic memory (Sec. 3.2)."""
    return static_memory_bytes(strategy, rows, machine) + dynamic_memory_bytes(strategy, rows, machine)


def communication_s(strategy: TierStrategy, rows: RowSet, machine: FlexMachine) -> float:
    """Seconds of communication per step: dynamic forward and backward, and static (Sec. 3.2)."""
    return 2 * dynamic_communication_s(strategy, rows, machine) + static_communication_s(strategy, rows, machine)


def neutral_communication(strategy: TierStrategy, rows: RowSet, machine: FlexMachine) -> float:
    """Row probability above which a row communicates faster by `strategy` than row-wise; infinite if it never does.

    Args:
        strategy: Data-parallel or Flex.
        rows: Widths and multipliers of the rows; how many they are and how often looked up plays no part.
        machine: The machine.

    Source:
        FlexShard, Sec. 4.2 and 4.5.
    """
    more_s, more_per_lookup_s = (
        communication_s(strategy, one, machine) - communication_s(TierStrategy.ROW_WISE, one, machine)
        for one in (rows.one_row, rows.one_lookup)
    )
    if more_s <= 0:
        return 0.0
    return -more_s / more_per_lookup_s if more_per_lookup_s < 0 else math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class ParetoPoint:
    """Costs of replicating the most accessed rows on all ranks, over those of the whole table row-wise.

    Attributes:
        num_rows: How many rows.
        coverage: Share of the table's lookups that go to them.
        memory_bytes: Per rank; below 0 where memory is saved.
        communication_s: Per step; below 0 where time is saved.
    """

    num_rows: float
    coverage: float
    memory_bytes: float
    communication_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ParetoFrontier:
    """The curve of Fig. 5: memory against communication as ever more rows are replicated, and its four points.

    Attributes:
        curve: From no row to all rows, at the knots of the access curve and the four points.
        most_memory_saved: A: every row more costs memory.
        memory_neutral: B: as much memory as row-wise; the paper's 2-tier break point.
        most_communication_saved: C: every row more costs time.
        whole_table: D: all rows.
    """

    curve: tuple[ParetoPoint, ...]
    most_memory_saved: ParetoPoint
    memory_neutral: ParetoPoint
    most_communication_saved: ParetoPoint
    whole_table: ParetoPoint


def pareto_frontier(access: AccessProfile, rows: RowSet, machine: FlexMachine) -> ParetoFrontier:
    """Memory and communication of a table whose hottest rows are data-parallel and the rest row-wise.

    Args:
        access: The table's access curve.
        rows: The whole table.
        machine: The machine.

    Raises:
        InvalidTableError: If the curve is of another number of rows.

    Source:
        FlexShard, Sec. 4.3 and Fig. 5.
    """
    if access.num_rows != rows.num_rows:
        raise InvalidTableError(f"describes {access.num_rows} rows, the table has {rows.num_rows:g}", field="access")

    def point(num_rows: float) -> ParetoPoint:
        coverage = float(access.coverage(num_rows))
        hot = replace(rows, num_rows=num_rows, lookups_per_sample=rows.lookups_per_sample * coverage)
        more_bytes, more_s = (
            cost(TierStrategy.DATA_PARALLEL, hot, machine) - cost(TierStrategy.ROW_WISE, hot, machine)
            for cost in (memory_bytes, communication_s)
        )
        return ParetoPoint(num_rows=num_rows, coverage=coverage, memory_bytes=more_bytes, communication_s=more_s)

    points = [point(num_rows) for num_rows in access.ranks_K.tolist()]
    lowest = min(range(len(points)), key=lambda index: points[index].memory_bytes)
    neutral = point(_neutral_rows(points, lowest))
    return ParetoFrontier(
        curve=tuple(sorted({*points, neutral}, key=lambda one: one.num_rows)),
        most_memory_saved=points[lowest],
        memory_neutral=neutral,
        most_communication_saved=min(points, key=lambda one: one.communication_s),
        whole_table=points[-1],
    )


def _neutral_rows(points: Sequence[ParetoPoint], lowest: int) -> float:
    """Where the curve comes back to 0 after its lowest point; all rows if it does not."""
    for before, after in pairwise(points[lowest:]):
        if after.memory_bytes > 0:
            share = -before.memory_bytes / (after.memory_bytes - before.memory_bytes)
            return before.num_rows + share * (after.num_rows - before.num_rows)
    return points[-1].num_rows


def _all_to_all_bytes_per_s(strategy: TierStrategy, machine: FlexMachine) -> float:
    return {
        TierStrategy.DATA_PARALLEL: math.inf,
        TierStrategy.FLEX: machine.bandwidths.all_to_all_intra,
    }.get(strategy, machine.bandwidths.all_to_all_global)
