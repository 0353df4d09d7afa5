"""Runs: groups of a table side by side on each rank, and as even as they were."""

from collections import Counter
from itertools import groupby

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoshard.core import RowRange, RowsBy, Shard
from autoshard.planners.oper.balance import place
from autoshard.planners.oper.partition import row_groups
from autoshard.planners.oper.row_group import RowGroup
from autoshard.planners.oper.runs import in_runs
from tests import builders as make

NUM_RANKS = 8


def equal_groups(one, num_groups):
    """A table cut into groups of as many rows."""
    step = one.num_embeddings // num_groups
    ranges = [RowRange(start=step * i, stop=step * (i + 1), by=RowsBy.ACCESS_RANK) for i in range(num_groups)]
    shards = [Shard(table=one, rows=rows, columns=(0, 16)) for rows in ranges]
    return [RowGroup(shards=(shard,), allowed_R=np.ones(NUM_RANKS, dtype=bool)) for shard in shards]


def load(owners):
    """Bytes that lookups read on each rank."""
    load_R = np.zeros(NUM_RANKS)
    for group, rank in owners:
        load_R[rank] += group.lookup_bytes
    return load_R


def num_runs(owners):
    ordered = sorted(owners, key=lambda owner: owner[0].shards[0].rows.start)
    return len(list(groupby(ordered, key=lambda owner: owner[1])))


@given(seed=st.integers(0, 10**6), num_groups=st.integers(2, 200), alpha=st.sampled_from([0.0, 0.8, 1.3]))
def test_each_rank_keeps_its_number_of_groups_and_gets_two_runs_at_most(seed, num_groups, alpha):
    groups = equal_groups(make.table("t", 1000 * num_groups, alpha=alpha), num_groups)
    ranks = np.random.default_rng(seed).integers(0, NUM_RANKS, num_groups).tolist()
    owners = list(zip(groups, ranks, strict=True))
    dealt = in_runs(owners, load(owners), alike="num_bytes", tolerance=0.01, varying="lookup_bytes")
    assert [group for group, _ in dealt] == groups
    assert Counter(rank for _, rank in dealt) == Counter(ranks)
    # The last rank's two runs meet in the middle.
    assert num_runs(dealt) <= 2 * len(set(ranks)) - 1


def test_uneven_lookups_become_even():
    # Hottest to coldest in blocks: the first rank would serve most.
    groups = equal_groups(make.table("t", 800_000), 800)
    owners = [(group, index // 100) for index, group in enumerate(groups)]
    before_R = load(owners)
    assert before_R.min() < before_R.max() / 10
    # Without the first groups, which alone have more than a rank's share.
    cold = owners[100:]
    dealt = in_runs(cold, load(cold), alike="num_bytes", tolerance=0.01, varying="lookup_bytes")
    after_R = load(dealt)[1:]
    # Groups are whole, and the first has 3% of a rank's share.
    assert after_R.min() > 0.97 * after_R.max()


def test_what_ranks_have_already_is_made_up_for():
    groups = equal_groups(make.table("t", 1_600_000, alpha=0.6), 1600)[100:]
    owners = [(group, index % NUM_RANKS) for index, group in enumerate(groups)]
    total = sum(group.lookup_bytes for group in groups)
    other_R = np.linspace(0.0, 0.05, NUM_RANKS) * total
    dealt = in_runs(owners, load(owners) + other_R, alike="num_bytes", tolerance=0.01, varying="lookup_bytes")
    after_R = load(dealt) + other_R
    assert after_R.min() > 0.99 * after_R.max()


def test_groups_that_are_not_alike_keep_their_ranks():
    one = make.table("t", 1000)
    sizes = [(0, 1), (1, 101), (101, 201), (201, 301), (301, 401), (401, 1000)]
    shards = [
        Shard(table=one, rows=RowRange(start=a, stop=b, by=RowsBy.ACCESS_RANK), columns=(0, 16)) for a, b in sizes
    ]
    anywhere = np.ones(NUM_RANKS, dtype=bool)
    groups = [RowGroup(shards=(shard,), allowed_R=anywhere) for shard in shards]
    owners = list(zip(groups, [5, 0, 1, 0, 1, 6], strict=True))
    dealt = in_runs(owners, load(owners), alike="num_bytes", tolerance=0.01, varying="lookup_bytes")
    assert (dealt[0][1], dealt[-1][1]) == (5, 6)
    assert Counter(rank for _, rank in dealt[1:-1]) == {0: 2, 1: 2}


def test_placement_makes_few_runs_and_balances_both():
    tables = make.tables(*(make.table(f"t{i}", 10**6 * (i + 1)) for i in range(4)), batch_size=1)
    anywhere = np.ones(NUM_RANKS, dtype=bool)
    groups = [RowGroup(shards=(shard,), allowed_R=anywhere) for shard in row_groups(tables, 0.001)]
    placed = place(groups, np.full(NUM_RANKS, 1 << 40), np.ones(NUM_RANKS))
    runs = sum(num_runs([owner for owner in placed.owners if owner[0].label == one.name]) for one in tables.tables)
    # Two per rank, table and phase, and the hottest rows, which exceed the threshold alone.
    assert runs < len(groups) / 6
    assert placed.held_R.min() > 0.99 * placed.held_R.max()
    assert placed.lookup_ms_R.min() > 0.99 * placed.lookup_ms_R.max()


@pytest.mark.parametrize("kind", [None, "copied"])
def test_lookups_of_what_will_be_copied_do_not_count(kind):
    one = make.table("t", 10**6)
    groups = equal_groups(one, 1000)
    copied = frozenset(groups[:100]) if kind else frozenset()
    placed = place(groups, np.full(NUM_RANKS, 1 << 40), np.ones(NUM_RANKS), copied=copied)
    others = [owner for owner in placed.owners if owner[0] not in copied]
    np.testing.assert_allclose(placed.lookup_ms_R, load(others))
    if kind:
        assert placed.lookup_ms_R.min() > 0.95 * placed.lookup_ms_R.max()
