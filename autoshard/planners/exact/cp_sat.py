"""Exact optimisation with OR-tools' CP-SAT of a linearised cost model, for small tasks.

Shape suffixes: N items, R ranks, H width of a code.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from autoshard import __version__
from autoshard.core import Provenance, ShardingPlan
from autoshard.core.accepted import ABOVE_0, AT_LEAST_0
from autoshard.core.errors import InfeasiblePlanError, ModelError
from autoshard.planners.heuristics.karmarkar_karp import KarmarkarKarpPlanner
from autoshard.planners.planner import PlanRequest, parse_options
from autoshard.planners.space.feasibility import repair
from autoshard.planners.space.placement import PlacementProblem, RankArray

if TYPE_CHECKING:
    from autoshard.core.costs import MsArray

#: Largest time in the whole numbers that CP-SAT works with: parts in a million of a rank's time.
_RESOLUTION = 1_000_000
_GAP = 1e-4
#: Share of the time limit for the first, global problem.
_FIRST_SHARE = 0.5
#: Share of the items that may change places in a refinement, at least `_MIN_CHANGES`.
_TRUST_SHARE, _MIN_CHANGES = 0.25, 2

#: Seconds after which a search that was asked to stop ends.
_ASKED_EVERY_S = 0.1

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class CpSatOptions:
    """Options of the `cp-sat` planner."""

    refinements: int = field(
        default=4,
        metadata={"help": "Times that costs are made linear anew, around the best plan so far, and solved again."},
    )
    effort: float = field(
        default=2.0,
        metadata={
            "help": "Work for each solve, in CP-SAT's deterministic units (about seconds). A machine that does it "
            "within the time limit always makes the same plan."
        },
    )

    def __post_init__(self) -> None:
        AT_LEAST_0.check_fields(self, "refinements", within="options.")
        ABOVE_0.check_fields(self, "effort", within="options.")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Linear:
    """Ranks' times as linear functions of which items they hold.

    Attributes:
        base_ms_R: Time of each rank without any item.
        item_ms_NR: What each item adds.
        near_N: A placement that the functions were made at, to start from.
        max_changes: Most items that may be elsewhere than there; None for all.
    """

    base_ms_R: MsArray
    item_ms_NR: MsArray
    near_N: RankArray | None
    max_changes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Solved:
    """What CP-SAT found: a placement, if any, and what no placement can be below in the linear problem."""

    ranks_N: RankArray | None
    bound_ms: float


class CpSatPlanner:
    """Minimises the slowest rank's time with CP-SAT: first with the tables' own costs, then near the best plan so far.

    The cost model need not add up, so the first problem, whose bound is proven, has the costs of the tables alone,
    scaled to what ranks of a heuristic plan cost on average. Then costs are linearised around the best plan met, at
    what each table adds to each rank, and a share of the tables may change places; a plan counts by its true price.

    Source:
        Perron and Didier, CP-SAT (OR-tools 9.15). The refinement is sequential linear programming with a trust region.
    """

    name: ClassVar[str] = "cp-sat"
    summary: ClassVar[str] = "Exact optimisation of linearised costs with OR-tools; for small tasks."
    when: ClassVar[str] = "small tasks; needs `pip install 'autoshard[exact]'`"
    options_type: ClassVar[type] = CpSatOptions

    def plan(self, request: PlanRequest) -> ShardingPlan:
        """Makes a plan, without prediction; its provenance says what was proven.

        Raises:
            ModelError: If OR-tools is not installed.
            InfeasiblePlanError: If no placement within the memory limits was found.
            InvalidOptionError: If an option is unknown or out of range.
        """
        deadline_s = request.deadline_s()
        options = parse_options(CpSatOptions, request.options)
        problem = PlacementProblem.table_wise(request.tables, request.topology, request.costs.kernel, request.payload)
        start_N, failure = _start(problem, request.seed)
        search = _CpSat(problem, options, request.seed, deadline_s, request.is_stopped)
        first = search.solve(_alone(problem, start_N), request.time_limit_s * _FIRST_SHARE)
        found = [ranks_N for ranks_N in (start_N, first.ranks_N) if ranks_N is not None]
        if not found:
            raise failure or InfeasiblePlanError("no placement within the memory limits was found in time")
        best_N = min(found, key=lambda ranks_N: float(problem.rank_ms(ranks_N).max()))
        best_N = search.refine(best_N)
        best_ms = float(problem.rank_ms(best_N).max())
        status = f"slowest rank {best_ms:.6g} ms; with costs made linear no plan is below {first.bound_ms:.6g} ms"
        _log.info("cp-sat: %s", status)
        provenance = Provenance(
            planner=self.name, version=__version__, seed=request.seed, models={"linearised bound": status}
        )
        plan = problem.to_plan(best_N)
        return replace(plan, provenance=provenance)


def _start(problem: PlacementProblem, seed: int) -> tuple[RankArray | None, InfeasiblePlanError | None]:
    try:
        return repair(problem, KarmarkarKarpPlanner().place(problem, seed), seed), None
    except InfeasiblePlanError as error:
        return None, error


def _alone(problem: PlacementProblem, near_N: RankArray | None) -> _Linear:
    """Every item at its own price, scaled so that a heuristic placement costs what it does."""
    own_ms = float(problem.kernel_ms_N.sum())
    factor = float(problem.rank_ms(near_N).sum()) / own_ms if near_N is not None and own_ms > 0 else 1.0
    return _Linear(
        base_ms_R=np.zeros(problem.num_ranks),
        item_ms_NR=np.repeat(factor * problem.kernel_ms_N[:, None], problem.num_ranks, axis=1),
        near_N=near_N,
    )


def _around(problem: PlacementProblem, ranks_N: RankArray, max_changes: int) -> _Linear:
    """Every item at what it adds to each rank that lacks it, and saves the one that has it."""
    codes_RH = problem.rank_codes(ranks_N)
    cost_ms_R = problem.rank_ms(ranks_N)
    item_ms_NR = np.empty((problem.num_items, problem.num_ranks))
    for rank in range(problem.num_ranks):
        sign_N = np.where(ranks_N == rank, np.float32(-1), np.float32(1))
        with_ms_N = problem.model.predict_ms(codes_RH[rank] + sign_N[:, None] * problem.codes_NH)
        item_ms_NR[:, rank] = sign_N * (with_ms_N - cost_ms_R[rank])
    held_ms_R = np.bincount(ranks_N, weights=item_ms_NR[np.arange(len(ranks_N)), ranks_N], minlength=problem.num_ranks)
    return _Linear(base_ms_R=cost_ms_R - held_ms_R, item_ms_NR=item_ms_NR, near_N=ranks_N, max_changes=max_changes)


class _CpSat:
    """Solves linear problems with one worker, within limits of work and of time."""

    def __init__(
        self,
        problem: PlacementProblem,
        options: CpSatOptions,
        seed: int,
        deadline_s: float,
        is_stopped: Callable[[], bool],
    ) -> None:
        self._problem = problem
        self._options = options
        self._seed = seed
        self._deadline_s, self._is_stopped = deadline_s, is_stopped
        self._cp_model = load_cp_model()

    def refine(self, best_N: RankArray) -> RankArray:
        """A placement that is no slower, from problems made linear around the best one."""
        problem = self._problem
        best_ms = float(problem.rank_ms(best_N).max())
        changes = max(_MIN_CHANGES, round(_TRUST_SHARE * problem.num_items))
        for _ in range(self._options.refinements):
            left_s = self._deadline_s - time.perf_counter()
            if left_s <= 0 or changes < _MIN_CHANGES or self._is_stopped():
                break
            found_N = self.solve(_around(problem, best_N, changes), left_s).ranks_N
            found_ms = np.inf if found_N is None else float(problem.rank_ms(found_N).max())
            if found_N is not None and found_ms < best_ms:
                best_N, best_ms = found_N, found_ms
            else:
                changes //= 2
        return best_N

    def solve(self, linear: _Linear, seconds: float) -> _Solved:
        """The placement whose slowest rank is fastest in a linear problem."""
        problem = self._problem
        model = self._cp_model.CpModel()
        holds = {
            (item, rank): model.new_bool_var("")
            for item in range(problem.num_items)
            for rank in np.flatnonzero(problem.allowed_NR[item]).tolist()
        }
        unit_ms = max(float(np.abs(linear.item_ms_NR).sum(axis=0).max()), 1e-12) / _RESOLUTION
        base_R, item_NR = (np.rint(value / unit_ms).astype(np.int64) for value in (linear.base_ms_R, linear.item_ms_NR))
        slowest = model.new_int_var(0, 2 * _RESOLUTION, "")
        for item in range(problem.num_items):
            model.add_exactly_one(holds[item, rank] for rank in range(problem.num_ranks) if (item, rank) in holds)
        for rank in range(problem.num_ranks):
            mine = [(item, holds[item, rank]) for item in range(problem.num_items) if (item, rank) in holds]
            variables = [variable for _, variable in mine]
            times = [int(item_NR[item, rank]) for item, _ in mine]
            model.add(self._sum(variables, times) + int(base_R[rank]) <= slowest)
            sizes = [int(problem.bytes_N[item]) for item, _ in mine]
            if sum(sizes) > problem.capacity_R[rank]:
                model.add(self._sum(variables, sizes) <= int(problem.capacity_R[rank]))
        if linear.near_N is not None:
            kept = [holds[item, int(rank)] for item, rank in enumerate(linear.near_N)]
            for (item, rank), variable in holds.items():
                model.add_hint(variable, bool(linear.near_N[item] == rank))
            if linear.max_changes is not None:
                model.add(sum(kept) >= problem.num_items - linear.max_changes)
        model.minimize(slowest)
        return self._solve(model, holds, unit_ms, seconds)

    def _sum(self, variables: list[Any], weights: list[int]) -> Any:
        return self._cp_model.LinearExpr.weighted_sum(variables, weights)

    def _solve(self, model: Any, holds: dict[tuple[int, int], Any], unit_ms: float, seconds: float) -> _Solved:
        solver = self._cp_model.CpSolver()
        solver.parameters.num_workers = 1
        solver.parameters.random_seed = self._seed % (1 << 31)
        solver.parameters.relative_gap_limit = _GAP
        solver.parameters.max_deterministic_time = self._options.effort
        solver.parameters.max_time_in_seconds = max(seconds, 1e-3)
        with _stopped_when(self._is_stopped, solver):
            status = solver.solve(model)
        bound_ms = float(solver.best_objective_bound) * unit_ms
        if status not in (self._cp_model.OPTIMAL, self._cp_model.FEASIBLE):
            return _Solved(ranks_N=None, bound_ms=bound_ms)
        ranks_N = np.zeros(self._problem.num_items, dtype=np.int64)
        for (item, rank), variable in holds.items():
            if solver.boolean_value(variable):
                ranks_N[item] = rank
        return _Solved(ranks_N=ranks_N, bound_ms=bound_ms)


@contextmanager
def _stopped_when(is_stopped: Callable[[], bool], solver: Any) -> Iterator[None]:
    """Ends a solver's search, which keeps what it has found, soon after it is asked to stop."""
    is_over = threading.Event()

    def watch() -> None:
        while not is_over.wait(_ASKED_EVERY_S):
            if is_stopped():
                solver.stop_search()

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def load_cp_model() -> Any:
    """OR-tools' module of CP-SAT.

    Raises:
        ModelError: If OR-tools is not installed.
    """
    try:
        from ortools.sat.python import cp_model
    except ImportError as error:
        raise ModelError(
            f"OR-tools cannot be imported ({error}): pip install 'autoshard[exact]'", field="planner"
        ) from error
    return cp_model
