"""The parallelization of least exchange, by OR-tools' CP-SAT: what OPER's heuristics are measured against.

Shape suffixes: N row groups, R ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from autoshard.core.accepted import ABOVE_0
from autoshard.core.access import FloatArray, IntArray
from autoshard.core.costs import MsArray
from autoshard.core.errors import InfeasiblePlanError
from autoshard.planners.exact.cp_sat import load_cp_model
from studies.papers.oper.equations import PathArray, exchange_ms

#: Costs in the whole numbers that CP-SAT works with: all lookups over the slowest link cost so many.
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


def least_exchange(task: ExactTask, *, effort: float = 60.0, seed: int = 0) -> ExactPaths:
    """The paths whose most loaded rank has the least exchange, as far as the effort reaches.

    Args:
        task: What to place.
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
    cp_model = load_cp_model()
    model = cp_model.CpModel()
    reads = _add_paths(model, task)
    unit_ms = _minimise(model, reads, task)
    solver = cp_model.CpSolver()
    # Several searches take turns on one core: one alone finds little where ranks are alike.
    solver.parameters.num_workers = _NUM_SEARCHES
    solver.parameters.interleave_search = True
    solver.parameters.random_seed = seed % (1 << 31)
    solver.parameters.max_deterministic_time = effort
    if solver.solve(model) not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        raise InfeasiblePlanError("no parallelization within the memory limits was found in time")
    paths_NR = np.array(
        [[list(map(solver.boolean_value, reads_R)).index(True) for reads_R in reads_RR] for reads_RR in reads]
    )
    found_ms_R = rank_exchange_ms(paths_NR, task.lookups_N, task.fetch_ms_RR)
    bound_ms = float(solver.best_objective_bound) * unit_ms
    return ExactPaths(paths_NR=paths_NR, max_ms=float(found_ms_R.max()), bound_ms=bound_ms)


def _add_paths(model: Any, task: ExactTask) -> list[list[list[Any]]]:
    """Adds the binary variables P_n[i][j], of which a rank has one for each group, and the limits of memory."""
    groups, ranks = range(len(task.lookups_N)), range(len(task.capacity_R))
    holds = [[model.new_bool_var("") for _ in ranks] for _ in groups]
    # A rank that holds a group reads its own; without copies all read the one that holds it.
    is_single = task.extra_bytes < int(task.bytes_N.min())
    reads = [
        [[holds_R[j] if i == j or is_single else model.new_bool_var("") for j in ranks] for i in ranks]
        for holds_R in holds
    ]
    for holds_R, reads_RR in zip(holds, reads, strict=True):
        model.add_bool_or(holds_R)
        for reads_R in reads_RR:
            model.add_exactly_one(reads_R)
            for read, held in zip(reads_R, holds_R, strict=True):
                if read is not held:
                    model.add_implication(read, held)
    # Bytes are large numbers: in units of which all bytes are so many, rounded up, they are exact enough.
    unit = max(1, int(task.bytes_N.sum()) // _RESOLUTION)
    bytes_N = [-(-int(size) // unit) for size in task.bytes_N]
    held_bytes = [sum(size * held[rank] for size, held in zip(bytes_N, holds, strict=True)) for rank in ranks]
    for held, capacity in zip(held_bytes, task.capacity_R.tolist(), strict=True):
        if capacity < int(task.bytes_N.sum()):
            model.add(held <= capacity // unit)
    model.add(sum(held_bytes) <= sum(bytes_N) + task.extra_bytes // unit)
    return reads


def _minimise(model: Any, reads: list[list[list[Any]]], task: ExactTask) -> float:
    """Asks for the least exchange of the most loaded rank; the milliseconds that one unit of it stands for."""
    links_RR = task.fetch_ms_RR.copy()
    np.fill_diagonal(links_RR, 0.0)
    unit_ms = max(float(task.lookups_N.sum() * links_RR.sum(axis=0).max()), 1e-12) / _RESOLUTION
    costs_NRR = np.rint(task.lookups_N[:, None, None] * links_RR / unit_ms).astype(np.int64).tolist()
    most = model.new_int_var(0, 2 * _RESOLUTION, "")
    ranks = range(len(links_RR))
    for rank in ranks:
        others = [other for other in ranks if other != rank]
        for pairs in ([(rank, other) for other in others], [(other, rank) for other in others]):
            both = list(zip(reads, costs_NRR, strict=True))
            model.add(sum(cost_RR[i][j] * reads_RR[i][j] for reads_RR, cost_RR in both for i, j in pairs) <= most)
    model.minimize(most)
    return unit_ms
