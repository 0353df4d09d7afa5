"""Explanations: what they say of other ways to hold a table is what plans that hold it so cost."""

from dataclasses import replace

import pytest

from autoshard.core import AccessProfile, Constraints, MemoryBytes, Provenance, Tier
from autoshard.core.errors import InvalidPlanError, InvalidTableError
from autoshard.evaluation import evaluate
from autoshard.evaluation.batch_memory import has_room, rank_memory
from autoshard.planners.explanation import explain
from autoshard.planners.registry import get_planner
from autoshard.planners.space.options import ShardingType, enumerate_options, placed_shard
from tests import builders as make

COSTS = make.costs()


@pytest.fixture
def task():
    tables, _ = make.draw_task(8, 4, seed=2)
    first, second, *others = tables.tables
    constrained = (
        replace(first, constraints=Constraints(forbidden_tiers=(Tier.ROW_WISE,))),
        replace(second, constraints=Constraints(pinned_ranks=(3,))),
        *others,
    )
    largest = max(table.storage_bytes for table in tables.tables)
    return replace(tables, tables=constrained), make.topology(2, 4, hbm=2 * largest, latency_s=1e-5)


@pytest.fixture
def plan(task):
    return get_planner("cost-greedy").plan(make.request(*task))


def test_alternatives_cost_what_such_plans_cost(plan):
    table = plan.tables.tables[4]
    found = explain(plan, COSTS, [table.name])
    assert found.step_ms == evaluate(plan, COSTS).step_ms.value
    (one,) = found.tables
    known = {other.option: other.step_ms for other in one.alternatives}
    for tier in (Tier.ROW_WISE, Tier.DATA_PARALLEL, Tier.FLEX):
        shards = tuple(
            placed_shard(placed.shard, tier, plan.topology) if placed.shard.table == table else placed
            for placed in plan.shards
        )
        placed = next(shard for shard in shards if shard.shard.table == table)
        other = evaluate(replace(plan, shards=shards), COSTS).step_ms.value
        # Explanations take the exchange that moves less.
        assert known[str(tier)] <= other * (1 + 1e-6), placed.exchange
    assert [other.step_ms for other in one.alternatives if other.step_ms is not None] == sorted(
        other.step_ms for other in one.alternatives if other.step_ms is not None
    )


def test_rows_in_tiers_are_explained(plan):
    table = replace(plan.tables.tables[4], access=AccessProfile.zipf(plan.tables.tables[4].num_embeddings, 1.2))
    tables = replace(plan.tables, tables=tuple(table if one.name == table.name else one for one in plan.tables.tables))
    tiered = next(one for one in enumerate_options(table, plan.topology) if one.name is ShardingType.ROW_TIERS)
    hot, rest = (part.placed(0, plan.topology) for part in tiered.parts)
    others = [placed for placed in plan.shards if placed.shard.table.name != table.name]
    found = explain(replace(plan, tables=tables, shards=(*others, hot, rest)), COSTS, [table.name])
    (one,) = found.tables
    assert (one.option, one.ranks) == (tiered.label, (0, 1, 2, 3))


def test_the_best_of_all_ranks_is_found(plan):
    # Of the ways on one node, the better node counts.
    table = plan.tables.tables[5]
    (one,) = explain(plan, COSTS, [table.name]).tables
    found = next(other.step_ms for other in one.alternatives if other.option == "table_row_wise")
    steps = []
    for node in range(2):
        ranks = tuple(range(2 * node, 2 * node + 2))
        shards = tuple(
            replace(
                placed_shard(placed.shard, Tier.ROW_WISE, plan.topology), tier=Tier.TABLE_ROW_WISE, replicas=(ranks,)
            )
            if placed.shard.table == table
            else placed
            for placed in plan.shards
        )
        steps.append(evaluate(replace(plan, shards=shards), COSTS).step_ms.value)
    assert found == pytest.approx(min(steps), rel=1e-6)


