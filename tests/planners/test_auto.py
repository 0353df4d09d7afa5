"""`auto`: at least as good as every start, repeatable, open to a trained policy, by steps and by kernels."""

from dataclasses import replace

import pytest

from autoshard.core import Constraints, MemoryBytes, Shard, Tier
from autoshard.core.errors import InfeasiblePlanError, InvalidOptionError, InvalidTopologyError
from autoshard.core.step import Overlap, plain_coefficients
from autoshard.evaluation import evaluate
from autoshard.formats import load_tables, load_topology
from autoshard.formats.metasyn import metasyn
from autoshard.planners.auto import AutoPlanner
from autoshard.planners.auto_options import AutoOptions
from autoshard.planners.comparison import num_cuts
from autoshard.planners.heuristics.greedy import (
    CostGreedyPlanner,
    DimGreedyPlanner,
    LookupGreedyPlanner,
    RandomPlanner,
    SizeGreedyPlanner,
)
from autoshard.planners.registry import get_planner, planner_names
from autoshard.planners.space.options import ShardingType
from autoshard.planning import compare, make_costs, make_plan
from autoshard.runtime.ownership import ownership_of
from autoshard.validator import validate_plan
from tests import builders as make

COSTS = make.costs()

KERNEL = {"steps": 30, "objective": "kernel"}
STEP = {"steps": 20, "policy": False}
SECONDS = 60.0
#: Enough for any number of steps asked for, however busy the machine is.
UNHURRIED_S = 3600.0
#: Planners whose time does not depend on the time limit and is above it.
PATIENT = {"torchrec"}
#: Bundled tables: two large ones, and some that are pooled many times.
QUICK_TASKS = [("param-a", "a100-8"), ("criteo-kaggle", "cpu-8")]
TABLES = (
    *("criteo-kaggle", "mlperf-dlrm-v2", "nvidia-tiny", "nvidia-small", "nvidia-medium", "param-a", "param-b"),
    *("metasyn",),
)
TASKS = [(tables, topology) for tables in TABLES for topology in ("cpu-8", "a100-8", "a100-32")]


@pytest.fixture
def max_ms():
    def predicted(planner, task, **changes):
        return evaluate(planner.plan(make.request(*task, **changes)), COSTS).max_kernel_ms

    return predicted


def bundled(name, machine, **changes):
    topology = load_topology(machine)
    tables = metasyn().sample(80, 7) if name == "metasyn" else load_tables(name)
    if name == "metasyn" and topology.device == "cpu":
        tables = tables.scaled(64)
    return make.request(tables, topology, costs=make_costs(tables, topology), **changes)


def check_none_is_shorter(request, names):
    """`auto`, by a number of steps and with time enough on any machine, against those that can do the task at all."""
    unhurried = compare(("auto",), replace(request, time_limit_s=UNHURRIED_S), options={"auto": {"steps": 40}})
    rows = [*unhurried, *compare(names, request)]
    steps = {row.planner: row.plan.predicted.step_ms.value for row in rows if row.plan is not None}
    if not steps:
        assert all(isinstance(row.failure, InfeasiblePlanError) for row in rows if row.planner == "auto")
        return
    assert steps["auto"] <= min(steps.values()) * (1 + 1e-9), steps


@pytest.mark.parametrize(("name", "machine"), QUICK_TASKS)
def test_no_planner_has_a_shorter_step_on_bundled_tables(name, machine):
    quick = ("random", "size-greedy", "lookup-greedy", "cost-greedy", "karmarkar-karp", "flexshard", "neo")
    check_none_is_shorter(bundled(name, machine, time_limit_s=SECONDS), quick)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "machine"), TASKS)
def test_no_planner_at_all_has_a_shorter_step_on_any_bundled_tables(name, machine):
    names = [one for one in planner_names() if one not in {"auto", *PATIENT}]
    check_none_is_shorter(bundled(name, machine, time_limit_s=SECONDS), names)


@pytest.mark.parametrize("spare", [None, 0.3])
def test_is_at_least_as_fast_as_every_heuristic(max_ms, spare):
    task = make.draw_task(40, 4, seed=8, spare=spare)
    found_ms = max_ms(AutoPlanner(), task, options=KERNEL, time_limit_s=SECONDS)
    heuristics = (RandomPlanner, SizeGreedyPlanner, DimGreedyPlanner, LookupGreedyPlanner, CostGreedyPlanner)
    assert all(found_ms <= max_ms(heuristic(), task) * (1 + 1e-6) for heuristic in heuristics)


