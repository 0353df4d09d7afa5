"""Actors: processes that play episodes with weights of the past, while the learner learns.

Shape suffixes: T steps, E episodes, G groups of episodes, P tasks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol, Self

import numpy as np
import torch
from numpy.typing import NDArray
from stable_baselines3.common.logger import Logger

from autoshard.core.errors import ExecutionError
from env import PlacementTask, PlacementVecEnv
from policies.algorithms.training_options import VTraceSettings
from policies.algorithms.trajectories import Trajectories
from policies.algorithms.vtrace import VTrace
from policies.network.actor_critic import PlacementPolicy
from policies.network.weights import Arrays, load_arrays

#: Deaths per actor after which all is given up: something on this machine kills them.
MOST_DEATHS = 3
#: Columns of Trajectories, and those that stay on the CPU.
_COLUMNS = ("actions_TE", "log_probs_TE", "rewards_TE", "starts_TE", "dones_TE", "tasks_TE")
_ON_CPU = ("starts_TE", "tasks_TE")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ActorSetup:
    """What an actor needs to know once.

    Attributes:
        tasks: Tasks that are played.
        num_groups: Tasks per order.
        num_rollouts: Episodes per task.
        settings: Of V-trace.
        seed: Source of randomness, together with an order's number.
    """

    tasks: tuple[PlacementTask, ...]
    num_groups: int
    num_rollouts: int
    settings: VTraceSettings
    seed: int

    def tasks_of(self, number: int) -> NDArray[np.int64]:
        """Tasks of an order's groups, shape (G,): all tasks in random order, again and again in other orders."""
        places_G = number * self.num_groups + np.arange(self.num_groups)
        rounds = {
            turn: np.random.default_rng([self.seed, turn]).permutation(len(self.tasks))
            for turn in set((places_G // len(self.tasks)).tolist())
        }
        return np.array([rounds[place // len(self.tasks)][place % len(self.tasks)] for place in places_G.tolist()])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Order:
    """Episodes that are to be played: which ones and what is tried is decided by the number alone.

    So an order that was lost with its actor is played anew by another one, with the same outcome.
    """

    number: int
    weights: Arrays


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Played:
    """Trajectories as they travel between processes.

    Attributes:
        observations: As of Trajectories.
        last_observation: As of Trajectories.
        columns: The other tensors of Trajectories by name.
        episodes: Reward, length and time of each episode, as stable-baselines3 describes them.
    """

    observations: Arrays
    last_observation: Arrays
    columns: Arrays
    episodes: tuple[Mapping[str, float], ...]

    @classmethod
    def of(cls, data: Trajectories, episodes: tuple[Mapping[str, float], ...]) -> Played:
        """Packs trajectories up."""
        return cls(
            observations={key: value.numpy() for key, value in data.observations.items()},
            last_observation={key: value.numpy() for key, value in data.last_observation.items()},
            columns={name: getattr(data, name).numpy() for name in _COLUMNS},
            episodes=episodes,
        )

    def trajectories(self, policy: PlacementPolicy) -> Trajectories:
        """Unpacks them on the policy's device; all episodes are whole, so that the LSTM starts from nothing."""
        device, cpu = policy.device, torch.device("cpu")
        columns: Any = {
            name: _tensor(value, cpu if name in _ON_CPU else device) for name, value in self.columns.items()
        }
        return Trajectories(
            observations={key: _tensor(value, device) for key, value in self.observations.items()},
            last_observation={key: _tensor(value, device) for key, value in self.last_observation.items()},
            before=policy.network.initial_state(columns["actions_TE"].shape[1]),
            **columns,
        )


def _tensor(array: NDArray[Any], device: torch.device) -> torch.Tensor:
    # Ray hands out arrays that live in its store and cannot be written to, which torch does not want.
    return torch.from_numpy(array if array.flags.writeable else array.copy()).to(device)


class Player:
    """Plays orders; what an actor's process runs.

    Args:
        setup: What to play.
    """

    def __init__(self, setup: ActorSetup) -> None:
        torch.set_num_threads(1)
        self._setup = setup
        self._env = PlacementVecEnv(setup.tasks, setup.num_groups, setup.num_rollouts)
        self._algorithm = VTrace(PlacementPolicy, self._env, setup.settings, seed=setup.seed)
        self._algorithm.set_logger(Logger(folder=None, output_formats=[]))
        _, self._callback = self._algorithm._setup_learn(total_timesteps=1)

    def play(self, order: Order) -> Played:
        """Plays one episode in every environment."""
        algorithm = self._algorithm
        load_arrays(algorithm.policy.network, order.weights, f"order {order.number}")
        seeds = np.random.SeedSequence([self._setup.seed, order.number])
        torch.manual_seed(int(seeds.generate_state(1)[0]))
        tasks_E = self._setup.tasks_of(order.number).repeat(self._setup.num_rollouts)
        # What is drawn once these have ended is never played.
        draws = {**self._env.draw_state(), "tasks": tasks_E.tolist()}
        algorithm.begin_episodes(self._env.restore_draws(draws))
        assert algorithm.ep_info_buffer is not None
        algorithm.ep_info_buffer.clear()
        algorithm.collect_rollouts(self._env, self._callback, algorithm.rollout_buffer, self._setup.settings.num_steps)
        assert algorithm.trajectories is not None
        return Played.of(algorithm.trajectories, tuple(dict(episode) for episode in algorithm.ep_info_buffer))


class ActorDiedError(Exception):
    """An actor is gone, and what it was to play with it."""


class Actor(Protocol):
    """One player somewhere else."""

    def send(self, order: Order) -> None:
        """Hands over an order; one at a time.

        Raises:
            ActorDiedError: If it is gone.
        """
        ...

    def receive(self) -> Played:
        """Waits for what became of the order.

        Raises:
            ActorDiedError: If it is gone.
            ExecutionError: If it failed; it would fail again.
        """
        ...

    def close(self) -> None:
        """Ends it, and waits until it has ended."""
        ...


class ActorLauncher(Protocol):
    """Starts players somewhere else."""

    def launch(self, setup: ActorSetup) -> Actor:
        """Starts one."""
        ...

    def close(self) -> None:
        """Gives back what they needed together; all have been closed."""
        ...


class ActorPool:
    """Actors that take turns: one plays while the learner learns from what others have played.

    Turns make it certain which weights play which order, so that the same seed gives the same training however fast
    the actors are, and whichever of them die. Except for the first ones, an order is played with weights that are as
    many updates old as there are actors.

    Args:
        launcher: Starts them.
        setup: What they play.
        num_actors: How many.

    Attributes:
        num_deaths: Actors that were replaced.
    """

    def __init__(self, launcher: ActorLauncher, setup: ActorSetup, num_actors: int) -> None:
        self._launcher, self._setup, self._num_actors = launcher, setup, num_actors
        self.actors: list[Actor] = []
        self._orders: list[Order] = []
        self._first = 0
        self._num_taken = 0
        self._lags: dict[int, int] = {}
        self.num_deaths = 0

    def take(self, weights: Arrays) -> tuple[Played, int]:
        """Waits for the next order, and has another one played meanwhile.

        Args:
            weights: The learner's, for the other one.

        Returns:
            What was played, and how many updates older its weights are than the learner's.

        Raises:
            ExecutionError: If an actor failed, or actors keep dying.
        """
        if not self.actors:
            self._start(weights)
        seat = self._num_taken % self._num_actors
        order = self._orders[seat]
        played = self._receive(seat)
        lag = self._num_taken - self._lags.pop(order.number)
        self._issue(seat, order.number + self._num_actors, weights)
        self._num_taken += 1
        return played, lag

    def begin(self, number: int) -> None:
        """The first order's number: updates that were made before; to be told before any is taken."""
        assert not self.actors, "orders are under way"
        self._first = number

    def _start(self, weights: Arrays) -> None:
        for seat in range(self._num_actors):
            self.actors.append(self._launcher.launch(self._setup))
            self._orders.append(Order(number=self._first + seat, weights=weights))
        for seat, order in enumerate(self._orders):
            self._issue(seat, order.number, weights)

    def _issue(self, seat: int, number: int, weights: Arrays) -> None:
        self._orders[seat] = Order(number=number, weights=weights)
        self._lags[number] = self._num_taken
        try:
            self.actors[seat].send(self._orders[seat])
        except ActorDiedError as error:
            self._replace(seat, error)

    def _receive(self, seat: int) -> Played:
        while True:
            try:
                return self.actors[seat].receive()
            except ActorDiedError as error:
                self._replace(seat, error)

    def _replace(self, seat: int, error: ActorDiedError) -> None:
        while True:
            self.actors[seat].close()
            self.num_deaths += 1
            if self.num_deaths > MOST_DEATHS * self._num_actors:
                raise ExecutionError(f"actors keep dying, {self.num_deaths} so far; the last one: {error}") from error
            self.actors[seat] = self._launcher.launch(self._setup)
            try:
                return self.actors[seat].send(self._orders[seat])
            except ActorDiedError as next_error:
                error = next_error

    def close(self) -> None:
        """Ends all actors; they start anew if more is taken."""
        for actor in self.actors:
            actor.close()
        self._launcher.close()
        self._first += self._num_taken
        self._num_taken = 0
        self.actors, self._orders, self._lags = [], [], {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
