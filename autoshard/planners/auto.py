"""The best plan known: every start there is, then local search on the cost model."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from autoshard import __version__
from autoshard.core import Provenance, ShardingPlan
from autoshard.core.errors import InfeasiblePlanError, InvalidOptionError, ModelError
from autoshard.planners.cuts import CUTS, with_costly_cut
from autoshard.planners.feasibility import repair
from autoshard.planners.greedy import (
    CostGreedyPlanner,
    DimGreedyPlanner,
    LookupGreedyPlanner,
    PlacementPlanner,
    SizeGreedyPlanner,
)
from autoshard.planners.karmarkar_karp import KarmarkarKarpPlanner
from autoshard.planners.placement import PlacementProblem, RankArray
from autoshard.planners.planner import PlanRequest, parse_options
from autoshard.planners.registry import get_planner, planner_names
from autoshard.planners.search import SearchResult, improve

#: The trained policy, if the package that has it is installed.
POLICY = "policy"

_HEURISTICS: tuple[PlacementPlanner, ...] = (
    CostGreedyPlanner(),
    KarmarkarKarpPlanner(),
    LookupGreedyPlanner(),
    DimGreedyPlanner(),
    SizeGreedyPlanner(),
)
#: Share of the time limit that starts may use. If they take longer (the first call loads a trained model), the search
#: still gets the rest in full.
_STARTS_SHARE = 0.3
# About what the policy takes once it is loaded: seconds per item, and per item and rank. Planning took 0.07 s for 80
# tables on 8 ranks, 0.67 s for 800 on 16, 0.72 s for 800 on 80 (CPU time of `get_planner("policy").plan`, one core of a
# Xeon, November 2026).
_POLICY_ITEM_S, _POLICY_CHOICE_S = 1e-3, 1e-6

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoOptions:
    """Options of the `auto` planner."""

    steps: int = field(
        default=0,
        metadata={
            "help": "Most steps of the search; 0 for as many as the time limit allows. With a number, the same seed "
            "gives the same plan on every machine that makes them in time."
        },
    )
    policy: bool = field(
        default=True, metadata={"help": "Also start from the trained policy's plan, if the registry has one."}
    )
    split: str = field(
        default="none",
        metadata={
            "help": "How tables that alone keep their ranks the slowest may be cut in halves: none, columns, or rows. "
            "Halves by columns have row-wise optimizer state of their own, which changes training a little."
        },
    )

    def __post_init__(self) -> None:
        if self.steps < 0:
            raise InvalidOptionError(f"must be at least 0, got {self.steps}", field="options.steps")
        if self.split not in CUTS:
            raise InvalidOptionError(f"must be any of {', '.join(CUTS)}, got {self.split!r}", field="options.split")


class AutoPlanner:
    """Takes the fastest of the heuristics' plans and the trained policy's, and improves it until the time is over.

    The policy is asked where it is thought to be done within its share of the time; the plan's provenance names it
    then.
    """

    name: ClassVar[str] = "auto"
    summary: ClassVar[str] = "The best of the heuristics' plans and the trained policy's, improved by local search."
    options_type: ClassVar[type] = AutoOptions

    def plan(self, request: PlanRequest) -> ShardingPlan:
        """Makes a plan, without prediction; its provenance says how far from the bound the search ended."""
        started_s = time.perf_counter()
        options = parse_options(AutoOptions, request.options)
        problem = PlacementProblem.table_wise(request.tables, request.topology, request.costs.kernel)
        starts, models = _starts(problem, request, options, started_s)
        on_time_s = max(started_s, time.perf_counter() - _STARTS_SHARE * request.time_limit_s)
        deadline_s = on_time_s + request.time_limit_s
        result = _search(problem, starts, request, options, deadline_s)
        if options.split != "none":
            problem, result = _cut(problem, result, request, options, deadline_s)
        said = _describe(result)
        _log.info("auto: %s", said)
        provenance = Provenance(
            planner=self.name, version=__version__, seed=request.seed, models={**models, "search": said}
        )
        return replace(problem.to_plan(result.ranks_N), provenance=provenance)


def _search(
    problem: PlacementProblem,
    starts: Sequence[RankArray],
    request: PlanRequest,
    options: AutoOptions,
    deadline_s: float,
) -> SearchResult:
    return improve(
        problem, starts, seed=request.seed, deadline_s=deadline_s, max_steps=options.steps if options.steps else None
    )


def _cut(
    problem: PlacementProblem,
    result: SearchResult,
    request: PlanRequest,
    options: AutoOptions,
    deadline_s: float,
) -> tuple[PlacementProblem, SearchResult]:
    """Where tables alone bound the slowest rank, cuts them and searches again; the better of both."""
    if result.stopped != "bound" or problem.num_ranks == 1:
        return problem, result
    limit_ms = float(problem.rank_ms(result.ranks_N).mean())
    finer = with_costly_cut(problem, limit_ms, options.split)
    if finer is None:
        return problem, result
    start_N = repair(finer, CostGreedyPlanner().place(finer, request.seed), request.seed)
    found = _search(finer, [start_N], request, options, deadline_s)
    return (finer, found) if found.max_ms < result.max_ms else (problem, result)


def _describe(result: SearchResult) -> str:
    gap = f"{100 * result.gap:.2g}% above" if math.isfinite(result.gap) and result.gap > 0 else "at"
    return (
        f"stopped by {result.stopped} after {result.num_steps} steps, slowest rank {result.max_ms:.6g} ms, "
        f"{gap} an estimated bound of {result.bound_ms:.6g} ms"
    )


def _starts(
    problem: PlacementProblem, request: PlanRequest, options: AutoOptions, started_s: float
) -> tuple[list[RankArray], dict[str, str]]:
    """Placements to search from, and the names of the trained models that made some of them."""
    starts: list[RankArray] = []
    failures: list[InfeasiblePlanError] = []
    for heuristic in _HEURISTICS:
        try:
            starts.append(repair(problem, heuristic.place(problem, request.seed), request.seed))
        except InfeasiblePlanError as error:
            failures.append(error)
    # Whatever its time, the policy is the last hope where no heuristic found a start.
    left_s = started_s + _STARTS_SHARE * request.time_limit_s - time.perf_counter() if starts else math.inf
    plan = _policy_plan(problem, request, left_s) if options.policy else None
    if plan is not None:
        starts.append(problem.ranks_of(plan))
    if not starts:
        raise failures[0]
    return starts, dict(plan.provenance.models) if plan is not None and plan.provenance is not None else {}


def _policy_plan(problem: PlacementProblem, request: PlanRequest, left_s: float) -> ShardingPlan | None:
    """The trained policy's plan; None if there is no policy, or probably no time for it."""
    needed_s = problem.num_items * (_POLICY_ITEM_S + _POLICY_CHOICE_S * problem.num_ranks)
    if needed_s > left_s:
        _log.info("no start from a policy: it takes about %.2g s, and %.2g s are left for it", needed_s, left_s)
        return None
    if POLICY not in planner_names():
        return None
    try:
        return get_planner(POLICY).plan(replace(request, options={}))
    except (ModelError, InfeasiblePlanError) as error:
        _log.info("no start from the policy: %s", error)
        return None
