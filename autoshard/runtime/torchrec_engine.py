"""The embedding tables of a plan on TorchRec's DistributedModelParallel: a second engine, and an oracle for the first.

Shape suffixes: F features, B samples of a local batch, C columns of all features.
"""

from __future__ import annotations

import gc
from typing import Any

import torch
import torch.distributed as dist
from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor, KeyedTensor
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, table_wise
from torchrec.distributed.types import ShardingEnv
from torchrec.distributed.types import ShardingPlan as TorchRecPlan
from torchrec.modules.embedding_configs import DataType, PoolingType

from autoshard.core import DType, Pooling, ShardingPlan
from autoshard.core.errors import InvalidPlanError
from autoshard.core.quoting import shown
from autoshard.evaluation.traffic import Stream
from autoshard.runtime.batch import BatchOfIds, Embedded
from autoshard.runtime.engine.fused import FUSED_OPTIMIZERS, FusedSettings
from autoshard.runtime.engine.holdings import Ownership
from autoshard.runtime.participation import Participation
from autoshard.runtime.state import HeldState, TableState, gathered_state
from autoshard.runtime.timing import Part, StepTimer
from autoshard.runtime.weights import initialise

_POOLING = {Pooling.SUM: PoolingType.SUM, Pooling.MEAN: PoolingType.MEAN}
_DATA_TYPE = {DType.FP32: DataType.FP32, DType.FP16: DataType.FP16}


