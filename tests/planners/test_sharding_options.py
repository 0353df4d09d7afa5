"""Ways to hold a table: they tile it, they are what their names say, and constraints rule out what they should."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoshard.core import (
    Constraints,
    DType,
    Exchange,
    Feature,
    Optimizer,
    Pooling,
    RowRange,
    RowsBy,
    Shard,
    Tier,
)
from autoshard.core.plan import Payload
from autoshard.evaluation.traffic import Stream, cheaper_exchange, pair_bytes
from autoshard.planners.space.constraints import allowed_sites
from autoshard.planners.space.options import (
    COLUMN_STEP,
    ShardingType,
    UnplacedShard,
    column_cuts,
    enumerate_options,
    option_of_placed,
    placed_shard,
    why_not,
)
from autoshard.planners.space.tiers import (
    num_holders,
    num_owners,
    num_replicas,
    num_sites,
    replicas_at,
    site_of,
)
from autoshard.validator import validate_plan
from tests import builders as make


@pytest.fixture
def two_nodes():
    return make.topology(4, 8)


@pytest.fixture
def table():
    return make.table("t", 5000, 68, alpha=1.1)


def plan_of(scheme, topology):
    """The scheme with each part at another site."""
    node = topology.local_world_size
    sites = [
        index % (node if scheme.in_one_node else num_sites(part.tier, topology))
        for index, part in enumerate(scheme.parts)
    ]
    shards = tuple(part.placed(site, topology) for part, site in zip(scheme.parts, sites, strict=True))
    return make.plan(*shards, topology=topology), sites


@pytest.mark.parametrize("pooling", [Pooling.SUM, Pooling.SEQUENCE])
def test_every_scheme_makes_a_valid_plan_from_which_it_is_read_again(table, two_nodes, pooling):
    schemes = enumerate_options(replace(table, pooling=pooling), two_nodes)
    assert {scheme.name for scheme in schemes} == set(ShardingType)
    for scheme in schemes:
        plan, sites = plan_of(scheme, two_nodes)
        validate_plan(plan)
        found, at = option_of_placed(plan.shards, two_nodes)
        assert (found.parts, list(at)) == (scheme.parts, sites)


def test_what_is_the_same_on_a_machine_is_listed_once(table):
    assert [scheme.name for scheme in enumerate_options(table, make.topology(1))] == [ShardingType.TABLE_WISE]
    of_one_node = {scheme.name for scheme in enumerate_options(table, make.topology(8))}
    assert of_one_node.isdisjoint(
        {ShardingType.FLEX, ShardingType.GRID, ShardingType.TABLE_ROW_WISE, ShardingType.TABLE_COLUMN_WISE}
    )


def test_ranks_hold_what_the_part_says(table, two_nodes):
    for scheme in enumerate_options(table, two_nodes):
        plan, _ = plan_of(scheme, two_nodes)
        held = {local for locals_ in plan.local_shards() for local in locals_}
        assert held == {part.local(two_nodes, 64) for part in scheme.parts}


@pytest.mark.parametrize(("dim", "count"), [(64, 4), (68, 4), (70, 3), (6, 8), (4, 2)])
def test_column_shards_tile_the_table_in_steps_of_four(dim, count):
    cuts = column_cuts(Shard.whole(make.table("t", embedding_dim=dim)), count)
    assert len(cuts) == min(count, -(-dim // COLUMN_STEP))
    assert [cut.columns[0] for cut in cuts[1:]] == [cut.columns[1] for cut in cuts[:-1]]
    assert (cuts[0].columns[0], cuts[-1].columns[1]) == (0, dim)
    assert all(cut.columns[0] % COLUMN_STEP == 0 for cut in cuts)
    widths = [cut.embedding_dim for cut in cuts]
    assert max(widths) - min(widths) <= COLUMN_STEP


@pytest.mark.parametrize("least", [1, 4, 10, 16, 33])
def test_column_shards_have_at_least_as_many_columns_as_asked(least):
    for dim in (4, 20, 64, 130):
        table = make.table("t", embedding_dim=dim)
        options = enumerate_options(table, make.topology(8), (ShardingType.COLUMN_WISE,), min_partition=least)
        widths = [part.shard.embedding_dim for option in options for part in option.parts]
        can_be_cut = dim >= 2 * COLUMN_STEP * -(-least // COLUMN_STEP)
        assert all(width >= max(least, COLUMN_STEP) for width in widths) if can_be_cut else widths == [dim]


@given(
    tier=st.sampled_from([Tier.ROW_WISE, Tier.FLEX, Tier.DATA_PARALLEL]),
    pooling=st.sampled_from([Pooling.SUM, Pooling.MEAN, Pooling.SEQUENCE]),
    lookups=st.lists(st.floats(0.01, 40), min_size=1, max_size=3),
    bounds=st.lists(st.integers(0, 100), min_size=2, max_size=2, unique=True).map(sorted),
    columns=st.sampled_from([(0, 16), (4, 12)]),
    alpha=st.floats(0, 2),
)
def test_owners_send_what_is_less(tier, pooling, lookups, bounds, columns, alpha):
    table = make.table(
        "t",
        100,
        alpha=alpha,
        pooling=pooling,
        features=tuple(Feature(name=f"f{index}", pooling_factor=one) for index, one in enumerate(lookups)),
    )
    rows = RowRange(start=bounds[0], stop=bounds[1], by=RowsBy.ACCESS_RANK)
    shard = Shard(table=table, rows=rows, columns=columns)
    topology = make.topology(4, 8)
    held = placed_shard(shard, tier, topology)

    def forward_bytes(exchange):
        placed = replace(held, exchange=exchange)
        by_stream = pair_bytes([placed], 64, Payload(), id_bytes=4, lookups_factor_N=[1.0])[0]
        return by_stream[list(Stream).index(Stream.FORWARD)]

    if pooling is Pooling.SEQUENCE:
        assert held.exchange is Exchange.ROWS
    elif tier is Tier.DATA_PARALLEL:
        assert held.exchange is Exchange.PARTIAL_SUMS  # each rank pools its own copies, and nothing is sent
    else:
        # Roundings of the two sides' products may differ in the last bit.
        assert forward_bytes(held.exchange) <= min(map(forward_bytes, Exchange)) * (1 + 1e-12)
    assert UnplacedShard.of(shard, Tier.TABLE_WISE, topology).placed(3, topology) == placed_shard(
        shard, Tier.TABLE_WISE, topology, 3
    )


def test_rows_over_eight_ranks_are_sent_by_lookup():
    # 3 lookups a bag: over 2 owners a row and a half each is more than one sum, over 8 owners 3/8 of a row is less.
    shard = Shard.whole(make.table("t", pooling_factor=3.0))
    wanted = [Exchange.PARTIAL_SUMS, Exchange.PARTIAL_SUMS, Exchange.ROWS]
    assert [cheaper_exchange(shard, owners) for owners in (1, 2, 8)] == wanted
    assert placed_shard(shard, Tier.ROW_WISE, make.topology(4, 8)).exchange is Exchange.ROWS


def test_constraints_say_what_they_rule_out(table, two_nodes):
    pinned = replace(table, constraints=Constraints(pinned_ranks=(4, 5, 6, 7)))
    left = {scheme.name for scheme in enumerate_options(pinned, two_nodes) if not why_not(scheme, two_nodes)}
    assert left == {
        *(ShardingType.TABLE_WISE, ShardingType.COLUMN_WISE, ShardingType.TABLE_ROW_WISE),
        *(ShardingType.TABLE_COLUMN_WISE, ShardingType.GRID, ShardingType.ROW_GROUPS),
    }
    by_name = {scheme.name: scheme for scheme in enumerate_options(pinned, two_nodes)}
    assert allowed_sites(pinned, Tier.TABLE_ROW_WISE, two_nodes).tolist() == [False, True]
    assert why_not(by_name[ShardingType.ROW_WISE], two_nodes) == "the table is pinned to ranks 4, 5, 6, 7"
    barred = replace(table, constraints=Constraints(forbidden_tiers=(Tier.DATA_PARALLEL,)))
    reasons = {scheme.name: why_not(scheme, two_nodes) for scheme in enumerate_options(barred, two_nodes)}
    assert (
        reasons[ShardingType.ROW_TIERS] == reasons[ShardingType.DATA_PARALLEL] == "the table forbids tier data_parallel"
    )
    assert not reasons[ShardingType.FLEX]
    paired = replace(table, constraints=Constraints(colocate_with=("u",)))
    reasons = {scheme.name: why_not(scheme, two_nodes) for scheme in enumerate_options(paired, two_nodes)}
    assert reasons[ShardingType.COLUMN_WISE] == "the table must be on the ranks of u"
    assert not reasons[ShardingType.ROW_WISE]


@pytest.mark.parametrize(
    ("tier", "replicas"),
    [
        (Tier.TABLE_WISE, [((rank,),) for rank in range(8)]),
        (Tier.TABLE_ROW_WISE, [((0, 1, 2, 3),), ((4, 5, 6, 7),)]),
        (Tier.ROW_WISE, [(tuple(range(8)),)]),
        (Tier.DATA_PARALLEL, [make.each(8)]),
        (Tier.FLEX, [((0, 1, 2, 3), (4, 5, 6, 7))]),
    ],
)
def test_tiers_say_which_ranks_hold_rows_at_a_site(two_nodes, tier, replicas):
    assert [replicas_at(tier, site, two_nodes) for site in range(num_sites(tier, two_nodes))] == replicas
    for site, at_site in enumerate(replicas):
        ranks = [rank for replica in at_site for rank in replica]
        assert {site_of(tier, rank, two_nodes) for rank in ranks} == {site}
        assert num_holders(tier, two_nodes) == len(ranks)
        assert num_replicas(tier, two_nodes) == len(at_site)
        assert {num_owners(tier, two_nodes)} == {len(replica) for replica in at_site}


@pytest.mark.parametrize(
    "fields",
    [
        {"num_embeddings": 2000},
        {"embedding_dim": 32},
        {"pooling_factor": 3.0},
        {"pooling_variance": 1.0},
        {"alpha": 0.5},
        {"dtype": DType.FP16},
        {"optimizer": Optimizer.ADAGRAD},
        {"pooling": Pooling.SEQUENCE},
    ],
    ids=str,
)
def test_tables_share_what_is_worked_out_only_if_prices_and_bytes_are_alike(fields):
    tables = make.tables(make.table("a"), make.table("b"), make.table("c", **fields))
    assert tables.first_alike == {"a": 0, "b": 0, "c": 2}
