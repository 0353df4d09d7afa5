"""The search over every way to hold a table: exact prices, limits that hold, and nothing worse than its starts."""

import math
import time
from dataclasses import replace

import numpy as np
import pytest

from autoshard.core import (
    AccessProfile,
    Collective,
    Constraints,
    Link,
    MemoryBytes,
    MemoryLevel,
    Tier,
)
from autoshard.core.errors import InfeasiblePlanError, InvalidPlanError
from autoshard.core.step import EMBEDDING_PARTS
from autoshard.evaluation import evaluate, price_step, training_bytes
from autoshard.formats import load_topology
from autoshard.planners.comparison import num_cuts
from autoshard.planners.hybrid.descent import Start
from autoshard.planners.hybrid.option_offers import OfferedOptions, space_of
from autoshard.planners.hybrid.starts import balanced_starts, layout_of
from autoshard.planners.hybrid.step_search import StepSearch, search_steps
from autoshard.planners.hybrid.successive_halving import improve
from autoshard.planners.registry import get_planner
from autoshard.planners.space.cost_gradient import FlatOptions
from autoshard.planners.space.layout import NOTHING, Layout, Limits
from autoshard.planners.space.options import ShardingType, enumerate_options
from autoshard.validator import validate_plan
from tests import builders as make

COSTS = make.costs()

#: Ends searches by steps, so that seeds decide.
STEPS = StepSearch(steps=12, with_policy=False)
SECONDS = 60.0


def at_random(space, rng, limits=None):
    chosen = []
    for item in space.items:
        number = int(rng.integers(len(item.options)))
        shards = item.options[number].shards
        chosen.append((number, tuple(int(rng.choice(np.flatnonzero(shard.allowed_S))) for shard in shards)))
    return Layout(space, limits or Limits.of(space), chosen)


@pytest.mark.parametrize("seed", range(6))
def test_sums_price_what_evaluate_prices(seed):
    layout = at_random(space_of(make.request(*make.mixed_task())), np.random.default_rng(seed))
    plan = layout.plan()
    validate_plan(plan)
    price = price_step(plan, COSTS)
    assert layout.step_ms() == pytest.approx(price.step_ms.value, rel=1e-5)
    for part, ms_R in zip(EMBEDDING_PARTS, layout.parts_ms(), strict=True):
        assert ms_R.max() == pytest.approx(getattr(price.times, part.value), rel=1e-5)
    np.testing.assert_array_equal(layout.bytes_RM[:, 0], [one.hbm_bytes for one in evaluate(plan, COSTS).ranks])
    needed_R = layout.space.prices.training_bytes(layout.moved_RC[None])[0]
    np.testing.assert_allclose(needed_R, training_bytes(plan), rtol=1e-6)


def test_sums_by_reduce_scatter_are_priced_as_evaluate_prices_them():
    space = space_of(make.request(*make.mixed_task()))
    layout = at_random(space, np.random.default_rng(0))
    reduced = [
        (index, number)
        for index, item in enumerate(space.items)
        for number, option in enumerate(item.options)
        if option.of_tables[0].collective is Collective.REDUCE_SCATTER
    ]
    assert reduced
    for index, number in reduced[::3]:
        layout.apply(((index, number, (0,) * len(space.items[index].options[number].shards)),))
        plan = layout.plan()
        validate_plan(plan)
        assert any(placed.collective is Collective.REDUCE_SCATTER for placed in plan.shards)
        price = price_step(plan, COSTS)
        for part, ms_R in zip(EMBEDDING_PARTS, layout.parts_ms(), strict=True):
            assert ms_R.max() == pytest.approx(getattr(price.times, part.value), rel=1e-5)
        needed_R = space.prices.training_bytes(layout.moved_RC[None])[0]
        np.testing.assert_allclose(needed_R, training_bytes(plan), rtol=1e-6)


