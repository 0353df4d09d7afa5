from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from stable_baselines3.common.utils import ConstantSchedule

from autoshard.core.errors import InfeasiblePlanError, InvalidOptionError
from env import PlacementEnv, PlacementTask
from policies.network.actor_critic import PlacementPolicy
from policies.planning.decoding import decode, decode_beam


@pytest.fixture(scope="module")
def tasks(make_tasks):
    return [make_tasks(1, num_tables=size, num_ranks=3, seed=size)[0] for size in (4, 7, 1)]


@pytest.fixture(scope="module")
def policy(tasks):
    torch.manual_seed(1)
    env = PlacementEnv([task.problem for task in tasks])
    return PlacementPolicy(env.observation_space, env.action_space, ConstantSchedule(1e-3))


@pytest.mark.parametrize("max_splits", [0, 1])
def test_a_decode_is_the_policy_playing_the_environment(tasks, policy, max_splits):
    # Empty ranks look alike, and then rounding would decide: so each has a little more memory than the last.
    problems = [replace(task.problem, capacity_R=task.problem.bytes_N.sum() * np.array([4, 5, 7])) for task in tasks]
    env = PlacementEnv(problems, max_splits=max_splits)
    player = PlacementPolicy(env.observation_space, env.action_space, ConstantSchedule(1e-3))
    player.network = policy.network
    placements = decode(policy.network, env.tasks)
    for index in range(len(tasks)):
        observation, _ = env.reset(options={"task": index})
        state, done = None, False
        while not done:
            action, state = player.predict(observation, state, deterministic=True)
            observation, reward, done, _, info = env.step(action)
        assert placements.ranks[index].tolist() == info["ranks"].tolist()
        assert placements.rewards_D[index] == pytest.approx(reward, rel=1e-5)
        assert placements.cost_ms_DR[index] == pytest.approx(info["cost_ms"], rel=1e-5)
        assert placements.problems[index].shards == info["problem"].shards


def test_a_beam_of_one_is_the_greedy_decode(tasks, policy):
    greedy, beam = decode(policy.network, tasks), decode_beam(policy.network, tasks, width=1)
    # Ranks that look alike may be named the other way round.
    np.testing.assert_allclose(np.sort(beam.cost_ms_DR), np.sort(greedy.cost_ms_DR), rtol=1e-6)


def test_a_beam_as_wide_as_all_placements_finds_the_best(tasks, policy):
    small = tasks[0]  # four items on three ranks: 81 placements, 14 that differ by more than the ranks' numbers
    beam = decode_beam(policy.network, [small], width=81)
    best_ms = min(
        float(small.problem.rank_ms(np.array(ranks)).max())
        for ranks in product(range(3), repeat=small.problem.num_items)
    )
    assert beam.objective_ms_D[0] == pytest.approx(best_ms, rel=1e-5)
    assert small.problem.rank_ms(beam.ranks[0]).max() == pytest.approx(best_ms, rel=1e-5)


def test_beginnings_that_are_kept_are_priced_as_their_placements(tasks, policy):
    placements = decode_beam(policy.network, tasks, width=6)
    for index, task in enumerate(tasks):
        expected_ms_R = task.problem.rank_ms(placements.ranks[index])
        np.testing.assert_allclose(placements.cost_ms_DR[index], expected_ms_R, rtol=1e-5)
        assert placements.is_feasible_D[index] == task.problem.is_feasible(placements.ranks[index])


@pytest.fixture(scope="module")
def cut(tasks):
    return [PlacementTask.of(task.problem, max_splits=1) for task in tasks]


def test_a_beam_of_one_is_the_greedy_decode_where_items_may_be_split(cut, policy):
    greedy, beam = decode(policy.network, cut), decode_beam(policy.network, cut, width=1)
    np.testing.assert_allclose(np.sort(beam.cost_ms_DR), np.sort(greedy.cost_ms_DR), rtol=1e-6)


