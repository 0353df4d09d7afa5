from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from autoshard.core.errors import FormatError, InvalidOptionError
from autoshard.evaluation.analytic import AnalyticCostModel
from env import Objective, PlacementTask
from policies.algorithms.training_options import Plateau
from policies.choices import Algorithm, Items, RewardSource
from policies.network.network import PlacementNetwork
from policies.planning.tasks import NUM_ROW_RANGES, TaskKind, TaskSplit, items_task, sample_problems, task_seeds
from policies.training.checkpoint import PolicyCheckpoint
from policies.training.run_options import PolicyRunOptions
from policies.training.scores import Baselines, score_placements
from policies.training.trainer import Budget, PolicyTrainer, TrainingOptions
from tests import builders as make

OPTIONS = TrainingOptions(num_groups=2, num_rollouts=4, evaluate_every=2)


@pytest.fixture(scope="module")
def train(make_tasks):
    return [task.problem for task in make_tasks(5, num_tables=12, num_ranks=3, seed=0)]


@pytest.fixture(scope="module")
def validation(make_tasks):
    return [task.problem for task in make_tasks(4, num_tables=12, num_ranks=3, seed=1)]


@pytest.fixture
def make_trainer(train, validation):
    def make_one(seed=0, options=OPTIONS):
        return PolicyTrainer(train, validation, options=options, seed=seed)

    return make_one


def weights(network):
    return torch.cat([value.flatten() for value in network.parameters()])


@pytest.mark.parametrize("algorithm", Algorithm)
def test_a_resumed_training_ends_like_one_that_was_never_interrupted(make_trainer, tmp_path, algorithm):
    options = replace(OPTIONS, algorithm=algorithm)
    whole = make_trainer(options=options)
    whole.run(Budget(num_updates=6), folder=tmp_path / "whole")
    first = make_trainer(options=options)
    first.run(Budget(num_updates=4), folder=tmp_path / "parts")
    torch.manual_seed(99)  # another process has other random numbers
    second = make_trainer(options=options)
    second.run(Budget(num_updates=6), folder=tmp_path / "parts")
    assert second.num_updates == 6
    assert torch.equal(weights(second.network), weights(whole.network))
    assert torch.equal(weights(second.best_network), weights(whole.best_network))
    assert second.elapsed_s > first.elapsed_s


def test_a_training_that_is_finished_already_only_evaluates(make_trainer, tmp_path):
    make_trainer().run(Budget(num_updates=2), folder=tmp_path)
    again, shares = make_trainer(), []
    again.run(Budget(num_updates=2), folder=tmp_path, advance=shares.append)
    assert again.num_updates == 2
    assert len(again.evaluations) == 1
    assert sum(shares) == pytest.approx(1.0)


def test_the_weights_that_did_best_are_kept(make_trainer):
    trainer = make_trainer()
    seen = {}
    for seed in range(6):
        torch.manual_seed(seed)
        trainer.network.load_state_dict(PlacementNetwork(trainer.network.code_width).state_dict())
        seen[trainer.evaluate().relative_ms] = weights(trainer.network).clone()
    assert len(seen) > 3
    assert list(seen)[-1] != min(seen)
    assert torch.equal(weights(trainer.best_network), seen[min(seen)])


def test_evaluations_and_progress_are_told(make_trainer):
    told, shares = [], []
    make_trainer().run(Budget(num_updates=5), advance=shares.append, on_evaluated=told.append)
    assert [evaluation.num_updates for evaluation in told] == [2, 4, 5]
    assert sum(shares) == pytest.approx(1.0)
    assert all(0 <= evaluation.policy.balance <= 1 for evaluation in told)


def test_a_budget_of_seconds_ends_training(make_trainer):
    trainer = make_trainer()
    trainer.run(Budget(seconds=0.5))
    assert trainer.num_updates >= 1
    assert trainer.elapsed_s >= 0.5


