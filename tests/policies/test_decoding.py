"""The compiled game beside the game, and the network, that it plays by."""

import math
from dataclasses import replace

import numpy as np
import pytest

from autoshard.planners.hybrid.option_offers import space_of
from autoshard.planners.space.layout import Limits
from autoshard.planners.space.options import ShardingType
from env.game import Game, GameTask
from policies.network import START_CONTEXT, PolicyNetwork, first_weights
from policies.planning.decoding import decoded, states
from policies.planning.playing import SeenTask, play
from policies.training.drawn_tasks import TaskKind, game_task
from tests import builders as make

#: What scores of one choice may differ by in single precision.
TOLERANCE = 2e-4


def crowded_task():
    """Tables that leave so little room that masks bind; some are pinned, or share their ranks; on two nodes."""
    tables, machine = make.mixed_task()
    tables = replace(tables, batch_size=256)
    room = int(tables.storage_bytes / 8 * 2.2)
    return game_task(make.request(tables, replace(machine, memory_bytes=replace(machine.memory_bytes, hbm=room))))


TASKS = {
    "two nodes": lambda: game_task(make.request(make.draw_task(8, 8, seed=3)[0], make.two_nodes())),
    "crowded": crowded_task,
    "drawn": lambda: game_task(TaskKind(machines=("dgx-a100-16",), num_tables=(24,)).request(5)),
}


@pytest.fixture(scope="module", params=TASKS)
def task(request):
    return TASKS[request.param]()


def test_states_are_those_of_the_network(network, task):
    seen = SeenTask.of(task)
    expected = network.states(seen.task_F, seen.items_NF)
    np.testing.assert_allclose(states(network, seen.task_F, seen.items_NF), expected, atol=1e-5)


def test_each_choice_is_allowed_and_has_the_best_score_of_the_network(task):
    assert sum(checked_sites(task, weights_of(seed)) for seed in range(6)) > 10


@pytest.mark.parametrize("spare", [2.0, 20.0])
def test_columns_within_a_node_move_together(spare):
    tables, _ = make.draw_task(10, 8, seed=4)
    tables = replace(tables, tables=tuple(replace(table, embedding_dim=64) for table in tables.tables))
    machine = make.two_nodes(hbm=int(spare * tables.storage_bytes / 8))
    # Where columns may be on any ranks, these options are among those.
    names = (ShardingType.TABLE_WISE, ShardingType.TABLE_COLUMN_WISE)
    space = space_of(make.request(tables, machine), names)
    task = GameTask(space, Limits.of(space, with_activations=True))
    assert task.flat.in_node_E.any()
    assert sum(checked_sites(task, weights_of(seed, names[1])) for seed in range(6)) > 10


def weights_of(seed, liked=None):
    """Random weights, with which one sharding type is held where it may be, if that is said."""
    weights = {name: 2 * value for name, value in first_weights(seed).items()}
    if liked is not None:
        head = {name: np.zeros_like(value) for name, value in weights.items() if name.startswith("option.")}
        head["option.of_option"][list(ShardingType).index(liked), 0] = 1.0
        head["option.second"][0, 0] = head["option.last"][0, 0] = 1.0
        weights |= head
    return weights


def checked_sites(task, weights):
    """Plays after the likeliest placement, and checks each choice; how many sites were chosen."""
    network = PolicyNetwork(weights)
    layout = decoded(network, task).layout(0)
    assert layout.fits()
    game, seen = Game(task, 1), SeenTask.of(task)
    states_NH, options = network.states(seen.task_F, seen.items_NF), seen.options()
    num_sites = 0
    while not game.is_done:
        number, sites = layout.choice(game.item)
        head = "place" if game.part >= 0 else "option"
        of_context_U = network.of_context(head, game.context()[0].astype(np.float32))
        of_state_U = network.of_state(head, states_NH[game.at])
        if game.part >= 0:
            choice = sites[game.number_of_part]
            score_A = network.place_scores(game.places()[0].astype(np.float32), of_state_U, of_context_U)
            num_sites += 1
        else:
            choice = number
            score_A = network.option_scores(options[game.at], of_state_U, of_context_U)
        mask_A = game.mask()[0]
        assert mask_A[choice]
        best = np.where(mask_A, score_A, -np.inf).max()
        assert score_A[choice] >= best - TOLERANCE * max(1.0, abs(best))
        game.step(np.array([choice]))
    return num_sites


def test_the_likeliest_placement_is_that_of_the_game(network, task):
    found, expected = decoded(network, task), play(network, task)
    assert found.layout(0).step_ms() == pytest.approx(float(expected.step_ms_E[0]), rel=1e-3)


def test_draws_fit_differ_and_come_again_by_their_seed(network, task):
    drawn = decoded(network, task, 12, seed=7)
    again = decoded(network, task, 12, seed=7)
    np.testing.assert_array_equal(drawn.option_EI, again.option_EI)
    np.testing.assert_array_equal(drawn.site_EY, again.site_EY)
    layouts = [drawn.layout(episode) for episode in range(12)]
    assert len({str(layout.chosen) for layout in layouts}) > 6
    for layout in layouts:
        assert layout.fits()
        assert (task.room_beside(layout) >= 0).all()
    assert layouts[0].chosen == decoded(network, task).layout(0).chosen


def test_draws_of_options_come_as_often_as_their_probabilities(network):
    task = TASKS["two nodes"]()
    drawn = decoded(network, task, 4000, seed=3)
    first = int(task.order_I[0])
    seen = SeenTask.of(task)
    state_U = network.of_state("option", network.states(seen.task_F, seen.items_NF)[0])
    score_O = network.option_scores(seen.options()[0], state_U, network.of_context("option", START_CONTEXT))
    score_O = np.where(Game(task, 1).mask()[0], score_O, -np.inf)
    share_O = np.exp(score_O - score_O.max()) / np.exp(score_O - score_O.max()).sum()
    counts_O = np.bincount(drawn.option_EI[1:, first] - int(task.flat.first_I[first]), minlength=len(share_O))
    assert abs(counts_O / counts_O.sum() - share_O).max() < 5 * math.sqrt(0.25 / 4000)
