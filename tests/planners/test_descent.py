"""Estimates of changes, descents, the race of starts, and time limits that have begun before."""

import time
from dataclasses import replace

import numpy as np
import pytest

from autoshard.core import Tier
from autoshard.core.quoting import write_bytes
from autoshard.evaluation import evaluate
from autoshard.evaluation.batch_memory import rank_memory
from autoshard.planners.hybrid.balanced import BalancedOptions
from autoshard.planners.hybrid.descent import Descent, SearchContext, Start
from autoshard.planners.hybrid.held import HeldShards
from autoshard.planners.hybrid.move_scorer import CostGrowth
from autoshard.planners.hybrid.option_offers import OfferedOptions, space_of
from autoshard.planners.hybrid.starts import (
    GrownStarts,
    LaterStarts,
    StartSpec,
    balanced_starts,
    layout_of,
    warm_starts,
)
from autoshard.planners.hybrid.step_search import StepSearch, search_steps
from autoshard.planners.hybrid.successive_halving import improve
from autoshard.planners.registry import get_planner
from autoshard.planners.space.cost_gradient import CostGradient, FlatOptions
from autoshard.planners.space.layout import Layout, Limits
from autoshard.validator import validate_plan
from tests import builders as make

EXPONENT = 32


def norm_ms(parts_PR):
    """Sum over parts of the norms, as means over ranks."""
    return ((parts_PR**EXPONENT).mean(axis=1) ** (1 / EXPONENT)).sum()


@pytest.fixture
def start():
    tables, topology = make.draw_task(12, 4, seed=5)
    space = space_of(make.request(tables, topology))
    return balanced_starts(space, Limits.of(space))[0].layout


def test_growth_is_that_of_the_norms():
    rng = np.random.default_rng(0)
    parts_PR, load_P = rng.uniform(1, 2, (5, 6)), rng.uniform(0, 1, 5)
    growth = CostGrowth(parts_PR, EXPONENT)
    for ranks, sign in (([2], 1), ([2], -1), ([1, 4], 1), (range(6), 1)):
        changed_PR = parts_PR.copy()
        changed_PR[:, list(ranks)] += sign * load_P[:, None]
        grown_ms = growth.ms(growth.powers(sign * load_P, np.array(ranks)))
        assert grown_ms == pytest.approx(norm_ms(changed_PR) - norm_ms(parts_PR), rel=1e-9)
    # The slope is the growth by very little.
    little_P = 1e-7 * load_P
    slope_ms = (growth.worth_PR[:, 3] * little_P).sum()
    assert slope_ms == pytest.approx(growth.ms(growth.powers(little_P, np.array([3]))), rel=1e-4)


def test_estimates_of_options_on_all_ranks_count_what_leaves_a_rank(start):
    space = start.space
    context = SearchContext(space, start.limits, start, seed=0)
    near, flat, rates = context.near(start, EXPONENT), context.flat, context.linear.rates
    parts_PR = start.parts_ms()
    num_compared = 0
    for item in range(len(space.items)):
        which_Y, number_Y, option_Y = flat.options_of(np.array([item]))
        grown_ms_Y = near.estimates.grown_ms(np.array([item]), which_Y, option_Y)
        ((shard, rank), *others) = start.held(item)
        if others or shard.num_holders > 1:
            continue
        for number, grown_ms in zip(number_Y, grown_ms_Y, strict=True):
            shards = space.items[item].options[number].shards
            if len(shards) > 1 or not shards[0].is_everywhere:
                continue
            (one,) = shards
            after_PR = parts_PR + rates.shared_VP[one.kind][:, None]
            after_PR[:, rank] -= rates.served_VP[shard.kind]
            expected_ms = norm_ms(np.maximum(after_PR, 0.0)) - norm_ms(parts_PR) + rates.sync_V[one.kind]
            assert grown_ms == pytest.approx(expected_ms, rel=1e-6, abs=1e-9)
            num_compared += 1
    assert num_compared > 0


