"""The network: the same in numpy and in torch, alike however ranks are numbered, and a critic that sees placements."""

import numpy as np
import pytest
import torch

from autoshard.core.errors import ModelError
from autoshard.planners.space.ways import NUM_ITEM, NUM_PRICES, NUM_TASK, NUM_WAY
from env.game import NUM_CONTEXT, NUM_PLACE
from policies.network import SHAPES, START_CONTEXT, PolicyNetwork, check_weights, first_weights


def inputs(seed=0, num_items=5, num_options=7):
    rng = np.random.default_rng(seed)
    shapes = {
        "task": (NUM_TASK,),
        "items": (num_items, NUM_ITEM),
        "options": (num_options, NUM_WAY + NUM_PRICES),
        "places": (num_options, NUM_PLACE),
        "context": (NUM_CONTEXT,),
    }
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def outputs(network, of):
    states = network.states(of["task"], of["items"])
    context = of["context"]
    return [
        states,
        network.option_scores(
            of["options"], network.of_state("option", states)[2], network.of_context("option", context)
        ),
        network.place_scores(of["places"], network.of_state("place", states)[2], network.of_context("place", context)),
        network.values(states, context),
    ]


def test_numpy_and_torch_compute_the_same():
    weights, of = first_weights(1), inputs()
    in_torch = PolicyNetwork({name: torch.from_numpy(value) for name, value in weights.items()})
    found = outputs(in_torch, {name: torch.from_numpy(value) for name, value in of.items()})
    for ours, theirs in zip(outputs(PolicyNetwork(weights), of), found, strict=True):
        np.testing.assert_allclose(ours, theirs.numpy(), atol=1e-5)


def test_tasks_side_by_side_have_the_states_that_each_has_alone():
    network, one, other = PolicyNetwork(first_weights(2)), inputs(0), inputs(1)
    task_BF = np.stack([one["task"], other["task"]])
    items_NBF = np.stack([one["items"], other["items"]], axis=1)
    together = network.states(task_BF, items_NBF)
    np.testing.assert_allclose(together[:, 1], network.states(other["task"], other["items"]), atol=1e-6)


def test_renumbered_choices_have_renumbered_scores():
    network, of = PolicyNetwork(first_weights(3)), inputs()
    order = np.random.default_rng(0).permutation(len(of["places"]))
    renumbered = {**of, "places": of["places"][order], "options": of["options"][order]}
    for ours, theirs in zip(outputs(network, of)[1:3], outputs(network, renumbered)[1:3], strict=True):
        np.testing.assert_allclose(ours[order], theirs, atol=1e-6)


def test_an_item_depends_on_those_before_it_and_on_none_after():
    network, of = PolicyNetwork(first_weights(4)), inputs()
    changed = {**of, "items": of["items"].copy()}
    changed["items"][2] += 1
    before, after = network.states(of["task"], of["items"]), network.states(changed["task"], changed["items"])
    np.testing.assert_array_equal(before[:2], after[:2])
    assert (before[3] != after[3]).any()


def test_the_critic_sees_what_is_placed():
    network, of = PolicyNetwork(first_weights(5)), inputs()
    states = network.states(of["task"], of["items"])
    assert network.values(states[1], START_CONTEXT) != network.values(states[1], START_CONTEXT + 1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"item.bias": np.zeros(3, dtype=np.float32)}, r"item.bias: must be of shape \(48,\), got \(3,\)"),
        ({"more": np.zeros(1, dtype=np.float32)}, "more: must be of shape None"),
        ({"item.bias": np.full(SHAPES["item.bias"], np.nan, dtype=np.float32)}, "item.bias: must be finite"),
    ],
)
def test_weights_are_checked(change, message):
    with pytest.raises(ModelError, match=message):
        check_weights({**first_weights(0), **change}, "a file")
