"""The embedding tables of a plan on TorchRec's DistributedModelParallel: a second engine, and an oracle for the first.

Shape suffixes: F features, B samples of a local batch, C columns of all features.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor, KeyedTensor
from torchrec.distributed import comm
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import EmbeddingModuleShardingPlan, ShardingEnv
from torchrec.distributed.types import ShardingPlan as TorchRecPlan

from autoshard.core import (
    Exchange,
    MemoryLevel,
    Optimizer,
    Payload,
    PlacedShard,
    Pooling,
    RowRange,
    Shard,
    ShardingPlan,
    Split,
    TableSet,
    Tier,
)
from autoshard.core.errors import ExecutionError, InvalidOptionError, InvalidPlanError
from autoshard.core.quoting import shown
from autoshard.evaluation.executable import is_fused_on_gpu
from autoshard.evaluation.traffic import is_weighted
from autoshard.formats.torchrec.configs import table_config
from autoshard.formats.torchrec.objects import parameter_sharding
from autoshard.formats.torchrec.plans import check_whole
from autoshard.formats.torchrec.sharding import (
    Block,
    NotInTorchRecError,
    TableSharding,
    TorchRecType,
    fault_of,
    refused,
    sharding_of,
)
from autoshard.runtime.batch import BatchOfIds, Embedded
from autoshard.runtime.engine.groups import CLOSED, own_group, release_world
from autoshard.runtime.engine.holdings import HeldRange, Holding, Ownership
from autoshard.runtime.engine.ids.messages import id_dtype
from autoshard.runtime.engine.rows.averaging import RowStates
from autoshard.runtime.engine.rows.fused import FUSED_OPTIMIZERS, FusedSettings, is_fused, update_options
from autoshard.runtime.engine.rows.places import initialise_held
from autoshard.runtime.ownership import even_share
from autoshard.runtime.participation import Participation
from autoshard.runtime.state import Held, HeldTables, TableState
from autoshard.runtime.timing import Part, StepTimer

#: What `close` lets go of: nothing can be done without it.
_LET_GO = ("_part", "_sharded", "_held")


def _check_settings(tables: TableSet, settings: FusedSettings, device: torch.device) -> None:
    """Refuses optimizers, and settings of them, that FBGEMM's kernels of the device do not train with.

    Raises:
        InvalidPlanError: If an optimizer is none of theirs (`is_fused_on_gpu`).
        InvalidOptionError: If a setting is not executed; it is named.
    """
    for index, table in enumerate(tables.tables):
        if not is_fused_on_gpu(table.optimizer, table.dtype):
            raise InvalidPlanError(
                f"the torchrec engine does not train {table.dtype} weights with {table.optimizer}: use the thin engine",
                field=f"tables.tables[{index}].optimizer",
            )
    told = {
        "max_gradient": settings.max_gradient is not None,
        "on_bad_gradients": settings.on_bad_gradients != "ignore",
    }
    for field in (one for one, is_asked in told.items() if is_asked):
        raise InvalidOptionError("is not executed by the torchrec engine: use the thin engine", field=field)
    if not all(is_fused(table.optimizer, table.dtype, settings, device) for table in tables.tables):
        field = "weight_decay" if settings.weight_decay else "max_norm"
        raise InvalidOptionError(
            f"is not executed by the torchrec engine on a {device.type}: use the thin engine", field=field
        )


class TorchRecEmbeddings:
    """A plan's tables in a sharded `EmbeddingBagCollection`, with the same weights and updates as `ShardedEmbeddings`.

    It executes pooled tables that are held once: whole on a process, in equal columns, or with their rows split over
    all processes or over those of one node. TorchRec deals rows in blocks of `ceil(rows / processes)`, and so they are
    dealt here, whatever split the plan names: that changes where a row is, and nothing that is computed.

    TorchRec fails on a process without tables, so such a process gets one of a single row that is never looked up.

    Args:
        plan: A plan of such tables.
        settings: Learning rate, epsilon and seed.
        local_batch_size: Samples per process and step; None for an even share of the plan's batch.
        device: Where tables and batches are; None for the CPU or, over NCCL, the current CUDA device.
        timer: Where to count the time of the parts; None to count none.

    Raises:
        InvalidPlanError: If the plan holds tables in a way that is not executed.
        InvalidOptionError: If a setting of updates is not executed.
        InputError: If the processes differ in plan, settings or batch size, or the plan's batch cannot be shared
            evenly.
    """

    def __init__(
        self,
        plan: ShardingPlan,
        settings: FusedSettings,
        *,
        local_batch_size: int | None = None,
        device: torch.device | None = None,
        timer: StepTimer | None = None,
    ) -> None:
        part = Participation.agree(plan, settings, local_batch_size=local_batch_size, device=device)
        if local_batch_size is None:
            even_share(plan.tables.batch_size, part.members.size())
        self._part = part
        self._layouts = layouts_of(plan, part.owners, device_type=part.device.type)
        _check_settings(plan.tables, settings, part.device)
        self.owners = replace(part.owners, holdings=tuple(one for layout in self._layouts for one in layout.holdings))
        self.local_batch_size, self.feature_dims = part.local_batch_size, part.feature_dims
        self._id_dtype = id_dtype(table.num_embeddings for table in self.owners.tables.tables)
        self._is_weighted = is_weighted(plan.tables.tables)
        self._features = [f"feature_{index}" for index in range(len(self.feature_dims))]
        self._timer = timer or StepTimer(part.device, enabled=False)
        # By process.
        self._placeholders = {
            process: _placeholder(process)
            for process in range(part.group.size())
            if not any(one.num_rows(process) for one in self.owners.holdings)
        }
        self._sharded: Any = self._shard(settings)
        self._held = self._find_held()
        for index, state in self._held.items():
            initialise_held(state.weights_ND, self.owners.holdings[index], part.process, None, settings.seed)

    def __call__(self, ids: BatchOfIds) -> Embedded:
        """Pooled embeddings of the local batch.

        Raises:
            InputError: If it is no batch of the plan, an id of more than 32 bits is no row of its table, or it has
                weights where lookups are not weighted, or none.
            RuntimeError: If another id is no row of its table, for which FBGEMM looks.
        """
        fault = ids.fault(len(self._features), self._part.device, is_weighted=self._is_weighted)
        if fault is not None:
            raise fault
        context = self._sharded.create_context()
        with self._timer.measure(Part.INPUT):
            distributed = self._sharded.input_dist(context, self._keyed(ids)).wait().wait()
        # Kernels are timed by hooks; what is left of the forward pass is the exchange.
        with self._timer.measure(Part.FORWARD_EXCHANGE):
            output: KeyedTensor = self._sharded.compute_and_output_dist(context, distributed).wait()
            pooled_BC: torch.Tensor = KeyedTensor.regroup([output], [self._features])[0]
        if pooled_BC.requires_grad:
            pooled_BC.register_hook(lambda _: self._timer.begin(Part.BACKWARD_EXCHANGE))  # type: ignore[no-untyped-call]
        return Embedded(self._means(pooled_BC, ids.lengths_FB), {})

    def sent_bytes(self) -> dict[str, float]:
        """Nothing: TorchRec does not count what it sends."""
        return {}

    def end_step(self) -> None:
        """Nothing is left to do."""

    def table_state(self, name: str) -> TableState:
        """A table's weights and moments, on every process. All processes have to call it."""
        return HeldTables(replace(self._part, owners=self.owners), self._held, {}).read(self.owners.tables[name])

    def close(self) -> None:
        """Lets go of TorchRec's modules and of process groups, before these are destroyed; again, it does nothing.

        Without this, processes may abort when the group is destroyed after it.
        """
        for name in _LET_GO:
            self.__dict__.pop(name, None)
        comm._INTRA_PG = comm._CROSS_PG = None
        release_world()
        gc.collect()

    def __getattr__(self, name: str) -> Any:
        """None but what `close` has let go of.

        Raises:
            ExecutionError: If it has.
        """
        if name in _LET_GO:
            raise ExecutionError(CLOSED)
        raise AttributeError(name)

    def _shard(self, settings: FusedSettings) -> Any:
        collection = self._collection(settings.learning_rate)
        sharder = EmbeddingBagCollectionSharder(
            fused_params={**update_options(settings), "bounds_check_mode": BoundsCheckMode.FATAL}
        )
        node_size = next((one.node_size for one in self._layouts if one.node_size), None)
        if node_size is not None:
            comm._INTRA_PG, comm._CROSS_PG = _node_groups(self._part.group, node_size)
        sharded = {_name(index): layout.sharding for index, layout in enumerate(self._layouts)}
        sharded |= {one.name: _placeholder_sharding(process) for process, one in self._placeholders.items()}
        module_plan = EmbeddingModuleShardingPlan()
        for name, sharding in sharded.items():
            module_plan[name] = parameter_sharding(
                sharding,
                device_type=self._part.device.type,
                node_size=node_size or self._part.group.size(),
                payload=Payload(),
            )
        model = DistributedModelParallel(
            collection,
            env=ShardingEnv.from_process_group(self._part.group),
            device=self._part.device,
            plan=TorchRecPlan(plan={"": module_plan}),
            sharders=[sharder],
        )
        return model.module

    def _collection(self, learning_rate: float) -> EmbeddingBagCollection:
        """All tables before they are sharded, each with its optimizer."""
        placeholders = self._placeholders.values()
        configs, meta = [*self._configs(), *placeholders], torch.device("meta")
        collection = EmbeddingBagCollection(tables=configs, is_weighted=self._is_weighted, device=meta)
        optimizers = [table.optimizer for table in self.owners.tables.tables] + [Optimizer.SGD] * len(placeholders)
        for optimizer, weights_ND in zip(optimizers, collection.parameters(), strict=True):
            # What torch's own `_apply_optimizer_in_backward` leaves for TorchRec, without optimizers and their hooks.
            weights_ND._optimizer_kwargs = [{"optimizer": FUSED_OPTIMIZERS[optimizer], "learning_rate": learning_rate}]
        return collection

    def _means(self, sums_BC: torch.Tensor, lengths_FB: torch.Tensor) -> torch.Tensor:
        """Makes means of the tables whose rows are split; TorchRec would divide sums of whole tables, too."""
        averaged = [
            layout.is_summed and table.pooling is Pooling.MEAN
            for table, layout in zip(self.owners.tables.tables, self._layouts, strict=True)
            for _ in table.features
        ]
        if not any(averaged):
            return sums_BC
        averaged_F = torch.tensor(averaged, device=lengths_FB.device)
        divisors_BF = torch.where(averaged_F[:, None], lengths_FB.clamp(min=1), 1).T
        dims_F = torch.tensor(self.feature_dims, device=lengths_FB.device)
        return sums_BC / divisors_BF.repeat_interleave(dims_F, dim=1)

    def _configs(self) -> list[EmbeddingBagConfig]:
        """The tables under names that TorchRec accepts: it makes modules of them, which may have no dots."""
        features = iter(self._features)
        return [
            table_config(
                table,
                name=_name(index),
                features=[next(features) for _ in table.features],
                pooling=Pooling.SUM if layout.is_summed else None,
            )
            for index, (table, layout) in enumerate(zip(self.owners.tables.tables, self._layouts, strict=True))
        ]

    def _find_held(self) -> Held:
        """State of the tables here; TorchRec's `modules()` does not lead to it."""
        found: dict[int, RowStates] = {}
        holdings = {(_name(one.table), one.columns[0]): index for index, one in enumerate(self.owners.holdings)}
        for kernel in [kernel for lookup in self._sharded._lookups for kernel in lookup._emb_modules]:
            fused = kernel.emb_module
            weights, states = fused.split_embedding_weights(), fused.split_optimizer_states()
            for index, config in enumerate(kernel.config.embedding_tables):
                number = holdings.get((config.name, config.local_metadata.shard_offsets[1]))
                if number is not None:
                    named = zip(
                        self.owners.holdings[number].of.optimizer.moments, states[index] if states else (), strict=True
                    )
                    moments = {moment.name: kept for moment, kept in named}
                    found[number] = RowStates(weights[index], moments, None)
            fused.register_forward_pre_hook(self._before_kernel)
            fused.register_forward_hook(self._after_kernel)
        return found

    def _before_kernel(self, *_: object) -> None:
        self._timer.end(Part.FORWARD_EXCHANGE)
        self._timer.begin(Part.FORWARD_KERNEL)

    def _after_kernel(self, _module: object, _inputs: object, output: torch.Tensor) -> None:
        self._timer.end(Part.FORWARD_KERNEL)
        self._timer.begin(Part.FORWARD_EXCHANGE)
        self._timer.measure_backward(output, Part.BACKWARD_KERNEL, instead_of=Part.BACKWARD_EXCHANGE)

    def _keyed(self, ids: BatchOfIds) -> KeyedJaggedTensor:
        """The batch as TorchRec takes it.

        Raises:
            InputError: If an id does not fit the bits in which ids travel.
        """
        empty = [placeholder.name for placeholder in self._placeholders.values()]
        lengths_FB = ids.lengths_FB
        if empty:
            lengths_FB = torch.cat([lengths_FB, lengths_FB.new_zeros(len(empty), ids.batch_size)])
        ids_L = ids.ids_L.to(self._id_dtype)
        # FBGEMM looks whether ids are rows, but longer ones have wrapped around to others by then.
        if ids_L.itemsize < ids.ids_L.itemsize and (ids_L != ids.ids_L).any():
            fault = ids.id_fault(self.owners.tables)
            assert fault is not None, "all rows have ids of these bits"
            raise fault
        keys = self._features + empty
        return KeyedJaggedTensor(keys=keys, values=ids_L, weights=ids.weights_L, lengths=lengths_FB.reshape(-1))


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchRecLayout:
    """How TorchRec holds a table.

    Attributes:
        sharding: Its entry in TorchRec's plan.
        holdings: The same as rows and columns of processes.
        node_size: Processes of a node, where the rows are split over one; else None.
    """

    sharding: TableSharding
    holdings: tuple[Holding, ...]
    node_size: int | None = None

    @property
    def is_summed(self) -> bool:
        """Whether bags are sums of several processes' sums."""
        return self.holdings[0].ranges[0].num_parts > 1


