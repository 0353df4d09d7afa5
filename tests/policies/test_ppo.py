import numpy as np
import pytest
import torch
from stable_baselines3.common.logger import Logger

from autoshard.core.errors import InvalidOptionError
from env import PlacementVecEnv
from policies.algorithms.ppo import PlacementPPO, PPOSettings
from policies.algorithms.vtrace import compared_within_task

NUM_ITEMS = 12


@pytest.fixture
def make_ppo(make_tasks):
    def make(settings=None, num_groups=2, num_rollouts=4):
        env = PlacementVecEnv(make_tasks(5, num_tables=NUM_ITEMS, num_ranks=3), num_groups, num_rollouts)
        algorithm = PlacementPPO(env, settings or PPOSettings(), num_steps=NUM_ITEMS, seed=0)
        algorithm.set_logger(Logger(folder=None, output_formats=[]))
        return algorithm

    return make


def update(algorithm, times=1):
    for _ in range(times):
        algorithm.learn(NUM_ITEMS * algorithm.n_envs, reset_num_timesteps=False, log_interval=None)


def collect(algorithm):
    _, callback = algorithm._setup_learn(total_timesteps=1)
    algorithm.collect_rollouts(algorithm.env, callback, algorithm.rollout_buffer, NUM_ITEMS)
    return algorithm.rollout_buffer


def test_whole_episodes_are_scored_as_they_were_played_step_by_step(make_ppo):
    algorithm = make_ppo()
    update(algorithm)  # the LSTM of the episodes before is forgotten
    for batch in collect(algorithm).get(NUM_ITEMS * 2):
        values, log_probs, entropies = algorithm.policy.evaluate_actions(batch.observations, batch.actions.long())
        assert torch.allclose(log_probs, batch.old_log_prob, atol=1e-5)
        assert torch.allclose(values, batch.old_values, atol=1e-5)
        assert (entropies > 0).all()


def test_minibatches_hold_every_episode_once_and_whole(make_ppo):
    buffer = collect(make_ppo())
    batches = list(buffer.get(NUM_ITEMS * 3))
    assert [len(batch.actions) for batch in batches] == [NUM_ITEMS * 3, NUM_ITEMS * 3, NUM_ITEMS * 2]
    played = {tuple(episode) for episode in buffer.log_probs.T.tolist()}
    found = [tuple(episode) for one in batches for episode in one.old_log_prob.reshape(NUM_ITEMS, -1).T.tolist()]
    assert len(found) == len(played) == 8
    assert set(found) == played


def test_returns_are_the_rewards_of_the_whole_placement(make_ppo):
    buffer = collect(make_ppo())
    assert buffer.returns == pytest.approx(np.broadcast_to(buffer.rewards[-1], buffer.returns.shape), abs=1e-5)
    assert not buffer.rewards[:-1].any()


def test_advantages_are_compared_within_a_task(make_ppo):
    plain = collect(make_ppo(PPOSettings(compare_within_task=False)))
    compared = collect(make_ppo(PPOSettings(compare_within_task=True)))
    tasks_TE = torch.from_numpy(np.tile(plain.tasks_E, (NUM_ITEMS, 1)))
    wanted = compared_within_task(torch.from_numpy(plain.advantages), tasks_TE).numpy()
    assert compared.advantages == pytest.approx(wanted, abs=1e-5)
    assert compared.returns == pytest.approx(plain.returns)


def test_it_learns_to_balance(make_ppo):
    algorithm = make_ppo(PPOSettings(learning_rate=3e-3), num_groups=4, num_rollouts=4)
    before = collect(algorithm).rewards[-1].mean()
    update(algorithm, 12)
    after = collect(algorithm).rewards[-1].mean()
    assert after > before + 0.15


@pytest.mark.parametrize("label", ["num_epochs", "num_minibatches"])
def test_settings_that_make_no_sense_are_refused(label):
    with pytest.raises(InvalidOptionError, match=f"{label}: must be at least 1, got 0"):
        PPOSettings(**{label: 0})
