import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from autoshard.core.errors import ExecutionError
from env import PlacementVecEnv
from policies.algorithms.vtrace import VTraceSettings
from policies.network.actor_critic import PlacementPolicy
from policies.network.weights import to_arrays
from policies.rollout.actor_processes import ActorProcesses
from policies.rollout.actors import MOST_DEATHS, ActorDiedError, ActorPool, ActorSetup, Order, Player
from policies.rollout.lagged import LaggedVTrace
from policies.training.trainer import Budget, PolicyTrainer, TrainingOptions

NUM_ITEMS = 8


@pytest.fixture(scope="module")
def setup(make_tasks):
    return ActorSetup(
        tasks=tuple(make_tasks(5, num_tables=NUM_ITEMS, num_ranks=3)),
        num_groups=2,
        num_rollouts=3,
        settings=VTraceSettings(num_steps=NUM_ITEMS, compare_within_task=True),
        seed=0,
    )


@pytest.fixture
def weights(setup):
    torch.manual_seed(0)
    env = PlacementVecEnv(setup.tasks, 1, 1)
    return to_arrays(PlacementPolicy(env.observation_space, env.action_space, lambda _: 0.0).network)


class PlayersHere:
    """A launcher whose players live in this process, and die when `dies` says so.

    Args:
        dies: Told how many orders were received before; whether the actor dies instead of receiving this one.
    """

    def __init__(self, dies=lambda _: False):
        self.dies, self.num_received, self.running = dies, 0, 0

    def launch(self, setup):
        self.running += 1
        return PlayerHere(self, Player(setup))

    def close(self):
        pass


class PlayerHere:
    def __init__(self, launcher, player):
        self.launcher, self.player = launcher, player

    def send(self, order):
        self.order = order

    def receive(self):
        self.launcher.num_received += 1
        if self.launcher.dies(self.launcher.num_received - 1):
            raise ActorDiedError("gone")
        return self.player.play(self.order)

    def close(self):
        self.launcher.running -= 1


def same(left, right):
    return all(np.array_equal(left.columns[name], right.columns[name]) for name in left.columns)


def test_an_order_decides_what_is_played_whoever_plays_it(setup, weights):
    first, second = Player(setup), Player(setup)
    order = Order(number=3, weights=weights)
    first.play(Order(number=0, weights=weights))
    assert same(first.play(order), second.play(order))
    assert not same(first.play(order), first.play(Order(number=4, weights=weights)))


def test_orders_play_all_tasks_before_any_comes_again(setup):
    played = np.concatenate([setup.tasks_of(number) for number in range(5)])
    assert sorted(played[:5].tolist()) == sorted(played[5:].tolist()) == [0, 1, 2, 3, 4]
    assert played[:5].tolist() != played[5:].tolist()


def test_probabilities_are_those_of_the_orders_weights(setup, weights):
    played = Player(setup).play(Order(number=0, weights=weights))
    env = PlacementVecEnv(setup.tasks, 1, 1)
    policy = PlacementPolicy(env.observation_space, env.action_space, lambda _: 0.0)
    policy.network.load_state_dict({name: torch.from_numpy(value) for name, value in weights.items()})
    data = played.trajectories(policy)
    state = data.before
    for step in range(NUM_ITEMS):
        logits_EA, _, state = policy.step({key: value[step] for key, value in data.observations.items()}, state)
        log_probs_E = logits_EA.log_softmax(dim=-1).gather(-1, data.actions_TE[step][:, None])[:, 0]
        assert torch.allclose(log_probs_E, data.log_probs_TE[step], atol=1e-5)
    assert [episode["r"] for episode in played.episodes] == pytest.approx(data.rewards_TE[-1].tolist())


def test_weights_are_as_many_updates_old_as_there_are_actors(setup, weights):
    with ActorPool(PlayersHere(), setup, 3) as pool:
        taken = [pool.take(weights) for _ in range(6)]
    assert [lag for _, lag in taken] == [0, 1, 2, 3, 3, 3]
    player = Player(setup)
    for number, (played, _) in enumerate(taken):
        assert same(played, player.play(Order(number=number, weights=weights)))


def test_what_a_dead_actor_had_in_hand_is_played_by_its_successor(setup, weights):
    launcher = PlayersHere(dies=lambda number: number in (1, 2, 5))
    with ActorPool(launcher, setup, 2) as pool:
        played = [pool.take(weights)[0] for _ in range(5)]
        assert pool.num_deaths == 3
        assert launcher.running == 2
    assert launcher.running == 0
    with ActorPool(PlayersHere(), setup, 2) as pool:
        assert all(same(one, pool.take(weights)[0]) for one in played)


def test_actors_that_keep_dying_are_given_up(setup, weights):
    launcher = PlayersHere(dies=lambda _: True)
    with ActorPool(launcher, setup, 2) as pool, pytest.raises(ExecutionError, match="actors keep dying, 7 so far"):
        pool.take(weights)
    assert pool.num_deaths == 2 * MOST_DEATHS + 1


