"""What the runtime refuses is said of plans and tables before they are run."""

import logging
from dataclasses import replace

import pytest

from autoshard.core import (
    DType,
    MemoryLevel,
    MemoryPlacement,
    Optimizer,
    ReplicaGroups,
)
from autoshard.core.access import AccessProfile
from autoshard.core.errors import InvalidPlanError
from autoshard.evaluation.executable import plan_note, tables_note
from autoshard.formats import load_topology
from autoshard.planning import make_plan
from autoshard.runtime import ownership_of
from tests.builders import plan as plan_of
from tests.builders import request, table, table_wise, tables

TOPOLOGY = load_topology("cpu-4")


def tables_of(**changes):
    return tables(table("t", row_order=None, **changes), table("usual", row_order=None))


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"embedding_dim": 6}, "must be a multiple of 4 columns to be executed, got 6"),
        ({"embedding_dim": 1}, "must be a multiple of 4 columns to be executed, got 1"),
        ({"dtype": DType.INT8}, "the runtime trains fp32 and fp16 weights, got int8"),
        ({"dtype": DType.BF16}, "the runtime trains fp32 and fp16 weights, got bf16"),
        ({"optimizer": Optimizer.NONE}, "the runtime trains with sgd, rowwise_adagrad, adagrad, adam"),
    ],
)
def test_tables_that_are_not_trained_are_named_when_they_are_planned(changes, told, caplog):
    given = tables_of(**changes)
    assert told in tables_note(given)
    with caplog.at_level(logging.WARNING):
        plan = make_plan("cost-greedy", request(given, TOPOLOGY))
    note = plan_note(plan)
    assert note.startswith("`autoshard run` does not execute this plan: ")
    assert told in note
    assert 'tables "t")' in note
    assert note in caplog.text
    assert plan.provenance.models["execution_notes"] == note
    with pytest.raises(InvalidPlanError, match=told):
        ownership_of(plan, TOPOLOGY.world_size)


def test_moments_that_are_means_are_not_scaled():
    groups = ReplicaGroups(num_groups=2, moment_scale=2.0)
    for optimizer in Optimizer:
        given = tables(table("t", optimizer=optimizer))
        plan = plan_of(*table_wise(given.tables, (0,)), tables=given, topology=TOPOLOGY, replica_groups=groups)
        told = f"replica_groups.moment_scale: must be 1 with tables of {optimizer}, whose moments are means, not sums"
        assert (told in plan_note(plan)) == optimizer.has_decaying_moments


def test_rows_on_disks_are_told():
    given = tables_of()
    held = table_wise(given.tables, (0, 0))
    plan = plan_of(*held, tables=given, topology=TOPOLOGY)
    assert plan_note(plan) == tables_note(given) == ""
    for level, told in ((MemoryLevel.DDR, ""), (MemoryLevel.SSD, "must be hbm or ddr: FBGEMM's public builds have no")):
        below = replace(held[0], memory=MemoryPlacement(level=level, cache_bytes=320))
        note = plan_note(replace(plan, shards=(below, held[1])))
        assert told in note
        assert bool(told) == bool(note)


@pytest.mark.parametrize(("device", "is_told"), [("cpu-4", False), ("h100-8", True)])
def test_lamb_is_trained_in_the_memory_of_a_gpu_alone(device, is_told):
    given, topology = tables(table("t", optimizer=Optimizer.LAMB)), load_topology(device)
    [held] = table_wise(given.tables, (0,))
    far = replace(held, memory=MemoryPlacement(level=MemoryLevel.DDR))
    note = plan_note(plan_of(far, tables=given, topology=topology))
    assert ("memory.level: must be hbm on a GPU for table" in note) == is_told


@pytest.mark.parametrize(
    ("planner", "options", "is_told"),
    [
        ("flexshard", {}, True),
        ("flexshard", {"tiers": 1}, False),
        ("oper", {}, True),
        ("auto", {}, True),
        ("auto", {"sharding_types": "table_wise,row_wise"}, False),
        ("auto", {"objective": "kernel"}, False),
        ("neo", {}, False),
        ("cost-greedy", {}, False),
    ],
)
def test_unknown_row_orders_are_told_by_planners_that_cut_by_access(planner, options, is_told, caplog):
    uniform = tables_of(access=AccessProfile.uniform(1000))
    for given, has_unknown in ((uniform, True), (uniform.assuming_orders(), False)):
        caplog.clear()
        plan = make_plan(planner, request(given, TOPOLOGY, options=options, time_limit_s=0.1))
        # Rows of the uniform table are all alike.
        is_there = is_told and has_unknown
        assert ("--assume-row-order" in caplog.text) == is_there
        note = plan.provenance.models.get("unknown_orders", "")
        assert note.endswith("tables: usual") == is_there
