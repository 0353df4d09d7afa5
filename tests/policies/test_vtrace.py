import numpy as np
import pytest
import torch
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.logger import Logger
from stable_baselines3.common.vec_env import DummyVecEnv

from env import PlacementEnv, PlacementTask, PlacementVecEnv, SplitBy
from policies.algorithms.trajectories import Trajectories
from policies.algorithms.vtrace import (
    VTrace,
    VTraceSettings,
    _first_episodes,
    _lagged_advantages,
    _whole_advantages,
    compared_within_task,
)
from policies.network.actor_critic import PlacementPolicy
from policies.planning.decoding import decode


class Checked(VTrace):
    """Compares the learner's log-probabilities with those of the player."""

    worst = 0.0

    def train(self):
        data = self.trajectories
        states_TES, _ = self.states(data.observations, data)
        observations = data.observations
        logits = self.policy.network.logits(
            states_TES.flatten(0, 1),
            observations["choice_codes"].flatten(0, 1),
            observations["choice_costs"].flatten(0, 1),
            observations["choice_kinds"].flatten(0, 1),
            observations["action_mask"].flatten(0, 1).bool(),
        )
        log_probs = logits.log_softmax(-1).gather(-1, data.actions_TE.flatten()[:, None])[:, 0]
        difference = (log_probs - data.log_probs_TE.flatten()).abs().max()
        self.worst = max(self.worst, difference.item())
        super().train()


def quiet(algorithm):
    algorithm.set_logger(Logger(folder=None, output_formats=[]))
    return algorithm


@pytest.fixture
def problems(make_tasks):
    # Of 3, 4 and 5 items, so that episodes of a batch begin and end at different steps.
    return [make_tasks(1, num_tables=size, seed=size)[0].problem for size in (3, 4, 5)]


def test_the_learner_sees_what_the_player_saw_though_episodes_end_within_trajectories(problems):
    env = PlacementVecEnv([PlacementTask.of(problem) for problem in problems], num_groups=3, num_rollouts=2)
    algorithm = quiet(Checked(PlacementPolicy, env, VTraceSettings(num_steps=7), seed=0))
    algorithm.learn(5 * 7 * env.num_envs, log_interval=None)
    assert algorithm._n_updates == 5
    assert 0 < algorithm.worst < 1e-5


@pytest.mark.slow
def test_training_solves_a_toy_problem_and_unseen_ones_like_it(make_problem):
    # Three pairs of items that cost 10 together, on three ranks: every rank can be made to cost 10.
    def tasks(num_tasks, seed):
        rng = np.random.default_rng(seed)
        larger = rng.uniform(5.2, 9.5, (num_tasks, 3))
        costs = rng.permuted(np.concatenate([larger, 10 - larger], axis=1), axis=1)
        return [PlacementTask.of(make_problem(row.tolist(), num_ranks=3)) for row in costs]

    unseen = tasks(20, seed=1)
    env = PlacementVecEnv(tasks(30, seed=0), num_groups=4, num_rollouts=8)
    settings = VTraceSettings(num_steps=6, learning_rate=2e-3, compare_within_task=True)
    algorithm = quiet(VTrace(PlacementPolicy, env, settings, seed=0))
    assert decode(algorithm.policy.network, unseen).rewards_D.mean() < 0.9
    algorithm.learn(40 * 6 * env.num_envs, log_interval=None)
    rewards = decode(algorithm.policy.network, unseen).rewards_D
    assert rewards.mean() > 0.995
    assert rewards.min() > 0.98


