"""How good placements of several tasks are, and how good simple planners' are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autoshard.planners.feasibility import repair
from autoshard.planners.greedy import CostGreedyPlanner, LookupGreedyPlanner, PlacementPlanner
from autoshard.planners.placement import PlacementProblem, RankArray
from env import PlacementTask
from policies.decoding import decode
from policies.network import PlacementNetwork


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementScore:
    """Means over tasks, as the cost model predicts them."""

    balance: float
    """min / max over ranks of kernel time."""
    max_ms: float
    """Kernel time of the slowest rank."""

    def to_json(self) -> dict[str, float]:
        """As a JSON object."""
        return {"balance": self.balance, "max_ms": self.max_ms}


@dataclass(frozen=True, slots=True, kw_only=True)
class Baselines:
    """What planners without training make of the same tasks."""

    cost_greedy: PlacementScore
    lookup_greedy: PlacementScore

    @classmethod
    def of(cls, problems: Sequence[PlacementProblem]) -> Baselines:
        """Plans all problems with both planners."""

        def score(planner: PlacementPlanner) -> PlacementScore:
            return score_placements(problems, [repair(problem, planner.place(problem, 0), 0) for problem in problems])

        return cls(cost_greedy=score(CostGreedyPlanner()), lookup_greedy=score(LookupGreedyPlanner()))


def score_placements(problems: Sequence[PlacementProblem], placements: Sequence[RankArray]) -> PlacementScore:
    """Scores one placement per problem."""
    costs_ms = [problem.rank_ms(ranks_N) for problem, ranks_N in zip(problems, placements, strict=True)]
    return PlacementScore(
        balance=float(np.mean([cost_ms_R.min() / max(cost_ms_R.max(), 1e-12) for cost_ms_R in costs_ms])),
        max_ms=float(np.mean([cost_ms_R.max() for cost_ms_R in costs_ms])),
    )


def score_policy(network: PlacementNetwork, tasks: Sequence[PlacementTask]) -> PlacementScore:
    """Scores one greedy decode per task."""
    placements = decode(network, tasks)
    return score_placements([task.problem for task in tasks], placements.ranks)
