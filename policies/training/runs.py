"""A whole training, from the pool of tables to the policy in the registry."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from typing import Any

import autoshard
from autoshard.core import CostModel, CostModels, LocalShard
from autoshard.formats import load_tables
from autoshard.formats.stores.samples import read_samples
from autoshard.planners.space.placement import PlacementProblem
from autoshard.planning import make_costs
from autoshard.runtime.processes.learners import Learners
from costmodel import LearnedCostModel, Registry
from costmodel.kernel.dataset import CostDataset
from costmodel.registry.promotion import Published, TrainedVersion, publish_version
from costmodel.registry.publish_options import PublishOptions
from env import Objective, PlacementTask
from policies.choices import RewardSource
from policies.planning.tasks import (
    TaskSplit,
    items_task,
    num_splits,
    sample_problems,
    sample_tables,
    task_seeds,
    training_topology,
    whole_tables,
)
from policies.planning.trained import TrainedPolicy, load_cost_model
from policies.rollout.actors import ActorLauncher
from policies.rollout.lagged import LaggedVTrace
from policies.rollout.measured import find_benchmark
from policies.rollout.ray_actors import RayActors
from policies.training.comparison import policy_version
from policies.training.joint import JointTrainer
from policies.training.joint_cost import CostUpdates, JointCost
from policies.training.run_options import PolicyRunOptions
from policies.training.scores import Baselines, score_policy
from policies.training.trainer import Evaluation, PolicyTrainer

#: Tasks to choose the best weights by, and as many to measure them on.
NUM_VALIDATION_TASKS = 20
NUM_TEST_TASKS = 20


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FinishedRun:
    """What a training made.

    Attributes:
        policy: The policy.
        published: What became of it in the registry.
    """

    policy: TrainedPolicy
    published: Published


def run_training(
    options: PolicyRunOptions,
    publishing: PublishOptions,
    *,
    advance: Callable[[float], None] = lambda _: None,
    on_evaluated: Callable[[Evaluation], None] = lambda _: None,
    learners: Learners | None = None,
) -> FinishedRun | None:
    """Trains, measures on test tasks, and makes the policy the production one if it is not worse there.

    Args:
        options: What, on what, for how long.
        publishing: Which registry has the cost model, and what to do with the policy there.
        advance: Told the share of the budget that has just been used up.
        on_evaluated: Told every evaluation.
        learners: Processes that train together, and this one's device; alone on the CPU when left out.

    Returns:
        The result; None in processes other than the first, which publish nothing.

    Raises:
        InputError: If an option, the pool or a checkpoint cannot be used.
        ModelError: If the registry has no cost model of the device, or one that does not cover the pool.
        SampleStoreError: If the store of a joint training cannot be read, or holds too few samples.
        ExecutionError: If actors fail.
    """
    models = Registry(publishing.registry)
    run = _Run(options, models, learners or Learners())
    run.train(advance, on_evaluated)
    if not run.learners.is_first:
        return None
    policy, version = run.finish()
    return FinishedRun(policy=policy, published=publish_version(models, version, publishing))


class _Run:
    """A training and what goes with it."""

    def __init__(self, options: PolicyRunOptions, models: Registry, learners: Learners) -> None:
        self._options, self._models, self.learners = options, models, learners
        self._objective = Objective(options.tasks.objective)
        # What is wrong with the options is told before any model or sample is looked for.
        options.training.check(
            is_of_steps=self._objective is Objective.STEP,
            may_split=num_splits(options.tasks.items) > 0,
            is_joint=options.joint,
            num_processes=learners.world_size,
        )
        is_measured = options.training.reward is not RewardSource.MODEL
        self._measure = find_benchmark(options.tasks.device) if is_measured else None
        self._pool = load_tables(options.tasks.tables).scaled(options.tasks.scale)
        next(sample_tables(self._pool, options.tasks.kind, task_seeds(TaskSplit.VALIDATION, 1)))
        self._joint: JointCost | None = None
        self.trainer = self._make_trainer()

    def _make_trainer(self) -> PolicyTrainer:
        options, device = self._options, self._options.tasks.device
        if options.joint:
            joint = self._joint = JointCost(
                self._joint_samples(),
                device=device,
                seed=options.seed,
                updates=CostUpdates(loss=options.cost_loss),
                learners=self.learners,
            )
            return JointTrainer(
                *self._training_problems(joint.model()),
                cost=joint,
                options=options.training,
                seed=options.seed,
                measure=self._measure,
            )
        model = self._cost
        return PolicyTrainer(
            *self._training_problems(model),
            options=options.training,
            seed=options.seed,
            as_task=self._as_task(model, self._objective),
            measure=self._measure,
            launcher=self._launcher(),
            learners=self.learners,
        )

    def _joint_samples(self) -> CostDataset | tuple[LocalShard, ...]:
        """Samples of the store; without one, the pool's tables as a rank that holds one alone runs it."""
        store, device = self._options.store, self._options.tasks.device
        if store is not None:
            return CostDataset.from_samples(read_samples(store, device))
        return whole_tables(self._pool, device)

    @cached_property
    def _cost(self) -> LearnedCostModel:
        """The registry's cost model as it was first asked for, whatever is published meanwhile."""
        return load_cost_model(self._models, self._options.tasks.device)

    @cached_property
    def _costs(self) -> CostModels:
        """What prices whole steps, of the same moment; kernels aside."""
        tasks = self._options.tasks
        topology = training_topology(tasks.device, tasks.num_ranks, self._pool.storage_bytes)
        return make_costs(self._pool, topology, self._models.root)

    def _launcher(self) -> ActorLauncher | None:
        address = self._options.cluster
        return None if address is None else RayActors(address, self._options.training.num_actors)

    def _as_task(self, model: CostModel, objective: Objective) -> Callable[[PlacementProblem], PlacementTask]:
        items = self._options.tasks.items
        if objective is not Objective.STEP:
            return partial(items_task, items=items, objective=objective)
        return partial(items_task, items=items, objective=objective, costs=replace(self._costs, kernel=model))

    def _training_problems(self, model: CostModel) -> tuple[tuple[PlacementProblem, ...], tuple[PlacementProblem, ...]]:
        return (
            self._problems(model, TaskSplit.TRAIN, self._options.tasks.num_tasks),
            self._problems(model, TaskSplit.VALIDATION, NUM_VALIDATION_TASKS),
        )

    def _problems(self, model: CostModel, split: TaskSplit, num_tasks: int) -> tuple[PlacementProblem, ...]:
        seeds = task_seeds(split, num_tasks, self._options.seed)
        return sample_problems(self._pool, model, self._options.tasks.kind, seeds)

    def _test_tasks(self, model: CostModel, objective: Objective) -> list[PlacementTask]:
        as_task = self._as_task(model, objective)
        return [as_task(problem) for problem in self._problems(model, TaskSplit.TEST, NUM_TEST_TASKS)]

    def train(self, advance: Callable[[float], None], on_evaluated: Callable[[Evaluation], None]) -> None:
        """Trains until the budget is used up."""
        self.trainer.run(
            self._options.ending,
            folder=self._options.checkpoint,
            tensorboard=self._options.tensorboard,
            advance=advance,
            on_evaluated=on_evaluated,
        )

    def finish(self) -> tuple[TrainedPolicy, TrainedVersion]:
        """The trained policy, measured on test tasks."""
        options, trainer = self._options, self.trainer
        cost = self._cost if self._joint is None else self._joint.current()
        tasks = self._test_tasks(cost, self._objective)
        baselines, network = Baselines.of_tasks(tasks), trainer.best_network
        scores = {
            "policy": score_policy(network, tasks),
            "cost-greedy": baselines.cost_greedy,
            "lookup-greedy": baselines.lookup_greedy,
        }
        training = {
            **self._record(),
            "num_test_tasks": NUM_TEST_TASKS,
            "test": {name: score.to_json() for name, score in scores.items()},
            "version": autoshard.__version__,
        }
        policy = TrainedPolicy(
            network=network,
            cost=cost,
            training=training,
            items=options.tasks.items,
            objective=self._objective,
            memory_fill=options.tasks.memory_fill,
        )
        costs = self._costs if self._objective is Objective.STEP else None
        return policy, policy_version(policy, tasks, self._test_tasks, costs)

    def _record(self) -> dict[str, Any]:
        """Options, counts and times of the training."""
        options, trainer = self._options, self.trainer
        record: dict[str, Any] = {
            **asdict(options.tasks),
            "seed": options.seed,
            "joint": self._joint is not None,
            "algorithm": options.training.algorithm,
            "reward": options.training.reward,
            "num_updates": trainer.num_updates,
            "elapsed_s": round(trainer.elapsed_s, 3),
            "times": trainer.times.to_json(),
            "stopped_early": trainer.plateau.is_reached(options.ending.most_stale),
        }
        if trainer.measured is not None:
            record["num_measured"] = trainer.measured.num_measured
        if isinstance(trainer.algorithm, LaggedVTrace) and trainer.pool is not None:
            lag = trainer.algorithm.lag
            record["actors"] = {
                "num_actors": options.training.num_actors,
                "mean_lag": round(lag.mean, 3),
                "max_lag": lag.most,
                "num_replaced": trainer.pool.num_deaths,
            }
        return record
