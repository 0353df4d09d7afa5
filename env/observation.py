"""What an agent sees: one upcoming item, and what each rank holds so far.

Shape suffixes: R ranks, H width of a code.
"""

from __future__ import annotations

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

ITEM_CODE = "item_code"
REMAINING = "remaining"
RANK_CODES = "rank_codes"
RANK_COSTS = "rank_costs"
ACTION_MASK = "action_mask"

#: Columns of RANK_COSTS: the rank's cost as it is, and with the upcoming item.
NUM_COST_COLUMNS = 2

Observation = dict[str, NDArray[np.generic]]

_LARGEST = float(np.finfo(np.float32).max)


def observation_space(num_ranks: int, code_width: int) -> spaces.Dict:
    """The space of observations; TablePlacementEnv says what its parts mean."""

    def box(*shape: int, low: float = -_LARGEST, high: float = _LARGEST) -> spaces.Box:
        return spaces.Box(low=low, high=high, shape=shape, dtype=np.float32)

    return spaces.Dict(
        {
            ITEM_CODE: box(code_width),
            REMAINING: box(1, low=0.0, high=1.0),
            RANK_CODES: box(num_ranks, code_width),
            RANK_COSTS: box(num_ranks, NUM_COST_COLUMNS, low=0.0),
            ACTION_MASK: spaces.MultiBinary(num_ranks),
        }
    )
