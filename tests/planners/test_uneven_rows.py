"""Rows in shares as uneven as the memory of ranks: they tile tables, fit every rank, and stand beside even ones.

Shape suffix: R ranks.
"""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st

from autoshard.core import (
    Constraints,
    Pooling,
    RowsBy,
    Tier,
)
from autoshard.core.errors import InfeasiblePlanError
from autoshard.evaluation import evaluate
from autoshard.planners.explanation import explain
from autoshard.planners.hybrid.option_offers import space_of
from autoshard.planners.hybrid.starts import balanced_starts, layout_of
from autoshard.planners.registry import get_planner
from autoshard.planners.space.layout import Limits
from autoshard.planners.space.options import ShardingType
from autoshard.planners.space.uneven_rows import room_of_ranks, uneven_options
from autoshard.validator import validate_plan
from tests import builders as make

ROW_WISE = {"sharding_types": "row_wise", "steps": 6, "policy": False}


def filling(sizes, *shares, device="cpu", alpha=1.05):
    """A task of tables with such shares of the memory of all ranks, which is so uneven."""
    hbm_R = np.array(sizes) * (64 << 20)
    rows = [int(share * hbm_R.sum() / (64 * 4 + 4)) for share in shares]
    of = [make.table(f"t{index}", size, 64, alpha=alpha) for index, size in enumerate(rows)]
    return make.tables(*of), make.uneven(*hbm_R, device=device)


def held_bytes(plan):
    return np.array([cost.hbm_bytes for cost in evaluate(plan, make.costs(plan.topology.device)).ranks])


@settings(max_examples=30, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 400_000), min_size=2, max_size=7).filter(lambda sizes: len(set(sizes)) > 1),
    share=st.floats(0.05, 1.0),
    pooling=st.sampled_from([Pooling.SUM, Pooling.SEQUENCE]),
    has_order=st.booleans(),
)
def test_shares_tile_the_table_and_are_those_of_the_memory(sizes, share, pooling, has_order):
    room_R = np.array(sizes, dtype=np.float64)
    bytes_per_row = 16 * 4 + 4
    table = make.table("t", max(1, int(share * room_R.sum() / bytes_per_row)), pooling=pooling)
    table = table if has_order else replace(table, row_order=None)
    topology = make.topology(len(sizes))
    # Each option at the only sites that its parts have.
    plans = [
        make.plan(*(part.placed(part.rank or 0, topology) for part in option.parts), topology=topology)
        for option in uneven_options(table, topology, room_R)
    ]
    # A row of rounding for the part on all ranks, and one for the range.
    slack = 2 * len(sizes) * bytes_per_row
    for plan in plans:
        validate_plan(plan)
        ranges = [one for one in plan.shards if one.tier is Tier.TABLE_WISE]
        assert len({one.replicas for one in ranges}) == len(ranges)
        assert {one.shard.rows.by for one in plan.shards} == {RowsBy.ACCESS_RANK if has_order else RowsBy.INDEX}
        held_R = held_bytes(plan)
        assert (held_R <= room_R + slack).all()
        is_proportional = np.abs(held_R - table.storage_bytes * room_R / room_R.sum()).max() <= slack
        free_R = (room_R - held_R)[held_R > slack]
        is_level = len(free_R) == 0 or free_R.max() - free_R.min() <= 2 * slack
        assert is_proportional or is_level
    # Shares that no row is too small for, of several ranks.
    falling = sorted(sizes, reverse=True)
    is_distinct = min(falling[0] - falling[-1], falling[1]) * share > 4 * slack
    assert plans or not is_distinct


def test_hot_rows_are_even():
    tables, topology = filling((1, 1, 1, 2), 0.9)
    (table,) = tables.tables
    for option in uneven_options(table, topology, room_of_ranks(tables, topology)):
        even, *ranges = option.parts
        assert (even.tier, even.shard.rows.start) == (Tier.ROW_WISE, 0)
        assert even.shard.access()[1] > 0.97 > even.shard.num_embeddings / table.num_embeddings
        assert [part.rank for part in ranges] == [3]
        assert option.label.startswith("row_wise 9")


