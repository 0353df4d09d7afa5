"""Ways to hold a table: the parts that it is cut into, and for each which ranks hold it once its place is chosen."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import pairwise

from autoshard.core import (
    EmbeddingTable,
    Exchange,
    GradSync,
    LocalShard,
    MemoryPlacement,
    PlacedShard,
    RowRange,
    RowsBy,
    Shard,
    Split,
    Tier,
    Topology,
    local_shard,
)
from autoshard.evaluation.traffic import cheaper_exchange
from autoshard.planners.space.constraints import allowed_ranks

#: Kernels move four floats at a time.
COLUMN_STEP = 4
#: Column shards are at least as wide as what memory moves at once: narrower ones cost as much.
_MIN_COLUMN_BYTES = 32
#: Shares of a table's lookups that its replicated rows may have in a scheme of tiers.
_HOT_COVERAGES = (0.6, 0.9)
#: Replicated rows are few: more of them are better off as FlexShard's planner cuts them, or as a whole table.
_MAX_HOT_SHARE = 0.25


class Hold(StrEnum):
    """Which ranks take a part: one, those of one node, or all of them; and whether all have it or share its rows."""

    RANK = "rank"
    """One rank to be chosen."""
    NODE = "node"
    """The ranks of one node to be chosen, which share the rows."""
    ALL = "all"
    """All ranks, which share the rows."""
    EACH = "each"
    """Every rank has all rows."""
    EACH_NODE = "each_node"
    """Every node has all rows, shared by its ranks."""

    @property
    def tier(self) -> Tier:
        """The tier of shards that are held so."""
        return _TIERS[self]

    @property
    def is_everywhere(self) -> bool:
        """Whether all ranks hold some of the rows."""
        return self not in (Hold.RANK, Hold.NODE)

    def num_sites(self, topology: Topology) -> int:
        """Places to choose from."""
        return {Hold.RANK: topology.world_size, Hold.NODE: topology.num_nodes}.get(self, 1)

    def replicas(self, site: int, topology: Topology) -> tuple[tuple[int, ...], ...]:
        """Ranks over which the rows are split, replica by replica, at one of the sites."""
        world, node = topology.world_size, topology.local_world_size
        if self is Hold.RANK:
            return ((site,),)
        if self is Hold.NODE:
            return (tuple(range(site * node, (site + 1) * node)),)
        size = {Hold.ALL: world, Hold.EACH: 1, Hold.EACH_NODE: node}[self]
        return tuple(tuple(range(start, start + size)) for start in range(0, world, size))

    def num_owners(self, topology: Topology) -> int:
        """Ranks over which the rows of one replica are split."""
        return {Hold.NODE: topology.local_world_size, Hold.EACH_NODE: topology.local_world_size}.get(
            self, topology.world_size if self is Hold.ALL else 1
        )

    def num_replicas(self, topology: Topology) -> int:
        """Copies of the rows."""
        return {Hold.EACH: topology.world_size, Hold.EACH_NODE: topology.num_nodes}.get(self, 1)

    def num_holders(self, topology: Topology) -> int:
        """Ranks that have any of the rows."""
        return self.num_owners(topology) * self.num_replicas(topology)


_TIERS = {
    Hold.RANK: Tier.TABLE_WISE,
    Hold.NODE: Tier.TABLE_ROW_WISE,
    Hold.ALL: Tier.ROW_WISE,
    Hold.EACH: Tier.DATA_PARALLEL,
    Hold.EACH_NODE: Tier.FLEX,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class UnplacedShard:
    """A shard and how it is held, but for its site.

    Attributes:
        shard: Rows and columns of the table.
        hold: Which ranks take it.
        exchange: What owners send back.
        grad_sync: How gradients of several replicas meet.
        memory: Memory level of the rows, and the cache before it.
    """

    shard: Shard
    hold: Hold
    exchange: Exchange
    grad_sync: GradSync = GradSync.NONE
    memory: MemoryPlacement = field(default_factory=MemoryPlacement)

    @classmethod
    def of(cls, shard: Shard, hold: Hold, topology: Topology) -> UnplacedShard:
        """The shard with the exchange that moves fewer bytes, in the device's memory."""
        return cls(
            shard=shard,
            hold=hold,
            exchange=cheaper_exchange(shard, hold.num_owners(topology)),
            grad_sync=GradSync.SPARSE if hold.num_replicas(topology) > 1 else GradSync.NONE,
        )

    def placed(self, site: int, topology: Topology) -> PlacedShard:
        """The shard at one of the hold's sites."""
        replicas = self.hold.replicas(site, topology)
        return PlacedShard(
            shard=self.shard,
            tier=self.hold.tier,
            replicas=replicas,
            split=Split.CYCLIC if len(replicas[0]) > 1 else Split.BLOCK,
            exchange=self.exchange,
            grad_sync=self.grad_sync,
            memory=self.memory,
        )

    def local(self, topology: Topology, batch_size: int) -> LocalShard:
        """What every rank that holds some of it runs; the same on all of them."""
        share = 1 / self.hold.num_replicas(topology)
        return local_shard(self.placed(0, topology), group_batch_size=batch_size, bags_share=share)


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
    """Several ranges of rows on ranks of their own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardingOption:
    """The parts of a table.

    Attributes:
        name: What it is called.
        parts: They tile the table.
        in_one_node: Whether parts on single ranks must be on ranks of one node.
    """

    name: ShardingType
    parts: tuple[UnplacedShard, ...]
    in_one_node: bool = False

    @property
    def table(self) -> EmbeddingTable:
        """The table that it holds."""
        return self.parts[0].shard.table

    @property
    def label(self) -> str:
        """Its name, with the number of column shards, or the share of lookups that each tier of rows gets."""
        if self.name is ShardingType.ROW_TIERS:
            return " + ".join(f"{part.hold.tier} {part.shard.access()[1]:.0%}" for part in self.parts)
        return f"{self.name} x{len(self.parts)}" if len(self.parts) > 1 else str(self.name)

    @property
    def tiers(self) -> tuple[Tier, ...]:
        """Tiers of its parts, each once."""
        return tuple(dict.fromkeys(part.hold.tier for part in self.parts))

    @property
    def is_everywhere(self) -> bool:
        """Whether all ranks hold some of every part."""
        return all(part.hold.is_everywhere for part in self.parts)

    def in_memory(self, memory: MemoryPlacement) -> ShardingOption:
        """The same parts with their rows in another memory."""
        return replace(self, parts=tuple(replace(part, memory=memory) for part in self.parts))


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
    return tuple(replace(shard, columns=pair) for pair in pairwise(bounds))


def enumerate_options(
    table: EmbeddingTable, topology: Topology, names: Collection[ShardingType] = tuple(ShardingType)
) -> tuple[ShardingOption, ...]:
    """Ways to hold a table on a machine, whatever its constraints (see `why_not`); the simplest comes first.

    Ways that are the same there are listed once: without several nodes none is hierarchical, with one rank there is
    only `table_wise`. Numbers of column shards are powers of two.

    Args:
        table: The table.
        topology: The machine.
        names: Which of them.

    Source:
        Neo, Sec. 4.2 (table-, row-, column-wise, data parallel, and its hierarchical forms); FlexShard, Sec. 4
        (`flex`, and tiers of rows).
    """
    whole = Shard.whole(table)
    world, node, nodes = topology.world_size, topology.local_world_size, topology.num_nodes
    schemes = []
    for name, hold, most in _offered(world, node, nodes):
        if name not in names:
            continue
        if name is ShardingType.ROW_TIERS:
            schemes += _row_tiers(table, topology)
        elif most == 1:
            schemes.append(_scheme(name, [UnplacedShard.of(whole, hold, topology)]))
        else:
            schemes += [_columns(name, table, hold, count, topology) for count in _column_counts(table, most)]
    return tuple(schemes)


def _offered(world: int, node: int, nodes: int) -> list[tuple[ShardingType, Hold, int]]:
    """Schemes that differ on a machine, how their parts are held, and the most column shards."""
    offered = [(ShardingType.TABLE_WISE, Hold.RANK, 1)]
    if world > 1:
        offered += [
            (ShardingType.DATA_PARALLEL, Hold.EACH, 1),
            (ShardingType.ROW_WISE, Hold.ALL, 1),
            (ShardingType.COLUMN_WISE, Hold.RANK, world),
            (ShardingType.ROW_TIERS, Hold.EACH, 1),
        ]
    if node > 1 and nodes > 1:
        offered += [
            (ShardingType.TABLE_ROW_WISE, Hold.NODE, 1),
            (ShardingType.FLEX, Hold.EACH_NODE, 1),
            (ShardingType.TABLE_COLUMN_WISE, Hold.RANK, node),
            (ShardingType.GRID, Hold.NODE, nodes),
        ]
    return offered


def why_not(scheme: ShardingOption, topology: Topology) -> str:
    """Which constraint of the table rules a scheme out; empty if none does."""
    constraints = scheme.table.constraints
    for tier in scheme.tiers:
        if tier in constraints.forbidden_tiers:
            return f"the table forbids tier {tier}"
    for part in scheme.parts:
        if not allowed_sites(part, topology):
            return f"the table is pinned to {_ranks(constraints.pinned_ranks)}"
    if constraints.colocate_with and len(scheme.parts) > 1 and not scheme.is_everywhere:
        return f"the table must be on the ranks of {', '.join(constraints.colocate_with)}"
    return ""


def allowed_sites(part: UnplacedShard, topology: Topology) -> tuple[int, ...]:
    """Sites whose ranks the table's pins allow, memory aside."""
    sites = range(part.hold.num_sites(topology))
    if not part.shard.table.constraints.pinned_ranks:
        return tuple(sites)
    allowed_R = allowed_ranks(part.shard.table, topology.world_size)
    return tuple(
        site for site in sites if all(allowed_R[list(replica)].all() for replica in part.hold.replicas(site, topology))
    )


