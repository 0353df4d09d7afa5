"""FlexShard's scaling equations: what rows of a sequence table cost each rank, by sharding strategy.

The letters are those of FlexShard's Table 1: E rows, D embedding dim, L lookups per sample, U ranks, W ranks of a
node, N nodes, B samples per rank. All equations are expectations, and linear in E and L: a table costs the sum of its
rows, each with E = 1 and its own probability for L (Sec. 4.2).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np

from autoshard.core import Collective, CommModel, Exchange, Topology
from autoshard.core.accepted import ABOVE_0, AT_LEAST_1, FINITE_ABOVE_0, FINITE_AT_LEAST_0
from autoshard.core.costs import LinkBytes, MsArray
from autoshard.core.errors import InvalidTopologyError
from autoshard.core.plan import Payload
from autoshard.evaluation.traffic import id_width

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
    reduce_scatter_global: float
    """Of the input of a reduce-scatter and the output of an all-gather, one after the other."""

    def __post_init__(self) -> None:
        ABOVE_0.check_fields(self, *self.__slots__, error=InvalidTopologyError)

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
            bytes_LR = np.repeat(bytes_L[:, None], topology.world_size, axis=1)
            links = LinkBytes(leaving_LR=bytes_LR, arriving_LR=bytes_LR)
            return _bytes_per_s(float(comm.links_ms(links, topology).max()))

        all_reduce = _bytes_per_s(comm.all_reduce_ms(_PROBE_BYTES, topology))
        both_ms = comm.reduce_scatter_ms(_PROBE_BYTES, topology) + comm.all_gather_ms(_PROBE_BYTES, topology)
        return cls(
            all_to_all_global=all_to_all(to_world_L),
            all_to_all_intra=all_to_all(to_node_L),
            all_reduce_global=all_reduce,
            all_reduce_cross=all_reduce / node if topology.num_nodes > 1 else math.inf,
            reduce_scatter_global=_bytes_per_s(both_ms / 2),
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
        can_reduce_scatter: Whether sums may travel by reduce-scatter, which depends on the payload.
    """

    ranks_per_node: int
    num_nodes: int
    local_batch_size: float
    bandwidths: Bandwidths
    can_reduce_scatter: bool = True

    def __post_init__(self) -> None:
        AT_LEAST_1.check_fields(self, "ranks_per_node", "num_nodes", error=InvalidTopologyError)
        FINITE_AT_LEAST_0.check_fields(self, "local_batch_size", error=InvalidTopologyError)

    @classmethod
    def of(cls, topology: Topology, comm: CommModel, batch_size: int, payload: Payload) -> FlexMachine:
        """The ranks of a topology, with a global batch of `batch_size` samples, and formats on the wire."""
        return cls(
            ranks_per_node=topology.local_world_size,
            num_nodes=topology.num_nodes,
            local_batch_size=batch_size / topology.world_size,
            bandwidths=Bandwidths.of(topology, comm),
            can_reduce_scatter=payload.can_be_summed,
        )

    @property
    def world_size(self) -> int:
        """U."""
        return self.ranks_per_node * self.num_nodes

    @property
    def sums_travel_by(self) -> Collective:
        """The faster collective for sums of rows that are split over all ranks, whatever their bytes."""
        is_faster = self.bandwidths.reduce_scatter_global > self.bandwidths.all_to_all_global
        return Collective.REDUCE_SCATTER if is_faster and self.can_reduce_scatter else Collective.ALL_TO_ALL

    def collective_of(self, strategy: TierStrategy, exchange: Exchange) -> Collective:
        """How what owners of a tier send travels."""
        are_sums = strategy is TierStrategy.ROW_WISE and exchange is Exchange.PARTIAL_SUMS
        return self.sums_travel_by if are_sums else Collective.ALL_TO_ALL

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
        replica_multiplier: Bytes held per byte of weights that are replicated: weights, optimizer state, gradients.
        sharded_multiplier: The same of weights that are not; the paper takes 1.
    """

    num_rows: float
    lookups_per_sample: float
    embedding_dim: int
    weight_bytes: float = 4.0
    payload_bytes: float = 4.0
    replica_multiplier: float = PAPER_MEMORY_MULTIPLIER
    sharded_multiplier: float = 1.0

    def __post_init__(self) -> None:
        FINITE_AT_LEAST_0.check_fields(self, "num_rows", "lookups_per_sample")
        FINITE_ABOVE_0.check_fields(
            self, "embedding_dim", "weight_bytes", "payload_bytes", "replica_multiplier", "sharded_multiplier"
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


def ids_distributed(strategy: TierStrategy, rows: RowSet, machine: FlexMachine) -> float:
    """Ids that a rank sends before lookups can start.

    Source:
        FlexShard, Table 3, "input data dist".
    """
    copies = {TierStrategy.COLUMN_WISE: machine.world_size, TierStrategy.DATA_PARALLEL: 0}.get(strategy, 1)
    return copies * machine.local_batch_size * rows.lookups_per_sample


def dynamic_communication_s(strategy: TierStrategy, rows: RowSet, machine: FlexMachine) -> float:
    """Seconds of the all-to-all of rows, in the forward pass and once more in the backward pass.

    Source:
        FlexShard, Table 3.
    """
    num_bytes = machine.local_batch_size * rows.lookups_per_sample * rows.embedding_dim * rows.payload_bytes
    return num_bytes / _all_to_all_bytes_per_s(strategy, machine)


def reduced_memory_bytes(rows: RowSet, machine: FlexMachine) -> float:
    """As `dynamic_memory_bytes`, of sums of rows over all ranks that are added up on the way: one comes of each U."""
    looked_up = dynamic_memory_bytes(TierStrategy.DATA_PARALLEL, rows, machine)
    return looked_up * (1 + 1 / machine.world_size)


def reduced_communication_s(rows: RowSet, machine: FlexMachine) -> float:
    """As `dynamic_communication_s`, of a reduce-scatter or of its all-gather; not in the paper."""
    num_bytes = machine.local_batch_size * rows.lookups_per_sample * rows.embedding_dim * rows.payload_bytes
    return num_bytes / machine.bandwidths.reduce_scatter_global


def static_communication_s(strategy: TierStrategy, rows: RowSet, machine: FlexMachine) -> float:
    """Seconds of the all-reduce of replicas' gradients, in the backward pass only.

    Source:
        FlexShard, Table 3.
    """
    num_bytes = rows.num_rows * rows.embedding_dim * rows.payload_bytes
    if strategy is TierStrategy.DATA_PARALLEL:
        return num_bytes / machine.bandwidths.all_reduce_global
    if strategy is TierStrategy.FLEX:
        return num_bytes / machine.ranks_per_node / machine.bandwidths.all_reduce_cross
    return 0.0


def input_distribution_s(strategy: TierStrategy, rows: RowSet, machine: FlexMachine) -> float:
    """Seconds of the all-to-all of ids.

    Source:
        FlexShard, Table 3. Differs: in seconds; the paper counts ids and leaves them out of its communication cost.
    """
    ids_bytes: float = ids_distributed(strategy, rows, machine) * id_width([rows.num_rows])
    return ids_bytes / _all_to_all_bytes_per_s(strategy, machine)


def memory_bytes(strategy: TierStrategy, rows: RowSet, machine: FlexMachine) -> float:
    """Static and dynamic memory (Sec. 3.2)."""
    return static_memory_bytes(strategy, rows, machine) + dynamic_memory_bytes(strategy, rows, machine)


def communication_s(strategy: TierStrategy, rows: RowSet, machine: FlexMachine) -> float:
    """Seconds of communication per step: dynamic forward and backward, and static (Sec. 3.2)."""
    return 2 * dynamic_communication_s(strategy, rows, machine) + static_communication_s(strategy, rows, machine)


def _all_to_all_bytes_per_s(strategy: TierStrategy, machine: FlexMachine) -> float:
    return {
        TierStrategy.DATA_PARALLEL: math.inf,
        TierStrategy.FLEX: machine.bandwidths.all_to_all_intra,
    }.get(strategy, machine.bandwidths.all_to_all_global)
