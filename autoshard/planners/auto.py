"""The best plan known: every start there is, then local search on the cost model."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field, replace
from typing import ClassVar

from autoshard.core import ShardingPlan
from autoshard.core.errors import InfeasiblePlanError, InvalidOptionError, ModelError
from autoshard.planners.feasibility import repair
from autoshard.planners.greedy import (
    CostGreedyPlanner,
    DimGreedyPlanner,
    LookupGreedyPlanner,
    PlacementPlanner,
    SizeGreedyPlanner,
)
from autoshard.planners.local_search import improve
from autoshard.planners.placement import PlacementProblem, RankArray
from autoshard.planners.planner import PlanRequest, parse_options
from autoshard.planners.registry import get_planner, planner_names

#: The trained policy, if the package that has it is installed.
POLICY = "policy"

_HEURISTICS: tuple[PlacementPlanner, ...] = (
    CostGreedyPlanner(),
    LookupGreedyPlanner(),
    DimGreedyPlanner(),
    SizeGreedyPlanner(),
)
#: Share of the time limit that starts may use. If they take longer (the first call loads a trained model), the search
#: still gets the rest in full.
_STARTS_SHARE = 0.3

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoOptions:
    """Options of the `auto` planner."""

    steps_per_s: int = field(
        default=6000,
        metadata={
            "help": "Search steps per second of the time limit. A machine that keeps up gives the same plan "
            "for the same seed; a slower one makes fewer."
        },
    )
    policy: bool = field(
        default=True, metadata={"help": "Also start from the trained policy's plan, if the registry has one."}
    )

    def __post_init__(self) -> None:
        if self.steps_per_s < 0:
            raise InvalidOptionError(f"must be at least 0, got {self.steps_per_s}", field="options.steps_per_s")


class AutoPlanner:
    """Takes the fastest of the greedy plans and the trained policy's, and improves it until the time is over."""

    name: ClassVar[str] = "auto"
    summary: ClassVar[str] = "The best of the greedy plans and the trained policy's, improved by local search."
    options_type: ClassVar[type] = AutoOptions

    def plan(self, request: PlanRequest) -> ShardingPlan:
        """Makes a plan, without prediction or provenance."""
        started_s = time.perf_counter()
        options = parse_options(AutoOptions, request.options)
        problem = PlacementProblem.table_wise(request.tables, request.topology, request.costs.kernel)
        starts = _starts(problem, request, options)
        best = min(starts, key=lambda ranks_N: float(problem.rank_ms(ranks_N).max()))
        on_time_s = max(started_s, time.perf_counter() - _STARTS_SHARE * request.time_limit_s)
        result = improve(
            problem,
            best,
            seed=request.seed,
            num_steps=round(options.steps_per_s * request.time_limit_s),
            deadline_s=on_time_s + request.time_limit_s,
        )
        _log.info("%s after %d steps: %.4g ms", result.stopped, result.num_steps, result.max_ms)
        return problem.to_plan(result.ranks_N)


def _starts(problem: PlacementProblem, request: PlanRequest, options: AutoOptions) -> list[RankArray]:
    starts: list[RankArray] = []
    failures: list[InfeasiblePlanError] = []
    for heuristic in _HEURISTICS:
        try:
            starts.append(repair(problem, heuristic.place(problem, request.seed), request.seed))
        except InfeasiblePlanError as error:
            failures.append(error)
    if options.policy and POLICY in planner_names():
        try:
            plan = get_planner(POLICY).plan(replace(request, options={}))
        except (ModelError, InfeasiblePlanError) as error:
            _log.info("no start from the policy: %s", error)
        else:
            starts.append(problem.ranks_of(plan))
    if not starts:
        raise failures[0]
    return starts
