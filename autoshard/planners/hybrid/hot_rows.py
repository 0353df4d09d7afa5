"""How many of a table's rows all ranks hold: options that are made where prices say that they pay.

A copied row costs what it takes to update and synchronise it, and saves what its lookups cost where the other rows are.
Both are read off options that are priced already; the number of hot rows follows from the table's access curve.

Shape suffixes: E shards of options, T ways to hold rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from autoshard.core import EmbeddingTable, Tier
from autoshard.core.costs import MsArray
from autoshard.planners.space.cost_gradient import CostGradient, FlatOptions, shard_costs
from autoshard.planners.space.options import ShardingType, row_tiers
from autoshard.planners.space.planner_space import Item, PlannerSpace
from autoshard.planners.space.rows_by_price import cheapest_ends, shares_of_first


def offer_hot_rows(space: PlannerSpace, flat: FlatOptions, rates: CostGradient) -> bool:
    """Adds options with the hot rows that cost least as if all ranks were alike; whether there are any.

    Args:
        space: Has some options of hot rows.
        flat: Its options.
        rates: What shards add.

    Source:
        FlexShard, Sec. 4.2 (one threshold of the access probability). Differs: the threshold is the ratio of two prices
        of the step, and the other rows are held as the space has them, on one rank or over several.
    """
    cost_E = shard_costs(flat, rates, space.topology.world_size)
    made = {}
    for item, first in zip(space.items, flat.first_I.tolist(), strict=True):
        table = item.like[0]
        if len(item.like) > 1 or table.name in made:
            continue
        made[table.name] = [
            option
            for rest, num_hot in _cheapest(table, _PartCosts.of(item, first, flat, cost_E), space.tables.batch_size)
            for option in row_tiers(table, num_hot, rest, space.topology, space.prices.payload)
        ]
    with_more = [index for index, item in enumerate(space.items) if made.get(item.like[0].name)]
    space.offer(with_more, lambda table: made[table.name])
    return bool(with_more)


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
    def of(cls, item: Item, first: int, flat: FlatOptions, cost_E: MsArray) -> _PartCosts:
        """Reads the options of an item of one table, of which the first has this place among all."""
        costs = cls()
        start_O = flat.start_O[first : first + len(item.options)]
        for option, start in zip(item.options, start_O.tolist(), strict=True):
            name, shards = option.of_tables[0].name, option.shards
            if name is ShardingType.DATA_PARALLEL:
                costs.hot[item.like[0].num_embeddings] = float(cost_E[start])
            elif name is ShardingType.ROW_TIERS and [shard.tier for shard in shards[:-1]] == [Tier.DATA_PARALLEL]:
                num_hot, rest_ms = shards[0].parts[0].shard.num_embeddings, float(cost_E[start + 1])
                costs.hot[num_hot] = float(cost_E[start])
                of_rest = costs.rest.setdefault(shards[1].tier, {})
                of_rest[num_hot] = min(rest_ms, of_rest.get(num_hot, rest_ms))
        return costs


def _cheapest(table: EmbeddingTable, costs: _PartCosts, batch_size: int) -> Iterator[tuple[Tier, int]]:
    """Ways to hold the other rows, each with the number of hot rows that costs least then, if it is a new one.

    Costs are taken as linear in hits and lookups around the number that costs least so far.
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
            _, per_hit_ms, per_lookup_ms = np.linalg.solve(rows, [costs.hot[num_hot] for num_hot in points])
        except np.linalg.LinAlgError:
            continue
        more_lookups = shares_2[many][1] - shares_2[few][1]
        if per_hit_ms <= 0 or more_lookups <= 0:
            continue
        rest_lookup_ms = (of_rest[few] - of_rest[many]) / more_lookups
        cost_3T = np.array([[per_hit_ms, 0.0], [0.0, 0.0], [per_lookup_ms, rest_lookup_ms]])
        (num_hot, _), _ = cheapest_ends(table, batch_size, cost_3T)
        if 0 < num_hot < table.num_embeddings and num_hot not in of_rest:
            yield rest, num_hot
