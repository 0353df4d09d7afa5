from itertools import pairwise

import pytest

from autoshard.core import Shard
from autoshard.core.errors import InvalidOptionError, InvalidTableError
from autoshard.evaluation.analytic import AnalyticCostModel
from policies.choices import Items
from policies.planning.tasks import (
    TaskKind,
    TaskSplit,
    cut,
    items_problem,
    items_task,
    num_splits,
    sample_problems,
    task_seeds,
    training_topology,
)
from tests import builders as make


def test_splits_and_runs_never_share_a_seed():
    seeds = [
        *task_seeds(TaskSplit.VALIDATION, 1000),
        *task_seeds(TaskSplit.TEST, 1000),
        *(seed for run in range(20) for seed in task_seeds(TaskSplit.TRAIN, 1000, run)),
    ]
    assert len(set(seeds)) == len(seeds)
    assert min(seeds) > 2**32  # out of reach of what people type


def test_only_training_tasks_depend_on_the_runs_seed():
    assert task_seeds(TaskSplit.TEST, 20, seed=0) == task_seeds(TaskSplit.TEST, 20, seed=7)
    assert task_seeds(TaskSplit.TRAIN, 20, seed=0) != task_seeds(TaskSplit.TRAIN, 20, seed=7)


@pytest.mark.parametrize(("num_tasks", "seed"), [(0, 0), (1 << 21, 0), (1, -1)])
def test_numbers_out_of_range_are_refused(num_tasks, seed):
    with pytest.raises(InvalidOptionError, match="must be"):
        task_seeds(TaskSplit.TRAIN, num_tasks, seed)


def kind(num_tables, num_ranks, **options):
    return TaskKind(device="cpu", num_tables=num_tables, num_ranks=num_ranks, **options)


def test_problems_are_subsets_of_the_pool_without_limits(model):
    pool = make.pool([1, 2, 3, 4, 5, 6])
    problems = sample_problems(pool, model, kind(4, 3), task_seeds(TaskSplit.TRAIN, 8))
    names = {table.name for table in pool.tables}
    drawn = {tuple(table.name for table in problem.tables.tables) for problem in problems}
    assert len(drawn) > 1
    for problem in problems:
        assert problem.num_items == 4
        assert problem.num_ranks == 3
        assert {table.name for table in problem.tables.tables} < names
        assert (problem.capacity_R >= problem.bytes_N.sum()).all()


def test_a_pool_that_is_too_small_is_refused(model):
    with pytest.raises(InvalidTableError, match="num_tables"):
        sample_problems(make.pool([1, 2]), model, kind(3, 2), task_seeds(TaskSplit.TEST, 1))


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"num_ranks": 0}, "num_ranks: must be at least 1, got 0"),
        ({"num_ranks": 2, "memory_fill": 1.5}, r"memory_fill: must be in \(0, 1\], got 1.5"),
    ],
)
def test_kinds_of_tasks_that_make_no_sense_are_refused(options, told):
    with pytest.raises(InvalidOptionError, match=told):
        TaskKind(device="cpu", num_tables=2, **options)


@pytest.mark.parametrize("items", Items)
def test_items_tile_their_tables_and_are_equally_many_in_every_task(items):
    pool = make.pool([1, 2, 3, 4, 5, 6], rows=[1, 7, 100, 3, 1000, 50])
    model = AnalyticCostModel.for_device("cpu")
    problems = sample_problems(pool, model, kind(3, 2, items=items), task_seeds(TaskSplit.TRAIN, 6))
    assert len({problem.num_items for problem in problems}) == 1
    for problem in problems:
        for table in problem.tables.tables:
            rows = sorted((one.rows.start, one.rows.stop) for one in problem.shards if one.table == table)
            assert rows[0][0] == 0
            assert rows[-1][1] == table.num_embeddings
            assert all(stop == start for (_, stop), (start, _) in pairwise(rows))
    assert bool(problems[0].tiers) == (items is Items.TIERS)


def test_only_tiers_let_hot_rows_be_cut_off():
    model = AnalyticCostModel.for_device("cpu")
    tables = make.pool([4, 2, 3], rows=[100_000, 1, 2])
    for items in Items:
        task = items_task(items_problem(tables, make.topology(2), model, items), items)
        assert task.may_split == (items is Items.TIERS)
        assert task.max_splits == num_splits(items)
    # The last kind is tiers: three parts of the first table, one of the second, two of the third.
    halves_M2 = task.parts.halves_M2
    assert [task.problem.shards[item] for item in range(3)] == [Shard.whole(table) for table in tables.tables]
    assert (halves_M2[:, 0] >= 0).sum() == 3
    assert task.parts.num_parts == 3 + 2 * 3


def test_tables_of_too_few_rows_are_cut_less_or_not_at_all():
    tables = make.pool([1, 1, 1], rows=[1, 2, 3])
    parts = cut(tables, Items.ROW_GROUPS)
    assert sum(part.num_embeddings for part in parts) == 6
    assert [part for part in parts if part.table.name == "t0"] == [Shard.whole(tables.tables[0])]
    assert sum(part.table.name == "t2" for part in parts) == 3


def test_memory_is_as_full_as_asked_for(model):
    pool = make.pool([1.0] * 30, rows=list(range(1000, 1030)))
    for problem in sample_problems(pool, model, kind(24, 2, memory_fill=0.9), task_seeds(TaskSplit.TEST, 5)):
        fill = problem.bytes_N.sum() / problem.capacity_R.sum()
        assert fill == pytest.approx(0.9, abs=0.001)


def test_there_is_more_memory_where_nothing_fits_otherwise(model):
    # Two narrow tables on one rank, the wide one on the other.
    pool = make.pool([1.0] * 3, rows=1000)
    (problem,) = sample_problems(pool, model, kind(3, 2, memory_fill=1.0), task_seeds(TaskSplit.TEST, 1))
    assert sorted(problem.bytes_N.tolist()) == [68_000, 68_000, 132_000]
    assert 136_000 <= problem.capacity_R[0] <= 1.01 * 136_000


def test_ranks_are_in_nodes_so_that_tiers_differ():
    assert [level.size for level in training_topology("cpu", 8, 1).levels] == [4, 8]
    assert [level.size for level in training_topology("cpu", 16, 1).levels] == [8, 16]
    assert [level.size for level in training_topology("cpu", 6, 1).levels] == [6]
