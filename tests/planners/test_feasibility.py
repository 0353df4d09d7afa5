"""`repair`: finds a placement within the limits where there is one, or says what is missing."""

import re
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoshard.core import Constraints
from autoshard.core.errors import InfeasiblePlanError
from autoshard.core.quoting import write_bytes
from autoshard.evaluation import evaluate
from autoshard.planners.space.feasibility import Filling, repair
from tests import builders as make


@pytest.fixture
def planted():
    """A problem whose memory is what a hidden placement needs and a little more, and a placement to start from."""

    def plant(num_tables, world_size, seed, spare):
        problem = make.problem(*make.draw_task(num_tables, world_size, seed))
        rng = np.random.default_rng(seed)
        hidden_N = rng.integers(0, world_size, num_tables)
        capacity_R = np.ceil(problem.rank_bytes(hidden_N) * (1 + spare)).astype(np.int64)
        return replace(problem, capacity_R=capacity_R), rng.integers(0, world_size, num_tables)

    return plant


def test_bytes_of_ranks_are_those_of_the_plan():
    problem = make.problem(*make.draw_task(12, 3, seed=4))
    ranks_N = np.random.default_rng(0).integers(0, 3, 12)
    planned = evaluate(problem.to_plan(ranks_N), make.costs()).ranks
    assert problem.rank_bytes(ranks_N).tolist() == [one.hbm_bytes for one in planned]


def test_leaves_feasible_placements_alone():
    problem = make.problem(*make.draw_task(12, 3))
    ranks_N = np.arange(12) % 3
    np.testing.assert_array_equal(repair(problem, ranks_N, 0), ranks_N)


@pytest.mark.parametrize(("num_tables", "world_size"), [(5, 2), (10, 3), (30, 8), (120, 16)])
@pytest.mark.parametrize("seed", range(2))
def test_finds_what_fits_with_one_percent_to_spare(planted, num_tables, world_size, seed):
    problem, start_N = planted(num_tables, world_size, seed, spare=0.01)
    assert problem.is_feasible(repair(problem, start_N, 0))


@given(seed=st.integers(0, 10_000), num_tables=st.integers(1, 10), world_size=st.integers(1, 3))
def test_small_problems_are_solved_to_the_last_byte(planted_exactly, seed, num_tables, world_size):
    problem, start_N = planted_exactly(num_tables, world_size, seed)
    assert problem.is_feasible(repair(problem, start_N, 0))


@pytest.fixture(scope="module")
def planted_exactly():
    """Bare problems, since hypothesis draws many: only what `repair` reads, as PlacementProblem has it."""
    from autoshard.planners.space.placement import PlacementProblem

    class Bare(SimpleNamespace):
        rank_bytes = PlacementProblem.rank_bytes
        is_feasible = PlacementProblem.is_feasible

        def label(self, item):
            return f"t{item}"

    def plant(num_items, num_ranks, seed):
        rng = np.random.default_rng(seed)
        bytes_N, allowed_NR = rng.integers(1, 1_000_000, num_items), np.ones((num_items, num_ranks), dtype=bool)
        problem = Bare(
            num_items=num_items,
            num_ranks=num_ranks,
            bytes_N=bytes_N,
            allowed_NR=allowed_NR,
            capacity_R=np.zeros(num_ranks, dtype=np.int64),
        )
        problem.capacity_R = problem.rank_bytes(rng.integers(0, num_ranks, num_items))
        return problem, rng.integers(0, num_ranks, num_items)

    return plant


def test_moves_no_more_than_it_needs_to():
    # Rank 0 holds 6 tables and has room for 5: one move makes it fit.
    tables = tuple(make.table(f"t{index}") for index in range(9))
    problem = make.problem(make.tables(*tables, batch_size=8), make.topology(2, hbm=5 * tables[0].storage_bytes))
    start_N = np.array([0] * 6 + [1] * 3)
    assert (repair(problem, start_N, 0) != start_N).sum() == 1


def test_keeps_to_allowed_ranks():
    # Six tables, three per rank; the three that may only go to rank 1 have to push others off it.
    tables = tuple(
        make.table(f"t{index}", constraints=Constraints(pinned_ranks=(1,) if index < 3 else ())) for index in range(6)
    )
    problem = make.problem(make.tables(*tables, batch_size=8), make.topology(2, hbm=3 * tables[0].storage_bytes))
    np.testing.assert_array_equal(repair(problem, np.ones(6, dtype=np.int64), 0), [1, 1, 1, 0, 0, 0])


def test_names_the_bytes_that_are_missing():
    # Three tables of 60% of a rank on two ranks: together 90% of the memory, but no two fit on one rank.
    tables = tuple(make.table(f"t{index}") for index in range(3))
    size = tables[0].storage_bytes
    room = int(size / 0.6)
    problem = make.problem(make.tables(*tables, batch_size=8), make.topology(2, hbm=room))
    with pytest.raises(InfeasiblePlanError, match=re.escape(f"{write_bytes(size - (room - size))} more than are free")):
        repair(problem, np.array([0, 0, 1]), 0)


def test_filling_prefers_low_scores_among_ranks_with_room():
    tables = (make.table("big", num_embeddings=10), make.table("small", num_embeddings=5))
    room = tables[0].storage_bytes
    problem = make.problem(make.tables(*tables, batch_size=8), make.topology(3, hbm=room))
    filling = Filling(problem)
    assert filling.put(0, np.array([2.0, 1.0, 3.0])) == 1
    assert filling.put(1, np.array([2.0, 1.0, 3.0])) == 0
    assert filling.failure is None
    assert filling.free_bytes().tolist() == [room - tables[1].storage_bytes, 0, room]
