"""Training of the policy: updates, evaluation, checkpoints."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from stable_baselines3.common.logger import Logger

from autoshard.core.errors import FormatError, InvalidOptionError
from autoshard.planners.placement import PlacementProblem
from env import PlacementTask, PlacementVecEnv, RewardMs
from policies.actor_critic import PlacementPolicy
from policies.checkpoint import Checkpoint
from policies.network import PlacementNetwork
from policies.scores import Baselines, PlacementScore, score_policy
from policies.threads import one_thread
from policies.vtrace import VTrace, VTraceSettings
from policies.weights import Arrays, load_arrays, optimizer_arrays, restore_optimizer, to_arrays, with_prefix


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingOptions:
    """How the policy is trained.

    Attributes:
        num_groups: Tasks per update.
        num_rollouts: Episodes per task and update.
        evaluate_every: Updates between two evaluations.
        settings: Of V-trace; an update's steps are set to the items of a task, so that episodes are whole.

    Source:
        AutoShard C.2. Differs: each of the 8 tasks of an update is played 4 times, in whole episodes that are compared
        with each other, and the learning rate is twice as high. The slowest rank of 20 validation tasks took, relative
        to cost-greedy, 1.001 to 1.002 after 5 seconds of training and 1.000 after 10; with 12 rollouts 1.007 to 1.011
        and 1.002 to 1.005; with the paper's settings and one 1.004 to 1.009 and 1.015 to 1.017 (80 tables, 8 ranks,
        two seeds; one core of a Xeon, November 2026).
    """

    num_groups: int = 8
    num_rollouts: int = 4
    evaluate_every: int = 10
    settings: VTraceSettings = field(
        default_factory=lambda: VTraceSettings(learning_rate=2e-3, compare_within_task=True)
    )

    def __post_init__(self) -> None:
        for label in ("num_groups", "num_rollouts", "evaluate_every"):
            if getattr(self, label) < 1:
                raise InvalidOptionError(f"must be at least 1, got {getattr(self, label)}", field=label)


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """When training ends: after so many updates or seconds, whichever comes first; counted over resumed runs."""

    num_updates: int | None = None
    seconds: float | None = None

    def __post_init__(self) -> None:
        for label in ("num_updates", "seconds"):
            value = getattr(self, label)
            if value is not None and value <= 0:
                raise InvalidOptionError(f"must be above 0, got {value}", field=label)
        if self.num_updates is None and self.seconds is None:
            raise InvalidOptionError("name a number of updates or of seconds", field="budget")

    def share(self, num_updates: int, elapsed_s: float) -> float:
        """Share of the budget that is used up, at most 1."""
        by_updates = num_updates / self.num_updates if self.num_updates else 0.0
        by_time = elapsed_s / self.seconds if self.seconds else 0.0
        return min(1.0, max(by_updates, by_time))


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Scores on the validation tasks after some updates."""

    num_updates: int
    policy: PlacementScore
    baselines: Baselines

    @property
    def relative_ms(self) -> float:
        """The slowest rank's time, relative to greedy planning on the same cost model; lower is better."""
        return self.policy.max_ms / max(self.baselines.cost_greedy.max_ms, 1e-12)


