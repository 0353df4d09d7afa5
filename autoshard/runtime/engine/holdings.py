"""Rows and columns of tables by the processes that hold them, and whom each process asks for them; without torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple, TypeAlias

from autoshard.core import (
    Collective,
    EmbeddingTable,
    Exchange,
    GradSync,
    GroupLayout,
    MemoryLevel,
    MemoryPlacement,
    PlacedShard,
    Pooling,
    ReplicaGroups,
    ShardingPlan,
    Split,
    TableSet,
)
from autoshard.core.declared import Role, values
from autoshard.core.errors import InvalidOptionError
from autoshard.core.shard import Replicas
from autoshard.evaluation.traffic import replicas_read

#: What the holdings of one kernel have in common.
KernelKey: TypeAlias = tuple[object, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldRange:
    """Rows of one placed shard.

    Attributes:
        start: First position: a row id, or an access rank where the table is cut by these.
        stop: Position after the last.
        split: How positions are dealt to the parts of a replica.
        replicas: For each replica, the process that holds each part of its rows.
        read_by: For each process, the replica that it reads.
    """

    start: int
    stop: int
    split: Split
    replicas: Replicas
    read_by: tuple[int, ...]

    @property
    def num_rows(self) -> int:
        """Rows of one replica."""
        return self.stop - self.start

    @property
    def num_parts(self) -> int:
        """Parts of one replica."""
        return len(self.replicas[0])

    @property
    def block_rows(self) -> int:
        """Rows of a full part, where each is a block."""
        return -(-self.num_rows // self.num_parts)

    def part_rows(self, part: int) -> int:
        """Rows of one part: blocks are full but for the last ones, other splits deal rows in turn."""
        if self.split is Split.BLOCK:
            return max(0, min(self.block_rows, self.num_rows - part * self.block_rows))
        return max(0, -(-(self.num_rows - part) // self.num_parts))

    def may_hold(self, part: int, start: int, stop: int) -> bool:
        """Whether a part can have rows at positions [start, stop): those of its block, any where rows are dealt."""
        first, last = self.start, self.stop
        if self.split is Split.BLOCK:
            first += part * self.block_rows
            last = first + self.part_rows(part)
        return start < last and first < stop

    @property
    def is_replicated(self) -> bool:
        """Whether several processes hold the same rows."""
        return len(self.replicas) > 1

    @property
    def stays(self) -> bool:
        """Whether every process reads a whole copy of its own."""
        return self.num_parts == 1 and all(
            self.replicas[replica][0] == process for process, replica in enumerate(self.read_by)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldPart:
    """A part of a range on one process.

    Attributes:
        range: Index of the range.
        part: Number of the part.
        offset: First of its rows among those of the holding on the process.
        num_rows: How many they are.
    """

    range: int
    part: int
    offset: int
    num_rows: int


@dataclass(frozen=True, kw_only=True)
class Holding:
    """Rows of one table, in some of its columns, that are looked up, answered and updated alike.

    A process keeps all rows that it has of a holding one after the other, whatever number of shards they are from.

    Attributes:
        table: Index of the table in the plan.
        of: The table.
        columns: First column, and the column after the last.
        output: What is sent to readers: a sum for each bag, or the rows.
        collective: How sums travel.
        deduplicate: Whether each distinct row is sent once.
        grad_sync: How gradients of replicas meet; none where there is one replica, which the kernel updates itself.
        memory: Where rows live, and the cache that a rank has before its part of a range.
        ranges: The rows, by rising position.
        is_trained: Whether rows are updated; else they are only looked up.
    """

    table: int
    of: EmbeddingTable
    columns: tuple[int, int]
    output: Exchange
    collective: Collective
    deduplicate: bool
    grad_sync: GradSync
    memory: MemoryPlacement
    ranges: tuple[HeldRange, ...]
    is_trained: bool = True

    @property
    def embedding_dim(self) -> int:
        """Columns."""
        return self.columns[1] - self.columns[0]

    @property
    def is_replicated(self) -> bool:
        """Whether several processes hold the same rows, all of whose ranges have the same replicas then."""
        return self.ranges[0].is_replicated

    @property
    def is_reduced(self) -> bool:
        """Whether sums of all processes are added up on the way."""
        return self.collective is Collective.REDUCE_SCATTER

    @property
    def is_whole(self) -> bool:
        """Whether it has all rows of its table."""
        return sum(one.num_rows for one in self.ranges) == self.of.num_embeddings

    @cached_property
    def kernel_key(self) -> KernelKey:
        """Holdings with the same key are served by one kernel of a process.

        Sums of any widths share a kernel that updates its tables. Rows are of one width, and so are replicas, whose
        gradients meet in the same collectives, and what is behind a cache, all of whose lines are as wide as the widest
        table. Behind a cache are all tables of a kernel or none.
        """
        cache = self.memory.policy if self.memory.cache_bytes else None
        memory = (self.memory.level, cache)
        key: KernelKey = (self.is_replicated, self.is_trained, self.output, *values(self.of, Role.KERNEL), *memory)
        if self.is_replicated:
            return (*key, self.embedding_dim, self.grad_sync, self.ranges[0].replicas, self.ranges[0].read_by)
        is_any_width = self.output is Exchange.PARTIAL_SUMS and cache is None
        return key if is_any_width else (*key, self.embedding_dim)

    @cached_property
    def _parts(self) -> dict[int, tuple[HeldPart, ...]]:
        parts: dict[int, list[HeldPart]] = {}
        for index, one in enumerate(self.ranges):
            # Part by part: processes that hold the same rows keep them in one order.
            for part, holders in enumerate(zip(*one.replicas, strict=True)):
                rows = one.part_rows(part)
                for process in dict.fromkeys(holders) if rows else ():
                    mine = parts.setdefault(process, [])
                    offset = mine[-1].offset + mine[-1].num_rows if mine else 0
                    mine.append(HeldPart(range=index, part=part, offset=offset, num_rows=rows))
        return {process: tuple(mine) for process, mine in parts.items()}

    def parts_of(self, process: int) -> tuple[HeldPart, ...]:
        """What a process holds, in the order in which it keeps it."""
        return self._parts.get(process, ())

    def num_rows(self, process: int) -> int:
        """Rows that a process holds."""
        parts = self.parts_of(process)
        return parts[-1].offset + parts[-1].num_rows if parts else 0

    def num_bytes(self, process: int) -> dict[MemoryLevel, int]:
        """Bytes that a process holds in each level, see `MemoryPlacement.held_bytes`."""
        held = [self.memory.held_bytes(self.of, one.num_rows, self.embedding_dim) for one in self.parts_of(process)]
        return {level: sum(one[level] for one in held) for level in MemoryLevel}

    def cache_bytes(self, process: int) -> int:
        """Device memory that caches what a process holds."""
        return len(self.parts_of(process)) * self.memory.cache_bytes

    def owners(self, reader: int) -> tuple[int, ...]:
        """Processes that a process asks, rising."""
        asked = {
            process
            for one in self.ranges
            for part, process in enumerate(one.replicas[one.read_by[reader]])
            if one.part_rows(part)
        }
        return tuple(sorted(asked))

    def sync_groups(self) -> tuple[tuple[int, ...], ...]:
        """Processes that hold the same part of the rows, part by part; each process once."""
        first = self.ranges[0]
        parts = zip(*first.replicas, strict=True)
        return tuple(dict.fromkeys(tuple(sorted(set(processes))) for processes in parts))


def holdings_of(plan: ShardingPlan, num_processes: int) -> tuple[Holding, ...]:
    """What the processes hold of a plan of one replica group.

    Rank r of the plan runs on process `r % num_processes`. With fewer processes than ranks, replicas that nobody reads
    are not held, and those that come to lie on the same processes are held once.

    Args:
        plan: The plan.
        num_processes: Processes, at most as many as ranks.
    """
    index_of = {table.name: index for index, table in enumerate(plan.tables.tables)}
    ranges: dict[tuple[object, ...], list[HeldRange]] = {}
    key: tuple[object, ...]
    first: dict[tuple[object, ...], Holding] = {}
    for placed in plan.shards:
        held = _range(plan, placed, num_processes)
        holding = _holding(index_of[placed.shard.table.name], placed, held)
        sent = (holding.output, holding.collective, holding.deduplicate)
        key = (holding.table, holding.columns, *sent, holding.grad_sync, holding.memory)
        if held.is_replicated:
            key = (*key, held.replicas, held.read_by)
        first.setdefault(key, holding)
        ranges.setdefault(key, []).append(held)
    held_once = [
        replace(holding, ranges=tuple(sorted(ranges[key], key=lambda one: one.start))) for key, holding in first.items()
    ]
    return tuple(sorted(held_once, key=lambda one: (one.table, one.columns, one.ranges[0].start)))


def _range(plan: ShardingPlan, placed: PlacedShard, num_processes: int) -> HeldRange:
    read_by_R = replicas_read(plan, placed)
    replicas: dict[tuple[int, ...], int] = {}
    read_by = []
    for process in range(num_processes):
        owners = tuple(rank % num_processes for rank in placed.replicas[int(read_by_R[process])])
        read_by.append(replicas.setdefault(owners, len(replicas)))
    return HeldRange(
        start=placed.shard.rows.start,
        stop=placed.shard.rows.stop,
        # What is in one piece is not dealt.
        split=placed.split if len(placed.replicas[0]) > 1 else Split.BLOCK,
        replicas=tuple(replicas),
        read_by=tuple(read_by),
    )


def _holding(table: int, placed: PlacedShard, held: HeldRange) -> Holding:
    shard = placed.shard
    is_sequence = shard.table.pooling is Pooling.SEQUENCE
    # What is looked up where it is read is pooled there, too.
    output = Exchange.PARTIAL_SUMS if held.stays and not is_sequence else placed.exchange
    return Holding(
        table=table,
        of=shard.table,
        columns=shard.columns,
        output=output,
        collective=placed.collective,
        deduplicate=placed.deduplicate and output is Exchange.ROWS and not held.stays,
        grad_sync=placed.grad_sync if held.is_replicated else GradSync.NONE,
        memory=placed.memory,
        ranges=(held,),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupOrder:
    """Which processes make up the replica groups.

    Attributes:
        groups: Ranks of each group among all processes.
    """

    groups: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, replica_groups: ReplicaGroups, num_processes: int) -> GroupOrder:
        """Deals processes to groups as the plan deals ranks.

        Args:
            replica_groups: Of the plan.
            num_processes: All processes; with fewer than ranks, every group has as many fewer.

        Raises:
            InvalidOptionError: If the groups do not divide them.
        """
        number = replica_groups.num_groups
        if num_processes % number:
            raise InvalidOptionError(
                f"must be a multiple of the plan's {number} replica groups, got {num_processes}", field="nproc"
            )
        size = num_processes // number
        if replica_groups.layout is GroupLayout.ACROSS_NODES:
            groups = tuple(tuple(range(group, num_processes, number)) for group in range(number))
        else:
            groups = tuple(tuple(range(group * size, (group + 1) * size)) for group in range(number))
        return cls(groups=groups)

    def group_of(self, process: int) -> int:
        """The group of a process."""
        return next(number for number, group in enumerate(self.groups) if process in group)


@dataclass(frozen=True, slots=True, kw_only=True)
class SumSlot:
    """Sums of one feature's bags over the rows of a holding."""

    holding: int
    feature: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnerRequest:
    """What one process asks another for, in the order in which it travels.

    Attributes:
        sums: Sums of bags, kernel by kernel: first of kernels that update their own tables, then of replicas.
        rows: Holdings whose rows are asked for, all features of the table together; in the same order of kernels.
    """

    sums: tuple[SumSlot, ...] = ()
    rows: tuple[int, ...] = ()


