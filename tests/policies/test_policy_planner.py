"""The planner `policy`, and what `auto` asks it."""

import time
from dataclasses import replace

import numpy as np
import pytest

from autoshard.core import Constraints, MemoryLevel
from autoshard.core.errors import InfeasiblePlanError, InvalidOptionError, ModelError
from autoshard.evaluation.batch_memory import has_room
from autoshard.evaluation.evaluate import evaluate
from autoshard.formats import load_tables
from autoshard.planners.auto import AutoPlanner
from autoshard.planners.hybrid.option_offers import OfferedOptions
from autoshard.planners.registry import get_planner
from autoshard.planners.space.cost_gradient import CostGradient, FlatOptions
from autoshard.planners.space.options import ShardingType
from autoshard.planners.space.ways import TaskFeatures, Way, task_inputs
from autoshard.validator import validate_plan
from costmodel import Registry
from costmodel.registry.versions import SHIPPED_VARIABLE
from policies.network import first_weights
from policies.planning.planner import PolicyPlanner
from policies.planning.trained import TrainedPolicy, ranges_of
from tests import builders as make


@pytest.fixture(scope="module")
def registry(tmp_path_factory):
    """With an untrained policy: what planning promises does not depend on how well it was trained."""
    root = tmp_path_factory.mktemp("registry")
    TrainedPolicy(weights=first_weights(0), training={}).publish(Registry(root))
    return root


@pytest.fixture
def request_of(registry):
    def request_of(num_tables=12, seed=0, **options):
        tables, _ = make.draw_task(num_tables, 8, seed=seed)
        return make.request(tables, make.two_nodes(), options=options, registry=registry)

    return request_of


def step_ms(request):
    plan = PolicyPlanner().plan(request)
    return evaluate(plan, request.costs).step_ms.value


def test_it_is_found_by_its_name_and_says_which_policy_it_used(request_of, registry):
    planner = get_planner("policy")
    plan = planner.plan(request_of())
    validate_plan(plan)
    version = Registry(registry).production_id("policy", "any")
    assert plan.provenance.models == {"policy": f"policy:any@{version}"}


def test_the_same_seed_gives_the_same_plan(request_of):
    request = request_of(num_samples=4)
    assert PolicyPlanner().plan(request) == PolicyPlanner().plan(request)


def test_more_samples_and_bursts_are_never_worse(request_of):
    alone = {"bursts": 0}
    settings = (alone, {**alone, "num_samples": 16}, {}, {"bursts": 4})
    one, many, one_burst, four = (step_ms(request_of(**options)) for options in settings)
    assert many <= one
    assert four <= one_burst <= one
    assert four < one


def test_it_plays_in_a_group_once_the_number_of_replica_groups_is_chosen(request_of, registry):
    plan = get_planner("replica-groups").plan(request_of(num_groups=2, base="policy"))
    validate_plan(plan)
    version = Registry(registry).production_id("policy", "any")
    assert (plan.replica_groups.num_groups, plan.group_size) == (2, plan.topology.world_size // 2)
    assert plan.provenance.models["policy"] == f"policy:any@{version}"


def test_plans_leave_room_for_training_and_keep_constraints(registry):
    tables, machine = make.mixed_task()
    tables = replace(tables, batch_size=256)
    room = int(tables.storage_bytes / 8 * 3)
    request = make.request(
        tables, replace(machine, memory_bytes=replace(machine.memory_bytes, hbm=room)), registry=registry
    )
    plan = PolicyPlanner().plan(request)
    validate_plan(plan)
    assert has_room(plan)


def test_a_table_that_fits_no_device_goes_behind_a_cache_although_all_devices_have_room_for_it(registry):
    small, large = make.table("small"), make.table("large", 100_000, 64, constraints=Constraints(pinned_ranks=(0,)))
    machine = make.topology(4, hbm=7 * large.storage_bytes // 10, ddr=large.storage_bytes)
    plan = PolicyPlanner().plan(make.request(make.tables(small, large), machine, registry=registry))
    validate_plan(plan)
    levels = {placed.shard.table.name: placed.memory.level for placed in plan.shards}
    assert levels == {"small": MemoryLevel.HBM, "large": MemoryLevel.DDR}


def test_a_task_without_room_is_told(registry):
    tables = make.tables(make.table("t0", 10_000, 64, constraints=Constraints()))
    with pytest.raises(InfeasiblePlanError):
        PolicyPlanner().plan(make.request(tables, make.topology(2, hbm=1000), registry=registry))


def test_without_a_policy_it_says_how_to_make_one(tmp_path, monkeypatch):
    monkeypatch.setenv(SHIPPED_VARIABLE, str(tmp_path / "none"))
    tables, machine = make.draw_task(3, 2)
    request = make.request(tables, machine, registry=tmp_path)
    with pytest.raises(
        ModelError, match="no policy model of cpu or of any device has been published; `autoshard train"
    ):
        PolicyPlanner().plan(request)
    assert PolicyPlanner().score_ways(request) is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_samples": 0}, r"options.num_samples: must be in \[1, 4096\], got 0"),
        ({"bursts": -1}, "options.bursts: must be in"),
        ({"beam": 2}, "options"),
    ],
)
def test_bad_options_are_told(request_of, options, message):
    with pytest.raises(InvalidOptionError, match=message):
        PolicyPlanner().plan(request_of(**options))


