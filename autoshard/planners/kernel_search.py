"""The plan of whole tables on single ranks whose slowest rank has the shortest kernels: starts, then local search."""

from __future__ import annotations

import logging
import math
import time
from dataclasses import replace

from autoshard import __version__
from autoshard.core import Provenance, ShardingPlan
from autoshard.core.errors import InfeasiblePlanError
from autoshard.planners.comparison import best_placement
from autoshard.planners.heuristics.greedy import (
    CostGreedyPlanner,
    DimGreedyPlanner,
    LookupGreedyPlanner,
    PlacementPlanner,
    SizeGreedyPlanner,
)
from autoshard.planners.heuristics.karmarkar_karp import KarmarkarKarpPlanner
from autoshard.planners.hybrid.starts import POLICY, asked_plans
from autoshard.planners.planner import PlanRequest
from autoshard.planners.search import SearchResult, improve
from autoshard.planners.space.feasibility import repair
from autoshard.planners.space.placement import PlacementProblem, RankArray, is_table_wise
from autoshard.planners.warm_start import start_of

_HEURISTICS: tuple[PlacementPlanner, ...] = (
    CostGreedyPlanner(),
    KarmarkarKarpPlanner(),
    LookupGreedyPlanner(),
    DimGreedyPlanner(),
    SizeGreedyPlanner(),
)
#: Share of the time left, once tables are priced, in which starts have to be made; the search has the rest.
_STARTS_SHARE = 0.3
_START_TAKEN = "a start is taken, whose slowest rank is as fast if the model is off as it was on samples kept from it"
_log = logging.getLogger(__name__)


def plan_by_kernel(request: PlanRequest, *, steps: int, with_policy: bool) -> ShardingPlan:
    """Takes the fastest of the heuristics' plans and the trained policy's, and improves it until the time is over.

    The policy is asked where it is thought to be done within its share of the time; the plan's provenance names it
    then, and says how the search ended.

    Args:
        request: The task; its options are not used.
        steps: Most steps of the search; 0 for as many as there is time for.
        with_policy: Whether the policy may be asked.
    """
    deadline_s = request.deadline_s()
    problem = PlacementProblem.table_wise(request.tables, request.topology, request.costs.kernel, request.payload)
    now_s = time.perf_counter()
    # Where steps are counted, the clock decides nothing but the end.
    until_s = math.inf if steps else now_s + _STARTS_SHARE * max(0.0, deadline_s - now_s)
    starts, models = _starts(problem, request, with_policy, until_s)
    result = improve(problem, starts, seed=request.seed, deadline_s=deadline_s, max_steps=steps or None)
    placements = [result.ranks_N, *starts]
    chosen = best_placement(problem, placements)
    status = _describe(result) if not chosen else f"{_describe(result)}; {_START_TAKEN}"
    _log.info("auto: %s", status)
    provenance = Provenance(planner="auto", version=__version__, seed=request.seed, models={**models, "search": status})
    return replace(problem.to_plan(placements[chosen or 0]), provenance=provenance)


def _describe(result: SearchResult) -> str:
    return f"stopped by {result.stopped} after {result.num_steps} steps, slowest rank {result.max_ms:.6g} ms"


def _starts(
    problem: PlacementProblem, request: PlanRequest, with_policy: bool, until_s: float
) -> tuple[list[RankArray], dict[str, str]]:
    """Placements to search from, and the names of the trained models that made some of them."""
    starts: list[RankArray] = []
    failures: list[InfeasiblePlanError] = []
    for heuristic in _HEURISTICS:
        if starts and time.perf_counter() >= until_s:
            break
        try:
            starts.append(repair(problem, heuristic.place(problem, request.seed), request.seed))
        except InfeasiblePlanError as error:
            failures.append(error)
    # Whatever its time, the policy is the last hope where no heuristic found a start.
    share = _STARTS_SHARE if starts else math.inf
    asked = [replace(POLICY, share=share)] if with_policy else []
    plan = asked_plans(request, asked, until_s if starts else math.inf).get(POLICY.name)
    if plan is not None:
        starts.append(problem.ranks_of(plan))
    given = start_of(request)
    if given is not None and is_table_wise(given):
        starts.append(problem.ranks_of(given))
    elif given is not None:
        _log.warning("auto: the start is left out, it does not hold every table whole on one rank")
    if not starts:
        raise failures[0]
    return starts, dict(plan.provenance.models) if plan is not None and plan.provenance is not None else {}
