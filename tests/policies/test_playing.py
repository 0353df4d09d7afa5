"""Episodes of the game, played by a network."""

import math

import numpy as np
import pytest

from policies.planning.planner import improved
from policies.planning.playing import SeenTask, follow, play


def test_a_decode_is_the_same_each_time_and_fits(network, task):
    one, other = play(network, task), play(network, task)
    assert one.layouts[0].chosen == other.layouts[0].chosen
    assert one.layouts[0].fits()
    assert one.rewards_E[0] == pytest.approx(task.witness_ms / one.layouts[0].step_ms())


def test_recorded_steps_have_the_probabilities_of_their_choices(network, task):
    played = play(network, task, 3, rng=np.random.default_rng(1))
    assert {one.at for one in played.decisions} == set(range(len(task.order_I)))
    for one in played.decisions:
        assert one.mask_EA[np.arange(3), one.choice_E].all()
        assert (one.log_probs_E <= 1e-6).all()
        num_allowed_E = one.mask_EA.sum(axis=1)
        assert (one.log_probs_E[num_allowed_E == 1] > -1e-6).all()
        assert math.isfinite(one.log_probs_E.sum())


def test_steps_that_lead_to_a_layout_end_with_it(network, task):
    layout = play(network, task, 4, rng=np.random.default_rng(2)).layouts[3]
    decisions = follow(task, layout)
    options = {int(task.order_I[one.at]): int(one.choice_E[0]) for one in decisions if not one.is_place}
    assert options == {item: layout.choice(item)[0] for item in range(len(task.order_I))}
    places = [int(one.choice_E[0]) for one in decisions if one.is_place]
    held = ((shard, site) for item in task.order_I.tolist() for shard, site in layout.held(item))
    assert places == [site for shard, site in held if not shard.is_everywhere]


def test_what_is_seen_of_a_task_has_all_options_in_the_order_of_play(task):
    seen = SeenTask.of(task)
    assert seen.count_N.sum() == len(task.flat.item_O) == len(seen.options_OF)
    first = task.ways_OF[task.options_of(int(task.order_I[0]))].astype(np.float32)
    np.testing.assert_array_equal(seen.options()[0], first)


def test_bursts_of_the_search_never_make_a_layout_worse(network, task):
    layout = play(network, task).layouts[0]
    better = improved(task, layout, 4, seed=0)
    assert better.fits()
    assert better.step_ms() < layout.step_ms()
    assert improved(task, layout, 0, seed=0) is layout
