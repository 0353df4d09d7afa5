"""The twin is the environment: same observations, rewards and ends, step for step."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoshard.core.errors import InvalidOptionError
from env import PlacementBatch, PlacementTask, TablePlacementEnv

OWNERS = np.array([0, 1, 2, 3, 0, 3])


@pytest.fixture(scope="module")
def problems(make_problem):
    tight = int(make_problem(num_tables=9, seed=2).bytes_N.sum() * 0.45)
    return [
        make_problem(num_tables=7, seed=0),
        make_problem(num_tables=4, seed=1, pinned={0: (1,), 2: (0, 2)}),
        make_problem(num_tables=9, seed=2, hbm_bytes=tight),
        make_problem(num_tables=1, seed=3),
    ]


def assert_same(single, batch, episode):
    assert single.keys() == batch.keys()
    for key, value in single.items():
        assert batch[key].dtype == value.dtype, key
        assert batch[key][episode] == pytest.approx(value, rel=1e-5, abs=1e-6), key


@pytest.mark.parametrize("measured", [False, True])
@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=15)
def test_every_step_equals_that_of_single_environments(problems, measured, seed):
    rng = np.random.default_rng(seed)
    reward_ms = (lambda problem, ranks_N: problem.rank_ms(ranks_N) ** 2 + 0.1) if measured else None
    envs = [TablePlacementEnv(problems, reward_ms) for _ in OWNERS]
    singles = [env.reset(options={"task": owner})[0] for env, owner in zip(envs, OWNERS, strict=True)]
    batch = PlacementBatch([PlacementTask.of(problem) for problem in problems], len(OWNERS), reward_ms)
    batch.begin(np.arange(len(OWNERS)), OWNERS)
    live = set(range(len(OWNERS)))
    while live:
        observed = batch.observe()
        for episode in live:
            assert_same(singles[episode], observed, episode)
        actions = rng.integers(0, 3, len(OWNERS))
        finished = batch.step(actions)
        for episode in sorted(live):
            singles[episode], reward, done, _, info = envs[episode].step(actions[episode])
            assert done == (episode in finished.episodes_D)
            if not done:
                assert reward == 0
                continue
            live.remove(episode)
            place = finished.episodes_D.tolist().index(episode)
            assert finished.rewards_D[place] == pytest.approx(reward, rel=1e-5)
            assert finished.cost_ms_DR[place] == pytest.approx(info["cost_ms"], rel=1e-5)
            assert finished.ranks[place].tolist() == info["ranks"].tolist()
            assert bool(finished.is_feasible_D[place]) == info["is_feasible"]
            assert_same(singles[episode], batch.observe(), episode)
    assert batch.is_done.all()


def test_an_episode_that_is_begun_anew_starts_from_nothing(problems):
    batch = PlacementBatch([PlacementTask.of(problem) for problem in problems], 2)
    batch.begin(np.array([0, 1]), np.array([0, 1]))
    first = batch.observe()
    batch.step(np.array([2, 1]))
    batch.observe()
    batch.begin(np.array([0]), np.array([0]))
    assert_same({key: value[0] for key, value in first.items()}, batch.observe(), 0)
    assert batch.observe()["remaining"][1] == pytest.approx(0.75)


def test_tasks_that_cannot_share_a_batch_are_refused(make_problem):
    tasks = [PlacementTask.of(make_problem()), PlacementTask.of(make_problem(num_ranks=4))]
    with pytest.raises(InvalidOptionError, match="as many ranks"):
        PlacementBatch(tasks, 2)