class PolicyTrainer:
    """Trains a network on some tasks, and keeps the weights that did best on others.

    Args:
        train: Problems to learn from, all with the same cost model and numbers of items and ranks.
        validation: Problems to choose the best weights by.
        options: How to train.
        seed: Same seed and problems, same weights (on the same machine, if ended by a number of updates).
        reward_ms: As for TablePlacementEnv.
    """

    def __init__(
        self,
        train: Sequence[PlacementProblem],
        validation: Sequence[PlacementProblem],
        *,
        options: TrainingOptions | None = None,
        seed: int = 0,
        reward_ms: RewardMs | None = None,
    ) -> None:
        self.options = options or TrainingOptions()
        self.seed = seed
        self.train_tasks = [PlacementTask.of(problem) for problem in train]
        self.validation_tasks = [PlacementTask.of(problem) for problem in validation]
        num_items = {task.num_items for task in self.train_tasks}
        if len(num_items) != 1:
            raise InvalidOptionError(
                f"tasks to train on must have equally many items, got {sorted(num_items)}", field="train"
            )
        self.env = PlacementVecEnv(self.train_tasks, self.options.num_groups, self.options.num_rollouts, reward_ms)
        settings = replace(self.options.settings, num_steps=num_items.pop())
        self.algorithm = self._make_algorithm(settings)
        # Without a logger of its own, stable-baselines3 makes a folder for every update.
        self.algorithm.set_logger(Logger(folder=None, output_formats=[]))
        self.num_updates = 0
        self.elapsed_s = 0.0
        self.evaluations: list[Evaluation] = []
        self._best: Arrays = to_arrays(self.network)
        self._best_relative_ms = float("inf")

    def _make_algorithm(self, settings: VTraceSettings) -> VTrace:
        return VTrace(PlacementPolicy, self.env, settings, seed=self.seed)

    @property
    def network(self) -> PlacementNetwork:
        """The network being trained."""
        return self.algorithm.policy.network

    @property
    def best_network(self) -> PlacementNetwork:
        """A copy of the network with the weights of the best evaluation."""
        network = PlacementNetwork(self.network.code_width)
        load_arrays(network, self._best, "best weights")
        return network

    def update(self) -> None:
        """Plays one episode in every environment and learns from them."""
        num_steps = self.algorithm.settings.num_steps * self.env.num_envs
        self.algorithm.learn(num_steps, reset_num_timesteps=False, log_interval=None)  # type: ignore[arg-type]
        self.num_updates += 1

    def evaluate(self) -> Evaluation:
        """Scores the network on the validation tasks, and keeps its weights if they are the best so far."""
        evaluation = Evaluation(
            num_updates=self.num_updates,
            policy=score_policy(self.network, self.validation_tasks),
            baselines=self._baselines(),
        )
        self.evaluations.append(evaluation)
        if self._is_best(evaluation):
            self._best_relative_ms = evaluation.relative_ms
            self._best = to_arrays(self.network)
        return evaluation

    def _is_best(self, evaluation: Evaluation) -> bool:
        return evaluation.relative_ms < self._best_relative_ms

    def _baselines(self) -> Baselines:
        """They stay the same as long as the cost model does."""
        if self.evaluations:
            return self.evaluations[-1].baselines
        return Baselines.of([task.problem for task in self.validation_tasks])

    def run(
        self,
        budget: Budget,
        *,
        folder: Path | None = None,
        advance: Callable[[float], None] = lambda _: None,
        on_evaluated: Callable[[Evaluation], None] = lambda _: None,
    ) -> None:
        """Trains until the budget is used up; an evaluation comes last.

        Args:
            budget: When to end.
            folder: Where checkpoints are kept, one after every evaluation; goes on from the one that is there.
            advance: Told the share of the budget that has just been used up.
            on_evaluated: Told every evaluation.

        Raises:
            FormatError: If the folder cannot be read or written, or holds something else.
            InvalidOptionError: If its checkpoint is of a training with other options.
        """
        checkpoint = Checkpoint.load(folder) if folder is not None else None
        if checkpoint is not None:
            self.restore(checkpoint, str(folder))
        with one_thread():
            self._run(budget, folder, advance, on_evaluated)

    def _run(
        self,
        budget: Budget,
        folder: Path | None,
        advance: Callable[[float], None],
        on_evaluated: Callable[[Evaluation], None],
    ) -> None:
        done = budget.share(self.num_updates, self.elapsed_s)
        advance(done)
        started_s = time.monotonic() - self.elapsed_s
        while done < 1 or not self.evaluations:
            if done < 1:
                self.update()
            self.elapsed_s = time.monotonic() - started_s
            before, done = done, budget.share(self.num_updates, self.elapsed_s)
            if done >= 1 or self.num_updates % self.options.evaluate_every == 0:
                on_evaluated(self.evaluate())
                if folder is not None:
                    self.checkpoint().save(folder)
            advance(done - before)

    def checkpoint(self) -> Checkpoint:
        """All that `restore` needs to go on as if nothing had happened."""
        tensors: Arrays = {"rng": torch.get_rng_state().numpy().copy()}
        tensors |= {f"network.{name}": value for name, value in to_arrays(self.network).items()}
        tensors |= {f"best.{name}": value for name, value in self._best.items()}
        tensors |= optimizer_arrays(self.algorithm.policy.optimizer)
        state = {
            "identity": self._identity(),
            "num_updates": self.num_updates,
            "elapsed_s": self.elapsed_s,
            "best_relative_ms": self._best_relative_ms,
            "draws": self.env.draw_state(),
        }
        return Checkpoint(state=state, tensors=tensors)

    def restore(self, checkpoint: Checkpoint, source: str) -> None:
        """Goes on from a checkpoint.

        Raises:
            FormatError: If something is missing.
            InvalidOptionError: If it is of a training with other options or tasks.
            ModelError: If weights are missing or damaged.
        """
        state, tensors = checkpoint.state, checkpoint.tensors
        self._check_identity(state.get("identity"), source)
        load_arrays(self.network, with_prefix(tensors, "network."), source)
        self._best = with_prefix(tensors, "best.")
        restore_optimizer(self.algorithm.policy.optimizer, with_prefix(tensors, "optimizer."))
        try:
            self.num_updates = int(state["num_updates"])
            self.elapsed_s = float(state["elapsed_s"])
            self._best_relative_ms = float(state["best_relative_ms"])
            self.algorithm.begin_episodes(self.env.restore_draws(state["draws"]))
            torch.set_rng_state(torch.from_numpy(tensors["rng"].copy()))
        except KeyError as error:
            raise FormatError("is missing", field=str(error.args[0]), source=source) from error

    def _identity(self) -> dict[str, Any]:
        """What two runs must share for one to go on from the other's checkpoint."""
        first = self.train_tasks[0]
        return {
            "seed": self.seed,
            "num_tasks": len(self.train_tasks),
            "num_items": first.num_items,
            "num_ranks": first.num_ranks,
            "code_width": first.code_width,
            "total_ms": round(sum(float(task.problem.kernel_ms_N.sum()) for task in self.train_tasks), 6),
            **asdict(self.options),
        }

    def _check_identity(self, theirs: Mapping[str, Any] | None, source: str) -> None:
        for name, value in self._identity().items():
            if theirs is None or theirs.get(name) != value:
                raise InvalidOptionError(
                    f"the checkpoint is of another training: its {name} is {(theirs or {}).get(name)}, not {value}; "
                    "take another folder, or the same options and models",
                    source=source,
                )
