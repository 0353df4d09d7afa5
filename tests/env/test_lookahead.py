"""Episodes that keep to the mask end within the limits, however little room there is."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoshard.core import (
    AccessProfile,
    Shard,
    Tier,
)
from autoshard.core.errors import InfeasiblePlanError
from autoshard.planners.space.placement import PlacementProblem
from autoshard.validator import validate_plan
from env import PlacementBatch, PlacementEnv, PlacementTask, SplitBy
from env.feasible_placement import feasible_placement
from tests import builders as make

ROW_BYTES = 16 * 4 + 4
TIERS = (Tier.DATA_PARALLEL, Tier.FLEX, Tier.ROW_WISE)


@pytest.fixture(scope="module")
def make_sized(model):
    """Tables of so many rows, on ranks with room for so many."""

    def make_one(rows, capacities, *, allowed=None, tiers=(), pooling_factors=None):
        sized = zip(rows, pooling_factors or np.linspace(1, 9, len(rows)), strict=True)
        tables = [
            make.table(f"t{index}", size, pooling_factor=factor, access=AccessProfile.uniform(size))
            for index, (size, factor) in enumerate(sized)
        ]
        topology = make.uneven(*(size * ROW_BYTES for size in capacities))
        shards = [Shard.whole(table) for table in tables]
        problem = PlacementProblem.of(make.tables(*tables), topology, model, shards, tiers)
        if allowed is None:
            return problem
        of_tiers_NK = problem.allowed_NA[:, problem.num_ranks :]
        return replace(problem, allowed_NA=np.concatenate([np.array(allowed), of_tiers_NK], axis=1))

    return make_one


def play(problem, seed, *, greedy=False, **splits):
    """The end of an episode with random choices of the mask, or always its last one."""
    env = PlacementEnv([problem], **splits)
    rng = np.random.default_rng(seed)
    observation, _ = env.reset()
    done = False
    while not done:
        allowed = np.flatnonzero(observation["action_mask"])
        assert len(allowed) > 0
        observation, reward, done, _, info = env.step(allowed[-1] if greedy else rng.choice(allowed))
    return reward, info


@st.composite
def full_ranks(draw):
    """Rows of tables that fill their ranks by 90 to 100%, which ranks they may go to, and what ranks can hold."""
    num_ranks = draw(st.integers(1, 5))
    held = [draw(st.lists(st.integers(1, 400), max_size=5)) for _ in range(num_ranks)]
    spare = draw(st.floats(0.0, 0.11))
    capacities = [int(sum(rows) * (1 + spare)) for rows in held]
    placed = draw(st.permutations([(size, rank) for rank, rows in enumerate(held) for size in rows]))
    allowed = [[rank == own or draw(st.integers(0, 3)) > 0 for rank in range(num_ranks)] for _, own in placed]
    is_free = draw(st.booleans())
    pooling_factors = draw(st.lists(st.sampled_from([0.0, 1.0, 20.0]), min_size=len(placed), max_size=len(placed)))
    return placed, capacities, None if is_free else allowed, pooling_factors


@given(
    task=full_ranks(),
    seed=st.integers(0, 1000),
    tiers=st.sampled_from([(), TIERS]),
    splits=st.sampled_from([(0, SplitBy.COLUMNS), (1, SplitBy.COLUMNS), (1, SplitBy.HOT_ROWS), (2, SplitBy.HOT_ROWS)]),
    greedy=st.booleans(),
)
@settings(max_examples=40, deadline=None)
def test_an_episode_that_keeps_to_the_mask_ends_within_the_limits(make_sized, task, seed, tiers, splits, greedy):
    placed, capacities, allowed, pooling_factors = task
    if not placed:
        return
    problem = make_sized(
        [size for size, _ in placed], capacities, allowed=allowed, tiers=tiers, pooling_factors=pooling_factors
    )
    try:
        feasible_placement(problem)
    except InfeasiblePlanError:
        # There is a placement, but finding it may take a search that nobody would wait for.
        with pytest.raises(InfeasiblePlanError, match=make.AMOUNT):
            PlacementEnv([problem])
        return
    max_splits, split_by = splits
    # The last choice is to split: whatever may be split is.
    reward, info = play(problem, seed, greedy=greedy, max_splits=max_splits, split_by=split_by)
    assert info["is_feasible"]
    assert reward >= 0
    assert info["problem"].is_feasible(info["ranks"])
    plan = info["problem"].to_plan(info["ranks"])
    validate_plan(plan)


def test_nearly_all_of_these_tasks_are_played(make_sized):
    """The property above would be empty if placements were not found."""
    rng = np.random.default_rng(0)
    num_found = 0
    for _ in range(50):
        held = [rng.integers(1, 400, 4).tolist() for _ in range(4)]
        capacities = [int(sum(rows) * 1.02) for rows in held]
        problem = make_sized([size for rows in held for size in rows], capacities)
        num_found += problem.is_feasible(feasible_placement(problem))
    assert num_found == 50


def test_a_choice_that_leaves_no_room_for_the_rest_is_masked(make_sized):
    # 5, 5, 3, 3 and 3 on two ranks of 10 and 9: prices say 5 first, and then 5 on the same rank, or 9 cannot be filled.
    problem = make_sized([5, 5, 3, 3, 3], [10, 9], pooling_factors=[9.0, 8.0, 3.0, 2.0, 1.0])
    env = PlacementEnv([problem])
    observation, _ = env.reset()
    assert observation["action_mask"].tolist() == [1, 0]
    observation, *_ = env.step(np.int64(0))
    assert observation["action_mask"].tolist() == [1, 0]


def test_one_item_of_the_witness_may_make_room(make_sized):
    # Full ranks, and each item may go to either as long as another of its size can take its place.
    problem = make_sized([4, 4, 2, 2], [6, 6], pooling_factors=[9.0, 8.0, 2.0, 1.0])
    ends = {tuple(play(problem, seed)[1]["ranks"]) for seed in range(40)}
    assert ends == {(0, 1, 0, 1), (0, 1, 1, 0), (1, 0, 0, 1), (1, 0, 1, 0)}


def test_a_table_that_fits_on_no_rank_is_shared(make_sized):
    problem = make_sized([100, 10, 10], [60, 60], tiers=TIERS)
    _, info = play(problem, 0)
    assert info["ranks"][0] == 2 + TIERS.index(Tier.ROW_WISE)
    assert info["is_feasible"]


def test_the_largest_are_shared_where_the_rest_does_not_fit_else(make_sized):
    # 60 + 60 + 60 on two ranks of 95: only if one of them is split over both.
    problem = make_sized([60, 60, 60], [95, 95], tiers=(Tier.ROW_WISE,))
    assert sorted(feasible_placement(problem).tolist()) == [0, 1, 2]
    assert play(problem, 0)[1]["is_feasible"]


def test_a_placement_that_is_not_there_is_told_in_bytes(make_sized):
    with pytest.raises(InfeasiblePlanError, match=make.AMOUNT):
        PlacementTask.of(make_sized([60, 60, 60], [90, 90]))


def test_with_room_for_everything_nothing_is_masked(make_sized):
    batch = PlacementBatch([PlacementTask.of(make_sized([30, 20, 10], [60, 60, 60]))], 1)
    batch.begin(np.array([0]), np.array([0]))
    for _ in range(3):
        assert batch.observe()["action_mask"].all()
        batch.step(np.array([2]))


@pytest.mark.parametrize("num_ranks", [1, 6])
def test_one_rank_and_more_ranks_than_tables_will_do(make_sized, num_ranks):
    problem = make_sized([30, 20, 10], [60] * num_ranks)
    for greedy in (False, True):
        assert play(problem, 0, greedy=greedy)[1]["is_feasible"]
