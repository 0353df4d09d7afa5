"""Sharding plans: who holds what, what it is predicted to cost, and where it came from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from autoshard.core.errors import InvalidPlanError
from autoshard.core.shard import LocalShard, PlacedShard, local_shard
from autoshard.core.step import Overlap, StepPart
from autoshard.core.tables import DType, TableSet
from autoshard.core.topology import Topology


class GroupLayout(StrEnum):
    """Which ranks of the world make up a replica group.

    `across_nodes`: every `num_groups`-th rank, so that copies of a row sit side by side in one node and meet over
    its fast links; `within_nodes`: consecutive ranks, so that the exchange within a group stays in few nodes.
    """

    ACROSS_NODES = "across_nodes"
    WITHIN_NODES = "within_nodes"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaGroups:
    """Two-dimensional sparse parallelism: the plan is held once per group of ranks (2D Sec. 3)."""

    num_groups: int = 1
    layout: GroupLayout = GroupLayout.ACROSS_NODES
    sync_every: int = 1
    moment_scale: float = 1.0

    def group_size(self, topology: Topology) -> int:
        """Ranks of one group.

        Raises:
            InvalidPlanError: If the groups do not divide the world.
        """
        if self.num_groups < 1 or topology.world_size % self.num_groups:
            raise InvalidPlanError(
                f"must divide the {topology.world_size} ranks, got {self.num_groups}",
                field="replica_groups.num_groups",
            )
        return topology.world_size // self.num_groups

    def ranks_per_node(self, topology: Topology) -> int:
        """Ranks that a group has on each node that it reaches.

        Raises:
            InvalidPlanError: If that is not the same number everywhere.
        """
        num_ranks, node = self.group_size(topology), topology.local_world_size
        if self.layout is GroupLayout.ACROSS_NODES:
            num_groups = self.num_groups
            if node % num_groups == 0 or num_groups % node == 0:
                return max(1, node // num_groups)
        elif num_ranks % node == 0 or node % num_ranks == 0:
            return min(node, num_ranks)
        raise InvalidPlanError(
            f"{self.num_groups} groups laid {self.layout} have no equal share of each node's {node} ranks",
            field="replica_groups.num_groups",
        )

    def world_ranks(self, rank: int, topology: Topology) -> range:
        """Ranks of the world that are number `rank` of their group, group by group."""
        if self.layout is GroupLayout.ACROSS_NODES:
            return range(rank * self.num_groups, (rank + 1) * self.num_groups)
        return range(rank, topology.world_size, self.group_size(topology))


@dataclass(frozen=True, slots=True, kw_only=True)
class Payload:
    """Number formats on the wire."""

    forward: DType = DType.FP32
    backward: DType = DType.FP32


@dataclass(frozen=True, slots=True, kw_only=True)
class RowOrder:
    """File that lists a table's row ids in falling access frequency."""

    file: str
    digest: str
    num_ordered: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A predicted value with its interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RankCost:
    """Predicted cost of one rank's step, in milliseconds and bytes."""

    rank: int
    input_ms: float
    forward_kernel_ms: float
    forward_exchange_ms: float
    backward_exchange_ms: float
    backward_kernel_ms: float
    kernel_ms: float
    sync_ms: float
    hbm_bytes: int
    ddr_bytes: int
    ssd_bytes: int
    activation_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CostBreakdown:
    """Predicted cost of a plan.

    Attributes:
        step_ms: One training step.
        max_kernel_ms: Kernel time of the slowest rank.
        balance: min / max over ranks of kernel time (AutoShard Sec. 4.3).
        exchange_balance: min / max over ranks of exchange time (OPER).
        imbalance: max / mean over ranks of kernel time (2D).
        floor_kernel_ms: Kernel time of the costliest single shard: no placement of these shards goes below it.
        binding_rank: The slowest rank.
        binding_shard: Its costliest shard's table.
        cost_model: Which model priced the kernels.
        ranks: The ranks' parts.
        overlap: Which parts of the step were taken to run at the same time. This and what follows is missing (None,
            empty) from predictions that were written before there was such a thing.
        models: Names of the models behind it: `kernel`, `communication`, and where there are any, `dense` and `step`.
        dense_ms: Dense layers, forward and backward.
        sync_ms: All-reduce of the dense layers' gradients and of tables that are held in several replicas.
        parts: The step's parts at their slowest ranks. Their values add up to the step if nothing overlaps; `dense`
            holds `dense_ms`, `sync_ms`, and what belongs to no part. Each has the relative interval of the models that
            priced it, also where a step model knows better of the whole.
    """

    step_ms: Estimate
    max_kernel_ms: float
    balance: float
    exchange_balance: float
    imbalance: float
    floor_kernel_ms: float
    binding_rank: int
    binding_shard: str
    cost_model: str
    ranks: tuple[RankCost, ...]
    overlap: Overlap | None = None
    models: Mapping[str, str] = field(default_factory=dict)
    dense_ms: float | None = None
    sync_ms: float | None = None
    parts: Mapping[StepPart, Estimate] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """How a plan was made."""

    planner: str
    version: str
    seed: int = 0
    options: Mapping[str, object] = field(default_factory=dict)
    models: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardingPlan:
    """A whole plan: it carries its tables and its topology."""

    tables: TableSet
    topology: Topology
    shards: tuple[PlacedShard, ...]
    replica_groups: ReplicaGroups = field(default_factory=ReplicaGroups)
    payload: Payload = field(default_factory=Payload)
    row_orders: Mapping[str, RowOrder] = field(default_factory=dict)
    predicted: CostBreakdown | None = None
    provenance: Provenance | None = None

    @property
    def group_size(self) -> int:
        """Ranks of one replica group; ranks in `shards` are local to the group."""
        return self.replica_groups.group_size(self.topology)

    @property
    def group_batch_size(self) -> int:
        """Samples per step of one replica group."""
        return max(1, self.tables.batch_size // self.replica_groups.num_groups)

    def local_shards(self) -> tuple[tuple[LocalShard, ...], ...]:
        """What each rank of a replica group holds, in the order of `shards`."""
        held: list[list[LocalShard]] = [[] for _ in range(self.group_size)]
        for placed in self.shards:
            by_share: dict[float, LocalShard] = {}
            for index, replica in enumerate(placed.replicas):
                if placed.fetch is None:
                    share = 1 / len(placed.replicas)
                else:
                    share = placed.fetch.count(index) / self.group_size
                if share not in by_share:
                    by_share[share] = local_shard(placed, group_batch_size=self.group_batch_size, bags_share=share)
                for rank in replica:
                    held[rank].append(by_share[share])
        return tuple(tuple(shards) for shards in held)

    def with_predicted(self, predicted: CostBreakdown) -> ShardingPlan:
        """The same plan with this prediction."""
        return replace(self, predicted=predicted)