def test_sums_price_rows_behind_caches():
    tables, _ = make.draw_task(4, 8, seed=2)
    total = tables.storage_bytes
    task = (tables, make.two_nodes(hbm=total // 8, ddr=total))
    space = space_of(make.request(*task))
    roomy = Limits(capacity_RM=np.full((8, 3), np.inf))
    rng = np.random.default_rng(0)
    levels = set()
    for _ in range(12):
        layout = at_random(space, rng, roomy)
        plan = layout.plan()
        levels |= {placed.memory.level for placed in plan.shards}
        assert layout.step_ms() == pytest.approx(evaluate(plan, COSTS).step_ms.value, rel=1e-5)
    assert levels == {MemoryLevel.HBM, MemoryLevel.DDR}


def test_changes_are_priced_as_what_they_lead_to():
    space = space_of(make.request(*make.mixed_task()))
    rng = np.random.default_rng(1)
    layout = at_random(space, rng)
    changes = []
    for _ in range(20):
        other = at_random(space, rng)
        items = rng.choice(len(space.items), 2, replace=False)
        changes.append(tuple((int(item), *other.chosen[item]) for item in items))
    changes.append(((3, NOTHING, ()),))
    priced = layout.price(changes, 32)
    for change, step_ms, energy_ms in zip(changes, priced.step_ms_B, priced.energy_ms_B, strict=True):
        changed = layout.copy()
        changed.apply(change)
        assert changed.step_ms() == pytest.approx(step_ms, rel=1e-6)
        assert changed.energy_ms(32) == pytest.approx(energy_ms, rel=1e-6)
        # Codes are added up in single precision by the models only: what was there comes back.
        changed.apply(tuple((item, *layout.chosen[item]) for item, _, _ in change))
        np.testing.assert_array_equal(changed.moved_RC, layout.moved_RC)
        assert changed.step_ms() == pytest.approx(layout.step_ms(), rel=1e-9)


def test_energy_is_between_the_mean_and_the_slowest_rank():
    layout = at_random(space_of(make.request(*make.mixed_task())), np.random.default_rng(2))
    energies = [layout.energy_ms(exponent) for exponent in (1, 8, 128, 1024)]
    assert energies == sorted(energies)
    assert energies[-1] <= layout.step_ms()
    assert energies[-1] == pytest.approx(layout.step_ms(), rel=0.01)


def test_descent_never_ends_above_its_start_and_repeats_itself():
    tables, _ = make.draw_task(24, 8, seed=7)
    space = space_of(make.request(tables, make.two_nodes()))
    start = at_random(space, np.random.default_rng(3))
    far_s = time.perf_counter() + SECONDS
    starts = [Start(layout=start)]
    first, again, other = (improve(starts, seed=seed, deadline_s=far_s, max_steps=20) for seed in (1, 1, 2))
    assert first.step_ms == first.layout.step_ms() < 0.9 * start.step_ms()
    assert first.layout.chosen == again.layout.chosen
    assert first.num_steps == 20
    assert other.layout.chosen != first.layout.chosen
    assert improve(starts, seed=1, deadline_s=0.0).step_ms == start.step_ms()


@pytest.mark.parametrize("world_size", [4, 8])
def test_is_no_worse_than_any_planner_that_it_asks(world_size):
    tables, _ = make.draw_task(20, world_size, seed=11)
    request = make.request(tables, make.two_nodes(world_size), time_limit_s=SECONDS)
    found = search_steps(request, STEPS)
    validate_plan(found.plan)
    assert found.cost_ms == evaluate(found.plan, COSTS).step_ms.value
    for name in ("cost-greedy", "karmarkar-karp", "flexshard", "neo", "oper", "replica-groups"):
        assert found.cost_ms <= evaluate(get_planner(name).plan(request), COSTS).step_ms.value, name


def test_the_same_seed_and_steps_give_the_same_plan():
    tables, _ = make.draw_task(16, 8, seed=4)
    request = make.request(tables, make.two_nodes(), time_limit_s=SECONDS, seed=3)
    assert search_steps(request, STEPS).plan == search_steps(request, STEPS).plan


def test_only_what_is_allowed_is_used():
    tables, _ = make.draw_task(16, 8, seed=4)
    request = make.request(tables, make.two_nodes(), time_limit_s=SECONDS)
    for names in ({ShardingType.TABLE_WISE}, {ShardingType.ROW_WISE, ShardingType.FLEX}):
        found = search_steps(request, replace(STEPS, names=frozenset(names)))
        assert {str(placed.tier) for placed in found.plan.shards} <= set(map(str, names))


def test_constraints_hold():
    found = search_steps(make.request(*make.mixed_task(), time_limit_s=SECONDS), STEPS)
    validate_plan(found.plan)
    _, pinned, first, second, restricted, *_ = (table.name for table in make.mixed_task()[0].tables)
    held = [placed for placed in found.plan.shards if placed.shard.table.name == pinned]
    assert held
    assert {rank for placed in held for ranks in placed.replicas for rank in ranks} <= {2, 5}
    tiers = {placed.tier for placed in found.plan.shards if placed.shard.table.name == restricted}
    assert tiers
    assert not tiers & {Tier.TABLE_WISE, Tier.DATA_PARALLEL}
    on_ranks = {
        name: {ranks for placed in found.plan.shards if placed.shard.table.name == name for ranks in placed.replicas}
        for name in (first, second)
    }
    assert on_ranks[first] == on_ranks[second]


def test_reserved_memory_stays_free():
    tables, _ = make.draw_task(16, 8, seed=4)
    hbm, reserved = 2 * tables.storage_bytes // 8, 0.4
    request = make.request(tables, make.two_nodes(hbm=hbm), time_limit_s=SECONDS)
    found = search_steps(request, replace(STEPS, reserved_bytes=int(reserved * hbm)))
    cost = evaluate(found.plan, request.costs)
    assert max(rank.used_bytes for rank in cost.ranks) <= (1 - reserved) * hbm


def test_tables_that_fit_no_rank_are_cut():
    tables, _ = make.draw_task(3, 4, seed=0)
    largest = max(table.storage_bytes for table in tables.tables)
    task = (tables, make.topology(4, hbm=int(0.6 * largest)))
    found = search_steps(make.request(*task, time_limit_s=SECONDS), replace(STEPS, count_activations=False))
    validate_plan(found.plan)
    held = [placed for placed in found.plan.shards if placed.shard.table.storage_bytes == largest]
    assert len(held) > 1 or len(held[0].replicas[0]) > 1


def test_tables_that_fit_no_device_go_behind_caches():
    tables, _ = make.draw_task(6, 8, seed=6)
    total = tables.storage_bytes
    task = (tables, make.two_nodes(hbm=total // 16, ddr=total))
    found = search_steps(make.request(*task, time_limit_s=SECONDS), STEPS)
    validate_plan(found.plan)
    cached = [placed for placed in found.plan.shards if placed.memory.level is MemoryLevel.DDR]
    assert cached
    assert all(placed.memory.cache_bytes > 0 for placed in cached)
    neo = get_planner("neo").plan(make.request(*task, time_limit_s=SECONDS))
    assert found.cost_ms <= evaluate(neo, COSTS).step_ms.value


def test_tables_go_behind_caches_where_the_reserve_leaves_devices_little():
    one = make.table("t", 100_000, 64)
    hbm, left = 3 * one.storage_bytes, one.storage_bytes // 4
    request = make.request(make.tables(one), make.topology(1, hbm=hbm, ddr=hbm), time_limit_s=SECONDS)
    found = search_steps(request, replace(STEPS, reserved_bytes=hbm - left))
    validate_plan(found.plan)
    assert {placed.memory.level for placed in found.plan.shards} == {MemoryLevel.DDR}
    assert evaluate(found.plan, COSTS).ranks[0].used_bytes <= left


def test_a_table_that_fits_no_device_goes_behind_a_cache_although_all_devices_have_room_for_it():
    small, large = make.table("small", 1_000, 64), make.table("large", 100_000, 64)
    machine = make.topology(4, hbm=7 * large.storage_bytes // 10, ddr=large.storage_bytes)
    request = make.request(make.tables(small, large), machine, time_limit_s=SECONDS)
    found = search_steps(request, replace(STEPS, names=frozenset({ShardingType.TABLE_WISE})))
    validate_plan(found.plan)
    levels = {placed.shard.table.name: placed.memory.level for placed in found.plan.shards}
    assert levels["large"] is MemoryLevel.DDR


def test_replica_groups_are_searched_within():
    # So slow between nodes, and so many samples, that several copies of all tables are worth their synchronisation.
    tables, _ = make.draw_task(12, 8, seed=6, batch_size=16_384)
    topology = make.two_nodes()
    slow = replace(topology.levels[1], all_to_all=Link(bytes_per_s=1e6), all_reduce=Link(bytes_per_s=4e8))
    request = make.request(tables, replace(topology, levels=(topology.levels[0], slow)), time_limit_s=SECONDS)
    groups = get_planner("replica-groups").plan(request)
    found = search_steps(request, STEPS)
    validate_plan(found.plan)
    assert found.plan.replica_groups == groups.replica_groups
    assert found.plan.replica_groups.num_groups > 1
    assert found.cost_ms == evaluate(found.plan, COSTS).step_ms.value <= evaluate(groups, COSTS).step_ms.value
    alone = search_steps(request, replace(STEPS, with_groups=False))
    assert alone.plan.replica_groups.num_groups == 1
    assert alone.cost_ms > found.cost_ms
    for names in ({ShardingType.TABLE_WISE, ShardingType.ROW_WISE}, {ShardingType.TABLE_WISE}, {ShardingType.ROW_WISE}):
        some = search_steps(request, replace(STEPS, names=frozenset(names)))
        assert some.plan.replica_groups.num_groups > 1
        assert {placed.tier for placed in some.plan.shards} <= {Tier(name) for name in names}


def test_says_what_is_missing():
    tables, _ = make.draw_task(6, 4, seed=0)
    total = tables.storage_bytes
    request = make.request(tables, make.topology(4, hbm=total // 5))
    amount = r"[\d.]+ [KMGTP]?i?B"
    with pytest.raises(InfeasiblePlanError, match=f"all tables need {amount}, {amount} more than the device memory"):
        search_steps(request, STEPS)
    roomy = make.request(tables, make.topology(4, hbm=total))
    kept = rf"{amount} more than the device memory of the 4 ranks less reserved_bytes \({amount}\)$"
    with pytest.raises(InfeasiblePlanError, match=kept):
        search_steps(roomy, replace(STEPS, reserved_bytes=total - total // 5))
    with pytest.raises(InfeasiblePlanError, match=r"iB on one rank"):
        search_steps(request, replace(STEPS, names=frozenset({ShardingType.TABLE_WISE})))


def test_says_which_constraint_names_no_rank():
    tables, _ = make.draw_task(2, 4)
    stray = make.table("stray", constraints=Constraints(pinned_ranks=(4,)))
    task = (replace(tables, tables=(*tables.tables, stray)), make.topology(4))
    with pytest.raises(InvalidPlanError, match=r"tables\[2\]\.constraints\.pinned_ranks: must be in \[0, 4\), got 4"):
        search_steps(make.request(*task), STEPS)


def test_plans_of_other_planners_are_read_as_they_are():
    request = make.request(*make.mixed_task())
    space = space_of(request)
    for name in ("flexshard", "neo"):
        plan = get_planner(name).plan(request)
        layout = layout_of(space, Limits.of(space), plan)
        assert layout.step_ms() == pytest.approx(evaluate(plan, COSTS).step_ms.value, rel=1e-5)
        assert set(layout.plan().shards) == set(plan.shards)


def test_balanced_starts_know_that_a_table_alone_decides():
    # One table that takes nearly all of the time: whole, it is the step; shared, the step is a fraction of that.
    (tables, _), topology = make.draw_task(8, 4, seed=1), make.topology(4)
    huge = make.table("huge", 200_000, embedding_dim=64, pooling_factor=500.0)
    huge = replace(huge, access=AccessProfile.zipf(200_000, 0.9))
    space = space_of(make.request(replace(tables, tables=(huge, *tables.tables)), topology))
    best = min(one.layout.step_ms() for one in balanced_starts(space, Limits.of(space)))
    whole = Layout(space, Limits.of(space), [(0, (index % 4,)) for index in range(len(space.items))])
    assert math.isfinite(best)
    assert best < 0.5 * whole.step_ms()


@pytest.mark.parametrize("seed", range(6))
def test_more_memory_takes_no_start_away(seed):
    """Where training needs as much as the tables do, ranks have their limits by what each shard needs of both."""
    rng, topology = np.random.default_rng(seed), load_topology("a100-8")
    drawn = [(rng.integers(10_000, 300_000), rng.choice([32, 64, 128]), rng.choice([1, 5, 30])) for _ in range(11)]
    tables = [
        make.table(f"t{index}", int(num_rows), int(dim), pooling_factor=float(lookups), row_order=None)
        for index, (num_rows, dim, lookups) in enumerate(drawn)
    ]
    space = space_of(make.request(make.tables(*tables, batch_size=65_536), topology))
    roomy = Limits(capacity_RM=np.full((8, 3), np.inf), with_activations=True)
    best = min(balanced_starts(space, roomy), key=lambda one: one.layout.step_ms()).layout
    used = (best.bytes_RM[:, 0] + space.prices.training_bytes(best.moved_RC[None])[0]).max()
    found = []
    for share in np.linspace(0.7, 1.3, 25):
        limits = replace(roomy, capacity_RM=np.column_stack([np.full(8, share * used), np.zeros((8, 2))]))
        starts = balanced_starts(space, limits)
        assert all(one.layout.fits() for one in starts)
        found.append(bool(starts))
    assert found[-1]
    assert found == sorted(found)


def offered(space):
    """For each item what it may be held as."""
    return [{option.of_tables[0].parts for option in item.options} for item in space.items]


def test_less_is_offered_the_less_time_there_is():
    tables, _ = make.draw_task(80, 8, seed=7)
    request = make.request(tables, make.two_nodes())
    sizes = []
    for until_s in (0.0, math.inf):
        offers = OfferedOptions(request)
        offers.begin(until_s)
        sizes.append([len(of_item) for of_item in offered(offers.space)])
    offers.complete()
    sizes.append([len(of_item) for of_item in offered(offers.space)])
    assert set(sizes[0]) == {1}
    assert all(none < few <= every for none, few, every in zip(*sizes, strict=True))
    assert all(found >= every for found, every in zip(offered(offers.space), offered(space_of(request)), strict=True))


def test_rows_beside_hot_ones_may_be_offered_on_one_rank_only():
    table = replace(make.table("t", 10_000), access=AccessProfile.zipf(10_000, 1.2))
    names = [ShardingType.ROW_TIERS]
    tiers = [
        {option.tiers for option in enumerate_options(table, make.two_nodes(), names, rest_on_one=rest_on_one)}
        for rest_on_one in (False, True)
    ]
    both = {(Tier.DATA_PARALLEL, Tier.TABLE_WISE), (Tier.DATA_PARALLEL, Tier.ROW_WISE)}
    assert tiers == [both, {(Tier.DATA_PARALLEL, Tier.TABLE_WISE)}]


@pytest.mark.parametrize("device", ["cpu", "a100"])
def test_row_groups_are_offered_on_every_device(device):
    tables, _ = make.draw_task(6, 8, seed=7)
    space = space_of(make.request(tables, replace(make.two_nodes(), device=device)))
    offered = {one.name for item in space.items for option in item.options for one in option.of_tables}
    assert ShardingType.ROW_GROUPS in offered


def with_all(request, offers):
    every = offered(space_of(request))
    return {index for index, found in enumerate(offered(offers.space)) if found >= every[index]}


def test_the_costliest_and_the_large_tables_have_all_options_and_the_longer_it_goes_on_the_more():
    tables, _ = make.draw_task(60, 8, seed=7)
    request = make.request(tables, make.two_nodes())
    offers = OfferedOptions(request)
    offers.begin()
    first = with_all(request, offers)
    assert len(first) == 20
    read = sorted(
        range(60), key=lambda index: -tables.tables[index].pooling_factor * tables.tables[index].embedding_dim
    )
    assert len(first & set(read[:20])) > 12
    flat = FlatOptions.of(offers.space)
    layout = at_random(offers.space, np.random.default_rng(1))
    offers.grow(flat, layout, 8, math.inf)
    assert with_all(request, offers) == first
    offers.grow(FlatOptions.of(offers.space), layout, 24, math.inf)
    assert len(with_all(request, offers)) == 40
    offers.grow(FlatOptions.of(offers.space), layout, 72, math.inf)
    assert offers.is_complete
    largest = max(table.storage_bytes for table in tables.tables)
    small = make.request(tables, replace(make.two_nodes(), memory_bytes=MemoryBytes(hbm=largest)))
    offers = OfferedOptions(small)
    offers.begin()
    assert with_all(small, offers) >= {
        index for index, table in enumerate(tables.tables) if table.storage_bytes > largest / 4
    }


def test_what_is_offered_keeps_to_the_sharding_types():
    tables, _ = make.draw_task(30, 8, seed=7)
    for names in ({ShardingType.FLEX}, {ShardingType.TABLE_WISE, ShardingType.ROW_WISE}):
        offers = OfferedOptions(make.request(tables, make.two_nodes()), names)
        offers.begin()
        assert {option.of_tables[0].name for item in offers.space.items for option in item.options} == names


def test_tables_that_fit_no_rank_whole_are_cut_however_short_the_time():
    huge = [make.table(f"t{index}", 100_000, embedding_dim=64, pooling_factor=2.0) for index in range(3)]
    topology = make.topology(4, hbm=huge[0].storage_bytes * 9 // 10)
    request = replace(make.request(make.tables(*huge), topology), time_limit_s=1e-3)
    plan = search_steps(request, StepSearch()).plan
    validate_plan(plan)
    assert num_cuts(plan) > 0
