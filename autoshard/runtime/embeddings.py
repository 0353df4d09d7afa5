"""The embedding tables of a plan, sharded over processes: autoshard's own engine.

Shape suffixes: B samples of a local batch, C columns of all pooled features, L lookups, N rows, D embedding dim.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
import torch.distributed as dist

from autoshard.core import ShardingPlan
from autoshard.core.errors import InputError
from autoshard.runtime.batch import BatchOfIds, Embedded, KeyedEmbeddings, KeyedJagged, as_batch, as_keyed
from autoshard.runtime.engine.addresses import RowOrder
from autoshard.runtime.engine.exchange import OutputExchange
from autoshard.runtime.engine.fused import FusedSettings
from autoshard.runtime.engine.groups import average
from autoshard.runtime.engine.places import initialise_held
from autoshard.runtime.engine.reading import Reading
from autoshard.runtime.engine.replicas import Replicas
from autoshard.runtime.engine.requests import Distributed, InputExchange
from autoshard.runtime.engine.serving import FusedKernels
from autoshard.runtime.participation import Participation
from autoshard.runtime.state import HeldState, TableState, gathered_state
from autoshard.runtime.timing import Part, StepTimer


class ShardedEmbeddings(torch.nn.Module):
    """Looks up the tables of a plan over a group of processes, and trains them in the backward pass.

    Every process makes one, with the same arguments, and calls it in step with the others, with a local batch of
    the same size. Weights and moments are updated inside `backward`: they are no parameters of the module and no
    optimizer may touch them.

    A loss that is the mean over the local batch trains the tables on the mean over the global batch: gradients
    are divided by the number of processes, as in TorchRec; in a plan with several replica groups, by those of the
    group, whose mean the group's tables are trained on. After each backward pass, `end_step` is called.

    Args:
        plan: The plan.
        settings: Learning rate, epsilon and seed.
        local_batch_size: Samples per process and step; None for an even share of the plan's batch.
        group: The processes, over gloo (CPU) or NCCL (CUDA); None for all. With fewer processes than the plan has
            ranks, rank r runs on process `r % processes`.
        device: Where tables and batches are.
        timer: Where to count the time of the parts; None to count none.
        row_orders: For tables that are cut by access rank, row ids in falling access frequency, by table; those that
            are left out are in the order of their ids.

    Raises:
        InvalidPlanError: If the plan holds tables in a way that is not executed.
        InputError: If the processes differ in plan, settings or batch size, the plan's batch cannot be shared evenly,
            or a row order is not one.
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
        row_orders: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        super().__init__()
        self._part = part = Participation.agree(
            plan, settings, local_batch_size=local_batch_size, group=group, device=device, row_orders=row_orders
        )
        self.owners, self.local_batch_size = part.owners, part.local_batch_size
        self.feature_names, self.feature_dims = part.feature_names, part.feature_dims
        self.timer = timer or StepTimer(part.device, enabled=False)
        self._orders = {
            name: RowOrder(ids_N, plan.tables[name].num_embeddings, part.device)
            for name, ids_N in (row_orders or {}).items()
        }
        settings = replace(settings, moment_scale=plan.replica_groups.moment_scale)
        self._kernels = FusedKernels(part.owners, settings, part.process, part.device, self.timer)
        self._replicas = Replicas(part.owners, settings, part.group, part.device, self.timer, part.groups.world_ranks)
        self._sync_every, self._num_steps = plan.replica_groups.sync_every, 0
        self._averaged_bytes = 0
        for state in self._held_states():
            order = self._orders.get(state.holding.of.name)
            initialise_held(state.weights_ND, state.holding, part.process, order, settings.seed)
        self.input_exchange = InputExchange(part.owners, self._orders, part.group, part.device)
        self.output_exchange = OutputExchange(
            part.owners,
            Reading.of(part.owners, part.process, self.input_exchange),
            self._replicas,
            plan.payload,
            part.group,
            part.device,
            self.timer,
        )

    def forward(self, ids: BatchOfIds | KeyedJagged | Distributed) -> Embedded | KeyedEmbeddings:
        """Embeddings of the local batch.

        Args:
            ids: Ids of all features, in the order of `feature_names`; keyed tensors may have another order. Or what
                `distribute` made of them.

        Returns:
            Of a `KeyedJaggedTensor`, what TorchRec's modules return: a `KeyedTensor` if all tables are pooled, a
            dict with a `JaggedTensor` for each feature if all are sequence tables, and the pair of both for plans with
            tables of both kinds. `Embedded` of all else. Features are in the order of `feature_names`.

        Raises:
            InputError: If the batch has another size, lacks a feature, or holds an id that is no row of its table; on
                all processes.
        """
        if isinstance(ids, Distributed):
            return self._look_up(ids)
        batch = as_batch(ids, self.feature_names)
        embedded = self._look_up(self.distribute(batch))
        return embedded if batch is ids else as_keyed(embedded, batch, self.owners.tables)

    def distribute(self, ids: BatchOfIds | KeyedJagged) -> Distributed:
        """Sends the ids of a batch to where their rows are, ahead of their lookup if that is wanted."""
        batch = as_batch(ids, self.feature_names)
        if batch.batch_size != self.local_batch_size:
            raise InputError(
                f"every process takes {self.local_batch_size} samples a step, got {batch.batch_size}",
                field="batch_size",
            )
        with self.timer.measure(Part.INPUT):
            return self.input_exchange(batch)

    def sent_bytes(self) -> dict[str, float]:
        """Bytes that this process has sent since it was made, by `SENT`."""
        counted = {**self.input_exchange.sent_bytes, **self.output_exchange.sent_bytes}
        own = self._part.process
        exchanged = {str(stream): sum(to_P) - to_P[own] for stream, to_P in counted.items()}
        return exchanged | {"sync": self._replicas.sent_bytes, "group_sync": self._averaged_bytes}

    def end_step(self) -> None:
        """Ends a training step: every `sync_every` steps, replica groups average their weights and moments.

        All processes call it after their backward pass. With one replica group it does nothing.
        """
        self._num_steps += 1
        peers = self._part.groups.peers
        if peers is None or self._num_steps % self._sync_every:
            return
        with self.timer.measure(Part.SYNC), torch.no_grad():
            for state in self._held_states():
                held = [one for one in (state.weights_ND, state.moments) if one is not None]
                self._averaged_bytes += average(held, peers)

    def table_state(self, name: str) -> TableState:
        """A table's weights and moments in this process's replica group. All processes have to call it."""
        mine = [state for state in self._held_states() if state.holding.of.name == name]
        return gathered_state(self.owners.tables[name], mine, self._orders.get(name), self._part)

    def close(self) -> None:
        """Lets go of the tables."""
        self._kernels.close()
        self._replicas.close()

    def _look_up(self, batch: Distributed) -> Embedded:
        pooled_BC, *sequences = self.output_exchange(self._kernels.look_up(batch), batch)
        names = [self.feature_names[feature] for feature in self.output_exchange.reading.sequences]
        return Embedded(pooled_BC, dict(zip(names, sequences, strict=True)))

    def _held_states(self) -> list[HeldState]:
        """Weights and moments of what this process holds: views."""
        held = {**self._kernels.tables(), **self._replicas.tables()}
        return [HeldState(self.owners.holdings[index], *held[index]) for index in sorted(held)]
