"""Rows in shares as uneven as the memory of ranks: they tile tables, fit every rank, and stand beside even ones.

Shape suffix: R ranks.
"""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st

from autoshard.core import (
    AccessProfile,
    Constraints,
    CostModels,
    MemoryBytes,
    Pooling,
    RowsBy,
    ShardingPlan,
    TableSet,
    Tier,
)
from autoshard.core.errors import InfeasiblePlanError
from autoshard.evaluation import AlphaBetaComm, AnalyticCostModel, evaluate
from autoshard.planners.hybrid.explanation import explain
from autoshard.planners.hybrid.layout import Limits
from autoshard.planners.hybrid.option_offers import space_of
from autoshard.planners.hybrid.starts import balanced_starts, layout_of
from autoshard.planners.registry import get_planner
from autoshard.planners.space.options import ShardingType
from autoshard.planners.space.uneven_rows import room_of_ranks, uneven_options
from autoshard.validator import validate_plan

ROW_WISE = {"sharding_types": "row_wise", "steps": 6, "policy": False}


@pytest.fixture(scope="session")
def uneven(make_topology):
    """A topology whose ranks have so many bytes each."""

    def make(*hbm_bytes, device="cpu"):
        overrides = tuple((rank, MemoryBytes(hbm=int(size))) for rank, size in enumerate(hbm_bytes))
        return replace(make_topology(len(hbm_bytes), overrides=overrides), device=device)

    return make


@pytest.fixture(scope="session")
def filling(make_table, uneven):
    """A task of tables with such shares of the memory of all ranks, which is so uneven."""

    def make(sizes, *shares, device="cpu", alpha=1.05):
        hbm_R = np.array(sizes) * (64 << 20)
        tables = []
        for index, share in enumerate(shares):
            rows = int(share * hbm_R.sum() / (64 * 4 + 4))
            table = make_table(f"t{index}", rows, embedding_dim=64)
            tables.append(replace(table, access=AccessProfile.zipf(rows, alpha)))
        return TableSet(batch_size=64, tables=tuple(tables)), uneven(*hbm_R, device=device)

    return make


def held_bytes(plan):
    return np.array([cost.hbm_bytes for cost in evaluate(plan, costs_of(plan.topology.device)).ranks])


def costs_of(device):
    return CostModels(kernel=AnalyticCostModel.for_device(device), comm=AlphaBetaComm())


def placed(option, tables, topology):
    """The option at the only sites that its parts have."""
    shards = tuple(part.placed(part.rank or 0, topology) for part in option.parts)
    return ShardingPlan(tables=tables, topology=topology, shards=shards)


@settings(max_examples=30, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 400_000), min_size=2, max_size=7).filter(lambda sizes: len(set(sizes)) > 1),
    share=st.floats(0.05, 1.0),
    pooling=st.sampled_from([Pooling.SUM, Pooling.SEQUENCE]),
    has_order=st.booleans(),
)
def test_shares_tile_the_table_and_are_those_of_the_memory(make_table, make_topology, sizes, share, pooling, has_order):
    room_R = np.array(sizes, dtype=np.float64)
    bytes_per_row = 16 * 4 + 4
    table = make_table("t", max(1, int(share * room_R.sum() / bytes_per_row)), pooling=pooling)
    table = table if has_order else replace(table, row_order=None)
    tables, topology = TableSet(batch_size=64, tables=(table,)), make_topology(len(sizes))
    plans = [placed(option, tables, topology) for option in uneven_options(table, topology, room_R)]
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


def test_hot_rows_are_even(filling):
    tables, topology = filling((1, 1, 1, 2), 0.9)
    (table,) = tables.tables
    for option in uneven_options(table, topology, room_of_ranks(tables, topology)):
        even, *ranges = option.parts
        assert (even.tier, even.shard.rows.start) == (Tier.ROW_WISE, 0)
        assert even.shard.access()[1] > 0.97 > even.shard.num_embeddings / table.num_embeddings
        assert [part.rank for part in ranges] == [3]
        assert option.label.startswith("row_wise 9")


