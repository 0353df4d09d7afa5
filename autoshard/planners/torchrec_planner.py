"""TorchRec's own planner, given the same task as ours."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from autoshard.core import Collective, Payload, ShardingPlan, TableSet, Topology
from autoshard.core.accepted import AT_LEAST_0, Range, check_choice, listed
from autoshard.core.errors import InfeasiblePlanError, InvalidTableError, ModelError
from autoshard.core.machine import device_family
from autoshard.core.quoting import shortened, write_bytes
from autoshard.evaluation.device_memory import DEVICE_MEMORY, device_memory
from autoshard.formats.torchrec.plans import device_type_of, from_torchrec
from autoshard.formats.torchrec.sharding import TIERS, ComputeKernel, TorchRecType
from autoshard.planners.planner import PlanRequest, parse_options
from autoshard.planners.space.placement import PlacementProblem
from autoshard.validator import is_valid

_ALL = "all"


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchRecOptions:
    """Options of the `torchrec` planner."""

    sharding_types: str = field(
        default=TorchRecType.TABLE_WISE.value,
        metadata={"help": "Sharding types that tables may have, a comma between them; or all."},
    )
    reserved_share: float = field(
        default=0.0,
        metadata={"help": "Share of every GPU's memory that the planner keeps free; TorchRec's default is 0.15."},
    )
    timeout_s: int = field(
        default=0,
        metadata={"help": "Seconds after which the planner stops and takes its best plan so far; 0 for no limit."},
    )

    def __post_init__(self) -> None:
        for name in self.names:
            check_choice(name, [_ALL, *TorchRecType], "options.sharding_types")
        Range(at_least=0, below=1).check_fields(self, "reserved_share", within="options.")
        AT_LEAST_0.check_fields(self, "timeout_s", within="options.")

    @property
    def names(self) -> list[str]:
        """The sharding types, each once."""
        names = dict.fromkeys(listed(self.sharding_types))
        return [str(kind) for kind in TorchRecType] if _ALL in names else list(names)


class TorchRecPlanner:
    """`EmbeddingShardingPlanner` of TorchRec 1.8 with its default proposers, partitioner and performance model.

    - The task is told to it as far as it can be: memory and pooling factors of every table and rank, bandwidths between
      ranks (all-to-all of the innermost and the outermost level, in bytes per ms), the device's published memory
      bandwidth in place of its V100 constants, batch size per rank, optimizers, number formats on the wire. It has no
      notion of skewed access.
    - Whole tables in fused kernels, unless `sharding_types` allows more. On a CPU, too, tables may be split by rows,
      which TorchRec's own sharders offer on a GPU only; data-parallel tables have its dense kernel. Where ranks have
      memories of several sizes, TorchRec cuts rows unevenly and trains such tables wrongly: its plan is refused.
    - Memory: nothing is reserved, instead of its default of 15% plus a guess for dense layers and twenty copies of the
      inputs, because our limits are what embeddings may use; `reserved_share` sets its percentage. Its estimate still
      counts inputs and outputs of a batch with the tables. Where that alone leaves it without a plan, or its plan
      exceeds a limit (it counts moments in the weights' format), it plans again with weights and optimizer state
      counted as everywhere here.
    """

    name: ClassVar[str] = "torchrec"
    summary: ClassVar[str] = "TorchRec's EmbeddingShardingPlanner, whole tables unless allowed more."
    when: ClassVar[str] = "comparisons"
    options_type: ClassVar[type] = TorchRecOptions

    def plan(self, request: PlanRequest) -> ShardingPlan:
        """Makes a plan, without prediction or provenance.

        Raises:
            ModelError: If TorchRec is not installed.
            InvalidTableError: If tables are pinned or co-located, which TorchRec's planner cannot do.
            InfeasiblePlanError: If it finds no plan within the memory limits.
            InvalidOptionError: If an option is unknown or out of range.
        """
        options = parse_options(TorchRecOptions, request.options)
        _check_expressible(request)
        if options.names == [TorchRecType.TABLE_WISE]:
            # Says which table fits nowhere, as for the other planners of whole tables.
            PlacementProblem.table_wise(request.tables, request.topology, request.costs.kernel, request.payload)
        with _quiet():
            for count_activations in (True, False):
                found = _plan_once(request, options, count_activations)
                if isinstance(found, ShardingPlan) and is_valid(found):
                    return found
        raise _infeasible(request, options, found if isinstance(found, str) else "its plan exceeds a limit")


def _infeasible(request: PlanRequest, options: TorchRecOptions, reason: str) -> InfeasiblePlanError:
    sizes = [table.storage_bytes for table in request.tables.tables]
    num_ranks = request.topology.world_size
    there = sum(request.topology.memory_of(rank).hbm for rank in range(num_ranks))
    reserved = f", {options.reserved_share:.0%} of them reserved" if options.reserved_share else ""
    limit = f" within {options.timeout_s} s" if options.timeout_s else ""
    return InfeasiblePlanError(
        f"TorchRec's planner found no rank for some table{limit}: all need {write_bytes(sum(sizes))} of the "
        f"{write_bytes(there)} of device memory that the {num_ranks} ranks have together{reserved}, the largest "
        f"{write_bytes(max(sizes))}; {reason}"
    )


def _check_expressible(request: PlanRequest) -> None:
    ranks = set(range(request.topology.world_size))
    for table in request.tables.tables:
        if table.constraints.pinned_ranks and set(table.constraints.pinned_ranks) != ranks:
            constraint = "pinned_ranks"
        elif table.constraints.colocate_with and len(ranks) > 1:
            constraint = "colocate_with"
        else:
            continue
        raise InvalidTableError(
            "TorchRec's planner cannot keep to it; use another planner",
            field=f"tables[{table.name}].constraints.{constraint}",
        )


def _plan_once(request: PlanRequest, options: TorchRecOptions, count_activations: bool) -> ShardingPlan | str:
    """TorchRec's plan; or why it finds none, in its own words."""
    try:
        from torchrec.distributed.planner import EmbeddingShardingPlanner
        from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
        from torchrec.distributed.planner.estimator import EmbeddingPerfEstimatorFactory
        from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
        from torchrec.distributed.planner.types import PlannerError

        from autoshard.formats.torchrec.configs import meta_module
    except ImportError as error:
        raise ModelError(f"the torchrec planner needs torchrec: {error}") from error
    topology = torchrec_topology(request.topology)
    batch_size = max(1, request.tables.batch_size // request.topology.world_size)
    constraints = _constraints(request.tables, options)
    enumerator = None
    if not count_activations:
        estimators = [
            EmbeddingPerfEstimatorFactory.create("default_estimator", topology=topology, constraints=constraints),
            _StaticStorage(request),
        ]
        enumerator = EmbeddingEnumerator(topology, batch_size, constraints, estimator=estimators)
    planner = EmbeddingShardingPlanner(
        topology=topology,
        batch_size=batch_size,
        enumerator=enumerator,
        storage_reservation=FixedPercentageStorageReservation(percentage=options.reserved_share),
        constraints=constraints,
        stats=[],
        debug=False,
        timeout_seconds=options.timeout_s or None,
    )
    try:
        found = planner.plan(meta_module(request.tables.tables), _sharders(request.payload))
    except PlannerError as error:
        return f"TorchRec calls it {error.error_type.value}"
    plan = replace(from_torchrec(found, request.tables, request.topology), payload=request.payload)
    if request.payload.can_be_summed:
        return plan
    shards = tuple(replace(placed, collective=Collective.ALL_TO_ALL) for placed in plan.shards)
    return replace(plan, shards=shards)


def _sharders(payload: Payload) -> list[Any]:
    """TorchRec's sharders, with all sharding types on every device, each with the kernel that trains it.

    Its planner reads off their codecs how many bytes a number takes on the wire.
    """
    from torchrec.distributed.embedding import EmbeddingCollectionSharder
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.fbgemm_qcomm_codec import CommType, QCommsConfig, get_qcomm_codecs
    from torchrec.distributed.types import CommOp

    forward, backward = CommType(payload.forward.value), CommType(payload.backward.value)
    codecs = get_qcomm_codecs(QCommsConfig(forward_precision=forward, backward_precision=backward))
    exchanges = (
        CommOp.POOLED_EMBEDDINGS_ALL_TO_ALL,
        CommOp.POOLED_EMBEDDINGS_REDUCE_SCATTER,
        CommOp.SEQUENCE_EMBEDDINGS_ALL_TO_ALL,
    )
    registry = {exchange.name: codecs for exchange in exchanges}

    def kernels(_: object, sharding_type: str, __: str) -> list[str]:
        is_dense = sharding_type == TorchRecType.DATA_PARALLEL
        return [(ComputeKernel.DENSE if is_dense else ComputeKernel.FUSED).value]

    class Pooled(EmbeddingBagCollectionSharder):  # type: ignore[misc]
        compute_kernels = kernels

        def sharding_types(self, compute_device_type: str) -> list[str]:  # noqa: ARG002 (TorchRec's signature)
            return [kind.value for kind in TorchRecType]

    class Sequences(EmbeddingCollectionSharder):  # type: ignore[misc]
        compute_kernels = kernels

        def sharding_types(self, compute_device_type: str) -> list[str]:  # noqa: ARG002 (TorchRec's signature)
            over_nodes = (TorchRecType.TABLE_ROW_WISE, TorchRecType.GRID_SHARD)
            return [kind.value for kind in TorchRecType if kind not in over_nodes]

    return [Pooled(qcomm_codecs_registry=registry), Sequences(qcomm_codecs_registry=registry)]


class _StaticStorage:
    """Storage estimator that counts what our limits count: weights and optimizer state."""

    def __init__(self, request: PlanRequest) -> None:
        self._tables = {table.name: table for table in request.tables.tables}
        self._on_host = device_type_of(request.topology) == "cpu"

    def estimate(self, sharding_options: list[Any], *_: Any, **__: Any) -> None:
        from torchrec.distributed.planner.types import Storage

        for option in sharding_options:
            table = self._tables[option.name]
            for shard in option.shards:
                num_rows, num_columns = shard.size
                size = num_rows * table.row_bytes(num_columns)
                shard.storage = Storage(hbm=0, ddr=size) if self._on_host else Storage(hbm=size, ddr=0)


def torchrec_topology(topology: Topology) -> Any:
    """The topology as TorchRec's planner knows it: bytes of memory per rank, and bandwidths in bytes per ms."""
    from torchrec.distributed.planner.types import (
        CustomTopologyData,
        HardwareConfig,
        KernelConfig,
        TopologyFactory,
        TrainerConfig,
    )

    on_host = device_type_of(topology) == "cpu"
    capacities = topology.hbm_bytes
    # TorchRec cuts rows by the memories of ranks that are told one by one, which it then trains wrongly.
    alike = {"ddr_cap_bytes" if on_host else "hbm_cap_bytes": capacities[0]} if len(set(capacities)) == 1 else {}
    told = {"ddr_cap" if on_host else "hbm_cap": capacities}
    data = {} if alike else {"custom_topology_data": CustomTopologyData(told, topology.world_size)}
    stated = topology.memory_bandwidth.hbm
    is_known = device_family(topology.device) in DEVICE_MEMORY or stated is not None
    memory_bytes_per_ms = device_memory(topology.device, stated).bytes_per_s / 1e3 if is_known else None
    return TopologyFactory.create_topology(
        TrainerConfig(
            world_size=topology.world_size, local_world_size=topology.local_world_size, additional_params=data
        ),
        HardwareConfig(
            intra_host_bw=topology.levels[0].all_to_all.bytes_per_s / 1e3,
            inter_host_bw=topology.levels[-1].all_to_all.bytes_per_s / 1e3,
            hbm_mem_bw=None if on_host else memory_bytes_per_ms,
            ddr_mem_bw=memory_bytes_per_ms if on_host else None,
            **alike,
        ),
        KernelConfig(compute_device="cpu" if on_host else "cuda", use_hardware_based_bandwidth=True),
    )


def _constraints(tables: TableSet, options: TorchRecOptions) -> Mapping[str, Any]:
    """TorchRec's constraints by table.

    Raises:
        InfeasiblePlanError: If a table forbids all sharding types; TorchRec takes no types for any.
    """
    from torchrec.distributed.planner.types import ParameterConstraints

    constraints = {}
    for table in tables.tables:
        forbidden = table.constraints.forbidden_tiers
        names = [name for name in options.names if TIERS[TorchRecType(name)] not in forbidden]
        if not names:
            tiers = dict.fromkeys(str(TIERS[TorchRecType(name)]) for name in options.names)
            raise InfeasiblePlanError(
                f"{shortened(table.name)}: no sharding type is left: the table forbids tier {', '.join(tiers)} "
                f"({', '.join(options.names)})"
            )
        constraints[table.name] = ParameterConstraints(
            sharding_types=names, pooling_factors=[feature.pooling_factor for feature in table.features]
        )
    return constraints


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keeps TorchRec's log lines off standard error; its reports are switched off by `stats=[]`.

    Of each data-parallel table it says by the root logger that it has no sharding spec, which is as it should be.
    """
    logger, root = logging.getLogger("torchrec"), logging.getLogger()
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    root.addFilter(_is_needed)
    try:
        yield
    finally:
        root.removeFilter(_is_needed)
        logger.setLevel(before)


def _is_needed(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith("Sharding spec not found")
