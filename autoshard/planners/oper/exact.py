"""The parallelization of least exchange, by OR-tools' CP-SAT: what OPER's heuristics are measured against.

Shape suffixes: N row groups, R ranks.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from autoshard.core.accepted import ABOVE_0
from autoshard.core.access import FloatArray, IntArray
from autoshard.core.costs import MsArray
from autoshard.core.errors import InfeasiblePlanError, ModelError
from autoshard.planners.oper.cost_matrix import PathArray, exchange_ms

#: Costs in the whole numbers that CP-SAT works with: parts in so many of all lookups over the slowest link.
_RESOLUTION = 10_000_000
_NUM_SEARCHES = 8


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ExactTask:
    """Groups to be placed and copied.

    Attributes:
        lookups_N: Lookups of each group per rank and step (A), in rows of average size.
        bytes_N: Bytes of each group.
        capacity_R: Bytes that each rank may hold, copies included.
        extra_bytes: Bytes of all copies beyond the first of each group.
        fetch_ms_RR: L.
    """

    lookups_N: FloatArray
    bytes_N: IntArray
    capacity_R: IntArray
    extra_bytes: int
    fetch_ms_RR: MsArray

    @property
    def num_ranks(self) -> int:
        """Ranks."""
        return len(self.capacity_R)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ExactPaths:
    """What CP-SAT found.

    Attributes:
        paths_NR: The rank from which each rank reads each group.
        max_ms: The most loaded rank's exchange.
        bound_ms: No parallelization of these groups has less.
    """

    paths_NR: PathArray
    max_ms: float
    bound_ms: float


def rank_exchange_ms(paths_NR: PathArray, lookups_N: FloatArray, fetch_ms_RR: MsArray) -> MsArray:
    """Cost of each rank's exchange, shape (R,): of what it fetches or of what it serves, whichever is more (Eq. 3)."""
    links_RR = exchange_ms(paths_NR, lookups_N, fetch_ms_RR)
    np.fill_diagonal(links_RR, 0.0)
    return np.asarray(np.maximum(links_RR.sum(axis=0), links_RR.sum(axis=1)))


def least_exchange(
    task: ExactTask, near_NR: PathArray | None = None, *, effort: float = 60.0, seed: int = 0
) -> ExactPaths:
    """The paths whose most loaded rank has the least exchange, as far as the effort reaches.

    Args:
        task: What to place.
        near_NR: Paths to start from, such as a heuristic's.
        effort: Work in CP-SAT's deterministic units, about seconds on one core.
        seed: Seed of the solver.

    Raises:
        ModelError: If OR-tools is not installed.
        InvalidOptionError: If the effort is not positive.
        InfeasiblePlanError: If nothing was found that fits.

    Source:
        OPER Sec. 3.2 and 3.3: Eq. 1 to 3 as a mixed-integer linear problem, solved with Gurobi in Table 3.
    """
    ABOVE_0.check(effort, "effort")
    model = _Model(task)
    if near_NR is not None:
        model.start_from(near_NR)
    return model.solve(effort, seed)


