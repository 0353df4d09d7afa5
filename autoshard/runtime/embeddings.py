"""The embedding tables of a plan, sharded over processes: autoshard's own engine.

Shape suffixes: B samples of a local batch, C columns of all pooled features, L lookups, N rows, D embedding dim.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any, Self, TypeVar, cast

import torch
import torch.distributed as dist
from typing_extensions import override

from autoshard.core import ShardingPlan, TableSet
from autoshard.core.errors import ExecutionError, InputError
from autoshard.core.step import StepCollective
from autoshard.evaluation.traffic import Stream
from autoshard.runtime.access_counts import AccessCounter
from autoshard.runtime.batch import (
    BatchOfIds,
    Embedded,
    KeyedEmbeddings,
    KeyedJagged,
    as_batch,
    as_keyed,
    of_result,
    unreadable,
)
from autoshard.runtime.engine.groups import CLOSED, end_thread, release_world
from autoshard.runtime.engine.ids.prefetch import Prefetched, Prefetcher
from autoshard.runtime.engine.ids.requests import DistributedBatch
from autoshard.runtime.engine.rows.averaging import average
from autoshard.runtime.engine.rows.fused import FusedSettings, UpdateStep, Verdict
from autoshard.runtime.engine.rows.places import initialise_held
from autoshard.runtime.engine.rows.updates import UpdatedRows, forget_updates, updated_rows
from autoshard.runtime.engine.vectors.exchange import StartedExchange
from autoshard.runtime.execution import PlanExecution
from autoshard.runtime.optimizer import TableOptimizer
from autoshard.runtime.participation import Participation
from autoshard.runtime.state import (
    MOMENT_COLUMNS,
    HeldTables,
    TableState,
    check_host_memory,
    check_layout,
    check_state,
    check_weights,
)
from autoshard.runtime.timing import Part, StepTimer

#: What `close` lets go of: nothing can be done without it.
_LET_GO = ("_execution", "_prefetcher")


def _places_of_keys(tables: TableSet) -> SimpleNamespace:
    """What `torch.distributed.checkpoint.state_dict` looks the keys of tables' states up in, attribute by attribute."""
    root = SimpleNamespace()
    for table in tables.tables:
        for part in ("weights", *(moment.name for moment in table.optimizer.moments), MOMENT_COLUMNS):
            at = root
            for name in (*table.name.split("."), part):
                at = at.__dict__.setdefault(name, SimpleNamespace())
    return root


BatchT = TypeVar("BatchT")


class StartedLookup:
    """Embeddings of a local batch on their way.

    Args:
        exchange: The embeddings' exchange.
        sequences: Names of sequence features.
        batch: The batch.
        tables: The plan's tables.
        watch: What looks at their gradients; None for nothing.
    """

    def __init__(
        self,
        exchange: StartedExchange,
        sequences: list[str],
        batch: BatchOfIds,
        tables: TableSet,
        watch: Callable[[Iterable[torch.Tensor]], tuple[torch.Tensor, ...]] | None = None,
    ) -> None:
        self._exchange, self._sequences, self._batch, self._tables = exchange, sequences, batch, tables
        self._watch = watch

    def wait(self) -> Embedded | KeyedEmbeddings:
        """The embeddings, as `ShardedEmbeddings` returns them."""
        came = self._exchange.wait()
        pooled_BC, *sequences = came if self._watch is None else self._watch(came)
        embedded = Embedded(pooled_BC, dict(zip(self._sequences, sequences, strict=True)))
        embedded = of_result(embedded, self._batch, self._tables)
        return embedded if self._batch.names is None else as_keyed(embedded, self._batch, self._tables)


