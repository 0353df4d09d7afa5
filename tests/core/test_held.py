"""The shards of a plan as arrays: alike ones once, and still each with its own name and ranks."""

from dataclasses import replace

import numpy as np
import pytest

from autoshard.core import PlacedShard, Shard, Tier, local_shard
from autoshard.core.held import sums_by_rank
from autoshard.evaluation import evaluate
from autoshard.validator import validate_plan
from tests import builders as make
from tests.contracts.drawn_layouts import drawn_plan


def doubled(plan, **changes):
    """The plan with every table once more, under another name, with some fields of its own, held as it is."""
    twins = {
        table.name: replace(
            table,
            name=f"{table.name}_twin",
            features=tuple(replace(one, name=f"{one.name}_twin", **changes) for one in table.features),
        )
        for table in plan.tables.tables
    }
    shards = [replace(one, shard=replace(one.shard, table=twins[one.shard.table.name])) for one in plan.shards]
    tables = replace(plan.tables, tables=(*plan.tables.tables, *twins.values()))
    return replace(plan, tables=tables, shards=(*plan.shards, *shards))


def test_shards_that_are_alike_but_for_names_and_ranks_are_of_one_kind():
    one, other, third = make.table("one"), make.table("other"), make.table("third", pooling_factor=3.0)
    plan = make.plan(
        PlacedShard.table_wise(Shard.whole(one), 0),
        PlacedShard.table_wise(Shard.whole(third), 0),
        PlacedShard.table_wise(Shard.whole(other), 3),
        make.placed(make.table("copied"), Tier.DATA_PARALLEL, make.each(4)),
    )
    arrays = plan.arrays
    assert arrays.kind_N.tolist() == [0, 1, 0, 2]
    assert arrays.layout_N.tolist() == [0, 0, 1, 2]
    assert [local.table for local in arrays.locals_U] == ["one", "third", "copied"]
    assert [held.local.table for held in plan.held_shards()] == ["one", "third", "other", "copied"]
    assert arrays.counts(4).tolist() == [3, 1, 1, 2]


@pytest.mark.parametrize("seed", range(12))
def test_what_ranks_hold_is_what_each_shard_leaves_there(seed):
    plan = doubled(drawn_plan(seed, 4, 2)[0])
    expected = []
    for one in plan.shards:
        placed = one.as_run(4)
        by_share = {}
        for index, replica in enumerate(placed.replicas):
            share = 1 / len(placed.replicas) if placed.fetch is None else placed.fetch.count(index) / 4
            by_share.setdefault(share, []).extend(replica)
        expected += [
            (local_shard(placed, group_batch_size=plan.group_batch_size, bags_share=share), ranks)
            for share, ranks in by_share.items()
        ]
    assert [(held.local, held.ranks.tolist()) for held in plan.held_shards()] == expected


@pytest.mark.parametrize("seed", range(12))
def test_tables_that_are_alike_are_priced_as_if_they_were_not(seed):
    # A feature that has its mean length for its 99th percentile is another one, and of the same price.
    plan = drawn_plan(seed, 4, 2)[0]
    alike, unlike = doubled(plan), doubled(plan, pooling_p99=0.0)
    validate_plan(alike)
    num_kinds = len(plan.arrays.first_K)
    assert (len(alike.arrays.first_K), len(unlike.arrays.first_K)) == (num_kinds, 2 * num_kinds)
    priced, apart = (evaluate(one, make.costs()) for one in (alike, unlike))
    assert priced.step_ms.value == pytest.approx(apart.step_ms.value, rel=1e-9)
    assert priced.ranks == apart.ranks


def test_sums_are_added_up_rank_by_rank_in_the_order_of_the_shards():
    rng = np.random.default_rng(3)
    ranks = [rng.permutation(5)[: rng.choice([1, 1, 1, 2, 5])] for _ in range(60)]
    values_MX = rng.normal(size=(60, 3)).astype(np.float32)
    expected_RX = np.zeros((5, 3), dtype=np.float32)
    for of, value_X in zip(ranks, values_MX, strict=True):
        for rank in of:
            expected_RX[rank] += value_X
    np.testing.assert_array_equal(sums_by_rank(values_MX, ranks, 5), expected_RX)
    huge_M = np.array([2**70] * 60, dtype=object)
    assert sums_by_rank(huge_M, ranks, 5).tolist() == [2**70 * sum(rank in of for of in ranks) for rank in range(5)]
