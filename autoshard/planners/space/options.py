"""Ways to hold a table: the parts that it is cut into, and for each which ranks hold it once its place is chosen."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import chain, pairwise, product

import numpy as np

from autoshard.core import (
    Collective,
    Constraints,
    EmbeddingTable,
    Exchange,
    GradSync,
    LocalShard,
    MemoryPlacement,
    Payload,
    PlacedShard,
    Pooling,
    RowRange,
    RowsBy,
    Shard,
    Split,
    Tier,
    Topology,
    local_shards,
)
from autoshard.core.shard import IN_DEVICE_MEMORY
from autoshard.evaluation.traffic import cheaper_exchange
from autoshard.planners.space.constraints import allowed_sites
from autoshard.planners.space.tiers import (
    SITED_TIERS,
    is_everywhere,
    num_owners,
    num_replicas,
    replicas_at,
    site_of,
)

#: Kernels move four floats at a time.
COLUMN_STEP = 4
#: Column shards are at least as wide as what memory moves at once: narrower ones cost as much.
_MIN_COLUMN_BYTES = 32
#: Shares of a table's lookups that its replicated rows may have in an option of tiers.
_HOT_COVERAGES = (0.6, 0.9)
#: Replicated rows are few: more of them are better off as FlexShard's planner cuts them, or as a whole table.
_MAX_HOT_SHARE = 0.25
#: Numbers of row groups that a table may be cut into.
_GROUP_COUNTS = (2, 3, 4, 8)

_NO_CONSTRAINTS = Constraints()


@dataclass(frozen=True, slots=True, kw_only=True)
class UnplacedShard:
    """A shard and how it is held, but for its site.

    Attributes:
        shard: Rows and columns of the table.
        tier: Which ranks take it.
        exchange: What owners send back.
        collective: How sums travel.
        grad_sync: How gradients of several replicas meet.
        memory: Memory level of the rows, and the cache before it.
        rank: The only rank that the search may put it on; None for any. Parts that differ in it alone are equal.
    """

    shard: Shard
    tier: Tier
    exchange: Exchange
    collective: Collective = Collective.ALL_TO_ALL
    grad_sync: GradSync = GradSync.NONE
    memory: MemoryPlacement = IN_DEVICE_MEMORY
    rank: int | None = field(default=None, compare=False)

    @classmethod
    def of(cls, shard: Shard, tier: Tier, topology: Topology) -> UnplacedShard:
        """The shard with the exchange that moves fewer bytes by all-to-all, in the device's memory.

        Rows that every rank has a copy of are pooled where they are.
        """
        copies = num_replicas(tier, topology)
        stays = copies == topology.world_size and shard.table.pooling is not Pooling.SEQUENCE
        return cls(
            shard=shard,
            tier=tier,
            exchange=Exchange.PARTIAL_SUMS if stays else cheaper_exchange(shard, num_owners(tier, topology)),
            grad_sync=GradSync.SPARSE if copies > 1 else GradSync.NONE,
        )

    @classmethod
    def ways(cls, shard: Shard, tier: Tier, topology: Topology, payload: Payload) -> tuple[UnplacedShard, ...]:
        """The shard as `of` has it, and with sums that travel by reduce-scatter where that is possible."""
        usual = cls.of(shard, tier, topology)
        if tier is not Tier.ROW_WISE or shard.table.pooling is Pooling.SEQUENCE or not payload.can_be_summed:
            return (usual,)
        return usual, replace(usual, exchange=Exchange.PARTIAL_SUMS, collective=Collective.REDUCE_SCATTER)

    def by_other_exchange(self, topology: Topology) -> UnplacedShard | None:
        """The shard with rows in place of sums, or the reverse; None where that cannot be shorter, or not be run.

        Rows may be shorter where they are fewer than sums; else owners, readers and links all have more to do.
        """
        table = self.shard.table
        stays = num_replicas(self.tier, topology) == topology.world_size
        if table.pooling is Pooling.SEQUENCE or stays or self.collective is not Collective.ALL_TO_ALL:
            return None
        if table.pooling_factor * self.shard.access()[1] >= len(table.features) * num_owners(self.tier, topology):
            return None
        is_rows = self.exchange is Exchange.ROWS
        return replace(self, exchange=Exchange.PARTIAL_SUMS if is_rows else Exchange.ROWS)

    def of_table(self, table: EmbeddingTable) -> UnplacedShard:
        """The same rows and columns of another table, held alike."""
        return self if self.shard.table is table else replace(self, shard=replace(self.shard, table=table))

    def placed(self, site: int, topology: Topology, table: EmbeddingTable | None = None) -> PlacedShard:
        """The shard at one of its tier's sites; or the same rows and columns of another table, held alike."""
        replicas, shard = replicas_at(self.tier, site, topology), self.shard
        if table is not None and table is not shard.table:
            shard = Shard(table=table, rows=shard.rows, columns=shard.columns)
        return PlacedShard(
            shard=shard,
            tier=self.tier,
            replicas=replicas,
            split=Split.CYCLIC if len(replicas[0]) > 1 else Split.BLOCK,
            exchange=self.exchange,
            collective=self.collective,
            grad_sync=self.grad_sync,
            memory=self.memory,
        )

    def local(self, topology: Topology, batch_size: int) -> LocalShard:
        """What every rank that holds some of it runs; the same on all of them."""
        return locals_of([self.placed(0, topology)], batch_size)[0]


