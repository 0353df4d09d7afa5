import numpy as np
import pytest
import torch

from autoshard.core.errors import FormatError, InvalidOptionError
from policies.checkpoint import Checkpoint
from policies.network import PlacementNetwork
from policies.scores import Baselines, score_placements
from policies.training import Budget, PolicyTrainer, TrainingOptions

OPTIONS = TrainingOptions(num_groups=2, num_rollouts=4, evaluate_every=2)


@pytest.fixture(scope="module")
def train(make_tasks):
    return [task.problem for task in make_tasks(5, num_tables=12, num_ranks=3, seed=0)]


@pytest.fixture(scope="module")
def validation(make_tasks):
    return [task.problem for task in make_tasks(4, num_tables=12, num_ranks=3, seed=1)]


@pytest.fixture
def make_trainer(train, validation):
    def make(seed=0, options=OPTIONS):
        return PolicyTrainer(train, validation, options=options, seed=seed)

    return make


def weights(network):
    return torch.cat([value.flatten() for value in network.parameters()])


def test_a_resumed_training_ends_like_one_that_was_never_interrupted(make_trainer, tmp_path):
    whole = make_trainer()
    whole.run(Budget(num_updates=6), folder=tmp_path / "whole")
    first = make_trainer()
    first.run(Budget(num_updates=4), folder=tmp_path / "parts")
    torch.manual_seed(99)  # another process has other random numbers
    second = make_trainer()
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
    checkpoint = Checkpoint.load(tmp_path)
    state = {name: value for name, value in checkpoint.state.items() if name != "draws"}
    Checkpoint(state=state, tensors=checkpoint.tensors).save(tmp_path)
    with pytest.raises(FormatError, match="draws: is missing"):
        make_trainer().run(Budget(num_updates=4), folder=tmp_path)


@pytest.mark.parametrize("budget", [{}, {"num_updates": 0}, {"seconds": -1.0}])
def test_a_budget_that_makes_no_sense_is_refused(budget):
    with pytest.raises(InvalidOptionError):
        Budget(**budget)


def test_tasks_of_different_sizes_are_refused(make_tasks, validation):
    tasks = make_tasks(1, num_tables=4, num_ranks=3) + make_tasks(1, num_tables=5, num_ranks=3)
    with pytest.raises(InvalidOptionError, match="equally many items"):
        PolicyTrainer([task.problem for task in tasks], validation)
