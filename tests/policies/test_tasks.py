import pytest

from autoshard.core.errors import InvalidOptionError, InvalidTableError
from policies.tasks import Split, sample_problems, task_seeds


def test_splits_and_runs_never_share_a_seed():
    seeds = [
        *task_seeds(Split.VALIDATION, 1000),
        *task_seeds(Split.TEST, 1000),
        *(seed for run in range(20) for seed in task_seeds(Split.TRAIN, 1000, run)),
    ]
    assert len(set(seeds)) == len(seeds)
    assert min(seeds) > 2**32  # out of reach of what people type


def test_only_training_tasks_depend_on_the_runs_seed():
    assert task_seeds(Split.TEST, 20, seed=0) == task_seeds(Split.TEST, 20, seed=7)
    assert task_seeds(Split.TRAIN, 20, seed=0) != task_seeds(Split.TRAIN, 20, seed=7)


@pytest.mark.parametrize(("num_tasks", "seed"), [(0, 0), (1 << 21, 0), (1, -1)])
def test_numbers_out_of_range_are_refused(num_tasks, seed):
    with pytest.raises(InvalidOptionError, match="must be"):
        task_seeds(Split.TRAIN, num_tasks, seed)


def test_problems_are_subsets_of_the_pool_without_limits(make_tables, model):
    pool = make_tables([1, 2, 3, 4, 5, 6])
    problems = sample_problems(pool, model, device="cpu", num_tables=4, num_ranks=3, seeds=task_seeds(Split.TRAIN, 8))
    names = {table.name for table in pool.tables}
    drawn = {tuple(table.name for table in problem.tables.tables) for problem in problems}
    assert len(drawn) > 1
    for problem in problems:
        assert problem.num_items == 4
        assert problem.num_ranks == 3
        assert {table.name for table in problem.tables.tables} < names
        assert (problem.capacity_R >= problem.bytes_N.sum()).all()


def test_a_pool_that_is_too_small_is_refused(make_tables, model):
    with pytest.raises(InvalidTableError, match="num_tables"):
        sample_problems(
            make_tables([1, 2]), model, device="cpu", num_tables=3, num_ranks=2, seeds=task_seeds(Split.TEST, 1)
        )
    with pytest.raises(InvalidOptionError, match="num_ranks: must be at least 1, got 0"):
        sample_problems(
            make_tables([1, 2]), model, device="cpu", num_tables=2, num_ranks=0, seeds=task_seeds(Split.TEST, 1)
        )
