"""Sharding types that tables or machines cannot have: the reason is told, by the type's name."""

import re
from dataclasses import replace

import pytest

from autoshard.core import Constraints, MemoryBytes, Pooling, Tier
from autoshard.core.errors import InfeasiblePlanError
from autoshard.formats import load_topology
from autoshard.planners.neo import NEO_TYPES
from autoshard.planners.space.options import ShardingType
from autoshard.planning import make_costs, make_plan
from tests import builders as make

ONE_NODE, NODES = load_topology("a100-8"), load_topology("a100-32")
ONE_RANK = replace(ONE_NODE, world_size=1, levels=(replace(ONE_NODE.levels[0], size=1),))
SMALL = replace(ONE_NODE, memory_bytes=MemoryBytes(hbm=4000))
NARROW, SEQUENCE = {"embedding_dim": 4}, {"pooling": Pooling.SEQUENCE}
CUTS_ROWS = {ShardingType.ROW_TIERS, ShardingType.ROW_GROUPS}
OF_NODES = {ShardingType.TABLE_ROW_WISE, ShardingType.FLEX, ShardingType.TABLE_COLUMN_WISE, ShardingType.GRID}
SITUATIONS = {
    "one rank": (ONE_RANK, {}),
    "one node": (ONE_NODE, {}),
    "nodes": (NODES, {}),
    "sequence": (ONE_NODE, SEQUENCE),
    "sequence, nodes": (NODES, SEQUENCE),
    "narrow": (ONE_NODE, NARROW),
    "narrow, nodes": (NODES, NARROW),
    "small": (SMALL, {}),
}


def request_of(topology, names, *, constraints=(), **fields):
    table = make.table("t", **{"embedding_dim": 64, "constraints": Constraints(**dict(constraints)), **fields})
    tables = make.tables(replace(table, row_order=None), batch_size=1024)
    options = {"sharding_types": ",".join(names)}
    return make.request(tables, topology, costs=make_costs(tables, topology), options=options, time_limit_s=0.05)


def told(planner, request):
    """Tiers of the plan, or the error."""
    try:
        return {placed.tier for placed in make_plan(planner, request).shards}
    except InfeasiblePlanError as error:
        return str(error)


@pytest.mark.parametrize("situation", SITUATIONS)
@pytest.mark.parametrize("name", ShardingType)
def test_every_sharding_type_gives_a_plan_or_the_reason(situation, name):
    topology, changes = SITUATIONS[situation]
    is_there = not (
        (name in CUTS_ROWS)
        or (name in OF_NODES and topology is not NODES)
        or (topology is ONE_RANK and name not in (ShardingType.TABLE_WISE, ShardingType.COLUMN_WISE))
    )
    # 1,000 rows of 64 columns take 260,000 bytes; over 8 ranks 32,500, more than the 4,000 of each.
    fits = topology is not SMALL
    for planner in ("auto", "neo") if name in NEO_TYPES else ("auto",):
        found = told(planner, request_of(topology, [name], **changes))
        assert isinstance(found, set) == (is_there and fits), (planner, found)
        if isinstance(found, set):
            continue
        assert "constraints" not in found
        if not is_there:
            assert found.startswith(f"t: {name} needs "), found
            reasons = ("rows by lookups", "several nodes of several ranks", "several ranks, there is 1")
            assert any(reason in found for reason in reasons), found
        else:
            assert re.search(make.AMOUNT, found), found


@pytest.mark.parametrize(("dim", "num_shards"), [(4, 1), (8, 1), (12, 1), (64, 8)])
@pytest.mark.parametrize("planner", ["auto", "neo"])
def test_tables_too_narrow_to_be_cut_are_one_column_shard(planner, dim, num_shards):
    plan = make_plan(planner, request_of(ONE_NODE, ["column_wise"], embedding_dim=dim))
    assert {placed.tier for placed in plan.shards} == {Tier.TABLE_WISE}
    assert 1 < len(plan.shards) <= num_shards if num_shards > 1 else len(plan.shards) == 1


@pytest.mark.parametrize("planner", ["auto", "neo"])
def test_constraints_are_named_where_the_user_gave_them(planner):
    forbidden = request_of(ONE_NODE, ["row_wise", "data_parallel"], constraints={"pinned_ranks": (3,)})
    pinned = "the table is pinned to rank 3 "
    assert told(planner, forbidden) == f"t: no sharding type is left: {pinned}(data_parallel, row_wise)"
    only = request_of(ONE_NODE, ["row_wise"], constraints={"forbidden_tiers": (Tier.ROW_WISE,)})
    assert told(planner, only) == "t: no sharding type is left: the table forbids tier row_wise (row_wise)"


def test_a_short_limit_never_leaves_out_what_constraints_need():
    """Within milliseconds, `auto` offers whole tables only; a table that forbids them gets all that it may have."""
    forbidden = {"forbidden_tiers": (Tier.TABLE_WISE, Tier.DATA_PARALLEL)}
    request = replace(request_of(NODES, ["all"], constraints=forbidden), time_limit_s=1e-4)
    assert told("auto", request) <= {Tier.ROW_WISE, Tier.TABLE_ROW_WISE, Tier.FLEX}
