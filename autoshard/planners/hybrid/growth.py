"""By how much a step's parts, as p-norms over ranks, grow with what ranks get or lose.

Shape suffixes: P parts of a step, R ranks, H ranks that hold a shard, Y sets of shards; "..." any axes.
"""

from __future__ import annotations

import numpy as np

from autoshard.core.costs import MsArray
from autoshard.planners.space.kinds import FloatArray
from autoshard.planners.space.planner_space import IndexArray

#: Largest share of the slowest rank's time that is raised to a power.
_MOST_SHARE = 100.0


class Growth:
    """The norms of a layout's parts, each a root of the mean over ranks of powers.

    Args:
        parts_PR: Times of the parts.
        exponent: p, a power of two.

    Attributes:
        worth_PR: What one more millisecond on a rank adds to each norm.
    """

    def __init__(self, parts_PR: MsArray, exponent: int) -> None:
        self._exponent = exponent
        self._scale_P = np.maximum(parts_PR.max(axis=1), 1e-30)
        share_PR = parts_PR / self._scale_P[:, None]
        power_PR = self._powers(share_PR)
        self._mean_P = np.maximum(power_PR.mean(axis=1), 1e-300)
        self._share_RP, self._power_RP = share_PR.T.copy(), power_PR.T.copy()
        slope_PR = np.divide(power_PR, share_PR, out=np.zeros_like(power_PR), where=share_PR > 0)
        self.worth_PR: FloatArray = (
            slope_PR * (self._mean_P ** (1 / exponent - 1))[:, None] / np.float64(share_PR.shape[1])
        )

    def powers(self, load_P: MsArray, ranks_H: IndexArray) -> FloatArray:
        """What loads add to the sums of powers where all of some ranks get them, shape (..., P).

        Args:
            load_P: Milliseconds, shape (..., P); negative where ranks lose them.
            ranks_H: The ranks, shape (..., H).
        """
        after_HP = self._share_RP[ranks_H] + (load_P / self._scale_P)[..., None, :]
        added_HP = self._powers(np.clip(after_HP, 0.0, _MOST_SHARE)) - self._power_RP[ranks_H]
        return np.asarray(added_HP.sum(axis=-2))

    def ms(self, powers_P: FloatArray) -> MsArray:
        """By how many milliseconds all norms together grow with what is added to their sums of powers.

        Args:
            powers_P: Sums of what `powers` gives, shape (..., P).
        """
        mean_P = np.maximum(self._mean_P + powers_P / len(self._share_RP), 0.0)
        root_P = mean_P ** (1 / self._exponent) - self._mean_P ** (1 / self._exponent)
        return np.asarray(root_P @ self._scale_P)

    def _powers(self, share: FloatArray) -> FloatArray:
        for _ in range(self._exponent.bit_length() - 1):
            share = share * share
        return share
