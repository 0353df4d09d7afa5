"""How many of a table's rows all ranks hold: options that are made where prices say that they pay.

A copied row costs what it takes to update and synchronise it, and saves what its lookups cost where the other rows are.
Both are read off options that are priced already; the number of hot rows follows from the table's access curve. Tables
whose rows are alike have the same prices by row: in large tasks those of a few tell for all of them.

Shape suffixes: E shards of options, N numbers of hot rows, T ways to hold rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np

from autoshard.core import EmbeddingTable, Exchange, Pooling, Tier
from autoshard.core.step import PART_INDEX, StepPart
from autoshard.planners.space.cost_gradient import CostGradient, shard_cost
from autoshard.planners.space.options import ShardingOption, ShardingType, row_tiers
from autoshard.planners.space.planner_space import Item, ItemShard, PlannerSpace
from autoshard.planners.space.rows_by_price import amounts_by_interval, cheapest_ends, shares_of_first

_EXCHANGES = [PART_INDEX[part] for part in (StepPart.FORWARD_EXCHANGE, StepPart.BACKWARD_EXCHANGE)]


def offer_hot_rows(space: PlannerSpace, rates: CostGradient, items: Iterable[int] | None = None) -> bool:
    """Adds options with the hot rows that cost least as if all ranks were alike; whether there are any.

    Args:
        space: Has some options of hot rows.
        rates: What shards add.
        items: Items that they may be added to; all if left out.

    Source:
        FlexShard, Sec. 4.2 (one threshold of the access probability). Differs: the threshold is the ratio of two prices
        of the step, and the other rows are held as the space has them, on one rank or over several.
    """
    cost_ms = shard_cost(rates, space.topology.world_size)
    some = range(len(space.items)) if items is None else list(items)
    made: dict[str, list[ShardingOption]] = {}
    for item in (space.items[index] for index in some):
        table = item.like[0]
        if len(item.like) > 1 or table.name in made:
            continue
        made[table.name] = [
            option
            for rest, num_hot in _cheapest(table, _PartCosts.of(item, cost_ms), space.tables.batch_size)
            for option in row_tiers(table, num_hot, rest, space.topology, space.prices.payload)
        ]
    with_more = [index for index in some if made.get(space.items[index].like[0].name)]
    space.offer(with_more, lambda table: made[table.name])
    return bool(with_more)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowPrices:
    """What rows of tables that are alike add to the step, in milliseconds, as if all ranks were alike.

    Attributes:
        hit_ms: A row on all ranks that a batch hits.
        copied_lookup_ms: A lookup of a row on all ranks.
        lookup_ms: A lookup of a row on one rank, its way back left out where rows are pooled.
        vector_ms: The way of a vector from one rank to its reader, and of its gradient back; 0 for rows that are not
            pooled, each of which goes its way.
    """

    hit_ms: float
    copied_lookup_ms: float
    lookup_ms: float
    vector_ms: float

    def num_hot(self, table: EmbeddingTable, batch_size: int) -> int:
        """How many of a table's most accessed rows are cheapest on all ranks, of 0 to all.

        The rank with the other rows sends a vector for each bag, or each row that is looked up, which is the shorter
        the fewer lookups they have left.

        Args:
            table: A table whose rows are like those that the prices are of.
            batch_size: Global batch, in samples.
        """
        hits_I, _, shares_I = amounts_by_interval(table, batch_size)
        lookups_I = batch_size * table.pooling_factor * shares_I
        copied_ms_I = self.hit_ms * hits_I + self.copied_lookup_ms * lookups_I
        bags_ms = self.vector_ms * batch_size * len(table.features)
        found = []
        for way_ms, once_ms in ((0.0, bags_ms), (self.vector_ms, 0.0)):
            rest_ms_I = (self.lookup_ms + way_ms) * lookups_I
            num_hot = int(table.access.ranks_K[np.append(rest_ms_I < copied_ms_I, True).argmax()])
            cost_ms = float(np.minimum(rest_ms_I, copied_ms_I).sum())
            found.append((cost_ms + (once_ms if num_hot < table.num_embeddings else 0.0), num_hot))
        return min(found)[1]


def row_prices(space: PlannerSpace, items: Iterable[int], rates: CostGradient) -> RowPrices | None:
    """Prices by row of tables whose rows are alike: medians; None where their options do not tell.

    Args:
        space: Has options of hot rows, some of them near what costs least.
        items: Items of one such table each.
        rates: What shards add.
    """
    cost_ms, batch_size = shard_cost(rates, space.topology.world_size), space.tables.batch_size
    ways_ms_V = rates.served_VP[:, _EXCHANGES].sum(axis=1) / space.topology.world_size
    found = []
    for item in (space.items[index] for index in items):
        table = item.like[0]
        is_pooled = table.pooling is not Pooling.SEQUENCE
        num_lookups, num_vectors = batch_size * table.pooling_factor, batch_size * len(table.features)
        costs = _PartCosts.of(item, cost_ms, Exchange.PARTIAL_SUMS if is_pooled else Exchange.ROWS)
        for rest, _, (hits_ms, copied_ms, rest_ms) in _linear(table, costs, batch_size):
            if rest is Tier.TABLE_WISE:
                hit_ms = hits_ms / table.access.expected_distinct(num_lookups)
                way_ms = float(ways_ms_V[item.options[0].shards[0].kind]) / num_vectors if is_pooled else 0.0
                found.append((hit_ms, copied_ms / num_lookups, rest_ms / num_lookups, way_ms))
    if not found:
        return None
    hit_ms, copied_lookup_ms, lookup_ms, vector_ms = np.median(found, axis=0).tolist()
    return RowPrices(hit_ms=hit_ms, copied_lookup_ms=copied_lookup_ms, lookup_ms=lookup_ms, vector_ms=vector_ms)


@dataclass(frozen=True, slots=True, kw_only=True)
class _PartCosts:
    """Milliseconds of the parts of a table's options of hot rows.

    Attributes:
        hot: Of rows on all ranks, by their number.
        rest: Of the others, by how they are held and by the number of hot rows; of what owners send, the shorter.
    """

    hot: dict[int, float] = field(default_factory=dict)
    rest: dict[Tier, dict[int, float]] = field(default_factory=dict)

    @classmethod
    def of(cls, item: Item, cost_ms: Callable[[ItemShard], float], sent: Exchange | None = None) -> _PartCosts:
        """Reads the options of an item of one table; only those whose other rows are answered so, if that is said."""
        costs = cls()
        for option in item.options:
            name, shards = option.of_tables[0].name, option.shards
            if name is ShardingType.DATA_PARALLEL:
                costs.hot[item.like[0].num_embeddings] = cost_ms(shards[0])
            elif name is ShardingType.ROW_TIERS and [shard.tier for shard in shards[:-1]] == [Tier.DATA_PARALLEL]:
                num_hot, rest_ms = shards[0].parts[0].shard.num_embeddings, cost_ms(shards[1])
                costs.hot[num_hot] = cost_ms(shards[0])
                if sent is None or shards[1].parts[0].exchange is sent:
                    of_rest = costs.rest.setdefault(shards[1].tier, {})
                    of_rest[num_hot] = min(rest_ms, of_rest.get(num_hot, rest_ms))
        return costs


def _cheapest(table: EmbeddingTable, costs: _PartCosts, batch_size: int) -> Iterator[tuple[Tier, int]]:
    """Ways to hold the other rows, each with the number of hot rows that costs least then, if it is a new one."""
    for rest, of_rest, (hits_ms, copied_ms, rest_ms) in _linear(table, costs, batch_size):
        cost_3T = np.array([[hits_ms, 0.0], [0.0, 0.0], [copied_ms, rest_ms]])
        (num_hot, _), _ = cheapest_ends(table, batch_size, cost_3T)
        if 0 < num_hot < table.num_embeddings and num_hot not in of_rest:
            yield rest, num_hot


def _linear(
    table: EmbeddingTable, costs: _PartCosts, batch_size: int
) -> Iterator[tuple[Tier, dict[int, float], tuple[float, float, float]]]:
    """Ways to hold the other rows, with their costs by number of hot rows, made linear around the least.

    The last is what all rows cost that a batch hits, if all are copied; what all lookups cost of copies; and of others.
    """
    shares_2 = dict(zip(costs.hot, shares_of_first(table, batch_size, list(costs.hot)), strict=True))
    for rest, of_rest in costs.rest.items():
        best = min(of_rest, key=lambda num_hot: costs.hot[num_hot] + of_rest[num_hot])
        near = sorted(of_rest, key=lambda num_hot: abs(shares_2[num_hot][1] - shares_2[best][1]))
        points = [*near, table.num_embeddings][:3] if table.num_embeddings in costs.hot else near[:3]
        if len(points) < 3:
            continue
        rows = np.array([(1.0, *shares_2[num_hot]) for num_hot in points])
        few, many = min(near[:2]), max(near[:2])
        try:
            _, hits_ms, copied_ms = np.linalg.solve(rows, [costs.hot[num_hot] for num_hot in points])
        except np.linalg.LinAlgError:
            continue
        more_lookups = shares_2[many][1] - shares_2[few][1]
        if hits_ms > 0 and more_lookups > 0:
            yield rest, of_rest, (hits_ms, copied_ms, (of_rest[few] - of_rest[many]) / more_lookups)