def test_search_improves_on_its_starts(max_ms):
    task = make.draw_task(60, 8, seed=4)
    starts_only = {"policy": False, "objective": "kernel"}
    starts_only_ms = max_ms(AutoPlanner(), task, options=starts_only, time_limit_s=1e-6)
    assert max_ms(AutoPlanner(), task, options=KERNEL, time_limit_s=SECONDS) < starts_only_ms


@pytest.mark.parametrize("options", [KERNEL, STEP])
def test_seeds_decide(options):
    task = make.draw_task(16, 4, seed=1)
    first, again, other = (
        AutoPlanner().plan(make.request(*task, seed=seed, options=options, time_limit_s=SECONDS)) for seed in (7, 7, 8)
    )
    assert first == again
    assert first != other


def test_tables_are_cut_by_columns_where_kernels_are_shorter_so(max_ms):
    # The costliest table alone decides the slowest rank.
    task = make.draw_task(3, 4, seed=5)
    plan = AutoPlanner().plan(make.request(*task, options=KERNEL, time_limit_s=SECONDS))
    validate_plan(plan)
    assert num_cuts(plan) > 0
    assert {placed.tier for placed in plan.shards} == {Tier.TABLE_WISE}
    whole = {**KERNEL, "sharding_types": "table_wise"}
    cut_ms, whole_ms = (
        max_ms(AutoPlanner(), task, options=options, time_limit_s=SECONDS) for options in (KERNEL, whole)
    )
    assert cut_ms < whole_ms


def test_tables_too_large_for_any_rank_are_cut_where_they_may_be():
    table = make.table("large", embedding_dim=64)
    task = (make.tables(table, batch_size=8), make.topology(4, hbm=int(table.storage_bytes / 1.9)))
    plan = AutoPlanner().plan(make.request(*task, options=KERNEL))
    validate_plan(plan)
    assert len(plan.shards) > 1
    with pytest.raises(InfeasiblePlanError, match=r"large needs [\d.]+ [KMGTP]?i?B on one rank"):
        AutoPlanner().plan(make.request(*task, options={**KERNEL, "sharding_types": "table_wise"}))


@pytest.mark.parametrize("options", [KERNEL, {**STEP, "sharding_types": "table_wise,column_wise,grid"}])
def test_column_shards_are_no_narrower_than_asked(options):
    task = make.draw_task(3, 8, seed=5)
    narrowest = {}
    for least in (0, 24, 32):
        request = make.request(*task, options={**options, "min_partition": least}, time_limit_s=SECONDS)
        plan = AutoPlanner().plan(request)
        validate_plan(plan)
        cut = [one.shard for one in plan.shards if one.shard.embedding_dim < one.shard.table.embedding_dim]
        narrowest[least] = min(shard.embedding_dim for shard in cut)
    assert narrowest[0] < 24 <= narrowest[24]
    assert narrowest[32] >= 32


def test_a_start_with_narrower_column_shards_is_left_out(caplog):
    task = make.draw_task(3, 8, seed=5)
    cut = AutoPlanner().plan(make.request(*task, options=KERNEL, time_limit_s=SECONDS))
    for options in (KERNEL, STEP):
        AutoPlanner().plan(make.request(*task, options={**options, "min_partition": 32}, start=cut))
        assert "the start is left out, it " in caplog.text
        caplog.clear()


def test_tables_that_share_their_ranks_are_not_cut():
    tables, topology = make.draw_task(10, 4, seed=5)
    costliest, *others = sorted(tables.tables, key=lambda one: -one.pooling_factor * one.embedding_dim)
    paired = replace(costliest, constraints=Constraints(colocate_with=(others[-1].name,)))
    request = make.request(replace(tables, tables=(paired, *others)), topology, options=KERNEL, time_limit_s=SECONDS)
    plan = AutoPlanner().plan(request)
    validate_plan(plan)
    ranks = {placed.replicas for placed in plan.shards if placed.shard.table.name in (paired.name, others[-1].name)}
    assert len(ranks) == 1


@pytest.mark.parametrize("options", [KERNEL, STEP])
def test_does_without_a_policy(tmp_path, options):
    # The registry is empty, so the policy planner has no model.
    request = make.request(*make.draw_task(10, 2), registry=tmp_path, options=options)
    assert len({placed.shard.table.name for placed in AutoPlanner().plan(request).shards}) == 10