class ShardedEmbeddings(torch.nn.Module):
    """Looks up the tables of a plan over a group of processes, and trains them in the backward pass.

    Every process makes one, with the same arguments, and calls it in step with the others, with a local batch of any
    number of samples: messages have room for `local_batch_size`, and for more where the batch before had more. Weights
    and moments are updated inside `backward`: they are no parameters of the module and no optimizer may touch them.

    A loss that is the mean over the local batch trains the tables on the mean over the processes, which is that over
    the global batch where local batches are of one size: gradients are divided by the number of processes, as in
    TorchRec; in a plan with several replica groups, by those of the group, whose mean the group's tables are trained
    on. After each backward pass, `end_step` is called, and `close` before the process group is destroyed.

    The learning rate is that of `optimizer` when a batch is looked up; where it has become a bad one since the ids of
    that batch were sent, it is the one before, and the next batch is refused. `state_dict` holds all weights and
    moments on the host, whatever the plan: on several processes as `DTensor`s, of which each process has an even share
    of the rows, so that `torch.distributed.checkpoint` saves them, and loads them under any plan of the same tables, on
    any number of processes. `load_state_dict` takes them, and whole tensors; every process calls both. `table_state`
    and `load_table_state` do it table by table, or in pieces.

    Communication can hide behind computation, with the same results: `prefetch` distributes the ids of the next batch
    while this one is trained on, and what is computed between `start` and its `wait` is computed while embeddings
    travel; its backward pass, while their gradients do. `pipelined` does it for the batches of a loop.

    Args:
        plan: The plan.
        settings: Of the updates, and the seed.
        local_batch_size: The usual number of samples of a process's batch; None for its share of the plan's batch, the
            largest where these are not even.
        group: The processes, over gloo (CPU) or NCCL (CUDA); None for all. With fewer processes than the plan has
            ranks, rank r runs on process `r % processes`.
        device: Where tables and batches are; None for the CPU or, over NCCL, the current CUDA device.
        timer: Where to count the time of the parts; None to count none.
        row_orders: For tables that are cut by access rank, row ids in falling access frequency, by table; those that
            are left out are in the order of their ids.
        counter: Counts which rows this process looks up, and is closed by whoever made it; None to count none.
        frozen: Names of tables that are only looked up: their weights and moments stay as they are.

    Attributes:
        optimizer: Holds the learning rate of the tables, for `torch.optim.lr_scheduler`; the same on all processes.
        num_steps: Steps that were ended: replica groups meet at multiples of the plan's `sync_every`, and Adam and
            LAMB correct their moments by it.
        marks_rows: Whether rows that are updated are marked, for replica groups and `take_updates`.
        batches_ahead: How many batches to prefetch ahead: 1, and 2 where caches are filled ahead.
        guard: Clips gradients, and looks for bad ones, as the settings say.
        verdict: What it finds of the gradients of the last batch that was looked up.

    Raises:
        InvalidPlanError: If the plan holds tables in a way that is not executed.
        InputError: If the processes differ in plan, settings or batch size, a row order is not one, or a frozen table
            is none of the plan.
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
        counter: AccessCounter | None = None,
        frozen: Collection[str] = (),
    ) -> None:
        super().__init__()
        part = Participation.agree(
            plan,
            settings,
            local_batch_size=local_batch_size,
            group=group,
            device=device,
            row_orders=row_orders,
            frozen=frozen,
        )
        self.timer = timer or StepTimer(part.device, enabled=False)
        self._counter = counter
        self._use(PlanExecution.make(plan, settings, part, row_orders or {}, self.timer))
        self.local_batch_size = part.local_batch_size
        self.feature_names, self.feature_dims = part.feature_names, part.feature_dims
        self._shared_features = plan.tables.shared_features
        self.verdict = Verdict()
        self.optimizer = TableOptimizer(settings.learning_rate)
        self._learning_rate = settings.learning_rate
        self.tables = _places_of_keys(plan.tables)
        self.num_steps, self._leaves_out_tables = 0, False
        #: What was sent under plans before this one.
        self._sent_before: dict[str, float] = {}
        if settings.row_share < 1:  # rows that share memory have no values of their own
            return
        for index, state in self._execution.row_states(writes=True).items():
            holding = part.owners.holdings[index]
            order = self._execution.orders.get(holding.of.name)
            initialise_held(state.weights_ND, holding, part.process, order, settings.seed)

    def _use(self, execution: PlanExecution) -> None:
        """Looks batches up with it from now on."""
        self._execution, self.owners = execution, execution.part.owners
        self.guard, self.marks_rows = execution.guard, execution.kernel_settings.marks_rows
        self.batches_ahead = 2 if execution.kernels.fills_ahead else 1
        execution.input_exchange.counter = self._counter
        self._prefetcher: Prefetcher | None = None
        self._averaged_bytes, self._groups_differ = 0, False

    def adopt(self, plan: ShardingPlan, row_orders: Mapping[str, torch.Tensor] | None = None) -> int:
        """Goes over to another plan of the same tables, between two steps; all processes call it, with the same.

        Rows and moments move to where the plan has them, from process to process and in rounds of bounded buffers.
        Kernels that hold the same rows under both plans stay. Training goes on from the same step at the same learning
        rate, as if it had begun with the new plan from this state. Embeddings come in the same order as before.

        The old plan stays in memory until all processes have the new one. If one of them fails before, all of them
        raise its error, and go on with the old plan.

        Batches that were prefetched are distributed anew when they are looked up; those of `distribute` are refused
        then. What was looked up before and has not been trained on is an error in its backward pass: call it after
        `end_step`.

        Args:
            plan: The plan, for the same batch; any that the constructor takes.
            row_orders: As the constructor has them.

        Returns:
            Bytes that this process has sent.

        Raises:
            InputError: If the tables or their batch are others, the processes do not agree on the plan, or replica
                groups differ now; also what the constructor raises.
            InvalidPlanError: As the constructor.
            DeviceError: If a process has too little memory for both plans.
            ExecutionError: If a process fails otherwise.
        """
        self._check_averaged("adopt")
        before = self._execution
        after, sent_bytes = before.adopt(plan, row_orders or {}, self.timer)
        if self._prefetcher is not None:
            self._prefetcher.drain()
            self._prefetcher.close()
        self._sent_before = self.sent_bytes()
        before.close()
        self._use(after)
        return sent_bytes

    def _check_averaged(self, method: str) -> None:
        """Refuses what takes one state of all replica groups while theirs differ."""
        if self._groups_differ:
            raise InputError(
                f"replica groups differ until step {self.num_steps + -self.num_steps % self._execution.sync_every}, "
                f"when they are averaged: call {method} then, or after average_groups, or table_state in each group",
                field=method,
            )

    def forward(
        self, ids: BatchOfIds | KeyedJagged | InputError | DistributedBatch | Prefetched
    ) -> Embedded | KeyedEmbeddings:
        """Embeddings of the local batch.

        Args:
            ids: Ids of all features, in the order of `feature_names`; keyed tensors may have another order, and the ids
                of features `f@table` of several tables once, as `f`. Or what `distribute` or `prefetch` made of it; or
                an error to end the step on all processes, if this one has no batch.

        Returns:
            Of a `KeyedJaggedTensor`, what TorchRec's modules return: a `KeyedTensor` if all tables are pooled, a
            dict with a `JaggedTensor` for each feature if all are sequence tables, and the pair of both for plans with
            tables of both kinds. Features may have samples of their own (VBE): with inverse indices they are repeated
            for the samples of the result; without, pooled features are a dict of (samples, D) by name. Of a
            `BatchOfIds`, `Embedded`, repeated for the samples of the result where it has inverse indices. Features are
            in the order of `feature_names`.

        Raises:
            InputError: If the batch of a process lacks a feature, has wrong lengths or weights, or an id that is no row
                of its table, or is none, or its learning rate is negative or no number: the same error on all
                processes, before any row is looked up. They can go on with the next batch.
            ExecutionError: If the process group has been destroyed.
        """
        return self.start(ids).wait()

    def start(self, ids: BatchOfIds | KeyedJagged | InputError | DistributedBatch | Prefetched) -> StartedLookup:
        """Looks up a batch and sends its embeddings on their way; as `forward`, which waits for them."""
        self.verdict = Verdict()
        self._rate_fault()
        step = UpdateStep(self._learning_rate, self.num_steps + 1, self.verdict)
        self._execution.kernels.set_step(step)
        self._execution.replicas.step = step
        if isinstance(ids, DistributedBatch):
            distributed = ids
            if distributed.ownership is not self.owners:
                raise InputError("was distributed under the plan before this one: distribute it again", field="batch")
        elif isinstance(ids, Prefetched):
            distributed = ids.wait()
            if distributed.ownership is not self.owners:
                distributed = self.distribute(ids.batch)
        else:
            distributed = self.distribute(ids)
        exchange = self._execution.output_exchange.start(self._execution.kernels.look_up(distributed), distributed)
        following = None if self._prefetcher is None else self._prefetcher.following
        if following is not None and self._execution.kernels.fills_ahead and torch.is_grad_enabled():
            self._execution.kernels.fill(following)
        sequences = [self.feature_names[feature] for feature in self._execution.output_exchange.reading.sequences]
        watch = None if self.guard.is_idle else partial(self.guard.watch, self.verdict)
        return StartedLookup(exchange, sequences, distributed.batch, self.owners.tables, watch)

    def distribute(self, ids: BatchOfIds | KeyedJagged | InputError) -> DistributedBatch:
        """Sends the ids of a batch to where their rows are, ahead of their lookup if that is wanted.

        Raises:
            InputError: As `forward`.
        """
        batch = self._read(ids)
        with self.timer.measure(Part.INPUT, StepCollective.INPUT):
            return self._execution.input_exchange(batch)

    def prefetch(self, ids: BatchOfIds | KeyedJagged | InputError) -> Prefetched:
        """Sends the ids of a batch to where their rows are, while the process goes on.

        A thread does it, over a process group of its own; on a GPU on a stream of its own. Batches may be prefetched
        several ahead, in the same order on all processes. The batch must not be changed meanwhile.

        Where rows lie behind an LRU cache on a GPU, those of the next batch are brought into the cache while one is
        trained on, if its ids are there when that one is looked up: prefetch two ahead (`batches_ahead`).

        Returns:
            What `forward` and `start` take in place of the batch; they raise the errors of `forward`.
        """
        part = self._execution.part
        if self._prefetcher is None:
            groups, number = part.groups.of_thread()
            exchange = self._execution.input_exchange.over(groups)
            self._prefetcher = Prefetcher(exchange, part.device, self.timer.clock, partial(end_thread, number))
            self._execution.output_exchange.before_gradients = self._prefetcher.let_send
        prefetched = Prefetched(self._read(ids), part.device, self.timer)
        self._prefetcher.submit(prefetched)
        return prefetched

    def pipelined(
        self, batches: Iterable[BatchT], ids: Callable[[BatchT], BatchOfIds | KeyedJagged | InputError] | None = None
    ) -> Iterator[tuple[BatchT, StartedLookup]]:
        """Batches, one after the other, each with its lookup, while the ids of the next one are on their way.

        A batch is looked up when it is its turn, after the one before was trained on: its rows are those that a loop
        without a pipeline reads, to the last bit. What is done between a turn's begin and the lookup's `wait` hides the
        embeddings' way. All processes give as many batches; one whose data have ended gives batches without samples.

        Args:
            batches: The batches.
            ids: The ids of one; None where batches are ids.

        Yields:
            A batch and its lookup, on which the loop body trains: `wait`, `backward`, `end_step`.

        Raises:
            InputError: As `forward`, when it is that batch's turn, on all processes; also where making the batch
                failed, with what was raised there as its cause.
        """
        source, is_over = iter(batches), False
        under_way: deque[tuple[BatchT | None, Prefetched]] = deque()

        def send() -> None:
            nonlocal is_over
            while not is_over and len(under_way) < self.batches_ahead:
                try:
                    batch = next(source)
                    given = batch if ids is None else ids(batch)
                except StopIteration:
                    is_over = True
                except Exception as error:  # noqa: BLE001 - raised again by all processes, when it is its turn
                    is_over = True
                    under_way.append(
                        (None, self.prefetch(error if isinstance(error, InputError) else unreadable(error)))
                    )
                else:
                    under_way.append((batch, self.prefetch(cast("BatchOfIds", given))))

        send()
        while under_way:
            batch, prefetched = under_way.popleft()
            started = self.start(prefetched)
            send()
            yield cast(BatchT, batch), started

    def _read(self, ids: BatchOfIds | KeyedJagged | InputError) -> BatchOfIds | InputError:
        """The batch, or what is wrong with it or with the learning rate."""
        fault = self._rate_fault()
        return as_batch(ids, self.feature_names, self._shared_features) if fault is None else fault

    def _rate_fault(self) -> InputError | None:
        """What is wrong with the learning rate, for all processes in place of a batch; the last good one stays."""
        try:
            self._learning_rate = self.optimizer.learning_rate
        except InputError as error:
            return error
        return None

    @property
    def group(self) -> dist.ProcessGroup:
        """The processes over which `state_dict` deals the rows of each table: those of a replica group."""
        return self._execution.part.group

    @override
    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """As a module's, for training alone: tables are no parameters, which could be frozen.

        Raises:
            InputError: If it is to freeze them.
        """
        if not requires_grad:
            raise InputError(
                "tables are not frozen here: embed under torch.no_grad(), or name them as `frozen` when embeddings are "
                "made; `autoshard.torchrec.shard` does it for those whose weights have requires_grad=False",
                field="requires_grad",
            )
        return super().requires_grad_(requires_grad)

    def __getstate__(self) -> dict[str, Any]:
        """What a copy or a pickle would hold.

        Raises:
            InputError: Always; the tables lie in kernels, and process groups are this process's.
        """
        raise InputError("sharded tables are neither copied nor pickled: `state_dict` holds their weights and moments")

    def sent_bytes(self) -> dict[str, float]:
        """Bytes that this process has sent since it was made, by `SENT`."""
        own, total = self._execution.part.process, dict.fromkeys(map(str, Stream), 0.0)
        inputs = [self._execution.input_exchange, *([] if self._prefetcher is None else [self._prefetcher.exchange])]
        for counter in (*(one.sent_bytes for one in inputs), self._execution.output_exchange.sent_bytes):
            for stream, to_P in counter.items():
                total[stream] += sum(to_P) - to_P[own]
        synced = self._execution.replicas.sent_bytes + sum(one.hit_bytes for one in inputs)
        total |= {"sync": synced, "group_sync": self._averaged_bytes}
        return {name: self._sent_before.get(name, 0) + sent for name, sent in total.items()}

    def end_step(self) -> None:
        """Ends a training step: every `sync_every` steps, replica groups average their weights and moments.

        The plan's `sync_rows` says of which rows: all, or those that a group updated since the last time. All processes
        call it after their backward pass. With one replica group it does nothing but `optimizer.step`, which tells
        schedulers that a step was made.

        Raises:
            ExecutionError: If gradients were not finite and that is an error: on all processes.
        """
        self.num_steps += 1
        self._groups_differ = self._execution.part.groups.peers is not None
        self.guard.end_step(self.num_steps)
        self.optimizer.step()
        if self.num_steps % self._execution.sync_every == 0:
            self.average_groups()

    def average_groups(self) -> None:
        """Averages replica groups that differ, also between two steps of `sync_every`. All processes call it."""
        peers = self._execution.part.groups.peers
        if peers is None or not self._groups_differ:
            return
        with self.timer.measure(Part.SYNC, StepCollective.GROUP_SYNC), torch.no_grad():
            states = self._execution.row_states(writes=True).items()
            trained = [state for index, state in states if self.owners.holdings[index].is_trained]
            self._averaged_bytes += average(trained, peers)
        self._groups_differ = False

    def table_state(self, name: str, rows: range | None = None) -> TableState:
        """A table's weights and moments in this process's replica group, on every process. All of them call it.

        Args:
            name: The table.
            rows: Row ids, for a table that is read in pieces; None for all.

        Raises:
            InputError: If no table has that name, or they are no range of its rows.
        """
        return self._held(writes=False).read(self.owners.tables[name], rows)

    def load_table_state(self, name: str, state: TableState, rows: range | None = None) -> None:
        """Sets a table's weights and moments, as `table_state` gave them under this or another plan.

        Every process gives the same ones, or each replica group its own, and keeps what it holds of them. They are read
        in chunks of rows, so that tensors may lie in a file (`torch.load(mmap=True)`).

        Args:
            name: The table.
            state: Its weights and moments; where a plan cuts the columns of a table of row-wise AdaGrad in another way,
                a shard's moment is the mean over its columns.
            rows: Row ids that they are of, for a table that is written in pieces; None for all.

        Raises:
            InputError: If no table has that name, a shape or dtype is another, or moments are missing or not used;
                nothing is written then.
        """
        check_state(self.owners.tables[name], state, rows)
        check_layout(self.owners.tables[name], state, self._execution.part)
        self._held(writes=True).write({name: state}, rows)

    def load_weights(self, name: str, weights_ND: torch.Tensor) -> None:
        """Sets a table's weights, and leaves its moments; otherwise as `load_table_state`.

        Where processes give other ones, each keeps what it holds of its own; copies of rows then differ until
        `align_copies`.

        Args:
            name: The table.
            weights_ND: All its weights, by row id.

        Raises:
            InputError: If no table has that name, or they are of another shape.
        """
        check_weights(self.owners.tables[name], weights_ND)
        self._held(writes=True).write({name: TableState(weights_ND)})

    @override
    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        self._check_averaged("state_dict")
        destination[f"{prefix}num_steps"] = torch.tensor(self.num_steps)
        if self._leaves_out_tables:
            return
        check_host_memory(self.owners.tables, self._execution.part)
        for name, state in self._held(writes=False).read_shares().items():
            destination |= {f"{prefix}tables.{name}.{part}": tensor for part, tensor in state.items()}

    @override
    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Mapping[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Writes the tables if all that are there fit; what is missing or is no table's goes to torch's lists."""
        own = {key[len(prefix) :]: value for key, value in state_dict.items() if key.startswith(prefix)}
        states, expected, optional, errors = {}, {"num_steps"}, set(), []
        for table in self.owners.tables.tables:
            weights, columns = f"tables.{table.name}.weights", f"tables.{table.name}.{MOMENT_COLUMNS}"
            moments = {one.name: f"tables.{table.name}.{one.name}" for one in table.optimizer.moments}
            expected |= {weights, *moments.values()}
            optional.add(columns)
            if weights not in own:
                continue
            told = tuple(torch.as_tensor(own[columns]).tolist()) if columns in own else None
            state = TableState(own[weights], {of: own[key] for of, key in moments.items() if key in own}, told)
            states[table.name] = state
            try:
                if len(state.moments) == len(moments):
                    check_state(table, state)
                else:
                    check_weights(table, state.weights_ND)
                check_layout(table, state, self._execution.part)
            except InputError as error:
                errors.append(f"{prefix}{error}")
        missing_keys += [prefix + key for key in sorted(expected - own.keys())]
        unexpected_keys += [prefix + key for key in sorted(own.keys() - expected - optional)]
        error_msgs += errors
        if errors:
            return
        self._held(writes=True).write(states)
        self._groups_differ = False
        self.num_steps = int(own.get("num_steps", self.num_steps))

    def close(self) -> None:
        """Lets go of the tables and of process groups, before these are destroyed; a second call does nothing."""
        if "_execution" not in self.__dict__:
            return
        self._execution.close()
        if self._prefetcher is not None:
            self._prefetcher.close()
        for name in _LET_GO:
            delattr(self, name)
        release_world()

    def __getattr__(self, name: str) -> Any:
        """As a module's.

        Raises:
            ExecutionError: If `close` has let go of it.
        """
        if name in _LET_GO:
            raise ExecutionError(CLOSED)
        return super().__getattr__(name)

    @contextmanager
    def without_tables(self) -> Iterator[None]:
        """While it lasts, `state_dict` has no tables: what is saved of them is `take_updates`."""
        self._leaves_out_tables = True
        try:
            yield
        finally:
            self._leaves_out_tables = False

    def take_updates(self, *, copies: bool = True) -> list[UpdatedRows]:
        """Rows that this process holds and that were updated since the last call, for delta checkpoints.

        Each row is given by one process, in the columns that it holds of it. All processes call it at the same step.

        Args:
            copies: False to take all rows as saved, and return none.

        Raises:
            InputError: If replica groups differ at this step.
        """
        self._check_averaged("take_updates")
        if not self.marks_rows:
            return []
        held, part = self._execution.row_states(writes=False), self._execution.part
        is_given = copies and dist.get_rank() in part.groups.world_ranks[0]
        found = list(updated_rows(held, self.owners.holdings, part.process, self._execution.orders)) if is_given else []
        forget_updates(held)
        return found

    def align_copies(self) -> None:
        """Gives all copies of rows the weights of the first: that which process 0 reads, in the first replica group.

        All processes call it, after `load_weights` of weights that differ between them.
        """
        self._execution.align_copies()

    def _held(self, *, writes: bool) -> HeldTables:
        """The tables as this process and the others of its replica group hold them."""
        one = self._execution
        return HeldTables(one.part, one.row_states(writes=writes), one.orders)