def option_of_placed(held: Sequence[PlacedShard], topology: Topology) -> tuple[ShardingOption, tuple[int, ...]] | None:
    """How a plan holds a table, with the site of each part; None if that is no scheme (copies on some ranks only).

    Args:
        held: The placed shards of the table, in a plan of one replica group.
        topology: Of that group.
    """
    parts, sites = [], []
    holds = {tier: hold for hold, tier in _TIERS.items()}
    for placed in held:
        hold = holds.get(placed.tier)
        if hold is None or placed.deduplicate or placed.fetch is not None:
            return None
        first = placed.replicas[0][0]
        site = {Hold.RANK: first, Hold.NODE: topology.node_of(first)}.get(hold, 0)
        part = UnplacedShard(
            shard=placed.shard,
            hold=hold,
            exchange=placed.exchange,
            grad_sync=placed.grad_sync,
            memory=placed.memory,
        )
        parts.append(part)
        sites.append(site)
    return ShardingOption(name=_name_of(parts), parts=tuple(parts)), tuple(sites)


def _name_of(parts: Sequence[UnplacedShard]) -> ShardingType:
    table, holds = parts[0].shard.table, {part.hold for part in parts}
    if len(parts) == 1:
        return ShardingType(str(parts[0].hold.tier))
    is_columns = all(part.shard.num_embeddings == table.num_embeddings for part in parts)
    if is_columns and holds == {Hold.RANK}:
        return ShardingType.COLUMN_WISE
    if is_columns and holds == {Hold.NODE}:
        return ShardingType.GRID
    return ShardingType.ROW_GROUPS if holds == {Hold.RANK} else ShardingType.ROW_TIERS