@pytest.mark.slow
def test_training_learns_where_cutting_pays(make_problem):
    # One table costs more than all others together: whole, it leaves a rank with little to do.
    def tasks(num_tasks, seed):
        rng = np.random.default_rng(seed)
        costs = np.concatenate([rng.uniform(50, 70, (num_tasks, 1)), rng.uniform(10, 20, (num_tasks, 2))], axis=1)
        options = {"max_splits": 2, "split_by": SplitBy.HOT_ROWS}
        return [PlacementTask.of(make_problem(row.tolist(), num_ranks=2), **options) for row in costs]

    unseen = tasks(20, seed=1)
    env = PlacementVecEnv(tasks(20, seed=0), num_groups=4, num_rollouts=8)
    settings = VTraceSettings(num_steps=3, learning_rate=2e-3, compare_within_task=True, whole_episodes=True)
    algorithm = quiet(VTrace(PlacementPolicy, env, settings, seed=0))
    before = decode(algorithm.policy.network, unseen)
    assert before.rewards_D.mean() < 0.7
    assert {len(ranks) for ranks in before.ranks} == {3}, "at first, nothing is cut"
    for _ in range(60):
        algorithm.learn(3 * env.num_envs, log_interval=None, reset_num_timesteps=False)
    after = decode(algorithm.policy.network, unseen)
    assert after.rewards_D.mean() > 0.85
    assert {len(ranks) for ranks in after.ranks} <= {4, 5, 6, 7}


def test_an_update_is_one_whole_episode_in_each_environment(problems):
    tasks = [PlacementTask.of(problem, max_splits=1) for problem in problems]
    env = PlacementVecEnv(tasks, num_groups=3, num_rollouts=2)
    algorithm = quiet(Checked(PlacementPolicy, env, VTraceSettings(num_steps=3, whole_episodes=True), seed=0))
    lengths = set()
    for update in range(6):
        algorithm.learn(3 * env.num_envs, log_interval=None, reset_num_timesteps=False)
        assert algorithm._n_updates == update + 1
        data = algorithm.trajectories
        assert data.starts_TE[0].all()
        counts_TE = _first_episodes(data).bool()
        assert ((counts_TE & data.dones_TE).sum(dim=0) == 1).all()
        assert (data.tasks_TE == data.tasks_TE[0])[counts_TE].all()
        lengths |= set(counts_TE.sum(dim=0).tolist())
        assert (env.batch.observe()["choice_codes"][:, :2] == 0).all(), "the ranks are empty again"
    assert len(lengths) > 3
    assert 0 < algorithm.worst < 1e-5


@pytest.mark.slow
def test_the_papers_preset_learns_on_plain_environments(problems):
    env = DummyVecEnv([lambda: PlacementEnv(problems[:1])] * 8)
    algorithm = quiet(VTrace(PlacementPolicy, env, seed=0))
    before = {name: value.clone() for name, value in algorithm.policy.network.named_parameters()}
    algorithm.learn(2 * 100 * 8, log_interval=None)
    assert algorithm.num_timesteps == 1600
    assert algorithm._n_updates == 2
    for name, value in algorithm.policy.network.named_parameters():
        assert torch.isfinite(value).all()
        assert not torch.equal(value, before[name]), name


def test_callbacks_and_evaluation_of_stable_baselines3_work(problems):
    calls = []

    class Stops(BaseCallback):
        def _on_step(self):
            calls.append(self.num_timesteps)
            return len(calls) < 9

    algorithm = VTrace(PlacementPolicy, PlacementEnv(problems), VTraceSettings(num_steps=4), seed=0)
    quiet(algorithm).learn(100, callback=Stops())
    assert calls == list(range(1, 10))
    rewards, lengths = evaluate_policy(algorithm, algorithm.get_env(), n_eval_episodes=6, return_episode_rewards=True)
    assert all(0 <= reward <= 1 for reward in rewards)
    assert set(lengths) <= {3, 4, 5}


def test_the_same_seed_learns_the_same(problems):
    def weights():
        env = PlacementVecEnv([PlacementTask.of(problem) for problem in problems], 2, 2)
        algorithm = quiet(VTrace(PlacementPolicy, env, VTraceSettings(num_steps=5), seed=3))
        algorithm.learn(2 * 5 * 4, log_interval=None)
        return torch.cat([value.flatten() for value in algorithm.policy.network.parameters()])

    assert torch.equal(weights(), weights())


