import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from env import Objective, kernel_score, placement_reward

costs = st.lists(st.floats(0, 1e6), min_size=2, max_size=6)
byte_counts = st.integers(0, 1 << 50)


def reward(cost_ms, held, capacity, num_forbidden=0):
    score = kernel_score(Objective.BALANCE, np.array([cost_ms]), np.array([1.0]))
    return float(placement_reward(score, np.array([held]), np.array([capacity]), np.array([num_forbidden]))[0])


def test_balance_is_min_over_max():
    # AutoShard Fig. 1, left: shards of 5, 10 and 15 balance to a third.
    assert reward([5.0, 10.0, 15.0], [1, 1, 1], [1, 1, 1]) == pytest.approx(1 / 3)


def test_an_empty_rank_scores_zero_and_no_cost_at_all_scores_one():
    assert reward([0.0, 4.0], [0, 1], [9, 9]) == 0.0
    assert reward([0.0, 0.0], [0, 0], [9, 9]) == 1.0


def test_the_penalty_is_the_worst_ranks_overshoot_with_a_minus_sign():
    # AutoShard Sec. 4.3: (15 - 10) / 10 on one rank, (24 - 20) / 20 on the other.
    assert reward([1.0, 1.0], [15, 24], [10, 20]) == pytest.approx(-0.5)


def test_a_rank_without_memory_can_be_overfull():
    assert reward([1.0, 1.0], [3, 0], [0, 10]) == pytest.approx(-3.0)


@given(cost_ms=costs, overfull_ms=costs, over=st.integers(1, 1 << 40), capacity=st.integers(1, 1 << 50))
def test_every_placement_over_memory_scores_below_every_one_within(cost_ms, overfull_ms, over, capacity):
    fits = reward(cost_ms, [capacity] * len(cost_ms), [capacity] * len(cost_ms))
    held = [capacity] * (len(overfull_ms) - 1) + [capacity + over]
    assert 0.0 <= fits <= 1.0
    assert reward(overfull_ms, held, [capacity] * len(overfull_ms)) < 0.0


@given(
    capacity=st.integers(1, 1 << 40),
    over=st.integers(1, 1 << 40),
    further=st.integers(1, 1 << 40),
    cost_ms=st.tuples(st.floats(0, 1e3), st.floats(0, 1e3)),
)
def test_closer_to_fitting_scores_higher_whatever_the_costs(capacity, over, further, cost_ms):
    near = reward(cost_ms, [0, capacity + over], [capacity, capacity])
    far = reward([1.0, 1.0], [0, capacity + over + further], [capacity, capacity])
    assert far < near or further / capacity < 1e-12


def test_a_forbidden_rank_scores_below_any_placement_within_the_limits():
    assert reward([1.0, 1.0], [1, 1], [9, 9], num_forbidden=1) == -1.0
    assert reward([1.0, 1.0], [1, 1], [9, 9], num_forbidden=2) == -2.0


def test_the_slowest_rank_is_scored_against_an_even_share():
    cost_ms = np.array([[2.0, 4.0], [0.0, 0.0]])
    assert kernel_score(Objective.MAX_KERNEL, cost_ms, np.array([3.0, 1.0])).tolist() == [0.75, 1.0]
