"""Runs: groups of a table side by side on each rank, and as even as they were."""

from collections import Counter
from itertools import groupby

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoshard.planners.oper import lookup_bytes, place, row_groups
from autoshard.planners.oper.placement import in_runs
from tests import builders as make

NUM_RANKS = 8


def equal_groups(num_groups, alpha=1.0):
    """Lookups of the groups of a table that is cut into as many rows each, hottest first."""
    access = make.table("t", 1000 * num_groups, alpha=alpha).access
    return np.diff(access.coverage(np.arange(num_groups + 1) * 1000.0))


def dealt(ranks_M, lookups_M, load_R, tables_M=None, rows_M=None):
    """The groups dealt anew, whose rows are as even as can be, and whose lookups are to be."""
    tables_M = np.array(["t"] * len(ranks_M)) if tables_M is None else tables_M
    rows_M = np.ones(len(ranks_M)) if rows_M is None else rows_M
    return in_runs(tables_M, ranks_M, load_R, rows_M, tolerance=0.01, varying_M=lookups_M)


def load(ranks_M, lookups_M):
    return np.bincount(ranks_M, lookups_M, minlength=NUM_RANKS)


def num_runs(ranks):
    return len(list(groupby(ranks)))


@given(seed=st.integers(0, 10**6), num_groups=st.integers(2, 200), alpha=st.sampled_from([0.0, 0.8, 1.3]))
def test_each_rank_keeps_its_number_of_groups_and_gets_two_runs_at_most(seed, num_groups, alpha):
    lookups_M = equal_groups(num_groups, alpha)
    ranks_M = np.random.default_rng(seed).integers(0, NUM_RANKS, num_groups)
    after_M = dealt(ranks_M, lookups_M, load(ranks_M, lookups_M))
    assert Counter(after_M.tolist()) == Counter(ranks_M.tolist())
    # The last rank's two runs meet in the middle.
    assert num_runs(after_M.tolist()) <= 2 * len(set(ranks_M.tolist())) - 1


def test_uneven_lookups_become_even():
    # Hottest to coldest in blocks: the first rank would serve most. Left out are groups with more than a rank's share.
    lookups_M, ranks_M = equal_groups(800)[100:], np.repeat(np.arange(1, NUM_RANKS), 100)
    before_R = load(ranks_M, lookups_M)
    assert before_R[1:].min() < before_R.max() / 5
    after_R = load(dealt(ranks_M, lookups_M, before_R), lookups_M)[1:]
    # Groups are whole, and the first has 3% of a rank's share.
    assert after_R.min() > 0.97 * after_R.max()


def test_what_ranks_have_already_is_made_up_for():
    lookups_M = equal_groups(1600, 0.6)[100:]
    ranks_M = np.arange(len(lookups_M)) % NUM_RANKS
    other_R = np.linspace(0.0, 0.05, NUM_RANKS) * lookups_M.sum()
    after_M = dealt(ranks_M, lookups_M, load(ranks_M, lookups_M) + other_R)
    after_R = load(after_M, lookups_M) + other_R
    assert after_R.min() > 0.99 * after_R.max()


def test_groups_that_are_not_alike_keep_their_ranks():
    ranks_M, lookups_M = np.array([5, 0, 1, 0, 1, 6]), np.array([6.0, 5.0, 4.0, 3.0, 2.0, 1.0])
    rows_M = np.array([1.0, 100.0, 100.0, 100.0, 100.0, 599.0])
    after_M = dealt(ranks_M, lookups_M, load(ranks_M, lookups_M), rows_M=rows_M)
    assert (after_M[0], after_M[-1]) == (5, 6)
    assert Counter(after_M[1:-1].tolist()) == {0: 2, 1: 2}


def test_tables_are_dealt_one_by_one():
    lookups_M = np.concatenate([equal_groups(40), equal_groups(30)])
    tables_M = np.array(["a"] * 40 + ["b"] * 30)
    ranks_M = np.random.default_rng(0).integers(0, NUM_RANKS, 70)
    after_M = dealt(ranks_M, lookups_M, load(ranks_M, lookups_M), tables_M)
    for start, stop in ((0, 40), (40, 70)):
        assert Counter(after_M[start:stop].tolist()) == Counter(ranks_M[start:stop].tolist())


def placed(tables, threshold, copied=None):
    topology = make.topology(NUM_RANKS, hbm=1 << 40)
    return place(tables, topology, row_groups(tables, threshold, copied), np.full(NUM_RANKS, 1 << 40), copied=copied)


def test_placement_makes_few_runs_and_balances_both():
    tables = make.tables(*(make.table(f"t{i}", 10**6 * (i + 1)) for i in range(4)), batch_size=1)
    found = placed(tables, 0.001)
    held = list(zip(found.shards, found.ranks, strict=True))
    runs = sum(num_runs([rank for shard, rank in held if shard.table is table]) for table in tables.tables)
    # Two per rank, table and phase, and the hottest rows, which exceed the threshold alone.
    assert runs < len(held) / 6
    assert found.held_R.min() > 0.99 * found.held_R.max()
    assert found.read_R.min() > 0.99 * found.read_R.max()


@pytest.mark.parametrize("num_copied", [0, 100_000])
def test_lookups_of_what_will_be_copied_do_not_count(num_copied):
    found = placed(make.tables(make.table("t", 10**6)), 0.001, {"t": num_copied})
    others = [index for index, shard in enumerate(found.shards) if shard.rows.start >= num_copied]
    lookups = lookup_bytes([found.shards[index] for index in others])
    np.testing.assert_allclose(found.read_R, load([found.ranks[index] for index in others], lookups), rtol=1e-6)
    assert found.read_R.min() > 0.95 * found.read_R.max()
