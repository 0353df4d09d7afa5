import gymnasium
import numpy as np
import pytest
import stable_baselines3.common.env_checker
from gymnasium.utils.env_checker import check_env

from autoshard.core.errors import InvalidOptionError
from env import ENV_ID, TablePlacementEnv


def play(env, actions, task=0):
    """Observations, rewards and the last info of an episode."""
    observation, _ = env.reset(options={"task": task})
    observations, rewards, done = [observation], [], False
    for action in actions:
        assert not done
        observation, reward, done, truncated, info = env.step(np.int64(action))
        assert not truncated
        observations.append(observation)
        rewards.append(reward)
    assert done
    return observations, rewards, info


@pytest.fixture
def env(make_problem):
    return TablePlacementEnv([make_problem(seed=0), make_problem(num_tables=5, seed=1)])


def test_the_registered_environment_passes_gymnasiums_checks(make_problem):
    env = gymnasium.make(ENV_ID, problems=[make_problem(), make_problem(seed=1)])
    check_env(env.unwrapped)


# Its advice for matrices is a custom policy, which there is.
@pytest.mark.filterwarnings("ignore:Your observation rank_co:UserWarning")
def test_it_passes_the_checks_of_stable_baselines3(env):
    stable_baselines3.common.env_checker.check_env(env)


def test_the_same_seed_draws_the_same_tasks(make_problem):
    problems = [make_problem(seed=seed) for seed in range(5)]

    def tasks():
        env = TablePlacementEnv(problems)
        return [env.reset(seed=seed)[1]["task"] for seed in (7, None, None, None, None, None)]

    assert tasks() == tasks()
    assert len(set(tasks())) > 1


def test_items_come_in_falling_price(env):
    task = env.tasks[0]
    observations, _, _ = play(env, [0] * task.num_items)
    problem = task.problem
    assert (np.diff(problem.kernel_ms_N[task.order_N]) <= 0).all()
    for step, item in enumerate(task.order_N):
        assert observations[step]["item_code"] == pytest.approx(problem.codes_NH[item] / task.item_scale)
    assert (observations[-1]["item_code"] == 0).all()


def test_observed_costs_are_those_of_the_ranks_without_and_with_the_item(env):
    task = env.tasks[0]
    problem = task.problem
    actions = [0, 1, 1, 2, 0, 1, 2]
    observations, _, _ = play(env, actions)
    for step in range(task.num_items):
        for rank in range(3):
            held = [task.order_N[index] for index in range(step) if actions[index] == rank]
            expected = [
                problem.model.price(problem.codes_NH[items].sum(axis=0, keepdims=True))[0] / task.even_ms
                for items in (held, [*held, task.order_N[step]])
            ]
            assert observations[step]["rank_costs"][rank] == pytest.approx(expected, rel=1e-5)


def test_the_reward_is_the_balance_of_the_prices_that_a_plan_has(env):
    task = env.tasks[0]
    actions = np.array([0, 1, 2, 2, 1, 0, 0])
    _, rewards, info = play(env, actions)
    problem = task.problem
    ranks_N = np.empty(7, dtype=np.int64)
    ranks_N[task.order_N] = actions
    cost_ms = problem.rank_ms(ranks_N)
    assert rewards[:-1] == [0.0] * 6
    assert rewards[-1] == pytest.approx(cost_ms.min() / cost_ms.max())
    assert (info["ranks"] == ranks_N).all()
    assert info["cost_ms"] == pytest.approx(cost_ms)
    assert info["is_feasible"]


def test_a_measured_reward_replaces_the_prediction(make_problem):
    seen = []

    def measure(problem, ranks_N):
        seen.append((problem, ranks_N.tolist()))
        return np.array([1.0, 2.0, 4.0])

    env = TablePlacementEnv([make_problem()], reward_ms=measure)
    _, rewards, info = play(env, [0, 1, 2, 0, 1, 2, 0])
    assert rewards[-1] == 0.25
    assert seen == [(env.tasks[0].problem, info["ranks"].tolist())]


def test_nothing_is_measured_beyond_the_memory_limit(make_problem):
    hbm_bytes = int(make_problem().bytes_N.sum() * 0.6)

    def measure(problem, ranks_N):
        raise AssertionError("this placement cannot run")

    env = TablePlacementEnv([make_problem(hbm_bytes=hbm_bytes)], reward_ms=measure)
    problem = env.tasks[0].problem
    _, rewards, info = play(env, [0] * 7)
    assert rewards[-1] == pytest.approx(-(problem.bytes_N.sum() / hbm_bytes - 1))
    assert not info["is_feasible"]


def test_the_mask_offers_allowed_ranks_with_room_and_without_room_the_allowed_ones(make_problem):
    free = make_problem()
    hbm_bytes = int(free.bytes_N.sum() * 0.6)
    first = int(np.argmax(free.kernel_ms_N))
    env = TablePlacementEnv([make_problem(hbm_bytes=hbm_bytes, pinned={first: (0, 1)})])
    problem, order_N = env.tasks[0].problem, env.tasks[0].order_N
    observations, _, _ = play(env, [0] * 7)
    assert observations[0]["action_mask"].tolist() == [1, 1, 0]
    held = problem.bytes_N[order_N[0]]
    for step in range(1, 7):
        fits = held + problem.bytes_N[order_N[step]] <= hbm_bytes
        assert observations[step]["action_mask"].tolist() == [int(fits), 1, 1]
        held += problem.bytes_N[order_N[step]]
    assert held > hbm_bytes
    only = make_problem(hbm_bytes=hbm_bytes, pinned=dict.fromkeys(range(7), (2,)))
    observations, rewards, _ = play(TablePlacementEnv([only]), [2] * 7)
    assert all(observation["action_mask"].tolist() == [0, 0, 1] for observation in observations[:-1])
    assert rewards[-1] < 0


def test_a_forbidden_rank_is_punished(make_problem):
    env = TablePlacementEnv([make_problem(pinned={3: (1,)})])
    position = env.tasks[0].order_N.tolist().index(3)
    actions = np.array([0, 1, 2, 0, 1, 2, 0])
    actions[position] = 1
    assert play(env, actions)[1][-1] > 0
    actions[position] = 0
    assert play(env, actions)[1][-1] == -1.0


def test_misuse_is_told_in_plain_words(env, make_problem, model):
    env.reset(seed=0)
    with pytest.raises(InvalidOptionError, match=r"must be in \[0, 3\), got 3"):
        env.step(3)
    with pytest.raises(InvalidOptionError, match=r"options.task: must be in \[0, 2\), got 2"):
        env.reset(options={"task": 2})
    with pytest.raises(InvalidOptionError, match="at least one"):
        TablePlacementEnv([])
    with pytest.raises(InvalidOptionError, match=r"problems\[1\]: must have as many ranks as the first \(3\), got 2"):
        TablePlacementEnv([make_problem(), make_problem(num_ranks=2)])
    play(env, [0] * 7)
    with pytest.raises(gymnasium.error.ResetNeeded):
        env.step(np.int64(0))
