"""The game over the planners' space: whatever masks allow ends within memory limits and constraints."""

import math

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from autoshard.core import Constraints, MemoryBytes, Pooling, Tier
from autoshard.core.errors import AutoshardError
from autoshard.evaluation.batch_memory import has_room
from autoshard.planners.space.cost_gradient import CostGradient
from autoshard.planners.space.ways import TaskFeatures, price_features
from autoshard.validator import is_valid
from env import Game
from env.game import NUM_CONTEXT, NUM_PLACE
from policies.training.drawn_tasks import game_task
from tests import builders as make

NODES = [(1,), (2,), (4,), (2, 4), (2, 8), (4, 8)]


@st.composite
def requests(draw):
    """Small tasks whose tables fill most of the memory, with constraints now and then."""
    sizes = draw(st.sampled_from(NODES))
    number = draw(st.integers(1, 7))
    tables = []
    for index in range(number):
        constraints = Constraints()
        if draw(st.integers(0, 5)) == 0:
            pinned = draw(st.sets(st.integers(0, sizes[-1] - 1), min_size=1, max_size=2))
            constraints = Constraints(pinned_ranks=tuple(sorted(pinned)), forbidden_tiers=(Tier.ROW_WISE,))
        elif index and draw(st.integers(0, 6)) == 0:
            constraints = Constraints(colocate_with=("t0",))
        tables.append(
            make.table(
                f"t{index}",
                draw(st.integers(1, 4000)),
                draw(st.sampled_from((4, 16, 48))),
                draw(st.sampled_from((0.5, 3.0, 40.0))),
                alpha=draw(st.sampled_from((0.2, 1.1))),
                pooling=draw(st.sampled_from((Pooling.SUM, Pooling.SUM, Pooling.SEQUENCE))),
                constraints=constraints,
            )
        )
    of = make.tables(*tables, batch_size=draw(st.sampled_from((8, 64))))
    fill = draw(st.floats(0.3, 0.98))
    room = math.ceil(of.storage_bytes / sizes[-1] / fill) + draw(st.integers(0, 40_000))
    machine = make.topology(*sizes, hbm=room, ddr=draw(st.sampled_from((0, 0, 1 << 22))))
    return make.request(of, machine)


def task_of(request):
    try:
        return game_task(request)
    except AutoshardError:
        assume(False)


def play_by_the_mask(request, seed):
    task, rng = task_of(request), np.random.default_rng(seed)
    game = Game(task, 3)
    while not game.is_done:
        mask_EA = game.mask()
        assert mask_EA.any(axis=1).all()
        assert game.context().shape == (3, NUM_CONTEXT)
        if game.part >= 0:
            assert game.places().shape == (3, task.num_ranks, NUM_PLACE)
        game.step(np.where(mask_EA, rng.random(mask_EA.shape), -1.0).argmax(axis=1))
    finished = game.finished()
    # A longer step has a smaller reward, and the witness's own has 1.
    np.testing.assert_allclose(finished.rewards_E * finished.step_ms_E, task.witness_ms)
    for layout in finished.layouts:
        plan = layout.plan()
        assert layout.fits()
        assert is_valid(plan)
        assert has_room(plan)


HEALTHY = [HealthCheck.filter_too_much, HealthCheck.too_slow]


@given(request=requests(), seed=st.integers(0, 1 << 20))
@settings(max_examples=8, deadline=None, suppress_health_check=HEALTHY)
def test_whatever_masks_allow_ends_within_limits_and_constraints(request, seed):
    play_by_the_mask(request, seed)


@pytest.mark.slow
@given(request=requests(), seed=st.integers(0, 1 << 20))
@settings(max_examples=300, deadline=None, suppress_health_check=HEALTHY)
def test_whatever_masks_allow_of_many_tasks_ends_within_limits_and_constraints(request, seed):
    play_by_the_mask(request, seed)


@given(request=requests())
@settings(max_examples=5, deadline=None, suppress_health_check=HEALTHY)
def test_room_is_what_layouts_leave_with_what_training_needs(request):
    task = task_of(request)
    np.testing.assert_allclose(task.room_RM, task.witness.free_bytes(), atol=1.0)


@pytest.fixture(scope="module")
def task():
    tables = [make.table(f"t{index}", 1000 * (index + 1), 16, 2.0 + index, alpha=0.9) for index in range(6)]
    return game_task(make.request(make.tables(*tables), make.topology(2, 4)))


def follow(task, layout):
    game = Game(task, 1, layout)
    while not game.is_done:
        number, sites = layout.choice(game.item)
        choice = sites[game.number_of_part] if game.part >= 0 else number
        assert game.mask()[0, choice]
        game.step(np.array([choice]))
    return game.finished()


def test_the_witness_can_be_followed_and_has_a_reward_of_1(task):
    finished = follow(task, task.witness)
    assert finished.layouts[0].chosen == task.witness.chosen
    assert finished.rewards_E[0] == pytest.approx(1.0)


def test_items_come_in_falling_price_of_the_whole_table(task):
    prices = task.features.cost_I[task.order_I]
    assert (np.diff(prices) <= 0).all()
    assert prices.sum() == pytest.approx(1.0)


def test_empty_ranks_look_alike_and_what_they_hold_tells_them_apart(task):
    game = Game(task, 1)
    whole = 0
    assert task.space.items[game.item].options[whole].label == "table_wise"
    game.step(np.array([whole]))
    places_SF = game.places()[0]
    assert np.ptp(places_SF, axis=0).max() == pytest.approx(0.0)
    game.step(np.array([2]))
    game.step(np.array([whole]))
    places_SF = game.places()[0]
    assert (places_SF[2] != places_SF[0]).any()
    np.testing.assert_allclose(places_SF[0], places_SF[1])


def test_what_is_seen_does_not_depend_on_how_fast_the_machine_is(task):
    """Where all parts of a step take three times as long, what is seen of a task and of its options stays as it is."""
    rates = CostGradient.of(task.space)
    slow = CostGradient(served_VP=3 * rates.served_VP, shared_VP=3 * rates.shared_VP, sync_V=3 * rates.sync_V)
    ours, theirs = (TaskFeatures.of(task.space, task.flat, one) for one in (rates, slow))
    assert theirs.unit_ms == pytest.approx(3 * ours.unit_ms)
    np.testing.assert_allclose(ours.items_IF, theirs.items_IF)
    np.testing.assert_allclose(ours.task_F, theirs.task_F)
    of_options = [price_features(task.flat, one, task.space) for one in (rates, slow)]
    np.testing.assert_allclose(of_options[0], of_options[1])


def test_a_task_without_room_says_what_is_missing():
    request = make.request(make.tables(make.table("t0", 10_000, 64)), make.topology(2, hbm=1000))
    with pytest.raises(AutoshardError, match="more than the device memory of the 2 ranks"):
        game_task(request)


def test_memory_of_a_rank_may_differ():
    small = MemoryBytes(hbm=1 << 20)
    machine = make.topology(4, hbm=1 << 22, overrides=((3, small),))
    task = game_task(make.request(make.tables(*[make.table(f"t{i}", 3000, 16) for i in range(5)]), machine))
    assert task.capacity_RM[3, 0] < task.capacity_RM[0, 0]
    assert follow(task, task.witness).layouts[0].fits()
