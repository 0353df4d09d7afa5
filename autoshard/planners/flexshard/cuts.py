"""Ways to cut tables into tiers, as options of the planners' space.

Rows count by falling access frequency. Every tier is on all ranks, alike on each.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from itertools import pairwise

from autoshard.core import (
    Collective,
    EmbeddingTable,
    Exchange,
    Payload,
    Pooling,
    RowRange,
    RowsBy,
    Shard,
    TableSet,
    Tier,
    Topology,
)
from autoshard.planners.space.constraints import allowed_ranks, colocated
from autoshard.planners.space.options import ShardingOption, ShardingType, UnplacedShard

#: From most to least replicated, as rows come by falling frequency.
TIERS = (Tier.DATA_PARALLEL, Tier.FLEX, Tier.ROW_WISE)
#: What owners send may be so many times as many vectors as by the other exchange.
_MOST_TIMES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class TierCut:
    """Rows [0, replicated) are data-parallel, rows [replicated, flexed) Flex, all others row-wise.

    Attributes:
        replicated: Rows that every rank has.
        flexed: Rows that every rank or every node has.
        exchange: What owners send.
        collective: How sums of row-wise rows travel.
    """

    replicated: int
    flexed: int
    exchange: Exchange
    collective: Collective = Collective.ALL_TO_ALL

    @classmethod
    def of(cls, option: ShardingOption) -> TierCut:
        """How an option of `option` is cut."""
        stops = {part.tier: part.shard.rows.stop for part in option.parts}
        replicated, last = stops.get(Tier.DATA_PARALLEL, 0), option.parts[-1]
        flexed = stops.get(Tier.FLEX, replicated)
        return cls(replicated=replicated, flexed=flexed, exchange=last.exchange, collective=last.collective)

    def option(self, table: EmbeddingTable, topology: Topology) -> ShardingOption:
        """The table with a part for each tier that has rows."""
        ends = (0, self.replicated, self.flexed, table.num_embeddings)
        held = [(tier, *rows) for tier, rows in zip(TIERS, pairwise(ends), strict=True) if rows[0] < rows[1]]
        by = RowsBy.ACCESS_RANK if len(held) > 1 else RowsBy.INDEX
        parts = []
        for tier, start, stop in held:
            rows, columns = RowRange(start=start, stop=stop, by=by), (0, table.embedding_dim)
            part = UnplacedShard.of(Shard(table=table, rows=rows, columns=columns), tier, topology)
            collective = self.collective if tier is Tier.ROW_WISE else Collective.ALL_TO_ALL
            is_asked = tier is not Tier.DATA_PARALLEL
            parts.append(replace(part, exchange=self.exchange, collective=collective) if is_asked else part)
        name = ShardingType.ROW_TIERS if len(parts) > 1 else ShardingType(held[0][0].value)
        return ShardingOption(name=name, parts=tuple(parts))


@dataclass(frozen=True, slots=True, kw_only=True)
class TierOffers:
    """What tables are offered.

    Attributes:
        topology: The machine.
        payload: Number formats of what is sent.
        num_tiers: 1 for row-wise, 2 with data-parallel, 3 with Flex.
        exchanges: What owners of pooled tables may send; those of sequences send rows.
        below_rows: Tables with fewer rows stay whole.
    """

    topology: Topology
    payload: Payload
    num_tiers: int
    exchanges: Collection[Exchange]
    below_rows: int = 0

    def tiers(self, table: EmbeddingTable) -> tuple[Tier, ...]:
        """Tiers that a table's rows may have, from least to most replicated.

        Flex is left out where it is one of the others. A table whose row order is unknown has one tier for all rows.
        """
        nodes, node = self.topology.num_nodes, self.topology.local_world_size
        are_offered = {
            Tier.ROW_WISE: True,
            Tier.FLEX: self.num_tiers > 2 and min(nodes, node) > 1,
            Tier.DATA_PARALLEL: self.num_tiers > 1,
        }
        forbidden = table.constraints.forbidden_tiers
        tiers = tuple(tier for tier, is_offered in are_offered.items() if is_offered and tier not in forbidden)
        return tiers if table.row_order is not None else tiers[:1]

    def unsplit(self, tables: TableSet) -> frozenset[str]:
        """Names of the tables that are not split over all ranks.

        Those that are pinned to some of the ranks or have no tier left, those that may not be row-wise or are small and
        may be on one rank, and all that share their ranks.
        """
        return frozenset(
            table.name for group in colocated(tables) if any(map(self._is_whole, group)) for table in group
        )

    def _is_whole(self, table: EmbeddingTable) -> bool:
        forbidden, world_size = table.constraints.forbidden_tiers, self.topology.world_size
        is_better_whole = world_size == 1 or Tier.ROW_WISE in forbidden or table.num_embeddings < self.below_rows
        is_pinned = not allowed_ranks(table, world_size).all()
        return is_pinned or (Tier.TABLE_WISE not in forbidden and is_better_whole) or not self.tiers(table)

    def in_one_tier(self, table: EmbeddingTable) -> list[ShardingOption]:
        """All rows in one tier, the least replicated first, by each exchange that is worth it."""
        found = []
        for tier in self.tiers(table):
            ends = {Tier.ROW_WISE: (0, 0), Tier.FLEX: (0, table.num_embeddings)}
            replicated, flexed = ends.get(tier, (table.num_embeddings, table.num_embeddings))
            found += self._by_exchange(table, replicated, flexed)
        return found

    def cuts(self, table: EmbeddingTable, bounds: Iterable[tuple[int, int]]) -> list[ShardingOption]:
        """Cuts at (replicated, flexed) whose owners send rows, where the table may be cut so."""
        tiers, last = self.tiers(table), table.num_embeddings
        if table.pooling is not Pooling.SEQUENCE and Exchange.ROWS not in self.exchanges:
            return []
        return [
            TierCut(replicated=replicated, flexed=flexed, exchange=Exchange.ROWS).option(table, self.topology)
            for replicated, flexed in bounds
            if Tier.DATA_PARALLEL in tiers or replicated == 0
            if replicated == flexed or (replicated < flexed and Tier.FLEX in tiers)
            if flexed == last or (flexed < last and Tier.ROW_WISE in tiers)
        ]

    def _worth(self, table: EmbeddingTable, flexed: int) -> list[Exchange]:
        """What owners may send, without what is much more than the other."""
        owners = self.topology.local_world_size if flexed else self.topology.world_size
        vectors = {Exchange.ROWS: table.pooling_factor, Exchange.PARTIAL_SUMS: len(table.features) * owners}
        most = _MOST_TIMES * min(vectors[exchange] for exchange in self.exchanges)
        return [exchange for exchange in self.exchanges if vectors[exchange] <= most]

    def _by_exchange(self, table: EmbeddingTable, replicated: int, flexed: int) -> list[ShardingOption]:
        ways = [(Exchange.ROWS, Collective.ALL_TO_ALL)]
        if table.pooling is not Pooling.SEQUENCE:
            ways = [(exchange, Collective.ALL_TO_ALL) for exchange in self._worth(table, flexed)]
            if flexed == 0 and Exchange.PARTIAL_SUMS in self.exchanges and self.payload.can_be_summed:
                ways.append((Exchange.PARTIAL_SUMS, Collective.REDUCE_SCATTER))
        if replicated == table.num_embeddings:
            ways = ways[:1]
        return [
            TierCut(replicated=replicated, flexed=flexed, exchange=exchange, collective=collective).option(
                table, self.topology
            )
            for exchange, collective in ways
        ]