@pytest.mark.parametrize("options", [{**one, "sharding_types": "table_wise"} for one in (KERNEL, STEP)])
def test_says_what_does_not_fit(options):
    tables = tuple(make.table(f"t{index}") for index in range(3))
    task = (make.tables(*tables, batch_size=8), make.topology(2, hbm=int(tables[0].storage_bytes / 0.6)))
    with pytest.raises(InfeasiblePlanError, match=r"[\d.]+ [KM]iB in the device memory of the 2 ranks \("):
        AutoPlanner().plan(make.request(*task, options=options))


def test_says_how_the_search_ended():
    task = make.draw_task(16, 4, seed=1)
    plan = AutoPlanner().plan(make.request(*task, options=KERNEL, time_limit_s=SECONDS))
    assert plan.provenance.models["search"].startswith("stopped by ")
    plan = AutoPlanner().plan(make.request(*task, options=STEP, time_limit_s=SECONDS))
    assert plan.provenance.models["search"].startswith("stopped by steps after 20 steps: ")


@pytest.mark.parametrize("options", [{**one, "sharding_types": "table_wise"} for one in (KERNEL, STEP)])
def test_plans_that_the_runtime_executes(options):
    # Its largest table decides the step, and would be cut if it might.
    plan = AutoPlanner().plan(make.request(*make.draw_task(20, 4, seed=5), options=options, time_limit_s=SECONDS))
    assert all(placed.shard == Shard.whole(placed.shard.table) for placed in plan.shards)
    assert {placed.tier for placed in plan.shards} == {Tier.TABLE_WISE}
    assert ownership_of(plan, 4).plan_world_size == 4