def test_beginnings_that_end_early_are_kept_as_they_ended(cut, policy):
    placements = decode_beam(policy.network, cut, width=12)
    for index in range(len(cut)):
        problem, ranks_N = placements.problems[index], placements.ranks[index]
        np.testing.assert_allclose(placements.cost_ms_DR[index], problem.rank_ms(ranks_N), rtol=1e-5)
        columns = sum(shard.columns[1] - shard.columns[0] for shard in problem.shards)
        assert columns == sum(table.embedding_dim for table in problem.tables.tables), "all columns are placed once"
    small = cut[2]  # one item, whole or in halves
    wide = decode_beam(policy.network, [small], width=200)
    assert wide.objective_ms_D[0] <= decode(policy.network, [small]).objective_ms_D[0] + 1e-6


def test_a_beam_keeps_to_where_items_may_go(tasks, policy):
    """Empty ranks look alike, but an item may be allowed on the last of them only."""
    problem = tasks[1].problem
    allowed_NR = np.ones((problem.num_items, 3), dtype=np.bool_)
    allowed_NR[::2] = [False, False, True]
    placements = decode_beam(policy.network, [PlacementTask.of(replace(problem, allowed_NA=allowed_NR))], width=4)
    assert placements.is_feasible_D.all()
    assert (placements.ranks[0][::2] == 2).all()


def test_beams_are_checked(tasks, policy):
    with pytest.raises(InvalidOptionError, match="width"):
        decode_beam(policy.network, tasks, width=0)


def test_samples_come_task_by_task_and_by_the_generator(tasks, policy):
    def sample(seed):
        return decode(policy.network, tasks, num_samples=5, generator=torch.Generator().manual_seed(seed))

    first, same, other = sample(0), sample(0), sample(1)
    assert [len(ranks) for ranks in first.ranks] == [4] * 5 + [7] * 5 + [1] * 5
    assert all((ranks == again).all() for ranks, again in zip(first.ranks, same.ranks, strict=True))
    assert any((ranks != again).any() for ranks, again in zip(first.ranks, other.ranks, strict=True))
    assert len({tuple(ranks) for ranks in first.ranks[5:10]}) > 1


@given(seed=st.integers(0, 10_000), share=st.floats(0.37, 1.0))
@settings(max_examples=20)
def test_limits_hold_however_little_room_there_is(make_problem, policy, seed, share):
    rng = np.random.default_rng(seed)
    rows = rng.integers(10, 5000, 8).tolist()
    free = make_problem(rng.uniform(1, 5, 8).tolist(), num_ranks=3, rows=rows)
    hbm_bytes = max(int(free.bytes_N.sum() * share), int(free.bytes_N.max()))
    problem = make_problem(rng.uniform(1, 5, 8).tolist(), num_ranks=3, rows=rows, hbm_bytes=hbm_bytes)
    try:
        task = PlacementTask.of(problem)
    except InfeasiblePlanError:
        return
    placements = decode(policy.network, [task], num_samples=4, generator=torch.Generator().manual_seed(seed))
    assert placements.is_feasible_D.all()
    assert all(problem.is_feasible(ranks_N) for ranks_N in placements.ranks)


def test_renumbering_ranks_that_are_not_alike_renumbers_the_placement(make_problem, policy):
    rng = np.random.default_rng(0)
    factors = rng.uniform(1, 9, 12)
    problem = make_problem(factors.tolist(), num_ranks=3)
    # Every item may go to two ranks or three; the last rank has room for three items. The costliest three, which are
    # placed first, have no choice: among empty ranks, which look alike, the first would be taken.
    allowed_NR = np.array([[True, True, index % 3 > 0] for index in range(12)])
    allowed_NR[np.argsort(-factors)[:3]] = np.eye(3, dtype=bool)
    capacity_R = np.array([1 << 40, 1 << 40, 3 * problem.bytes_N.max()])
    problem = replace(problem, allowed_NA=allowed_NR, capacity_R=capacity_R)
    order = np.array([2, 0, 1])
    renumbered = replace(problem, allowed_NA=allowed_NR[:, order], capacity_R=capacity_R[order])
    first, second = (decode(policy.network, [PlacementTask.of(version)]) for version in (problem, renumbered))
    assert first.is_feasible_D[0]
    assert second.is_feasible_D[0]
    assert sorted(second.cost_ms_DR[0]) == pytest.approx(sorted(first.cost_ms_DR[0]))
    assert second.cost_ms_DR[0][0] == pytest.approx(first.cost_ms_DR[0][2])
