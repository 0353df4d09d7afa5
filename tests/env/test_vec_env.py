import numpy as np
import pytest

from autoshard.core.errors import InvalidOptionError
from env import PlacementEnv, PlacementTask, PlacementVecEnv


@pytest.fixture(scope="module")
def problems(make_problem):
    return [make_problem(num_tables=size, seed=size) for size in (3, 5, 6, 4)]


@pytest.fixture
def tasks(problems):
    return [PlacementTask.of(problem) for problem in problems]


def rollout(venv, seed, num_steps):
    """Everything that a learner sees, with random actions."""
    rng = np.random.default_rng(seed)
    venv.seed(seed)
    seen = [venv.reset()]
    for _ in range(num_steps):
        seen.append(venv.step(rng.integers(0, 3, venv.num_envs)))
    return seen


def test_its_episodes_are_those_of_the_single_environment(problems, tasks):
    venv = PlacementVecEnv(tasks, num_groups=2, num_rollouts=2)
    venv.seed(3)
    observation = venv.reset()
    envs = [PlacementEnv(problems) for _ in range(4)]
    singles = [
        env.reset(options={"task": task})[0] for env, task in zip(envs, venv.get_attr("task_index"), strict=True)
    ]
    rng = np.random.default_rng(0)
    num_ended = 0
    for _ in range(20):
        actions = rng.integers(0, 3, 4)
        observation, rewards, dones, infos = venv.step(actions)
        for index, env in enumerate(envs):
            singles[index], reward, done, _, info = env.step(actions[index])
            assert rewards[index] == pytest.approx(reward, rel=1e-5)
            assert dones[index] == done
            if done:
                num_ended += 1
                for key, value in singles[index].items():
                    assert infos[index]["terminal_observation"][key] == pytest.approx(value, rel=1e-5, abs=1e-6)
                assert infos[index]["ranks"].tolist() == info["ranks"].tolist()
                assert infos[index]["episode"]["r"] == pytest.approx(reward, rel=1e-5)
                singles[index], _ = env.reset(options={"task": venv.get_attr("task_index")[index]})
            for key, value in singles[index].items():
                assert observation[key][index] == pytest.approx(value, rel=1e-5, abs=1e-6)
    assert num_ended >= 8


def test_a_groups_episodes_are_of_one_task_and_tasks_are_not_drawn_twice_in_a_row(tasks):
    venv = PlacementVecEnv(tasks, num_groups=4, num_rollouts=3)
    venv.seed(0)
    venv.reset()
    drawn = np.array(venv.get_attr("task_index")).reshape(4, 3)
    assert (drawn == drawn[:, :1]).all()
    assert sorted(drawn[:, 0].tolist()) == [0, 1, 2, 3]


def test_the_same_seed_gives_the_same_rollout(tasks):
    first = rollout(PlacementVecEnv(tasks, 2, 2), seed=5, num_steps=12)
    second = rollout(PlacementVecEnv(tasks, 2, 2), seed=5, num_steps=12)
    for (_, rewards, dones, _), (_, same_rewards, same_dones, _) in zip(first[1:], second[1:], strict=True):
        assert (rewards == same_rewards).all()
        assert (dones == same_dones).all()


def test_draws_go_on_where_a_saved_state_left_off(tasks):
    venv = PlacementVecEnv(tasks, 2, 2)
    rollout(venv, seed=1, num_steps=0)
    state = venv.draw_state()
    later = PlacementVecEnv(tasks, 2, 2)
    later.reset()
    observation = later.restore_draws(state)
    assert later.get_attr("task_index") == venv.get_attr("task_index")
    assert (observation["choice_codes"] == 0).all()
    rng = np.random.default_rng(0)
    for _ in range(30):
        actions = rng.integers(0, 3, 4)
        assert (venv.step(actions)[1] == later.step(actions)[1]).all()
        assert later.get_attr("task_index") == venv.get_attr("task_index")


def test_a_reset_after_that_goes_on_with_the_draws_too(tasks):
    venv = PlacementVecEnv(tasks, 2, 1)
    venv.seed(3)
    drawn = []
    for _ in range(4):
        venv.reset()
        drawn.append((venv.draw_state(), venv.get_attr("task_index")))
    later = PlacementVecEnv(tasks, 2, 1)
    later.seed(3)
    later.restore_draws(drawn[1][0])
    for _, task_index in drawn[2:]:
        later.reset()
        assert later.get_attr("task_index") == task_index


def test_it_needs_room_for_an_episode(tasks):
    with pytest.raises(InvalidOptionError, match="at least 1"):
        PlacementVecEnv(tasks, 0, 2)
