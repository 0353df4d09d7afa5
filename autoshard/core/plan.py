"""Sharding plans: who holds what, what it is predicted to cost, and where it came from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib.metadata import EntryPoint

import numpy as np

from autoshard.core.access import IntArray
from autoshard.core.errors import InvalidOptionError
from autoshard.core.quoting import shown
from autoshard.core.replica_groups import GroupLayout, ReplicaGroups, SyncRows
from autoshard.core.shard import LocalShard, PlacedShard, local_shards
from autoshard.core.step import CollectiveTime, Overlap, StepCollective, StepPart
from autoshard.core.tables import DType, RowOrder, TableSet
from autoshard.core.topology import Topology

__all__ = [
    "CostBreakdown",
    "Estimate",
    "GroupLayout",
    "HeldShard",
    "Payload",
    "Provenance",
    "RankCost",
    "ReplicaGroups",
    "ShardingPlan",
    "SyncRows",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Payload:
    """Number formats on the wire: of embeddings on their way forward, and of their gradients on the way back."""

    forward: DType = DType.FP32
    backward: DType = DType.FP32

    @property
    def can_be_summed(self) -> bool:
        """Whether collectives can add up values in its formats: blocks of int8 have scales of their own."""
        return DType.INT8 not in (self.forward, self.backward)

    @classmethod
    def parse(cls, text: str, field: str) -> Payload:
        """Reads a format for both ways, such as `bf16`, or one for each, such as `fp16/bf16`.

        Args:
            text: The text.
            field: Option or field that holds it, for the error.

        Raises:
            InvalidOptionError: If it is neither.
        """
        names = text.split("/")
        if len(names) > 2 or not set(names) <= set(DType):
            formats = ", ".join(DType)
            raise InvalidOptionError(
                f"must be one of {formats}, or two of them as FORWARD/BACKWARD, got {shown(text)}", field=field
            )
        return cls(forward=DType(names[0]), backward=DType(names[-1]))

    def __str__(self) -> str:
        """The text that `parse` reads."""
        return str(self.forward) if self.forward is self.backward else f"{self.forward}/{self.backward}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A predicted value with its interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RankCost:
    """Predicted cost of one rank's step, in milliseconds and bytes.

    In a plan over several replica groups the rank is number `rank` of each group, which all cost alike; `sync_ms` has
    its synchronisation with the other groups, too.

    `activation_bytes` are a batch's inputs and outputs, long sequences included, and gradients of rows that are held
    more than once; the bytes of the levels are weights, optimizer states and caches. `training_bytes` are activations,
    what the backward pass holds beyond them, and dense layers; 0 in predictions that were written before they were
    counted.
    """

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
    training_bytes: int = 0

    @property
    def used_bytes(self) -> int:
        """Device memory that the rank needs: tables and what training takes beside them."""
        return self.hbm_bytes + max(self.training_bytes, self.activation_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class LowerBound:
    """What no plan of a space takes less than, in milliseconds.

    Attributes:
        proven_ms: Holds for every plan; None where prices have no floor that proves it.
        estimated_ms: A higher bound that is likely to hold; None where the proven one is as sharp.
    """

    proven_ms: float | None = None
    estimated_ms: float | None = None

    def above(self, value_ms: float) -> tuple[float, str]:
        """How far a value is above the sharper bound, as a share of it, and whether that is `proven` or `estimated`."""
        bound_ms, kind = (self.proven_ms, "proven") if self.estimated_ms is None else (self.estimated_ms, "estimated")
        return (value_ms / bound_ms - 1.0 if bound_ms else 0.0), kind


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
        sync_ms: All-reduce of the dense layers' gradients and of tables that are held in several replicas, and the
            synchronisation of replica groups.
        group_sync_ms: That of replica groups alone, per step; None if there is one group.
        parts: The step's parts at their slowest ranks. Their values add up to the step if nothing overlaps; `dense`
            holds `dense_ms`, `sync_ms`, and what belongs to no part. Each has the relative interval of the models that
            priced it, also where a step model knows better of the whole.
        collectives: Time of each kind of collective at its slowest rank, and by how much the step would be shorter
            without it.
        bounds: Where they were asked for: what no plan takes less than. `step` and parts of it, over all sharding types
            that the planner may choose from; `max_kernel` over whole tables on single ranks.
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
    group_sync_ms: float | None = None
    parts: Mapping[StepPart, Estimate] = field(default_factory=dict)
    collectives: Mapping[StepCollective, CollectiveTime] = field(default_factory=dict)
    bounds: Mapping[str, LowerBound] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """How a plan was made."""

    planner: str
    version: str
    seed: int = 0
    options: Mapping[str, object] = field(default_factory=dict)
    models: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HeldShard:
    """A small table and the ranks of a replica group that hold one like it.

    Attributes:
        local: What each of them holds.
        ranks: Which, each once.
    """

    local: LocalShard
    ranks: IntArray


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

    def _repr_html_(self) -> str:
        """What notebooks show; drawn by the reports, by name, since this package imports none of the others."""
        return str(EntryPoint(name="html", value="autoshard.report.notebooks:plan_html", group="").load()(self))

    def of_one_group(self) -> ShardingPlan:
        """What one replica group does, as a plan of its own: its ranks, its links and its share of the batch.

        Raises:
            InvalidPlanError: If the groups do not divide the world, or have no equal share of a level's units.
        """
        if self.replica_groups.num_groups == 1:
            return self
        return replace(
            self,
            tables=replace(self.tables, batch_size=self.group_batch_size),
            topology=self.replica_groups.group_topology(self.topology),
            replica_groups=ReplicaGroups(),
            predicted=None,
        )

    def held_shards(self) -> tuple[HeldShard, ...]:
        """What the ranks of a replica group hold, in the order of `shards`: each distinct small table once."""
        served = self._served()
        locals_ = local_shards(
            [placed for placed, _, _ in served],
            group_batch_size=self.group_batch_size,
            bags_share_N=[share for _, share, _ in served],
        )
        return tuple(HeldShard(local=local, ranks=ranks) for local, (_, _, ranks) in zip(locals_, served, strict=True))

    def _served(self) -> list[tuple[PlacedShard, float, IntArray]]:
        """Shards by the share of samples that replicas of them serve, and the ranks of these replicas."""
        served = []
        # Thousands of shards share a handful of replicas, each of thousands of ranks.
        known: dict[int, list[IntArray]] = {}
        for held in self.shards:
            placed = held.as_run(self.group_size)
            ranks_of = known.get(id(placed.replicas))
            if ranks_of is None:
                ranks_of = [np.array(replica, dtype=np.int64) for replica in placed.replicas]
                known[id(placed.replicas)] = ranks_of
            by_share: dict[float, list[IntArray]] = {}
            for index, ranks in enumerate(ranks_of):
                share = 1 / len(ranks_of) if placed.fetch is None else placed.fetch.count(index) / self.group_size
                by_share.setdefault(share, []).append(ranks)
            for share, ranks_with in by_share.items():
                served.append((placed, share, ranks_with[0] if len(ranks_with) == 1 else np.concatenate(ranks_with)))
        return served

    def local_shards(self) -> tuple[tuple[LocalShard, ...], ...]:
        """What each rank of a replica group holds, in the order of `shards`."""
        of_rank: list[list[LocalShard]] = [[] for _ in range(self.group_size)]
        for held in self.held_shards():
            for rank in held.ranks.tolist():
                of_rank[rank].append(held.local)
        return tuple(tuple(shards) for shards in of_rank)

    def with_predicted(self, predicted: CostBreakdown) -> ShardingPlan:
        """The same plan with this prediction."""
        return replace(self, predicted=predicted)