def locals_of(placed_U: Sequence[PlacedShard], batch_size: int) -> list[LocalShard]:
    """What every rank runs that holds some of the shards, whose replicas serve as many samples each."""
    bags_share_U = [1 / len(placed.replicas) for placed in placed_U]
    return local_shards(placed_U, group_batch_size=batch_size, bags_share_N=bags_share_U)


def placed_shard(shard: Shard, tier: Tier, topology: Topology, site: int = 0) -> PlacedShard:
    """The shard at one of a tier's sites, with the exchange that moves fewer bytes, in the device's memory."""
    return UnplacedShard.of(shard, tier, topology).placed(site, topology)


class ShardingType(StrEnum):
    """Ways to hold a table, by the names that Neo, FlexShard and TorchRec give them."""

    TABLE_WISE = "table_wise"
    COLUMN_WISE = "column_wise"
    ROW_WISE = "row_wise"
    TABLE_ROW_WISE = "table_row_wise"
    TABLE_COLUMN_WISE = "table_column_wise"
    GRID = "grid"
    DATA_PARALLEL = "data_parallel"
    FLEX = "flex"
    ROW_TIERS = "row_tiers"
    """Hot rows held otherwise than the rest."""
    ROW_GROUPS = "row_groups"
    """Several ranges of rows on ranks of their own, with an equal share of the lookups each."""


