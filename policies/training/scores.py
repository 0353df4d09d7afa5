"""How good placements of several tasks are, and how good simple planners' are.

Shape suffixes: P tasks, N items.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from autoshard.core.costs import MsArray
from autoshard.core.errors import InfeasiblePlanError
from autoshard.planners.heuristics.greedy import CostGreedyPlanner, LookupGreedyPlanner, PlacementPlanner
from autoshard.planners.space.feasibility import repair
from autoshard.planners.space.placement import PlacementProblem, RankArray
from env import PlacementTask, balances
from policies.network.network import PlacementNetwork
from policies.planning.decoding import decode


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementScore:
    """Means over tasks, as the cost models predict them."""

    balance: float
    """min / max over ranks of kernel time."""
    max_ms: float
    """Kernel time of the slowest rank."""
    step_ms: float | None = None
    """Time of a step; None unless that is the objective."""

    @property
    def objective_ms(self) -> float:
        """What is to be short: the step if it is the objective, else the slowest rank's kernels."""
        return self.max_ms if self.step_ms is None else self.step_ms

    def to_json(self) -> dict[str, float]:
        """As a JSON object; without steps if they are not known."""
        step = {} if self.step_ms is None else {"step_ms": self.step_ms}
        return {"balance": self.balance, "max_ms": self.max_ms, **step}


@dataclass(frozen=True, slots=True, kw_only=True)
class Baselines:
    """What planners without training make of the same tasks."""

    cost_greedy: PlacementScore
    lookup_greedy: PlacementScore

    @classmethod
    def of(cls, problems: Sequence[PlacementProblem]) -> Baselines:
        """Plans all problems with both planners."""
        return cls.of_tasks([PlacementTask.of(problem) for problem in problems])

    @classmethod
    def of_tasks(cls, tasks: Sequence[PlacementTask]) -> Baselines:
        """Plans all tasks with both planners, whatever their objective: they know kernels only."""

        def score(planner: PlacementPlanner) -> PlacementScore:
            return score_tasks(tasks, _placed(planner, tasks))

        return cls(cost_greedy=score(CostGreedyPlanner()), lookup_greedy=score(LookupGreedyPlanner()))


def cost_greedy_ms(tasks: Sequence[PlacementTask]) -> MsArray:
    """Objectives of cost-greedy's placements, shape (P,): steps, or kernel times of the slowest ranks."""
    return np.array(
        [
            task.step_ms(ranks_N) if task.step_cost is not None else float(task.problem.rank_ms(ranks_N).max())
            for task, ranks_N in zip(tasks, _placed(CostGreedyPlanner(), tasks), strict=True)
        ]
    )


def _placed(planner: PlacementPlanner, tasks: Sequence[PlacementTask]) -> list[RankArray]:
    return [_repaired(task, planner.place(task.problem, 0)) for task in tasks]


def _repaired(task: PlacementTask, ranks_N: RankArray) -> RankArray:
    try:
        return repair(task.problem, ranks_N, 0)
    except InfeasiblePlanError:
        # Nothing near enough was found, but the task is known to have a placement.
        return task.feasible_N


def score_placements(problems: Sequence[PlacementProblem], placements: Sequence[RankArray]) -> PlacementScore:
    """Scores one placement per problem."""
    costs_ms = [problem.rank_ms(ranks_N) for problem, ranks_N in zip(problems, placements, strict=True)]
    return PlacementScore(
        balance=float(np.mean([balances(cost_ms_R[None])[0] for cost_ms_R in costs_ms])),
        max_ms=float(np.mean([cost_ms_R.max() for cost_ms_R in costs_ms])),
    )


def score_tasks(tasks: Sequence[PlacementTask], placements: Sequence[RankArray]) -> PlacementScore:
    """Scores one placement per task, with steps if they are the objective; for placements that split nothing."""
    score = score_placements([task.problem for task in tasks], placements)
    if any(task.step_cost is None for task in tasks):
        return score
    steps_ms = [task.step_ms(ranks_N) for task, ranks_N in zip(tasks, placements, strict=True)]
    return replace(score, step_ms=float(np.mean(steps_ms)))


def score_policy(network: PlacementNetwork, tasks: Sequence[PlacementTask]) -> PlacementScore:
    """Scores one greedy decode per task."""
    placements = decode(network, tasks)
    score = score_placements(placements.problems, placements.ranks)
    if any(task.step_cost is None for task in tasks):
        return score
    return replace(score, step_ms=float(np.mean(placements.objective_ms_D)))
