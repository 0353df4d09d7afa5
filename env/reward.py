"""The reward of a whole placement.

Shape suffixes: E episodes, R ranks.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def placement_reward(
    cost_ms_ER: NDArray[np.float64],
    held_ER: NDArray[np.int64],
    capacity_ER: NDArray[np.int64],
    num_forbidden_E: NDArray[np.int64],
) -> NDArray[np.float64]:
    """Rewards of whole placements; shape (E,).

    Within the limits it is the degree of balance, min / max of the ranks' costs, from 0 to 1 (1 if nothing costs
    anything). Beyond them it is negative: minus the overshoot (bytes held / capacity - 1) of the worst rank, and
    minus 1 for every item on a rank that its constraints forbid. So every placement beyond the limits scores below
    every placement within them, and the closer to fitting the higher.

    Args:
        cost_ms_ER: Kernel time per rank.
        held_ER: Bytes held per rank.
        capacity_ER: Bytes that each rank can hold; a rank without memory counts as one of a single byte.
        num_forbidden_E: Number of items on ranks that they may not go to.

    Source:
        AutoShard Sec. 4.3. Differs: the paper prints the overshoot without its minus sign.
    """
    overshoot_E = ((held_ER - capacity_ER) / np.maximum(capacity_ER, 1)).max(axis=1)
    penalty_E = np.maximum(overshoot_E, 0.0) + num_forbidden_E
    worst_ms_E = cost_ms_ER.max(axis=1)
    balance_E = np.divide(cost_ms_ER.min(axis=1), worst_ms_E, out=np.ones_like(worst_ms_E), where=worst_ms_E > 0)
    return np.where(penalty_E > 0, -penalty_E, balance_E)
