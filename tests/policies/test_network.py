import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from policies.network.network import PlacementNetwork

WIDTH = 32


@pytest.fixture(scope="module")
def network():
    torch.manual_seed(0)
    return PlacementNetwork(WIDTH)


def inputs(num_episodes, num_ranks, seed=0, width=WIDTH):
    generator = torch.Generator().manual_seed(seed)
    states = torch.randn(num_episodes, width + 32, generator=generator)
    codes = torch.randn(num_episodes, num_ranks, width, generator=generator)
    costs = torch.rand(num_episodes, num_ranks, 4, generator=generator)
    kinds = torch.eye(5)[torch.randint(5, (num_episodes, num_ranks), generator=generator)]
    kinds[:, 0] = torch.eye(5)[0]
    mask = torch.rand(num_episodes, num_ranks, generator=generator) < 0.7
    mask[:, 0] = True
    return states, codes, costs, kinds, mask


def test_layers_are_as_wide_as_the_papers(network):
    # AutoShard C.1, with codes of 32: state and action 64, LSTM of two layers of 64, heads 128-128-64-1 and 64-1.
    shapes = {name: tuple(value.shape) for name, value in network.named_parameters()}
    assert shapes["step_layer.weight"] == (32, 1)
    assert shapes["cost_layer.weight"][0] == 32
    assert shapes["lstm.weight_ih_l0"] == shapes["lstm.weight_hh_l1"] == (4 * 64, 64)
    assert "lstm.weight_ih_l2" not in shapes
    policy = [shape for name, shape in shapes.items() if name.startswith("policy") and name.endswith("weight")]
    assert policy == [(128, 3 * 64), (128, 128), (64, 128), (1, 64)]
    value = [shape for name, shape in shapes.items() if name.startswith("value") and name.endswith("weight")]
    assert value == [(64, 64), (1, 64)]


@given(num_episodes=st.integers(1, 4), num_ranks=st.integers(1, 9), seed=st.integers(0, 1000))
def test_renumbering_choices_renumbers_the_scores(network, num_episodes, num_ranks, seed):
    states, codes, costs, kinds, mask = inputs(num_episodes, num_ranks, seed)
    order = torch.randperm(num_ranks, generator=torch.Generator().manual_seed(seed))
    scores = network.logits(states, codes, costs, kinds, mask)
    renumbered = network.logits(states, codes[:, order], costs[:, order], kinds[:, order], mask[:, order])
    assert torch.allclose(renumbered, scores[:, order], atol=1e-5)


def test_ranks_alike_score_alike(network):
    states, codes, costs, kinds, _ = inputs(3, 5)
    codes[:, 4], costs[:, 4], kinds[:, 4] = codes[:, 1], costs[:, 1], kinds[:, 1]
    scores = network.logits(states, codes, costs, kinds, torch.ones(3, 5, dtype=torch.bool))
    assert torch.allclose(scores[:, 4], scores[:, 1], atol=1e-6)
    assert not torch.allclose(scores[:, 4], scores[:, 2], atol=1e-4)


def test_masked_ranks_are_never_chosen_and_do_not_touch_the_others(network):
    states, codes, costs, kinds, mask = inputs(6, 5)
    scores = network.logits(states, codes, costs, kinds, mask)
    assert (scores.isneginf() == ~mask).all()
    costs[~mask] = -100.0
    codes[~mask] = 100.0
    assert torch.allclose(network.logits(states, codes, costs, kinds, mask)[mask], scores[mask])


def test_the_first_layer_in_two_parts_is_the_layer_on_state_action_and_product(network):
    states, codes, costs, kinds, mask = inputs(4, 3)
    places = mask & (kinds[..., 4] == 0)
    margins = []
    for column in (1, 2):
        best = costs[..., column].masked_fill(~places, torch.inf).amin(dim=1, keepdim=True)
        margins.append(8.0 * (costs[..., column] - best)[..., None])
    actions = torch.cat([codes, torch.relu(network.cost_layer(torch.cat([costs, *margins, kinds], dim=-1)))], dim=-1)
    repeated = states[:, None].expand_as(actions)
    joined = torch.cat([repeated, actions, repeated * actions], dim=-1)
    expected = network.policy_rest(network.policy_first(joined))[..., 0]
    assert torch.allclose(network.logits(states, codes, costs, kinds, mask)[mask], expected[mask], atol=1e-5)


def test_states_of_many_steps_are_those_of_one_step_after_the_other(network):
    generator = torch.Generator().manual_seed(1)
    items, remaining = torch.randn(7, 3, WIDTH, generator=generator), torch.rand(7, 3, 1, generator=generator)
    together, _ = network.states(items, remaining, network.initial_state(3))
    memory = network.initial_state(3)
    for step in range(7):
        states, memory = network.states(items[step : step + 1], remaining[step : step + 1], memory)
        assert torch.allclose(states[0], together[step], atol=1e-6)


@pytest.mark.parametrize("width", [3, 33])
def test_any_width_of_codes_will_do(width):
    network = PlacementNetwork(width)
    states, codes, costs, kinds, mask = inputs(2, 4, width=width)
    assert network.logits(states, codes, costs, kinds, mask).shape == (2, 4)
    assert network.values(states).shape == (2,)