def test_none_are_offered_where_memory_is_alike_or_too_little():
    table = make.table("t", 10_000)
    tables = make.tables(table)
    size = table.storage_bytes
    for topology in (make.uneven(size, size), make.uneven(size // 4, size // 2)):
        assert uneven_options(table, topology, room_of_ranks(tables, topology)) == []
        options = [option for item in space_of(make.request(tables, topology)).items for option in item.options]
        assert not any(option.is_uneven for option in options)


def test_small_tables_stay_even():
    small, large = make.table("small", 1000), make.table("large", 10_000)
    topology = make.uneven(large.storage_bytes, 2 * large.storage_bytes)
    space = space_of(make.request(make.tables(small, large), topology))
    offered = [any(option.is_uneven for option in item.options) for item in space.items]
    assert offered == [False, True]


def test_what_a_rank_has_to_hold_makes_ranks_differ():
    """Ranks alike, of which one is half full with a table pinned to it."""
    pinned = make.table("pinned", 10_000, constraints=Constraints(pinned_ranks=(1, 1)))
    large = make.table("large", 50_000)
    topology = make.topology(4, hbm=2 * pinned.storage_bytes)
    tables = make.tables(pinned, large)
    free = 2 * pinned.storage_bytes
    assert room_of_ranks(tables, topology).tolist() == [free, free // 2, free, free]
    request = make.request(tables, topology, options=ROW_WISE | {"sharding_types": "table_wise,row_wise"})
    plan = get_planner("auto").plan(replace(request, options=request.options | {"count_activations": False}))
    validate_plan(plan)
    assert held_bytes(plan).tolist() == pytest.approx([1.5 * pinned.storage_bytes] * 4, rel=0.2)


@pytest.mark.parametrize("types", ["all", "row_wise"])
@pytest.mark.parametrize("device", ["cpu", "a100"])
@pytest.mark.parametrize("alpha", [0.0, 1.05])
def test_a_table_that_only_fits_unevenly_is_placed(types, device, alpha):
    """Four ranks, one of them with twice the memory, and a table of nine tenths of all of it."""
    task = filling((1, 1, 1, 2), 0.9, device=device, alpha=alpha)
    request = make.request(*task, options=ROW_WISE | {"sharding_types": types}, time_limit_s=60.0)
    plan = get_planner("auto").plan(request)
    validate_plan(plan)
    assert plan == get_planner("auto").plan(request)
    assert (held_bytes(plan) <= [task[1].memory_of(rank).hbm for rank in range(4)]).all()


@pytest.mark.slow
@settings(max_examples=8, deadline=None)
@given(
    sizes=st.lists(st.sampled_from([0.5, 1.0, 1.5, 2.0, 3.0]), min_size=2, max_size=6),
    weights=st.lists(st.floats(0.1, 2.0), min_size=1, max_size=5),
    fill=st.floats(0.2, 0.65),
)
def test_rows_fit_every_rank_whatever_its_memory(sizes, weights, fill):
    shares = [fill * weight / sum(weights) for weight in weights]
    tables, topology = filling(sizes, *shares)
    try:
        plan = get_planner("auto").plan(make.request(tables, topology, options=ROW_WISE, time_limit_s=60.0))
    except InfeasiblePlanError:
        # Several tables that are all cut by rows may find no room: ways are tried one table after the other.
        assert len(weights) > 1
        reject()
    validate_plan(plan)
    assert (held_bytes(plan) <= [topology.memory_of(rank).hbm for rank in range(topology.world_size)]).all()


def test_starts_without_uneven_shares_remain():
    space = space_of(make.request(*filling((1, 1, 2, 2), 0.3, 0.2, 0.1)))
    starts = balanced_starts(space, Limits.of(space))
    options = [
        [space.items[item].options[start.layout.choice(item)[0]] for item in range(len(space.items))]
        for start in starts
    ]
    assert {any(option.is_uneven for option in of_start) for of_start in options} == {False, True}


def test_a_plan_with_uneven_shares_is_read_again():
    task = filling((1, 1, 1, 2), 0.9)
    request = make.request(*task, options=ROW_WISE, time_limit_s=60.0)
    plan = get_planner("auto").plan(request)
    space = space_of(request)
    num_options = len(space.items[0].options)
    layout = layout_of(space, Limits.of(space), plan, {ShardingType.ROW_WISE})
    assert layout.plan().shards == plan.shards
    assert len(space.items[0].options) == num_options
    assert layout.step_ms() == pytest.approx(evaluate(plan, request.costs).step_ms.value, rel=1e-5)
    again = get_planner("auto").plan(replace(request, start=plan))
    assert again.shards == plan.shards


def test_explained_bytes_are_those_of_the_fullest_rank():
    task = filling((1, 1, 1, 2), 0.9)
    request = make.request(*task, options=ROW_WISE, time_limit_s=60.0)
    plan = get_planner("auto").plan(request)
    (table,) = explain(plan, request.costs).tables
    assert table.option.startswith("row_wise 9")
    assert table.hbm_bytes == held_bytes(plan).max()
