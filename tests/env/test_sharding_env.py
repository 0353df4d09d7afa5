"""The Gymnasium environment over the game."""

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from stable_baselines3.common.env_checker import check_env as check_sb3_env

from autoshard.core.errors import InvalidOptionError
from env import ENV_ID, ShardingEnv
from policies.training.drawn_tasks import game_task
from tests import builders as make


def small_task(num_tables=4, num_ranks=4, seed=0):
    tables, machine = make.draw_task(num_tables, num_ranks, seed=seed, spare=0.5)
    return game_task(make.request(tables, machine))


@pytest.fixture(scope="module")
def tasks():
    return [small_task(), small_task(num_tables=3, num_ranks=2, seed=1)]


def rollout(env, seed, **options):
    """Rewards and the last info of an episode of choices drawn by the mask."""
    observation, info = env.reset(seed=seed, **options)
    rng, rewards, is_over = np.random.default_rng(seed), [], False
    while not is_over:
        action = rng.choice(np.flatnonzero(observation["action_mask"]))
        assert env.unwrapped.action_masks()[action]
        observation, reward, is_over, is_cut, info = env.step(action)
        assert not is_cut
        rewards.append(reward)
    return rewards, info


@pytest.mark.filterwarnings("ignore:Your observation choices has an unconventional shape")
def test_gymnasium_and_stable_baselines_accept_it(tasks):
    check_env(ShardingEnv(tasks), skip_render_check=True)
    check_sb3_env(ShardingEnv(tasks))


def test_it_is_made_by_its_name(tasks):
    env = gymnasium.make(ENV_ID, tasks=tasks)
    assert isinstance(env.unwrapped, ShardingEnv)
    assert env.reset(seed=0)[0] in env.observation_space


def test_only_the_end_is_rewarded_and_the_same_seed_plays_the_same(tasks):
    rewards, info = rollout(ShardingEnv(tasks), 3)
    assert not any(rewards[:-1])
    assert rewards[-1] > 0
    assert info["is_feasible"]
    assert info["layout"].step_ms() == pytest.approx(info["step_ms"])
    assert rollout(ShardingEnv(tasks), 3)[0] == rewards


def test_a_task_may_be_named(tasks):
    env = ShardingEnv(tasks)
    assert env.reset(options={"task": 1})[1] == {"task": 1}
    with pytest.raises(InvalidOptionError, match=r"options.task: must be in \[0, 2\), got 2"):
        env.reset(options={"task": 2})


def test_an_action_against_the_mask_ends_the_episode_without_a_reward(tasks):
    env = ShardingEnv(tasks)
    observation, _ = env.reset(seed=0, options={"task": 1})
    forbidden = int(np.flatnonzero(observation["action_mask"] == 0)[-1])
    _, reward, is_over, _, info = env.step(forbidden)
    assert (reward, is_over, info["is_feasible"]) == (0.0, True, False)
    with pytest.raises(gymnasium.error.ResetNeeded, match="call reset"):
        env.step(0)


def test_it_needs_a_task_and_an_action_of_the_space(tasks):
    with pytest.raises(InvalidOptionError, match="tasks: needs at least one task"):
        ShardingEnv([])
    env = ShardingEnv(tasks)
    env.reset(seed=0)
    with pytest.raises(InvalidOptionError, match="action: must be in"):
        env.step(10_000)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_stock_maskable_ppo_learns_a_small_task():
    """Without anything of this project but the environment, better than choices drawn by the mask."""
    contrib = pytest.importorskip("sb3_contrib", reason="needs sb3-contrib, for MaskablePPO")
    env = ShardingEnv([small_task(num_tables=4, num_ranks=2)])
    drawn = np.mean([rollout(env, seed)[0][-1] for seed in range(20)])
    learner = contrib.MaskablePPO("MultiInputPolicy", env, n_steps=256, seed=0, device="cpu", gamma=1.0)
    learner.learn(8192)
    observation, _ = env.reset(seed=0)
    is_over = False
    while not is_over:
        action, _ = learner.predict(observation, action_masks=env.action_masks(), deterministic=True)
        observation, reward, is_over, _, _ = env.step(action)
    assert reward > drawn + 0.05