def test_learning_is_corrected_for_the_lag(setup):
    """The ratio of an action's probability now and then is 1 without lag, and is not with it."""
    ratios = []

    class Watched(LaggedVTrace):
        def train(self):
            data = self.trajectories
            with torch.no_grad():
                states_TES, _ = self.states(data.observations, data)
                for step in (0, NUM_ITEMS - 1):
                    seen = {key: value[step] for key, value in data.observations.items()}
                    logits_EA = self.policy.network.logits(states_TES[step], *choices_seen(seen))
                    now_E = logits_EA.log_softmax(dim=-1).gather(-1, data.actions_TE[step][:, None])[:, 0]
                    ratios.append((now_E - data.log_probs_TE[step]).exp())
            super().train()

    from stable_baselines3.common.logger import Logger

    from policies.network.network import choices_seen

    settings = VTraceSettings(num_steps=NUM_ITEMS, learning_rate=1e-2, compare_within_task=True)
    with ActorPool(PlayersHere(), setup, 2) as pool:
        algorithm = Watched(PlacementVecEnv(setup.tasks, 2, 3), settings, pool, seed=0)
        algorithm.set_logger(Logger(folder=None, output_formats=[]))
        for _ in range(4):
            algorithm.learn(NUM_ITEMS * 6, reset_num_timesteps=False, log_interval=None)
    assert torch.allclose(torch.cat(ratios[:2]), torch.ones(12), atol=1e-4)
    assert (torch.cat(ratios[4:]) - 1).abs().max() > 1e-2
    assert (algorithm.lag.mean, algorithm.lag.most) == (5 / 4, 2)


def train(make_tasks, launcher, num_actors=1):
    problems = [task.problem for task in make_tasks(5, num_tables=NUM_ITEMS, num_ranks=3)]
    options = TrainingOptions(num_groups=2, num_rollouts=3, evaluate_every=2, num_actors=num_actors)
    trainer = PolicyTrainer(problems, problems, options=options, launcher=launcher)
    trainer.run(Budget(num_updates=6))
    return trainer


class Killing(ActorProcesses):
    """Kills the process of the first actor once it has something to play."""

    def __init__(self):
        super().__init__()
        self.pids = []

    def launch(self, setup):
        actor = super().launch(setup)
        self.pids.append(actor.pid)
        if len(self.pids) == 1:
            send = actor.send

            def send_and_kill(order):
                send(order)
                os.kill(actor.pid, signal.SIGKILL)

            actor.send = send_and_kill
        return actor


def test_an_actor_may_be_closed_twice(setup):
    actor = ActorProcesses().launch(setup)
    pid = actor.pid
    actor.close()
    actor.close()
    assert not is_alive(pid)


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.slow
def test_processes_train_like_players_here_even_if_one_is_killed(make_tasks):
    launcher = Killing()
    trainer = train(make_tasks, launcher)
    assert trainer.pool.num_deaths == 1
    assert len(launcher.pids) == 2
    assert not any(is_alive(pid) for pid in launcher.pids)
    here = train(make_tasks, PlayersHere())
    assert trainer.algorithm.lag == here.algorithm.lag
    for name, value in to_arrays(here.network).items():
        assert to_arrays(trainer.network)[name] == pytest.approx(value, abs=1e-6), name


@pytest.mark.slow
def test_a_failure_of_an_actor_is_told(setup):
    with ActorPool(ActorProcesses(), setup, 1) as pool:
        with pytest.raises(ExecutionError, match="an actor failed: ModelError: order 0"):
            pool.take({"nothing": np.zeros(1)})
        (actor,) = pool.actors
        pid = actor.pid
    assert not is_alive(pid)


TRAIN_FOR_LONG = """
import sys
import pytest
from policies.training.trainer import Budget, PolicyTrainer, TrainingOptions
from policies.planning.tasks import TaskSplit, TaskKind, sample_problems, task_seeds
from autoshard.evaluation.analytic import AnalyticCostModel
from autoshard.formats import load_tables

if __name__ == "__main__":
    pool = load_tables("metasyn").scaled(64)
    kind = TaskKind(device="cpu", num_tables=6, num_ranks=2)
    problems = sample_problems(pool, AnalyticCostModel.for_device("cpu"), kind, task_seeds(TaskSplit.TRAIN, 4))
    trainer = PolicyTrainer(problems, problems, options=TrainingOptions(num_actors=2, evaluate_every=1))
    def told(evaluation):
        print("PIDS", *[actor.pid for actor in trainer.pool.actors], flush=True)
    trainer.run(Budget(seconds=600), on_evaluated=told)
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_actor_outlives_its_learner(tmp_path, number):
    script = tmp_path / "learner.py"
    script.write_text(TRAIN_FOR_LONG)
    learner = subprocess.Popen(
        [sys.executable, "-W", "ignore", str(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    line = learner.stdout.readline()
    assert line.startswith("PIDS"), learner.communicate()[1]
    pids = [int(pid) for pid in line.split()[1:]]
    assert all(is_alive(pid) for pid in pids)
    if number is signal.SIGINT:
        os.killpg(learner.pid, number)  # as a terminal does
    else:
        learner.send_signal(number)
    _, errors = learner.communicate(timeout=60)
    assert learner.returncode != 0
    deadline = time.monotonic() + 30
    while any(is_alive(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(is_alive(pid) for pid in pids)
    if number is signal.SIGINT:
        assert errors.count("Traceback") == 1, errors  # the learner's
