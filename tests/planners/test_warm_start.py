"""Plans to start from: never worse than they are, and refused if they are of another task."""

from dataclasses import replace

import pytest

from autoshard.core import Constraints, RowRange, RowsBy, Shard
from autoshard.core.errors import InvalidOptionError, InvalidPlanError
from autoshard.evaluation import evaluate
from autoshard.planners.auto import AutoPlanner
from autoshard.planners.oper import OperPlanner
from autoshard.planners.warm_start import start_of
from autoshard.planning import make_plan
from tests import builders as make

COSTS = make.costs()

STEP, KERNEL = {"steps": 1, "policy": False}, {"steps": 1, "policy": False, "objective": "kernel"}
SECONDS = 30.0


def step_ms(plan, costs):
    return evaluate(plan, costs).step_ms.value


@pytest.fixture(scope="module")
def task():
    return make.draw_task(24, 4, seed=6)


@pytest.fixture(scope="module")
def good(task):
    """A plan that takes more steps to find than the searches below have."""
    return AutoPlanner().plan(make.request(*task, options={"steps": 20}, time_limit_s=SECONDS))


def test_the_new_plan_is_no_slower(task, good):
    without = AutoPlanner().plan(make.request(*task, options=STEP, time_limit_s=SECONDS))
    plan = AutoPlanner().plan(make.request(*task, options=STEP, time_limit_s=SECONDS, start=good))
    assert step_ms(good, COSTS) < step_ms(without, COSTS)
    assert step_ms(plan, COSTS) <= step_ms(good, COSTS) * (1 + 1e-9)
    assert plan.provenance.models["search"].count("(start)") == 1


def test_whole_tables_start_the_search_by_kernels(task):
    good = AutoPlanner().plan(make.request(*task, options={**KERNEL, "steps": 60}, time_limit_s=SECONDS))
    plan = AutoPlanner().plan(make.request(*task, options={**KERNEL}, time_limit_s=SECONDS, start=good))
    assert evaluate(plan, COSTS).max_kernel_ms <= evaluate(good, COSTS).max_kernel_ms


def test_other_plans_do_not_start_the_search_by_kernels(task, caplog):
    cut = AutoPlanner().plan(make.request(*task, options={**STEP, "sharding_types": "row_wise"}, time_limit_s=SECONDS))
    AutoPlanner().plan(make.request(*task, options=KERNEL, time_limit_s=SECONDS, start=cut))
    assert "does not hold every table as one of column_wise, table_wise" in caplog.text
    whole = {**KERNEL, "sharding_types": "table_wise"}
    AutoPlanner().plan(make.request(*task, options=whole, time_limit_s=SECONDS, start=cut))
    assert "does not hold every table as one of table_wise" in caplog.text


def test_a_start_without_room_for_training_is_left_out_and_named(task, caplog):
    tables, topology = task
    start = AutoPlanner().plan(
        make.request(*task, options={**STEP, "sharding_types": "table_wise"}, time_limit_s=SECONDS)
    )
    fullest = max(evaluate(start, COSTS).ranks, key=lambda rank: rank.hbm_bytes)
    memory = replace(topology.memory_of(fullest.rank), hbm=fullest.hbm_bytes)
    tight = replace(topology, overrides=((fullest.rank, memory),))
    AutoPlanner().plan(make.request(tables, tight, options=STEP, time_limit_s=SECONDS, start=start))
    assert "the start is left out, it leaves no room for training on a batch" in caplog.text


def test_column_shards_start_the_search_by_kernels_where_tables_may_be_cut(caplog):
    task = make.draw_task(3, 4, seed=5)
    columns = {"steps": 10, "policy": False, "sharding_types": "column_wise"}
    good = AutoPlanner().plan(make.request(*task, options=columns, time_limit_s=SECONDS))
    plan = AutoPlanner().plan(make.request(*task, options=KERNEL, time_limit_s=SECONDS, start=good))
    assert evaluate(plan, COSTS).max_kernel_ms <= evaluate(good, COSTS).max_kernel_ms * (1 + 1e-6)
    assert "does not hold" not in caplog.text


def test_plans_that_layouts_lack_are_kept_if_they_are_best(task):
    copies = OperPlanner().plan(make.request(*task, time_limit_s=SECONDS))
    plan = AutoPlanner().plan(make.request(*task, options=STEP, time_limit_s=SECONDS, start=copies))
    assert step_ms(plan, COSTS) <= step_ms(copies, COSTS) * (1 + 1e-9)


def test_it_is_a_plan_of_the_task_at_hand(task, good):
    tables, topology = task
    busier = replace(tables.tables[0], features=(replace(tables.tables[0].features[0], pooling_factor=99.0),))
    tables = replace(tables, batch_size=512, tables=(busier, *tables.tables[1:]))
    links = replace(topology, device="a100")
    found = start_of(make.request(tables, links, start=good))
    assert (found.tables, found.topology) == (tables, links)
    assert {placed.shard.table.name for placed in found.shards} == {table.name for table in tables.tables}
    assert all(placed.shard.table in tables.tables for placed in found.shards)


def test_there_is_none_unless_it_is_given(task):
    assert start_of(make.request(*task)) is None


def test_what_does_not_fit_any_more_is_left_out(task, good, caplog):
    tables, topology = task
    pinned = tuple(replace(table, constraints=Constraints(pinned_ranks=(1,))) for table in tables.tables)
    request = make.request(
        *(replace(tables, tables=pinned), topology),
        options={**STEP, "count_activations": False},
        time_limit_s=SECONDS,
        start=good,
    )
    assert start_of(request) is None
    assert "the start is left out" in caplog.text
    ranks = {placed.replicas for placed in AutoPlanner().plan(request).shards}
    assert ranks == {((1,),)}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tables: tables[1:], r'the task has no table "t0"'),
        (lambda tables: (*tables[1:], replace(tables[0], name="new")), r'it has no table "new"'),
        (
            lambda tables: (replace(tables[0], embedding_dim=12), *tables[1:]),
            r'"t0" has [\d,]+ rows of dimension 12 here, [\d,]+ of \d+ there',
        ),
    ],
)
def test_plans_of_other_tables_are_refused(task, good, change, message):
    tables, topology = task
    request = make.request(replace(tables, tables=change(tables.tables)), topology, start=good)
    with pytest.raises(InvalidPlanError, match=rf"^start: must be a plan of the same tables; {message}$"):
        start_of(request)


def test_plans_of_other_ranks_are_refused(task, good):
    with pytest.raises(InvalidPlanError, match=r"^start: must be a plan for 3 ranks, got one for 4$"):
        start_of(make.request(task[0], make.topology(3), start=good))


def test_cuts_by_access_rank_need_a_row_order(task):
    tables, topology = task
    table = replace(tables.tables[0], row_order=None)
    rows = RowRange(start=0, stop=table.num_embeddings, by=RowsBy.ACCESS_RANK)
    shard = Shard(table=tables.tables[0], rows=rows, columns=(0, table.embedding_dim))
    tables = replace(tables, tables=(table,))
    start = make.plan(make.placed(shard), tables=tables, topology=topology)
    with pytest.raises(InvalidPlanError, match=r'cuts table "t0" by access rank, which has no row order here'):
        start_of(make.request(tables, topology, start=start))


def test_other_planners_take_no_start(task, good):
    with pytest.raises(InvalidOptionError, match=r"^start: the planner neo searches from no start; auto does$"):
        make_plan("neo", make.request(*task, start=good))