def test_advantages_are_compared_with_those_of_the_same_task_and_step():
    tasks = torch.tensor([[4, 4, 9, 9]] * 2)
    advantages = torch.tensor([[1.0, 3.0, 0.5, 0.5], [-10.0, -8.0, 7.0, 7.0]])
    compared = compared_within_task(advantages, tasks)
    assert compared.tolist() == [[-1.0, 1.0, 0.0, 0.0], [-1.0, 1.0, 0.0, 0.0]]


def test_what_a_task_is_worth_does_not_change_how_its_episodes_compare():
    rng = np.random.default_rng(0)
    tasks = torch.tensor([[0] * 6 + [1] * 6] * 5)
    advantages = torch.from_numpy(rng.normal(size=(5, 12)))
    scaled = torch.where(tasks == 1, 3.0 * advantages + 2.0, advantages)
    assert torch.allclose(compared_within_task(scaled, tasks), compared_within_task(advantages, tasks), atol=1e-6)


def trajectories(**rows):
    """Of which nothing was seen."""
    shape = rows["rewards_TE"].shape
    return Trajectories(
        observations={},
        last_observation={},
        actions_TE=torch.zeros(shape, dtype=torch.int64),
        log_probs_TE=torch.zeros(shape),
        before=(torch.zeros(1), torch.zeros(1)),
        **rows,
    )


def test_episodes_of_different_lengths_are_compared_by_their_outcome():
    # Of one task; the first ends after 2 steps, and the next one in its place after the last, with a reward of its own.
    rewards_TE, dones_TE = torch.zeros(4, 3), torch.zeros(4, 3, dtype=torch.bool)
    for episode, (last, reward) in enumerate([(1, 0.5), (3, 0.7), (2, 0.9)]):
        rewards_TE[last, episode], dones_TE[last, episode] = reward, True
    rewards_TE[3, 0], dones_TE[3, 0] = 9.0, True
    starts_TE = torch.cat([torch.ones(1, 3, dtype=torch.bool), dones_TE[:-1]])
    tasks_TE = torch.zeros(4, 3, dtype=torch.int64)
    data = trajectories(rewards_TE=rewards_TE, dones_TE=dones_TE, starts_TE=starts_TE, tasks_TE=tasks_TE)
    assert _first_episodes(data).tolist() == [[1, 1, 1], [1, 1, 1], [0, 1, 1], [0, 1, 0]]
    advantages_TE = _whole_advantages(torch.zeros(4, 3), (~dones_TE).float(), data)
    unit = 1.5**0.5
    assert advantages_TE[:, 0].tolist() == pytest.approx([-unit, -unit, 0, 0], abs=1e-5)
    assert advantages_TE[:, 1].tolist() == pytest.approx([0, 0, 0, 0], abs=1e-5)
    assert advantages_TE[:, 2].tolist() == pytest.approx([unit, unit, unit, 0], abs=1e-5)


def test_lag_makes_no_advantage_where_all_did_equally_well():
    """A value head that is off by any amount would, times ratios below 1."""
    num_steps, num_episodes = 5, 6
    rewards_TE = torch.zeros(num_steps, num_episodes)
    rewards_TE[-1] = 0.8
    rows = {name: torch.zeros(num_steps, num_episodes, dtype=torch.bool) for name in ("starts_TE", "dones_TE")}
    rows["dones_TE"][-1] = True
    data = trajectories(rewards_TE=rewards_TE, tasks_TE=torch.tensor([[0, 0, 0, 1, 1, 1]] * num_steps), **rows)
    log_ratios_TE = torch.randn(num_steps, num_episodes, generator=torch.Generator().manual_seed(0))
    advantages_TE = _lagged_advantages(log_ratios_TE, (~data.dones_TE).float(), data)
    assert advantages_TE.abs().max() == 0
    rewards_TE[-1, 0] = 0.9
    advantages_TE = _lagged_advantages(log_ratios_TE, (~data.dones_TE).float(), data)
    assert (advantages_TE[:, 0] > 0).all()
    assert advantages_TE[:, 3:].abs().max() == 0
