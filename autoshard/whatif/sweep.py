"""Simulates the points of a sweep: plans each, prices it, draws its batches."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path

from autoshard import __version__
from autoshard.core import CostModels, Payload, ReplicaGroups, ShardingPlan, TableSet, Topology
from autoshard.core.choices import Lengths
from autoshard.core.costs import Risk
from autoshard.core.errors import (
    InfeasiblePlanError,
    InputError,
    InvalidOptionError,
    InvalidTopologyError,
    UnknownNameError,
)
from autoshard.core.plan import GroupLayout
from autoshard.core.step import Overlap, StepPart
from autoshard.evaluation.evaluate import evaluate
from autoshard.evaluation.step_price import model_names
from autoshard.formats import digest, load_machine, tables_to_json, topology_to_json
from autoshard.formats.topology_scaling import scaled_topology
from autoshard.planners.planner import PlanRequest
from autoshard.planning import make_costs, make_plan
from autoshard.results.sweep import (
    PointMemory,
    PointStatus,
    PricedPoint,
    SimulatedPoint,
    StepSpread,
    SweepPoint,
    UnpricedPoint,
)
from autoshard.validator import validate_plan
from autoshard.whatif.spread import sample_steps


def sweep_points(
    *,
    machines: Sequence[str],
    ranks: Sequence[int],
    batch_sizes: Sequence[int],
    is_batch_per_rank: bool = False,
    groups: Sequence[int] = (1,),
    group_sizes: Sequence[int] = (),
) -> tuple[SweepPoint, ...]:
    """All combinations, series by series, ranks last; `group_sizes` in place of `groups` where there are any."""
    batch = {"is_batch_per_rank": is_batch_per_rank}
    if group_sizes:
        return tuple(
            SweepPoint(
                machine=machine,
                num_ranks=num_ranks,
                batch_size=size,
                num_groups=max(1, num_ranks // group_size),
                group_size=group_size,
                **batch,
            )
            for machine, group_size, size, num_ranks in product(machines, group_sizes, batch_sizes, ranks)
        )
    return tuple(
        SweepPoint(machine=machine, num_ranks=num_ranks, batch_size=size, num_groups=num_groups, **batch)
        for machine, num_groups, size, num_ranks in product(machines, groups, batch_sizes, ranks)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulator:
    """Simulates points of one model with one planner.

    Attributes:
        tables: The model; its batch size is that of the point.
        planner: Name of the planner that places the tables of a group on its ranks.
        options: Its options.
        time_limit_s: Time that it may use per point.
        seed: Of the planner and of the batches.
        registry: Folder of trained models; None for the default.
        risk: The predicted time that plans are made and priced for: the mean or the 95th percentile.
        overlap: Which parts of the step are taken to run at the same time; None as in `evaluate`.
        layout: How groups lie in the nodes.
        sync_every: Steps from one synchronisation of groups to the next.
        num_batches: Batches to draw per point; 0 for none.
        lengths: Source of the samples' lengths.
        payload: Number formats of what is sent.
        machines: Topologies by the names that points have for them; others are bundled ones or files.
    """

    tables: TableSet
    planner: str
    options: Mapping[str, object] = field(default_factory=dict)
    time_limit_s: float = 1.0
    seed: int = 0
    registry: Path | None = None
    risk: Risk = Risk.MEAN
    overlap: Overlap | None = None
    layout: GroupLayout = GroupLayout.ACROSS_NODES
    sync_every: int = 1
    num_batches: int = 0
    lengths: Lengths = Lengths.DECLARED
    payload: Payload = field(default_factory=Payload)
    machines: Mapping[str, Topology] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.num_batches == 1:
            raise InvalidOptionError("must be 0, or at least 2, got 1", field="num_batches")

    def settings(self, name: str) -> dict[str, object]:
        """All that decides what a point costs, as JSON values; `name` is what the user calls the tables."""
        return {
            "tables": name,
            "tables_digest": digest(tables_to_json(self.tables)),
            "planner": self.planner,
            "options": {key: str(value) for key, value in self.options.items()},
            "time_limit_s": self.time_limit_s,
            "seed": self.seed,
            "registry": None if self.registry is None else str(self.registry),
            "risk": self.risk.value,
            "overlap": None if self.overlap is None else self.overlap.value,
            "layout": self.layout.value,
            "sync_every": self.sync_every,
            "num_batches": self.num_batches,
            "lengths": self.lengths.value,
            "payload": str(self.payload),
            "version": __version__,
        }

    def basis(self, point: SweepPoint) -> str:
        """Digest of the cluster and of the names of the models that a point is simulated with.

        Raises:
            AutoshardError: As `simulate`.
        """
        topology = self._topology(point)
        try:
            models = model_names(self._costs(point, topology), self.tables, topology.device)
        except (InfeasiblePlanError, InputError):  # Such a point has no plan either.
            models = {}
        return digest({"topology": topology_to_json(topology), "models": models})

    def simulate(self, point: SweepPoint) -> SimulatedPoint:
        """Plans and prices one point.

        A point without a plan is a result, too, with the reason.

        Raises:
            UnknownNameError: If there is no such planner or topology.
            InvalidTopologyError: If the machine cannot have so many ranks.
            ModelError: If a trained model is damaged.
        """
        started = time.perf_counter()
        topology, basis = self._topology(point), self.basis(point)
        needed, available = self.tables.storage_bytes, sum(topology.hbm_bytes) // point.num_groups
        try:
            plan, costs = self._planned(point, topology)
        except UnknownNameError:
            raise
        except (InfeasiblePlanError, InputError) as error:
            is_large = isinstance(error, InfeasiblePlanError)
            return UnpricedPoint(
                point=point,
                needed_bytes=needed,
                available_bytes=available,
                status=PointStatus.DOES_NOT_FIT if is_large else PointStatus.IMPOSSIBLE,
                reason=str(error),
                planning_s=time.perf_counter() - started,
                basis=basis,
            )
        planning_s = time.perf_counter() - started
        spread = self._spread(plan, costs) if self.num_batches else None
        return replace(_priced(point, plan, needed, available, planning_s, spread), basis=basis)

    def _topology(self, point: SweepPoint) -> Topology:
        given = self.machines.get(point.machine)
        if given is None:
            return load_machine(point.machine, point.num_ranks)
        try:
            return scaled_topology(given, point.num_ranks)
        except InvalidTopologyError as error:
            raise error.in_source(point.machine) from error

    def _planned(self, point: SweepPoint, topology: Topology) -> tuple[ShardingPlan, CostModels]:
        """A priced plan for the point, made for one of its groups."""
        tables = replace(self.tables, batch_size=point.global_batch_size)
        groups = ReplicaGroups(num_groups=point.num_groups, layout=self.layout, sync_every=self.sync_every)
        # Fewer ranks than a group has are one group.
        if point.group_size is not None and point.num_groups * point.group_size < point.num_ranks:
            raise InvalidOptionError(
                f"must divide the {point.num_ranks} ranks, got {point.group_size}", field="group_size"
            )
        if point.global_batch_size < point.num_groups:
            raise InvalidOptionError(
                f"must be at least the {point.num_groups} groups, got {point.global_batch_size}", field="batch_size"
            )
        costs = self._costs(point, topology)
        request = PlanRequest(
            tables=replace(tables, batch_size=point.global_batch_size // point.num_groups),
            topology=groups.group_topology(topology),
            costs=costs,
            seed=self.seed,
            time_limit_s=self.time_limit_s,
            options=self.options,
            registry=self.registry,
            payload=self.payload,
        )
        plan = make_plan(self.planner, request)
        if point.num_groups > 1:
            if plan.replica_groups.num_groups > 1:
                raise InvalidOptionError(
                    f"must be 1 for a planner that chooses groups itself, got {point.num_groups}", field="num_groups"
                )
            plan = replace(plan, tables=tables, topology=topology, replica_groups=groups, predicted=None)
            validate_plan(plan)
        if plan.predicted is None or self.overlap is not None:
            plan = plan.with_predicted(evaluate(plan, costs, overlap=self.overlap))
        return plan, costs

    def _costs(self, point: SweepPoint, topology: Topology) -> CostModels:
        """What prices plans of one of a point's groups."""
        tables = replace(self.tables, batch_size=max(1, point.global_batch_size // point.num_groups))
        groups = ReplicaGroups(num_groups=point.num_groups, layout=self.layout)
        return make_costs(tables, groups.group_topology(topology), self.registry, risk=self.risk)

    def _spread(self, plan: ShardingPlan, costs: CostModels) -> StepSpread:
        return sample_steps(
            plan,
            costs,
            num_batches=self.num_batches,
            seed=self.seed,
            lengths=self.lengths,
            overlap=self.overlap,
        )


def _priced(
    point: SweepPoint,
    plan: ShardingPlan,
    needed: int,
    available: int,
    planning_s: float,
    spread: StepSpread | None,
) -> PricedPoint:
    predicted = plan.prices
    group = plan.of_one_group().topology
    fullest = max(predicted.ranks, key=lambda rank: rank.used_bytes)
    parts = {part.value: estimate.value for part, estimate in predicted.parts.items() if part is not StepPart.DENSE}
    sync_ms, group_ms = predicted.sync_ms or 0.0, predicted.group_sync_ms or 0.0
    return PricedPoint(
        point=point,
        needed_bytes=needed,
        available_bytes=available,
        planning_s=planning_s,
        spread=spread,
        step_ms=predicted.step_ms,
        parts_ms={
            **parts,
            "dense_layers": predicted.dense_ms or 0.0,
            "all_reduce": sync_ms - group_ms,
            "group_sync": group_ms,
            "overhead": predicted.overhead_ms,
        },
        imbalance=predicted.imbalance,
        exchange_balance=predicted.exchange_balance,
        memory=PointMemory(
            static_bytes=fullest.hbm_bytes,
            activation_bytes=fullest.activation_bytes,
            training_bytes=fullest.training_bytes,
            limit_bytes=group.memory_of(fullest.rank).hbm,
        ),
        planned_groups=plan.replica_groups.num_groups,
        num_shards=dict(Counter(placed.tier.value for placed in plan.shards)),
        models=predicted.models,
    )
