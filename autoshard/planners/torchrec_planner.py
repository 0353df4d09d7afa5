"""TorchRec's own planner, given the same task as ours."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import numpy as np

from autoshard.core import DType, EmbeddingTable, Optimizer, Pooling, ShardingPlan, Topology
from autoshard.core.errors import InfeasiblePlanError, InvalidTableError, ModelError
from autoshard.core.machine import device_family
from autoshard.evaluation.device_memory import DEVICE_MEMORY, device_memory
from autoshard.planners.planner import NoOptions, PlanRequest, parse_options
from autoshard.planners.space.placement import PlacementProblem, RankArray

_HOST_DEVICES = ("cpu",)


class TorchRecPlanner:
    """`EmbeddingShardingPlanner` of TorchRec 1.8 with its default proposers, partitioner and performance model.

    - The task is told to it as far as it can be: memory and pooling factors of every table and rank, bandwidths between
      ranks (all-to-all of the innermost and the outermost level, in bytes per ms), the device's published memory
      bandwidth in place of its V100 constants, batch size per rank, optimizers. It has no notion of skewed access.
    - Only whole tables in fused kernels are allowed, as for the other planners.
    - Memory: nothing is reserved, instead of its default of 15% plus a guess for dense layers and twenty copies of the
      inputs, because our limits are what embeddings may use. Its estimate still counts inputs and outputs of a batch
      with the tables. Where that alone leaves it without a plan, or its plan exceeds a limit (it counts moments in the
      weights' format), it plans again with weights and optimizer state counted as everywhere here.
    """

    name: ClassVar[str] = "torchrec"
    summary: ClassVar[str] = "TorchRec's EmbeddingShardingPlanner, whole tables only."
    options_type: ClassVar[type] = NoOptions

    def plan(self, request: PlanRequest) -> ShardingPlan:
        """Makes a plan, without prediction or provenance.

        Raises:
            ModelError: If TorchRec is not installed.
            InvalidTableError: If tables are pinned or co-located, which TorchRec's planner cannot do.
            InfeasiblePlanError: If it finds no plan within the memory limits.
            InvalidOptionError: If there are options; it has none.
        """
        parse_options(self.options_type, request.options)
        problem = PlacementProblem.table_wise(request.tables, request.topology, request.costs.kernel, request.payload)
        _check_expressible(problem)
        with _quiet():
            for count_activations in (True, False):
                ranks_N = _plan_once(problem, count_activations)
                if ranks_N is not None and problem.is_feasible(ranks_N):
                    return problem.to_plan(ranks_N)
        needed, there = int(problem.bytes_N.sum()), int(problem.capacity_R.sum())
        raise InfeasiblePlanError(
            f"TorchRec's planner found no rank for some table: all need {needed:,} bytes of the {there:,} bytes that "
            f"the {problem.num_ranks} ranks have together, the largest {int(problem.bytes_N.max()):,} bytes"
        )


def _check_expressible(problem: PlacementProblem) -> None:
    for index, group in enumerate(problem.members):
        table = problem.tables.tables[group[0]]
        if not problem.allowed_NR[index].all():
            constraint = "pinned_ranks"
        elif len(group) > 1 and problem.num_ranks > 1:
            constraint = "colocate_with"
        else:
            continue
        raise InvalidTableError(
            "TorchRec's planner cannot keep to it; use another planner",
            field=f"tables[{table.name}].constraints.{constraint}",
        )


def _plan_once(problem: PlacementProblem, count_activations: bool) -> RankArray | None:
    """Ranks of the items, shape (N,); None if TorchRec finds no plan."""
    try:
        from torchrec.distributed.planner import EmbeddingShardingPlanner
        from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
        from torchrec.distributed.planner.estimator import EmbeddingPerfEstimatorFactory
        from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
        from torchrec.distributed.planner.types import PlannerError
        from torchrec.distributed.sharding_plan import get_default_sharders
    except ImportError as error:
        raise ModelError(f"the torchrec planner needs torchrec: {error}") from error
    topology = _topology(problem.topology)
    batch_size = max(1, problem.tables.batch_size // problem.num_ranks)
    constraints = _constraints(problem)
    enumerator = None
    if not count_activations:
        estimators = [
            EmbeddingPerfEstimatorFactory.create("default_estimator", topology=topology, constraints=constraints),
            _StaticStorage(problem),
        ]
        enumerator = EmbeddingEnumerator(topology, batch_size, constraints, estimator=estimators)
    planner = EmbeddingShardingPlanner(
        topology=topology,
        batch_size=batch_size,
        enumerator=enumerator,
        storage_reservation=FixedPercentageStorageReservation(percentage=0.0),
        constraints=constraints,
        stats=[],
        debug=False,
    )
    try:
        found = planner.plan(_module(problem), get_default_sharders())
    except PlannerError:
        return None
    rank_of = {name: sharding.ranks[0] for module in found.plan.values() for name, sharding in module.items()}
    return np.array([rank_of[problem.tables.tables[group[0]].name] for group in problem.members], dtype=np.int64)


class _StaticStorage:
    """Storage estimator that counts what our limits count: weights and optimizer state."""

    def __init__(self, problem: PlacementProblem) -> None:
        self._bytes_of = {table.name: table.storage_bytes for table in problem.tables.tables}
        self._on_host = problem.topology.device in _HOST_DEVICES

    def estimate(self, sharding_options: list[Any], **_: Any) -> None:
        from torchrec.distributed.planner.types import Storage

        for option in sharding_options:
            size = self._bytes_of[option.name]
            for shard in option.shards:
                shard.storage = Storage(hbm=0, ddr=size) if self._on_host else Storage(hbm=size, ddr=0)


def _topology(topology: Topology) -> Any:
    from torchrec.distributed.planner.types import (
        CustomTopologyData,
        HardwareConfig,
        KernelConfig,
        TopologyFactory,
        TrainerConfig,
    )

    on_host = topology.device in _HOST_DEVICES
    capacities = [topology.memory_of(rank).hbm for rank in range(topology.world_size)]
    stated = topology.memory_bandwidth.hbm
    is_known = device_family(topology.device) in DEVICE_MEMORY or stated is not None
    memory_bytes_per_ms = device_memory(topology.device, stated).bytes_per_s / 1e3 if is_known else None
    return TopologyFactory.create_topology(
        TrainerConfig(
            world_size=topology.world_size,
            local_world_size=topology.local_world_size,
            additional_params={
                "custom_topology_data": CustomTopologyData(
                    {"ddr_cap" if on_host else "hbm_cap": capacities}, topology.world_size
                )
            },
        ),
        HardwareConfig(
            intra_host_bw=topology.levels[0].all_to_all.bytes_per_s / 1e3,
            inter_host_bw=topology.levels[-1].all_to_all.bytes_per_s / 1e3,
            hbm_mem_bw=None if on_host else memory_bytes_per_ms,
            ddr_mem_bw=memory_bytes_per_ms if on_host else None,
        ),
        KernelConfig(compute_device="cpu" if on_host else "cuda", use_hardware_based_bandwidth=True),
    )


def _constraints(problem: PlacementProblem) -> Mapping[str, Any]:
    from torchrec.distributed.planner.types import ParameterConstraints

    return {
        table.name: ParameterConstraints(
            sharding_types=["table_wise"],
            compute_kernels=["fused"],
            pooling_factors=[feature.pooling_factor for feature in table.features],
        )
        for table in problem.tables.tables
    }


def _module(problem: PlacementProblem) -> Any:
    """The tables as TorchRec modules without storage: pooled ones together, sequences by dimension."""
    import torch
    from torchrec import EmbeddingBagCollection, EmbeddingCollection

    meta = torch.device("meta")
    pooled = [table for table in problem.tables.tables if table.pooling is not Pooling.SEQUENCE]
    sequences: dict[int, list[EmbeddingTable]] = {}
    for table in problem.tables.tables:
        if table.pooling is Pooling.SEQUENCE:
            sequences.setdefault(table.embedding_dim, []).append(table)
    parts: list[torch.nn.Module] = []
    if pooled:
        parts.append(EmbeddingBagCollection(tables=[_config(table) for table in pooled], device=meta))
    for tables in sequences.values():
        parts.append(EmbeddingCollection(tables=[_config(table) for table in tables], device=meta))
    optimizer_of = {table.name: table.optimizer for table in problem.tables.tables}
    for part in parts:
        for name, parameter in part.named_parameters():
            # Where TorchRec's own apply_optimizer_in_backward leaves it for the planner to find.
            parameter._optimizer_classes = [_optimizer(optimizer_of[name.split(".")[-2]])]  # type: ignore[attr-defined]
    return torch.nn.ModuleList(parts)


def _config(table: EmbeddingTable) -> Any:
    from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig, EmbeddingConfig, PoolingType

    common = {
        "name": table.name,
        "num_embeddings": table.num_embeddings,
        "embedding_dim": table.embedding_dim,
        "feature_names": [feature.name for feature in table.features],
        "data_type": {
            DType.FP32: DataType.FP32,
            DType.FP16: DataType.FP16,
            DType.BF16: DataType.BF16,
            DType.INT8: DataType.INT8,
        }[table.dtype],
    }
    if table.pooling is Pooling.SEQUENCE:
        return EmbeddingConfig(**common)
    return EmbeddingBagConfig(**common, pooling=PoolingType.MEAN if table.pooling is Pooling.MEAN else PoolingType.SUM)


def _optimizer(optimizer: Optimizer) -> type:
    import torchrec.optim

    types: dict[Optimizer, type] = {
        Optimizer.SGD: torchrec.optim.SGD,
        Optimizer.ROWWISE_ADAGRAD: torchrec.optim.RowWiseAdagrad,
        Optimizer.ADAGRAD: torchrec.optim.Adagrad,
        Optimizer.ADAM: torchrec.optim.Adam,
    }
    return types[optimizer]


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keeps TorchRec's log lines off standard error; its reports are switched off by `stats=[]`."""
    logger = logging.getLogger("torchrec")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(before)