class _Model:
    """Binary variables P_n[i][j], and who holds what."""

    def __init__(self, task: ExactTask) -> None:
        self.task = task
        self.cp_model = _load_cp_model()
        self.model = self.cp_model.CpModel()
        groups, ranks = range(len(task.lookups_N)), range(task.num_ranks)
        self.holds = [[self.model.new_bool_var("") for _ in ranks] for _ in groups]
        # A rank that holds a group reads its own; without copies all read the one that holds it.
        is_single = task.extra_bytes < int(task.bytes_N.min())
        self.reads = [
            [
                [self.holds[group][j] if i == j or is_single else self.model.new_bool_var("") for j in ranks]
                for i in ranks
            ]
            for group in groups
        ]
        self._constrain()
        links_RR = np.where(np.eye(task.num_ranks, dtype=np.bool_), 0.0, task.fetch_ms_RR)
        cost_NRR = task.lookups_N[:, None, None] * links_RR
        self.unit_ms = max(float(task.lookups_N.sum() * links_RR.sum(axis=0).max()), 1e-12) / _RESOLUTION
        self._minimise(np.rint(cost_NRR / self.unit_ms).astype(np.int64))

    def _constrain(self) -> None:
        task, model = self.task, self.model
        for holds_R, reads_RR in zip(self.holds, self.reads, strict=True):
            model.add_bool_or(holds_R)
            for reads_R in reads_RR:
                model.add_exactly_one(reads_R)
                for reads, holds in zip(reads_R, holds_R, strict=True):
                    if reads is not holds:
                        model.add_implication(reads, holds)
        # Bytes are large numbers: multiples of a thousandth of the extra bytes are exact enough, rounded up.
        unit = max(1, int(task.bytes_N.sum()) // _RESOLUTION)
        bytes_N = [-(-int(size) // unit) for size in task.bytes_N]
        for rank, capacity in enumerate(task.capacity_R.tolist()):
            held = [holds_R[rank] for holds_R in self.holds]
            if capacity < int(task.bytes_N.sum()):
                model.add(self._sum(held, bytes_N) <= capacity // unit)
        everywhere = [holds for holds_R in self.holds for holds in holds_R]
        repeated = [size for size in bytes_N for _ in range(task.num_ranks)]
        model.add(self._sum(everywhere, repeated) <= sum(bytes_N) + task.extra_bytes // unit)

    def _minimise(self, cost_NRR: IntArray) -> None:
        most = self.model.new_int_var(0, 2 * _RESOLUTION, "")
        ranks = range(self.task.num_ranks)
        for rank in ranks:
            for pairs in ([(rank, other) for other in ranks], [(other, rank) for other in ranks]):
                terms = [
                    (reads_RR[i][j], int(cost_RR[i, j]))
                    for reads_RR, cost_RR in zip(self.reads, cost_NRR, strict=True)
                    for i, j in pairs
                    if i != j
                ]
                self.model.add(self._sum([read for read, _ in terms], [cost for _, cost in terms]) <= most)
        self.model.minimize(most)

    def _sum(self, variables: Sequence[Any], weights: Sequence[int]) -> Any:
        return self.cp_model.LinearExpr.weighted_sum(variables, weights)

    def start_from(self, paths_NR: PathArray) -> None:
        """Hints at a parallelization."""
        hints = {
            reads.index: (reads, j == path)
            for reads_RR, paths_R in zip(self.reads, paths_NR.tolist(), strict=True)
            for reads_R, path in zip(reads_RR, paths_R, strict=True)
            for j, reads in enumerate(reads_R)
        }
        for reads, value in hints.values():
            self.model.add_hint(reads, value)

    def solve(self, effort: float, seed: int) -> ExactPaths:
        """Solves it with one worker."""
        task, ranks = self.task, range(self.task.num_ranks)
        solver = self.cp_model.CpSolver()
        # Several searches take turns on one core: one alone finds little where ranks are alike.
        solver.parameters.num_workers = _NUM_SEARCHES
        solver.parameters.interleave_search = True
        solver.parameters.random_seed = seed % (1 << 31)
        solver.parameters.max_deterministic_time = effort
        status = solver.solve(self.model)
        if status not in (self.cp_model.OPTIMAL, self.cp_model.FEASIBLE):
            raise InfeasiblePlanError("no parallelization within the memory limits was found in time")
        paths_NR = np.array(
            [[next(j for j in ranks if solver.boolean_value(reads_RR[i][j])) for i in ranks] for reads_RR in self.reads]
        )
        found_ms_R = rank_exchange_ms(paths_NR, task.lookups_N, task.fetch_ms_RR)
        return ExactPaths(
            paths_NR=paths_NR,
            max_ms=float(found_ms_R.max()),
            bound_ms=float(solver.best_objective_bound) * self.unit_ms,
        )


def _load_cp_model() -> Any:
    try:
        return importlib.import_module("ortools.sat.python.cp_model")
    except ImportError as error:
        raise ModelError(f"needs OR-tools, which is in autoshard[exact] ({error})", field="exact") from error