#: Sharding types that cut rows by how often they are looked up.
BY_ACCESS_RANK = (ShardingType.ROW_TIERS, ShardingType.ROW_GROUPS)
#: Sharding types by columns, and what they are with one column shard.
_WITHOUT_COLUMNS = {
    ShardingType.COLUMN_WISE: ShardingType.TABLE_WISE,
    ShardingType.TABLE_COLUMN_WISE: ShardingType.TABLE_WISE,
    ShardingType.GRID: ShardingType.TABLE_ROW_WISE,
}
#: Sharding types that take several nodes of several ranks.
_OF_NODES = (ShardingType.TABLE_ROW_WISE, ShardingType.FLEX, ShardingType.TABLE_COLUMN_WISE, ShardingType.GRID)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardingOption:
    """The parts of a table.

    Attributes:
        name: What it is called.
        parts: They tile the table.
    """

    name: ShardingType
    parts: tuple[UnplacedShard, ...]

    @property
    def table(self) -> EmbeddingTable:
        """The table that it holds."""
        return self.parts[0].shard.table

    @property
    def label(self) -> str:
        """Its name, with the number of column shards, or the share of lookups that each tier or part of rows gets.

        And the collective, where that is not the usual one; or rows, where readers pool them.
        """
        by = "" if self.collective is Collective.ALL_TO_ALL else f" by {self.collective}"
        if any(part.exchange is Exchange.ROWS and self.table.pooling is not Pooling.SEQUENCE for part in self.parts):
            by += " by rows"
        if self.name is ShardingType.ROW_TIERS:
            return " + ".join(f"{part.tier} {part.shard.access()[1]:.0%}" for part in self.parts) + by
        if self.is_uneven:
            dealt = [part for part in self.parts if is_everywhere(part.tier)]
            share, count = sum(part.shard.access()[1] for part in dealt), len(self.parts) - len(dealt)
            return f"{self.name} {share:.0%} + {count} range{'s' if count > 1 else ''}" + by
        return (f"{self.name} x{len(self.parts)}" if len(self.parts) > 1 else str(self.name)) + by

    @property
    def collective(self) -> Collective:
        """`reduce_scatter` if sums of any part travel so."""
        is_reduced = any(part.collective is Collective.REDUCE_SCATTER for part in self.parts)
        return Collective.REDUCE_SCATTER if is_reduced else Collective.ALL_TO_ALL

    @property
    def tiers(self) -> tuple[Tier, ...]:
        """Tiers of its parts, each once."""
        return tuple(dict.fromkeys(part.tier for part in self.parts))

    @property
    def in_one_node(self) -> bool:
        """Whether all parts must be on ranks of one node."""
        return self.name is ShardingType.TABLE_COLUMN_WISE

    @property
    def is_uneven(self) -> bool:
        """Whether rows are cut into uneven shares, for ranks that differ in memory."""
        return self.name is ShardingType.ROW_WISE and len(self.parts) > 1

    @property
    def is_everywhere(self) -> bool:
        """Whether all ranks hold some of every part."""
        return all(is_everywhere(part.tier) for part in self.parts)

    def of_table(self, table: EmbeddingTable) -> ShardingOption:
        """The same parts of another table."""
        return self if self.table is table else replace(self, parts=tuple(part.of_table(table) for part in self.parts))