def test_baselines_are_the_planners_own_placements(make_problem):
    # By price 9 | 5, 5+4, 9+2, 9+1. Every second table is twice as wide, so by lookups 10, 9, 8, 2 and 1 are dealt:
    # 5 | 9, 9+4, 5+2, 7+1.
    problem = make_problem([9, 5, 1, 4, 2])
    baselines = Baselines.of([problem])
    assert baselines.cost_greedy.max_ms == pytest.approx(11.0)
    assert baselines.cost_greedy.balance == pytest.approx(10 / 11)
    assert baselines.lookup_greedy.max_ms == pytest.approx(13.0)
    assert baselines.lookup_greedy.balance == pytest.approx(8 / 13)
    assert score_placements([problem], [np.array([0, 1, 0, 1, 1])]).max_ms == pytest.approx(11.0)


@pytest.mark.parametrize(
    ("seed", "options", "told"),
    [
        (1, OPTIONS, "its seed is 0, not 1"),
        (0, TrainingOptions(num_groups=2, num_rollouts=3, evaluate_every=2), "its num_rollouts is 4, not 3"),
    ],
)
def test_a_checkpoint_of_another_training_is_refused(make_trainer, tmp_path, seed, options, told):
    make_trainer().run(Budget(num_updates=2), folder=tmp_path)
    with pytest.raises(InvalidOptionError, match=told):
        make_trainer(seed=seed, options=options).run(Budget(num_updates=4), folder=tmp_path)


def test_a_checkpoint_that_lacks_something_is_refused(make_trainer, tmp_path):
    make_trainer().run(Budget(num_updates=2), folder=tmp_path)
    checkpoint = PolicyCheckpoint.load(tmp_path)
    state = {name: value for name, value in checkpoint.state.items() if name != "draws"}
    PolicyCheckpoint(state=state, tensors=checkpoint.tensors).save(tmp_path)
    with pytest.raises(FormatError, match="draws: is missing"):
        make_trainer().run(Budget(num_updates=4), folder=tmp_path)


def test_scores_that_stop_getting_better_end_a_training(make_trainer, tmp_path):
    still = replace(OPTIONS, evaluate_every=1, settings=replace(OPTIONS.settings, learning_rate=0.0))
    budget = Budget(num_updates=50, patience=3)
    trainer, shares = make_trainer(options=still), []
    trainer.run(budget, folder=tmp_path, advance=shares.append)
    assert trainer.num_updates == 4  # the first evaluation is progress
    assert sum(shares) == pytest.approx(1.0)
    again = make_trainer(options=still)
    again.run(budget, folder=tmp_path)
    assert again.num_updates == 4
    more = make_trainer(options=still)
    more.run(Budget(num_updates=50, patience=5), folder=tmp_path)
    assert more.num_updates == 6  # the run that had nothing left to do counts for nothing


def test_progress_is_more_than_a_hair():
    plateau = Plateau()
    for num_updates, score in enumerate((1.1, 1.0, 0.9999, 0.9998)):
        plateau.add(num_updates, score)
    assert (plateau.reference, plateau.num_stale) == (1.0, 2)
    assert plateau.is_reached(2)
    assert not plateau.is_reached(3)
    assert not plateau.is_reached(None)
    plateau.add(3, 0.5)  # the same evaluation once more
    assert plateau.num_stale == 2
    plateau.add(4, 0.9994)  # small steps add up
    assert (plateau.reference, plateau.num_stale) == (0.9994, 0)


@pytest.mark.parametrize("items", [Items.ROW_GROUPS, Items.TIERS])
def test_parts_of_tables_are_trained_on_and_compared_with_planners(items):
    model = AnalyticCostModel.for_device("cpu")
    pool = make.pool([1, 9, 4, 2, 7, 3], rows=[4000, 90, 800, 6000, 50, 700])
    kind = TaskKind(device="cpu", num_tables=4, num_ranks=2, items=items, memory_fill=0.9)
    problems = sample_problems(pool, model, kind, task_seeds(TaskSplit.TRAIN, 3))
    costs = make.costs(kernel=model)
    as_task = partial(items_task, items=items, objective=Objective.STEP, costs=costs)
    trainer = PolicyTrainer(problems, problems, options=OPTIONS, as_task=as_task)
    trainer.run(Budget(num_updates=2))
    (evaluation,) = trainer.evaluations
    assert trainer.train_tasks[0].num_items == 4 * (NUM_ROW_RANGES if items is Items.ROW_GROUPS else 1)
    assert trainer.env.batch.may_split == (items is Items.TIERS)
    for score in (evaluation.policy, evaluation.baselines.cost_greedy, evaluation.baselines.lookup_greedy):
        assert score.step_ms > score.max_ms > 0


