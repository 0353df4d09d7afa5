"""The embedding tables of a plan, sharded over processes: autoshard's own engine.

Shape suffixes: F features, B samples of a local batch, C columns of all features, G samples of the global batch,
O columns of one process's output, L lookups.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from autoshard.core import EmbeddingTable, ShardingPlan
from autoshard.core.errors import InputError
from autoshard.core.shard import fused_kernel
from autoshard.runtime.batch import BatchOfIds, KeyedJagged, as_batch
from autoshard.runtime.exchange import InputExchange, OutputExchange, ServedIds, WireOrder
from autoshard.runtime.fused import FusedKernel, FusedSettings
from autoshard.runtime.ownership import TableOwners
from autoshard.runtime.participation import Participation
from autoshard.runtime.state import TableState, broadcast_state
from autoshard.runtime.timing import Part, StepTimer


class ShardedEmbeddings(torch.nn.Module):
    """Looks up the tables of a plan over a group of processes, and trains them in the backward pass.

    Every process makes one, with the same arguments, and calls it in step with the others, with a local batch of
    the same size. Weights and moments are updated inside `backward`: they are no parameters of the module and no
    optimizer may touch them.

    A loss that is the mean over the local batch trains the tables on the mean over the global batch: gradients
    are divided by the number of processes, as in TorchRec.

    Args:
        plan: A plan of whole tables.
        settings: Learning rate, epsilon and seed.
        local_batch_size: Samples per process and step; None for an even share of the plan's batch.
        group: The processes, over gloo (CPU) or NCCL (CUDA); None for all. With fewer processes than the plan has
            ranks, rank r runs on process `r % processes`.
        device: Where tables and batches are.
        timer: Where to count the time of the parts; None to count none.

    Raises:
        InvalidPlanError: If the plan holds tables in a way that is not executed.
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
        super().__init__()
        self._part = Participation.agree(plan, settings, local_batch_size=local_batch_size, group=group, device=device)
        self.owners, self.local_batch_size = self._part.owners, self._part.local_batch_size
        self.feature_names, self.feature_dims = self._part.feature_names, self._part.feature_dims
        self.timer = timer or StepTimer(self._part.device, enabled=False)
        self._kernels = _kernels(self.owners.tables_of(self._part.process), settings, self._part.device)
        order = wire_order(self.owners)
        self._input_exchange = InputExchange(order, self._part.group, self._part.device)
        self._output_exchange = OutputExchange(order, self._part.group, self.timer)

    def forward(self, ids: BatchOfIds | KeyedJagged) -> torch.Tensor:
        """Pooled embeddings of the local batch.

        Args:
            ids: Ids of all features, in the order of `feature_names`; keyed tensors may have another order.

        Returns:
            fp32 of shape (B, C): the features side by side in the order of `feature_names`, `feature_dims` wide.

        Raises:
            InputError: If the batch has another size, lacks a feature, or holds an id that is no row of its table.
        """
        batch = as_batch(ids, self.feature_names)
        if batch.batch_size != self.local_batch_size:
            raise InputError(
                f"every process takes {self.local_batch_size} samples a step, got {batch.batch_size}",
                field="batch_size",
            )
        with self.timer.measure(Part.INPUT):
            served = self._input_exchange(batch)
        pooled_GO: torch.Tensor = self._output_exchange(self._look_up(served))
        return pooled_GO

    def table_state(self, name: str) -> TableState:
        """A table's weights and moments, on every process. All processes have to call it."""
        own = next((kernel.state(name) for kernel in self._kernels if name in kernel.names), None)
        return broadcast_state(name, own, self._part)

    def close(self) -> None:
        """Lets go of the tables."""
        self._kernels = ()

    def _look_up(self, served: ServedIds) -> torch.Tensor:
        if not self._kernels:  # no table here; the empty output still has to be in the graph of every process
            return torch.zeros(served.lengths_FG.shape[1], 0, device=self._part.device, requires_grad=True)
        pooled, first, start = [], 0, 0
        for kernel in self._kernels:
            last = first + kernel.num_features
            stop = start + sum(served.num_ids_F[first:last])
            with self.timer.measure(Part.FORWARD_KERNEL):
                output_GO = kernel(served.lengths_FG[first:last], served.ids_L[start:stop])
            self.timer.measure_backward(output_GO, Part.BACKWARD_KERNEL)
            pooled.append(output_GO)
            first, start = last, stop
        return pooled[0] if len(pooled) == 1 else torch.cat(pooled, dim=1)


def wire_order(owners: TableOwners) -> WireOrder:
    """The order in which the features of a plan travel between its processes."""
    tables = owners.tables.tables
    features_of: dict[str, list[int]] = {}
    dim_F: list[int] = []
    for table in tables:
        features_of[table.name] = list(range(len(dim_F), len(dim_F) + len(table.features)))
        dim_F += [table.embedding_dim] * len(table.features)
    return WireOrder(
        features_of_P=tuple(
            tuple(
                feature
                for group in _fusable(owners.tables_of(process))
                for table in group
                for feature in features_of[table.name]
            )
            for process in range(owners.num_processes)
        ),
        dim_F=tuple(dim_F),
    )


def _fusable(tables: Sequence[EmbeddingTable]) -> list[list[EmbeddingTable]]:
    """Tables that one kernel can serve, in the order in which their kinds appear."""
    groups: dict[object, list[EmbeddingTable]] = {}
    for table in tables:
        groups.setdefault(fused_kernel(table), []).append(table)
    return list(groups.values())


def _kernels(
    tables: Sequence[EmbeddingTable], settings: FusedSettings, device: torch.device
) -> tuple[FusedKernel, ...]:
    return tuple(FusedKernel(group, settings, device) for group in _fusable(tables))
