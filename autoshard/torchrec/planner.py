"""A planner with the calls of TorchRec's `EmbeddingShardingPlanner`."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.sharding_plan import get_default_sharders
from torchrec.distributed.types import ShardingPlan as TorchRecPlan
from torchrec.distributed.types import ShardingPlanner

from autoshard.core import CostModels, EmbeddingTable, Payload, Pooling, ShardingPlan, TableSet, Tier, Topology
from autoshard.core.errors import AutoshardError, InfeasiblePlanError, InvalidTableError
from autoshard.core.quoting import shown
from autoshard.evaluation import evaluate
from autoshard.formats import load_topology
from autoshard.formats.torchrec.modules import Collection as Module
from autoshard.formats.torchrec.modules import ModelTables, fused_optimizer, read_model, sharder_of, weight_of
from autoshard.formats.torchrec.objects import KERNEL_SETTINGS, payload_of
from autoshard.formats.torchrec.plans import as_executed, device_type_of, shardings_of, to_torchrec
from autoshard.formats.torchrec.sharding import (
    BY_ROWS,
    TIERS,
    ComputeKernel,
    TableSharding,
    TorchRecType,
    fault_of,
    fault_of_means,
)
from autoshard.planners.planner import PlanRequest
from autoshard.planners.torchrec_planner import torchrec_topology
from autoshard.planning import make_costs, make_plan
from autoshard.torchrec.topologies import topology_of, usual_topology

_log = logging.getLogger(__name__)

#: Planners whose plans are compared; the time limit is shared between them.
_PLANNERS = ("auto", "neo", "cost-greedy")
#: TorchRec's default batch size of a rank.
_BATCH_SIZE = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class _Task:
    """A model's planning task.

    Attributes:
        found: The model's tables.
        tables: The same, tiers forbidden that TorchRec would not execute.
        allowed: Sharding types by table.
        kernels: Compute kernels by table and sharding type.
        topology: The ranks.
        payload: Number formats of embeddings on the wire.
        costs: What prices plans.
    """

    found: ModelTables
    tables: TableSet
    allowed: Mapping[str, frozenset[TorchRecType]]
    kernels: Mapping[str, Mapping[TorchRecType, frozenset[ComputeKernel]]]
    topology: Topology
    payload: Payload
    costs: CostModels


class Planner(ShardingPlanner):  # type: ignore[misc]
    """Plans a TorchRec model for `DistributedModelParallel`, with the calls of `EmbeddingShardingPlanner`.

    Several planners of autoshard plan the model. Of the plans that TorchRec can say, priced as TorchRec carries them
    out, the fastest is taken. Tables get sharding types that their sharder and their constraints allow, and by which
    TorchRec computes what the unsharded model does: those whose optimizer runs in the backward pass are never
    data-parallel, nor are sequence tables on CPUs; means are split by rows only where all tables of their module are.

    Args:
        topology: TorchRec's topology; or a topology, its file, or the name of a bundled one. None for the processes of
            the default group with TorchRec's constants.
        batch_size: Samples per rank and step, as TorchRec counts them.
        constraints: TorchRec's `ParameterConstraints` by table.
        storage_reservation: TorchRec's; what it reserves on each rank's device is taken from the topology. None for
            nothing.
        timeout_seconds: Time of a plan, in seconds.
        seed: Same seed, same plan, time limits aside.
        registry: Folder of trained cost models; None for the default.
        planners: Names of the planners that are tried.
    """

    def __init__(
        self,
        topology: Any = None,
        batch_size: int | None = None,
        constraints: Mapping[str, Any] | None = None,
        *,
        storage_reservation: Any = None,
        timeout_seconds: float = 10.0,
        seed: int = 0,
        registry: Path | None = None,
        planners: Sequence[str] = _PLANNERS,
    ) -> None:
        self._topology = topology
        self._batch_size = batch_size or _BATCH_SIZE
        self._constraints = dict(constraints or {})
        self._storage_reservation = storage_reservation
        self._timeout_seconds, self._seed, self._registry = timeout_seconds, seed, registry
        self._planners = tuple(planners)
        self.chosen: ShardingPlan | None = None
        """The last plan as autoshard's own, with its prediction; None before the first."""

    def plan(self, module: torch.nn.Module, sharders: Sequence[Any] | None = None) -> TorchRecPlan:
        """TorchRec's plan of a model.

        What of the model the planners do not know goes to the log, a warning each.

        Args:
            module: The model.
            sharders: Sharders of its modules, of which each module gets the last one of its very type; None for
                TorchRec's own. `fused_params` may name the optimizer of tables whose parameters name none.

        Raises:
            InvalidTableError: If the model has what plans cannot hold, or a module without a sharder.
            InfeasiblePlanError: If no planner found a plan that TorchRec can say; the text has a reason for each.
        """
        failures: list[str] = []
        for task in self._tasks(module, list(sharders) if sharders is not None else get_default_sharders()):
            plans = []
            for name in self._planners:
                try:
                    plans.append(self._planned(name, task))
                except AutoshardError as error:
                    failures.append(f"{name}: {error}")
            if plans:
                # The earliest of equals.
                self.chosen = min(plans, key=lambda plan: plan.prices.step_ms.value)
                made = to_torchrec(self.chosen, task.found.places, sharding_types=task.allowed)
                return self._carry(made, task)
        raise InfeasiblePlanError(f"no planner found a plan for TorchRec: {'; '.join(failures)}")

    def collective_plan(
        self, module: torch.nn.Module, sharders: Sequence[Any] | None = None, pg: dist.ProcessGroup | None = None
    ) -> TorchRecPlan:
        """As `plan`, by the group's first process for all of them; all have to call it.

        Args:
            module: The model.
            sharders: Sharders of its modules; None for TorchRec's own.
            pg: The processes; None for all.

        Raises:
            AutoshardError: What the first process's planning raised, on every process.
        """
        result: list[Any] = [AutoshardError("the first process could not plan")]
        try:
            if dist.get_rank(pg) == 0:
                result = [(self.plan(module, sharders), self.chosen)]
        except AutoshardError as error:
            result = [error]
        finally:
            # The others wait for it, whatever happened.
            dist.broadcast_object_list(result, group=pg, group_src=0)
        if isinstance(result[0], AutoshardError):
            raise result[0]
        plan, self.chosen = result[0]
        return plan

    def _tasks(self, module: torch.nn.Module, sharders: Sequence[Any]) -> Iterator[_Task]:
        """The task, with the sharding types of modules of means in each of the ways that `_with_means` has."""
        topology = self._ranks(module, sharders)
        found = read_model(
            module,
            batch_size=self._batch_size * topology.world_size,
            world_size=topology.world_size,
            constraints=self._constraints,
            sharders=sharders,
        )
        for note in found.model_notes:
            _log.warning("%s", note)
        cached = [name for name, one in self._constraints.items() if getattr(one, "cache_params", None) is not None]
        if cached:
            _log.warning("constraints.%s.cache_params is not kept: planners choose the sizes of caches", cached[0])
        for one in found.collections:
            if len(one.paths) > 1:
                raise InvalidTableError(
                    f"stands at {', '.join(one.paths[1:])}, too, and DistributedModelParallel would train each apart: "
                    "use autoshard.torchrec.shard",
                    field=one.path,
                )
        kernels = dict(self._allowed_kernels(found, sharders, topology))
        payload = payload_of(self._constraints.get(place.name) for place in found.places.values())
        if payload is None:
            _log.warning(
                "output_dtype of constraints is handed on, and embeddings are priced in fp32: tables have several, or "
                "one that is not priced"
            )
        for allowed in _with_means(found, {name: frozenset(kinds) for name, kinds in kernels.items()}):
            tables = tuple(_with_tiers(table, allowed[table.name], topology) for table in found.tables.tables)
            of_types = replace(found.tables, tables=tables)
            yield _Task(
                found=found,
                tables=of_types,
                allowed=allowed,
                kernels=kernels,
                topology=topology,
                payload=payload or Payload(),
                costs=make_costs(of_types, topology, self._registry),
            )

    def _ranks(self, module: torch.nn.Module, sharders: Sequence[Any]) -> Topology:
        given = self._topology if self._topology is not None else usual_topology()
        if isinstance(given, str | Path):
            given = load_topology(str(given))
        own = given if isinstance(given, Topology) else None
        if self._storage_reservation is None:
            return own or topology_of(given)
        left = topology_of(
            self._storage_reservation.reserve(
                topology=given if own is None else torchrec_topology(own),
                batch_size=self._batch_size,
                module=module,
                sharders=sharders,
                constraints=self._constraints,
            )
        )
        if own is None:
            return left
        memory = [replace(own.memory_of(rank), hbm=left.memory_of(rank).hbm) for rank in range(own.world_size)]
        others = tuple((rank, one) for rank, one in enumerate(memory) if one != memory[0])
        return replace(own, memory_bytes=memory[0], overrides=others)

    def _allowed_kernels(
        self, found: ModelTables, sharders: Sequence[Any], topology: Topology
    ) -> Iterator[tuple[str, Mapping[TorchRecType, frozenset[ComputeKernel]]]]:
        """Sharding types that each table may have, with their compute kernels.

        Raises:
            InvalidTableError: If there are none for a table.
        """
        device_type = device_type_of(topology)
        for collection in found.collections:
            sharder = sharder_of(collection.module, sharders)
            offered = _offered(collection, sharder, device_type)
            for name, config in zip(collection.tables, collection.configs, strict=True):
                constraint = self._constraints.get(config.name)
                wanted = getattr(constraint, "sharding_types", None) or list(TorchRecType)
                allowed = offered & {TorchRecType(kind) for kind in wanted}
                field = f"constraints.{config.name}.sharding_types"
                if not allowed:
                    raise InvalidTableError(
                        f"allows {', '.join(wanted)}, its sharder {', '.join(sorted(offered))}", field=field
                    )
                place = getattr(constraint, "device_group", None)
                if place not in (None, device_type):
                    raise InvalidTableError(
                        f"must be {device_type} as the topology is, got {shown(place)}",
                        field=f"constraints.{config.name}.device_group",
                    )
                faults = {
                    kind: fault_of(
                        found.tables[name],
                        kind,
                        device_type=device_type,
                        world_size=topology.world_size,
                        node_size=topology.local_world_size,
                    )
                    for kind in sorted(offered)
                }
                if fused_optimizer(weight_of(collection.module, config.name)) is not None:
                    faults[TorchRecType.DATA_PARALLEL] = (
                        f"trains no data-parallel table in the backward pass; {shown(name)} has its optimizer there"
                    )
                right = frozenset(kind for kind in allowed if faults[kind] is None)
                if not right:
                    others = [str(kind) for kind in sorted(offered) if faults[kind] is None]
                    hint = f"; {', '.join(others)} would do" if others else ""
                    raise InvalidTableError(f"TorchRec {faults[min(allowed)]}{hint}", field=field if others else name)
                yield name, _with_kernels(right, sharder, constraint, device_type, config.name)

    def _planned(self, name: str, task: _Task) -> ShardingPlan:
        """A planner's plan as TorchRec carries it out, priced anew.

        Raises:
            AutoshardError: If it finds none, or one that TorchRec cannot say or must not carry out.
        """
        options = self._options(name, task)
        request = PlanRequest(
            tables=task.tables,
            topology=task.topology,
            costs=task.costs,
            seed=self._seed,
            time_limit_s=self._timeout_seconds / len(self._planners),
            payload=task.payload,
            options=options,
            registry=self._registry,
        )
        made = make_plan(name, request)
        executed = as_executed(made, sharding_types=task.allowed)
        self._check_kept(task, shardings_of(executed, sharding_types=task.allowed))
        return executed.with_predicted(evaluate(executed, task.costs))

    def _options(self, name: str, task: _Task) -> dict[str, object]:
        """Options by which a planner keeps to sharding types and `min_partition`, as far as it has them."""
        held, kinds = [_held_as(allowed, task.topology) for allowed in task.allowed.values()], frozenset[TorchRecType]()
        if name == "auto":
            kinds = frozenset.union(*held)
        elif name == "neo":
            kinds = frozenset.intersection(*held)
        names = [_own_name(kind) for kind in TorchRecType if kind in kinds]
        options: dict[str, object] = {"sharding_types": ",".join(names)} if names else {}
        if name == "neo" and names:
            options["memory"] = "hbm"
        least = [getattr(constraint, "min_partition", None) or 0 for constraint in self._constraints.values()]
        if name in ("auto", "neo") and any(least):
            options["min_partition"] = max(least)
        return options

    def _check_kept(self, task: _Task, shardings: Mapping[str, TableSharding]) -> None:
        """Refuses a plan that does not keep to `min_partition` and `compute_kernels`."""
        for name, place in task.found.places.items():
            constraint, sharding = self._constraints.get(place.name), shardings[name]
            kernels = task.kernels[name][sharding.sharding_type]
            if sharding.kernel not in kernels:
                raise InvalidTableError(
                    f"{' or '.join(sorted(kernels))} is what it and the sharder allow; the plan has {sharding.kernel}",
                    field=f"constraints.{place.name}.compute_kernels",
                )
            least = min(getattr(constraint, "min_partition", None) or 0, task.found.tables[name].embedding_dim)
            first, last = sharding.blocks[0].columns
            if last - first < least:
                raise InvalidTableError(
                    f"is {least}; the plan has column shards of {last - first}",
                    field=f"constraints.{place.name}.min_partition",
                )

    def _carry(self, plan: TorchRecPlan, task: _Task) -> TorchRecPlan:
        """The plan with the settings of kernels that TorchRec's planner takes over from constraints as they are."""
        for place in task.found.places.values():
            for setting in KERNEL_SETTINGS:
                given = getattr(self._constraints.get(place.name), setting, None)
                setattr(plan.plan[place.path][place.name], setting, given)
        return plan


