"""The actor-critic network: an LSTM over the items, and one score per choice.

Shape suffixes: T steps, B episodes, A choices, H width of a code, S width of a state, C cost columns, Z kinds.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

from env import (
    ACTION_MASK,
    CHOICE_CODES,
    CHOICE_COSTS,
    CHOICE_KINDS,
    NUM_CHOICE_KINDS,
    NUM_COST_COLUMNS,
    ChoiceKind,
    CostColumn,
)

STEP_WIDTH = 32
COST_WIDTH = 32
_NUM_LSTM_LAYERS = 2
#: Columns of which the network is also told how far they are above the best choice's.
_MARGIN_COLUMNS = [CostColumn.WITH_ITEM, CostColumn.OBJECTIVE]
_NUM_COST_INPUTS = NUM_COST_COLUMNS + len(_MARGIN_COLUMNS) + NUM_CHOICE_KINDS
# An item is about a tenth of an even share, so differences between ranks are about that small at most.
_MARGIN_SCALE = 8.0
#: Added to the score of splits, so that items stay whole until it was learned where cutting pays.
_SPLIT_BIAS = -2.0
_POLICY_HIDDEN = (128, 128, 64)
_VALUE_HIDDEN = 64

#: Hidden and cell values of the LSTM, each of shape (layers, B, S).
LstmState = tuple[Tensor, Tensor]


class PlacementNetwork(nn.Module):
    """Scores the choices for an upcoming item, and values states.

    A state joins the item's code with 32 numbers made of the step, and goes through a two-layer LSTM as wide as
    itself. An action joins the choice's codes with 32 numbers made of its costs and kind. The policy head scores
    state, action and their product through layers of 128, 128, 64 and 1, the same for every choice: so any number of
    items and ranks will do, and renumbering ranks renumbers the scores. Codes are made by the cost model's encoder,
    which is shared, and reach the network in the units that PlacementEnv gives.

    Args:
        code_width: H, the width of the cost model's codes.

    Source:
        AutoShard Sec. 4.4 and C.1. Differs: inputs have no unit. A rank's cost is given as it is, with the upcoming
        item, as the objective and the memory that is left would be, and as what the second and third of these are
        above the best choice's; so are choices other than ranks. Codes of the learned cost model are wider than 32,
        as they carry counts, and layers are made to their width.
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

    def logits(
        self, states_BS: Tensor, codes_BAH: Tensor, costs_BAC: Tensor, kinds_BAZ: Tensor, mask_BA: Tensor
    ) -> Tensor:
        """Unnormalised log-probabilities of the choices, shape (B, A); minus infinity where the mask is false."""
        cost_BAS = torch.relu(self.cost_layer(_with_margins(costs_BAC, kinds_BAZ, mask_BA)))
        action_BAS = torch.cat([codes_BAH, cost_BAS], dim=-1)
        first = self.policy_first
        # Every choice sees the same state, so the first layer's part for the state is computed once, not A times.
        of_state_BS, of_choice_BAS = first.weight.split([self.state_width, 2 * self.state_width], dim=1)
        hidden = functional.linear(torch.cat([action_BAS, states_BS[:, None] * action_BAS], dim=-1), of_choice_BAS)
        hidden = hidden + functional.linear(states_BS, of_state_BS, first.bias)[:, None]
        scores_BA = self.policy_rest(hidden)[..., 0] + _SPLIT_BIAS * kinds_BAZ[..., ChoiceKind.SPLIT]
        return scores_BA.masked_fill(~mask_BA, -torch.inf)

    def values(self, states_BS: Tensor) -> Tensor:
        """Expected rewards, shape (B,)."""
        return self.value_head(states_BS)[..., 0]


def choices_seen(observation: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What `PlacementNetwork.logits` reads of an observation: codes, costs, kinds and the mask of the choices."""
    return (
        observation[CHOICE_CODES],
        observation[CHOICE_COSTS],
        observation[CHOICE_KINDS],
        observation[ACTION_MASK].bool(),
    )


def _with_margins(costs_BAC: Tensor, kinds_BAZ: Tensor, mask_BA: Tensor) -> Tensor:
    compared_BAC = costs_BAC[..., _MARGIN_COLUMNS]
    # A split places nothing, so what it leads to cannot be told in the same numbers.
    is_place_BA = mask_BA & (kinds_BAZ[..., ChoiceKind.SPLIT] == 0)
    best_B1C = compared_BAC.masked_fill(~is_place_BA[..., None], torch.inf).amin(dim=1, keepdim=True)
    margins_BAC = _MARGIN_SCALE * (compared_BAC - best_B1C)
    return torch.cat([costs_BAC, margins_BAC, kinds_BAZ], dim=-1)


def _mlp(*widths: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])