def test_constraints_and_memory_rule_ways_out(plan):
    found = {one.table: one for one in explain(plan, COSTS).tables}
    assert list(found) == [table.name for table in plan.tables.tables]
    reasons = {other.option: other.ruled_out for other in found["t0"].alternatives}
    assert reasons["row_wise"] == "the table forbids tier row_wise"
    pinned = found["t1"]
    assert pinned.ranks == (3,)
    assert all(
        other.ruled_out == "the table is pinned to rank 3" for other in pinned.alternatives if other.step_ms is None
    )
    tight = replace(plan, topology=replace(plan.topology, overrides=((1, replace(plan.topology.memory_bytes, hbm=1)),)))
    moved = tuple(
        replace(placed, replicas=((0,),)) if placed.replicas == ((1,),) else placed for placed in tight.shards
    )
    short = {one.table: one for one in explain(replace(tight, shards=moved), COSTS).tables}
    reasons = {other.option: other.ruled_out for other in short["t4"].alternatives}
    assert reasons["data_parallel"].endswith("iB of a rank, more than is free")


@pytest.mark.parametrize("reserved_bytes", [0, 1 << 20])
def test_ways_that_leave_no_room_for_training_or_the_reserve_are_ruled_out(plan, reserved_bytes):
    asked = Provenance(planner="auto", version="0", options={"reserved_bytes": reserved_bytes})
    used_bytes = max(one.used_bytes for one in rank_memory(plan, evaluate(plan, COSTS)))
    memory_bytes = MemoryBytes(hbm=used_bytes + reserved_bytes)
    plan = replace(plan, topology=replace(plan.topology, memory_bytes=memory_bytes, overrides=()), provenance=asked)
    for one in explain(plan, COSTS).tables:
        others = {other.option: other for other in one.alternatives}
        shards = tuple(
            placed_shard(placed.shard, Tier.DATA_PARALLEL, plan.topology)
            if placed.shard.table.name == one.table
            else placed
            for placed in plan.shards
        )
        assert not has_room(replace(plan, shards=shards), reserved_bytes)
        if one.option != "data_parallel" and one.table != "t1":  # t1 is pinned
            assert others["data_parallel"].step_ms is None
            assert others["data_parallel"].ruled_out.endswith(
                " of a rank beside what training needs, more than is free"
            )


def test_says_what_a_table_binds(plan):
    cost = evaluate(plan, COSTS)
    slowest = max(cost.ranks, key=lambda rank: rank.backward_kernel_ms).rank
    for one in explain(plan, COSTS).tables:
        assert ("backward_kernel" in one.binds) == (slowest in one.ranks)
        assert one.without_ms < cost.step_ms.value or not one.binds
        assert one.reason


def test_names_must_be_there(plan):
    with pytest.raises(InvalidTableError, match='no table of the plan is named "nobody"'):
        explain(plan, COSTS, ["nobody"])


def test_copies_on_some_ranks_are_refused(plan):
    first = plan.shards[4]
    copied = replace(
        placed_shard(first.shard, Tier.DATA_PARALLEL, plan.topology), tier=Tier.REPLICATED, replicas=((0,), (2,))
    )
    shards = tuple(copied if placed is first else placed for placed in plan.shards)
    with pytest.raises(InvalidPlanError, match="copies on some of the ranks"):
        explain(replace(plan, shards=shards), COSTS)


def test_the_costliest_tables_are_explained_as_among_all(plan):
    read = {one.name: one.pooling_factor * one.embedding_dim for one in plan.tables.tables}
    costliest = sorted(read, key=read.get)[-3:]
    every = {one.table: one for one in explain(plan, COSTS).tables}
    few = explain(plan, COSTS, most=3).tables
    assert {one.table for one in few} == set(costliest)
    for one in few:
        assert [other.option for other in one.alternatives] == [other.option for other in every[one.table].alternatives]
        assert one.without_ms == pytest.approx(every[one.table].without_ms)


def test_tables_that_are_alike_share_their_alternatives(plan):
    first = plan.tables.tables[4]
    twin = replace(first, name="twin", features=(replace(first.features[0], name="twin"),))
    placed = next(one for one in plan.shards if one.shard.table == first)
    again = replace(placed, shard=replace(placed.shard, table=twin))
    tables = replace(plan.tables, tables=(*plan.tables.tables, twin))
    one, other = (
        explain(replace(plan, tables=tables, shards=(*plan.shards, again)), COSTS, [name]).tables[0]
        for name in (first.name, "twin")
    )
    assert len(one.alternatives) == len(other.alternatives) > 5