def _held_as(kinds: Collection[TorchRecType], topology: Topology) -> frozenset[TorchRecType]:
    """Sharding types with the other names of the same shards, which plans have instead, see `renamed`."""
    found, node_size = set(kinds), topology.local_world_size
    is_over_node = not found.isdisjoint({TorchRecType.TABLE_ROW_WISE, TorchRecType.GRID_SHARD})
    if is_over_node and node_size == topology.world_size:
        found.add(TorchRecType.ROW_WISE)
    is_by_columns = not found.isdisjoint({TorchRecType.COLUMN_WISE, TorchRecType.TABLE_COLUMN_WISE})
    if is_by_columns or topology.world_size == 1 or (is_over_node and node_size == 1):
        found.add(TorchRecType.TABLE_WISE)
    return frozenset(found)


def _own_name(kind: TorchRecType) -> str:
    """The planners' name of a sharding type."""
    return "grid" if kind is TorchRecType.GRID_SHARD else kind.value


def _offered(collection: Module, sharder: Any, device_type: str) -> frozenset[TorchRecType]:
    """Sharding types that a module's sharder offers, as far as plans can say them.

    Raises:
        InvalidTableError: If it has none.
    """
    if sharder is None:
        raise InvalidTableError(
            f"has no sharder: {type(collection.module).__name__} is not among the sharders' modules",
            field=collection.path or "model",
        )
    offered = {TorchRecType(kind) for kind in sharder.sharding_types(device_type) if kind in list(TorchRecType)}
    if isinstance(sharder, EmbeddingCollectionSharder):
        if sharder._use_index_dedup and device_type == "cpu":
            raise InvalidTableError(
                "has a sharder with use_index_dedup, which TorchRec carries out on cuda only; leave it out on cpu",
                field=collection.path or "model",
            )
        offered -= {
            TorchRecType.TABLE_COLUMN_WISE,
            TorchRecType.TABLE_ROW_WISE,
            TorchRecType.GRID_SHARD,
        }
    return frozenset(offered)