def layouts_of(plan: ShardingPlan, ownership: Ownership, *, device_type: str) -> list[TorchRecLayout]:
    """TorchRec's layout of each table, in the plan's order.

    Args:
        plan: The plan.
        ownership: Which process holds what of it.
        device_type: `cuda` or `cpu`.

    Raises:
        InvalidPlanError: If TorchRec has none for a shard, or for the plan.
    """
    layouts: list[TorchRecLayout] = []
    try:
        if plan.payload != Payload():
            raise refused(f"sends fp32, not {plan.payload}", "payload")
        check_whole(plan)
        for index, table in enumerate(plan.tables.tables):
            held = [one for one in ownership.holdings if one.table == index]
            field = next(f"shards[{place}]" for place, one in enumerate(plan.shards) if one.shard.table == table)
            layouts.append(_layout(held, ownership.num_processes, device_type, field))
            sizes = {one.node_size for one in layouts if one.node_size}
            if len(sizes) > 1:
                raise refused(f"has nodes of one size; {shown(table.name)} is split over {max(sizes)}", field)
    except NotInTorchRecError as error:
        raise InvalidPlanError(f"the torchrec engine {error.reason}: use the thin engine", field=error.field) from None
    return layouts


def _layout(held: Sequence[Holding], num_processes: int, device_type: str, field: str) -> TorchRecLayout:
    """A table's layout.

    Raises:
        NotInTorchRecError: If there is none.
    """
    table = held[0].of
    shards = [_as_shard(one, of) for one in held for of in one.ranges]
    _check_executed(shards, field)
    processes = shards[0].replicas[0]
    size, first = len(processes), processes[0] - processes[0] % len(processes)
    if num_processes % size or processes != tuple(range(first, first + size)):
        raise refused(
            f"splits rows over all processes or those of a node; {shown(table.name)} is split over processes "
            f"{', '.join(map(str, processes))} of {num_processes}",
            field,
        )
    sharding = sharding_of(shards, world_size=num_processes, node_size=size, field=field)
    kind = sharding.sharding_type
    fault = fault_of(table, kind, device_type=device_type, world_size=num_processes, node_size=size)
    if fault is not None:
        raise refused(fault, field)
    return TorchRecLayout(
        sharding=sharding,
        holdings=tuple(_in_blocks(one, sharding, num_processes) for one in held),
        node_size=size if 1 < size < num_processes else None,
    )