def test_held_shards_are_those_of_the_layout(start):
    held = HeldShards.of(FlatOptions.of(start.space), start.chosen)
    expected = [
        (item, number, shard.kind, *shard.ranks(site).indices(4)[:2])
        for item in range(len(start.chosen))
        for number, (shard, site) in enumerate(start.held(item))
    ]
    found = zip(held.item_X, held.number_X, held.kind_X, held.first_X, held.end_X, strict=True)
    assert list(found) == expected


def test_options_of_items_that_are_alike_are_those_of_each():
    one, other = make.table("one", pooling_factor=30.0), make.table("other")
    tables = make.tables(one, replace(other, name="third", features=make.table("third").features), other, batch_size=64)
    space = space_of(make.request(tables, make.topology(4)))
    flat = FlatOptions.of(space)
    assert flat.options_I.tolist() == [len(item.options) for item in space.items]
    for index, item in enumerate(space.items):
        _, _, option_Y = flat.options_of(np.array([index]))
        assert (flat.item_O[option_Y] == index).all()
        for option, number in zip(item.options, option_Y.tolist(), strict=True):
            assert flat.types[flat.type_O[number]] == option.of_tables[0].name
            _, number_X, shard_X = flat.shards_of(np.array([number]))
            assert number_X.tolist() == flat.number_E[shard_X].tolist() == list(range(len(option.shards)))
            assert flat.kind_E[shard_X].tolist() == [shard.kind for shard in option.shards]
            held = [[tier for tier in Tier if flat.is_held(tier, np.array([one]))] for one in shard_X.tolist()]
            assert held == [[shard.tier] for shard in option.shards]


def test_the_log_says_how_balanced_and_how_full_the_best_layout_is(start, caplog):
    caplog.set_level("DEBUG", "autoshard.planners")
    limits = replace(start.limits, with_activations=True)
    SearchContext(start.space, limits, start, seed=0).meet(start.step_ms(), start.chosen)
    predicted = evaluate(start.plan(), make.costs())
    memory = rank_memory(start.plan(), predicted)
    fullest = max(memory, key=lambda one: one.share)
    assert caplog.messages == [
        f"best {start.step_ms():.6g} ms after 0 steps; slowest rank: {predicted.binding_rank}, "
        f"kernels {predicted.max_kernel_ms:.4g} ms; balance: {predicted.balance:.1%}; fullest rank: {fullest.rank}, "
        f"{write_bytes(fullest.used_bytes)} of {write_bytes(fullest.capacity_bytes)}"
    ]


def test_more_steps_never_end_with_a_longer_step():
    tables, topology = make.draw_task(10, 4, seed=9)
    space = space_of(make.request(tables, topology))
    starts = sorted(balanced_starts(space, Limits.of(space)), key=lambda start: start.layout.step_ms())
    assert len(starts) > 1
    far_s = time.perf_counter() + 600.0
    found = [improve(starts, seed=2, deadline_s=far_s, max_steps=steps) for steps in (1, 10, 25, 125)]
    steps_ms = [one.step_ms for one in found]
    assert steps_ms == sorted(steps_ms, reverse=True)
    assert [one.num_steps for one in found] == [1, 10, 25, 125]
    assert all(one.layout.fits() and one.step_ms == one.layout.step_ms() for one in found)
    # The plans of shorter searches are met on the way; that of 100 steps among them.
    trails_ms = [[Layout(space, starts[0].layout.limits, met).step_ms() for met in one.trail] for one in found]
    assert [len(trail_ms) for trail_ms in trails_ms] == [0, 1, 2, 3]
    assert trails_ms[3][:2] == trails_ms[2] == pytest.approx(steps_ms[:2])


def test_a_descent_leaves_its_start_as_it_is(start):
    chosen, step_ms = list(start.chosen), start.step_ms()
    descent = Descent(SearchContext(start.space, start.limits, start, seed=1), start)
    while not descent.is_done:
        descent.step()
    assert (start.chosen, start.step_ms()) == (chosen, step_ms)
    assert descent.best_ms == descent.best_layout().step_ms() <= step_ms