def column_cuts(shard: Shard, num_parts: int) -> tuple[Shard, ...]:
    """Column shards whose widths are multiples of four and differ by four at most; fewer of them if there is no room.

    Source:
        Neo (Mudigere et al., ISCA 2022), Sec. 4.
    """
    first, end = shard.columns
    num_steps = -(-(end - first) // COLUMN_STEP)
    num_parts = min(num_parts, num_steps)
    bounds = [min(end, first + COLUMN_STEP * (index * num_steps // num_parts)) for index in range(num_parts + 1)]
    bounds[-1] = end
    return tuple(Shard(table=shard.table, rows=shard.rows, columns=pair) for pair in pairwise(bounds))


def column_counts(table: EmbeddingTable, most: int, min_partition: int = 0) -> list[int]:
    """Numbers of column shards that a table may be cut into: 2, 4, 8 ... up to `most`, if they are wide enough.

    Args:
        table: The table.
        most: The largest number.
        min_partition: Least columns of a shard; 0 for 32 bytes of a row.
    """
    least = max(COLUMN_STEP, min_partition or _MIN_COLUMN_BYTES // table.dtype.num_bytes)
    # Shards begin at multiples of the step, so that one may be narrower than the mean.
    narrowest = COLUMN_STEP * -(-least // COLUMN_STEP)
    counts = [2**power for power in range(1, most.bit_length())]
    return [count for count in counts if table.embedding_dim // count >= narrowest]


def keeps_width(shard: Shard, min_partition: int) -> bool:
    """Whether a shard has all columns of its table, or as many as column shards have at least; 0 for any number."""
    return shard.embedding_dim >= min(min_partition, shard.table.embedding_dim)


def hot_rows(table: EmbeddingTable, share: float) -> int:
    """How many of a table's most accessed rows have a share of its lookups together."""
    return round(float(np.interp(share, table.access.cumulative_K, table.access.ranks_K)))


def split_rows(shard: Shard, middle: int) -> tuple[Shard, Shard]:
    """The shard's rows before and from an access rank on."""
    first, second = (
        replace(shard, rows=RowRange(start=start, stop=stop, by=RowsBy.ACCESS_RANK))
        for start, stop in ((shard.rows.start, middle), (middle, shard.rows.stop))
    )
    return first, second


def enumerate_options(
    table: EmbeddingTable,
    topology: Topology,
    names: Collection[ShardingType] = tuple(ShardingType),
    payload: Payload | None = None,
    min_partition: int = 0,
    *,
    with_exchanges: bool = False,
    rest_on_one: bool = False,
) -> tuple[ShardingOption, ...]:
    """Ways to hold a table on a machine, whatever its constraints (see `why_not`); the simplest comes first.

    Ways that are the same there are listed once: without several nodes none is hierarchical, with one rank there is
    only `table_wise`. Numbers of column shards are powers of two; where a table is too narrow for two, or there is one
    rank, and the same without columns is not among the names, there is one column shard. Pooled rows that are split
    over all ranks are listed twice, with sums by reduce-scatter after the exchange with fewer bytes by all-to-all.
    Tables without a row order have no `row_tiers` and no `row_groups`.

    Args:
        table: The table.
        topology: The machine.
        names: Which of them.
        payload: Number formats of vectors and gradients on the wire; fp32 if left out.
        min_partition: Least columns of a column shard; 0 for 32 bytes of a row.
        with_exchanges: Whether ways that differ in what owners send, sums or rows, are listed, too.
        rest_on_one: Whether the rows beside hot ones are listed on one rank only, and not split over all.

    Source:
        Neo, Sec. 4.2 (table-, row-, column-wise, data parallel, and its hierarchical forms); FlexShard, Sec. 4
        (`flex`, and tiers of rows).
    """
    payload = payload or Payload()
    return tuple(
        option
        for name, tier, most in _offered(topology.world_size, topology.local_world_size, topology.num_nodes)
        if name in names and (name not in BY_ACCESS_RANK or table.row_order is not None)
        for cut in _cuts(table, name, tier, most, min_partition, rest_on_one=rest_on_one)
        or _uncut(table, name, tier, names)
        # Of row groups there would be a way for every choice of each.
        for option in _held(name, cut, topology, payload, with_exchanges and name is not ShardingType.ROW_GROUPS)
    )


def row_tiers(
    table: EmbeddingTable, num_hot: int, rest: Tier, topology: Topology, payload: Payload
) -> list[ShardingOption]:
    """Ways to hold a table with its most accessed rows on all ranks, by what owners of the others send.

    Args:
        table: A table with a row order.
        num_hot: These rows, at least one and not all.
        rest: How the other rows are held.
        topology: The machine.
        payload: Number formats of vectors and gradients on the wire.
    """
    hot, others = split_rows(Shard.whole(table), num_hot)
    cut = [((hot,), Tier.DATA_PARALLEL), ((others,), rest)]
    return list(_held(ShardingType.ROW_TIERS, cut, topology, payload, with_exchanges=True))


def _held(
    name: ShardingType,
    cut: Sequence[tuple[Sequence[Shard], Tier]],
    topology: Topology,
    payload: Payload,
    with_exchanges: bool,
) -> Iterator[ShardingOption]:
    """Ways to hold the parts of a cut: shards of the same rows, and their tier."""
    ways = [_ways(columns, tier, topology, payload, with_exchanges) for columns, tier in cut]
    return (ShardingOption(name=name, parts=tuple(chain.from_iterable(parts))) for parts in product(*ways))


def _ways(
    columns: Sequence[Shard], tier: Tier, topology: Topology, payload: Payload, with_exchanges: bool
) -> list[tuple[UnplacedShard, ...]]:
    """Ways to hold shards of the same rows, all alike: columns change none of them."""
    ways = list(UnplacedShard.ways(columns[0], tier, topology, payload))
    other = ways[0].by_other_exchange(topology) if with_exchanges else None
    return [
        tuple(
            UnplacedShard(
                shard=shard, tier=tier, exchange=way.exchange, collective=way.collective, grad_sync=way.grad_sync
            )
            for shard in columns
        )
        for way in (*ways, *([] if other is None else [other]))
    ]


def _offered(world: int, node: int, nodes: int) -> list[tuple[ShardingType, Tier, int]]:
    """Sharding types that differ on a machine, how their parts are held, and the most column shards."""
    offered = [(ShardingType.TABLE_WISE, Tier.TABLE_WISE, 1)]
    if world == 1:
        offered.append((ShardingType.COLUMN_WISE, Tier.TABLE_WISE, 1))
    if world > 1:
        offered += [
            (ShardingType.DATA_PARALLEL, Tier.DATA_PARALLEL, 1),
            (ShardingType.ROW_WISE, Tier.ROW_WISE, 1),
            (ShardingType.COLUMN_WISE, Tier.TABLE_WISE, world),
            (ShardingType.ROW_TIERS, Tier.DATA_PARALLEL, 1),
            (ShardingType.ROW_GROUPS, Tier.TABLE_WISE, world),
        ]
    if node > 1 and nodes > 1:
        offered += [
            (ShardingType.TABLE_ROW_WISE, Tier.TABLE_ROW_WISE, 1),
            (ShardingType.FLEX, Tier.FLEX, 1),
            (ShardingType.TABLE_COLUMN_WISE, Tier.TABLE_WISE, node),
            (ShardingType.GRID, Tier.TABLE_ROW_WISE, nodes),
        ]
    return offered


def why_not(option: ShardingOption, topology: Topology) -> str:
    """Which constraint of the table rules an option out; empty if none does."""
    constraints = option.table.constraints
    if constraints == _NO_CONSTRAINTS:
        return ""
    for tier in option.tiers:
        if tier in constraints.forbidden_tiers:
            return f"the table forbids tier {tier}"
    for part in option.parts:
        if not allowed_sites(option.table, part.tier, topology).any():
            return f"the table is pinned to {_ranks(constraints.pinned_ranks)}"
    if constraints.colocate_with and len(option.parts) > 1 and not option.is_everywhere:
        return f"the table must be on the ranks of {', '.join(constraints.colocate_with)}"
    return ""


def option_of_placed(held: Sequence[PlacedShard], topology: Topology) -> tuple[ShardingOption, tuple[int, ...]] | None:
    """How a plan holds a table, with the site of each part; None if that is none (copies on some ranks only).

    Args:
        held: The placed shards of the table, in a plan of one replica group.
        topology: Of that group.
    """
    if any(placed.tier not in SITED_TIERS or placed.deduplicate or placed.fetch is not None for placed in held):
        return None
    parts = tuple(
        UnplacedShard(
            shard=placed.shard,
            tier=placed.tier,
            exchange=placed.exchange,
            collective=placed.collective,
            grad_sync=placed.grad_sync,
            memory=placed.memory,
        )
        for placed in (one.as_run(topology.world_size) for one in held)
    )
    sites = tuple(site_of(placed.tier, placed.replicas[0][0], topology) for placed in held)
    return ShardingOption(name=_name_of(parts), parts=parts), sites


def _name_of(parts: Sequence[UnplacedShard]) -> ShardingType:
    table, tiers = parts[0].shard.table, {part.tier for part in parts}
    if len(parts) == 1:
        return ShardingType(str(parts[0].tier))
    is_columns = all(part.shard.num_embeddings == table.num_embeddings for part in parts)
    if is_columns and tiers == {Tier.TABLE_WISE}:
        return ShardingType.COLUMN_WISE
    if is_columns and tiers == {Tier.TABLE_ROW_WISE}:
        return ShardingType.GRID
    if tiers == {Tier.ROW_WISE, Tier.TABLE_WISE} and parts[0].tier is Tier.ROW_WISE:
        return ShardingType.ROW_WISE
    return ShardingType.ROW_GROUPS if tiers == {Tier.TABLE_WISE} else ShardingType.ROW_TIERS


def _cuts(
    table: EmbeddingTable,
    name: ShardingType,
    tier: Tier,
    most: int,
    min_partition: int,
    *,
    rest_on_one: bool,
) -> list[list[tuple[tuple[Shard, ...], Tier]]]:
    """What the table may be cut into for a sharding type: shards of the same rows, and their tier."""
    if name is ShardingType.ROW_TIERS:
        return [
            [((hot,), Tier.DATA_PARALLEL), ((rest,), of_rest)]
            for hot, rest in _hot_cuts(table)
            for of_rest in ((Tier.TABLE_WISE,) if rest_on_one else (Tier.TABLE_WISE, Tier.ROW_WISE))
        ]
    whole = Shard.whole(table)
    if name is ShardingType.ROW_GROUPS:
        groups = (_row_groups(whole, count) for count in _GROUP_COUNTS if count <= most)
        return [[((group,), tier) for group in of_count] for of_count in groups if of_count]
    counts = column_counts(table, most, min_partition) if name in _WITHOUT_COLUMNS else [1]
    cuts = [column_cuts(whole, count) for count in counts]
    return [[(columns, tier)] for columns in cuts]


def _uncut(
    table: EmbeddingTable, name: ShardingType, tier: Tier, names: Collection[ShardingType]
) -> list[list[tuple[tuple[Shard, ...], Tier]]]:
    """The table as the only column shard, for sharding types by columns; none where that is listed under its own name.

    Of several such types that are the same then, the first one has it.
    """
    same = _WITHOUT_COLUMNS.get(name)
    earlier = [other for other in names if _WITHOUT_COLUMNS.get(other) is same and other < name]
    return [] if same is None or same in names or earlier else [[((Shard.whole(table),), tier)]]


def why_none(table: EmbeddingTable, topology: Topology, names: Collection[ShardingType]) -> str:
    """Why a table has no way to be held as any of some sharding types on a machine, constraints aside.

    Args:
        table: The table, of which `enumerate_options` lists none.
        topology: The machine.
        names: The sharding types, at least one.
    """
    nodes, node = topology.num_nodes, topology.local_world_size
    reasons: dict[str, list[str]] = {}
    for name in sorted(names):
        if name in _OF_NODES and not (nodes > 1 and node > 1):
            reason = f"needs several nodes of several ranks, there {_are(nodes, 'node')} of {_counted(node, 'rank')}"
        elif topology.world_size == 1:
            reason = "needs several ranks, there is 1"
        elif name in BY_ACCESS_RANK and table.row_order is None:
            reason = (
                "needs the order of the table's rows by lookups, which is unknown (`hot_rows`, or `autoshard import "
                "COUNTS --format row-counts --row-orders`)"
            )
        else:
            reason = "finds too few rows, or too even lookups, to cut the table"
        reasons.setdefault(reason, []).append(str(name))
    return "; ".join(f"{', '.join(of_reason)} {reason}" for reason, of_reason in reasons.items())


def _counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _are(number: int, noun: str) -> str:
    return f"{'is' if number == 1 else 'are'} {_counted(number, noun)}"


def _hot_cuts(table: EmbeddingTable) -> list[tuple[Shard, Shard]]:
    """Few hot rows, and the rest."""
    counts = dict.fromkeys(hot_rows(table, coverage) for coverage in _HOT_COVERAGES)
    most = _MAX_HOT_SHARE * table.num_embeddings
    return [split_rows(Shard.whole(table), num_hot) for num_hot in counts if 0 < num_hot <= most]


def _row_groups(whole: Shard, count: int) -> list[Shard]:
    """Ranges of rows by access rank that get as many lookups each; none if some of them would be empty."""
    table = whole.table
    bounds = [0, *(hot_rows(table, index / count) for index in range(1, count)), table.num_embeddings]
    if any(start >= stop for start, stop in pairwise(bounds)):
        return []
    return [
        replace(whole, rows=RowRange(start=start, stop=stop, by=RowsBy.ACCESS_RANK)) for start, stop in pairwise(bounds)
    ]


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