class KernelContent(NamedTuple):
    """What a kernel of a process keeps: memory with the same content can be used under several plans."""

    key: KernelKey
    rows: tuple[tuple[object, ...], ...]
    """Tables, columns and parts of ranges, in the order in which they are kept."""
    tables: frozenset[int]


@dataclass(frozen=True, kw_only=True)
class Ownership:
    """Who holds what, and who asks whom.

    Attributes:
        tables: The plan's tables, with the batch of the processes' replica group.
        num_processes: Processes that execute the plan.
        plan_world_size: Ranks that the plan was made for; rank r runs on process `r % num_processes`.
        holdings: What they hold.
    """

    tables: TableSet
    num_processes: int
    plan_world_size: int
    holdings: tuple[Holding, ...]

    @cached_property
    def features_of(self) -> tuple[tuple[int, ...], ...]:
        """For each table, the numbers of its features, in the plan's order of tables."""
        numbers, first = [], 0
        for table in self.tables.tables:
            numbers.append(tuple(range(first, first + len(table.features))))
            first += len(table.features)
        return tuple(numbers)

    @cached_property
    def kernels(self) -> tuple[KernelKey, ...]:
        """Kernels of all processes, in the order in which they are run: those that update their own tables first."""
        keys = dict.fromkeys(holding.kernel_key for holding in self.holdings)
        return tuple(sorted(keys, key=lambda key: key[0] is True))

    def of_kernel(self, key: KernelKey, process: int) -> tuple[int, ...]:
        """Holdings that a kernel of a process has rows of, in the order in which it keeps them.

        Kernels that update their own tables answer in it, too: by owners, as `asked` has it. Processes that hold the
        same rows of a kernel of replicas have one order.
        """
        held = [
            (holding.is_reduced, () if holding.is_replicated else holding.owners(process), index)
            for index, holding in enumerate(self.holdings)
            if holding.kernel_key == key and holding.num_rows(process)
        ]
        return tuple(index for *_, index in sorted(held))

    def content(self, key: KernelKey, process: int) -> KernelContent:
        """What a kernel of a process keeps."""
        held = [self.holdings[index] for index in self.of_kernel(key, process)]
        rows = []
        for one in held:
            parts = [(one.ranges[own.range], own.part) for own in one.parts_of(process)]
            places = tuple((of.start, of.stop, of.split, of.num_parts, part) for of, part in parts)
            rows.append((one.table, one.columns, one.memory, places))
        return KernelContent(key, tuple(rows), frozenset(one.table for one in held))

    def contents(self, process: int) -> dict[KernelContent, tuple[int, ...]]:
        """What the kernels of a process keep, with their holdings."""
        found = {self.content(key, process): self.of_kernel(key, process) for key in self.kernels}
        return {content: indices for content, indices in found.items() if indices}

    def first_rows(self, key: KernelKey, process: int) -> dict[int, int]:
        """Holdings of a kernel that keeps them in one table, and where in it each begins."""
        first_rows, num_rows = {}, 0
        for index in self.of_kernel(key, process):
            first_rows[index] = num_rows
            num_rows += self.holdings[index].num_rows(process)
        return first_rows

    def kernel_rows(self, key: KernelKey, process: int) -> int:
        """Rows that a kernel of a process keeps."""
        return sum(self.holdings[index].num_rows(process) for index in self.of_kernel(key, process))

    @cached_property
    def _replicas(self) -> dict[KernelKey, tuple[Holding, dict[int, tuple[int, ...]]]]:
        """For kernels of replicas one of their holdings, and for each process with rows those that hold the same."""
        found: dict[KernelKey, tuple[Holding, dict[int, tuple[int, ...]]]] = {}
        for one in self.holdings:
            if one.is_replicated:
                _, holders = found.setdefault(one.kernel_key, (one, {}))
                for group in one.sync_groups():
                    for process in group:
                        known = holders.setdefault(process, group) if one.num_rows(process) else group
                        assert known == group, "a process has one part of the rows"
        return found

    @property
    def most_replicated_rows(self) -> int:
        """At least as many rows as a kernel of replicas keeps on any process."""
        rows = dict.fromkeys(self._replicas, 0)
        for one in self.holdings:
            if one.is_replicated:
                rows[one.kernel_key] += sum(of.num_rows for of in one.ranges)
        return max(rows.values(), default=0)

    def holders(self, key: KernelKey, process: int) -> tuple[int, ...]:
        """Processes that hold the same rows of a kernel of replicas as a process does, rising: they sum gradients."""
        return self._replicas[key][1][process]

    def hits(self, reader: int, holder: int) -> tuple[tuple[KernelKey, int], ...]:
        """Of which rows a process tells a holder of replicas that its batch hits them, if they meet by their numbers.

        Returns:
            Kernels, each with the process whose copy the reader looks up.
        """
        found = []
        for key, (one, holders) in self._replicas.items():
            held = one.ranges[0]
            if one.is_trained and one.grad_sync is not GradSync.DENSE:
                owners = sorted(set(held.replicas[held.read_by[reader]]))
                found += [(key, owner) for owner in owners if holder in holders.get(owner, ())]
        return tuple(found)

    def asked(self, reader: int, owner: int) -> OwnerRequest:
        """What a process asks another for; of itself only rows that no other process has copies of (see `local`)."""
        return self._asked(reader, owner, lambda one: not (one.is_replicated and reader == owner))

    def local(self, reader: int) -> OwnerRequest:
        """Replicas that a process reads from its own memory."""
        return self._asked(reader, reader, lambda one: one.is_replicated)

    def _asked(self, reader: int, owner: int, wanted: Callable[[Holding], bool]) -> OwnerRequest:
        order = {key: number for number, key in enumerate(self.kernels)}
        held = [
            (order[one.kernel_key], one.is_reduced, one.owners(reader), index)
            for index, one in enumerate(self.holdings)
            if owner in one.owners(reader) and wanted(one)
        ]
        # Those of the same owners lie side by side, so that their sums are added up in one piece.
        indices = [index for *_, index in sorted(held)]
        sums = [index for index in indices if self.holdings[index].output is Exchange.PARTIAL_SUMS]
        rows = [index for index in indices if self.holdings[index].output is Exchange.ROWS]
        return OwnerRequest(
            sums=tuple(
                SumSlot(holding=index, feature=feature)
                for index in sums
                for feature in self.features_of[self.holdings[index].table]
            ),
            rows=tuple(rows),
        )

    @cached_property
    def reduced(self) -> tuple[SumSlot, ...]:
        """Sums that travel by reduce-scatter, in the order that they have in its buffers on every process."""
        order = {key: number for number, key in enumerate(self.kernels)}
        held = sorted(
            (order[one.kernel_key], one.owners(0), index) for index, one in enumerate(self.holdings) if one.is_reduced
        )
        return tuple(
            SumSlot(holding=index, feature=feature)
            for *_, index in held
            for feature in self.features_of[self.holdings[index].table]
        )

    def sent_apart(self, asked: OwnerRequest) -> tuple[SumSlot, ...]:
        """Sums among what is asked for that travel by all-to-all."""
        return tuple(slot for slot in asked.sums if not self.holdings[slot.holding].is_reduced)

    @property
    def frozen(self) -> tuple[str, ...]:
        """Names of tables that are only looked up."""
        return tuple(dict.fromkeys(one.of.name for one in self.holdings if not one.is_trained))

    @property
    def is_folded(self) -> bool:
        """Whether a process runs several ranks of the plan."""
        return self.num_processes != self.plan_world_size

    @property
    def identity(self) -> tuple[object, ...]:
        """All that processes have to agree on, whose `repr` is equal if and only if it is."""
        tables = tuple(values(table, Role.IDENTITY) for table in self.tables.tables)
        held = tuple(
            (one.table, one.columns, one.output, one.collective, one.deduplicate, one.memory, one.ranges)
            for one in self.holdings
        )
        return tables, held, self.num_processes

    def tables_of(self, process: int) -> tuple[EmbeddingTable, ...]:
        """Tables that a process holds some of, in the plan's order."""
        held = {one.table for one in self.holdings if one.num_rows(process)}
        return tuple(self.tables.tables[index] for index in sorted(held))

    def plan_ranks_of(self, process: int) -> tuple[int, ...]:
        """Ranks of the plan that a process runs."""
        return tuple(range(process, self.plan_world_size, self.num_processes))
