"""Changes that make a task feasible, and what is missing for it."""

from dataclasses import replace

import pytest

from autoshard.core import Constraints, MemoryBytes
from autoshard.core.errors import InfeasiblePlanError
from autoshard.formats import load_tables, load_topology
from autoshard.planning import make_costs, make_plan
from autoshard.whatif.remedies import find_remedies, find_shortage
from tests import builders as make

MIB = 1 << 20


def request(hbm, tables=None, **settings):
    tables = tables or replace(load_tables("criteo-kaggle"), tables=load_tables("criteo-kaggle").tables[:6])
    topology = replace(load_topology("dgx-a100-16"), memory_bytes=MemoryBytes(hbm=hbm))
    return make.request(tables, topology, costs=make_costs(tables, topology), **settings)


def changed(task, remedy):
    """The task with a remedy, made from its field and value alone; and its planner."""
    topology, tables = task.topology, task.tables
    if remedy.field == "topology.memory_bytes.hbm":
        return replace(task, topology=replace(topology, memory_bytes=MemoryBytes(hbm=remedy.value))), None
    if remedy.field == "topology.world_size":
        larger = replace(load_topology(f"dgx-a100-{remedy.value}"), memory_bytes=topology.memory_bytes)
        return replace(task, topology=larger), None
    if remedy.field == "planner":
        return task, remedy.value
    free = tuple(replace(table, constraints=Constraints()) for table in tables.tables)
    return replace(task, tables=replace(tables, tables=free)), None


def test_the_largest_table_lacks_bytes_on_the_rank_with_most_room():
    task = request(100 * MIB)
    largest = max(task.tables.tables, key=lambda table: table.storage_bytes)
    shortage = find_shortage(task.tables, task.topology)
    assert (shortage.table, shortage.rank) == (largest.name, 0)
    assert shortage.missing_bytes == largest.storage_bytes - 100 * MIB
    assert find_shortage(task.tables, request(1 << 35).topology) is None


@pytest.mark.parametrize("planner", ["size-greedy", "karmarkar-karp", "auto"])
def test_every_remedy_makes_the_task_feasible(planner):
    task = request(30 * MIB, time_limit_s=0.1)
    with pytest.raises(InfeasiblePlanError):
        make_plan(planner, task)
    found = find_remedies(planner, task, budget_s=60.0, trial_s=0.0)
    assert "topology.memory_bytes.hbm" in [remedy.field for remedy in found]
    for remedy in found:
        helped, other = changed(task, remedy)
        assert make_plan(other or planner, helped).predicted.step_ms.value > 0


def test_a_planner_that_cuts_tables_helps_where_one_table_is_too_large():
    task = request(600 * MIB)
    largest = max(task.tables.tables, key=lambda table: table.storage_bytes)
    assert largest.storage_bytes > 600 * MIB
    found = find_remedies("size-greedy", task, budget_s=60.0, trial_s=0.0)
    assert [remedy.value for remedy in found if remedy.field == "planner"] == ["auto"]
    memory = next(remedy for remedy in found if remedy.field == "topology.memory_bytes.hbm")
    assert largest.storage_bytes <= memory.value < largest.storage_bytes + MIB


def test_constraints_are_named_where_they_rule_all_out():
    tables = request(1 << 30).tables
    pinned = [replace(table, constraints=Constraints(pinned_ranks=(0,))) for table in tables.tables]
    total = tables.storage_bytes
    task = request(total - MIB, tables=replace(tables, tables=tuple(pinned)))
    shortage = find_shortage(task.tables, task.topology)
    assert (shortage.rank, shortage.missing_bytes > 0) == (0, True)
    fields = [remedy.field for remedy in find_remedies("size-greedy", task, budget_s=60.0, trial_s=0.0)]
    assert fields == ["topology.memory_bytes.hbm", "tables.constraints"]


def test_no_more_ranks_are_tried_than_may_be():
    task = request(30 * MIB)
    fields = [
        [remedy.field for remedy in find_remedies("auto", task, budget_s=60.0, trial_s=0.0, max_ranks=most)]
        for most in (16, 512)
    ]
    assert ["topology.world_size" in found for found in fields] == [False, True]


def test_nothing_is_tried_without_time():
    assert find_remedies("size-greedy", request(30 * MIB), budget_s=1.0, trial_s=2.0) == ()
