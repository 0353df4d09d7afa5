"""A whole training, from the pool of tables to the published policy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import autoshard
from autoshard.core import CostModel, TableSet
from autoshard.formats import load_tables
from autoshard.formats.samples import read_samples
from autoshard.planners.placement import PlacementProblem
from costmodel import Registry
from costmodel.dataset import CostDataset
from env import PlacementTask
from policies.joint import JointTrainer
from policies.joint_cost import JointCost
from policies.scores import Baselines, score_policy
from policies.tasks import Split, sample_problems, task_seeds
from policies.trained import PolicyCostModel, TrainedPolicy
from policies.training import Budget, Evaluation, PolicyTrainer, TrainingOptions

#: Tasks to choose the best weights by, and as many to measure them on.
NUM_VALIDATION_TASKS = 20
NUM_TEST_TASKS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """What is trained, on what, and for how long.

    Attributes:
        tables: Pool of tables: a file, or the name of a bundled one.
        scale: Divides rows and batch of the pool.
        num_tasks: Tasks to train on.
        num_tables: Tables per task.
        num_ranks: Ranks per task.
        seed: Of the weights, the tasks and what is tried.
        device: Key of the device kind.
        joint_store: Folder of samples to train the cost model from at the same time; None to take the registry's.
        budget: When to end.
        folder: Where checkpoints are kept.
        training: How to train.
    """

    budget: Budget
    tables: str = "metasyn"
    scale: int = 64
    num_tasks: int = 90
    num_tables: int = 80
    num_ranks: int = 8
    seed: int = 0
    device: str = "cpu"
    joint_store: Path | None = None
    folder: Path | None = None
    training: TrainingOptions = field(default_factory=TrainingOptions)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FinishedRun:
    """What a training made.

    Attributes:
        id: The policy's version in the registry.
        registry: The registry's folder.
    """

    policy: TrainedPolicy
    id: str
    registry: Path


def run_training(
    options: RunOptions,
    registry: Path | None,
    *,
    advance: Callable[[float], None] = lambda _: None,
    on_evaluated: Callable[[Evaluation], None] = lambda _: None,
) -> FinishedRun:
    """Trains, measures on test tasks, and publishes.

    Args:
        options: What, on what, for how long.
        registry: Folder of the registry; the default one if None.
        advance: Told the share of the budget that has just been used up.
        on_evaluated: Told every evaluation.

    Raises:
        InputError: If an option, the pool or a checkpoint cannot be used.
        ModelError: If the registry has no cost model of the device, or one that does not cover the pool.
        SampleStoreError: If the store of a joint training cannot be read, or holds too few samples.
    """
    models = Registry(registry)
    pool = load_tables(options.tables).scaled(options.scale)
    trainer, joint = _trainer(options, pool, models)
    trainer.run(options.budget, folder=options.folder, advance=advance, on_evaluated=on_evaluated)
    cost = joint.current() if joint is not None else PolicyCostModel.load(models, options.device)
    test = _problems(options, pool, cost.model(), Split.TEST, NUM_TEST_TASKS)
    baselines, network = Baselines.of(test), trainer.best_network
    scores = {
        "policy": score_policy(network, [PlacementTask.of(problem) for problem in test]),
        "cost-greedy": baselines.cost_greedy,
        "lookup-greedy": baselines.lookup_greedy,
    }
    training: dict[str, Any] = {
        "tables": options.tables,
        "joint": joint is not None,
        **{name: getattr(options, name) for name in ("scale", "num_tasks", "num_tables", "num_ranks", "seed")},
        "num_updates": trainer.num_updates,
        "elapsed_s": round(trainer.elapsed_s, 3),
        "num_test_tasks": NUM_TEST_TASKS,
        "test": {name: score.to_json() for name, score in scores.items()},
        "version": autoshard.__version__,
    }
    policy = TrainedPolicy(network=network, cost=cost, training=training)
    return FinishedRun(policy=policy, id=policy.publish(models), registry=models.root)


def _trainer(options: RunOptions, pool: TableSet, models: Registry) -> tuple[PolicyTrainer, JointCost | None]:
    if options.joint_store is None:
        model = PolicyCostModel.load(models, options.device).model()
        train, validation = _training_problems(options, pool, model)
        return PolicyTrainer(train, validation, options=options.training, seed=options.seed), None
    samples = read_samples(options.joint_store, options.device)
    dataset = CostDataset.from_samples(samples)
    cost = JointCost(dataset, device=options.device, seed=options.seed)
    train, validation = _training_problems(options, pool, cost.model())
    return JointTrainer(train, validation, cost=cost, options=options.training, seed=options.seed), cost


def _training_problems(
    options: RunOptions, pool: TableSet, model: CostModel
) -> tuple[tuple[PlacementProblem, ...], tuple[PlacementProblem, ...]]:
    return (
        _problems(options, pool, model, Split.TRAIN, options.num_tasks),
        _problems(options, pool, model, Split.VALIDATION, NUM_VALIDATION_TASKS),
    )


def _problems(
    options: RunOptions, pool: TableSet, model: CostModel, split: Split, num_tasks: int
) -> tuple[PlacementProblem, ...]:
    return sample_problems(
        pool,
        model,
        device=options.device,
        num_tables=options.num_tables,
        num_ranks=options.num_ranks,
        seeds=task_seeds(split, num_tasks, options.seed),
    )
