"""Local search: finds what exhaustive search finds, keeps to the limits, repeats itself by seed."""

import itertools
import time
from dataclasses import replace

import numpy as np
import pytest

from autoshard.core import Constraints, KernelCosts, TableSet
from autoshard.planners.feasibility import repair
from autoshard.planners.greedy import CostGreedyPlanner
from autoshard.planners.local_search import improve
from autoshard.planners.placement import PlacementProblem

LATER_S = 600.0


def search(problem, ranks_N, seed=0, num_steps=300, seconds=LATER_S):
    return improve(problem, ranks_N, seed=seed, num_steps=num_steps, deadline_s=time.perf_counter() + seconds)


def exhaustive_max_ms(problem):
    best_ms = np.inf
    for ranks in itertools.product(range(problem.num_ranks), repeat=problem.num_items):
        ranks_N = np.array(ranks)
        if problem.is_feasible(ranks_N):
            best_ms = min(best_ms, problem.rank_ms(ranks_N).max())
    return best_ms


@pytest.mark.parametrize(("seed", "spare"), [(0, None), (1, None), (2, None), (0, 0.15), (1, 0.15)])
def test_finds_the_optimum_of_small_problems(draw_task, make_problem, seed, spare):
    problem = make_problem(draw_task(9, 3, seed, spare))
    start_N = repair(problem, np.arange(9) % 3, 0)
    result = search(problem, start_N, num_steps=3000)
    assert problem.is_feasible(result.ranks_N)
    assert result.max_ms == pytest.approx(exhaustive_max_ms(problem), rel=1e-6)


@pytest.mark.parametrize("world_size", [2, 8, 20])
def test_is_never_worse_than_its_start_and_reports_what_it_returns(draw_task, make_problem, world_size):
    problem = make_problem(draw_task(40, world_size, seed=1))
    start_N = np.random.default_rng(0).integers(0, world_size, 40)
    result = search(problem, start_N)
    assert result.max_ms < problem.rank_ms(start_N).max()
    assert result.max_ms == pytest.approx(problem.rank_ms(result.ranks_N).max(), rel=1e-5)


def test_balances_80_tables_on_8_ranks(draw_task, make_problem):
    # The analytic model adds up, so the mean over ranks is a bound for the slowest one.
    problem = make_problem(draw_task(80, 8, seed=4))
    result = search(problem, CostGreedyPlanner().place(problem, 0), num_steps=2000)
    mean_ms = problem.rank_ms(result.ranks_N).mean()
    assert mean_ms > problem.kernel_ms_N.max(), "choose a seed without a table that decides alone"
    assert result.max_ms <= mean_ms * 1.001


def test_same_seed_same_placement(draw_task, make_problem):
    # Four tables per rank: few enough that levelling leaves something to search for.
    problem = make_problem(draw_task(16, 4, seed=1))
    start_N = np.arange(16) % 4
    first, again, other = (search(problem, start_N, seed=seed, num_steps=3000).ranks_N.tolist() for seed in (7, 7, 8))
    assert first == again
    assert first != other


def test_keeps_to_memory_and_constraints(draw_task, make_problem):
    tables, topology = draw_task(30, 4, seed=3, spare=0.1)
    pinned = tuple(
        replace(table, constraints=Constraints(pinned_ranks=(index % 4, (index + 1) % 4)))
        for index, table in enumerate(tables.tables)
    )
    problem = make_problem((replace(tables, tables=pinned), topology))
    start_N = repair(problem, CostGreedyPlanner().place(problem, 0), 0)
    result = search(problem, start_N)
    assert problem.is_feasible(result.ranks_N)
    assert result.max_ms < problem.rank_ms(start_N).max()


def test_stops_at_the_costliest_table(draw_task, make_problem, make_table):
    tables, topology = draw_task(20, 4, seed=5)
    heavy = make_table("heavy", embedding_dim=64, pooling_factor=2000.0)
    problem = make_problem((replace(tables, tables=(heavy, *tables.tables)), topology))
    start_N = CostGreedyPlanner().place(problem, 0)
    result = search(problem, start_N)
    assert (result.stopped, result.num_steps) == ("bound", 0)
    # The other ranks are levelled all the same.
    assert problem.rank_ms(result.ranks_N).min() >= problem.rank_ms(start_N).min()


def test_stops_when_all_ranks_are_alike(make_table, make_topology, make_problem):
    tables = tuple(make_table(f"t{index}", embedding_dim=8 + 8 * (index // 4)) for index in range(12))
    problem = make_problem((TableSet(batch_size=65536, tables=tables), make_topology(4)))
    assert search(problem, np.zeros(12, dtype=np.int64), num_steps=5000).stopped == "balanced"


def test_skips_ahead_when_time_is_short(draw_task, make_problem):
    problem = make_problem(draw_task(80, 8, seed=4))
    start_N = np.random.default_rng(0).integers(0, 8, 80)
    result = search(problem, start_N, num_steps=10**9, seconds=0.3)
    assert result.stopped == "time"
    assert result.num_steps < 10**9
    # The schedule has come to its cold end: the ranks are level, unless one table decides alone.
    assert result.max_ms <= 1.01 * max(problem.rank_ms(result.ranks_N).mean(), problem.kernel_ms_N.max())


def test_does_nothing_on_one_rank(draw_task, make_problem):
    problem = make_problem(draw_task(5, 1))
    result = search(problem, np.zeros(5, dtype=np.int64))
    assert (result.ranks_N.tolist(), result.num_steps) == ([0] * 5, 0)


class CompanyIsCheaper:
    """A cost model in which shards run faster together, as learned models may have it."""

    name = "company-is-cheaper"

    def encode(self, shards):
        return np.array([[shard.embedding_dim, 1] for shard in shards], dtype=np.float32)

    def price(self, codes_SH):
        codes = np.asarray(codes_SH, dtype=np.float64)
        return codes[:, 0] * (1 + np.exp(1 - codes[:, 1]))

    def price_parts(self, codes_SH):
        price = self.price(codes_SH)
        return KernelCosts(forward_ms_S=price, backward_ms_S=0 * price, low_ms_S=price, high_ms_S=price)


def test_does_not_take_the_costliest_table_for_a_bound_where_it_is_none(make_table, make_topology):
    # Alone the wide table costs 400; with k small ones of 4 it costs (200 + 4 k) (1 + exp(-k)).
    tables = TableSet(
        batch_size=8,
        tables=(make_table("wide", embedding_dim=200), *(make_table(f"t{i}", embedding_dim=4) for i in range(12))),
    )
    problem = PlacementProblem.table_wise(tables, make_topology(2), CompanyIsCheaper())
    result = search(problem, np.array([0] + [1] * 12), num_steps=1000)
    expected_ms = min((200 + 4 * k) * (1 + np.exp(-k)) for k in range(13))
    assert result.max_ms == pytest.approx(expected_ms, rel=1e-6)
