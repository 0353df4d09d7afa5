"""The greedy planners: what they sort by, and where they put it."""

from dataclasses import replace

import numpy as np
import pytest

from autoshard.core import Constraints, Pooling, TableSet
from autoshard.planners.heuristics.greedy import (
    CostGreedyPlanner,
    DimGreedyPlanner,
    LookupGreedyPlanner,
    RandomPlanner,
    SizeGreedyPlanner,
)


@pytest.fixture
def ranks_of(make_request, make_problem):
    def ranks(planner, tables, topology):
        task = (TableSet(batch_size=64, tables=tuple(tables)), topology)
        return make_problem(task).ranks_of(planner.plan(make_request(task))).tolist()

    return ranks


# Falling cost 7, 5, 4, 3, 1 on two ranks: 7 -> 0, 5 -> 1, 4 -> 1 (sum 9), 3 -> 0 (sum 10), 1 -> 1 (sum 10).
COSTS, RANKS = (4, 7, 1, 5, 3), [1, 0, 1, 1, 0]


def test_size_greedy_balances_rows_times_dimension(ranks_of, make_table, make_topology):
    tables = [make_table(f"t{i}", num_embeddings=8 * c, embedding_dim=8) for i, c in enumerate(COSTS)]
    tables[1] = make_table("t1", num_embeddings=7, embedding_dim=64)
    assert ranks_of(SizeGreedyPlanner(), tables, make_topology(2)) == RANKS


def test_dim_greedy_balances_dimensions(ranks_of, make_table, make_topology):
    tables = [make_table(f"t{i}", num_embeddings=100 - i, embedding_dim=4 * c) for i, c in enumerate(COSTS)]
    assert ranks_of(DimGreedyPlanner(), tables, make_topology(2)) == RANKS


def test_lookup_greedy_balances_dimension_times_pooling_factor(ranks_of, make_table, make_topology):
    tables = [make_table(f"t{i}", embedding_dim=4, pooling_factor=float(c)) for i, c in enumerate(COSTS)]
    tables[1] = make_table("t1", embedding_dim=28, pooling_factor=1.0)
    assert ranks_of(LookupGreedyPlanner(), tables, make_topology(2)) == RANKS


def test_cost_greedy_follows_the_cost_model(ranks_of, make_table, make_topology):
    # Same dimension x pooling factor; rows that are written back whole make the sequence-free wide table costlier.
    tables = [make_table(f"t{i}", embedding_dim=16, pooling_factor=3.0 * c) for i, c in enumerate(COSTS)]
    assert ranks_of(CostGreedyPlanner(), tables, make_topology(2)) == RANKS


def test_co_located_tables_count_as_one(ranks_of, make_table, make_topology):
    tables = [make_table(f"t{i}", embedding_dim=4) for i in range(4)]
    tables[3] = replace(tables[3], constraints=Constraints(colocate_with=("t1",)))
    # Items t0, t1 + t3, t2: the pair comes first and is balanced by the other two.
    assert ranks_of(DimGreedyPlanner(), tables, make_topology(2)) == [1, 0, 1]


def test_full_ranks_are_passed_over(ranks_of, make_table, make_topology):
    # Dimensions 64, 4, 4, 4: three small ones would balance the big one, but a rank holds two of them only.
    tables = [make_table("big", num_embeddings=1, embedding_dim=64)]
    tables += [make_table(f"t{i}", num_embeddings=100, embedding_dim=4) for i in range(3)]
    assert ranks_of(DimGreedyPlanner(), tables, make_topology(2, 2 * tables[1].storage_bytes)) == [0, 1, 1, 0]


def test_random_draws_all_ranks_alike(make_table, make_topology, make_request, make_problem):
    tables = TableSet(batch_size=8, tables=tuple(make_table(f"t{i}") for i in range(400)))
    task = (tables, make_topology(4))
    problem = make_problem(task)
    placed = [problem.ranks_of(RandomPlanner().plan(make_request(task, seed=seed))) for seed in range(5)]
    counts = np.bincount(np.concatenate(placed), minlength=4)
    # 2,000 draws: 500 per rank, with a standard deviation of 19.
    assert (abs(counts - 500) < 100).all()
    assert len({tuple(ranks) for ranks in placed}) == 5


def test_sequence_tables_send_rows(make_table, make_topology, make_request):
    tables = TableSet(batch_size=8, tables=(make_table("s", pooling=Pooling.SEQUENCE), make_table("p")))
    plan = CostGreedyPlanner().plan(make_request((tables, make_topology(2))))
    assert [str(placed.exchange) for placed in plan.shards] == ["rows", "partial_sums"]