def test_a_policy_of_the_device_comes_before_the_one_for_any(tmp_path):
    models = Registry(tmp_path)
    TrainedPolicy(weights=first_weights(0), training={}).publish(models)
    own = TrainedPolicy(weights=first_weights(1), device="cpu", training={}).publish(models)
    assert TrainedPolicy.for_device(tmp_path, "cpu").version_id == own
    assert TrainedPolicy.for_device(tmp_path, "cpu:amd-epyc").version_id == own
    assert TrainedPolicy.for_device(tmp_path, "a100").card.device == "any"


def test_few_sharding_types_of_each_table_are_offered_the_likeliest_ones(request_of, registry):
    offers = OfferedOptions(request_of())
    offers.offer_likely(TrainedPolicy.for_device(registry, "cpu").score_ways)
    every = OfferedOptions(request_of())
    every.complete()
    assert len(FlatOptions.of(offers.space).item_O) < 0.6 * len(FlatOptions.of(every.space).item_O)

    def likes_copies(features, ways_WF):
        is_copied_W = ways_WF[:, list(ShardingType).index(ShardingType.DATA_PARALLEL)] > 0
        return np.repeat(np.where(is_copied_W, 10.0, 0.0)[None], len(features.cost_I), axis=0)

    offers = OfferedOptions(request_of())
    offers.offer_likely(likes_copies)
    named = {option.of_tables[0].name for item in offers.space.items for option in item.options}
    assert named == {ShardingType.TABLE_WISE, ShardingType.DATA_PARALLEL}


def test_a_task_outside_of_the_training_is_told(request_of, tmp_path, caplog):
    request = replace(request_of(), registry=tmp_path)
    space = OfferedOptions(request).space
    features = TaskFeatures.of(space, FlatOptions.of(space), CostGradient.of(space))
    within = {
        "ranks": (8.0, 8.0),
        "tables": (4.0, 24.0),
        **dict.fromkeys(("memory_fill", "exchange_share"), (0.0, 1.0)),
    }
    assert task_inputs(features.task_F)["ranks"] == 8
    assert task_inputs(features.task_F)["tables"] == 12
    fill = request.tables.storage_bytes / sum(request.topology.hbm_bytes)
    assert task_inputs(features.task_F)["memory_fill"] == pytest.approx(max(fill, 1e-6), abs=1e-4)
    assert ranges_of([features.task_F])["tables"] == (12.0, 12.0)
    TrainedPolicy(weights=first_weights(0), training={}, ranges=within).publish(Registry(tmp_path))
    assert "policy_range" not in PolicyPlanner().plan(request).provenance.models
    TrainedPolicy(weights=first_weights(0), training={}, ranges={**within, "tables": (24.0, 160.0)}).publish(
        Registry(tmp_path)
    )
    note = PolicyPlanner().plan(request).provenance.models["policy_range"]
    assert note == "outside of what the policy was trained on: tables 12, trained on 24 to 160"
    assert note in caplog.text


def test_the_policy_that_ships_knows_what_it_was_trained_on(monkeypatch):
    monkeypatch.delenv(SHIPPED_VARIABLE)
    ranges = TrainedPolicy.for_device(None, "a100").card.ranges
    assert ranges["ranks"] == (8.0, 64.0)
    assert ranges["tables"] == (24.0, 160.0)
    assert 0 <= ranges["memory_fill"][0] < ranges["memory_fill"][1] < 1


def test_auto_asks_the_policy_and_names_it(request_of, registry):
    request = replace(request_of(), time_limit_s=0.015)
    plan = AutoPlanner().plan(request)
    version = Registry(registry).production_id("policy", "any")
    assert plan.provenance.models["policy"] == f"policy:any@{version}"
    alone = AutoPlanner().plan(replace(request, options={"policy": False}))
    assert "policy" not in alone.provenance.models
    # With the time to price all options, it is not asked.
    assert "policy" not in AutoPlanner().plan(replace(request, time_limit_s=0.1)).provenance.models


def test_scores_that_take_all_the_time_leave_the_costliest_tables_their_options():
    def slow(features, ways_WF):
        time.sleep(0.25)
        return np.zeros((len(features.cost_I), len(ways_WF)))

    tables = make.draw_task(40, 8, seed=3)[0]
    offers = OfferedOptions(make.request(tables, make.two_nodes()))
    offers.offer_likely(slow, time.perf_counter() + 0.2)
    assert sum(len(item.options) > 1 for item in offers.space.items) == 20
    late = OfferedOptions(make.request(tables, make.two_nodes()))
    late.offer_likely(slow, time.perf_counter())
    assert all(len(item.options) == 1 for item in late.space.items)


def test_ways_are_those_of_all_tables():
    """A policy is asked about all sharding types of any table, wide or narrow, skewed or even."""
    seen = []

    def score(features, ways_WF):
        seen.extend(map(tuple, ways_WF.tolist()))
        return np.zeros((len(features.cost_I), len(ways_WF)))

    for seed in range(3):
        request = make.request(load_tables("metasyn").redrawn(24, seed), make.two_nodes(hbm=1 << 40))
        seen.clear()
        OfferedOptions(request).offer_likely(score)
        every = OfferedOptions(request)
        every.complete()
        options = [option.of_tables[0] for item in every.space.items for option in item.options]
        ways = {Way.of(option) for option in options if option.name is not ShardingType.TABLE_COLUMN_WISE}
        known = {way for way in ways if tuple(way.features()) in seen}
        assert {way.name for way in known} == {way.name for way in ways}
        assert len(known) >= 0.9 * len(ways)
