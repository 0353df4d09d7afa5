"""Ways to hold tables as numbers: what tells options apart, whichever table they hold."""

import numpy as np
import pytest

from autoshard.core import Collective, Pooling, Tier
from autoshard.planners.hybrid.option_offers import space_of
from autoshard.planners.space.cost_gradient import CostGradient, FlatOptions
from autoshard.planners.space.options import ShardingType, enumerate_options
from autoshard.planners.space.ways import (
    NUM_ITEM,
    NUM_PRICES,
    NUM_TASK,
    TaskFeatures,
    Way,
    price_features,
    way_features,
)
from tests import builders as make


def ways(table, machine=None):
    options = enumerate_options(table, machine or make.two_nodes(), with_exchanges=True)
    return {option.label: Way.of(option) for option in options}


def test_a_way_says_how_many_parts_have_a_place_and_what_all_ranks_hold():
    found = ways(make.table("t0", 100_000, 64, 20.0))
    assert (found["table_wise"].count, found["table_wise"].coverage) == (1, 0.0)
    assert found["column_wise x4"].count == 4
    assert found["data_parallel"].count == 0
    assert found["row_groups x3"].count == 3
    tiers = found["data_parallel 60% + table_wise 40%"]
    assert (tiers.name, tiers.count, tiers.coverage, tiers.rest) == (ShardingType.ROW_TIERS, 1, 0.6, Tier.TABLE_WISE)
    assert found["row_wise by reduce_scatter"].collective is Collective.REDUCE_SCATTER


def test_options_that_are_held_apart_have_features_of_their_own():
    found = set(ways(make.table("t0", 100_000, 64, 20.0)).values())
    assert len(np.unique(way_features(list(found)), axis=0)) == len(found) > 15


def test_rows_of_sequences_are_no_way_of_their_own():
    assert not any(one.by_rows for one in ways(make.table("t0", 1000, 64, 2.0, pooling=Pooling.SEQUENCE)).values())


@pytest.mark.parametrize("task", [make.mixed_task(), make.draw_task(6, 4)])
def test_what_is_seen_is_finite_and_of_a_fixed_width(task):
    space = space_of(make.request(*task))
    flat, rates = FlatOptions.of(space), CostGradient.of(space)
    features = TaskFeatures.of(space, flat, rates)
    assert features.task_F.shape == (NUM_TASK,)
    assert features.items_IF.shape == (len(space.items), NUM_ITEM)
    prices_OF = price_features(flat, rates, space)
    assert prices_OF.shape == (len(flat.item_O), NUM_PRICES)
    for values in (features.task_F, features.items_IF, prices_OF):
        assert np.isfinite(values).all()
        assert np.abs(values).max() < 10
    assert features.cost_I[features.order()[0]] == features.cost_I.max()