def _as_shard(one: Holding, held: HeldRange) -> PlacedShard:
    """Rows of a holding as a shard whose ranks are the processes."""
    return PlacedShard(
        shard=Shard(table=one.of, rows=RowRange(start=held.start, stop=held.stop), columns=one.columns),
        tier=Tier.ROW_WISE,
        replicas=tuple(tuple(sorted(set(replica))) for replica in held.replicas),
        exchange=one.output,
        memory=one.memory,
    )


def _check_executed(shards: Sequence[PlacedShard], field: str) -> None:
    """Checks what this engine does not execute, though TorchRec's plans can say it.

    Raises:
        NotInTorchRecError: If a table is a sequence table, has replicas, sends rows or is cut both ways.
    """
    name = shown(shards[0].shard.table.name)
    if shards[0].shard.table.pooling is Pooling.SEQUENCE:
        raise refused(f"has sums and means; {name} is a sequence table", field)
    if any(one.memory.level is not MemoryLevel.HBM for one in shards):
        raise refused(f"has tables in the device's memory; {name} lies in {shards[0].memory.level}", field)
    if any(len(one.replicas) > 1 for one in shards):
        raise refused(f"holds each row once; {name} has replicas", field)
    if any(one.exchange is Exchange.ROWS for one in shards):
        raise refused(f"sends sums; {name} sends rows", field)
    is_cut = len({one.shard.columns for one in shards}) > 1
    if is_cut and any(len(one.replicas[0]) > 1 for one in shards):
        raise refused(f"cuts rows or columns; {name} is cut in both", field)


