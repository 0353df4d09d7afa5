from itertools import islice

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoshard.core import (
    Feature,
    Pooling,
    Update,
)
from autoshard.core.errors import InvalidOptionError
from autoshard.formats import load_tables
from bench.sampling.slices import CUTS, LEAST_LOOKUPS_PER_BAG, Slices
from bench.sampling.strategies import SetSource
from tests import builders as make


@st.composite
def tables(draw, min_rows=1, max_alpha=1.6):
    rows = draw(st.integers(min_rows, 50_000))
    names = [f"f{index}" for index in range(draw(st.integers(1, 3)))]
    return make.table(
        "t",
        rows,
        4 * draw(st.integers(1, 32)),
        alpha=draw(st.floats(0, max_alpha)),
        features=tuple(Feature(name=name, pooling_factor=draw(st.floats(0.01, 80))) for name in names),
        pooling=draw(st.sampled_from(Pooling)),
    )


def planned(batch_size, pieces):
    """The plan that holds the pieces: all ranks of the cut, and two at least, in one node."""
    num_ranks = max(2, 1 + max(rank for piece in pieces for replica in piece.placed.replicas for rank in replica))
    shards = [piece.placed for piece in pieces]
    return make.plan(*shards, batch_size=batch_size, topology=make.topology(num_ranks, hbm=2**50))


@pytest.mark.parametrize("name", CUTS)
@given(table=tables(), seed=st.integers(0, 2**32))
def test_pieces_tile_the_values_that_a_table_looks_up(name, table, seed):
    batch_size = 4096  # no rank's share of it is rounded
    pieces = CUTS[name](table, batch_size, np.random.default_rng(seed))
    looked_up = sum(
        piece.local().num_lookups
        * piece.local().embedding_dim
        * len(piece.placed.replicas[0])
        * len(piece.placed.replicas)
        for piece in pieces
    )
    groups = batch_size / pieces[0].group_batch_size
    # A share of the batch is rounded where ranks do not divide it.
    expected = batch_size / groups * table.pooling_factor * table.embedding_dim
    assert looked_up == pytest.approx(expected, rel=0.02)
    assert sum(piece.placed.shard.num_embeddings * piece.placed.shard.embedding_dim for piece in pieces) == (
        table.num_embeddings * table.embedding_dim
    )


@pytest.mark.parametrize("name", CUTS)
@given(table=tables(), seed=st.integers(0, 2**32))
def test_pieces_are_what_ranks_of_a_plan_hold(name, table, seed):
    pieces = CUTS[name](table, 4096, np.random.default_rng(seed))
    plan = planned(pieces[0].group_batch_size, pieces)
    held = [shard for shards in plan.local_shards() for shard in shards]
    assert {piece.local() for piece in pieces} == set(held)


@pytest.mark.parametrize("name", CUTS)
@given(table=tables(), seed=st.integers(0, 2**32))
def test_columns_come_in_fours(name, table, seed):
    for piece in CUTS[name](table, 512, np.random.default_rng(seed)):
        assert piece.local().embedding_dim % 4 == 0
        assert piece.local().num_bags % len(table.features) == 0


# No row gets as many as two of a thousand lookups.
@given(table=tables(min_rows=5_000, max_alpha=0.3), seed=st.integers(0, 2**32))
def test_a_thin_tier_gets_the_lookups_that_it_was_cut_for(table, seed):
    rng, again = np.random.default_rng(seed), np.random.default_rng(seed)
    per_bag = table.pooling_factor / len(table.features)
    pieces = CUTS["lookups"](table, 4096, rng)
    wanted = np.exp(again.uniform(np.log(LEAST_LOOKUPS_PER_BAG), np.log(per_bag)))
    # Whole rows: up to two more than asked for, none of them hotter than the first.
    slack = 2 * float(table.access.probability_at(0.0)) * per_bag
    assert any(wanted * 0.999 <= piece.local().pooling_factor <= wanted + slack for piece in pieces)


@pytest.fixture(scope="module")
def source():
    return SetSource(tables=load_tables("metasyn").scaled(64).sample(150, 1), max_tables=10)


def test_lookups_per_bag_go_down_to_a_thousandth(source):
    strategy = Slices(source, 0)
    shards = [shard for number in range(400) for shard in strategy.draw(number)]
    rates = np.array([shard.pooling_factor for shard in shards])
    assert rates.min() == pytest.approx(LEAST_LOOKUPS_PER_BAG, rel=0.5)
    for low, high in ((1e-3, 1e-2), (1e-2, 1e-1), (1e-1, 1.0), (1.0, 10.0)):
        assert ((rates >= low) & (rates < high)).mean() > 0.02
    assert min(shard.num_lookups for shard in shards) >= 1
    assert {shard.update for shard in shards} == set(Update)
    assert len({shard.num_bags for shard in shards}) > 5


def test_slices_that_the_device_cannot_run_are_not_drawn(source):
    fused = SetSource(tables=source.tables, max_tables=10, accepts=lambda shard: shard.update is Update.FUSED)
    strategy = Slices(fused, 0)
    for shards in map(strategy.draw, islice(range(200), 200)):
        assert {shard.update for shard in shards} == {Update.FUSED}
    with pytest.raises(InvalidOptionError, match="no slice"):
        Slices(SetSource(tables=source.tables, max_tables=10, accepts=lambda _: False), 0)
