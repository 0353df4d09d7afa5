"""The greedy planners: what they sort by, and where they put it."""

from dataclasses import replace

import numpy as np
import pytest

from autoshard.core import Constraints, Pooling
from autoshard.planners.heuristics.greedy import (
    CostGreedyPlanner,
    DimGreedyPlanner,
    LookupGreedyPlanner,
    RandomPlanner,
    SizeGreedyPlanner,
)
from tests import builders as make


@pytest.fixture
def ranks_of():
    def ranks(planner, tables, topology):
        task = (make.tables(*tables), topology)
        return make.problem(*task).ranks_of(planner.plan(make.request(*task))).tolist()

    return ranks


# Falling cost 7, 5, 4, 3, 1 on two ranks: 7 -> 0, 5 -> 1, 4 -> 1 (sum 9), 3 -> 0 (sum 10), 1 -> 1 (sum 10).
COSTS, RANKS = (4, 7, 1, 5, 3), [1, 0, 1, 1, 0]


def test_size_greedy_balances_rows_times_dimension(ranks_of):
    tables = [make.table(f"t{i}", num_embeddings=8 * c, embedding_dim=8) for i, c in enumerate(COSTS)]
    tables[1] = make.table("t1", num_embeddings=7, embedding_dim=64)
    assert ranks_of(SizeGreedyPlanner(), tables, make.topology(2)) == RANKS


def test_dim_greedy_balances_dimensions(ranks_of):
    tables = [make.table(f"t{i}", num_embeddings=100 - i, embedding_dim=4 * c) for i, c in enumerate(COSTS)]
    assert ranks_of(DimGreedyPlanner(), tables, make.topology(2)) == RANKS


def test_lookup_greedy_balances_dimension_times_pooling_factor(ranks_of):
    tables = [make.table(f"t{i}", embedding_dim=4, pooling_factor=float(c)) for i, c in enumerate(COSTS)]
    tables[1] = make.table("t1", embedding_dim=28, pooling_factor=1.0)
    assert ranks_of(LookupGreedyPlanner(), tables, make.topology(2)) == RANKS


def test_cost_greedy_follows_the_cost_model(ranks_of):
    # Same dimension x pooling factor; rows that are written back whole make the sequence-free wide table costlier.
    tables = [make.table(f"t{i}", embedding_dim=16, pooling_factor=3.0 * c) for i, c in enumerate(COSTS)]
    assert ranks_of(CostGreedyPlanner(), tables, make.topology(2)) == RANKS


def test_co_located_tables_count_as_one(ranks_of):
    tables = [make.table(f"t{i}", embedding_dim=4) for i in range(4)]
    tables[3] = replace(tables[3], constraints=Constraints(colocate_with=("t1",)))
    # Items t0, t1 + t3, t2: the pair comes first and is balanced by the other two.
    assert ranks_of(DimGreedyPlanner(), tables, make.topology(2)) == [1, 0, 1]


def test_full_ranks_are_passed_over(ranks_of):
    # Dimensions 64, 4, 4, 4: three small ones would balance the big one, but a rank holds two of them only.
    tables = [make.table("big", num_embeddings=1, embedding_dim=64)]
    tables += [make.table(f"t{i}", num_embeddings=100, embedding_dim=4) for i in range(3)]
    assert ranks_of(DimGreedyPlanner(), tables, make.topology(2, hbm=2 * tables[1].storage_bytes)) == [0, 1, 1, 0]


def test_random_draws_all_ranks_alike():
    tables = make.tables(400, batch_size=8)
    task = (tables, make.topology(4))
    problem = make.problem(*task)
    placed = [problem.ranks_of(RandomPlanner().plan(make.request(*task, seed=seed))) for seed in range(5)]
    counts = np.bincount(np.concatenate(placed), minlength=4)
    # 2,000 draws: 500 per rank, with a standard deviation of 19.
    assert (abs(counts - 500) < 100).all()
    assert len({tuple(ranks) for ranks in placed}) == 5


def test_sequence_tables_send_rows():
    tables = make.tables(make.table("s", pooling=Pooling.SEQUENCE), make.table("p"), batch_size=8)
    plan = CostGreedyPlanner().plan(make.request(tables, make.topology(2)))
    assert [str(placed.exchange) for placed in plan.shards] == ["rows", "partial_sums"]