def _scheme(name: ShardingType, parts: Sequence[UnplacedShard]) -> ShardingOption:
    return ShardingOption(name=name, parts=tuple(parts), in_one_node=name is ShardingType.TABLE_COLUMN_WISE)


def _columns(
    name: ShardingType, table: EmbeddingTable, hold: Hold, num_parts: int, topology: Topology
) -> ShardingOption:
    shards = column_cuts(Shard.whole(table), num_parts)
    return _scheme(name, [UnplacedShard.of(shard, hold, topology) for shard in shards])


def _column_counts(table: EmbeddingTable, most: int) -> tuple[int, ...]:
    """Numbers of column shards: 2, 4, 8 ... up to `most`, as long as they are wide enough."""
    narrowest = max(COLUMN_STEP, _MIN_COLUMN_BYTES // table.dtype.num_bytes)
    counts = []
    count = 2
    while count <= most and table.embedding_dim // count >= narrowest:
        counts.append(count)
        count *= 2
    return tuple(counts)


def _row_tiers(table: EmbeddingTable, topology: Topology) -> list[ShardingOption]:
    """Few hot rows on every rank, the rest on one rank or over all of them."""
    schemes = []
    seen: set[int] = set()
    for coverage in _HOT_COVERAGES:
        num_hot = _rows_with(table, coverage)
        if num_hot in seen or not 0 < num_hot <= _MAX_HOT_SHARE * table.num_embeddings:
            continue
        seen.add(num_hot)
        hot, rest = (
            Shard(
                table=table,
                rows=RowRange(start=start, stop=stop, by=RowsBy.ACCESS_RANK),
                columns=(0, table.embedding_dim),
            )
            for start, stop in ((0, num_hot), (num_hot, table.num_embeddings))
        )
        schemes += [
            _scheme(
                ShardingType.ROW_TIERS,
                [UnplacedShard.of(hot, Hold.EACH, topology), UnplacedShard.of(rest, hold, topology)],
            )
            for hold in (Hold.RANK, Hold.ALL)
        ]
    return schemes


def _rows_with(table: EmbeddingTable, coverage: float) -> int:
    """The most accessed rows that together get a share of the lookups."""
    ranks_K, cumulative_K = table.access.ranks_K, table.access.cumulative_K
    last = int(cumulative_K.searchsorted(coverage))
    before, after = float(cumulative_K[last - 1]), float(cumulative_K[last])
    share = (coverage - before) / (after - before)
    return round(float(ranks_K[last - 1]) + share * float(ranks_K[last] - ranks_K[last - 1]))


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
