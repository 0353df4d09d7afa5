"""What episodes end with.

Shape suffixes: D episodes, R ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autoshard.core.costs import MsArray
from autoshard.planners.space.placement import PlacementProblem, RankArray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FinishedEpisodes:
    """Placements of episodes that have ended.

    Attributes:
        episodes_D: Which episodes.
        problems: For each, the problem of what was placed: its task's, but for splits.
        ranks: For each, the placement of that problem's items.
        cost_ms_DR: Kernel time per rank.
        objective_ms_D: Kernel time of the slowest rank, or time of the step if that is the objective.
        is_feasible_D: Whether memory limits and constraints hold.
        rewards_D: As PlacementEnv gives them.
    """

    episodes_D: NDArray[np.int64]
    problems: tuple[PlacementProblem, ...]
    ranks: tuple[RankArray, ...]
    cost_ms_DR: MsArray
    objective_ms_D: MsArray
    is_feasible_D: NDArray[np.bool_]
    rewards_D: NDArray[np.float64]

    @classmethod
    def none(cls, num_ranks: int) -> FinishedEpisodes:
        """No episodes."""
        none_D = np.zeros(0)
        return cls(
            episodes_D=none_D.astype(np.int64),
            problems=(),
            ranks=(),
            cost_ms_DR=np.zeros((0, num_ranks)),
            objective_ms_D=none_D,
            is_feasible_D=none_D.astype(np.bool_),
            rewards_D=none_D,
        )

    @classmethod
    def joined(cls, parts: Sequence[FinishedEpisodes]) -> FinishedEpisodes:
        """All episodes of several, in the order in which they ended."""
        return cls(
            episodes_D=np.concatenate([part.episodes_D for part in parts]),
            problems=tuple(problem for part in parts for problem in part.problems),
            ranks=tuple(ranks_N for part in parts for ranks_N in part.ranks),
            cost_ms_DR=np.concatenate([part.cost_ms_DR for part in parts]),
            objective_ms_D=np.concatenate([part.objective_ms_D for part in parts]),
            is_feasible_D=np.concatenate([part.is_feasible_D for part in parts]),
            rewards_D=np.concatenate([part.rewards_D for part in parts]),
        )

    def take(self, places: NDArray[np.int64]) -> FinishedEpisodes:
        """The episodes at these places, in their order."""
        return FinishedEpisodes(
            episodes_D=self.episodes_D[places],
            problems=tuple(self.problems[place] for place in places),
            ranks=tuple(self.ranks[place] for place in places),
            cost_ms_DR=self.cost_ms_DR[places],
            objective_ms_D=self.objective_ms_D[places],
            is_feasible_D=self.is_feasible_D[places],
            rewards_D=self.rewards_D[places],
        )
