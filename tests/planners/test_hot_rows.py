"""Options of hot rows that are made by price."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from autoshard.core import ImpliedOrder, TableSet
from autoshard.formats import load_topology
from autoshard.formats.metasyn import metasyn
from autoshard.planners.hybrid import option_offers
from autoshard.planners.hybrid.hot_rows import offer_hot_rows
from autoshard.planners.hybrid.option_offers import OfferedOptions, space_of
from autoshard.planners.space.cost_gradient import CostGradient, FlatOptions, shard_costs
from autoshard.planners.space.options import ShardingType, hot_rows, row_tiers
from tests import builders as make


@pytest.fixture(scope="module")
def request_():
    tables = metasyn().redrawn(40, 7)
    ordered = tuple(replace(table, row_order=ImpliedOrder.BY_ID) for table in tables.tables)
    return make.request(TableSet(batch_size=tables.batch_size, tables=ordered), load_topology("dgx-a100-16"))


def offer(space):
    return offer_hot_rows(space, CostGradient.of(space))


def least_ms(space):
    """What items cost at their best, together, as if all ranks were alike."""
    flat = FlatOptions.of(space)
    cost_O = flat.sums(shard_costs(flat, CostGradient.of(space), space.topology.world_size))
    return float(np.minimum.reduceat(cost_O, flat.first_I).sum())


def offer_many(space):
    """Twenty numbers of hot rows for each way to hold the others."""
    for index, item in enumerate(space.items):
        table = item.tables[0]
        rests = {option.shards[1].tier for option in item.options if option.of_tables[0].name is ShardingType.ROW_TIERS}
        counts = {hot_rows(table, share) for share in np.linspace(0.05, 0.99, 20)} - {0, table.num_embeddings}
        made = [
            option
            for rest, count in product(rests, counts)
            for option in row_tiers(table, count, rest, space.topology, space.prices.payload)
        ]
        space.offer([index], lambda _table, made=made: made)


def test_two_rounds_gain_most_of_what_many_numbers_could(request_):
    space, many = space_of(request_), space_of(request_)
    offer_many(many)
    found = [least_ms(space)]
    for _ in range(2):
        assert offer(space)
        found.append(least_ms(space))
    assert found == sorted(found, reverse=True)
    assert found[0] - found[2] > 0.7 * (found[0] - least_ms(many)) > 0
    assert sum(len(item.options) for item in space.items) < sum(len(item.options) for item in many.items) / 2


def test_in_large_tasks_prices_of_a_few_tables_tell_of_all(request_, monkeypatch):
    monkeypatch.setattr(option_offers, "LARGE_TASK", 0)
    monkeypatch.setattr(option_offers, "_NUM_COSTLIEST", 0)
    by_price, every = OfferedOptions(request_), space_of(request_)
    whole_ms = least_ms(by_price.space)
    by_price.begin()
    for _ in range(2):
        offer(every)
    num_options = [sum(len(item.options) for item in space.items) for space in (by_price.space, every)]
    assert num_options[0] < num_options[1] / 2
    assert whole_ms - least_ms(by_price.space) > 0.8 * (whole_ms - least_ms(every)) > 0
    binding = {item.tables[0].name for item in by_price.space.items if len(item.options) > 15}
    costliest = sorted(request_.tables.tables, key=lambda table: -table.pooling_factor)
    assert costliest[0].name in binding
    assert len(binding) < 20


def test_tables_without_a_row_order_get_none(request_):
    tables = request_.tables
    unknown = tuple(replace(table, row_order=None) for table in tables.tables)
    space = space_of(replace(request_, tables=TableSet(batch_size=tables.batch_size, tables=unknown)))
    num_options = [len(item.options) for item in space.items]
    assert not offer(space)
    assert [len(item.options) for item in space.items] == num_options


def test_each_number_is_offered_once(request_):
    space = space_of(request_)
    for _ in range(6):
        offer(space)
    for item in space.items:
        tiered = [option for option in item.options if option.of_tables[0].name is ShardingType.ROW_TIERS]
        parts = [option.of_tables[0].parts for option in tiered]
        assert len(parts) == len(set(parts))
    assert not offer(space)