def test_none_are_offered_where_memory_is_alike_or_too_little(make_table, uneven, make_request):
    table = make_table("t", 10_000)
    tables = TableSet(batch_size=64, tables=(table,))
    size = table.storage_bytes
    for topology in (uneven(size, size), uneven(size // 4, size // 2)):
        assert uneven_options(table, topology, room_of_ranks(tables, topology)) == []
        options = [option for item in space_of(make_request((tables, topology))).items for option in item.options]
        assert not any(option.is_uneven for option in options)


def test_small_tables_stay_even(make_table, uneven, make_request):
    small, large = make_table("small", 1000), make_table("large", 10_000)
    topology = uneven(large.storage_bytes, 2 * large.storage_bytes)
    space = space_of(make_request((TableSet(batch_size=64, tables=(small, large)), topology)))
    offered = [any(option.is_uneven for option in item.options) for item in space.items]
    assert offered == [False, True]


def test_what_a_rank_has_to_hold_makes_ranks_differ(make_table, make_topology, make_request):
    """Ranks alike, of which one is half full with a table pinned to it."""
    pinned = make_table("pinned", 10_000, constraints=Constraints(pinned_ranks=(1, 1)))
    large = make_table("large", 50_000)
    topology = make_topology(4, hbm_bytes=2 * pinned.storage_bytes)
    tables = TableSet(batch_size=64, tables=(pinned, large))
    free = 2 * pinned.storage_bytes
    assert room_of_ranks(tables, topology).tolist() == [free, free // 2, free, free]
    request = make_request((tables, topology), options=ROW_WISE | {"sharding_types": "table_wise,row_wise"})
    plan = get_planner("auto").plan(replace(request, options=request.options | {"count_activations": False}))
    validate_plan(plan)
    assert held_bytes(plan).tolist() == pytest.approx([1.5 * pinned.storage_bytes] * 4, rel=0.2)


@pytest.mark.parametrize("types", ["all", "row_wise"])
@pytest.mark.parametrize("device", ["cpu", "a100"])
@pytest.mark.parametrize("alpha", [0.0, 1.05])
def test_a_table_that_only_fits_unevenly_is_placed(filling, make_request, types, device, alpha):
    """Four ranks, one of them with twice the memory, and a table of nine tenths of all of it."""
    task = filling((1, 1, 1, 2), 0.9, device=device, alpha=alpha)
    request = replace(make_request(task, options=ROW_WISE | {"sharding_types": types}), costs=costs_of(device))
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
def test_rows_fit_every_rank_whatever_its_memory(filling, make_request, sizes, weights, fill):
    shares = [fill * weight / sum(weights) for weight in weights]
    tables, topology = filling(sizes, *shares)
    try:
        plan = get_planner("auto").plan(make_request((tables, topology), options=ROW_WISE))
    except InfeasiblePlanError:
        # Several tables that are all cut by rows may find no room: ways are tried one table after the other.
        assert len(weights) > 1
        reject()
    validate_plan(plan)
    assert (held_bytes(plan) <= [topology.memory_of(rank).hbm for rank in range(topology.world_size)]).all()


def test_starts_without_uneven_shares_remain(filling, make_request):
    space = space_of(make_request(filling((1, 1, 2, 2), 0.3, 0.2, 0.1)))
    starts = balanced_starts(space, Limits.of(space))
    options = [
        [space.items[item].options[start.layout.choice(item)[0]] for item in range(len(space.items))]
        for start in starts
    ]
    assert {any(option.is_uneven for option in of_start) for of_start in options} == {False, True}


def test_a_plan_with_uneven_shares_is_read_again(filling, make_request):
    task = filling((1, 1, 1, 2), 0.9)
    request = make_request(task, options=ROW_WISE)
    plan = get_planner("auto").plan(request)
    space = space_of(request)
    num_options = len(space.items[0].options)
    layout = layout_of(space, Limits.of(space), plan, {ShardingType.ROW_WISE})
    assert layout.plan().shards == plan.shards
    assert len(space.items[0].options) == num_options
    assert layout.step_ms() == pytest.approx(evaluate(plan, request.costs).step_ms.value, rel=1e-5)
    again = get_planner("auto").plan(replace(request, start=plan))
    assert again.shards == plan.shards


def test_explained_bytes_are_those_of_the_fullest_rank(filling, make_request):
    task = filling((1, 1, 1, 2), 0.9)
    request = make_request(task, options=ROW_WISE)
    plan = get_planner("auto").plan(request)
    (table,) = explain(plan, request.costs).tables
    assert table.option.startswith("row_wise 9")
    assert table.hbm_bytes == held_bytes(plan).max()