def _with_kernels(
    kinds: Collection[TorchRecType], sharder: Any, constraint: Any, device_type: str, name: str
) -> Mapping[TorchRecType, frozenset[ComputeKernel]]:
    """The compute kernels of a table's sharding types, as far as sharder and constraint allow them and plans say them.

    Raises:
        InvalidTableError: If no sharding type has one.
    """
    dense = frozenset({ComputeKernel.DENSE})
    said = {kind: dense if kind is TorchRecType.DATA_PARALLEL else frozenset(ComputeKernel) - dense for kind in kinds}
    offered = {kind: of.intersection(sharder.compute_kernels(kind.value, device_type)) for kind, of in said.items()}
    given = getattr(constraint, "compute_kernels", None) or list(ComputeKernel)
    kept = {kind: of.intersection(given) for kind, of in offered.items() if of.intersection(given)}
    if not kept:
        there = ", ".join(sorted(frozenset().union(*offered.values())))
        raise InvalidTableError(
            f"allows {', '.join(given)}; its sharding types, {', '.join(sorted(kinds))}, have {there or 'no other'}",
            field=f"constraints.{name}.compute_kernels",
        )
    return kept


def _with_means(
    found: ModelTables, allowed: Mapping[str, frozenset[TorchRecType]]
) -> Iterator[Mapping[str, frozenset[TorchRecType]]]:
    """Sharding types by which TorchRec computes all means of a module rightly (`fault_of_means`).

    First no mean is split by rows, then all tables are in the modules where that is allowed.

    Raises:
        InvalidTableError: If constraints leave neither.
    """
    whole, split = dict(allowed), dict(allowed)
    for collection in found.collections:
        tables = [found.tables[name] for name in collection.tables]
        means = [table.name for table in tables if table.pooling is Pooling.MEAN]
        whole |= {name: allowed[name] - BY_ROWS for name in means}
        by_rows = {table.name: allowed[table.name] & BY_ROWS for table in tables}
        fault = fault_of_means(dict.fromkeys(tables, TorchRecType.ROW_WISE))
        is_possible = bool(means) and fault is None and all(by_rows.values())
        split |= by_rows if is_possible else {name: whole[name] for name in means}
        lacking = [name for name in means if not whole[name]]
        if lacking and not is_possible:
            name = collection.configs[collection.tables.index(lacking[0])].name
            reason = fault[1] if fault is not None else "splits means by rows only where all tables of a module are"
            raise InvalidTableError(f"TorchRec {reason}", field=f"constraints.{name}.sharding_types")
    ways = [way for way in (whole, split) if all(way.values())]
    yield from ways if whole != split else ways[:1]


def _with_tiers(table: EmbeddingTable, allowed: Collection[TorchRecType], topology: Topology) -> EmbeddingTable:
    """The table, tiers forbidden that none of its sharding types has."""
    tiers = {TIERS[kind] for kind in _held_as(allowed, topology)}
    forbidden = tuple(tier for tier in Tier if tier not in tiers)
    return replace(table, constraints=replace(table.constraints, forbidden_tiers=forbidden))