def test_whole_tables_are_cut_only_above_the_limit(start):
    space = start.space
    flat = FlatOptions.of(space)
    balanced = BalancedOptions(space, flat, CostGradient.of(space), start.limits)
    assert (balanced.whole(1e9) == 0).all()
    limit_ms = 0.3 * balanced.cost_O[flat.first_I].sum()
    is_large_I = balanced.lump_O[flat.first_I] > limit_ms
    assert (balanced.whole(0.3)[~is_large_I] == 0).all()


def test_a_limit_that_is_over_gives_a_plan_all_the_same():
    task = make.draw_task(12, 4, seed=5)
    late = replace(make.request(*task), started_s=time.perf_counter() - 100.0, time_limit_s=1.0)
    assert late.deadline_s() == late.started_s + 1.0
    found = search_steps(late, StepSearch())
    validate_plan(found.plan)
    assert "stopped by time" in found.status
    assert "balanced" in found.status


def test_who_is_asked_depends_on_the_clock_only_where_time_ends_the_search():
    request = make.request(*make.draw_task(6, 4, seed=1))
    greedy = StartSpec(name="cost-greedy", table_s=1e-6, share=1.0)
    over_s = time.perf_counter() - 1.0
    assert set(warm_starts(request, [greedy])) == {"cost-greedy"}
    assert warm_starts(request, [greedy], over_s) == {}
    slow = replace(greedy, base_s=1e6)
    assert warm_starts(request, [slow], time.perf_counter() + 100.0) == {}


def test_planners_are_asked_once_when_they_take_no_more_than_their_share_of_the_time_that_is_over():
    request = replace(make.request(*make.draw_task(6, 4, seed=1)), time_limit_s=1e4)
    quick = StartSpec(name="cost-greedy", base_s=1.0, share=0.1)
    slow = StartSpec(name="dim-greedy", base_s=50.0, share=0.1)
    began_s = time.perf_counter() - 100.0
    later = LaterStarts(request, [slow, quick], began_s, began_s + 1e4)
    assert set(later.due()) == {"cost-greedy"}
    assert later.due() == {}
    later = LaterStarts(request, [slow, quick], began_s - 500.0, began_s + 1e4)
    assert set(later.due()) == {"cost-greedy", "dim-greedy"}
    over = LaterStarts(request, [quick], began_s, began_s + 100.5)
    assert over.due() == {}


def test_a_balanced_start_is_made_anew_when_options_have_grown_and_there_is_time():
    offers = OfferedOptions(make.request(make.draw_task(12, 4, seed=5)[0], make.two_nodes()))
    limits, far_s = Limits.of(offers.space), time.perf_counter() + 1e6
    grown = GrownStarts(offers.space, limits, 0.01, far_s)
    late = GrownStarts(offers.space, limits, 0.01, time.perf_counter())
    whole_ms = min(one.layout.step_ms() for one in balanced_starts(offers.space, limits))
    assert grown.due() == []
    offers.complete()
    (start,) = grown.due()
    best = min(balanced_starts(offers.space, limits), key=lambda one: one.layout.step_ms())
    assert start.layout.step_ms() == best.layout.step_ms() < whole_ms
    assert grown.due() == late.due() == []


def test_starts_that_arrive_in_the_race_or_after_it_are_gone_on_from():
    request = make.request(*make.draw_task(24, 8, seed=2))
    space = space_of(request)
    limits = Limits.of(space)
    worst = max(balanced_starts(space, limits), key=lambda one: one.layout.step_ms())
    plan = get_planner("neo").plan(request)
    for asked_before in (0, 20):
        calls = 0

        def arrive(asked_before=asked_before):
            nonlocal calls
            calls += 1
            layout = layout_of(space, limits, plan) if calls == asked_before + 1 else None
            return [] if layout is None else [Start(layout=layout, name="neo")]

        far_s = time.perf_counter() + 1e6
        found = improve([worst], seed=0, deadline_s=far_s, max_steps=400, more_starts=arrive)
        assert calls > asked_before + 1
        assert found.step_ms <= layout_of(space, limits, plan).step_ms()
