"""A planner with the calls of TorchRec's `EmbeddingShardingPlanner`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.sharding_plan import get_default_sharders
from torchrec.distributed.types import ShardingPlan as TorchRecPlan
from torchrec.distributed.types import ShardingPlanner

from autoshard.core import CostModels, EmbeddingTable, ShardingPlan, TableSet, Tier, Topology
from autoshard.core.errors import AutoshardError, InfeasiblePlanError, InvalidTableError
from autoshard.core.quoting import shown
from autoshard.evaluation import evaluate
from autoshard.formats import load_topology
from autoshard.formats.torchrec.modules import Collection, ModelTables, fused_optimizer, read_model, weight_of
from autoshard.formats.torchrec.plans import as_executed, device_type_of, shardings_of, to_torchrec
from autoshard.formats.torchrec.sharding import TIERS, ShardingType, refused
from autoshard.planners.neo.choice import NEO_TYPES
from autoshard.planners.planner import PlanRequest
from autoshard.planning import make_costs, make_plan
from autoshard.torchrec.topologies import topology_of, usual_topology

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
        topology: The ranks.
        costs: What prices plans.
    """

    found: ModelTables
    tables: TableSet
    allowed: Mapping[str, frozenset[ShardingType]]
    topology: Topology
    costs: CostModels


class Planner(ShardingPlanner):  # type: ignore[misc]
    """Plans a TorchRec model for `DistributedModelParallel`, with the calls of `EmbeddingShardingPlanner`.

    Several planners of autoshard plan the model. Of the plans that TorchRec can say, priced as TorchRec carries them
    out, the fastest is taken. Tables get sharding types that their sharder and their constraints allow; those whose
    optimizer runs in the backward pass are never data-parallel, since TorchRec does not train them then.

    Args:
        topology: TorchRec's topology; or a topology, its file, or the name of a bundled one. None for the processes of
            the default group with TorchRec's constants.
        batch_size: Samples per rank and step, as TorchRec counts them.
        constraints: TorchRec's `ParameterConstraints` by table.
        storage_reservation: Takes what TorchRec reserves from a topology of TorchRec; None for nothing.
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

        Args:
            module: The model.
            sharders: Sharders of its modules; None for TorchRec's own.

        Raises:
            InvalidTableError: If the model has what plans cannot hold, or a module without a sharder.
            InfeasiblePlanError: If no planner found a plan that TorchRec can say; the text has a reason for each.
        """
        task = self._task(module, list(sharders) if sharders is not None else get_default_sharders())
        plans, failures = [], []
        for name in self._planners:
            try:
                plans.append(self._planned(name, task))
            except AutoshardError as error:
                failures.append(f"{name}: {error}")
        if not plans:
            raise InfeasiblePlanError(f"no planner found a plan for TorchRec: {'; '.join(failures)}")
        # The earliest of equals.
        self.chosen = min(plans, key=lambda plan: plan.predicted.step_ms.value if plan.predicted else 0.0)
        return to_torchrec(self.chosen, task.found.places)

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

    def _task(self, module: torch.nn.Module, sharders: Sequence[Any]) -> _Task:
        topology = self._ranks(module, sharders)
        found = read_model(module, batch_size=self._batch_size * topology.world_size, constraints=self._constraints)
        for one in found.collections:
            if len(one.paths) > 1:
                raise InvalidTableError(
                    f"stands at {', '.join(one.paths[1:])}, too, and DistributedModelParallel would train each apart: "
                    "use autoshard.torchrec.shard",
                    field=one.path,
                )
        allowed = dict(self._allowed_types(found, sharders, device_type_of(topology)))
        tables = replace(
            found.tables,
            tables=tuple(_with_tiers(table, allowed[table.name]) for table in found.tables.tables),
        )
        return _Task(
            found=found,
            tables=tables,
            allowed=allowed,
            topology=topology,
            costs=make_costs(tables, topology, self._registry),
        )

    def _ranks(self, module: torch.nn.Module, sharders: Sequence[Any]) -> Topology:
        given = self._topology if self._topology is not None else usual_topology()
        if isinstance(given, Topology):
            return given
        if isinstance(given, str | Path):
            return load_topology(str(given))
        if self._storage_reservation is not None:
            given = self._storage_reservation.reserve(
                topology=given,
                batch_size=self._batch_size,
                module=module,
                sharders=sharders,
                constraints=self._constraints,
            )
        return topology_of(given)

    def _allowed_types(
        self, found: ModelTables, sharders: Sequence[Any], device_type: str
    ) -> Iterator[tuple[str, frozenset[ShardingType]]]:
        """Sharding types that each table may have."""
        for collection in found.collections:
            offered = _offered(collection, sharders, device_type)
            for name, config in zip(collection.tables, collection.configs, strict=True):
                wanted = getattr(self._constraints.get(config.name), "sharding_types", None) or list(ShardingType)
                allowed = offered & {ShardingType(kind) for kind in wanted}
                if fused_optimizer(weight_of(collection.module, config.name)) is not None:
                    allowed -= {ShardingType.DATA_PARALLEL}
                if not allowed:
                    raise InvalidTableError(
                        f"allows {', '.join(wanted)}, its sharder {', '.join(sorted(offered))}",
                        field=f"constraints.{config.name}.sharding_types",
                    )
                yield name, allowed

    def _planned(self, name: str, task: _Task) -> ShardingPlan:
        """A planner's plan as TorchRec carries it out, priced anew.

        Raises:
            AutoshardError: If it finds none, or one that TorchRec cannot say or may not carry out.
        """
        everywhere = frozenset.intersection(*task.allowed.values())
        options = {}
        if name == "neo":
            names = [str(kind) for kind in NEO_TYPES if _torchrec_name(str(kind)) in everywhere]
            options = {"sharding_types": ",".join(names), "memory": "hbm"} if names else {}
        request = PlanRequest(
            tables=task.tables,
            topology=task.topology,
            costs=task.costs,
            seed=self._seed,
            time_limit_s=self._timeout_seconds / len(self._planners),
            options=options,
            registry=self._registry,
        )
        made = make_plan(name, request)
        executed = as_executed(made)
        for table, sharding in shardings_of(executed).items():
            if sharding.sharding_type not in task.allowed[table]:
                accepted = ", ".join(sorted(task.allowed[table]))
                raise refused(f"may hold {shown(table)} as {accepted}; it is {sharding.sharding_type}", "shards")
        return executed.with_predicted(evaluate(executed, task.costs))


