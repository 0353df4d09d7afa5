"""What an agent sees: one upcoming item, and what may be done with it.

Shape suffixes: A choices, H width of a code, C cost columns, Z kinds of choices.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from autoshard.core import Tier
from autoshard.core.errors import InvalidOptionError

ITEM_CODE = "item_code"
REMAINING = "remaining"
CHOICE_CODES = "choice_codes"
CHOICE_COSTS = "choice_costs"
CHOICE_KINDS = "choice_kinds"
ACTION_MASK = "action_mask"

Observation = dict[str, NDArray[np.generic]]

_LARGEST = float(np.finfo(np.float32).max)


class CostColumn(IntEnum):
    """Columns of CHOICE_COSTS."""

    AS_IS = 0
    """Kernel time before the choice."""
    WITH_ITEM = 1
    """Kernel time after it."""
    OBJECTIVE = 2
    """What the objective makes of all ranks after it."""
    ROOM = 3
    """Share of memory that is left after it."""


class ChoiceKind(IntEnum):
    """Columns of CHOICE_KINDS."""

    RANK = 0
    DATA_PARALLEL = 1
    FLEX = 2
    ROW_WISE = 3
    SPLIT = 4


NUM_COST_COLUMNS, NUM_CHOICE_KINDS = len(CostColumn), len(ChoiceKind)

_KIND_OF = {
    Tier.DATA_PARALLEL: ChoiceKind.DATA_PARALLEL,
    Tier.FLEX: ChoiceKind.FLEX,
    Tier.ROW_WISE: ChoiceKind.ROW_WISE,
}


def choice_kinds(num_ranks: int, tiers: Sequence[Tier], *, may_split: bool) -> NDArray[np.float32]:
    """One-hot kinds of all choices: the ranks, the shared tiers, and the split if there is one; shape (A, Z).

    Raises:
        InvalidOptionError: If a tier is none that ranks share.
    """
    for tier in tiers:
        if tier not in _KIND_OF:
            raise InvalidOptionError(f"must be one of {', '.join(_KIND_OF)}, got {tier}", field="tiers")
    kinds = [ChoiceKind.RANK] * num_ranks + [_KIND_OF[tier] for tier in tiers] + [ChoiceKind.SPLIT] * may_split
    return np.eye(NUM_CHOICE_KINDS, dtype=np.float32)[kinds]


def observation_space(num_choices: int, code_width: int) -> spaces.Dict:
    """The space of observations; PlacementEnv says what its parts mean."""

    def box(*shape: int, low: float = -_LARGEST, high: float = _LARGEST) -> spaces.Box:
        return spaces.Box(low=low, high=high, shape=shape, dtype=np.float32)

    return spaces.Dict(
        {
            ITEM_CODE: box(code_width),
            REMAINING: box(1, low=0.0, high=1.0),
            CHOICE_CODES: box(num_choices, code_width),
            CHOICE_COSTS: box(num_choices, NUM_COST_COLUMNS),
            CHOICE_KINDS: box(num_choices, NUM_CHOICE_KINDS, low=0.0, high=1.0),
            ACTION_MASK: spaces.MultiBinary(num_choices),
        }
    )
