"""The actor-critic network: an LSTM over the items, and one score per rank.

Shape suffixes: T steps, B episodes, R ranks, H width of a code, S width of a state, C cost columns.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

from env import NUM_COST_COLUMNS

STEP_WIDTH = 32
COST_WIDTH = 32
_NUM_LSTM_LAYERS = 2
# The costs of a rank without and with the item, and how much the latter is above the cheapest rank's.
_NUM_COST_INPUTS = NUM_COST_COLUMNS + 1
# An item is about a tenth of an even share, so differences between ranks are about that small at most.
_MARGIN_SCALE = 8.0
_POLICY_HIDDEN = (128, 128, 64)
_VALUE_HIDDEN = 64

#: Hidden and cell values of the LSTM, each of shape (layers, B, S).
LstmState = tuple[Tensor, Tensor]


class PlacementNetwork(nn.Module):
    """Scores the ranks for an upcoming item, and values states.

    A state joins the item's code with 32 numbers made of the step, and goes through a two-layer LSTM as wide as
    itself. An action joins the rank's summed codes with 32 numbers made of its cost. The policy head scores state,
    action and their product through layers of 128, 128, 64 and 1, the same for every rank: so any number of items
    and ranks will do, and renumbering ranks renumbers the scores. Codes are made by the cost model's encoder, which
    is shared, and reach the network in the units that TablePlacementEnv gives.

    Args:
        code_width: H, the width of the cost model's codes.

    Source:
        AutoShard Sec. 4.4 and C.1. Differs: inputs have no unit. A rank's cost is given as it is, with the upcoming
        item, and as what the latter is above the cheapest rank's: after 20 updates of 96 episodes (80 tables, 8 ranks,
        means of two seeds on 20 validation tasks) the balance was 0.984, with the first alone 0.936. Codes of the
        learned cost model are 33 wide, as they carry a count, and so are layers made to their width.
    """

    def __init__(self, code_width: int) -> None:
        super().__init__()
        self.code_width = code_width
        self.state_width = code_width + STEP_WIDTH
        action_width = code_width + COST_WIDTH
        assert action_width == self.state_width, "state and action are multiplied number by number"
        self.step_layer = nn.Linear(1, STEP_WIDTH)
        self.cost_layer = nn.Linear(_NUM_COST_INPUTS, COST_WIDTH)
        self.lstm = nn.LSTM(self.state_width, self.state_width, _NUM_LSTM_LAYERS)
        self.policy_first = nn.Linear(3 * self.state_width, _POLICY_HIDDEN[0])
        self.policy_rest = nn.Sequential(nn.ReLU(), *_mlp(*_POLICY_HIDDEN, 1))
        self.value_head = _mlp(self.state_width, _VALUE_HIDDEN, 1)

    def initial_state(self, num_episodes: int) -> LstmState:
        """What the LSTM knows before the first item."""
        zeros = self.step_layer.weight.new_zeros((_NUM_LSTM_LAYERS, num_episodes, self.state_width))
        return zeros, zeros

    def states(self, item_TBH: Tensor, remaining_TB1: Tensor, before: LstmState) -> tuple[Tensor, LstmState]:
        """States of T steps, shape (T, B, S), and what the LSTM knows after them. They depend on no action."""
        step_TBS = torch.relu(self.step_layer(remaining_TB1))
        states_TBS, after = self.lstm(torch.cat([item_TBH, step_TBS], dim=-1), before)
        return states_TBS, after

    def logits(self, states_BS: Tensor, codes_BRH: Tensor, costs_BRC: Tensor, mask_BR: Tensor) -> Tensor:
        """Unnormalised log-probabilities of the ranks, shape (B, R); minus infinity where the mask is false."""
        cost_BRS = torch.relu(self.cost_layer(_with_margin(costs_BRC, mask_BR)))
        action_BRS = torch.cat([codes_BRH, cost_BRS], dim=-1)
        first = self.policy_first
        # Every rank sees the same state, so the first layer's part for the state is computed once, not R times.
        of_state_BS, of_rank_BRS = first.weight.split([self.state_width, 2 * self.state_width], dim=1)
        hidden = functional.linear(torch.cat([action_BRS, states_BS[:, None] * action_BRS], dim=-1), of_rank_BRS)
        hidden = hidden + functional.linear(states_BS, of_state_BS, first.bias)[:, None]
        scores_BR = self.policy_rest(hidden)[..., 0]
        return scores_BR.masked_fill(~mask_BR, -torch.inf)

    def values(self, states_BS: Tensor) -> Tensor:
        """Expected rewards, shape (B,)."""
        return self.value_head(states_BS)[..., 0]


def _with_margin(costs_BRC: Tensor, mask_BR: Tensor) -> Tensor:
    with_item_BR = costs_BRC[..., -1]
    cheapest_B1 = with_item_BR.masked_fill(~mask_BR, torch.inf).amin(dim=-1, keepdim=True)
    margin_BR = _MARGIN_SCALE * (with_item_BR - cheapest_B1)
    return torch.cat([costs_BRC, margin_BR[..., None]], dim=-1)


def _mlp(*widths: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])