def _torchrec_name(neo_type: str) -> str:
    """TorchRec's name of a sharding type of `neo`."""
    return ShardingType.GRID_SHARD.value if neo_type == "grid" else neo_type


def _offered(collection: Collection, sharders: Sequence[Any], device_type: str) -> frozenset[ShardingType]:
    """Sharding types that a module's sharder offers, as far as plans can say them.

    Raises:
        InvalidTableError: If it has none.
    """
    sharder = next((one for one in sharders if isinstance(collection.module, one.module_type)), None)
    if sharder is None:
        raise InvalidTableError(
            f"has no sharder: {type(collection.module).__name__} is not among the sharders' modules",
            field=collection.path or "model",
        )
    offered = {ShardingType(kind) for kind in sharder.sharding_types(device_type) if kind in list(ShardingType)}
    if isinstance(sharder, EmbeddingCollectionSharder):
        offered -= {ShardingType.TABLE_ROW_WISE, ShardingType.GRID_SHARD}
    return frozenset(offered)


def _with_tiers(table: EmbeddingTable, allowed: frozenset[ShardingType]) -> EmbeddingTable:
    """The table, tiers forbidden that none of its sharding types has."""
    tiers = {TIERS[kind] for kind in allowed}
    forbidden = tuple(tier for tier in Tier if tier not in tiers)
    return replace(table, constraints=replace(table.constraints, forbidden_tiers=forbidden))