def test_tiers_are_kept_to_and_memory_stays_free():
    tables, _ = make.draw_task(12, 4, seed=5)
    hbm = 2 * tables.storage_bytes // 4
    options = {**STEP, "sharding_types": "row_wise, data_parallel", "reserved_bytes": hbm // 4}
    request = make.request(tables, make.topology(4, hbm=hbm), options=options, time_limit_s=SECONDS)
    plan = AutoPlanner().plan(request)
    validate_plan(plan)
    assert {placed.tier for placed in plan.shards} <= {Tier.ROW_WISE, Tier.DATA_PARALLEL}
    ranks = evaluate(plan, request.costs).ranks
    assert all(rank.used_bytes <= hbm - hbm // 4 for rank in ranks)


def test_plans_leave_room_for_training_unless_told_otherwise():
    # Tables take two thirds of the memory, so that not all can be copied to all ranks.
    tables, _ = make.draw_task(12, 4, seed=5, batch_size=1024)
    hbm = tables.storage_bytes * 3 // 8
    used = {}
    for count in (True, False):
        options = {**STEP, "count_activations": count}
        request = make.request(tables, make.topology(4, hbm=hbm), options=options, time_limit_s=SECONDS)
        used[count] = max(rank.used_bytes for rank in evaluate(AutoPlanner().plan(request), request.costs).ranks)
    assert used[True] <= hbm < used[False]


def test_ranks_of_different_memory_are_filled_as_they_are():
    tables, _ = make.draw_task(12, 4, seed=5)
    total = tables.storage_bytes
    uneven = make.topology(4, hbm=total // 20, overrides=((2, MemoryBytes(hbm=total)),))
    request = make.request(tables, uneven, options=STEP, time_limit_s=SECONDS)
    plan = AutoPlanner().plan(request)
    validate_plan(plan)
    held = [rank.hbm_bytes for rank in evaluate(plan, request.costs).ranks]
    assert held[2] > total // 2
    assert max(held[:2] + held[3:]) <= total // 20


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": -1}, r"options\.steps: must be at least 0"),
        ({"min_partition": -1}, r"options\.min_partition: must be at least 0"),
        ({"reserved_bytes": -1}, r"options\.reserved_bytes: must be at least 0"),
        ({"objective": "memory"}, r'options\.objective: must be one of step, kernel, got "memory"'),
        (
            {"sharding_types": "row_wise,diagonal"},
            r'options\.sharding_types: must be one of all, table_wise, .*, got "diagonal"',
        ),
        (
            {"objective": "kernel", "sharding_types": "table_wise,row_wise"},
            r"options\.sharding_types: must be all, table_wise or table_wise,column_wise where objective is kernel",
        ),
        (
            {"objective": "kernel", "sharding_types": "column_wise"},
            r"options\.sharding_types: must be all, table_wise or table_wise,column_wise where objective is kernel",
        ),
        (
            {"beam": 3},
            r"options\.beam: unknown option; this planner takes: objective, sharding_types, reserved_bytes, steps",
        ),
    ],
)
def test_refuses_options_that_there_are_not(options, message):
    with pytest.raises(InvalidOptionError, match=message):
        AutoPlanner().plan(make.request(*make.draw_task(4, 2), options=options))


def test_options_name_schemes_and_groups():
    assert AutoOptions().types == AutoOptions(sharding_types="replica_groups").types == frozenset(ShardingType)
    assert AutoOptions().with_groups
    assert not AutoOptions(sharding_types="grid,flex").with_groups
    assert AutoOptions(objective="kernel").types == {ShardingType.TABLE_WISE, ShardingType.COLUMN_WISE}
    assert AutoOptions(sharding_types="grid,flex").types == {ShardingType.GRID, ShardingType.FLEX}


class Calibrated:
    """Parts as the models have them, and an error of runs."""

    name, overlap = "calibrated:test", Overlap.NONE

    def __init__(self, relative_error):
        self.relative_error = relative_error

    def coefficients(self, part, _basis, _topology):
        return plain_coefficients(part, "cpu")

    def interval_ms(self, value_ms, *_):
        return value_ms, value_ms


def test_tables_are_cut_only_for_more_than_a_calibrated_model_can_tell():
    def planned(relative_error, start=None, **options):
        request = make.request(*make.draw_task(3, 4, seed=5), time_limit_s=UNHURRIED_S, options={**STEP, **options})
        request, costs = replace(request, start=start), replace(request.costs, step=Calibrated(relative_error))
        plan = AutoPlanner().plan(replace(request, costs=costs))
        return plan, evaluate(plan, costs).step_ms.value

    def is_cut(plan):
        return any(
            placed.tier is not Tier.TABLE_WISE or placed.shard != Shard.whole(placed.shard.table)
            for placed in plan.shards
        )

    (cut, cut_ms), (whole, whole_ms) = planned(0.0), planned(0.9)
    assert is_cut(cut)
    assert not is_cut(whole)
    assert ", since the model cannot tell " in whole.provenance.models["search"]
    gain = 1 - cut_ms / whole_ms
    assert gain > 0
    for relative_error, options in ((0.5 * gain, {}), (0.9, {"prefer_whole": False})):
        found, step_ms = planned(relative_error, **options)
        assert is_cut(found)
        assert step_ms < whole_ms
    _, from_cut_ms = planned(0.9, start=cut)
    assert from_cut_ms <= cut_ms


def test_ends_at_its_time_limit():
    # A search that does not look at the clock would not end: the timeout of every test fails it then.
    request = make.request(*make.draw_task(20, 4, seed=1), time_limit_s=0.3, options={"policy": False})
    plan = AutoPlanner().plan(request)
    validate_plan(plan)
    assert plan.provenance.models["search"].startswith("stopped by time after ")


def test_is_among_the_planners():
    assert isinstance(get_planner("auto"), AutoPlanner)


def test_a_world_too_large_to_be_searched_gets_the_best_plan_of_other_planners(monkeypatch, caplog):
    monkeypatch.setattr("autoshard.planners.hybrid.step_search._MAX_RANKS", 7)
    request = bundled("criteo-kaggle", "cpu-8", options={"policy": False}, time_limit_s=SECONDS)
    plan = make_plan("auto", request)
    assert plan.provenance.models["search"].startswith("not searched, over 7 ranks: as ")
    assert "worlds of more than 7 ranks are not searched" in caplog.text
    others = [make_plan(name, replace(request, options={})) for name in ("cost-greedy", "neo", "flexshard")]
    assert plan.predicted.step_ms.value <= min(other.predicted.step_ms.value for other in others)
    rows = make_plan("auto", replace(request, options={"policy": False, "sharding_types": "row_wise"}))
    assert {placed.tier for placed in rows.shards} == {Tier.ROW_WISE}
    limited = replace(request, options={"policy": False, "sharding_types": "table_column_wise"})
    with pytest.raises(InvalidTopologyError, match="world_size: must be at most 7 for a search by the planner auto"):
        make_plan("auto", limited)