class TorchRecEmbeddings:
    """A plan's tables in a sharded `EmbeddingBagCollection`, with the same weights and updates as `ShardedEmbeddings`.

    TorchRec fails on a process without tables, so such a process gets one of a single row that is never looked up.

    Args:
        plan: A plan of whole tables.
        settings: Learning rate, epsilon and seed.
        local_batch_size: Samples per process and step; None for an even share of the plan's batch.
        group: The processes; None for all.
        device: Where tables and batches are.
        timer: Where to count the time of the parts; None to count none.

    Raises:
        InvalidPlanError: If the plan holds tables in a way that is not executed, or under different optimizers.
        InputError: If the processes differ in plan, settings or batch size, or the plan's batch cannot be shared
            evenly.
    """

    def __init__(
        self,
        plan: ShardingPlan,
        settings: FusedSettings,
        *,
        local_batch_size: int | None = None,
        group: dist.ProcessGroup | None = None,
        device: torch.device | None = None,
        timer: StepTimer | None = None,
    ) -> None:
        self._part = Participation.agree(plan, settings, local_batch_size=local_batch_size, group=group, device=device)
        self._owner_T = _owners(self._part.owners)
        self.owners, self.local_batch_size = self._part.owners, self._part.local_batch_size
        self.feature_dims = self._part.feature_dims
        self._features = [f"feature_{index}" for index in range(len(self.feature_dims))]
        self._timer = timer or StepTimer(self._part.device, enabled=False)
        processes = range(self._part.group.size())
        self._placeholders = {process: _placeholder(process) for process in processes if process not in self._owner_T}
        self._sharded: Any = self._shard(settings)
        self._kernels = self._find_kernels()
        for index, table in enumerate(plan.tables.tables):
            if _name(index) in self._kernels:
                initialise(self._kernels[_name(index)].weights_ND, table, settings.seed)

    def __call__(self, ids: BatchOfIds) -> Embedded:
        """Pooled embeddings of the local batch."""
        context = self._sharded.create_context()
        with self._timer.measure(Part.INPUT):
            distributed = self._sharded.input_dist(context, self._keyed(ids)).wait().wait()
        # Kernels are timed by hooks; what is left of the forward pass is the exchange.
        with self._timer.measure(Part.FORWARD_EXCHANGE):
            output: KeyedTensor = self._sharded.compute_and_output_dist(context, distributed).wait()
            pooled_BC: torch.Tensor = KeyedTensor.regroup([output], [self._features])[0]
        if pooled_BC.requires_grad:
            pooled_BC.register_hook(lambda _: self._timer.begin(Part.BACKWARD_EXCHANGE))  # type: ignore[no-untyped-call]
        return Embedded(pooled_BC, {})

    def sent_bytes(self) -> dict[Stream, float]:
        """Nothing: TorchRec does not count what it sends."""
        return {}

    def end_step(self) -> None:
        """Nothing is left to do."""

    def table_state(self, name: str) -> TableState:
        """A table's weights and moments, on every process. All processes have to call it."""
        table = self.owners.tables[name]
        index = self.owners.tables.tables.index(table)
        held = [] if _name(index) not in self._kernels else [self._kernels[_name(index)]]
        return gathered_state(table, held, None, self._part)

    def close(self) -> None:
        """Lets go of TorchRec's modules; without this, processes may abort when the group is destroyed after it."""
        self._sharded = None
        self._kernels = {}
        gc.collect()

    def _shard(self, settings: FusedSettings) -> Any:
        tables = self.owners.tables.tables
        optimizers = sorted({table.optimizer for table in tables})
        if len(optimizers) > 1:
            raise InvalidPlanError(
                f"the torchrec engine runs all tables under one optimizer, got {', '.join(optimizers)}",
                field="tables.optimizer",
            )
        collection = EmbeddingBagCollection(
            tables=[*self._configs(), *self._placeholders.values()],
            device=torch.device("meta"),
        )
        sharder = EmbeddingBagCollectionSharder(
            fused_params={
                "optimizer": FUSED_OPTIMIZERS[optimizers[0]],
                "learning_rate": settings.learning_rate,
                "eps": settings.eps,
                "bounds_check_mode": BoundsCheckMode.FATAL,
            }
        )
        owners = {_name(index): owner for index, owner in enumerate(self._owner_T)}
        owners |= {placeholder.name: process for process, placeholder in self._placeholders.items()}
        module_plan = construct_module_sharding_plan(
            collection,
            {name: table_wise(rank=owner, compute_kernel="fused") for name, owner in owners.items()},
            sharder=sharder,
            local_size=self._part.group.size(),
            world_size=self._part.group.size(),
            device_type=self._part.device.type,
        )
        model = DistributedModelParallel(
            collection,
            env=ShardingEnv.from_process_group(self._part.group),
            device=self._part.device,
            plan=TorchRecPlan(plan={"": module_plan}),
            sharders=[sharder],
        )
        return model.module

    def _configs(self) -> list[EmbeddingBagConfig]:
        """The tables under names that TorchRec accepts: it makes modules of them, which may have no dots."""
        features = iter(self._features)
        return [
            EmbeddingBagConfig(
                name=_name(index),
                num_embeddings=table.num_embeddings,
                embedding_dim=table.embedding_dim,
                feature_names=[next(features) for _ in table.features],
                pooling=_POOLING[table.pooling],
                data_type=_DATA_TYPE[table.dtype],
            )
            for index, table in enumerate(self.owners.tables.tables)
        ]

    def _find_kernels(self) -> dict[str, HeldState]:
        """State of the tables here, by TorchRec's names; its `modules()` does not lead to them."""
        found: dict[str, HeldState] = {}
        holdings = {_name(one.table): one for one in self.owners.holdings}
        for lookup in self._sharded._lookups:
            for kernel in lookup._emb_modules:
                fused = kernel.emb_module
                states = fused.split_optimizer_states()
                for index, config in enumerate(kernel.config.embedding_tables):
                    moments = states[index][0] if states and states[index] else None
                    if config.name in holdings:
                        weights_ND = fused.split_embedding_weights()[index]
                        found[config.name] = HeldState(holdings[config.name], weights_ND, moments)
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
        empty = [placeholder.name for placeholder in self._placeholders.values()]
        lengths_FB = ids.lengths_FB
        if empty:
            lengths_FB = torch.cat([lengths_FB, lengths_FB.new_zeros(len(empty), ids.batch_size)])
        return KeyedJaggedTensor(keys=self._features + empty, values=ids.ids_L, lengths=lengths_FB.reshape(-1))


def _owners(ownership: Ownership) -> list[int]:
    """The process of each table.

    Raises:
        InvalidPlanError: If a table is not whole on one process, or is a sequence table.
    """
    owners = {}
    for one in ownership.holdings:
        is_whole = one.is_whole and one.embedding_dim == one.of.embedding_dim and len(one.owners(0)) == 1
        if not is_whole or one.is_replicated or one.of.pooling is Pooling.SEQUENCE:
            raise InvalidPlanError(
                f"the torchrec engine executes table_wise tables with sums or means; {shown(one.of.name)} is held "
                "otherwise: use the thin engine",
                field="shards",
            )
        owners[one.table] = one.owners(0)[0]
    return [owners[index] for index in range(len(owners))]


def _name(index: int) -> str:
    return f"table_{index}"


def _placeholder(process: int) -> EmbeddingBagConfig:
    name = f"placeholder_{process}"
    return EmbeddingBagConfig(name=name, num_embeddings=1, embedding_dim=4, feature_names=[name])
