"""Largest differencing: Korf's examples, its guarantee, and what the planner adds to it."""

import itertools
from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from autoshard.core import Constraints
from autoshard.planners.heuristics.karmarkar_karp import KarmarkarKarpPlanner, partition
from autoshard.planners.space.feasibility import repair
from tests import builders as make


def sums(costs, num_subsets):
    costs_N = np.array(costs, dtype=float)
    return np.bincount(partition(costs_N, num_subsets), weights=costs_N, minlength=num_subsets)


def test_two_subsets_as_in_the_literature():
    # Korf, A complete anytime algorithm for number partitioning (1998), Sec. 3: {4, 5, 6, 7, 8} by differencing.
    # 8 - 7 = 1; 6 - 5 = 1; 4 - 1 = 3; 3 - 1 = 2: subsets that differ by 2, 16 and 14.
    assert sorted(sums([4, 5, 6, 7, 8], 2)) == [14, 16]


def test_three_subsets_by_hand():
    # By hand: (8,0,0) with (7,0,0) is (8,7,0), with (6,0,0) it is (8,7,6) or, less 6, (2,1,0); (5,0,0) with (4,0,0) is
    # (5,4,0), whose spread is larger; with (2,1,0) it is (5,5,2): sums of 8, 7 + 4 and 6 + 5.
    assert sorted(sums([4, 5, 6, 7, 8], 3)) == [8, 11, 11]


@given(costs=st.lists(st.integers(0, 1000), min_size=1, max_size=9), num_subsets=st.integers(1, 4))
def test_small_sets_are_near_the_optimum(costs, num_subsets):
    best = (
        min(
            max(
                sum(cost for cost, subset in zip(costs, subsets, strict=True) if subset == number)
                for number in range(num_subsets)
            )
            for subsets in itertools.product(range(num_subsets), repeat=min(len(costs), 9))
        )
        if num_subsets ** len(costs) <= 3000
        else max(max(costs), sum(costs) / num_subsets)
    )
    found = sums(costs, num_subsets)
    assert found.sum() == sum(costs)
    assert found[0] == found.max()
    # Differencing is never worse than 4/3 - 1/(3k) times the optimum for k subsets (Michiels et al., 2003).
    if num_subsets ** len(costs) <= 3000:
        assert found.max() <= best * (4 / 3 - 1 / (3 * num_subsets)) + 1e-9


def test_spreads_less_than_greedy_does():
    costs_N = np.random.default_rng(0).uniform(1, 2, 96)
    greedy = np.zeros(8)
    for cost in np.sort(costs_N)[::-1]:
        greedy[greedy.argmin()] += cost
    assert np.ptp(sums(costs_N, 8)) < np.ptp(greedy) / 3


def test_no_items():
    assert partition(np.zeros(0), 3).tolist() == []


def test_places_by_predicted_costs():
    problem = make.problem(*make.draw_task(60, 6, seed=3))
    ranks_N = KarmarkarKarpPlanner().place(problem, 0)
    cost_ms_R = problem.rank_ms(ranks_N)
    assert cost_ms_R.max() <= max(1.01 * cost_ms_R.mean(), problem.kernel_ms_N.max())


def test_keeps_to_pinned_ranks_and_memory():
    tables, topology = make.draw_task(30, 4, seed=3, spare=0.1)
    pinned = tuple(
        replace(table, constraints=Constraints(pinned_ranks=(index % 4,) if index % 3 == 0 else ()))
        for index, table in enumerate(tables.tables)
    )
    problem = make.problem(replace(tables, tables=pinned), topology)
    ranks_N = KarmarkarKarpPlanner().place(problem, 0)
    assert problem.allowed_NR[np.arange(30), ranks_N].all()
    assert problem.is_feasible(repair(problem, ranks_N, 0))


def test_most_bytes_go_where_most_room_is():
    problem = make.problem(*make.draw_task(12, 3, seed=1))
    problem = replace(problem, capacity_R=problem.capacity_R * np.array([1, 3, 2]))
    held_R = problem.rank_bytes(KarmarkarKarpPlanner().place(problem, 0))
    assert np.argsort(held_R).tolist() == [0, 2, 1]
