"""Training of the policy: updates, evaluation, checkpoints."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from stable_baselines3.common.utils import safe_mean

from autoshard.core.costs import MsArray
from autoshard.core.errors import FormatError, InvalidOptionError
from autoshard.planners.refine import MeasurePlans
from autoshard.planners.space.placement import PlacementProblem, RankArray
from autoshard.runtime.processes.learners import Learners
from autoshard.runtime.processes.threads import intra_op_threads
from env import Objective, PlacementTask, PlacementVecEnv
from policies.algorithms.ppo import PlacementPPO
from policies.algorithms.training_options import Budget, Plateau, TrainingOptions, VTraceSettings
from policies.algorithms.vtrace import VTrace
from policies.choices import Algorithm
from policies.network.actor_critic import PlacementPolicy
from policies.network.network import PlacementNetwork
from policies.network.weights import Arrays, load_arrays, optimizer_arrays, restore_optimizer, to_arrays, with_prefix
from policies.rollout.actor_processes import ActorProcesses
from policies.rollout.actors import ActorLauncher, ActorPool, ActorSetup
from policies.rollout.lagged import LaggedVTrace
from policies.rollout.measured import MeasuredVecEnv
from policies.training.checkpoint import PolicyCheckpoint
from policies.training.scores import Baselines, PlacementScore, score_policy
from policies.training.training_log import CollectTimer, StepRate, Times, make_logger

__all__ = ["Budget", "Evaluation", "PolicyTrainer", "TrainingOptions"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Scores on the validation tasks after some updates.

    Attributes:
        num_updates: Updates so far.
        policy: Of the network.
        baselines: Of planners without training.
        steps_per_s: Steps of the environment per second, of all processes, since the evaluation before.
    """

    num_updates: int
    policy: PlacementScore
    baselines: Baselines
    steps_per_s: float = 0.0

    @property
    def relative_ms(self) -> float:
        """The objective, relative to greedy planning of kernels on the same cost model; lower is better."""
        return self.policy.objective_ms / max(self.baselines.cost_greedy.objective_ms, 1e-12)


