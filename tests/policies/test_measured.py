from functools import partial

import numpy as np
import pytest

from autoshard.core.errors import InvalidOptionError
from env import PlacementTask, PlacementVecEnv
from policies.choices import RewardSource
from policies.rollout.measured import MeasuredVecEnv, find_benchmark
from policies.training.trainer import PolicyTrainer, TrainingOptions

NUM_ITEMS = 4


@pytest.fixture
def tasks(make_tasks):
    return make_tasks(3, num_tables=NUM_ITEMS, num_ranks=2)


def play(env, num_rounds, actions):
    """The rewards of each round; every round, episode e puts items where `actions[e]` says."""
    env.reset()
    rounds = []
    for _ in range(num_rounds):
        for step in range(NUM_ITEMS):
            _, rewards_E, _, infos = env.step(np.array([episode[step] for episode in actions]))
        rounds.append((rewards_E.copy(), infos))
    return rounds


def lookup_times(plans):
    """Stands for a machine on which a rank takes a millisecond per table."""
    return [np.array([float(len(shards)) for shards in plan.local_shards()]) for plan in plans]


@pytest.mark.slow
def test_rewards_are_what_the_benchmark_measures(tasks):
    benchmark, told = find_benchmark("cpu"), []
    env = MeasuredVecEnv(PlacementVecEnv(tasks, 1, 2), benchmark, 1.0, lambda *one: told.append(one))
    ((rewards_E, infos),) = play(env, 1, [[0, 1, 0, 1], [0, 0, 0, 1]])
    assert len(told) == env.num_measured == 2
    for reward, info, (problem, ranks_N, cost_ms_R) in zip(rewards_E, infos, told, strict=True):
        assert (cost_ms_R > 0).all()
        assert reward == pytest.approx(cost_ms_R.min() / cost_ms_R.max())
        assert info["cost_ms"].tolist() == cost_ms_R.tolist() != problem.rank_ms(ranks_N).tolist()
        assert info["episode"]["r"] == pytest.approx(reward)
    assert env.measure_s > 0


def test_a_share_of_the_rounds_is_measured(tasks):
    env = MeasuredVecEnv(PlacementVecEnv(tasks, 1, 1), lookup_times, 0.4)
    rounds = play(env, 10, [[0, 0, 0, 1]])
    is_measured = [rewards_E[0] == pytest.approx(1 / 3) for rewards_E, _ in rounds]
    assert is_measured == [False, False, True, False, True, False, False, True, False, True]
    assert env.num_measured == 4


def test_what_is_split_is_not_measured(tasks):
    problems = [task.problem for task in tasks]
    options = TrainingOptions(reward=RewardSource.MEASURED)
    with pytest.raises(InvalidOptionError, match="reward: must be model where items may be split"):
        PolicyTrainer(
            problems,
            problems,
            options=options,
            as_task=partial(PlacementTask.of, max_splits=1),
            measure=lookup_times,
        )


def test_the_same_placement_is_measured_once(tasks):
    env = MeasuredVecEnv(PlacementVecEnv(tasks, 1, 3), lookup_times)
    ((rewards_E, _),) = play(env, 1, [[0, 0, 0, 1], [0, 0, 1, 1], [0, 0, 0, 1]])
    assert rewards_E.tolist() == pytest.approx([1 / 3, 1.0, 1 / 3])
    assert env.num_measured == 2


def test_placements_beyond_limits_are_not_measured(make_problem):
    task = PlacementTask.of(make_problem([1, 2, 3, 4], hbm_bytes=200_000))
    env = MeasuredVecEnv(PlacementVecEnv([task], 1, 2), lookup_times)
    ((rewards_E, infos),) = play(env, 1, [[0, 0, 0, 0], [0, 1, 1, 0]])
    assert [info["is_feasible"] for info in infos] == [False, True]
    assert rewards_E[0] < 0
    assert rewards_E[1] == 1.0
    assert env.num_measured == 1


def test_times_of_measuring_are_told_apart_and_rounds_are_resumed(tasks, tmp_path):
    problems = [task.problem for task in tasks]
    options = TrainingOptions(num_groups=1, num_rollouts=2, reward=RewardSource.MIXED, measured_share=0.5)

    def trainer():
        return PolicyTrainer(problems, problems, options=options, measure=lookup_times)

    first = trainer()
    for _ in range(3):
        first.update()
    assert first.measured.num_rounds == 3
    assert 0 < first.times.measure_s < first.times.measure_s + first.times.collect_s
    first.evaluate()
    first.checkpoint().save(tmp_path)
    second = trainer()
    second.restore(first.checkpoint(), "here")
    assert second.measured.num_rounds == 3
    assert second.measured.num_measured == first.measured.num_measured > 0
    assert second.times.to_json() == first.times.to_json()


def test_measuring_without_a_way_to_measure_is_refused(tasks):
    problems = [task.problem for task in tasks]
    with pytest.raises(InvalidOptionError, match="reward: measured needs a way to measure plans"):
        PolicyTrainer(problems, problems, options=TrainingOptions(reward=RewardSource.MEASURED))
