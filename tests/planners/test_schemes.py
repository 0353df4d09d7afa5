"""Ways to hold a table: they tile it, they are what their names say, and constraints rule out what they should."""

from dataclasses import replace

import pytest

from autoshard.core import (
    AccessProfile,
    Constraints,
    Exchange,
    Level,
    Link,
    Pooling,
    Shard,
    ShardingPlan,
    TableSet,
    Tier,
)
from autoshard.evaluation.validator import validate_plan
from autoshard.planners.schemes import (
    COLUMN_STEP,
    Hold,
    SchemeName,
    allowed_sites,
    cheaper_exchange,
    column_cuts,
    scheme_of_plan,
    schemes_of,
    why_not,
)

LINK = Link(bytes_per_s=1e9)


@pytest.fixture
def two_nodes(make_topology):
    levels = tuple(Level(name=f"level{size}", size=size, all_to_all=LINK, all_reduce=LINK) for size in (4, 8))
    return replace(make_topology(8), levels=levels)


@pytest.fixture
def table(make_table):
    return replace(make_table("t", 5000, embedding_dim=68), access=AccessProfile.zipf(5000, 1.1))


def plan_of(scheme, topology):
    """The scheme with each part at another site."""
    node = topology.local_world_size
    sites = [
        index % (node if scheme.in_one_node else part.hold.num_sites(topology))
        for index, part in enumerate(scheme.parts)
    ]
    shards = tuple(part.placed(site, topology) for part, site in zip(scheme.parts, sites, strict=True))
    return ShardingPlan(tables=TableSet(batch_size=64, tables=(scheme.table,)), topology=topology, shards=shards), sites


@pytest.mark.parametrize("pooling", [Pooling.SUM, Pooling.SEQUENCE])
def test_every_scheme_makes_a_valid_plan_from_which_it_is_read_again(table, two_nodes, pooling):
    schemes = schemes_of(replace(table, pooling=pooling), two_nodes)
    assert {scheme.name for scheme in schemes} == set(SchemeName) - {SchemeName.ROW_GROUPS}
    for scheme in schemes:
        plan, sites = plan_of(scheme, two_nodes)
        validate_plan(plan)
        found, at = scheme_of_plan(plan, "t")
        assert (found.parts, list(at)) == (scheme.parts, sites)


def test_what_is_the_same_on_a_machine_is_listed_once(table, make_topology):
    assert [scheme.name for scheme in schemes_of(table, make_topology(1))] == [SchemeName.TABLE_WISE]
    of_one_node = {scheme.name for scheme in schemes_of(table, make_topology(8))}
    assert of_one_node.isdisjoint(
        {SchemeName.FLEX, SchemeName.GRID, SchemeName.TABLE_ROW_WISE, SchemeName.TABLE_COLUMN_WISE}
    )


def test_ranks_hold_what_the_part_says(table, two_nodes):
    for scheme in schemes_of(table, two_nodes):
        plan, _ = plan_of(scheme, two_nodes)
        held = {local for locals_ in plan.local_shards() for local in locals_}
        assert held == {part.local(two_nodes, 64) for part in scheme.parts}


@pytest.mark.parametrize(("dim", "count"), [(64, 4), (68, 4), (70, 3), (6, 8), (4, 2)])
def test_column_shards_tile_the_table_in_steps_of_four(make_table, dim, count):
    cuts = column_cuts(Shard.whole(make_table("t", embedding_dim=dim)), count)
    assert len(cuts) == min(count, -(-dim // COLUMN_STEP))
    assert [cut.columns[0] for cut in cuts[1:]] == [cut.columns[1] for cut in cuts[:-1]]
    assert (cuts[0].columns[0], cuts[-1].columns[1]) == (0, dim)
    assert all(cut.columns[0] % COLUMN_STEP == 0 for cut in cuts)
    widths = [cut.embedding_dim for cut in cuts]
    assert max(widths) - min(widths) <= COLUMN_STEP


def test_owners_send_what_is_less(make_table):
    # 4 lookups a bag: over 2 owners two rows each are more than one sum, over 8 owners half a row is less.
    shard = Shard.whole(make_table("t", pooling_factor=4.0))
    assert [cheaper_exchange(shard, owners) for owners in (1, 2, 8)] == [
        Exchange.PARTIAL_SUMS,
        Exchange.PARTIAL_SUMS,
        Exchange.ROWS,
    ]


def test_constraints_say_what_they_rule_out(table, two_nodes):
    pinned = replace(table, constraints=Constraints(pinned_ranks=(4, 5, 6, 7)))
    left = {scheme.name for scheme in schemes_of(pinned, two_nodes) if not why_not(scheme, two_nodes)}
    assert left == {
        *(SchemeName.TABLE_WISE, SchemeName.COLUMN_WISE, SchemeName.TABLE_ROW_WISE),
        *(SchemeName.TABLE_COLUMN_WISE, SchemeName.GRID),
    }
    by_name = {scheme.name: scheme for scheme in schemes_of(pinned, two_nodes)}
    assert allowed_sites(by_name[SchemeName.TABLE_ROW_WISE].parts[0], two_nodes) == (1,)
    assert why_not(by_name[SchemeName.ROW_WISE], two_nodes) == "the table is pinned to ranks 4, 5, 6, 7"
    barred = replace(table, constraints=Constraints(forbidden_tiers=(Tier.DATA_PARALLEL,)))
    reasons = {scheme.name: why_not(scheme, two_nodes) for scheme in schemes_of(barred, two_nodes)}
    assert reasons[SchemeName.ROW_TIERS] == reasons[SchemeName.DATA_PARALLEL] == "the table forbids tier data_parallel"
    assert not reasons[SchemeName.FLEX]
    paired = replace(table, constraints=Constraints(colocate_with=("u",)))
    reasons = {scheme.name: why_not(scheme, two_nodes) for scheme in schemes_of(paired, two_nodes)}
    assert reasons[SchemeName.COLUMN_WISE] == "the table must be on the ranks of u"
    assert not reasons[SchemeName.ROW_WISE]


def test_holds_say_how_many_ranks_take_part(two_nodes):
    for hold in Hold:
        replicas = hold.replicas(0, two_nodes)
        assert hold.num_replicas(two_nodes) == len(replicas)
        assert hold.num_owners(two_nodes) == len(replicas[0])
        assert hold.num_holders(two_nodes) == len({rank for replica in replicas for rank in replica})
