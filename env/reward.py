"""What placements are played for, and the reward of a whole one.

Shape suffixes: E episodes, R ranks.
"""

from __future__ import annotations

from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]


class Objective(StrEnum):
    """What a placement is rewarded for; memory limits and constraints hold whatever it is."""

    BALANCE = "balance"
    """AutoShard's: kernel time of the fastest rank over that of the slowest."""
    MAX_KERNEL = "max_kernel"
    """A short kernel time of the slowest rank."""
    STEP = "step"
    """A short training step, with exchanges, all-reduce and dense layers."""


def kernel_score(objective: Objective, cost_ms_ER: FloatArray, even_ms_E: FloatArray) -> FloatArray:
    """Scores of kernel times per rank, higher is better and never negative; shape (E,).

    The maximum kernel time is scored as the price of an even share over it, which is about 1 at best, whatever the
    device and the tables.
    """
    return balances(cost_ms_ER) if objective is Objective.BALANCE else time_score(even_ms_E, cost_ms_ER.max(axis=1))


def balances(cost_ms_ER: FloatArray) -> FloatArray:
    """Kernel time of the fastest rank over that of the slowest, shape (E,): 0 to 1, 1 where nothing costs anything.

    Source:
        AutoShard Sec. 4.3.
    """
    return time_score(cost_ms_ER.min(axis=1), cost_ms_ER.max(axis=1))


def time_score(best_ms_E: FloatArray, taken_ms_E: FloatArray) -> FloatArray:
    """Best times over those taken, shape (E,); 1 where nothing takes any time."""
    return np.divide(best_ms_E, taken_ms_E, out=np.ones_like(taken_ms_E), where=taken_ms_E > 0)


def placement_reward(
    score_E: FloatArray,
    held_ER: NDArray[np.int64],
    capacity_ER: NDArray[np.int64],
    num_forbidden_E: NDArray[np.int64],
) -> FloatArray:
    """Rewards of whole placements; shape (E,).

    Within the limits it is the score. Beyond them it is negative: minus the overshoot (bytes held / capacity - 1) of
    the worst rank, and minus 1 for every item that is held as its constraints forbid. So every placement beyond the
    limits scores below every placement within them, and the closer to fitting the higher.

    Args:
        score_E: What the objective makes of the placement, at least 0.
        held_ER: Bytes held per rank.
        capacity_ER: Bytes that each rank can hold; a rank without memory counts as one of a single byte.
        num_forbidden_E: Number of items that are held as they may not be.

    Source:
        AutoShard Sec. 4.3. Differs: the paper prints the overshoot without its minus sign.
    """
    overshoot_E = ((held_ER - capacity_ER) / np.maximum(capacity_ER, 1)).max(axis=1)
    penalty_E = np.maximum(overshoot_E, 0.0) + num_forbidden_E
    return np.where(penalty_E > 0, -penalty_E, score_E)
