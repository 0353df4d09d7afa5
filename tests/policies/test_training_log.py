import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from autoshard.core.errors import FormatError
from policies.choices import Algorithm
from policies.training.trainer import Budget, PolicyTrainer, TrainingOptions

LOSSES = {Algorithm.VTRACE: "train/policy_loss", Algorithm.PPO: "train/policy_gradient_loss"}


@pytest.fixture
def make_trainer(make_tasks):
    train = [task.problem for task in make_tasks(5, num_tables=12, num_ranks=3, seed=0)]
    validation = [task.problem for task in make_tasks(4, num_tables=12, num_ranks=3, seed=1)]

    def make(algorithm=Algorithm.VTRACE):
        options = TrainingOptions(num_groups=2, num_rollouts=4, evaluate_every=2, algorithm=algorithm)
        return PolicyTrainer(train, validation, options=options)

    return make


def scalars(folder):
    log = EventAccumulator(str(folder))
    log.Reload()
    return {tag: [(event.step, event.value) for event in log.Scalars(tag)] for tag in log.Tags()["scalars"]}


@pytest.mark.parametrize("algorithm", Algorithm)
def test_losses_rewards_scores_and_times_are_logged(make_trainer, tmp_path, algorithm):
    trainer = make_trainer(algorithm)
    trainer.run(Budget(num_updates=4), tensorboard=tmp_path)
    found = scalars(tmp_path)
    every_update = {LOSSES[algorithm], "train/value_loss", "rollout/reward", "time/steps_per_second", "time/elapsed_s"}
    every_update |= {"time/collect_s", "time/learn_s", "time/measure_s", "time/evaluate_s"}
    for tag in every_update:
        assert [step for step, _ in found[tag]] == [1, 2, 3, 4], tag
    balances = [evaluation.policy.balance for evaluation in trainer.evaluations]
    assert found["evaluation/balance"] == [(2, pytest.approx(balances[0])), (4, pytest.approx(balances[1]))]
    relative = [evaluation.relative_ms for evaluation in trainer.evaluations]
    assert [value for _, value in found["evaluation/relative_to_cost_greedy"]] == pytest.approx(relative)
    assert any("entropy" in tag for tag in found)


def test_a_resumed_training_goes_on_with_its_logs(make_trainer, tmp_path):
    class BrokenOff(BaseException):
        pass

    def break_off(evaluation):
        if evaluation.num_updates == 4:
            raise BrokenOff

    run, log = tmp_path / "run", tmp_path / "log"
    with pytest.raises(BrokenOff):
        make_trainer().run(Budget(num_updates=8), folder=run, tensorboard=log, on_evaluated=break_off)
    first = scalars(log)["rollout/reward"]
    assert [step for step, _ in first] == [1, 2, 3]
    # The checkpoint is of update 2, so update 3 comes again, and is the same.
    make_trainer().run(Budget(num_updates=6), folder=run, tensorboard=log)
    found = scalars(log)["rollout/reward"]
    assert [step for step, _ in found] == [1, 2, 3, 4, 5, 6]


def test_a_folder_that_cannot_be_written_is_told(make_trainer, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(FormatError, match="cannot be written"):
        make_trainer().run(Budget(num_updates=1), tensorboard=tmp_path / "file" / "log")
