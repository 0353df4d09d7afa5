"""Sharding plans: who holds what, what it is predicted to cost, and where it came from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib.metadata import EntryPoint
from typing import Annotated

from autoshard.core.access import IntArray
from autoshard.core.choices import GroupLayout, Risk
from autoshard.core.declared import Meaning, Written
from autoshard.core.errors import InvalidOptionError
from autoshard.core.held import PlacedArrays
from autoshard.core.quoting import shown
from autoshard.core.replica_groups import ReplicaGroups, SyncRows
from autoshard.core.shard import LocalShard, PlacedShard, RowsBy
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

    forward: Annotated[DType, Meaning("Of embeddings.", written=Written.REQUIRED)] = DType.FP32
    backward: Annotated[DType, Meaning("Of gradients.", written=Written.REQUIRED)] = DType.FP32

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
    """A predicted value with its 90% interval."""

    value: Annotated[float, Meaning("The prediction.")]
    low: Annotated[float, Meaning("Lower end.")]
    high: Annotated[float, Meaning("Upper end.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankCost:
    """Predicted cost of one rank's step, in milliseconds and bytes.

    In a plan over several replica groups the rank is number `rank` of each group, which all cost alike.
    """

    rank: Annotated[int, Meaning("The rank.")]
    input_ms: Annotated[float, Meaning("As parts.input.")]
    forward_kernel_ms: Annotated[float, Meaning("As parts.forward_kernel.")]
    forward_exchange_ms: Annotated[float, Meaning("As parts.forward_exchange.")]
    backward_exchange_ms: Annotated[float, Meaning("As parts.backward_exchange.")]
    backward_kernel_ms: Annotated[float, Meaning("As parts.backward_kernel.")]
    kernel_ms: Annotated[float, Meaning("Forward and backward kernels.")]
    sync_ms: Annotated[float, Meaning("All-reduce and synchronisation, with other replica groups, too.")]
    hbm_bytes: Annotated[int, Meaning("Tables, optimizer states and caches in device memory.")]
    ddr_bytes: Annotated[int, Meaning("Tables and optimizer states in host memory.")]
    ssd_bytes: Annotated[int, Meaning("Tables on disks.")]
    activation_bytes: Annotated[
        int, Meaning("A batch's inputs and outputs, long sequences included, and gradients of copied rows.")
    ]
    training_bytes: Annotated[
        int,
        Meaning(
            "Activations, what the backward pass holds beyond them, and dense layers; 0 in predictions that are older "
            "than the count."
        ),
    ] = 0

    @property
    def used_bytes(self) -> int:
        """Device memory that the rank needs: tables and what training takes beside them."""
        return self.hbm_bytes + max(self.training_bytes, self.activation_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class LowerBound:
    """What no plan of a space takes less than, in milliseconds."""

    proven_ms: Annotated[
        float | None, Meaning("Holds for every plan; left out where prices have no floor that proves it.")
    ] = None
    estimated_ms: Annotated[
        float | None, Meaning("Higher, and likely to hold; left out where the proven bound is as sharp.")
    ] = None

    def above(self, value_ms: float) -> tuple[float, str]:
        """How far a value is above the sharper bound, as a share of it, and whether that is `proven` or `estimated`."""
        bound_ms, kind = (self.proven_ms, "proven") if self.estimated_ms is None else (self.estimated_ms, "estimated")
        return (value_ms / bound_ms - 1.0 if bound_ms else 0.0), kind


@dataclass(frozen=True, slots=True, kw_only=True)
class CostBreakdown:
    """Predicted cost of a plan by the ranks of one replica group.

    Fields with defaults are younger than the rest, and missing (None, empty) from predictions that are older.
    """

    step_ms: Annotated[Estimate, Meaning("One training step.")]
    max_kernel_ms: Annotated[float, Meaning("Kernel time of the slowest rank.")]
    balance: Annotated[float, Meaning("Least over most kernel time of a rank (AutoShard Sec. 4.3).")]
    exchange_balance: Annotated[float, Meaning("Least over most exchange time of a rank (OPER).")]
    imbalance: Annotated[float, Meaning("Most over mean kernel time of the ranks (2D).")]
    floor_kernel_ms: Annotated[
        float, Meaning("Kernel time of the costliest shard: no placement of these shards goes below it.")
    ]
    binding_rank: Annotated[int, Meaning("The rank whose kernels take longest, numbered within a replica group.")]
    binding_shard: Annotated[str, Meaning("Table of the binding rank's costliest shard.")]
    cost_model: Annotated[str, Meaning("The model of kernels.")]
    ranks: Annotated[
        tuple[RankCost, ...],
        Meaning(
            "One entry per rank of one replica group, numbered within it: ranks at the same place in their groups "
            "hold the same and take equally long."
        ),
    ]
    overlap: Annotated[
        Overlap | None,
        Meaning(
            "Which parts of the step were taken to run at the same time: none, pipelined as in a pipelined run, neo "
            "as in Neo's Appendix B, Eq. 1, or neo_prefetch as there and in its Sec. 4.2."
        ),
    ] = None
    models: Annotated[
        Mapping[str, str],
        Meaning(
            "Names of the models behind the prediction: kernel, communication, and where there are any, dense and step."
        ),
    ] = field(default_factory=dict)
    dense_ms: Annotated[float | None, Meaning("Dense layers, forward and backward.")] = None
    sync_ms: Annotated[
        float | None,
        Meaning(
            "All-reduce of the dense layers' gradients and of tables that are held in several replicas, and "
            "synchronisation of replica groups."
        ),
    ] = None
    group_sync_ms: Annotated[
        float | None,
        Meaning("Synchronisation of replica groups alone, per step; left out where there is one group."),
    ] = None
    parts: Annotated[
        Mapping[StepPart, Estimate],
        Meaning(
            "Parts of the step at their slowest ranks, which add up to it if nothing overlaps; dense holds dense_ms, "
            "sync_ms and what belongs to no part. Each has the relative interval of the models that priced it, also "
            "where a step model knows better of the whole."
        ),
    ] = field(default_factory=dict)
    collectives: Annotated[
        Mapping[StepCollective, CollectiveTime],
        Meaning("Collectives of the step at their slowest ranks: how long they take, and what of it does not hide."),
    ] = field(default_factory=dict)
    bounds: Annotated[
        Mapping[str, LowerBound],
        Meaning(
            "What no plan takes less than: step and parts of it over the sharding types that the planner may choose "
            "from, max_kernel over whole tables on single ranks; left out unless asked for."
        ),
    ] = field(default_factory=dict)

    @property
    def overhead_ms(self) -> float:
        """What the dense part holds beside dense layers and synchronisation; 0 where it is not there."""
        dense = self.parts.get(StepPart.DENSE)
        return 0.0 if dense is None else dense.value - (self.dense_ms or 0.0) - (self.sync_ms or 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """How a plan was made."""

    planner: Annotated[str, Meaning("The planner's name.")]
    options: Annotated[Mapping[str, object], Meaning("The planner's options.", written=Written.REQUIRED)] = field(
        default_factory=dict
    )
    seed: Annotated[int, Meaning("The seed.", written=Written.REQUIRED)] = 0
    risk: Annotated[
        Risk,
        Meaning("What it is planned and priced for: the mean or, with high, the 95th percentile of predicted times."),
    ] = Risk.MEAN
    models: Annotated[
        Mapping[str, str],
        Meaning("Names of the models, and notes by planners and models.", written=Written.REQUIRED),
    ] = field(default_factory=dict)
    version: Annotated[str, Meaning("Version of autoshard.")]


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

    tables: Annotated[TableSet, Meaning("The tables, as in tables.json.")]
    topology: Annotated[Topology, Meaning("The ranks, as in topology.json.")]
    replica_groups: Annotated[
        ReplicaGroups,
        Meaning(
            "The plan is held once per group of ranks; across_nodes takes every num_groups-th rank into a group, "
            "within_nodes consecutive ones.",
            written=Written.REQUIRED,
        ),
    ] = field(default_factory=ReplicaGroups)
    payload: Annotated[Payload, Meaning("Number formats on the wire.", written=Written.REQUIRED)] = field(
        default_factory=Payload
    )
    shards: Annotated[tuple[PlacedShard, ...], Meaning("They tile every table exactly.")]
    row_orders: Annotated[
        Mapping[str, RowOrder],
        Meaning("By table name: Parquet files of row ids in falling access frequency, beside this one."),
    ] = field(default_factory=dict)
    predicted: Annotated[CostBreakdown | None, Meaning("What the models predict of a step.")] = None
    provenance: Annotated[Provenance | None, Meaning("How the plan was made.")] = None
    _arrays: PlacedArrays | None = field(default=None, init=False, repr=False, compare=False)

    @property
    def risk(self) -> Risk:
        """What it was planned for; the mean if it does not say."""
        return Risk.MEAN if self.provenance is None else self.provenance.risk

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

    @property
    def prices(self) -> CostBreakdown:
        """The prediction of a plan that is known to have one, as those that `make_plan` gives have."""
        assert self.predicted is not None, "the plan is priced"
        return self.predicted

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

    @property
    def arrays(self) -> PlacedArrays:
        """The shards as a replica group runs them, read once."""
        if self._arrays is None:
            read = PlacedArrays.of(self.shards, self.tables, self.group_size, self.group_batch_size)
            object.__setattr__(self, "_arrays", read)
            return read
        return self._arrays

    def held_shards(self) -> tuple[HeldShard, ...]:
        """What the ranks of a replica group hold, in the order of `shards`: each distinct small table once."""
        held, arrays = [], self.arrays
        for number, (which, ranks) in enumerate(zip(arrays.local_M.tolist(), arrays.ranks_M, strict=True)):
            local, table = arrays.locals_U[which], arrays.table_of(number)
            held.append(HeldShard(local=local if local.table == table else replace(local, table=table), ranks=ranks))
        return tuple(held)

    def ordered_rows(self) -> dict[str, int]:
        """Of each table that is cut by access rank, the rows whose order matters: all but those of its last range."""
        found: dict[str, int] = {}
        for placed in self.shards:
            rows, table = placed.shard.rows, placed.shard.table
            if rows.by is RowsBy.ACCESS_RANK:
                end = rows.stop if rows.stop < table.num_embeddings else rows.start
                found[table.name] = max(found.get(table.name, 0), end)
        return found

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
