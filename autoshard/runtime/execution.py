"""What a process executes a plan with, and how another plan of the same tables follows it while a job trains."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, replace
from functools import partial
from itertools import zip_longest

import torch

from autoshard.core import EmbeddingTable, MemoryLevel, ShardingPlan, SyncRows
from autoshard.core.declared import Role, values
from autoshard.core.errors import InputError
from autoshard.core.quoting import shown
from autoshard.runtime.engine.agreement import on_all
from autoshard.runtime.engine.holdings import KernelContent
from autoshard.runtime.engine.ids.addresses import RowOrderMap
from autoshard.runtime.engine.ids.requests import InputExchange
from autoshard.runtime.engine.rows.averaging import RowStates
from autoshard.runtime.engine.rows.fused import FusedSettings, kernel_output
from autoshard.runtime.engine.rows.moving import move
from autoshard.runtime.engine.rows.places import TableLayout
from autoshard.runtime.engine.rows.replicas import Replicas
from autoshard.runtime.engine.rows.serving import FusedKernels
from autoshard.runtime.engine.vectors.exchange import OutputExchange
from autoshard.runtime.engine.vectors.guard import GradientGuard
from autoshard.runtime.engine.vectors.reading import Reading
from autoshard.runtime.memory import check_room
from autoshard.runtime.ownership import check_skipping
from autoshard.runtime.participation import Participation
from autoshard.runtime.state import held_layout, table_move
from autoshard.runtime.timing import StepTimer

_REFUSAL = (
    "the plan's tables need {needed} on this {where} beside those of the plan before, {free} are free: "
    "adopt a plan that moves less, or restart under it from a checkpoint"
)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class PlanExecution:
    """What a process executes a plan with.

    Attributes:
        part: The processes, and which of them holds what.
        settings: Of the updates, and the seed.
        kernel_settings: The same with what the plan says of it.
        sync_every: Steps between two averages of replica groups.
        orders: Row orders, by table.
        kernels: Rows that no other process has copies of.
        replicas: Those that others have copies of.
        input_exchange: Sends ids to where their rows are.
        output_exchange: Sends embeddings back, and their gradients.
        guard: Clips gradients, and looks for bad ones.
    """

    part: Participation
    settings: FusedSettings
    kernel_settings: FusedSettings
    sync_every: int
    orders: Mapping[str, RowOrderMap]
    kernels: FusedKernels
    replicas: Replicas
    input_exchange: InputExchange
    output_exchange: OutputExchange
    guard: GradientGuard

    @classmethod
    def make(
        cls,
        plan: ShardingPlan,
        settings: FusedSettings,
        part: Participation,
        row_orders: Mapping[str, torch.Tensor],
        timer: StepTimer,
        before: PlanExecution | None = None,
    ) -> PlanExecution:
        """Makes it, with rows that are 0; all processes have to call it.

        Args:
            plan: The plan.
            settings: Of the updates, and the seed.
            part: The processes.
            row_orders: Row ids in falling access frequency, by table.
            timer: Where to count the time.
            before: What executed the plan before. Kernels of the same rows are not made again: both use them.

        Raises:
            AutoshardError: On all processes, if one has too little memory, or a row order is none.
        """
        kernel_settings = _kernel_settings(plan, settings, part.device)
        owners, device = part.owners, part.device
        kept = set() if before is None else before._kept(part, kernel_settings, part.members.rank())

        def make_kernels() -> tuple[dict[str, RowOrderMap], FusedKernels]:
            check_skipping(plan.tables, settings, device)
            orders = {
                name: RowOrderMap(ids_N, plan.tables[name].num_embeddings, device) for name, ids_N in row_orders.items()
            }
            known = {} if before is None else before.kernels.by_content
            known = {content: kernel for content, kernel in known.items() if content in kept}
            return orders, FusedKernels(owners, kernel_settings, part.process, device, timer, known)

        def make_rest() -> PlanExecution:
            known = {} if before is None else before.replicas.by_content
            known = {content: rows for content, rows in known.items() if content in kept}
            replicas = Replicas(owners, kernel_settings, part.group, device, timer, part.groups.world_ranks, known)
            exchange = InputExchange(owners, orders, part.local_batch_size, part.groups, device)
            return cls(
                part=part,
                settings=settings,
                kernel_settings=kernel_settings,
                sync_every=plan.replica_groups.sync_every,
                orders=orders,
                kernels=kernels,
                replicas=replicas,
                input_exchange=exchange,
                output_exchange=OutputExchange(
                    owners,
                    Reading.of(owners, part.process, exchange),
                    replicas,
                    plan.payload,
                    kernel_settings.output,
                    part.group,
                    device,
                    timer,
                ),
                guard=GradientGuard(settings, part.groups, device)
                if before is None
                else before.guard.over(part.groups),
            )

        # Process groups are made in between, which all processes have to come to.
        orders, kernels = on_all(make_kernels, part.members, device)
        return on_all(make_rest, part.members, device)

    def close(self) -> None:
        """Lets go of the rows, and of batches that have been looked up and not been trained on."""
        self.kernels.close()
        self.replicas.close()
        self.output_exchange.close()

    def row_states(self, *, writes: bool) -> dict[int, RowStates]:
        """State of the rows that this process has of each holding, by rising number of the holding.

        Args:
            writes: Whether it is written to.
        """
        return dict(sorted({**self.kernels.states(writes=writes), **self.replicas.states()}.items()))

    def _layouts(self, *, writes: bool) -> Iterator[tuple[EmbeddingTable, TableLayout]]:
        """Where the rows of each table are, among the processes of all replica groups."""
        states = self.row_states(writes=writes)
        for table in self.part.owners.tables.tables:
            order, groups = self.orders.get(table.name), self.part.groups.order.groups
            yield table, held_layout(table, self.part.owners, states, order, groups)

    def align_copies(self) -> None:
        """Gives all copies of rows, also in other replica groups, the weights of the first; all processes call it."""
        moves = []
        for table, layout in self._layouts(writes=True):
            copied = [block for block in layout.blocks if block.rows.is_replicated]
            first = [replace(block, rows=replace(block.rows, replicas=block.rows.replicas[:1])) for block in copied]
            source, target = (TableLayout(tuple(of), layout.order) for of in (first, copied))
            if copied:
                moves.append(table_move(table, range(table.num_embeddings), source, target, ()))
        move(moves, self.part.members, self.part.device, self.part.nodes_of(self.part.members))

    def _kept(self, part: Participation, settings: FusedSettings, member: int) -> set[KernelContent]:
        """What kernels of a process have under this plan and under another one, whose memory both use.

        Args:
            part: The processes under the other plan.
            settings: Of its kernels.
            member: The process, among all of them.
        """
        own = self.part
        if settings != self.kernel_settings:
            return set()
        reordered = {
            number
            for number, table in enumerate(own.owners.tables.tables)
            if own.order_digests.get(table.name) != part.order_digests.get(table.name)
        }
        both = own.owners.contents(own.place_of(member)).keys() & part.owners.contents(part.place_of(member)).keys()
        return {one for one in both if not one.tables & reordered}

    def adopt(
        self, plan: ShardingPlan, row_orders: Mapping[str, torch.Tensor], timer: StepTimer
    ) -> tuple[PlanExecution, int]:
        """What executes another plan of the same tables, with the rows of this one; all processes have to call it.

        Nothing changes of this one, which executes its plan as before if the other cannot be adopted.

        Args:
            plan: The plan.
            row_orders: Row ids in falling access frequency, by table.
            timer: Where to count the time.

        Returns:
            It, and the bytes that this process has sent.

        Raises:
            AutoshardError: On all processes: if the plan is not executed or of other tables, another batch or other
                settings, if the processes do not agree on it, or if one of them has too little memory.
        """
        own = self.part
        part = Participation.agree(
            plan,
            self.settings,
            local_batch_size=own.local_batch_size,
            group=own.members,
            device=own.device,
            row_orders=row_orders,
            frozen=own.owners.frozen,
        )
        on_all(partial(self._check, plan, part), own.members, own.device)
        after = PlanExecution.make(plan, self.settings, part, row_orders, timer, self)
        moved = frozenset[int]()
        for member in range(own.members.size()):
            made = part.owners.contents(part.place_of(member)).keys() - self._kept(part, after.kernel_settings, member)
            moved = moved.union(*(one.tables for one in made))
        targets = zip(self._layouts(writes=False), after._layouts(writes=True), strict=True)
        with_marks = self.kernel_settings.marks_rows and after.kernel_settings.marks_rows
        moves = []
        for number, ((table, source), (_, target)) in enumerate(targets):
            if number in moved:
                ids, moments = range(table.num_embeddings), (one.name for one in table.optimizer.moments)
                moves.append(table_move(table, ids, source, target, moments, with_marks=with_marks))
        return after, move(moves, own.members, own.device, own.nodes_of(own.members))

    def _check(self, plan: ShardingPlan, part: Participation) -> None:
        """Refuses a plan that cannot follow this one.

        Raises:
            InputError: If it has other tables, or another batch.
            DeviceError: If there is too little memory for both plans at a time.
        """
        tables, others = self.part.owners.tables, plan.tables
        for own, other in zip_longest(tables.tables, others.tables):
            if own is None or other is None or values(own, Role.IDENTITY) != values(other, Role.IDENTITY):
                first, second = ("none" if one is None else shown(one.name) for one in (own, other))
                raise InputError(
                    "must be those of the plan that is executed, in their order, with the same rows, columns, number "
                    "format, optimizer and features, all weighted or not: "
                    f"table {first} there is not table {second} here",
                    field="plan.tables",
                )
        if tables.batch_size != others.batch_size:
            raise InputError(
                f"must be that of the plan that is executed, {tables.batch_size}, got {others.batch_size}",
                field="plan.batch_size",
            )
        made_bytes = partial(self._made_bytes, part, _kernel_settings(plan, self.settings, part.device))
        check_room(made_bytes, part.members.rank(), part.members.size(), part.device, _REFUSAL)

    def _made_bytes(self, part: Participation, settings: FusedSettings, member: int, levels: Set[MemoryLevel]) -> int:
        """Bytes of kernels that a process makes on some levels for another plan."""
        place, kept = part.place_of(member), self._kept(part, settings, member)
        held = [
            part.owners.holdings[index].num_bytes(place)
            for content, indices in part.owners.contents(place).items()
            if content not in kept
            for index in indices
        ]
        return sum(one[level] for one in held for level in levels)


def _kernel_settings(plan: ShardingPlan, settings: FusedSettings, device: torch.device) -> FusedSettings:
    """Settings of a plan's kernels."""
    groups = plan.replica_groups
    marks_rows = settings.marks_rows or (groups.num_groups > 1 and groups.sync_rows is SyncRows.TOUCHED)
    output = kernel_output(plan.payload, device)
    return replace(settings, moment_scale=groups.moment_scale, marks_rows=marks_rows, output=output)