def test_ppo_cannot_learn_from_episodes_of_different_lengths():
    model = AnalyticCostModel.for_device("cpu")
    kind = TaskKind(device="cpu", num_tables=2, num_ranks=2, items=Items.TIERS)
    problems = sample_problems(make.pool([1, 9, 4]), model, kind, task_seeds(TaskSplit.TRAIN, 2))
    options = replace(OPTIONS, algorithm=Algorithm.PPO)
    with pytest.raises(InvalidOptionError, match="algorithm: must be vtrace where items may be split"):
        PolicyTrainer(problems, problems, options=options, as_task=partial(items_task, items=Items.TIERS))


@pytest.mark.parametrize("objective", [Objective.MAX_KERNEL, Objective.STEP])
def test_other_objectives_are_trained_for(train, validation, model, objective):
    as_task = partial(PlacementTask.of, objective=objective, costs=make.costs(kernel=model))
    trainer = PolicyTrainer(train, validation, options=OPTIONS, as_task=as_task)
    trainer.run(Budget(num_updates=2))
    (evaluation,) = trainer.evaluations
    has_steps = objective is Objective.STEP
    assert (evaluation.policy.step_ms is not None) == has_steps
    assert evaluation.policy.objective_ms == (evaluation.policy.step_ms if has_steps else evaluation.policy.max_ms)
    assert evaluation.relative_ms == pytest.approx(
        evaluation.policy.objective_ms / evaluation.baselines.cost_greedy.objective_ms
    )


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"num_actors": -1}, "num_actors: must be at least 0"),
        ({"num_actors": 1, "algorithm": Algorithm.PPO}, "num_actors: must be 0 with ppo"),
        ({"num_actors": 1, "reward": RewardSource.MIXED}, "num_actors: must be 0 with mixed rewards"),
        ({"num_rollouts": 1}, "num_rollouts: must be at least 2 to compare episodes"),
        ({"num_rollouts": 1, "algorithm": Algorithm.PPO}, "num_rollouts: must be at least 2 to compare episodes"),
        ({"measured_share": 0.0}, "measured_share: must be a number above 0 and up to 1, got 0"),
    ],
)
def test_options_that_make_no_sense_are_refused(options, told):
    with pytest.raises(InvalidOptionError, match=told):
        TrainingOptions(**options)


@pytest.mark.parametrize("budget", [{"num_updates": 0}, {"seconds": -1.0}, {"num_updates": 1, "patience": -1}])
def test_a_budget_that_makes_no_sense_is_refused(budget):
    with pytest.raises(InvalidOptionError):
        Budget(**budget)


@pytest.mark.parametrize(
    ("budget", "limit_s", "most_stale"),
    [
        ({}, 60.0, None),
        ({"num_updates": 5}, None, None),
        ({"seconds": 60.0}, 60.0, None),
        ({"seconds": 61.0}, 61.0, 60),
        ({"seconds": 61.0, "patience": 0}, 61.0, None),
        ({"num_updates": 5, "patience": 3}, None, 3),
    ],
)
def test_what_a_budget_leaves_out_has_a_usual_value(budget, limit_s, most_stale):
    made = Budget(**budget)
    assert (made.limit_s, made.most_stale) == (limit_s, most_stale)


def test_patience_under_a_cost_model_in_training_is_asked_for(tmp_path):
    budget = Budget(seconds=100.0)
    assert PolicyRunOptions(budget=budget).ending.most_stale == 60
    assert PolicyRunOptions(budget=budget, joint=True, store=tmp_path).ending.most_stale is None
    patient = replace(budget, patience=3)
    assert PolicyRunOptions(budget=patient, joint=True, store=tmp_path).ending.most_stale == 3


def test_tasks_of_different_sizes_are_refused(make_tasks, validation):
    tasks = make_tasks(1, num_tables=4, num_ranks=3) + make_tasks(1, num_tables=5, num_ranks=3)
    with pytest.raises(InvalidOptionError, match="equally many items"):
        PolicyTrainer([task.problem for task in tasks], validation)