class PolicyTrainer:
    """Trains a network on some tasks, and keeps the weights that did best on others.

    Of several processes, each plays episodes of its own; their gradients are averaged, so that all networks stay
    alike, and the first process saves. Evaluations run on the CPU, wherever the network learns.

    Args:
        train: Problems to learn from, all with the same cost model and numbers of items and ranks.
        validation: Problems to choose the best weights by.
        options: How to train.
        seed: Same seed and problems, same weights (on the same machine, if ended by a number of updates).
        as_task: Makes tasks of problems, with the objective that is trained for.
        measure: Measures plans, where `options` want rewards to be measured.
        launcher: Starts the actors that `options` want; processes of this machine when left out.
        learners: Processes that train together, and this one's device; alone on the CPU when left out.

    Raises:
        InvalidOptionError: If tasks differ in what they must share, measuring is wanted and there is no `measure`, or
            the options do not go with the tasks or the processes (`TrainingOptions.check`).

    Attributes:
        times: Where the time went, over resumed runs.
    """

    _is_joint = False
    """Whether the cost model is trained along."""

    def __init__(
        self,
        train: Sequence[PlacementProblem],
        validation: Sequence[PlacementProblem],
        *,
        options: TrainingOptions | None = None,
        seed: int = 0,
        as_task: Callable[[PlacementProblem], PlacementTask] = PlacementTask.of,
        measure: MeasurePlans | None = None,
        launcher: ActorLauncher | None = None,
        learners: Learners | None = None,
    ) -> None:
        self.options = options or TrainingOptions()
        self.learners = learners or Learners()
        self.seed = seed
        self.train_tasks = [as_task(problem) for problem in train]
        self.validation_tasks = [as_task(problem) for problem in validation]
        num_items = {task.num_items for task in self.train_tasks}
        if len(num_items) != 1:
            raise InvalidOptionError(
                f"tasks to train on must have equally many items, got {sorted(num_items)}", field="train"
            )
        first = self.train_tasks[0]
        self.options.check(
            is_of_steps=first.objective is Objective.STEP,
            may_split=first.may_split,
            is_joint=self._is_joint,
            num_processes=self.learners.world_size,
        )
        self.env = PlacementVecEnv(self.train_tasks, self.options.num_groups, self.options.num_rollouts)
        self.measured = self._measured_env(measure)
        # Episodes with splits differ in length.
        settings = replace(self.options.settings, num_steps=num_items.pop(), whole_episodes=first.may_split)
        self.pool = self._actor_pool(settings, launcher)
        self.algorithm = self._make_algorithm(settings)
        self.algorithm.set_logger(make_logger(None))
        self.num_updates = 0
        self.elapsed_s = 0.0
        self.times = Times()
        self.plateau = Plateau()
        self.evaluations: list[Evaluation] = []
        self._timer = CollectTimer()
        self._throughput = StepRate()
        self._draw_own_episodes()
        self._best: Arrays = to_arrays(self.network)
        self._best_relative_ms = float("inf")

    def _draw_own_episodes(self) -> None:
        """Lets each process but the first go on with tasks and actions of its own; all begin with the same weights."""
        if self.learners.is_first:
            return
        own = self.learners.seed(self.seed)
        torch.manual_seed(own)
        self.env.seed(own)

    def _measured_env(self, measure: MeasurePlans | None) -> MeasuredVecEnv | None:
        share = self.options.share_measured
        if not share:
            return None
        if measure is None:
            raise InvalidOptionError(f"{self.options.reward} needs a way to measure plans", field="reward")
        return MeasuredVecEnv(self.env, measure, share, self._on_measured)

    def _on_measured(self, problem: PlacementProblem, ranks_N: RankArray, cost_ms_R: MsArray) -> None:
        """Told what was measured."""

    def _actor_pool(self, settings: VTraceSettings, launcher: ActorLauncher | None) -> ActorPool | None:
        options = self.options
        if not options.num_actors:
            return None
        setup = ActorSetup(
            tasks=tuple(self.train_tasks),
            num_groups=options.num_groups,
            num_rollouts=options.num_rollouts,
            settings=settings,
            seed=self.learners.seed(self.seed),
        )
        return ActorPool(launcher or ActorProcesses(), setup, options.num_actors)

    def _make_algorithm(self, settings: VTraceSettings) -> VTrace | PlacementPPO:
        env, device = self.measured or self.env, self.learners.device
        if self.options.algorithm is Algorithm.PPO:
            return PlacementPPO(env, self.options.ppo, num_steps=settings.num_steps, seed=self.seed, device=device)
        if self.pool is not None:
            return LaggedVTrace(env, settings, self.pool, seed=self.seed, learners=self.learners)
        return VTrace(PlacementPolicy, env, settings, seed=self.seed, device=device, learners=self.learners)

    @property
    def network(self) -> PlacementNetwork:
        """The network being trained."""
        return self.algorithm.policy.network

    @property
    def best_network(self) -> PlacementNetwork:
        """A copy of the network, on the CPU, with the weights of the best evaluation."""
        network = PlacementNetwork(self.network.code_width)
        load_arrays(network, self._best, "best weights")
        return network

    def update(self) -> None:
        """Plays one episode in every environment and learns from them."""
        started_s, collected_s = time.monotonic(), self._timer.collect_s
        measured_s = self.measured.measure_s if self.measured is not None else 0.0
        num_steps = self.train_tasks[0].num_items * self.env.num_envs
        self.algorithm.learn(num_steps, self._timer, log_interval=None, reset_num_timesteps=False)  # type: ignore[arg-type]
        took_s, collected_s = time.monotonic() - started_s, self._timer.collect_s - collected_s
        measured_s = (self.measured.measure_s if self.measured is not None else 0.0) - measured_s
        self.times.collect_s += collected_s - measured_s
        self.times.measure_s += measured_s
        self.times.learn_s += took_s - collected_s
        self.num_updates += 1
        num_steps *= self.learners.world_size
        self._throughput.add(num_steps, took_s)
        self._record_update(num_steps / took_s)

    def _record_update(self, steps_per_second: float) -> None:
        logger = self.algorithm.logger
        assert self.algorithm.ep_info_buffer is not None
        logger.record("rollout/reward", safe_mean([episode["r"] for episode in self.algorithm.ep_info_buffer]))
        logger.record("time/steps_per_second", steps_per_second)
        for name, seconds in asdict(self.times).items():
            logger.record(f"time/{name}", seconds)

    def evaluate(self) -> Evaluation:
        """Scores the network on the validation tasks, and keeps its weights if they are the best so far."""
        started_s = time.monotonic()
        evaluation = Evaluation(
            num_updates=self.num_updates,
            policy=score_policy(deepcopy(self.network).cpu(), self.validation_tasks),
            baselines=self._baselines(),
            steps_per_s=self._throughput.taken(),
        )
        self.evaluations.append(evaluation)
        if self._is_best(evaluation):
            self._best_relative_ms = evaluation.relative_ms
            self._best = to_arrays(self.network)
        self.plateau.add(self.num_updates, evaluation.relative_ms)
        self.times.evaluate_s += time.monotonic() - started_s
        logger = self.algorithm.logger
        for name, value in evaluation.policy.to_json().items():
            logger.record(f"evaluation/{name}", value)
        logger.record("evaluation/relative_to_cost_greedy", evaluation.relative_ms)
        return evaluation

    def _is_best(self, evaluation: Evaluation) -> bool:
        return evaluation.relative_ms < self._best_relative_ms

    def _baselines(self) -> Baselines:
        """They stay the same as long as the cost model does."""
        if self.evaluations:
            return self.evaluations[-1].baselines
        return Baselines.of_tasks(self.validation_tasks)

    def run(
        self,
        budget: Budget,
        *,
        folder: Path | None = None,
        tensorboard: Path | None = None,
        advance: Callable[[float], None] = lambda _: None,
        on_evaluated: Callable[[Evaluation], None] = lambda _: None,
    ) -> None:
        """Trains until the budget is used up, or scores have stopped getting better; an evaluation comes last.

        Args:
            budget: When to end.
            folder: Where checkpoints are kept, one after every evaluation; goes on from the one that is there.
            tensorboard: Folder for TensorBoard's event files; goes on from those that are there.
            advance: Told the share of the budget that has just been used up.
            on_evaluated: Told every evaluation.

        Raises:
            FormatError: If a folder cannot be read or written, or holds something else.
            InvalidOptionError: If its checkpoint is of a training with other options.
            ExecutionError: If actors fail.
        """
        checkpoint = PolicyCheckpoint.load(folder) if folder is not None else None
        if checkpoint is not None:
            self.restore(checkpoint, str(folder))
        logger = make_logger(tensorboard if self.learners.is_first else None, self.num_updates)
        self.algorithm.set_logger(logger)
        try:
            with intra_op_threads(1):
                self._run(budget, folder, advance, on_evaluated)
        finally:
            logger.close()
            self.close()

    def _run(
        self,
        budget: Budget,
        folder: Path | None,
        advance: Callable[[float], None],
        on_evaluated: Callable[[Evaluation], None],
    ) -> None:
        done = self._share(budget)
        advance(done)
        started_s = time.monotonic() - self.elapsed_s
        while done < 1 or not self.evaluations:
            if done < 1:
                self.update()
            self.elapsed_s = self.learners.agreed(time.monotonic() - started_s)
            is_due = self.num_updates % self.options.evaluate_every == 0
            before, done = done, budget.share(self.num_updates, self.elapsed_s)
            if done >= 1 or is_due:
                evaluation = self.evaluate()
                self.elapsed_s = self.learners.agreed(time.monotonic() - started_s)
                done = self._share(budget)
                on_evaluated(evaluation)
                if folder is not None and self.learners.is_first:
                    self.checkpoint().save(folder)
            self.algorithm.logger.record("time/elapsed_s", self.elapsed_s)
            self.algorithm.logger.dump(self.num_updates)
            advance(done - before)

    def _share(self, budget: Budget) -> float:
        """Share of the budget that is used up; all of it once scores have stopped getting better."""
        if self.plateau.is_reached(budget.most_stale):
            return 1.0
        return budget.share(self.num_updates, self.elapsed_s)

    def close(self) -> None:
        """Ends the actors, if there are any; they start again with the next update."""
        if self.pool is not None:
            self.pool.close()

    def checkpoint(self) -> PolicyCheckpoint:
        """All that `restore` needs to go on as if nothing had happened; with actors, but for what they had in hand.

        It says nothing of devices, so a training goes on where it likes. Of several processes, those but the first draw
        anew.
        """
        tensors: Arrays = {"rng": torch.get_rng_state().numpy().copy()}
        tensors |= {f"network.{name}": value for name, value in to_arrays(self.network).items()}
        tensors |= {f"best.{name}": value for name, value in self._best.items()}
        tensors |= optimizer_arrays(self.algorithm.policy.optimizer)
        state = {
            "identity": self._identity(),
            "num_updates": self.num_updates,
            "elapsed_s": self.elapsed_s,
            "times": self.times.to_json(),
            "best_relative_ms": self._best_relative_ms,
            "plateau": asdict(self.plateau),
            "num_rounds": self.measured.num_rounds if self.measured is not None else 0,
            "num_measured": self.measured.num_measured if self.measured is not None else 0,
            "draws": self.env.draw_state(),
        }
        return PolicyCheckpoint(state=state, tensors=tensors)

    def restore(self, checkpoint: PolicyCheckpoint, source: str) -> None:
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
            self.times = Times.from_json(state["times"])
            self._best_relative_ms = float(state["best_relative_ms"])
            self.plateau = Plateau(**state["plateau"])
            if self.measured is not None:
                self.measured.num_rounds = int(state["num_rounds"])
                self.measured.num_measured = int(state["num_measured"])
            if self.pool is not None:
                self.pool.begin(self.num_updates)
            if self.learners.is_first:
                self.algorithm.begin_episodes(self.env.restore_draws(state["draws"]))
                torch.set_rng_state(torch.from_numpy(tensors["rng"].copy()))
            else:
                torch.manual_seed(self.learners.seed(self.seed + self.num_updates))
        except KeyError as error:
            raise FormatError("is missing", field=str(error.args[0]), source=source) from error

    def _identity(self) -> dict[str, Any]:
        """What two runs must share for one to go on from the other's checkpoint."""
        first = self.train_tasks[0]
        return {
            "seed": self.seed,
            "max_splits": first.max_splits,
            "num_tasks": len(self.train_tasks),
            "num_items": first.num_items,
            "num_ranks": first.num_ranks,
            "num_actions": first.num_actions,
            "objective": first.objective,
            "capacity_bytes": sum(int(task.problem.capacity_R.sum()) for task in self.train_tasks),
            "code_width": first.code_width,
            "total_ms": round(sum(float(task.problem.kernel_ms_N.sum()) for task in self.train_tasks), 6),
            "even_objective_ms": round(sum(task.even_objective_ms for task in self.train_tasks), 6),
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