def _in_blocks(one: Holding, sharding: TableSharding, num_processes: int) -> Holding:
    """The same rows in TorchRec's blocks."""
    processes = tuple(block.rank for block in sharding.blocks if block.columns == one.columns)
    held = HeldRange(
        start=0, stop=one.of.num_embeddings, split=Split.BLOCK, replicas=(processes,), read_by=(0,) * num_processes
    )
    return replace(one, ranges=(held,))


def _node_groups(group: dist.ProcessGroup, node_size: int) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """The processes of this one's node, and those of its place in all nodes.

    TorchRec makes these once, from torchrun's environment, for good; the nodes of a plan may be others.
    """
    ranks = dist.get_process_group_ranks(group)
    nodes = [ranks[first : first + node_size] for first in range(0, len(ranks), node_size)]
    places = [ranks[place::node_size] for place in range(node_size)]
    return own_group(nodes, "torchrec"), own_group(places, "torchrec")


def _name(index: int) -> str:
    return f"table_{index}"


#: Rows and columns of tables that keep processes without tables going.
_PLACEHOLDER_ROWS, _PLACEHOLDER_DIM = 1, 4


def _placeholder(process: int) -> EmbeddingBagConfig:
    name = f"placeholder_{process}"
    return EmbeddingBagConfig(
        name=name, num_embeddings=_PLACEHOLDER_ROWS, embedding_dim=_PLACEHOLDER_DIM, feature_names=[name]
    )


def _placeholder_sharding(process: int) -> TableSharding:
    block = Block(rank=process, rows=(0, _PLACEHOLDER_ROWS), columns=(0, _PLACEHOLDER_DIM))
    return TableSharding(sharding_type=TorchRecType.TABLE_WISE, blocks=(block,))
